# SPDX-License-Identifier: Apache-2.0
"""All-to-all of heads against rows: between two exchanges a rank has some heads of all rows, not all heads of some.

Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509; with a ring of such groups around it Fang and Zhao 2024, USP,
arXiv:2405.07719. What computes between the exchanges is another schedule, over the rows that the group holds together.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .partial import Asked, Result, Upstream
from .shards import Layout
from .wire import Moved, Wire


class Schedule(Protocol):
    """What computes attention of one rank's queries to all keys."""

    def forward(self, asked: Asked, q: Tensor, k: Tensor, v: Tensor) -> Result: ...

    def backward(
        self, asked: Asked, given: Upstream, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]: ...


def head_ranges(ranks: int, heads_q: int, heads_kv: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Query heads [begin, end) and key heads of each rank. Where there are fewer key heads than ranks, several ranks
    get one. Raises ValueError for heads that cannot be split without cutting groups."""
    if heads_q % ranks:
        raise ValueError(f"q: got {heads_q} heads; want a multiple of the {ranks} ranks that share them by ulysses")
    mine, group = heads_q // ranks, heads_q // heads_kv
    if mine % group and group % mine:
        raise ValueError(
            f"k: got {heads_kv} heads for {heads_q} of q, groups of {group}; want groups that divide the {mine} query "
            f"heads of each of {ranks} ranks, or are multiples of them; or method 'all_gather' or 'ring'"
        )
    found = []
    for rank in range(ranks):
        begin, end = rank * mine, (rank + 1) * mine
        found.append(((begin, end), (begin // group, (end - 1) // group + 1)))
    return found


class Ulysses:
    """heads of a group of ranks, whose rows `inner` knows as those of one.

    outer: the layout over all ranks; first: the rank there of the group's rank 0. layout, inner_rank: inner's layout,
    and this group's rank there. heads: of q and of k.
    """

    def __init__(
        self,
        wire: Wire,
        outer: Layout,
        first: int,
        inner: Schedule,
        layout: Layout,
        inner_rank: int,
        heads: tuple[int, int],
    ) -> None:
        self.wire, self.inner = wire, inner
        self.ranges = head_ranges(wire.size, *heads)
        self.counts = [outer.rows(first + u) for u in range(wire.size)]
        there = torch.cat([outer.index(first + u) for u in range(wire.size)])
        place = torch.empty(outer.tokens, dtype=torch.int64)
        place[there] = torch.arange(len(there))
        self.order = place[layout.index(inner_rank)]  # of inner's rows among those of the group's ranks
        self.back = torch.empty_like(self.order)
        self.back[self.order] = torch.arange(len(self.order))
        self._placed: dict[tuple[str, torch.device], Tensor] = {}
        self.in_order = torch.equal(self.order, torch.arange(len(self.order)))

    def _on(self, name: str, device: torch.device) -> Tensor:
        if (name, device) not in self._placed:
            self._placed[name, device] = getattr(self, name).to(device)
        return self._placed[name, device]

    def to_heads(self, asked: Asked, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """q, k and v of this rank's heads, rows of all ranks."""
        return self._to_heads(asked, [(q, 0), (k, 1), (v, 1)], self.ranges, "the exchange of rows for heads")

    def to_rows(self, asked: Asked, out: Tensor) -> Tensor:
        """out of all heads, this rank's rows."""
        back = [(out, asked.dim, asked.dim + 1, 0, False)]
        return self._to_rows(back, self.ranges, "the exchange of heads for rows")[0]

    def _to_heads(self, asked: Asked, tensors: list[tuple[Tensor, int]], ranges: list, doing: str) -> list[Tensor]:
        """Rows of all ranks, in inner's order, of this rank's heads. The number beside a tensor says whose heads it
        has: 0 those of q, 1 those of k."""
        me = self.wire.rank
        sends, receives, made = [], [], []
        for x, kind in tensors:
            rows_of = []
            for u, count in enumerate(self.counts):
                part = x[..., slice(*ranges[u][kind]), :].contiguous()
                shape = list(x.shape)
                shape[asked.dim], shape[-2] = count, ranges[me][kind][1] - ranges[me][kind][0]
                rows_of.append(part if u == me else x.new_empty(shape))
                if u != me:
                    sends.append(Moved(u, part))
                    receives.append(Moved(u, rows_of[u]))
            made.append(rows_of)
        self.wire.start(sends, receives, doing).wait()
        joined = [torch.cat(rows_of, asked.dim) for rows_of in made]
        return joined if self.in_order else [x.index_select(asked.dim, self._on("order", x.device)) for x in joined]

    def _to_rows(self, tensors: list[tuple[Tensor, int, int, int, bool]], ranges: list, doing: str) -> list[Tensor]:
        """The way back: this rank's rows of all heads. Beside a tensor: its dimension of rows, that of heads, whose
        heads they are, and how many there are; heads that several ranks have are added up in the order of the ranks."""
        me = self.wire.rank
        sends, receives, made = [], [], []
        for x, rows_at, heads_at, kind, _ in tensors:
            if not self.in_order:
                x = x.index_select(rows_at, self._on("back", x.device))
            rows = [part.contiguous() for part in x.split(self.counts, rows_at)]
            mine = []
            for u in range(self.wire.size):
                shape = list(rows[me].shape)
                shape[heads_at] = ranges[u][kind][1] - ranges[u][kind][0]
                mine.append(rows[me] if u == me else x.new_empty(shape))
                if u != me:
                    sends.append(Moved(u, rows[u]))
                    receives.append(Moved(u, mine[u]))
            made.append(mine)
        self.wire.start(sends, receives, doing).wait()
        results = []
        for (_, _, heads_at, kind, shared), mine in zip(tensors, made, strict=True):
            if not shared:
                results.append(torch.cat(mine, heads_at))
                continue
            shape = list(mine[0].shape)
            shape[heads_at] = max(end for _, end in (r[kind] for r in ranges))
            total = mine[0].new_zeros(shape)
            for u, part in enumerate(mine):
                begin, end = ranges[u][kind]
                total.narrow(heads_at, begin, end - begin).add_(part)
            results.append(total)
        return results

    def forward(self, asked: Asked, q: Tensor, k: Tensor, v: Tensor) -> Result:
        ranges = self.ranges
        moved = self.to_heads(asked, q, k, v)
        result = self.inner.forward(asked.of_heads(*ranges[self.wire.rank][0]), *moved)
        at = asked.dim
        back = [(result.out, at, at + 1, 0, False), (result.lse, result.lse.dim() - 1, result.lse.dim() - 2, 0, False)]
        kept = (*moved, result.out, result.lse, result.residual)
        out, lse = self._to_rows(back, ranges, "the exchange of heads for rows")
        return Result(out, lse, None, kept)

    def backward(
        self, asked: Asked, dout: Tensor, dlse: Tensor | None, kept: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """dq in q's dtype; dk and dv in fp32, or in k's and v's dtypes where they are whole; dsinks in fp32, of this
        rank's heads and of all rows. kept: of the forward's result."""
        q, k, v, out, lse, residual = kept
        assert q is not None and k is not None and v is not None and out is not None and lse is not None
        ranges = self.ranges
        tensors = [(dout, 0)]
        if dlse is not None:
            tensors.append((dlse.transpose(-1, -2)[..., None].contiguous(), 0))
        dout, *dlses = self._to_heads(asked, tensors, ranges, "the exchange of rows for heads")
        dlse = dlses[0][..., 0].transpose(-1, -2).contiguous() if dlses else None
        inside = asked.of_heads(*ranges[self.wire.rank][0])
        upstream = Upstream(q, dout, out, residual, lse, dlse)
        dq, dk, dv, dsinks = self.inner.backward(inside, upstream, k, v)
        shared = ranges[0][1] == ranges[1][1] if len(ranges) > 1 else False
        if not shared:  # whole: nothing is to be added
            dk, dv = dk.to(k.dtype), dv.to(v.dtype)
        at = asked.dim
        back = [(dq, at, at + 1, 0, False), (dk, at, at + 1, 1, shared), (dv, at, at + 1, 1, shared)]
        dq, dk, dv = self._to_rows(back, ranges, "the exchange of gradients")
        if asked.sinks is not None and dsinks is not None:
            begin, end = ranges[self.wire.rank][0]
            all_heads = torch.zeros_like(asked.sinks)
            all_heads[begin:end] = dsinks
            dsinks = all_heads
        return dq, dk, dv, dsinks
