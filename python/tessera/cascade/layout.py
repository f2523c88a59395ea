# SPDX-License-Identifier: Apache-2.0
"""What each problem of a cascade reads: the pages of a level's runs, and those that are left of the sequences."""

from __future__ import annotations

from typing import Any

from ..values import KeySource
from .prefixes import Run, SharedPrefixes

Array = Any


def level_queries(
    prefixes: SharedPrefixes, number: int, level: tuple[Run, ...], cu_seqlens_q: Array | None, each: int, q: Array
) -> Array:
    """Where the query rows of each run begin; `each`: tokens of every sequence where there is no cu_seqlens_q."""
    bounds = [0, *(run.stop for run in level)]
    if cu_seqlens_q is None:
        return prefixes.placed(("queries", number, each), lambda: int32([bound * each for bound in bounds]), q)
    return cu_seqlens_q[prefixes.placed(("bounds", number), lambda: _indices(bounds), cu_seqlens_q)]


def level_source(source: KeySource, prefixes: SharedPrefixes, number: int, level: tuple[Run, ...]) -> KeySource:
    """The pages of each run, from the table's row of its first sequence."""
    table: Any = source.page_table
    used: Any = source.seqused
    if len(level) == 1:
        pages = table[:1, level[0].begin : level[0].end]
    else:
        width = range(max(run.end - run.begin for run in level))
        rows = prefixes.placed(("rows", number), lambda: _indices([[run.first] for run in level]), table)
        columns = prefixes.placed(
            ("columns", number),
            lambda: _indices([[min(run.begin + i, max(run.end - 1, 0)) for i in width] for run in level]),
            table,
        )
        pages = table[rows, columns]
    lengths = [(run.end - run.begin) * prefixes.page_size for run in level]
    own = prefixes.placed(("used", number), lambda: int32(lengths), used)
    return source._replace(page_table=pages, seqused=own, max_seqlen=None)


def rest_source(source: KeySource, prefixes: SharedPrefixes) -> KeySource:
    """The pages and lengths of each sequence behind its prefix. At least a column is left, so that a table is one."""
    table: Any = source.page_table
    used: Any = source.seqused
    pages, size, columns = prefixes.pages, prefixes.page_size, table.shape[1]
    least = min(pages, default=0)
    if all(each == least for each in pages):
        left, own = used - least * size, table[:, min(least, max(columns - 1, 0)) :]
    else:
        rows = prefixes.placed("own rows", lambda: _indices([[i] for i in range(prefixes.batch)]), table)
        width = range(columns - least)
        places = prefixes.placed(
            ("own columns", columns),
            lambda: _indices([[min(each + i, columns - 1) for i in width] for each in pages]),
            table,
        )
        left = used - prefixes.placed("prefix lengths", lambda: int32([each * size for each in pages]), used)
        own = table[rows, places]
    left = left.clamp(min=0) if hasattr(left, "clamp") else left.clip(0)
    most = None if source.max_seqlen is None else max(source.max_seqlen - least * size, 0)
    return source._replace(page_table=own, seqused=left, max_seqlen=most)


def int32(values: Any) -> Any:
    import numpy

    return numpy.array(values, numpy.int32)


def _indices(values: Any) -> Any:
    import numpy

    return numpy.array(values, numpy.int64)
