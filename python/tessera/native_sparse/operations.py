# SPDX-License-Identifier: Apache-2.0
"""Compressed keys of native sparse attention, and the blocks that tiles of queries attend to."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, get_args

from .. import _core
from .._arguments import longest
from .._checks import whole
from .._libraries import common_library, dtype_name, refuse_gradient
from ..operations import run_problem
from ..tiles import TileList

Array = Any
Shape = tuple[int, ...]
Heads = Literal["kv", "q"]
Score = Literal["dot", "softmax"]
Reduce = Literal["first", "mean", "max"]
Visible = Literal["complete", "started"]


def compressed_blocks(tokens: int, length: int, stride: int) -> int:
    """Complete blocks of a sequence."""
    return 0 if tokens < length else (tokens - length) // stride + 1


def _want_rank(name: str, array: Array, packed: bool, dims: str) -> Shape:
    shape = tuple(array.shape)
    rank = 3 if packed else 4
    if len(shape) != rank:
        sizes = f"(tokens, {dims})" if packed else f"(batch, seqlen, {dims})"
        raise ValueError(f"{name}: got {len(shape)} dimensions, shape {shape}; want {rank}, {sizes}")
    return shape


def _source(rows: Shape, packed: bool, batch: int, longest_row: int) -> dict[str, Any]:
    """Fields of the keys' tokens."""
    if packed:
        return {"layout": "varlen", "seqlen": longest_row, "total": rows[0]}
    return {"layout": "dense", "seqlen": rows[1]}


@lru_cache(maxsize=512)
def _pool_problem(
    k: Shape,
    v: Shape,
    dtypes: tuple[str, str],
    batch: int,
    most: int,
    length: int,
    stride: int,
    project: bool,
    backward: bool,
) -> _core.Problem:
    packed = len(k) == 3
    return _core.Problem(
        "nsa_pool",
        backward=backward,
        batch=batch,
        kv=_source(k, packed, batch, most),
        heads_q=k[-2],
        heads_kv=k[-2],
        head_dim_qk=k[-1],
        head_dim_v=v[-1],
        q_type=dtypes[0],
        k_type=dtypes[0],
        v_type=dtypes[1],
        compress_length=length,
        compress_stride=stride,
        project=project,
    )


class _Pooling:
    """What a call of nsa_pool and its gradient share."""

    def __init__(
        self,
        k: Array,
        v: Array,
        length: int,
        stride: int | None,
        k_projection: Array | None,
        v_projection: Array | None,
        cu_seqlens_k: Array | None,
        max_seqlen_k: int | None,
        backward: bool,
    ) -> None:
        packed = cu_seqlens_k is not None
        self.k = _want_rank("k", k, packed, "heads_kv, dim")
        self.v = _want_rank("v", v, packed, "heads_kv, dim_v")
        if (k_projection is None) != (v_projection is None):
            missing = "k_projection" if k_projection is None else "v_projection"
            raise ValueError(f"{missing}: got None; want projections of both keys and values, or of neither")
        self.length = whole("length", length)
        self.stride = self.length if stride is None else whole("stride", stride)
        if packed:
            self.batch = cu_seqlens_k.shape[0] - 1
            self.most = longest("cu_seqlens_k", cu_seqlens_k, max_seqlen_k) or self.k[0]
        else:
            self.batch, self.most = self.k[0], self.k[1]
        self.bound: dict[str, Array] = {}
        for name, array in (
            ("cu_seqlens_k", cu_seqlens_k),
            ("k_projection", k_projection),
            ("v_projection", v_projection),
        ):
            if array is not None:
                self.bound[name] = array
        self.dtypes = (dtype_name(k.dtype), dtype_name(v.dtype))
        self.problem = _pool_problem(
            self.k,
            self.v,
            self.dtypes,
            self.batch,
            self.most,
            self.length,
            self.stride,
            k_projection is not None,
            backward,
        )
        self.library = common_library([("k", k), ("v", v), *self.bound.items()])

    def pooled(self, tokens: Shape) -> Shape:
        if len(tokens) == 3:
            return (tokens[0] // self.stride, *tokens[1:])
        return (tokens[0], compressed_blocks(tokens[1], self.length, self.stride), *tokens[2:])


def nsa_pool(
    k: Array,
    v: Array,
    *,
    length: int = 64,
    stride: int | None = None,
    k_projection: Array | None = None,
    v_projection: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_k: int | None = None,
    threads: int = 0,
) -> tuple[Array, ...]:
    """Compressed keys and values: means of blocks of `length` tokens that begin `stride` (default: length) apart.

    k, v: (b, sk, hkv, d | dv), or (tokens, hkv, d | dv) with cu_seqlens_k int32 (b + 1) and max_seqlen_k, which is read
    from it if it is not given; fp32, fp16 or bf16 each, d and dv from 1 to 512. k_projection (hkv, d, d) and
    v_projection (hkv, dv, dv), in the dtypes of k and v: a mean is multiplied by its head's. Only complete blocks
    count: n = 0 below `length` tokens, else (tokens − length) // stride + 1.

    Returns (k_pooled, v_pooled), (b, n, hkv, d | dv) in the dtypes of k and v; of packed tokens (k_pooled, v_pooled,
    cu_blocks), (tokens // stride, hkv, d | dv) and int32 (b + 1), where each sequence's blocks begin. Rows behind the
    last block hold anything. Raises as `attention` does; ValueError for torch tensors that require grad: `nsa` has
    gradients.

    Source: Yuan et al. 2025 (arXiv:2502.11089), equation 7, with the mean for φ; docs/nsa.md.
    """
    refuse_gradient("nsa_pool", "has none, nsa has", k=k, v=v)
    call = _Pooling(k, v, length, stride, k_projection, v_projection, cu_seqlens_k, max_seqlen_k, False)
    made = {
        "k_pooled": call.library.empty(call.pooled(call.k), call.dtypes[0], k),
        "v_pooled": call.library.empty(call.pooled(call.v), call.dtypes[1], k),
    }
    if cu_seqlens_k is not None:
        made["cu_blocks"] = call.library.empty((call.batch + 1,), "int32", k)
    slots = ("k", "v", *call.bound, *made)
    run_problem(call.library, call.problem, threads, slots, (k, v, *call.bound.values(), *made.values()), k)
    return tuple(call.library.finish(array, k) for array in made.values())


def nsa_pool_backward(
    dk_pooled: Array,
    dv_pooled: Array,
    k: Array,
    v: Array,
    *,
    length: int = 64,
    stride: int | None = None,
    k_projection: Array | None = None,
    v_projection: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_k: int | None = None,
    threads: int = 0,
) -> tuple[Array, ...]:
    """Gradients of `nsa_pool` with the same keywords; dk_pooled, dv_pooled as its results, in the dtypes of k and v.

    Returns (dk, dv) as k and v, and with projections (dk, dv, dk_projection, dv_projection), the latter fp32. Tokens
    that are in no block get 0. Raises as `nsa_pool` does.
    """
    refuse_gradient("nsa_pool_backward", "has no gradient itself", dk_pooled=dk_pooled, dv_pooled=dv_pooled, k=k, v=v)
    call = _Pooling(k, v, length, stride, k_projection, v_projection, cu_seqlens_k, max_seqlen_k, True)
    read: dict[str, Array] = {"dk_pooled": dk_pooled, "dv_pooled": dv_pooled, **call.bound}
    made = {"dk": call.library.empty(call.k, call.dtypes[0], k), "dv": call.library.empty(call.v, call.dtypes[1], k)}
    if k_projection is not None:
        read |= {"k": k, "v": v}
        for name, array in (("dk_projection", k_projection), ("dv_projection", v_projection)):
            made[name] = call.library.empty(tuple(array.shape), "fp32", k)
    run_problem(call.library, call.problem, threads, (*read, *made), (*read.values(), *made.values()), k)
    return tuple(call.library.finish(array, k) for array in made.values())


def nsa_select(
    q: Array,
    k_pooled: Array,
    *,
    seqlen_k: int | None = None,
    length: int = 64,
    stride: int | None = None,
    block: int | None = None,
    top: int = 16,
    tile: int = 1,
    heads: Heads = "kv",
    score: Score = "dot",
    reduce: Reduce = "first",
    visible: Visible = "complete",
    initial: int = 1,
    local: int = 2,
    compressed_top: int = 0,
    compressed_block: int = 64,
    causal: bool = False,
    scale: float | None = None,
    q_offset: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    threads: int = 0,
) -> Any:
    """Which blocks of `block` tokens (default: length) each tile of `tile` query rows attends to: the best `top`.

    q: (b, sq, hq, d), or (tokens, hq, d) with cu_seqlens_q int32 (b + 1); k_pooled as `nsa_pool` made it, with the
    same length and stride: (b, n, hkv, d) of seqlen_k tokens (default: sq), or packed with the cu_seqlens_k of the
    tokens. Row i stands at token i, or at q_offset + i, int64 (b), multiples of tile: so a chunk of a prefill, or the
    first token of a tile that is decoded, has the lists of the whole; rows of k_pooled that are not there yet may hold
    anything then. heads: a list for each key head or for each query head. score: "dot" of q and one
    compressed key (length, stride and block are equal then), or "softmax", probabilities over compressed keys that
    share tokens with the block; both summed over the heads of a list. reduce: the tile's first row scores, the mean of
    its rows, or the largest of any. visible, with causal: compressed keys of complete blocks, or of "started" ones,
    which tells rows of later tokens. initial blocks, and `local` that end at each row's own, are always taken. Equal
    scores: the lower index. top beyond the blocks that there are takes all.

    Returns a `TileList` of block (tile, block) for `attention`, counts int32 (b, hkv | hq, ceil(sq / tile)) and indices
    int32 (…, top), ascending, −1 behind the count. With compressed_top above 0 the same pass gives a second
    list, and the result is (tiles, compressed_tiles): which blocks of compressed_block compressed keys the tile attends
    to in the compressed branch, those with the best keys and, with causal, the newest; a `TileList` of block (tile,
    compressed_block) for `attention` to the compressed keys, indices int32 (…, compressed_top). Nothing of it has a
    gradient; gradients of q and k_pooled are not asked for. Raises as `attention` does; ValueError naming nsa.top if it
    is less than what initial and local force, nsa.compressed_top if the newest blocks of a tile can be more.

    Source: Yuan et al. 2025 (arXiv:2502.11089), equations 8 to 12; docs/nsa.md.
    """
    packed, packed_k = cu_seqlens_q is not None, cu_seqlens_k is not None
    rows = _want_rank("q", q, packed, "heads_q, dim")
    pooled = _want_rank("k_pooled", k_pooled, packed_k, "heads_kv, dim")
    length = whole("length", length)
    stride = length if stride is None else whole("stride", stride)
    batch = cu_seqlens_q.shape[0] - 1 if packed else rows[0]
    most = (longest("cu_seqlens_q", cu_seqlens_q, max_seqlen_q) or rows[0]) if packed else rows[1]
    if packed_k:
        tokens = longest("cu_seqlens_k", cu_seqlens_k, max_seqlen_k) or rows[0]
        # The most tokens of which nsa_pool makes as many rows: how many there were does not matter.
        total = pooled[0] * stride + stride - 1
        kv: dict[str, Any] = {"layout": "varlen", "seqlen": tokens, "total": total}
    else:
        kv = {"layout": "dense", "seqlen": most if seqlen_k is None else whole("seqlen_k", seqlen_k)}
    bound = {
        name: array
        for name, array in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k), ("q_offset", q_offset))
        if array is not None
    }
    library = common_library([("q", q), ("k_pooled", k_pooled), *bound.items()])
    for name, given, words in (
        ("heads", heads, get_args(Heads)),
        ("score", score, get_args(Score)),
        ("reduce", reduce, get_args(Reduce)),
        ("visible", visible, get_args(Visible)),
    ):
        if given not in words:
            raise ValueError(f"{name}: got {given!r}; want one of {', '.join(map(repr, words))}")
    problem = _core.Problem(
        "nsa_select",
        batch=batch,
        seqlen_q=most,
        heads_q=rows[-2],
        heads_kv=pooled[-2],
        head_dim_qk=rows[-1],
        q_type=dtype_name(q.dtype),
        k_type=dtype_name(k_pooled.dtype),
        kv=kv,
        scale=scale,
        compress_length=length,
        compress_stride=stride,
        select_block=length if block is None else whole("block", block),
        select_top=whole("top", top),
        select_tile=whole("tile", tile),
        select_query_heads=heads == "q",
        select_score=score,
        tile_reduce=reduce,
        block_visible=visible,
        initial_blocks=whole("initial", initial),
        local_blocks=whole("local", local),
        select_causal=causal,
        compressed_top=whole("compressed_top", compressed_top),
        compressed_block=whole("compressed_block", compressed_block),
        **({"q_layout": "varlen", "total_q": rows[0]} if packed else {}),
    )
    lists = (batch, rows[-2] if heads == "q" else pooled[-2], -(-most // problem.select_tile))
    made = {"selected": (problem.select_top, problem.select_block)}
    if problem.compressed_top:
        made["compressed"] = (problem.compressed_top, problem.compressed_block)
    outputs: dict[str, Array] = {}
    for name, (places, _) in made.items():
        outputs[f"{name}_counts"] = library.empty(lists, "int32", q)
        outputs[f"{name}_indices"] = library.empty((*lists, places), "int32", q)
    slots = ("q", "k_pooled", *bound, *outputs)
    arrays = (q, k_pooled, *bound.values(), *outputs.values())
    if library.operators is not None:  # what is chosen has no gradient
        arrays = tuple(array.detach() for array in arrays)
    run_problem(library, problem, threads, slots, arrays, q)
    tiles = tuple(
        TileList(
            counts=library.finish(outputs[f"{name}_counts"], q),
            indices=library.finish(outputs[f"{name}_indices"], q),
            block=(problem.select_tile, keys),
        )
        for name, (_, keys) in made.items()
    )
    return tiles if problem.compressed_top else tiles[0]
