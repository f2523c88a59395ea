# SPDX-License-Identifier: Apache-2.0
"""Recognises what a dense attention mask says in a few numbers: a window around the diagonal, lengths, or both.

A proposal is read off the mask's rows, the mask is rebuilt from it, and only an equal rebuild is accepted. Hence a
recognised pattern is exact, whatever the heuristics of the proposal. The cost is some passes over the (batch, seqlen_q,
seqlen_k) elements, about 1/head_dim of the attention itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class MaskPattern(NamedTuple):
    """Key j is visible to row i of sequence b when ``i - left <= j <= i + right``, ``j < keys[b]`` and ``i < rows[b]``.

    i and j are indices from the top left corner. With ``starts``, row i counts as ``i + starts[b]`` in the window.
    """

    left: int | None = None
    right: int | None = None
    keys: Tensor | None = None  # int32 (batch,): keys of each sequence; None: all
    rows: Tensor | None = None  # int32 (batch,): query rows of each sequence; None: all
    starts: Tensor | None = None  # int64 (batch,): what is added to a row's index; None: 0


class Unrecognised(NamedTuple):
    reason: str


def recognise(mask: Tensor, batch: int, seqlen_q: int, seqlen_k: int) -> MaskPattern | Unrecognised:
    """The pattern of a mask that broadcasts to (batch, heads, seqlen_q, seqlen_k).

    mask: bool (True is visible) or floating (0 is visible, -inf is hidden), 2 to 4 dimensions. Reads the mask's data.
    """
    if mask.dim() < 2 or mask.dim() > 4:
        return Unrecognised(f"a mask of {mask.dim()} dimensions")
    mask = mask[(None,) * (4 - mask.dim())]
    # A dimension that is broadcast, as itself or by expand(), is read once.
    mask = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]
    if mask.shape[1] != 1:
        return Unrecognised("a mask that differs between heads")
    if any(got not in (1, want) for got, want in zip(mask.shape, (batch, 1, seqlen_q, seqlen_k), strict=True)):
        return Unrecognised("a mask whose shape is not that of the scores")
    if mask.is_floating_point():
        if not bool(((mask == 0) | (mask == -torch.inf)).all()):
            return Unrecognised("a float mask of values other than 0 and -inf")
        mask = mask == 0
    elif mask.dtype != torch.bool:
        return Unrecognised(f"a mask of {mask.dtype}")
    if batch == 0 or seqlen_q == 0 or seqlen_k == 0:
        return MaskPattern()
    visible = mask[:, 0].expand(-1, -1, seqlen_k)  # (1 or batch, 1 or seqlen_q, seqlen_k)
    found = _one_row(visible, seqlen_k) if seqlen_q == 1 or visible.shape[1] == 1 else None
    if found is None:
        found = _rows(visible.expand(-1, seqlen_q, -1))
    if found is None:
        return Unrecognised("a mask that is neither a window nor lengths")
    pattern = MaskPattern(*found)
    if pattern.starts is not None and seqlen_q != 1:
        return Unrecognised("a mask that hides leading keys from every row")
    keys, rows, starts = (_of_batch(x, batch) for x in (pattern.keys, pattern.rows, pattern.starts))
    return pattern._replace(keys=keys, rows=rows, starts=starts)


def _of_batch(lengths: Tensor | None, batch: int) -> Tensor | None:
    """Lengths (1) or (batch) as (batch)."""
    return None if lengths is None else lengths.expand(batch).contiguous()


def _ends(visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: first visible key, last visible key (both mean nothing if there is none), whether there is any."""
    flags = visible.to(torch.uint8)
    first = flags.argmax(-1)
    last = visible.shape[-1] - 1 - flags.flip(-1).argmax(-1)
    return first, last, visible.any(-1)


def _one_row(visible: Tensor, seqlen_k: int) -> MaskPattern | None:
    """Masks of one row, or the same for every row: an interval of keys for each sequence."""
    first, last, some = (end[:, 0] for end in _ends(visible[:, :1]))
    begin = torch.where(some, first, 0)
    end = torch.where(some, last + 1, 0)
    j = torch.arange(seqlen_k, device=visible.device)
    rebuilt = (j >= begin[:, None]) & (j < end[:, None])
    if not torch.equal(rebuilt, visible[:, 0]):
        return None
    keys = None if bool((end == seqlen_k).all()) else end.to(torch.int32)
    if bool((begin == 0).all()):
        return MaskPattern(keys=keys)
    return MaskPattern(left=0, keys=keys, starts=begin)


def _rows(visible: Tensor) -> MaskPattern | None:
    """Masks (batch, seqlen_q, seqlen_k) of several rows: a window, the same for all sequences, cut off at lengths."""
    seqlen_q, seqlen_k = visible.shape[1:]
    first, last, some = _ends(visible)
    if not bool(some.any()):
        return MaskPattern(keys=torch.zeros(visible.shape[0], dtype=torch.int32, device=visible.device))
    i = torch.arange(seqlen_q, device=visible.device)
    j = torch.arange(seqlen_k, device=visible.device)
    rows = torch.where(some, i + 1, 0).amax(-1)
    below_diagonal = (first - i)[some & (first > 0)]
    left = int(-below_diagonal[0]) if below_diagonal.numel() else None
    used = torch.where(some, last + 1, 0).amax(-1)
    # Rows that end before the last used key show where the window ends; if there are none, no window may be needed.
    cut_by_window = (last - i)[some & (last + 1 < used[:, None])]
    end_of_window = int(cut_by_window[0]) if cut_by_window.numel() else None
    whole = torch.full_like(used, seqlen_k)
    proposals = ((end_of_window, whole), (end_of_window, used), (int((last - i)[some].amax()), whole))
    full_rows = torch.full_like(rows, seqlen_q)
    for right, keys in proposals:
        window = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=visible.device)
        if left is not None:
            window &= j >= i[:, None] - left
        if right is not None:
            window &= j <= i[:, None] + right
        rebuilt = window & (j < keys[:, None, None])
        for used_rows in (full_rows, rows):
            if torch.equal(rebuilt & (i[:, None] < used_rows[:, None, None]), visible):
                return MaskPattern(
                    left,
                    right,
                    None if bool((keys == seqlen_k).all()) else keys.to(torch.int32),
                    None if used_rows is full_rows else used_rows.to(torch.int32),
                )
    return None
