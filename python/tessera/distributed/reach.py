# SPDX-License-Identifier: Apache-2.0
"""Which keys the masks of a call may let queries see, as ranges of rows: what is moved and computed follows from it."""

from __future__ import annotations

from typing import NamedTuple

from .shards import Layout, Part, kept_by_layout


class Mask(NamedTuple):
    """What bounds the visible positions. window: as `tessera.attention` has it, causal included. chunk: 0 for none."""

    left: int | None = None
    right: int | None = None
    chunk: int = 0

    def keys_of(self, first: int, last: int) -> tuple[float, float]:
        """Positions [low, high) that some query from `first` to `last`, inclusive, may see; not cut to a sequence."""
        low = float("-inf") if self.left is None else first - self.left
        high = float("inf") if self.right is None else last + self.right + 1
        if self.chunk:
            low = max(low, first // self.chunk * self.chunk)
            high = min(high, (last // self.chunk + 1) * self.chunk)
        return low, high


class Rows(NamedTuple):
    """Rows [begin, end) of a rank's part."""

    part: int
    begin: int
    end: int


def hull(mask: Mask, queries: Part, keys: Part) -> tuple[int, int] | None:
    """The fewest rows [begin, end) of `keys` that hold all that `queries` may see; None if they see none."""
    begin = end = None
    first = 0
    for q_start, q_length, k_start, k_length in zip(*queries, *keys, strict=True):
        if q_length and k_length:
            low, high = mask.keys_of(q_start, q_start + q_length - 1)
            low, high = max(low, k_start), min(high, k_start + k_length)
            if low < high:
                if begin is None:
                    begin = first + int(low) - k_start
                end = first + int(high) - k_start
        first += k_length
    return None if begin is None or end is None else (begin, end)


@kept_by_layout
def hulls(mask: Mask, layout: Layout, reader: int, part: int, owner: int) -> tuple[Rows, ...]:
    """Rows of the owner's parts that one part of the reader's queries may see."""
    queries = layout.parts(reader)[part]
    found = ((i, hull(mask, queries, keys)) for i, keys in enumerate(layout.parts(owner)))
    return tuple(Rows(i, *rows) for i, rows in found if rows is not None)


@kept_by_layout
def parts_of_hulls(mask: Mask, layout: Layout, reader: int, part: int, owner: int) -> tuple[tuple[Rows, Part], ...]:
    """The same rows, each with what they are a part of."""
    own = layout.parts(owner)
    found = hulls(mask, layout, reader, part, owner)
    return tuple((rows, own[rows.part].cut(rows.begin, rows.end)) for rows in found)


@kept_by_layout
def needs(mask: Mask, layout: Layout, reader: int, owner: int) -> tuple[Rows, ...]:
    """Rows of the owner's parts that the reader's queries may see, one range a part at most."""
    parts = range(len(layout.parts(reader)))
    found: dict[int, tuple[int, int]] = {}
    for rows in [rows for part in parts for rows in hulls(mask, layout, reader, part, owner)]:
        begin, end = found.get(rows.part, (rows.begin, rows.end))
        found[rows.part] = min(begin, rows.begin), max(end, rows.end)
    return tuple(Rows(part, *found[part]) for part in sorted(found))


@kept_by_layout
def moved_rows(mask: Mask, layout: Layout) -> tuple[int, ...]:
    """Rows of keys that ranks need of others: of each, or of a sample of many."""
    return tuple(
        sum(rows.end - rows.begin for j in range(layout.ranks) if j != r for rows in needs(mask, layout, r, j))
        for r in _sample(layout.ranks)
    )


def _sample(ranks: int) -> list[int]:
    most = min(ranks, 16)
    return sorted({i * (ranks - 1) // max(most - 1, 1) for i in range(most)})


@kept_by_layout
def pairs(mask: Mask, layout: Layout) -> tuple[int, ...]:
    """Visible (query, key) pairs of ranks, by a sample of rows: their work. Of each rank, or of a sample of many."""
    return tuple(sum(_pairs_of_part(mask, layout, part) for part in layout.parts(r)) for r in _sample(layout.ranks))


def _pairs_of_part(mask: Mask, layout: Layout, part: Part) -> int:
    total = 0
    for start, length, whole in zip(*part, layout.lengths, strict=True):
        if length:
            step = max(1, length // 64)  # a sample of rows
            seen = 0
            for row in range(start, start + length, step):
                low, high = mask.keys_of(row, row)
                seen += max(0, int(min(high, whole)) - int(max(low, 0)))
            total += seen * length // len(range(start, start + length, step))
    return total
