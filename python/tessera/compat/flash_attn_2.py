# SPDX-License-Identifier: Apache-2.0
"""flash-attn 2.8's functions: names, argument order, defaults and return shapes of ``flash_attn_interface.py``.

Source of the signatures: Dao-AILab/flash-attention, tag v2.8.3, ``flash_attn/flash_attn_interface.py``; of the
algorithm: Dao, "FlashAttention-2", 2023 (arXiv:2307.08691).

Shared by all functions:

- q (batch, seqlen_q, nheads, headdim), k and v (batch, seqlen_k, nheads_k, headdim), nheads a multiple of nheads_k;
  packed qkv (batch, seqlen, 3, nheads, headdim) and kv (batch, seqlen_k, 2, nheads_k, headdim); the varlen forms have
  one token dimension in place of (batch, seqlen), with int32 `cu_seqlens` (batch + 1,). Packed tensors are used
  through views, and their gradient comes back as one packed tensor.
- `softmax_scale` defaults to headdim ** −0.5. `softcap` above 0 caps scores. `alibi_slopes` is fp32 (nheads,) or
  (batch, nheads). `window_size` (left, right) is inclusive around the query's own position, which is aligned to the
  bottom right corner; −1 is unbounded; `causal` sets right to 0.
- `dropout_p` draws its seed from torch's generator (``torch.manual_seed`` repeats it), for other libraries from
  ``random``.
- A headdim that is not a multiple of 8 is padded with zeros, as flash-attn does: a copy of q, k and v.
- Returns out alone, shaped as q. With `return_attn_probs` returns (out, softmax_lse, S_dmask): softmax_lse fp32
  (batch, nheads, seqlen_q) or (nheads, total_q); S_dmask, for tests, in q's dtype: the probabilities (batch, nheads,
  seqlen_q, seqlen_k) before dropout with a minus sign (of zeros, too) where dropped. It is the only thing here that
  takes seqlen_q · seqlen_k memory, has no gradient and no rounding up to 128 as on a GPU; without dropout it has
  shape (0,).
- Raises ValueError, TypeError or NotImplementedError naming the argument.
"""

from __future__ import annotations

from typing import Any

from tessera import _core, attention
from tessera._checks import real
from tessera._dropout_seed import drawn_seed
from tessera._kept import keep_as
from tessera._libraries import is_compiling, library_of

from .arguments import (
    CACHE_NAMES,
    NAMES,
    Array,
    cap,
    check_inputs,
    check_int32,
    check_shapes,
    empty,
    forward_only,
    in_pages,
    pad_head_dim,
    refuse,
    rename,
    unpack,
    visible_window,
)
from .kv_cache import attend_cache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


_NAMES = {**NAMES, "dropout": "dropout_p"}
_PAGED = {**_NAMES, "page_table": "block_table", "seqused_k": "cu_seqlens_k"}
_KVPACKED = {**_NAMES, "k": "kv", "v": "kv", "k_type": "kv", "v_type": "kv"}
_QKVPACKED = {
    **_KVPACKED,
    **dict.fromkeys(("q", "k", "v", "q_type", "k_type", "v_type"), "qkv"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens"),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen"),
}
_KEPT = _core.KeptCalls()  # of flash_attn_func
_CACHED = {**CACHE_NAMES, "page_table": "block_table"}


def _attend(
    q: Array,
    k: Array,
    v: Array,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Array | None,
    deterministic: bool,
    return_attn_probs: bool,
    names: dict[str, str] = _NAMES,
    page_table: Array | None = None,
    whole: tuple[Any, ...] | None = None,
    **lengths: Any,
) -> Any:
    """`whole`, if not None: the options of `flash_attn_func`, which its next call is found by."""
    try:
        check_inputs(q, k, v)
        head_dim = q.shape[-1]
        if head_dim % 8:
            check_shapes(q, k, v)
            if v.shape[-1] != head_dim:
                refuse("v", v, f"the head dim of q, {head_dim}, which is no multiple of 8", ValueError)
            if softmax_scale is None:
                softmax_scale = head_dim**-0.5
            q, k, v = pad_head_dim(q), pad_head_dim(k), pad_head_dim(v)
        causal, window = visible_window(causal, window_size)
        softcap = cap(softcap)
        pages, places = k, lengths
        if page_table is not None:
            k, v, places = in_pages(k, v, page_table, lengths)
        options = {"causal": causal, "window": window, "scale": softmax_scale, "softcap": softcap}
        options |= {"alibi_slopes": alibi_slopes, "dropout": dropout_p, "deterministic": deterministic}
        if not return_attn_probs:
            out = attention(q, k, v, **options, **places)
            if whole is not None and head_dim % 8 == 0:
                keep_as(_KEPT, whole, q, k, v, **options)
            return out[..., :head_dim] if head_dim % 8 else out
        drops = real("dropout_p", dropout_p) > 0
        seed = drawn_seed(q) if drops else None
        out, lse = attention(q, k, v, seed=seed, return_lse=True, **options, **places)
        probabilities = empty(q)
        if drops:
            from .probabilities import signed_probabilities

            lengths["page_table"] = page_table
            probabilities = signed_probabilities(q, pages, lse, seed=seed, **options, **lengths)
        return (out[..., :head_dim] if head_dim % 8 else out), lse, probabilities
    except IndexError:
        check_shapes(q, k, v)
        raise
    except (NotImplementedError, TypeError, ValueError) as error:
        rename(error, names)
        raise


def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (b, sq, h, d) over k, v (b, sk, h_k, d); the module's docstring says the rest."""
    options = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    if library_of(q, "q").operators is None or is_compiling():
        return _attend(q, k, v, *options)
    out = _KEPT.call(q, k, v, options)
    return _attend(q, k, v, *options, whole=options) if out is None else out


def flash_attn_kvpacked_func(
    q: Array,
    kv: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """As :func:`flash_attn_func` with kv (b, sk, 2, h_k, d)."""
    k, v = unpack("kv", kv, 2, 2)
    return _attend(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        names=_KVPACKED,
    )


def flash_attn_qkvpacked_func(
    qkv: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """As :func:`flash_attn_func` with qkv (b, s, 3, h, d); out is (b, s, h, d)."""
    q, k, v = unpack("qkv", qkv, 2, 3)
    return _attend(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        names=_QKVPACKED,
    )


def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Array | None = None,
) -> Any:
    """Attention of q (total_q, h, d) over k, v (total_k, h_k, d), sequence by sequence.

    With `block_table`, int32 (batch, columns), k and v are pages (pages, page_size, h_k, d), and the differences of
    `cu_seqlens_k` are the lengths in them. Pages have no gradient: a backward raises NotImplementedError.
    """
    check_int32("cu_seqlens_q", cu_seqlens_q, "(batch + 1)", 1)
    check_int32("cu_seqlens_k", cu_seqlens_k, "(batch + 1)", 1)
    shared = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    places = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if block_table is None:
        return _attend(q, k, v, *shared, cu_seqlens_k=cu_seqlens_k, **places)
    used = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    return forward_only(
        "block_table",
        (q, k, v),
        lambda: _attend(q, k, v, *shared, _PAGED, page_table=block_table, seqused_k=used, **places),
    )


def flash_attn_varlen_kvpacked_func(
    q: Array,
    kv: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """As :func:`flash_attn_varlen_func` with kv (total_k, 2, h_k, d)."""
    k, v = unpack("kv", kv, 1, 2)
    return _attend(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        names=_KVPACKED,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Array,
    cu_seqlens: Array,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """As :func:`flash_attn_varlen_func` with qkv (total, 3, h, d) and one set of lengths."""
    q, k, v = unpack("qkv", qkv, 1, 3)
    return _attend(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        names=_QKVPACKED,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
    )


def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Array | None = None,
    v: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    cache_seqlens: int | Array | None = None,
    cache_batch_idx: Array | None = None,
    cache_leftpad: Array | None = None,
    block_table: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Array | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Writes k, v behind the first `cache_seqlens` tokens of the cache, in place, then attends q to the cache.

    q (b, sq, h, d); k, v (b, new, h_k, d) or None; caches (b or more, capacity, h_k, d), or pages (pages, page_size,
    h_k, d) with `block_table` int32 (b, columns). `cache_seqlens` int32 (b,) or an int: tokens before the append,
    padding included. `cache_batch_idx` int32 (b,): rows of the cache. `cache_leftpad` int32 (b,): first token that
    counts. `rotary_cos`, `rotary_sin` (positions, rotary_dim / 2), only with k: k and q turn by the position in the
    cache; q without causal and window by `cache_seqlens` alone. `num_splits` above 0 fixes the number of parts of the
    keys.

    Returns out as q, or (out, softmax_lse (b, h, sq)). There is no gradient: a backward raises NotImplementedError.
    Unlike flash-attn, any page size will do, and `block_table` goes together with the two other ways to choose
    tokens. A head dim that is not a multiple of 8 costs a copy of q and of the whole cache; `cache_leftpad` an int32
    index of b × capacity.
    """
    return attend_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        causal=causal,
        window_size=window_size,
        scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        return_lse=return_softmax_lse,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=block_table,
        names=_CACHED,
    )
