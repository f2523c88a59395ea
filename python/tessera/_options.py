# SPDX-License-Identifier: Apache-2.0
"""The keywords that `attention_backward`, `plan` and `explain` share with `attention`, for type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from .tiles import TileList

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = Any


class AttentionOptions(TypedDict, total=False):
    """`tessera.attention` explains them."""

    causal: bool
    window: tuple[int | None, int | None] | None
    compressed_causal: tuple[int, int] | None
    attention_chunk: int
    scale: float | None
    softcap: float
    alibi_slopes: Array | None
    sinks: Array | None
    dropout: float
    seed: Any
    offset: Any
    score: Any
    mask: Any
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: Array | None
    seqused_k: Array | None
    page_table: Array | None
    page_indptr: Array | None
    page_indices: Array | None
    last_page_len: Array | None
    k2: Array | None
    v2: Array | None
    cu_seqlens_k2: Array | None
    max_seqlen_k2: int | None
    seqused_k2: Array | None
    page_table2: Array | None
    page_indptr2: Array | None
    page_indices2: Array | None
    last_page_len2: Array | None
    q_offset: Array | None
    k_offset: Array | None
    k_offset2: Array | None
    batch_offset: int
    head_offset: int
    tiles: TileList | None
    bwd_tiles: TileList | None
    block: tuple[int, int] | None
    mass: str | None
    prior_lse: Array | None
    next_tiles: str | None
    threshold: float
    return_lse: bool
    deterministic: bool
    batch_invariant: bool
    out_dtype: Any
    wishes: str
    threads: int
    metadata: str | None
    status: Array | None
    extras: Sequence[Array]
