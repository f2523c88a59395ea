# SPDX-License-Identifier: Apache-2.0
"""Grids of test parameters: all of them under ``--complete``, a well-spread choice otherwise.

The values are those of flash-attn's own tests (tests/test_flash_attn.py and hopper/test_flash_attn.py at 2.8.4).
Batches and head counts, which are no parameters there, are theirs in the cheap cases, where the textbook's largest
error would else be that of very few numbers, and smaller in the others, because a CPU gains nothing from more of the
same. ``complete_grid.py`` runs the complete grids on many processes.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import flash_reference
import pytest
import tessera
import torch


class Case:
    """One value for each axis of a grid, as attributes."""

    def __init__(self, grid: Grid, values: dict[str, Any]) -> None:
        self.grid, self.values = grid, values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __str__(self) -> str:
        return _named(self.values)

    @property
    def group(self) -> tuple[int, str]:
        """The same for all cases that share inputs."""
        ignored = self.grid.ignored(self)
        return id(self.grid), _named({name: value for name, value in self.values.items() if name not in ignored})

    @property
    def seed(self) -> int:
        """Every group has inputs of its own, the same in every run."""
        return zlib.crc32(self.group[1].encode())


class Grid:
    """The product of `axes` (name: values) less what `valid` rules out.

    `cost` is what a case takes, in multiply-adds a head; without ``--complete`` all but one case cost at most `most`.
    `ignored` names the axes of which a case's inputs and its textbook know nothing; they are to be the first ones.
    The complete grid is walked in blocks, in which the first `inner` axes vary.
    """

    def __init__(
        self,
        count: int,
        most: float,
        cost: Callable[[Case], float],
        valid: Callable[[Case], bool] = lambda _: True,
        ignored: Callable[[Case], Collection[str]] = lambda _: (),
        inner: int = 0,
        **axes: list[Any],
    ) -> None:
        self.axes, self.count, self.most, self.cost, self.valid, self.ignored = axes, count, most, cost, valid, ignored
        sizes = [len(values) for values in axes.values()]
        self.size, self.block = math.prod(sizes), math.prod(sizes[:inner])
        self.blocks = self.size // self.block
        # Blocks are taken in steps of about 0.618 of the grid, so that any run of them is spread over all axes.
        self.step = next(n for n in range(int(0.618 * self.blocks) + 1, 2**63) if math.gcd(n, self.blocks) == 1)

    def at(self, index: int) -> Case:
        chosen = {}
        for name, values in self.axes.items():
            index, digit = divmod(index, len(values))
            chosen[name] = values[digit]
        return Case(self, chosen)

    def complete(self, shard: int, shards: int) -> Iterator[Case]:
        """The valid cases of the shard: some blocks from all over the grid, each block's cases behind each other."""
        for number in range(shard * self.blocks // shards, (shard + 1) * self.blocks // shards):
            first = number * self.step % self.blocks * self.block
            for index in range(first, first + self.block):
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
        items = [(name, str(value)) for name, value in case.values.items()]
        return {(a, b) for n, a in enumerate(items) for b in items[n:]}


def _named(values: dict[str, Any]) -> str:
    return "-".join(f"{name}={_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


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
    metafunc.parametrize("case", cases, ids=str)


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread for the textbooks, one or two for Tessera: two pools would spend their time waiting for each other.

    Also says where the textbooks run, and where tensors are made, and with them Tessera's calls.
    """
    flash_reference.use_device(request.config.getoption("--textbook-device"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    tessera.set_threads(1 + zlib.crc32(str(request.getfixturevalue("case")).encode()) % 2)
    device = request.config.getoption("--grid-device")
    if device != "cpu":
        torch.set_default_device(device)
    yield
    if device != "cpu":
        torch.set_default_device(None)
    tessera.set_threads(0)
    torch.set_num_threads(before)


PERIOD = 1_000_003  # prime, so that no stride of a tensor is a multiple of it
BOOL = [False, True]
HALF = [torch.float16, torch.bfloat16]
HEADS = ["mha", "mqa", "gqa"]
# (query heads, key heads): as few as tell the kinds apart.
HEAD_COUNTS = {"mha": (2, 2), "mqa": (3, 1), "gqa": (4, 2)}
# Multiply-adds a head below which a case has flash-attn's own batch and heads.
CHEAP = 1e6


def cheap(case: Case) -> bool:
    return case.grid.cost(case) < CHEAP


def batch_of(case: Case, theirs: int = 2) -> int:
    """flash-attn's own number of sequences in the cheap cases, two in the others, one in the dear ones."""
    return theirs if cheap(case) else 2 if case.grid.cost(case) < 3e7 else 1


def heads_of(case: Case, theirs: int, groups: int = 2) -> tuple[int, int]:
    """(query heads, key heads): flash-attn's own in the cheap cases; `groups` are its key heads of "gqa"."""
    if not cheap(case):
        return HEAD_COUNTS[case.heads]
    return theirs, {"mha": theirs, "mqa": 1, "gqa": groups}[case.heads]


def noise(case: Case, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers times `scale` in the case's dtype, which repeat after PERIOD.

    To draw each of a long cache would take longer than all the rest.
    """
    size = math.prod(shape)
    some = (torch.randn(min(size, PERIOD)) * scale).to(case.dtype)
    return some.repeat(-(-size // PERIOD))[:size].reshape(shape)


def window(local: bool, keys: int) -> tuple[int, int]:
    """(left, right) below the number of keys, from torch's generator, or no window."""
    return tuple(torch.randint(0, keys, (2,)).tolist()) if local else (-1, -1)


def chunk(chunked: bool, keys: int) -> int:
    """Keys of a chunk, below twice as many as there are, from torch's generator; 0 for no chunks."""
    return int(torch.randint(1, 2 * keys, (1,))) if chunked else 0
