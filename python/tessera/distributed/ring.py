# SPDX-License-Identifier: Apache-2.0
"""Keys and values of one rank after the other, while those of the rank before are computed with.

Liu et al. 2023, Ring Attention, arXiv:2310.01889, but for the way: in step t a rank gets the rows that it needs from
the rank t places before it, instead of handing on what came from its neighbour. As many bytes go over each link of a
switch, ranks that a mask keeps apart do not talk, and a gradient of keys goes back to its owner in one hop, where the
shares are added up in the order of the steps: bit for bit the same in every run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import partial
from .partial import Asked, Merged, Result, Sums, Upstream, zeros_like
from .reach import Rows, needs, parts_of_hulls
from .shards import Layout, Part
from .wire import Moved, Pending, Wire

Pieces = dict[int, tuple[Tensor, Tensor]]  # (k, v) by the owner's part


def bounds(layout: Layout, rank: int) -> list[tuple[int, int]]:
    """Rows [begin, end) of each part in the rank's tensors."""
    found, first = [], 0
    for part in layout.parts(rank):
        found.append((first, first + part.rows))
        first += part.rows
    return found


class Ring:
    """keys of ranks in turn."""

    def __init__(self, wire: Wire, layout: Layout) -> None:
        self.wire, self.layout = wire, layout

    def _rows(self, asked: Asked, tensor: Tensor, owner: int, rows: Rows) -> Tensor:
        """`rows` of a tensor of all rows of the owner, which this rank is."""
        first = bounds(self.layout, owner)[rows.part][0]
        return asked.rows(tensor, first + rows.begin, first + rows.end)

    def _like(self, asked: Asked, like: Tensor, rows: Rows, dtype: torch.dtype | None = None) -> Tensor:
        shape = list(like.shape)
        shape[asked.dim] = rows.end - rows.begin
        return like.new_empty(shape, dtype=dtype)

    def _ask(self, asked: Asked, k: Tensor, v: Tensor, step: int) -> tuple[Pieces, Pending]:
        """The rows of the rank `step` places before this one, on their way; own rows go to the one as far behind."""
        rank, ranks = self.wire.rank, self.wire.size
        reader, owner = (rank + step) % ranks, (rank - step) % ranks
        sends = [
            Moved(reader, self._rows(asked, x, rank, rows).contiguous())
            for rows in needs(asked.mask, self.layout, reader, rank)
            for x in (k, v)
        ]
        coming = {
            rows.part: (self._like(asked, k, rows), self._like(asked, v, rows))
            for rows in needs(asked.mask, self.layout, rank, owner)
        }
        receives = [Moved(owner, x) for piece in coming.values() for x in piece]
        return coming, self.wire.start(sends, receives, f"step {step} of the ring")

    def _own(self, asked: Asked, k: Tensor, v: Tensor) -> Pieces:
        mine = needs(asked.mask, self.layout, self.wire.rank, self.wire.rank)
        rank = self.wire.rank
        return {rows.part: (self._rows(asked, k, rank, rows), self._rows(asked, v, rank, rows)) for rows in mine}

    def forward(self, asked: Asked, q: Tensor, k: Tensor, v: Tensor) -> Result:
        rank, ranks = self.wire.rank, self.wire.size
        own = bounds(self.layout, rank)
        merged: list[Merged | None] = [None] * len(own)
        pieces, pending = self._own(asked, k, v), None
        for step in range(ranks):
            if pending is not None:
                pending.wait()
            here = pieces
            if step + 1 < ranks:
                pieces, pending = self._ask(asked, k, v, step + 1)
            for i, part, _, (k1, v1), keys in self._calls(asked, here, (rank - step) % ranks):
                q1 = asked.rows(q, *own[i])
                merged[i] = partial.merge(merged[i], partial.forward(asked, q1, k1, v1, part, keys, partial=True))
        finished = [partial.finish(asked, merged[i], asked.rows(q, *own[i]), v.shape[-1]) for i in range(len(own))]
        return joined(asked, finished)

    def _calls(
        self, asked: Asked, pieces: Pieces, owner: int
    ) -> Iterator[tuple[int, Part, Rows, tuple[Tensor, Tensor], Part]]:
        """(part, its rows' Part, rows of the owner, (k, v) of these, their Part) of each pair that sees something."""
        rank = self.wire.rank
        held = {rows.part: rows for rows in needs(asked.mask, self.layout, rank, owner)}
        for i, part in enumerate(self.layout.parts(rank)):
            for rows, keys in parts_of_hulls(asked.mask, self.layout, rank, i, owner):
                first = held[rows.part].begin
                k, v = (asked.rows(x, rows.begin - first, rows.end - first) for x in pieces[rows.part])
                yield i, part, rows, (k, v), keys

    def backward(
        self, asked: Asked, given: Upstream, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """dq in q's dtype; dk, dv and dsinks in fp32, the last of this rank's queries only."""
        rank, ranks = self.wire.rank, self.wire.size
        own = bounds(self.layout, rank)
        dq, dk, dv = (zeros_like(x) for x in (given.q, k, v))
        dsinks = None if asked.sinks is None else torch.zeros_like(asked.sinks)
        sinks_done = set()
        pieces, pending = self._own(asked, k, v), None
        back: tuple[list[tuple[Rows, Tensor, Tensor]], Pending] | None = None
        for step in range(ranks):
            owner, reader = (rank - step) % ranks, (rank + step) % ranks
            if pending is not None:
                pending.wait()
            here = pieces
            if step + 1 < ranks:
                pieces, pending = self._ask(asked, k, v, step + 1)
            held = {rows.part: rows for rows in needs(asked.mask, self.layout, rank, owner)}
            grads = {
                part: (self._rows(asked, dk, rank, rows), self._rows(asked, dv, rank, rows))
                if step == 0
                else tuple(self._like(asked, x, rows, torch.float32).zero_() for x in (k, v))
                for part, rows in held.items()
            }
            for i, part, rows, (k1, v1), keys in self._calls(asked, here, owner):
                first = held[rows.part].begin
                dk1, dv1 = (asked.rows(x, rows.begin - first, rows.end - first) for x in grads[rows.part])
                sums = Sums(asked.rows(dq, *own[i]), dk1, dv1, None if i in sinks_done else dsinks)
                partial.backward(asked, upstream_rows(asked, given, *own[i]), k1, v1, part, keys, sums)
                sinks_done.add(i)
            if back is not None:
                self._add(asked, dk, dv, *back)
            back = None
            if step > 0:
                returns = [
                    (rows, self._like(asked, dk, rows), self._like(asked, dv, rows))
                    for rows in needs(asked.mask, self.layout, reader, rank)
                ]
                sends = [Moved(owner, x) for pair in grads.values() for x in pair]
                receives = [Moved(reader, x) for _, *pair in returns for x in pair]
                back = returns, self.wire.start(sends, receives, f"gradients of step {step} of the ring")
        if back is not None:
            self._add(asked, dk, dv, *back)
        return dq.to(given.q.dtype), dk, dv, dsinks

    def _add(
        self, asked: Asked, dk: Tensor, dv: Tensor, returns: list[tuple[Rows, Tensor, Tensor]], pending: Pending
    ) -> None:
        pending.wait()
        for rows, more_dk, more_dv in returns:
            self._rows(asked, dk, self.wire.rank, rows).add_(more_dk)
            self._rows(asked, dv, self.wire.rank, rows).add_(more_dv)


def joined(asked: Asked, results: list[Result]) -> Result:
    """Results of a rank's parts as one, in order."""
    if len(results) == 1:
        return results[0]
    residuals = [x.residual for x in results if x.residual is not None]
    return Result(
        torch.cat([x.out for x in results], asked.dim),
        torch.cat([x.lse for x in results], -1),
        torch.cat(residuals, asked.dim) if residuals else None,
    )


def upstream_rows(asked: Asked, given: Upstream, begin: int, end: int) -> Upstream:
    q, dout, out, residual, lse, dlse = given
    q, dout, out = (asked.rows(x, begin, end) for x in (q, dout, out))
    lost = None if residual is None else asked.rows(residual, begin, end)
    return Upstream(q, dout, out, lost, lse[..., begin:end], None if dlse is None else dlse[..., begin:end])
