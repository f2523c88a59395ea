# SPDX-License-Identifier: Apache-2.0
"""flash-attn 3's functions: names, argument order, defaults and return shapes of ``hopper/flash_attn_interface.py``.

Source of the signatures: Dao-AILab/flash-attention after 203b9b3d (August 2025), the state of the 2.8.4 tree:
functions return out alone, and (out, softmax_lse) with ``return_attn_probs=True``. (Betas before June 2025 returned
the pair always.) Source of the algorithm: Shah et al., "FlashAttention-3", 2024 (arXiv:2407.08608).

Shapes are those of ``flash_attn_2``, except that v and out may have a head dim of their own; head dims are multiples
of 8. `window_size` (left, right) is inclusive, −1 is unbounded, `causal` sets right to 0; masks are aligned to the
bottom right corner.

- `num_splits`: 0 leaves the number of parts of the keys to the plan, N fixes it; 1 hence means no split.
- `pack_gqa`, `sm_margin`, `scheduler_metadata` tune flash-attention's kernels: accepted, without effect.
- `attention_chunk`: a query at position p sees keys of its own chunk only, floor(p / attention_chunk), besides the
  other masks; 0: no chunks. Here it has gradients, too.
- `q_descale`, `k_descale`, `v_descale` fp32 (batch, h_k) are of q, k and v in float8_e4m3fn, whose out is bf16 and
  which have no gradient; one that is not given is 1. GPUs take few queries of them. Beside other inputs they are not
  read.
- `qv` raises NotImplementedError.
"""

from __future__ import annotations

from typing import Any

from tessera import attention
from tessera._libraries import library_of

from .arguments import (
    CACHE_NAMES,
    NAMES,
    Array,
    cap,
    check_inputs,
    check_int32,
    empty,
    refuse,
    rename,
    split_wish,
    unpack,
    visible_window,
)
from .combining import combine_parts
from .descales import descales_of
from .kv_cache import attend_cache

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def _refuse_qv(qv: Any) -> None:
    if qv is not None:
        refuse(
            "qv",
            qv,
            "None: nothing takes a second query for the values; concatenate q, qv and k, v along the head dim instead",
        )


_QKVPACKED = {**NAMES, **dict.fromkeys(("q", "k", "v", "q_type", "k_type", "v_type"), "qkv")}


def _attend(
    q: Array,
    k: Array,
    v: Array,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    attention_chunk: int,
    softcap: float,
    num_splits: int,
    deterministic: bool,
    return_attn_probs: bool,
    descales: tuple[Any, Any, Any] = (None, None, None),
    names: dict[str, str] = NAMES,
    **lengths: Any,
) -> Any:
    try:
        check_inputs(q, k, v)
        starts = lengths.get("cu_seqlens_q")
        causal, window = visible_window(causal, window_size)
        return attention(
            q,
            k,
            v,
            causal=causal,
            window=window,
            attention_chunk=attention_chunk,
            scale=softmax_scale,
            softcap=cap(softcap),
            deterministic=deterministic,
            return_lse=return_attn_probs,
            wishes=split_wish(num_splits),
            **descales_of(q, k, q.shape[0] if starts is None else starts.shape[0] - 1, *descales),
            **lengths,
        )
    except (NotImplementedError, TypeError, ValueError) as error:
        rename(error, names)
        raise


def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (b, sq, h, d) over k (b, sk, h_k, d), v (b, sk, h_k, dv): out (b, sq, h, dv).

    With `return_attn_probs` returns (out, softmax_lse), the latter fp32 (b, h, sq).
    """
    _refuse_qv(qv)
    return _attend(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        attention_chunk,
        softcap,
        num_splits,
        deterministic,
        return_attn_probs,
        (q_descale, k_descale, v_descale),
    )


def flash_attn_qkvpacked_func(
    qkv: Array,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """As :func:`flash_attn_func` with qkv (b, s, 3, h, d), or (b, s, h + 2 · h_k, d) with h = `num_heads_q`.

    q, k and v are views; the gradient comes back as one tensor shaped as qkv.
    """
    library_of(qkv, "qkv")
    q, k, v = unpack("qkv", qkv, 2, 3) if len(qkv.shape) == 5 else _split_heads(qkv, num_heads_q)
    shared = (softmax_scale, causal, window_size, attention_chunk, softcap, 1, deterministic, return_attn_probs)
    return _attend(q, k, v, *shared, (q_descale, k_descale, v_descale), _QKVPACKED)


def _split_heads(qkv: Array, num_heads_q: int | None) -> tuple[Array, Array, Array]:
    if len(qkv.shape) != 4:
        refuse("qkv", qkv, "(batch, seqlen, 3, heads, dim) or (batch, seqlen, heads_q + 2 * heads_kv, dim)", ValueError)
    heads = qkv.shape[2]
    if num_heads_q is None or not 0 < num_heads_q < heads or (heads - num_heads_q) % 2:
        want = f"the number of query heads among the {heads} of qkv, the others in two equal parts"
        refuse("num_heads_q", num_heads_q, want, ValueError)
    heads_kv = (heads - num_heads_q) // 2
    if hasattr(qkv, "split"):
        return qkv.split([num_heads_q, heads_kv, heads_kv], dim=2)
    last = num_heads_q + heads_kv
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q:last], qkv[:, :, last:]


def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (total_q, h, d) over k (total_k, h_k, d), v (total_k, h_k, dv): out (total_q, h, dv).

    `seqused_q`, `seqused_k` int32 (batch,): tokens used of every sequence; rows behind them are 0 with an LSE of
    −inf. With `return_attn_probs` returns (out, softmax_lse), the latter fp32 (h, total_q).
    """
    _refuse_qv(qv)
    check_int32("cu_seqlens_q", cu_seqlens_q, "(batch + 1)", 1)
    check_int32("cu_seqlens_k", cu_seqlens_k, "(batch + 1)", 1)
    return _attend(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        attention_chunk,
        softcap,
        num_splits,
        deterministic,
        return_attn_probs,
        (q_descale, k_descale, v_descale),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
    )


def flash_attn_combine(
    out_partial: Array, lse_partial: Array, out: Array | None = None, out_dtype: Any = None
) -> tuple[Array, Array]:
    """(out, lse) of parts over disjoint keys.

    `out_partial` (parts, b, s, h, d) and `lse_partial` fp32 (parts, b, s, h); out is (b, s, h, d) in `out_dtype`
    (default: that of the parts) and is written to `out` if given; lse is fp32 (b, s, h), a transposed view of (b, h,
    s). An `lse_partial` that is not contiguous along s is copied.
    """
    return combine_parts(out_partial, lse_partial, out, out_dtype)


def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Array | None = None,
    v: Array | None = None,
    qv: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    cache_seqlens: int | Array | None = None,
    cache_batch_idx: Array | None = None,
    cache_leftpad: Array | None = None,
    page_table: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k_new: Array | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Writes k, v behind the first `cache_seqlens` tokens of the cache, in place, then attends q to the cache.

    q (b, sq, h, d), or (total_q, h, d) with `cu_seqlens_q` and `max_seqlen_q`; k, v (b, new, h_k, d) or (total_new,
    h_k, d) with `cu_seqlens_k_new`, or None; caches (rows, capacity, h_k, d), or pages (pages, page_size, h_k, d)
    with `page_table` int32 (rows, columns). `cache_seqlens` int32 (b,) or an int: tokens before the append, padding
    included. `cache_batch_idx` int32 (b,): rows of the cache or of the page table. `cache_leftpad` int32 (b,): first
    token that counts. `rotary_cos`, `rotary_sin` (positions, rotary_dim / 2), only with k: k and q turn by the
    position in the cache, or from `rotary_seqlens` on; q without causal, window and chunk by the first alone.

    Returns out as q; with `return_softmax_lse` the four results of flash-attn 3: (out, softmax_lse, out_accum,
    lse_accum), the last two of shape (0,), because partial results do not leave the call. There is no gradient: a
    backward raises NotImplementedError.
    """
    _refuse_qv(qv)
    result = attend_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        scale=softmax_scale,
        softcap=softcap,
        num_splits=num_splits,
        return_lse=return_softmax_lse,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens,
        descales=(q_descale, k_descale, v_descale),
        names=CACHE_NAMES,
    )
    return (*result, empty(result[1]), empty(result[1])) if return_softmax_lse else result


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Array,
    qkv_dtype: Any = None,
    headdim_v: int | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k_new: Array | None = None,
    cache_leftpad: Array | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Array:
    """Metadata for `scheduler_metadata`: int32 of shape (0,), because nothing is scheduled ahead.

    `qkv_dtype` has no default of its own here (bf16 in flash-attn): torch need not be there.
    """
    check_int32("cache_seqlens", cache_seqlens, "(batch)", 1)
    return empty(cache_seqlens)
