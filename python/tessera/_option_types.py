# SPDX-License-Identifier: Apache-2.0
"""The keywords that `attention_backward`, `plan` and `explain` share with `attention`, for type checkers.

Written by scripts/python-options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .tiles import TileList
    from .values import KeySource, Offsets, Tiles

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
    score: Any
    mask: Any
    extras: Sequence[Array]
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: Array | None
    seqused_k: Array | None
    k2: KeySource | None
    offsets: Offsets | None
    tiles: TileList | Tiles | None
    return_lse: bool
    deterministic: bool
    batch_invariant: bool
    out_dtype: Any
    wishes: str
    threads: int
    metadata: str | None
    status: Array | None
