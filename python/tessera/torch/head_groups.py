# SPDX-License-Identifier: Apache-2.0
"""Key heads, and the query heads that share them, a few at a time: what a backward holds beside its inputs and results
is then that of a few heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from ..tiles import TileList

# Bytes: fp32 sums of dq of the heads of a group, if it has more than one key head. With 4 GiB, 4 query heads of 128 a
# key head and blocks of 64 tokens the pass of compressed keys has 256 blocks, two waves on an H200: blocks of one wave
# differ in length, those of two fill each other's gaps.
MOST_SUMS = 4 << 30


class Heads(NamedTuple):
    """Key heads from `first_key` on, and their query heads from `first_query` on; how many there are of both."""

    first_query: int
    queries: int
    first_key: int
    keys: int

    def of_queries(self, x: Tensor, dim: int = -2) -> Tensor:
        return x.narrow(dim, self.first_query, self.queries)

    def of_keys(self, x: Tensor, dim: int = -2) -> Tensor:
        return x.narrow(dim, self.first_key, self.keys)

    def of_parameters(self, given: Any) -> Any:
        """given: a named tuple with gate_weight, gates, k_projection and v_projection, tensors of all heads or None."""
        first = {"gate_weight": self.of_queries, "k_projection": self.of_keys, "v_projection": self.of_keys}
        own = {name: cut(getattr(given, name), 0) for name, cut in first.items() if getattr(given, name) is not None}
        if given.gates is not None:
            own["gates"] = self.of_queries(given.gates)
        return given._replace(**own)

    def of_list(self, tiles: TileList, q: Tensor, k: Tensor) -> TileList:
        """tiles: of q and k, which have all heads. Its heads are one for all, key heads or query heads."""
        arrays = {}
        for name, array in tiles.arrays():
            count = array.shape[1]
            if count == k.shape[-2]:
                array = self.of_keys(array, 1).contiguous()
            elif count == q.shape[-2]:
                array = self.of_queries(array, 1).contiguous()
            arrays[name.removeprefix("tile_")] = array
        return TileList(form=tiles.form, block=tiles.block, **arrays)


def groups_of(q: Tensor, k: Tensor) -> Iterator[Heads]:
    """All heads, in as few groups of one size as keep the sums of dq within MOST_SUMS, or one key head at a time."""
    heads, ratio = k.shape[-2], q.shape[-2] // k.shape[-2]
    count = next((n for n in range(1, heads) if heads % n == 0 and 4 * q.numel() <= n * MOST_SUMS), heads)
    size = heads // count
    for first in range(0, heads, size):
        yield Heads(first * ratio, size * ratio, first, size)
