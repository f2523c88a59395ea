# SPDX-License-Identifier: Apache-2.0
"""Grids of test parameters: all of them under ``--complete``, a well-spread choice otherwise.

The values are those of flash-attn's own tests (tests/test_flash_attn.py and hopper/test_flash_attn.py at 2.8.4).
Batches and head counts, which are no parameters there, are smaller here, because a CPU gains nothing from more of the
same.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tessera
import torch

Case = SimpleNamespace


class Grid:
    """The product of `axes` (name: values) less what `valid` rules out.

    `cost` is what a case takes, in multiply-adds a head; without ``--complete`` all but one case cost at most `most`.
    """

    def __init__(
        self,
        count: int,
        most: float,
        cost: Callable[[Case], float],
        valid: Callable[[Case], bool] = lambda _: True,
        **axes: list[Any],
    ) -> None:
        self.axes, self.count, self.most, self.cost, self.valid = axes, count, most, cost, valid
        self.size = 1
        for values in axes.values():
            self.size *= len(values)

    def at(self, index: int) -> Case:
        chosen = {}
        for name, values in self.axes.items():
            index, digit = divmod(index, len(values))
            chosen[name] = values[digit]
        return Case(**chosen)

    def complete(self, shard: int, shards: int) -> Iterator[Case]:
        """Every valid case whose hash falls into the shard, so that each shard is spread over the whole grid."""
        for index in range(self.size):
            if shards > 1 and zlib.crc32(index.to_bytes(8, "little")) % shards != shard:
                continue
            case = self.at(index)
            if self.valid(case):
                yield case

    def spread(self) -> list[Case]:
        """`count` cases: each the one of 40 random ones that brings most pairs of values not seen before.

        They cost at most `most`, except the last, which may cost up to eight times that.
        """
        draw = random.Random(self.size)
        seen: set[tuple[Any, ...]] = set()
        chosen: list[Case] = []
        while len(chosen) < self.count:
            limits = (self.most, 8 * self.most) if len(chosen) == self.count - 1 else (-1.0, self.most)
            offers = self._offers(draw, *limits) or self._offers(draw, -1.0, self.most)
            case, pairs = max(offers, key=lambda offer: len(offer[1] - seen))
            seen |= pairs
            chosen.append(case)
        return chosen

    def _offers(self, draw: random.Random, above: float, most: float) -> list[tuple[Case, set[tuple[Any, ...]]]]:
        """Up to 40 random valid cases of a cost in (above, most], with their pairs of values."""
        offers = []
        for _ in range(4000):
            case = self.at(draw.randrange(self.size))
            if self.valid(case) and above < self.cost(case) <= most:
                offers.append((case, self._pairs(case)))
            if len(offers) == 40:
                break
        return offers

    @staticmethod
    def _pairs(case: Case) -> set[tuple[Any, ...]]:
        items = [(name, str(value)) for name, value in vars(case).items()]
        return {(a, b) for n, a in enumerate(items) for b in items[n:]}


def name_of(case: Case) -> str:
    return "-".join(f"{name}={_short(value)}" for name, value in vars(case).items())


def _short(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def seed_of(case: Case) -> int:
    """Every case has inputs of its own, the same in every run."""
    return zlib.crc32(name_of(case).encode())


def over(grid: Grid) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Marks a test of one argument, `case`, as running over `grid`; see :func:`generate`."""

    def mark(test: Callable[[Case], None]) -> Callable[[Case], None]:
        test.grid = grid  # type: ignore[attr-defined]
        return test

    return mark


def generate(metafunc: pytest.Metafunc) -> None:
    """To be the ``pytest_generate_tests`` of a module with grids, whose fixtures include :func:`threads`."""
    grid = getattr(metafunc.function, "grid", None)
    if grid is None:
        return
    if metafunc.config.getoption("--complete"):
        shard, shards = map(int, metafunc.config.getoption("--complete-shard").split("/"))
        cases = list(grid.complete(shard, shards))
    else:
        cases = grid.spread()
    metafunc.parametrize("case", cases, ids=name_of)


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread for the textbooks, one or two for Tessera: two pools would spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    tessera.set_threads(1 + seed_of(request.getfixturevalue("case")) % 2)
    yield
    tessera.set_threads(0)
    torch.set_num_threads(before)


BOOL = [False, True]
HALF = [torch.float16, torch.bfloat16]
HEADS = ["mha", "mqa", "gqa"]


def heads_kv(kind: str, heads: int, group: int) -> int:
    return {"mha": heads, "mqa": 1, "gqa": heads // group}[kind]


def window(local: bool, keys: int) -> tuple[int, int]:
    """(left, right) below the number of keys, from torch's generator, or no window."""
    return tuple(torch.randint(0, keys, (2,)).tolist()) if local else (-1, -1)
