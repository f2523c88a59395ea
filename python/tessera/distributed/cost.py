# SPDX-License-Identifier: Apache-2.0
"""What each method moves and how long ranks wait for it: the model behind method="auto" (docs/context-parallel.md)."""

from __future__ import annotations

from typing import NamedTuple

from .reach import Mask, moved_rows, pairs
from .shards import Layout
from .ulysses import head_ranges


class Machine(NamedTuple):
    """What the model knows of a machine. Bandwidths in bytes per second and rank, one way; latency in seconds for an
    operation between ranks; flops of attention a rank; memory: bytes per second of a rank's own.

    outer_bandwidth: between the groups of two_level, None for the same.
    """

    bandwidth: float = 300e9
    latency: float = 20e-6
    flops: float = 600e12
    memory: float = 3e12
    outer_bandwidth: float | None = None


GPU = Machine()
CPU = Machine(bandwidth=2e9, latency=100e-6, flops=1e11, memory=1e10)


class Shape(NamedTuple):
    """Of a call: heads and dims, bytes of an element of q (out), k and v, batch of dense tensors."""

    heads_q: int
    heads_kv: int
    dim: int
    dim_v: int
    bytes_q: int = 2
    bytes_kv: int = 2
    batch: int = 1

    @property
    def kv_row(self) -> int:
        """Bytes of a key and a value, all heads."""
        return self.batch * self.heads_kv * (self.dim + self.dim_v) * self.bytes_kv

    @property
    def q_row(self) -> int:
        """Bytes of a query and an output row, all heads."""
        return self.batch * self.heads_q * (self.dim + self.dim_v) * self.bytes_q


class Estimate(NamedTuple):
    """Of a forward, of the rank with most. seconds: what communication adds to computing. bytes: received. memory:
    bytes held besides a rank's own tensors."""

    seconds: float
    bytes: int
    memory: int


def estimate(method: str, mask: Mask, layout: Layout, shape: Shape, machine: Machine, inner: int = 1) -> Estimate:
    """Raises ValueError for heads that ulysses cannot split. inner: ranks of the inner group of two_level."""
    ranks, rows = layout.ranks, max(layout.rows(rank) for rank in range(layout.ranks))
    if ranks == 1:
        return Estimate(0.0, 0, 0)
    if method == "all_gather":
        count = max(moved_rows(mask, layout))
        moved = count * shape.kv_row
        return Estimate(machine.latency + moved / machine.bandwidth, moved, moved)
    if method == "ring":
        count = max(moved_rows(mask, layout))
        moved = count * shape.kv_row
        steps = ranks - 1
        compute = max(pairs(mask, layout)) * shape.batch * shape.heads_q * 2 * (shape.dim + shape.dim_v) / machine.flops
        hidden = compute / ranks * steps
        busy = steps * machine.latency + moved / machine.bandwidth
        # A merge reads two results and writes one; a step has two more kernels than one call.
        merging = 12 * steps * rows * shape.batch * shape.heads_q * shape.dim_v / machine.memory
        merging += 2 * steps * machine.latency
        return Estimate(max(0.0, busy - hidden) + merging, moved, 2 * moved // steps)
    if method == "ulysses":
        ranges = head_ranges(ranks, shape.heads_q, shape.heads_kv)
        keys = ranges[0][1][1] - ranges[0][1][0]
        others = layout.tokens - layout.tokens // ranks
        moved = others * (shape.q_row // ranks + shape.kv_row * keys // shape.heads_kv)
        return Estimate(2 * machine.latency + moved / machine.bandwidth, moved, moved)
    # two_level: ulysses of the inner group, then a ring of groups for heads_q / inner heads
    groups = ranks // inner
    local = layout.tokens // groups
    _, (begin, end) = head_ranges(inner, shape.heads_q, shape.heads_kv)[0]
    kv = shape.kv_row * (end - begin) // shape.heads_kv
    moved = (local - local // inner) * (shape.q_row // inner + kv)
    of_ring = estimate(
        "ring",
        mask,
        layout.over(groups),
        shape._replace(heads_q=shape.heads_q // inner, heads_kv=end - begin),
        machine._replace(bandwidth=machine.outer_bandwidth or machine.bandwidth),
    )
    seconds = 2 * machine.latency + moved / machine.bandwidth + of_ring.seconds
    return Estimate(seconds, moved + of_ring.bytes, moved + of_ring.memory)


def choose(
    mask: Mask, layout: Layout, shape: Shape, machine: Machine, inner: int = 1, memory_limit: int | None = None
) -> tuple[str, dict[str, Estimate]]:
    """The method that ranks wait least for, of those whose memory is within the limit, and all estimates."""
    methods = ("all_gather", "ulysses", "ring") if inner == 1 else ("two_level",)
    found = {}
    for method in methods:
        try:
            found[method] = estimate(method, mask, layout, shape, machine, inner)
        except ValueError:
            continue  # heads that do not split
    fitting = {m: e for m, e in found.items() if memory_limit is None or e.memory <= memory_limit} or {
        m: e for m, e in found.items() if e.memory == min(x.memory for x in found.values())
    }
    return min(fitting, key=lambda method: fitting[method].seconds), found
