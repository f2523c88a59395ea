# SPDX-License-Identifier: Apache-2.0
"""``flash_attn_with_kvcache`` of every version: append, rotate, choose the tokens of each sequence, attend.

A cache is (rows, capacity, heads, dim) or pages (pages, page_size, heads, dim) with a page table. What is asked of it
becomes a page table over the same memory, never a copy:

==================  ====================================================================================
``cache_batch_idx``  the cache's rows are pages as long as the cache; the table has one column
``cache_leftpad``    every token is a page of its own, and the table begins after the padding
both, or paged       the two tables composed
==================  ====================================================================================
"""

from __future__ import annotations

from typing import Any

from tessera import KeySource, attention, kv_append
from tessera._checks import whole

from .arguments import (
    Array,
    array_module,
    cap,
    check_int32,
    check_shapes,
    forward_only,
    is_torch,
    pad_head_dim,
    refuse,
    rename,
    split_wish,
    visible_window,
)
from .descales import descales_of

Lengths = Any  # int32 (batch,) in the library of q


def attend_cache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Array | None,
    v: Array | None,
    *,
    names: dict[str, str],
    **options: Any,
) -> Any:
    """out as q, or (out, lse) with ``return_lse``. The options are those of :func:`_attend`.

    names: what the caller calls the arguments of :func:`tessera.attention` and :func:`tessera.kv_append`, for errors.
    """
    inputs = (q, k_cache, v_cache, k, v)
    check_shapes(q, k_cache, v_cache, ("q", "k_cache", "v_cache"))
    _check(k, v, options["cache_seqlens"], options["rotary_cos"], options["rotary_sin"])
    _check_integers(names, options["cache_seqlens"], **{name: options.get(name) for name in _INTEGERS})
    if options["cache_leftpad"] is not None:  # the table and the lengths are made of it
        names = {**names, "page_table": "cache_leftpad", "seqused_k": "cache_seqlens - cache_leftpad"}
    elif options["page_table"] is None:
        names = {**names, "page_table": "cache_batch_idx"}
    try:
        return forward_only("flash_attn_with_kvcache", inputs, lambda: _attend(*inputs, **options))
    except (NotImplementedError, TypeError, ValueError) as error:
        rename(error, names)
        raise


def _attend(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Array | None,
    v: Array | None,
    *,
    causal: bool,
    window_size: tuple[int, int],
    scale: float | None,
    softcap: float,
    num_splits: int,
    return_lse: bool,
    rotary_cos: Array | None,
    rotary_sin: Array | None,
    rotary_interleaved: bool,
    cache_seqlens: int | Array | None,
    cache_batch_idx: Array | None,
    cache_leftpad: Array | None,
    page_table: Array | None,
    attention_chunk: int = 0,
    alibi_slopes: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k_new: Array | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Array | None = None,
    descales: tuple[Any, Any, Any] = (None, None, None),
) -> Any:
    causal, window = visible_window(causal, window_size)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    scales = descales_of(q, k_cache, batch, *descales)
    lengths = _lengths(cache_seqlens, batch, q)
    if page_table is not None:
        if cache_batch_idx is not None:
            try:
                page_table = page_table[cache_batch_idx.long() if is_torch(cache_batch_idx) else cache_batch_idx]
            except IndexError:
                refuse(
                    "cache_batch_idx",
                    cache_batch_idx,
                    f"rows below {page_table.shape[0]}, those of the table",
                    ValueError,
                )
    elif cache_batch_idx is not None:
        page_table = cache_batch_idx.reshape(-1, 1)
    elif k_cache.shape[0] > batch:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    if k is not None:
        if rotary_cos is not None:
            q, k, rotary = _rotate(
                q,
                k,
                lengths,
                causal or window is not None or whole("attention_chunk", attention_chunk) > 0,
                (rotary_cos, rotary_sin, rotary_interleaved),
                (cu_seqlens_q, cu_seqlens_k_new, rotary_seqlens),
            )
        else:
            rotary = {}
        turned = kv_append(
            k_cache, v_cache, k, v, seqused_k=lengths, page_table=page_table, cu_seqlens_q=cu_seqlens_k_new, **rotary
        )
        if "q" in rotary:
            q = turned
        lengths = lengths + (k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new[1:] - cu_seqlens_k_new[:-1])
    if cache_leftpad is not None:
        k_cache, v_cache, page_table, lengths = _after_padding(k_cache, v_cache, page_table, lengths, cache_leftpad, q)
    elif page_table is not None and lengths is None:
        lengths = _lengths(page_table.shape[1] * k_cache.shape[1], batch, q)
    head_dim, head_dim_v = q.shape[-1], v_cache.shape[-1]
    if head_dim % 8 or head_dim_v % 8:
        scale = head_dim**-0.5 if scale is None else scale
        q, k_cache, v_cache = pad_head_dim(q), pad_head_dim(k_cache), pad_head_dim(v_cache)
    paged = page_table is not None
    keys = (KeySource(k_cache, v_cache, seqused=lengths, page_table=page_table),) if paged else (k_cache, v_cache)
    result = attention(
        q,
        *keys,
        causal=causal,
        window=window,
        attention_chunk=attention_chunk,
        scale=scale,
        softcap=cap(softcap),
        alibi_slopes=alibi_slopes,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        seqused_k=None if paged else lengths,
        return_lse=return_lse,
        wishes=split_wish(num_splits),
        **scales,
    )
    if head_dim_v % 8:
        return (result[0][..., :head_dim_v], result[1]) if return_lse else result[..., :head_dim_v]
    return result


_INTEGERS = {
    "page_table": ("(rows, columns)", 2),
    "cache_batch_idx": ("(batch)", 1),
    "cache_leftpad": ("(batch)", 1),
    "cu_seqlens_q": ("(batch + 1)", 1),
    "cu_seqlens_k_new": ("(batch + 1)", 1),
    "rotary_seqlens": ("(batch)", 1),
}


def _check_integers(names: dict[str, str], cache_seqlens: Any, **arrays: Any) -> None:
    """Refuses lengths, places and tables of another dtype or rank, before anything is made of them."""
    for name, array in arrays.items():
        if array is not None:
            check_int32(names.get(name, name), array, *_INTEGERS[name])
    if cache_seqlens is not None and not _is_integer(cache_seqlens):
        check_int32("cache_seqlens", cache_seqlens, "(batch), or an integer", 1)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) or (
        hasattr(value, "__index__") and getattr(value, "shape", None) == () and not is_torch(value)
    )


def _lengths(value: int | Array | None, batch: int, like: Array) -> Lengths | None:
    if value is None or not _is_integer(value):
        return value
    module, where = array_module(like)
    return module.full((batch,), value, dtype=module.int32, **where)


def _check(k: Array | None, v: Array | None, lengths: Any, rotary_cos: Array | None, rotary_sin: Array | None) -> None:
    """Arguments that only make sense together."""
    if (k is None) != (v is None):
        missing = "k" if k is None else "v"
        refuse(missing, None, "new keys and new values together", ValueError)
    if (rotary_cos is None) != (rotary_sin is None):
        missing = "rotary_cos" if rotary_cos is None else "rotary_sin"
        refuse(missing, None, "rotary_cos and rotary_sin together", ValueError)
    for name, table in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if table is not None and len(getattr(table, "shape", ())) != 2:
            refuse(name, table, "an array (positions, rotary_dim / 2)", ValueError)
    if rotary_cos is not None and k is None:
        refuse("rotary_cos", rotary_cos, "None when there are no new keys to rotate", ValueError)
    if k is not None and lengths is None:
        refuse("cache_seqlens", None, "the lengths before the append when k is given", ValueError)


def _rotate(
    q: Array,
    k: Array,
    lengths: Lengths,
    moving: bool,
    tables: tuple[Array, Array, bool],
    sequences: tuple[Any, Any, Any],
) -> tuple[Array, Array, dict[str, Any]]:
    """(q, k, what is left for kv_append to rotate).

    kv_append turns row i of k, and of q if it has as many rows, by the angle of position lengths + i. The rest is
    turned here: q of another length, q that stands still (no causal mask, window or chunks), positions given by
    rotary_seqlens.
    """
    cos, sin, interleaved = tables
    cu_seqlens_q, cu_seqlens_k_new, rotary_seqlens = sequences
    from .rotary import rotate

    if rotary_seqlens is not None and rotary_seqlens is not lengths:
        q = rotate(q, cos, sin, rotary_seqlens, moving, interleaved, cu_seqlens_q)
        return q, rotate(k, cos, sin, rotary_seqlens, True, interleaved, cu_seqlens_k_new), {}
    in_append = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    if cu_seqlens_q is None and cu_seqlens_k_new is None:
        together = q.shape[1] == k.shape[1] and (moving or q.shape[1] == 1)
    else:
        together = moving and cu_seqlens_q is cu_seqlens_k_new
    if together:
        return q, k, {**in_append, "q": q}
    return rotate(q, cos, sin, lengths, moving, interleaved, cu_seqlens_q), k, in_append


def _after_padding(
    k_cache: Array, v_cache: Array, page_table: Array | None, lengths: Lengths | None, leftpad: Array, like: Array
) -> tuple[Array, Array, Array, Lengths]:
    """The caches as pages of one token, the table of the tokens behind `leftpad`, and how many there are."""
    module, where = array_module(like)
    take = module.take_along_dim if is_torch(like) else module.take_along_axis
    page = k_cache.shape[1]
    padding = module.asarray(leftpad, **where)
    batch = padding.shape[0]
    capacity = page if page_table is None else page * page_table.shape[1]
    token = (module.arange(capacity, **where) + padding[:, None]).clip(None, max(capacity - 1, 0))
    if page_table is None:
        first = module.arange(batch, **where)[:, None] * page
    else:
        first = take(module.asarray(page_table, **where), token // max(page, 1), 1) * page
        token = token % max(page, 1)
    table = module.asarray(first + token, dtype=module.int32)
    if lengths is None:
        lengths = _lengths(capacity, batch, like)
    return _tokens("k_cache", k_cache), _tokens("v_cache", v_cache), table, lengths - leftpad


def _tokens(name: str, cache: Array) -> Array:
    """(rows · length, 1, heads, dim): a view."""
    rows, length, heads, dim = cache.shape
    row_stride, token_stride = cache.stride()[:2] if is_torch(cache) else cache.strides[:2]
    if rows > 1 and row_stride != length * token_stride:
        want = f"rows that lie {length * token_stride} apart, one behind the other, when cache_leftpad is given"
        refuse(name, f"a stride of {row_stride} between rows", want, ValueError)
    return cache.reshape(rows * length, 1, heads, dim)
