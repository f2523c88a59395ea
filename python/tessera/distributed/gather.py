# SPDX-License-Identifier: Apache-2.0
"""All keys and values that a rank's queries may see are fetched at once; then each part of the queries is one call.

No partial results and no merging: sinks, softcap and every mask are the kernel's own. The price is memory for the keys
of all ranks (Llama 3, Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2, trains like this). Gradients of keys go
back in fp32 and are added up by their owner.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..torch.operators import is_deterministic
from . import partial
from .partial import Asked, Result, Sums, Upstream, zeros_like
from .reach import Mask, Rows, hulls, needs
from .ring import bounds, joined, upstream_rows
from .shards import Layout, Part, kept_by_layout
from .wire import Moved, Wire

Pair = tuple[Tensor, Tensor]  # of keys and values
Pieces = dict[tuple[int, int], Pair]  # by owner and part


class Call(NamedTuple):
    """Keys of one part of queries: rows of owners behind each other, then `order` of these in that of sequences
    and positions (None: they lie so already), which are `keys`."""

    slices: tuple[tuple[int, Rows], ...]
    order: Tensor | None
    keys: Part


@kept_by_layout
def call_of(mask: Mask, layout: Layout, rank: int, part: int) -> Call | None:
    """None where the queries see no key."""
    slices = [(owner, rows) for owner in range(layout.ranks) for rows in hulls(mask, layout, rank, part, owner)]
    if not slices:
        return None
    cuts = [layout.parts(owner)[rows.part].cut(rows.begin, rows.end) for owner, rows in slices]
    if not layout.packed:
        order = sorted(range(len(slices)), key=lambda i: cuts[i].starts)
        keys = Part(cuts[order[0]].starts, (sum(cut.rows for cut in cuts),))
        return Call(tuple(slices[i] for i in order), None, keys)
    found: list[list[tuple[int, int, int]]] = [[] for _ in layout.lengths]  # by sequence: position, row, how many
    row = 0
    for cut in cuts:
        for s, (start, length) in enumerate(zip(*cut, strict=True)):
            q_start, q_length = (x[s] for x in layout.parts(rank)[part])
            if q_length and length:
                low, high = mask.keys_of(q_start, q_start + q_length - 1)
                low, high = int(max(low, start)), int(min(high, start + length))
                if low < high:
                    found[s].append((low, row + low - start, high - low))
            row += length
    runs = [run for of_sequence in found for run in sorted(of_sequence)]
    index = torch.cat([torch.arange(first, first + count) for _, first, count in runs])
    starts = tuple(min(of_sequence)[0] if of_sequence else 0 for of_sequence in found)
    keys = Part(starts, tuple(sum(count for *_, count in of_sequence) for of_sequence in found))
    return Call(tuple(slices), None if torch.equal(index, torch.arange(row)) else index, keys)


@kept_by_layout
def order_on(mask: Mask, layout: Layout, rank: int, part: int, device: torch.device) -> Tensor | None:
    """`Call.order`, on a device."""
    call = call_of(mask, layout, rank, part)
    return None if call is None or call.order is None else call.order.to(device)


class Gather:
    """keys of all ranks at once. Without a wire the rank is alone, and this is the single call."""

    def __init__(self, wire: Wire | None, layout: Layout) -> None:
        self.wire, self.layout = wire, layout
        self.rank, self.ranks = (0, 1) if wire is None else (wire.rank, wire.size)

    def _is_collective(self, mask: Mask) -> bool:
        """Whether some rank needs rows of all others: it waits as long as an all-gather takes."""
        ranks = range(self.ranks)
        return any(all(needs(mask, self.layout, r, j) for j in ranks if j != r) for r in ranks)

    def _padded(self, asked: Asked, like: Tensor, dtype: torch.dtype, ranks: int = 0) -> Tensor:
        """(ranks, …) or (…) with as many rows as the longest rank has."""
        shape = list(like.shape)
        shape[asked.dim] = max(self.layout.rows(rank) for rank in range(self.ranks))
        return like.new_zeros([ranks, *shape] if ranks else shape, dtype=dtype)

    def _views(self, asked: Asked, gathered: Pair) -> Pieces:
        """Pieces that each rank's rows are needed of, in tensors (ranks, …)."""
        found: Pieces = {}
        for owner in range(self.ranks):
            own = bounds(self.layout, owner)
            for rows in needs(asked.mask, self.layout, self.rank, owner):
                first = own[rows.part][0]
                k, v = (asked.rows(x[owner], first + rows.begin, first + rows.end) for x in gathered)
                found[owner, rows.part] = k, v
        return found

    def _own(self, asked: Asked, tensors: Pair, reader: int) -> list[tuple[Rows, Pair]]:
        """This rank's rows that a reader needs, as views."""
        own = bounds(self.layout, self.rank)
        found = []
        for rows in needs(asked.mask, self.layout, reader, self.rank):
            first = own[rows.part][0]
            k, v = (asked.rows(x, first + rows.begin, first + rows.end) for x in tensors)
            found.append((rows, (k, v)))
        return found

    def _empty(self, asked: Asked, tensors: Pair, rows: Rows, dtype: torch.dtype | None = None) -> Pair:
        made = []
        for x in tensors:
            shape = list(x.shape)
            shape[asked.dim] = rows.end - rows.begin
            made.append(x.new_zeros(shape, dtype=dtype))
        return made[0], made[1]

    def _fetch(self, asked: Asked, k: Tensor, v: Tensor) -> Pieces:
        pieces: Pieces = {(self.rank, rows.part): pair for rows, pair in self._own(asked, (k, v), self.rank)}
        if self.wire is None or self.ranks == 1:
            return pieces
        if self.wire.by_backend(k) and self._is_collective(asked.mask):
            gathered = []
            for x in (k, v):
                mine = x
                if any(self.layout.rows(rank) != x.shape[asked.dim] for rank in range(self.ranks)):
                    mine = self._padded(asked, x, x.dtype)
                    asked.rows(mine, 0, x.shape[asked.dim]).copy_(x)
                gathered.append(self.wire.gather(mine, "the all-gather of keys and values"))
            return self._views(asked, (gathered[0], gathered[1]))
        sends, receives = [], []
        for other in range(self.ranks):
            if other != self.rank:
                for _, pair in self._own(asked, (k, v), other):
                    sends += [Moved(other, x.contiguous()) for x in pair]
                for rows in needs(asked.mask, self.layout, self.rank, other):
                    pieces[other, rows.part] = pair = self._empty(asked, (k, v), rows)
                    receives += [Moved(other, x) for x in pair]
        self.wire.start(sends, receives, "the exchange of keys and values").wait()
        return pieces

    def _keys(self, asked: Asked, pieces: Pieces, call: Call, part: int) -> Pair:
        """Keys and values of the call of a part."""
        cut = [self._piece(asked, pieces, owner, rows) for owner, rows in call.slices]
        made = []
        for each in zip(*cut, strict=True):
            joined_rows = each[0] if len(each) == 1 else torch.cat(each, asked.dim)
            order = order_on(asked.mask, self.layout, self.rank, part, joined_rows.device)
            if order is not None:
                joined_rows = joined_rows.index_select(asked.dim, order)
            made.append(joined_rows)
        return made[0], made[1]

    def _piece(self, asked: Asked, pieces: Pieces, owner: int, rows: Rows) -> Pair:
        held = next(x for x in needs(asked.mask, self.layout, self.rank, owner) if x.part == rows.part)
        k, v = (asked.rows(x, rows.begin - held.begin, rows.end - held.begin) for x in pieces[owner, rows.part])
        return k, v

    def forward(self, asked: Asked, q: Tensor, k: Tensor, v: Tensor) -> Result:
        pieces = self._fetch(asked, k, v)
        results = []
        for i, (own, queries) in enumerate(
            zip(bounds(self.layout, self.rank), self.layout.parts(self.rank), strict=True)
        ):
            q1, call = asked.rows(q, *own), call_of(asked.mask, self.layout, self.rank, i)
            if call is None or not queries.rows:
                results.append(partial.finish(asked, None, q1, v.shape[-1]))
                continue
            k1, v1 = self._keys(asked, pieces, call, i)
            results.append(partial.forward(asked, q1, k1, v1, queries, call.keys, partial=False))
        return joined(asked, results)

    def backward(
        self, asked: Asked, given: Upstream, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """dq in q's dtype; dk, dv and dsinks in fp32, the last of this rank's queries only."""
        pieces = self._fetch(asked, k, v)
        dq = zeros_like(given.q)
        dsinks = None if asked.sinks is None else torch.zeros_like(asked.sinks)
        grads, sums = self._zeros(asked, k, v)
        for i, (own, queries) in enumerate(
            zip(bounds(self.layout, self.rank), self.layout.parts(self.rank), strict=True)
        ):
            call = call_of(asked.mask, self.layout, self.rank, i)
            if call is None or not queries.rows:
                continue
            k1, v1 = self._keys(asked, pieces, call, i)
            dk1, dv1 = zeros_like(k1), zeros_like(v1)
            rows_sums = Sums(asked.rows(dq, *own), dk1, dv1, dsinks)
            partial.backward(asked, upstream_rows(asked, given, *own), k1, v1, queries, call.keys, rows_sums)
            self._spread(asked, grads, call, i, (dk1, dv1))
        dk, dv = self._return(asked, k, v, grads, sums)
        return dq.to(given.q.dtype), dk, dv, dsinks

    def _zeros(self, asked: Asked, k: Tensor, v: Tensor) -> tuple[Pieces, list[Tensor]]:
        """fp32 gradients of the keys that this rank reads; where the library adds them up, views of tensors (ranks, …),
        which come beside them."""
        if self._sums_by_library(asked, k):
            sums = [self._padded(asked, x, torch.float32, self.ranks) for x in (k, v)]
            return self._views(asked, (sums[0], sums[1])), sums
        pieces = (
            (owner, rows) for owner in range(self.ranks) for rows in needs(asked.mask, self.layout, self.rank, owner)
        )
        return {(owner, rows.part): self._empty(asked, (k, v), rows, torch.float32) for owner, rows in pieces}, []

    def _sums_by_library(self, asked: Asked, k: Tensor) -> bool:
        exact = is_deterministic(asked.options.get("deterministic"))
        return bool(
            self.wire is not None
            and self.ranks > 1
            and self.wire.by_backend(k)
            and not exact
            and self._is_collective(asked.mask)
        )

    def _spread(self, asked: Asked, grads: Pieces, call: Call, part: int, found: Pair) -> None:
        """Adds the gradients of a call's keys to those of the pieces that they came from."""
        for which, x in enumerate(found):
            order = order_on(asked.mask, self.layout, self.rank, part, x.device)
            if order is not None:
                shape = list(x.shape)
                shape[asked.dim] = sum(rows.end - rows.begin for _, rows in call.slices)
                x = x.new_zeros(shape).index_copy_(asked.dim, order, x)
            first = 0
            for owner, rows in call.slices:
                count = rows.end - rows.begin
                self._piece(asked, grads, owner, rows)[which].add_(asked.rows(x, first, first + count))
                first += count

    def _return(self, asked: Asked, k: Tensor, v: Tensor, grads: Pieces, sums: list[Tensor]) -> Pair:
        """Gradients of this rank's own keys: shares of all ranks, in the order of the ranks."""
        if self.wire is not None and sums:
            mine = [self.wire.scatter_sum(x, "the reduce-scatter of gradients") for x in sums]
            dk, dv = (asked.rows(x, 0, k.shape[asked.dim]) for x in mine)
            return dk, dv
        dk, dv = zeros_like(k), zeros_like(v)
        sends, receives = [], []
        shares: dict[int, list[tuple[Pair, Pair]]] = {}
        for other in range(self.ranks):
            shares[other] = []
            for rows, to in self._own(asked, (dk, dv), other):
                share = grads[other, rows.part] if other == self.rank else self._empty(asked, (dk, dv), rows)
                shares[other].append((to, share))
                if other != self.rank:
                    receives += [Moved(other, x) for x in share]
            if other != self.rank:
                sends += [Moved(other, x) for (owner, _), pair in grads.items() if owner == other for x in pair]
        if self.wire is not None:
            self.wire.start(sends, receives, "the return of gradients").wait()
        for other in range(self.ranks):
            for to, share in shares[other]:
                for x, more in zip(to, share, strict=True):
                    x.add_(more)
        return dk, dv
