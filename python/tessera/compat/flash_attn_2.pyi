# SPDX-License-Identifier: Apache-2.0
"""Types of flash_attn_2: a call returns out alone, and a tuple where more is asked for; docs are in the module."""

from typing import Any, Literal, TypeVar, overload

Array = Any
T = TypeVar("T")  # the arrays of a library

@overload
def flash_attn_func(
    q: T,
    k: T,
    v: T,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
) -> T: ...
@overload
def flash_attn_func(
    q: T,
    k: T,
    v: T,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
) -> tuple[T, T, T]: ...
@overload
def flash_attn_func(
    q: T,
    k: T,
    v: T,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> T | tuple[T, T, T]: ...
@overload
def flash_attn_kvpacked_func(
    q: T,
    kv: T,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
) -> T: ...
@overload
def flash_attn_kvpacked_func(
    q: T,
    kv: T,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
) -> tuple[T, T, T]: ...
@overload
def flash_attn_kvpacked_func(
    q: T,
    kv: T,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> T | tuple[T, T, T]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: T,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
) -> T: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: T,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
) -> tuple[T, T, T]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: T,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> T | tuple[T, T, T]: ...
@overload
def flash_attn_varlen_func(
    q: T,
    k: T,
    v: T,
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
    return_attn_probs: Literal[False] = False,
    block_table: Array | None = None,
) -> T: ...
@overload
def flash_attn_varlen_func(
    q: T,
    k: T,
    v: T,
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
    *,
    return_attn_probs: Literal[True],
    block_table: Array | None = None,
) -> tuple[T, T, T]: ...
@overload
def flash_attn_varlen_func(
    q: T,
    k: T,
    v: T,
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
) -> T | tuple[T, T, T]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: T,
    kv: T,
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
    return_attn_probs: Literal[False] = False,
) -> T: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: T,
    kv: T,
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
    *,
    return_attn_probs: Literal[True],
) -> tuple[T, T, T]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: T,
    kv: T,
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
) -> T | tuple[T, T, T]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: T,
    cu_seqlens: Array,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
) -> T: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: T,
    cu_seqlens: Array,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
) -> tuple[T, T, T]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: T,
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
) -> T | tuple[T, T, T]: ...
@overload
def flash_attn_with_kvcache(
    q: T,
    k_cache: T,
    v_cache: T,
    k: T | None = None,
    v: T | None = None,
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
    return_softmax_lse: Literal[False] = False,
) -> T: ...
@overload
def flash_attn_with_kvcache(
    q: T,
    k_cache: T,
    v_cache: T,
    k: T | None = None,
    v: T | None = None,
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
    *,
    return_softmax_lse: Literal[True],
) -> tuple[T, T]: ...
@overload
def flash_attn_with_kvcache(
    q: T,
    k_cache: T,
    v_cache: T,
    k: T | None = None,
    v: T | None = None,
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
) -> T | tuple[T, T]: ...
