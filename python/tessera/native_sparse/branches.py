# SPDX-License-Identifier: Apache-2.0
"""The branches of native sparse attention as calls of attention."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..attention import attention, attention_backward
from ..tiles import TileList
from .operations import Heads, Reduce, Score, Visible, compressed_blocks

Array = Any


class NsaOptions(NamedTuple):
    """What the presets set; `nsa` takes each by keyword too. docs/nsa.md defines them."""

    length: int = 64
    stride: int = 64
    block: int = 64
    top: int = 16
    tile: int | None = None  # 128 // group
    heads: Heads = "kv"
    score: Score = "dot"
    reduce: Reduce = "first"
    visible: Visible = "complete"
    initial: int = 1
    local: int = 2
    window: int = 512
    compressed_top: int = 0  # all compressed keys
    compressed_block: int = 64


class NsaCall(NamedTuple):
    """A call of `nsa` whose options are known."""

    options: NsaOptions
    tile: int
    causal: bool
    scale: float | None
    max_seqlen: int | None
    threads: int
    deterministic: bool


def branch_options(
    call: NsaCall, tiles: tuple[TileList, TileList | None], cu_seqlens: Array | None, cu_blocks: Array | None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Keywords of `attention` for the compressed, selected and window branches. cu_blocks: where the compressed keys of
    packed sequences begin."""
    o = call.options
    common = {"scale": call.scale, "threads": call.threads, "deterministic": call.deterministic}
    own: dict[str, Any] = {}
    compressed: dict[str, Any] = {}
    if cu_seqlens is not None and call.max_seqlen is not None:
        own = {
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k": cu_seqlens,
            "max_seqlen_q": call.max_seqlen,
            "max_seqlen_k": call.max_seqlen,
        }
        most = max(1, compressed_blocks(call.max_seqlen, o.length, o.stride))
        compressed = own | {"cu_seqlens_k": cu_blocks, "max_seqlen_k": most}
    if call.causal:
        compressed["compressed_causal"] = (o.length if o.visible == "complete" else 1, o.stride)
    if tiles[1] is not None:
        compressed["tiles"] = tiles[1]
    window = (o.window - 1, 0 if call.causal else o.window - 1)
    return (
        compressed | common,
        {"causal": call.causal, "tiles": tiles[0], **own, **common},
        {"window": window, **own, **common},
    )


def attend_branches(
    call: NsaCall,
    q: Array,
    k: Array,
    v: Array,
    pooled: tuple[Array, ...],
    tiles: tuple[TileList, TileList | None],
    cu_seqlens: Array | None,
    out: Array | None,
) -> tuple[Array, Array, Array]:
    """Results of the compressed, selected and window branches. `pooled` as nsa_pool returns it, tiles as
    select_tiles; out (3, …): memory."""
    options = branch_options(call, tiles, cu_seqlens, pooled[2] if len(pooled) > 2 else None)
    memory = (None, None, None) if out is None else (out[0], out[1], out[2])
    return (
        attention(q, pooled[0], pooled[1], out=memory[0], **options[0]),
        attention(q, k, v, out=memory[1], **options[1]),
        attention(q, k, v, out=memory[2], **options[2]),
    )


def differentiate_branch(
    options: dict[str, Any],
    dout: Array,
    q: Array,
    keys: tuple[Array, Array],
    result: tuple[Array, Array, Array | None],
    sums: tuple[Array, Array, Array],
    accumulate: bool,
) -> None:
    """Writes fp32 gradients of q and of a branch's keys and values to `sums`, or adds them. options: as branch_options
    has them; result: the branch's out, LSE and residual."""
    out, lse, residual = result
    more = {"residual": residual, "grads": sums, "accumulate": accumulate}
    attention_backward(dout, q, *keys, out, lse, **more, **options)
