# SPDX-License-Identifier: Apache-2.0
"""Which sequences of a batch share leading pages: groups, checked, and laid out as levels of a cascade."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .._checks import shown, whole
from .._libraries import library_of

Array = Any


class SharedPrefix(NamedTuple):
    """The sequences `first` … `stop` − 1 of a batch have the same first `tokens` keys, in the same pages."""

    tokens: int
    first: int
    stop: int


class Run(NamedTuple):
    """Sequences first … stop − 1 and the pages begin … end − 1 that a level reads for them once, maybe none."""

    first: int
    stop: int
    begin: int
    end: int


class SharedPrefixes:
    """The groups of a batch that share leading pages, for `cascade_attention`.

    groups: `SharedPrefix`es, or tuples (tokens, first, stop), or one number of tokens, which all sequences share. A
    group inside of another one, with a longer prefix, makes a tree: the outer pages are read once for the outer group
    and the rest once for the inner one. Every depth of the tree is a level: a launch, and a partial result to merge.
    batch: sequences; page_size: tokens of a page, of which every prefix is a multiple.

    Values are the host's. What a device needs of them is copied there by the first call with so many tokens and columns
    and kept here: keep the object as long as a CUDA graph that was captured with it.

    Raises ValueError for prefixes that are no whole pages, sequences outside of the batch and groups that overlap
    without one being inside of the other.
    """

    def __init__(self, groups: int | Iterable[SharedPrefix | tuple[int, int, int]], *, batch: int, page_size: int):
        self.batch = whole("batch", batch)
        self.page_size = whole("page_size", page_size)
        if self.batch < 0:
            raise ValueError(f"batch: got {self.batch}; want 0 sequences or more")
        if self.page_size < 1:
            raise ValueError(f"page_size: got {self.page_size}; want 1 token or more")
        if isinstance(groups, Iterable):
            listed = [_group(f"groups[{i}]", group) for i, group in enumerate(groups)]
        else:
            tokens = whole("groups", groups, "a number of tokens, or SharedPrefix(tokens, first, stop) of each group")
            listed = [SharedPrefix(tokens, 0, self.batch)] if tokens and self.batch else []
        for i, group in enumerate(listed):
            self._check_group(f"groups[{i}]", group)
        self.groups = tuple(sorted(listed, key=lambda group: (group.first, -group.stop, group.tokens)))
        self.levels = tuple(self._level(runs) for runs in self._nested())
        self._placed: dict[Any, Array] = {}

    def __repr__(self) -> str:
        groups = [tuple(group) for group in self.groups]
        return f"SharedPrefixes({groups}, batch={self.batch}, page_size={self.page_size})"

    @property
    def pages(self) -> list[int]:
        """How many leading pages of each sequence are read with others."""
        found = [0] * self.batch
        for group in self.groups:  # an inner group stands behind the outer one and is longer
            found[group.first : group.stop] = [group.tokens // self.page_size] * (group.stop - group.first)
        return found

    def check(self, page_table: Array, seqused: Array, *, tokens: Any = 0) -> None:
        """ValueError where the groups disagree with a page table (b, columns) and lengths (b).

        tokens: how many of a sequence's keys must lie behind its prefix, a number or one for each sequence. Reads the
        arrays; of a GPU's it waits for a copy.
        """
        table, lengths = on_host(page_table, seqused)
        self.check_shapes(table.shape, lengths.shape)
        own = tokens if hasattr(tokens, "__getitem__") else [tokens] * self.batch
        for group in self.groups:
            pages = group.tokens // self.page_size
            rows = table[group.first : group.stop, :pages]
            for sequence, column in zip(*(rows != rows[0]).nonzero(), strict=True):
                raise ValueError(
                    f"page_table: got page {rows[sequence, column]} in column {column} of sequence "
                    f"{group.first + sequence}, and page {rows[0, column]} of sequence {group.first}; want the same, "
                    f"for {tuple(group)} says that they share {pages} pages"
                )
            for sequence in range(group.first, group.stop):
                if group.tokens > int(lengths[sequence]) - int(own[sequence]):
                    raise ValueError(
                        f"seqused: got {int(lengths[sequence])} keys of sequence {sequence}, {int(own[sequence])} of "
                        f"them its own; want at least {group.tokens + int(own[sequence])}, for its shared prefix is "
                        f"{group.tokens} tokens long"
                    )

    def check_shapes(self, table: tuple[int, ...], lengths: tuple[int, ...]) -> None:
        """ValueError for a page table and lengths of another batch, and for too few columns."""
        most = max((group.tokens // self.page_size for group in self.groups), default=0)
        if len(table) != 2 or table[0] != self.batch or table[1] < most:
            raise ValueError(
                f"page_table: got shape {tuple(table)}; want ({self.batch}, columns) with at least {most} columns, as "
                "prefixes says"
            )
        if tuple(lengths) != (self.batch,):
            raise ValueError(f"seqused: got shape {tuple(lengths)}; want ({self.batch},), as prefixes says")

    def placed(self, key: Any, make: Callable[[], Any], like: Array) -> Array:
        """The numpy array of `make` in the library of `like`, where that is: made and copied once, then kept."""
        library = library_of(like, "page_table")
        place = (key, library.name, library.device(like))
        found = self._placed.get(place)
        if found is None:
            found = self._placed.setdefault(place, library.from_numpy(make(), like))
        return found

    def _check_group(self, name: str, group: SharedPrefix) -> None:
        if group.tokens < 1 or group.tokens % self.page_size:
            raise ValueError(
                f"{name}.tokens: got {group.tokens}; want a multiple of the {self.page_size} tokens of a page, above 0"
            )
        if not 0 <= group.first < group.stop <= self.batch:
            raise ValueError(
                f"{name}: got sequences {group.first} to below {group.stop}; want one or more of the {self.batch}"
            )

    def _nested(self) -> list[list[Run]]:
        """The runs of each level: a group's level is how many groups it is inside of."""
        levels: list[list[Run]] = []
        outer: list[SharedPrefix] = []
        for group in self.groups:
            while outer and outer[-1].stop <= group.first:
                outer.pop()
            if outer and (group.stop > outer[-1].stop or group.tokens <= outer[-1].tokens):
                raise ValueError(
                    f"groups: got {tuple(group)} beside {tuple(outer[-1])}, which share sequences; want groups of "
                    "different sequences, or one with a longer prefix inside of the other"
                )
            begin = outer[-1].tokens // self.page_size if outer else 0
            if len(levels) == len(outer):
                levels.append([])
            levels[len(outer)].append(Run(group.first, group.stop, begin, group.tokens // self.page_size))
            outer.append(group)
        return levels

    def _level(self, runs: list[Run]) -> tuple[Run, ...]:
        """The runs and what lies between them, in pieces no longer than the longest run, so that all is covered."""
        most = max(run.stop - run.first for run in runs)
        covered: list[Run] = []
        at = 0
        for run in (*runs, Run(self.batch, self.batch, 0, 0)):
            covered += [Run(first, min(first + most, run.first), 0, 0) for first in range(at, run.first, most)]
            covered.append(run)
            at = run.stop
        return tuple(covered[:-1])


def on_host(page_table: Array, seqused: Array) -> tuple[Any, Any]:
    """Both as numpy's arrays."""
    table = library_of(page_table, "page_table").to_numpy(page_table)
    return table, library_of(seqused, "seqused").to_numpy(seqused)


def _group(name: str, group: Any) -> SharedPrefix:
    try:
        tokens, first, stop = group
    except (TypeError, ValueError):
        raise ValueError(f"{name}: got {shown(group)}; want SharedPrefix(tokens, first, stop)") from None
    return SharedPrefix(whole(f"{name}.tokens", tokens), whole(f"{name}.first", first), whole(f"{name}.stop", stop))
