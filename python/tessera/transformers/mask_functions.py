# SPDX-License-Identifier: Apache-2.0
"""What a transformers mask function says, read off the function itself.

transformers describes a mask by a predicate ``f(batch, head, query, key) -> bool``. Calling it with indices that record
what is asked of them, instead of numbers, yields the predicate as an expression: conditions on ``key - query`` make a
window, equal table entries make documents, equal quotients make chunks. No name of a private function and no closure is
looked at, so a predicate of one's own is understood as well if it consists of such conditions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class UnreadableMaskError(Exception):
    """The predicate is no conjunction of windows, documents and chunks."""


@dataclass(frozen=True)
class Pattern:
    """A conjunction of conditions. Indices count from the first token of the sequence, batch padding included.

    Attributes:
        left: ``key >= query - left``; None: no such bound.
        right: ``key <= query + right``; None: no such bound.
        documents: integers (batch, seqlen); key and query have equal entries. None: one document.
        chunk: keys of the query's own chunk only; chunks have this many tokens. None: no chunks.
        chunk_start: integers (batch): where chunks are counted from. None: 0.
        positions: integers (batch, seqlen); window and chunk go by them and no longer by indices. None: by indices.
    """

    left: int | None = None
    right: int | None = None
    documents: torch.Tensor | None = None
    chunk: int | None = None
    chunk_start: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def __and__(self, other: Any) -> Pattern:
        if not isinstance(other, Pattern):
            raise UnreadableMaskError
        if self._is_bounded() and other._is_bounded() and self.positions is not other.positions:
            raise UnreadableMaskError
        return Pattern(
            _least(self.left, other.left),
            _least(self.right, other.right),
            _only(self.documents, other.documents),
            _only(self.chunk, other.chunk),
            _only(self.chunk_start, other.chunk_start),
            _only(self.positions, other.positions),
        )

    def _is_bounded(self) -> bool:
        return self.left is not None or self.right is not None or self.chunk is not None

    def __or__(self, other: Any) -> Pattern:
        # An empty disjunction begins with False, everything else is a union that a window cannot say.
        if isinstance(other, _Nothing):
            return self
        raise UnreadableMaskError

    def to(self, *_: Any) -> Pattern:
        """The predicate moves its results to the device of the others."""
        return self

    @property
    def device(self) -> None:
        """Of no tensor."""
        return None


class _Nothing(Pattern):
    """False, with which a disjunction begins."""

    def __and__(self, other: Any) -> Pattern:
        raise UnreadableMaskError

    def __or__(self, other: Any) -> Pattern:
        if not isinstance(other, Pattern):
            raise UnreadableMaskError
        return other


def _least(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def _only(a: Any, b: Any) -> Any:
    """The one that is there; two different ones are more than a pattern holds."""
    if a is None or b is None or a is b:
        return b if a is None else a
    raise UnreadableMaskError


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnreadableMaskError
    return value


class _Index:
    """``axis + shift``, or ``table[batch, axis] + shift``, with axis one of "batch", "head", "query", "key"."""

    def __init__(self, axis: str, table: torch.Tensor | None = None, shift: int = 0, origin: Any = None):
        self.axis = axis
        self.table = table
        self.shift = shift
        self.origin = origin  # a table of one entry a batch, subtracted

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> _Index:
        if getattr(func, "__name__", "") != "__getitem__" or kwargs:
            raise UnreadableMaskError
        table, at = args
        at = at if isinstance(at, tuple) else (at,)
        plain = all(isinstance(i, _Index) and i.table is None and i.origin is None and i.shift == 0 for i in at)
        if not plain or at[0].axis != "batch" or table.ndim != len(at) or len(at) > 2:
            raise UnreadableMaskError
        return cls(at[-1].axis, table)

    def __add__(self, other: Any) -> _Index:
        return _Index(self.axis, self.table, self.shift + _integer(other), self.origin)

    def __sub__(self, other: Any) -> Any:
        if not isinstance(other, _Index):
            return self + -_integer(other)
        if other.axis == "batch" and other.table is not None and self.origin is None:
            return _Index(self.axis, self.table, self.shift - other.shift, other.table)
        return _Difference(self, other)

    def __floordiv__(self, size: Any) -> _Quotient:
        return _Quotient(self, _integer(size))

    def __le__(self, other: Any) -> Pattern:
        return _Difference(self, other).at_most(0)

    def __lt__(self, other: Any) -> Pattern:
        return _Difference(self, other).at_most(-1)

    def __ge__(self, other: Any) -> Pattern:
        if not isinstance(other, _Index):
            # Indices count from 0: "query >= 0" always holds.
            if self.axis in ("query", "key") and self.table is None and self.origin is None and other <= self.shift:
                return Pattern()
            raise UnreadableMaskError
        return _Difference(other, self).at_most(0)

    def __gt__(self, other: Any) -> Pattern:
        return _Difference(other, self).at_most(-1)

    def __eq__(self, other: Any) -> Any:
        if not isinstance(other, _Index) or {self.axis, other.axis} != {"query", "key"}:
            raise UnreadableMaskError
        if self.table is None or self.table is not other.table or self.shift != other.shift:
            raise UnreadableMaskError
        return Pattern(documents=self.table)

    __hash__ = None  # type: ignore[assignment]

    def new_ones(self, *_: Any, **__: Any) -> Pattern:
        """True, with which a conjunction begins."""
        return Pattern()

    def new_zeros(self, *_: Any, **__: Any) -> Pattern:
        """False, with which a disjunction begins."""
        return _Nothing()


class _Difference:
    """``a - b`` of two indices, one of the key and one of the query."""

    def __init__(self, a: Any, b: Any):
        if not (isinstance(a, _Index) and isinstance(b, _Index)) or {a.axis, b.axis} != {"query", "key"}:
            raise UnreadableMaskError
        if a.table is not b.table or a.origin is not b.origin:
            raise UnreadableMaskError
        self.a = a
        self.b = b

    def at_most(self, bound: int) -> Pattern:
        bound += self.b.shift - self.a.shift
        if self.a.axis == "key":
            return Pattern(right=bound, positions=self.a.table)
        return Pattern(left=bound, positions=self.a.table)

    def __abs__(self) -> _Distance:
        return _Distance(self)


class _Distance:
    def __init__(self, difference: _Difference):
        self.difference = difference

    def __le__(self, bound: Any) -> Pattern:
        bound = _integer(bound)
        return self.difference.at_most(bound) & _Difference(self.difference.b, self.difference.a).at_most(bound)

    def __lt__(self, bound: Any) -> Pattern:
        return self <= _integer(bound) - 1


class _Quotient:
    def __init__(self, index: _Index, size: int):
        self.index = index
        self.size = size

    def __eq__(self, other: Any) -> Any:
        if not isinstance(other, _Quotient) or self.size != other.size:
            raise UnreadableMaskError
        a, b = self.index, other.index
        if {a.axis, b.axis} != {"query", "key"} or a.origin is not b.origin or a.table is not b.table:
            raise UnreadableMaskError
        if a.shift != 0 or b.shift != 0:
            raise UnreadableMaskError
        return Pattern(chunk=self.size, chunk_start=a.origin, positions=a.table)

    __hash__ = None  # type: ignore[assignment]


def read(mask_function: Callable[..., Any]) -> Pattern | None:
    """The pattern of a predicate ``f(batch, head, query, key)``, or None if it is no conjunction of windows, documents
    and chunks."""
    try:
        pattern = mask_function(_Index("batch"), _Index("head"), _Index("query"), _Index("key"))
    except Exception:  # whatever a predicate cannot do with an index that is no tensor
        return None
    return pattern if type(pattern) is Pattern else None
