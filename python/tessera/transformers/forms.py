# SPDX-License-Identifier: Apache-2.0
"""Which keys each query sees, in a form that attention takes as it is.

The forms, from the cheapest on; batch b, queries sq, keys sk of one call:

=========  ===================================================================  =========================
form       what                                                                  size
=========  ===================================================================  =========================
`Window`   one window about the query's position, and per-sequence lengths        2 · b integers
`Pieces`   runs of keys with their queries: varlen over the tensors as they lie  4 · pieces integers
`Tiles`    a list of tiles one key wide: holes in the padding, unions of masks   b · sk, or b · sq · sk, bits
=========  ===================================================================  =========================

A window says causal, sliding and bidirectional attention with padding on the right and with the unused tail of a static
cache, and a decode step under any padding on the left: the one query is told to stand at the first key it sees, and
sees all from there on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import masking_utils

# transformers passes a prepared mask on only if it is a tensor or a BlockMask of four dimensions.
_Prepared: type = masking_utils.BlockMask


@dataclass
class Window:
    """Dense layout. Key j is visible to query i if ``-left <= j - (i + q_offset[b]) <= right`` and ``j < used[b]``.

    Attributes:
        left, right: ends of the window, inclusive; None: unbounded.
        q_offset: int64 (b), or None: the last query stands at the last key.
        used: int32 (b), keys of each sequence, or None: all.
    """

    left: int | None
    right: int | None
    q_offset: torch.Tensor | None = None
    used: torch.Tensor | None = None


@dataclass
class Pieces:
    """Varlen layout. Piece p of row b: queries from `first_query` to the next piece's, `used` keys from `first_key` on.

    Attributes:
        left, right: ends of the window within a piece; positions count from the piece's first key.
        first_key, used, first_query: int32 (b, pieces).
        q_offset: int64 (b, pieces), position of the piece's first query.
        longest_q: most queries of a piece.
    """

    left: int | None
    right: int | None
    first_key: torch.Tensor
    used: torch.Tensor
    first_query: torch.Tensor
    q_offset: torch.Tensor
    longest_q: int
    _boundaries: dict[tuple[int, int], tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def boundaries(self, row_stride: int, rows: int, queries: int) -> tuple[torch.Tensor, ...]:
        """(cu_seqlens_q, cu_seqlens_k, seqused_k, q_offset) of the pieces of all rows, one empty piece in front.

        `row_stride`: tokens from one batch row's first key to the next one's; `rows`: tokens of the key tensor;
        `queries`: of a row. The empty piece takes the keys before the first visible one: boundaries begin at 0.
        """
        # A graph has one call to make them in, and sizes as keys would be constants there.
        keeps = not torch.compiler.is_compiling()
        if keeps and (row_stride, rows) in self._boundaries:
            return self._boundaries[row_stride, rows]
        device = self.first_key.device
        row = torch.arange(self.first_key.shape[0], dtype=torch.int32, device=device)[:, None]
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        end_q = torch.full((1,), self.first_query.shape[0] * queries, dtype=torch.int32, device=device)
        end_k = torch.full((1,), rows, dtype=torch.int32, device=device)
        made = (
            torch.cat([zero, (self.first_query + row * queries).flatten(), end_q]),
            torch.cat([zero, (self.first_key + row * row_stride).flatten(), end_k]),
            torch.cat([zero, self.used.flatten()]),
            torch.cat([zero.to(torch.int64), self.q_offset.flatten()]),
        )
        if keeps:
            self._boundaries[row_stride, rows] = made
        return made


@dataclass
class Tiles:
    """A list of tiles one key wide on top of a window.

    Attributes:
        window: as of `Window`.
        bits: int32 (b, 1 or heads, query blocks, ceil(sk / 32)), bit j % 32 of word j / 32: key j.
        block_q: queries of a tile.
    """

    window: Window
    bits: torch.Tensor
    block_q: int


def pack_bits(visible: torch.Tensor) -> torch.Tensor:
    """bool (b, h, sq, sk) to int32 (b, h, sq, ceil(sk / 32)): bit j % 32 of word j / 32 is key j."""
    words = (visible.shape[-1] + 31) // 32
    padded = torch.nn.functional.pad(visible, (0, words * 32 - visible.shape[-1]))
    place = torch.arange(32, dtype=torch.int32, device=visible.device)
    bits = padded.unflatten(-1, (words, 32)).to(torch.int32) << place
    return bits.sum(-1, dtype=torch.int32)  # distinct bits: the sum is their union, the sign bit included


class VisibleKeys(_Prepared):  # type: ignore[misc]
    """The mask of one forward: what transformers hands from the model to every attention layer.

    Attributes:
        shape: (b, 1, sq, sk), what a dense mask would have.
        form: `Window`, `Pieces` or `Tiles`.
        left, right: the window of the mask, whatever the form.
        one_document: bool, no dimensions; a traced graph takes for granted that it holds. None: known.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        form: Window | Pieces | Tiles,
        left: int | None,
        right: int | None,
        one_document: torch.Tensor | None = None,
    ):
        self._shape = shape
        self.form = form
        self.left = left
        self.right = right
        self.one_document = one_document

    @property
    def shape(self) -> tuple[int, int, int, int]:  # type: ignore[override]
        return self._shape

    @property
    def ndim(self) -> int:
        return 4

    def contiguous(self) -> VisibleKeys:
        """Itself: nothing here has strides."""
        return self

    def to(self, *_: Any, **__: Any) -> VisibleKeys:  # type: ignore[override]
        """Itself: it was made on the device of the model's inputs."""
        return self

    def numel(self) -> int:
        b, h, sq, sk = self._shape
        return b * h * sq * sk

    def __getitem__(self, _: Any) -> VisibleKeys:  # type: ignore[override]
        raise NotImplementedError("attention_mask: got an index into it; want it used as it is, it is no dense tensor")

    def __repr__(self) -> str:
        return (
            f"VisibleKeys({type(self.form).__name__.lower()}, shape={self._shape}, window=({self.left}, {self.right}))"
        )

    __str__ = __repr__
