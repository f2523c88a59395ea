# SPDX-License-Identifier: Apache-2.0
"""flash-attn 4's functions: names, argument order, defaults and return shapes of ``flash_attn/cute/interface.py``.

Source of the signatures: Dao-AILab/flash-attention at 0251105a (August 2026). Every attention function returns (out,
lse); lse is None unless `return_lse` is set or a torch input requires a gradient. As there, lse includes the
learnable sink.

- q (b, sq, h, d), k (b, sk, h_k, d), v (b, sk, h_k, dv), or (tokens, heads, dim) with `cu_seqlens`; out (…, h, dv);
  lse fp32 (b, h, sq) or (h, total_q). Head dims are multiples of 8.
- `window_size` (left, right): inclusive and signed around the query's position, bottom right aligned; None is
  unbounded; an empty window (left + right below 0) is no window; `causal` sets right to 0.
- `learnable_sink` (h,) in fp32, fp16 or bf16: one logit a head in the denominator; half types are copied to fp32.
- `block_sparse_tensors`: the tiles to compute, a :class:`BlockSparseTensorsTorch` or anything with its fields.
  Without a `mask_mod` partial and full blocks differ in nothing. The backward uses the forward's list unless
  `block_sparse_tensors_bwd`, key-major, says otherwise.
- `page_table` int32 (b, columns): k and v are pages (pages, page_size, heads, dim), which have no gradient: a backward
  raises NotImplementedError. The lengths in them are `seqused_k` int32 (b,), else the differences of `cu_seqlens_k`,
  else all that the table addresses.
- `dropout_p` with `dropout_seed`, an int or an array of one; without a seed one is drawn from torch's generator, for
  other libraries from ``random``. The pattern of a seed is Tessera's (docs/semantics.md, section 7). These two, and
  `page_table`, `seqused_k` and `max_seqlen_k` of :func:`flash_attn_func`, are those of the SM120 builds that carry pull
  requests 2348 and 2439; here they come behind upstream's arguments, by keyword.
- `num_splits` above 0 fixes the number of parts of the keys; parts of a fixed length, `seqlen_k_per_split`, raise
  NotImplementedError.
- Head dims that are no multiples of 8 up to 512 raise an error that is a ValueError and, as in flash-attn 4, an
  AssertionError.
- `pack_gqa`, `min_seqlen_k`, `scheduler_metadata`, `disable_scheduler_metadata` tune a GPU: accepted, without effect.
- `score_mod(score, b_idx, h_idx, q_idx=, kv_idx=, seqlen_info=, aux_tensors=)` and `mask_mod(b_idx, h_idx, q_idx,
  kv_idx, seqlen_info, aux_tensors)`, with `aux_scalars` behind them where given, are functions of Python, which are
  traced (`tessera.expressions`): operators, torch's functions, tensors indexed by what they are given. They get
  numbers, not vectors of CuTe, whose functions cannot be traced. Indices count from 0 in each sequence; `seqlen_info`
  has seqlen_q, seqlen_k, offset_q and offset_k, and arrays that it reads count among the four that one call can have.
  Beside a mask_mod `causal` and `window_size` change nothing, and full blocks waive it. `score_mod_bwd` changes
  nothing: the derivative is found from score_mod. A softcap beside a score_mod raises ValueError.
- `qv` and `gather_kv_indices` raise NotImplementedError.
"""

from __future__ import annotations

from typing import Any

from tessera import KeySource, Tiles, attention
from tessera._checks import flag, pair, whole
from tessera._libraries import library_of

from .arguments import (
    NAMES,
    Array,
    Window,
    cap,
    check_inputs,
    check_int32,
    check_shapes,
    forward_only,
    is_torch,
    refuse,
    rename,
    split_wish,
)
from .block_sparse import BlockSparseTensorsTorch, tile_list
from .combining import combine_parts
from .modifiers import Lengths, Modifiers, options_of
from .scheduler_metadata import SchedulerMetadataTensorsTorch, get_scheduler_metadata

__all__ = [
    "BlockSparseTensorsTorch",
    "SchedulerMetadataTensorsTorch",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
]


class UnsupportedHeadDimError(AssertionError, ValueError):
    """Tessera's error for a wrong value that is an assertion, too, as flash-attn 4's callers expect."""


_MLA = "None: the kernels for absorbed multi-head latent attention are not there yet"


def _refuse_unsupported(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            refuse(name, value, _MLA)


_WINDOW = "(left, right), each an integer or None"


def _signed_window(causal: bool, window_size: tuple[int | None, int | None]) -> tuple[bool, Window | None]:
    ends = pair("window_size", window_size, _WINDOW)
    left, right = (end if end is None else whole("window_size", end, _WINDOW) for end in ends)
    causal = flag("causal", causal)
    if causal:
        right = 0
    if left is not None and right is not None and left + right < 0:
        left = right = None
    if left is None:
        return (causal or right == 0, None) if right is None or right == 0 else (False, (None, right))
    return False, (left, right)


def _check_head_dims(head_dim: int, head_dim_v: int) -> None:
    if any(dim % 8 or not 8 <= dim <= 512 for dim in (head_dim, head_dim_v)):
        got = f"(head_dim, head_dim_v)=({head_dim}, {head_dim_v}) is not supported on SM80 and newer, nor on the CPU"
        raise UnsupportedHeadDimError(f"head_dim: got {head_dim}: {got}; want multiples of 8 from 8 to 512")


_LIST = ("tiles", "tile_counts", "tile_indices", "full_counts", "full_indices")
_NAMES = {
    **NAMES,
    "score": "score_mod",
    "mask": "mask_mod",
    "extras": "aux_tensors",
    "sink": "learnable_sink",
    "dropout": "dropout_p",
    "seed": "dropout_seed",
    **dict.fromkeys(_LIST, "block_sparse_tensors"),
    **dict.fromkeys(["tiles.backward", *(f"bwd_{name}" for name in _LIST)], "block_sparse_tensors_bwd"),
}


def _attend(
    q: Array,
    k: Array,
    v: Array,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None],
    learnable_sink: Array | None,
    softcap: float,
    num_splits: int,
    deterministic: bool,
    modifiers: Modifiers,
    return_lse: bool,
    dropout_p: float,
    dropout_seed: Any,
    source: KeySource | None = None,
    **options: Any,
) -> tuple[Array, Array | None]:
    """`source`: of k and v, where more than their arrays says what they are."""
    if q is None or k is None:
        refuse("q" if q is None else "k", None, "an array: absorbed multi-head latent attention is not there yet")
    try:
        check_inputs(q, k, v)
        _check_head_dims(q.shape[-1], v.shape[-1])
        causal, window = _signed_window(causal, window_size)
        softcap = 0.0 if softcap is None else cap(softcap)
        masks: dict[str, Any] = {"causal": causal, "window": window}
        if any(x is not None for x in modifiers):
            given = source or KeySource(k, v, options.get("cu_seqlens_k"), seqused=options.get("seqused_k"))
            masks = options_of(modifiers, q, _lengths(q, given, options), softcap, **masks)
        sink = _fp32(learnable_sink)
        wants_lse = return_lse or (is_torch(q) and _requires_grad(q, k, v, learnable_sink))
        result = attention(
            q,
            k if source is None else source,
            v if source is None else None,
            **masks,
            scale=softmax_scale,
            softcap=softcap,
            sinks=sink,
            dropout=dropout_p,
            seed=dropout_seed,
            deterministic=deterministic,
            return_lse=wants_lse,
            wishes=split_wish(num_splits),
            **options,
        )
    except IndexError:
        check_shapes(q, k, v)
        raise
    except (NotImplementedError, TypeError, ValueError) as error:
        rename(error, _NAMES)
        raise
    if not wants_lse:
        return result, None
    out, lse = result
    return out, lse if sink is None else _with_sink(lse, sink)


def _lengths(q: Array, source: KeySource, options: dict[str, Any]) -> Lengths:
    cu_seqlens_q, shape = options.get("cu_seqlens_q"), source.k.shape
    packed, fixed = cu_seqlens_q is not None, source.cu_seqlens is None and source.page_table is None
    return Lengths(
        cu_seqlens_q.shape[0] - 1 if packed else q.shape[0],
        None if packed else q.shape[1],
        shape[1] if fixed else None,
        cu_seqlens_q,
        source.cu_seqlens,
        options.get("seqused_q"),
        source.seqused,
    )


def _attend_source(
    q: Array,
    k: Array,
    v: Array,
    learnable_sink: Array | None,
    page_table: Array | None,
    cu_seqlens_k: Array | None,
    seqused_k: Array | None,
    **options: Any,
) -> tuple[Array, Array | None]:
    """:func:`_attend` to keys that lie padded, packed or in pages."""
    options["learnable_sink"] = learnable_sink
    if page_table is None:
        return _attend(q, k, v, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, **options)
    check_int32("page_table", page_table, "(batch, columns)", 2)
    if seqused_k is None:
        if cu_seqlens_k is not None:
            check_int32("cu_seqlens_k", cu_seqlens_k, "(batch + 1)", 1)
            seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        else:
            seqused_k = page_table[:, 0] * 0 + page_table.shape[1] * k.shape[1]
    longest = options.pop("max_seqlen_k", None)
    pages = KeySource(k, v, max_seqlen=longest, seqused=seqused_k, page_table=page_table)
    return forward_only("page_table", (q, k, v, learnable_sink), lambda: _attend(q, k, v, source=pages, **options))


def _requires_grad(*tensors: Any) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def _fp32(sink: Array | None) -> Array | None:
    """The sink in fp32, as the problem wants it: itself, or a copy of (heads,) elements."""
    if sink is None:
        return None
    library_of(sink, "learnable_sink")
    if is_torch(sink):
        return sink.float()
    return sink if sink.dtype == "float32" else sink.astype("float32")


def _with_sink(lse: Array, sink: Array) -> Array:
    """log(exp(lse) + exp(sink)) for lse (b, h, sq) or (h, tokens)."""
    if is_torch(lse):
        import torch

        return torch.logaddexp(lse, sink[:, None])
    import numpy

    return numpy.logaddexp(lse, sink[:, None])


def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    qv: Array | None = None,
    gather_kv_indices: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Array | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: list | None = None,
    aux_scalars: tuple | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    page_table: Array | None = None,
    seqused_k: Array | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
) -> tuple[Array, Array | None]:
    """(out, lse) of q (b, sq, h, d) over k (b, sk, h_k, d), v (b, sk, h_k, dv), or pages with `page_table`.

    `seqused_k` int32 (b,): keys in use, of which there are at most `max_seqlen_k`. The module's docstring says more.
    """
    _refuse_unsupported(qv=qv, gather_kv_indices=gather_kv_indices)
    tiles = tile_list("block_sparse_tensors", block_sparse_tensors, "indices")
    bwd_tiles = tile_list("block_sparse_tensors_bwd", block_sparse_tensors_bwd, "transposed")
    if tiles is not None and bwd_tiles is not None and tiles.block != bwd_tiles.block:
        refuse("block_sparse_tensors_bwd", f"blocks of {bwd_tiles.block}", f"the forward's, {tiles.block}", ValueError)
    return _attend_source(
        q,
        k,
        v,
        learnable_sink,
        page_table,
        None,
        seqused_k,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        num_splits=num_splits,
        deterministic=deterministic,
        modifiers=Modifiers(score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars),
        return_lse=return_lse,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        tiles=tiles if bwd_tiles is None else Tiles(tiles, bwd_tiles),
    )


def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    qv: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    gather_kv_indices: Array | None = None,
    page_table: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Array | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list | None = None,
    aux_scalars: tuple | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
) -> tuple[Array, Array | None]:
    """(out, lse) where lengths vary: by `cu_seqlens` (tokens packed), `seqused` (padded), or `page_table` (k and v
    are pages). The module's docstring says more.
    """
    _refuse_unsupported(qv=qv, gather_kv_indices=gather_kv_indices)
    if seqlen_k_per_split is not None:
        refuse(
            "seqlen_k_per_split",
            seqlen_k_per_split,
            "None: parts are not of a given length; num_splits says how many, and batch_invariant=True of "
            "tessera.attention gives a sequence the same bits in every batch",
        )
    return _attend_source(
        q,
        k,
        v,
        learnable_sink,
        page_table,
        cu_seqlens_k,
        seqused_k,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        num_splits=num_splits,
        deterministic=deterministic,
        modifiers=Modifiers(score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars),
        return_lse=return_lse,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        tiles=tile_list("block_sparse_tensors", block_sparse_tensors, "indices"),
    )


def flash_attn_combine(
    out_partial: Array,
    lse_partial: Array,
    out: Array | None = None,
    out_dtype: Any = None,
    cu_seqlens: Array | None = None,
    seqused: Array | None = None,
    virtual_batch_idx: Array | None = None,
    return_lse: bool = True,
) -> tuple[Array, Array | None]:
    """(out, lse) of parts over disjoint keys; lse is None without `return_lse`.

    `out_partial` (parts, b, s, h, d) or (parts, tokens, h, d), `lse_partial` fp32 without the last dimension; out in
    `out_dtype` (default: that of the parts), written to `out` if given; lse fp32 (b, s, h) or (tokens, h). Every
    token is merged by itself, so that `cu_seqlens` and `virtual_batch_idx`, which order the work, change nothing.
    `seqused`, which spares rows of `out`, raises NotImplementedError.
    """
    if seqused is not None:
        refuse("seqused", seqused, "None: every row is merged")
    return combine_parts(out_partial, lse_partial, out, out_dtype, return_lse)
