# SPDX-License-Identifier: Apache-2.0
"""Finds on the host which sequences of a page table share leading pages."""

from __future__ import annotations

from typing import Any

from .._checks import whole
from .prefixes import SharedPrefix, SharedPrefixes, on_host

Array = Any


def find_shared_prefixes(
    page_table: Array,
    seqused: Array,
    page_size: int,
    *,
    tokens: int = 1,
    levels: int = 1,
    min_tokens: int = 1,
) -> SharedPrefixes:
    """The `SharedPrefixes` of sequences that follow each other in a batch and have the same leading pages.

    page_table: (b, columns); seqused: (b), keys of each sequence with its new tokens, `tokens` of them, which are never
    counted as shared. Sequences are compared with their neighbours only: sort a batch so that those of one prefix lie
    beside each other. levels: how many groups may lie inside of each other; each level costs a launch and a partial
    result. The last level takes the groups that save most pages, those before it the largest groups. min_tokens: of a
    group, what a level reads for it; shorter ones are left out.

    Reads the arrays, of a GPU's it waits for a copy: call it when the batch changes, not in every step.
    Raises ValueError for shapes that do not fit.
    """
    table, lengths = on_host(page_table, seqused)
    if table.ndim != 2 or lengths.shape != table.shape[:1]:
        raise ValueError(
            f"page_table: got shape {table.shape} with seqused of shape {lengths.shape}; want (b, columns) with (b,)"
        )
    if whole("levels", levels) < 1:
        raise ValueError(f"levels: got {levels}; want 1 or more")
    size = whole("page_size", page_size)
    found = SharedPrefixes((), batch=table.shape[0], page_size=size)  # which refuses a bad size
    shared = _shared_pages(table, (lengths.astype("int64") - whole("tokens", tokens)) // size)
    least = max(1, -(-whole("min_tokens", min_tokens) // size))
    groups: list[SharedPrefix] = []
    above = [(0, found.batch, 0)]
    for level in range(levels):
        choose = _best if level == levels - 1 else _outermost
        above = [run for each in above for run in choose(shared, *each, least)]
        groups += [SharedPrefix(pages * size, first, stop) for first, stop, pages in above]
    return SharedPrefixes(groups, batch=found.batch, page_size=size)


Runs = list[tuple[int, int, int]]  # first and stop of the sequences, pages from the start that all of them share


def _shared_pages(table: Any, most: Any) -> list[int]:
    """How many leading pages each sequence shares with the next one; `most` of each may be shared at all."""
    if table.shape[0] < 2:
        return []
    differs = table[1:] != table[:-1]
    pages = differs.argmax(1) if table.shape[1] else differs.sum(1)
    pages[~differs.any(1)] = table.shape[1]
    return [max(0, min(each)) for each in zip(pages.tolist(), most[:-1].tolist(), most[1:].tolist(), strict=True)]


def _outermost(shared: list[int], first: int, stop: int, begin: int, least: int) -> Runs:
    """The longest runs of two or more sequences that share `least` pages or more behind the first `begin`."""
    found: Runs = []
    at = first
    while at < stop - 1:
        end, pages = at, shared[at]
        while end < stop - 1 and shared[end] >= begin + least:
            pages = min(pages, shared[end])
            end += 1
        if end > at:
            found.append((at, end + 1, pages))
        at = end + 1
    return found


def _best(shared: list[int], first: int, stop: int, begin: int, least: int) -> Runs:
    """The runs, apart from each other, that save most pages behind the first `begin` if each is read once."""
    runs: Runs = []
    parents: list[int] = []
    waiting = [(first, stop, begin, least, -1)]
    while waiting:
        *inside, parent = waiting.pop()
        for run in _outermost(shared, *inside):
            waiting.append((*run, 1, len(runs)))
            runs.append(run)
            parents.append(parent)
    below = [0] * len(runs)  # what the best runs inside of each save
    whole_run = [True] * len(runs)
    for i in reversed(range(len(runs))):  # the inner ones stand behind the outer one
        own = (runs[i][1] - runs[i][0] - 1) * (runs[i][2] - begin)
        whole_run[i] = own >= below[i]
        if parents[i] >= 0:
            below[parents[i]] += max(own, below[i])
    covered = [False] * len(runs)
    found: Runs = []
    for i, run in enumerate(runs):
        inside_one = parents[i] >= 0 and covered[parents[i]]
        covered[i] = inside_one or whole_run[i]
        if whole_run[i] and not inside_one:
            found.append(run)
    return sorted(found)
