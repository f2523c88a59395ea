# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention: compressed, selected and window branches, gated."""

from __future__ import annotations

from typing import Any, Literal

from .._arguments import longest
from .._checks import whole
from .._libraries import common_library, dtype_name, is_compiling
from ..tiles import TileList
from .branches import NsaCall, NsaOptions, attend_branches
from .gates import BRANCHES, nsa_gate
from .operations import nsa_pool, nsa_select

Array = Any
Preset = Literal["strict", "paper", "reference"]


PRESETS: dict[str, NsaOptions] = {
    "strict": NsaOptions(),
    "paper": NsaOptions(length=32, stride=16, tile=1, score="softmax"),
    "reference": NsaOptions(tile=256, heads="q", reduce="mean", visible="started", initial=0, local=0),
}


def options_of(preset: str, given: dict[str, Any]) -> NsaOptions:
    """Raises ValueError naming the preset, or an option that has no meaning."""
    if preset not in PRESETS:
        raise ValueError(f"preset: got {preset!r}; want one of {', '.join(PRESETS)}")
    unknown = sorted(given.keys() - set(NsaOptions._fields))
    if unknown:
        raise TypeError(f"{unknown[0]}: got a keyword that nsa has not; want one of {', '.join(NsaOptions._fields)}")
    options = PRESETS[preset]._replace(**given)
    if whole("window", options.window) < 1:
        raise ValueError(f"window: got {options.window}; want 1 key or more")
    return options


def tile_of(options: NsaOptions, heads_q: int, heads_kv: int) -> int:
    """Rows that share a list."""
    return max(1, 128 // (heads_q // heads_kv)) if options.tile is None else whole("tile", options.tile)


def call_of(
    q: Array,
    k: Array,
    options: NsaOptions,
    causal: bool,
    scale: float | None,
    cu_seqlens: Array | None,
    max_seqlen: int | None,
    threads: int,
    deterministic: bool,
) -> NsaCall:
    """Raises ValueError for shapes that are not those of one sequence's tokens."""
    rank = 3 if cu_seqlens is not None else 4
    for name, array in (("q", q), ("k", k)):
        if len(array.shape) != rank:
            sizes = "(tokens, heads, dim)" if rank == 3 else "(batch, seqlen, heads, dim), or packed with cu_seqlens"
            raise ValueError(f"{name}: got {len(array.shape)} dimensions, shape {tuple(array.shape)}; want {sizes}")
    if q.shape[:-2] != k.shape[:-2]:
        raise ValueError(
            f"k: got tokens of shape {tuple(k.shape[:-2])}; want those of q, {tuple(q.shape[:-2])}: row i is token i"
        )
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2] != 0:
        raise ValueError(f"k: got {k.shape[-2]} heads for {q.shape[-2]} query heads; want a divisor")
    tile = tile_of(options, q.shape[-2], k.shape[-2])
    if cu_seqlens is not None:
        max_seqlen = longest("cu_seqlens", cu_seqlens, max_seqlen) or q.shape[0]
    return NsaCall(options, tile, causal, scale, max_seqlen, threads, deterministic)


def select_tiles(
    call: NsaCall, q: Array, k_pooled: Array, cu_seqlens: Array | None
) -> tuple[TileList, TileList | None]:
    """The blocks of the selected branch, and with compressed_top those of compressed keys."""
    o = call.options
    if is_compiling():
        options = (o.length, o.stride, o.block, o.top, call.tile, o.heads, o.score, o.reduce, o.visible, o.initial)
        made = common_library([("q", q)]).operators.nsa_select(
            q,
            k_pooled,
            (*options, o.local, o.compressed_top, o.compressed_block, call.causal, call.scale, call.threads),
            cu_seqlens,
            call.max_seqlen,
        )
        tiles = TileList(counts=made[0], indices=made[1], block=(call.tile, o.block))
        if o.compressed_top == 0:
            return tiles, None
        return tiles, TileList(counts=made[2], indices=made[3], block=(call.tile, o.compressed_block))
    selected = nsa_select(
        q,
        k_pooled,
        length=o.length,
        stride=o.stride,
        block=o.block,
        top=o.top,
        tile=call.tile,
        heads=o.heads,
        score=o.score,
        reduce=o.reduce,
        visible=o.visible,
        initial=o.initial,
        local=o.local,
        compressed_top=o.compressed_top,
        compressed_block=o.compressed_block,
        causal=call.causal,
        scale=call.scale,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=call.max_seqlen,
        max_seqlen_k=call.max_seqlen,
        threads=call.threads,
    )
    return selected if o.compressed_top else (selected, None)


def lists_of(
    call: NsaCall,
    q: Array,
    k_pooled: Array,
    given: tuple[TileList | None, TileList | None],
    cu_seqlens: Array | None,
) -> tuple[TileList, TileList | None]:
    """The given lists, and chosen ones in place of those that a call needs and that are None."""
    tiles, compressed_tiles = given
    if tiles is not None and (compressed_tiles is not None or not call.options.compressed_top):
        return tiles, compressed_tiles
    chosen = select_tiles(call, q, k_pooled, cu_seqlens)
    return chosen[0] if tiles is None else tiles, chosen[1] if compressed_tiles is None else compressed_tiles


def nsa(
    q: Array,
    k: Array,
    v: Array,
    *,
    preset: Preset = "strict",
    causal: bool = True,
    gate_weight: Array | None = None,
    gates: Array | None = None,
    k_projection: Array | None = None,
    v_projection: Array | None = None,
    tiles: TileList | None = None,
    compressed_tiles: TileList | None = None,
    return_tiles: bool = False,
    scale: float | None = None,
    cu_seqlens: Array | None = None,
    max_seqlen: int | None = None,
    recompute: bool | None = None,
    deterministic: bool = False,
    threads: int = 0,
    **options: Any,
) -> Any:
    """Native sparse attention: g_cmp · O_cmp + g_slc · O_slc + g_win · O_win, docs/nsa.md is the definition.

    q (b, n, hq, d), k, v (b, n, hkv, d | dv), or packed (tokens, heads, dim) with cu_seqlens int32 (b + 1) and
    max_seqlen (read from it if not given): row i is token i of its sequence. hq is a multiple of hkv; d and dv are
    multiples of 8 to 512; fp32, fp16 or bf16. On a GPU fp16 and bf16, with gradients as `attention` has them.

    preset: "strict", nothing of row i depends on anything behind it; "paper" (Yuan et al. 2025: blocks of 32 every 16
    tokens, each token selects for itself); "reference", which leaks up to 63 later tokens to each row and selects by
    means over 256 queries, for comparing figures and checkpoints. **options override what a preset sets: length,
    stride, block, top, tile, heads, score, reduce, visible, initial, local, compressed_top, compressed_block
    (`nsa_select` says what they are) and window, in keys, 1 or more. tile None is 128 // (hq / hkv), at least 1.
    compressed_top 0 is all compressed keys; above 0 each tile attends to so many blocks of compressed_block of them.

    gate_weight (hq, 3, d), as q: gates are sigmoid(q · w) of each branch; gates: fp32 (b, n, hq, 3), given; neither:
    1/3. k_projection (hkv, d, d), v_projection (hkv, dv, dv): of compressed keys and values, see `nsa_pool`. tiles:
    the selected blocks, instead of choosing them, and compressed_tiles those of compressed keys; return_tiles: (out,
    tiles), with compressed_top or compressed_tiles (out, tiles, compressed_tiles), which another layer may take.

    recompute, of torch's gradients: True keeps the result of the compressed branch alone for the backward, which
    computes those of the other two again; False keeps all three; None, the default, is True where the two would take 4
    GiB or more, on a GPU only if that is more than a quarter of its free memory. docs/nsa.md says what both cost.
    deterministic: gradients are the same bits in every run, as `attention` has it of its branches; pooling, gates and
    the choice of blocks always are.

    Returns (b, n, hq, dv) in the dtype of q. torch tensors may require grad: q, k, v, gate_weight, gates and both
    projections have gradients, the choice of blocks has none. Rows that see nothing in a branch get 0 from it. Raises
    as `attention` does, ValueError naming the argument, TypeError for a keyword that there is not.

    Source: Yuan et al. 2025, Native Sparse Attention (arXiv:2502.11089), equation 5.
    """
    found = options_of(preset, options)
    call = call_of(q, k, found, causal, scale, cu_seqlens, max_seqlen, threads, deterministic)
    library = common_library([("q", q), ("k", k), ("v", v)])
    pool, gate, out = nsa_pool, nsa_gate, None
    if library.operators is not None and library.operators.wants_operators(
        q, k, v, gate_weight, gates, k_projection, v_projection
    ):
        given = (gate_weight, gates, k_projection, v_projection, cu_seqlens)
        if library.operators.nsa_is_one_node(q, k, v, given, (tiles, compressed_tiles)):
            result, *lists = library.operators.nsa(call, q, k, v, given, (tiles, compressed_tiles), recompute)
            return result if not return_tiles else (result, *(x for x in lists if x is not None))
        if recompute:
            raise NotImplementedError(
                "recompute: got True under torch.compile, a mode of torch or autocast to another dtype than that of q,"
                " k and v; want None or False, or torch.utils.checkpoint"
            )
        pool, gate = library.operators.nsa_pool, library.operators.nsa_gate
    else:
        out = library.empty((BRANCHES, *q.shape[:-1], v.shape[-1]), dtype_name(q.dtype), q)
        if not hasattr(out, "__getitem__"):  # memory that the library is to take over
            out = None
    pooled = pool(
        k,
        v,
        length=call.options.length,
        stride=call.options.stride,
        k_projection=k_projection,
        v_projection=v_projection,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_k=call.max_seqlen,
        threads=threads,
    )
    tiles, compressed_tiles = lists_of(call, q, pooled[0], (tiles, compressed_tiles), cu_seqlens)
    branches = attend_branches(call, q, k, v, pooled, (tiles, compressed_tiles), cu_seqlens, out)
    result = gate(
        branches if out is None else out,
        q=None if gate_weight is None else q,
        gate_weight=gate_weight,
        gates=gates,
        cu_seqlens=cu_seqlens,
        max_seqlen=call.max_seqlen,
        threads=threads,
    )
    if not return_tiles:
        return result
    return (result, tiles) if compressed_tiles is None else (result, tiles, compressed_tiles)
