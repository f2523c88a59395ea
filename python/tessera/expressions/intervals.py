# SPDX-License-Identifier: Apache-2.0
"""Which integers of a graph 32 bits hold where positions are small: an interval of values for each node."""

from __future__ import annotations

from typing import NamedTuple

from .graph import Node, ordered

# What "small" means in are_positions_small of src/cuda/attention/scores/callables.cuh.
SMALL = {"query": 2**21, "key": 2**21, "batch": 2**22, "head": 2**22}
# Integers up to here are floats by float_of_small of text_functions.cuh.
SMALL_FLOAT = 2**22


class Interval(NamedTuple):
    """Integers from `low` to `high`."""

    low: int
    high: int

    @property
    def is_narrow(self) -> bool:
        """Whether 32 bits hold each."""
        return self.low >= -(2**31) and self.high < 2**31

    @property
    def farthest(self) -> int:
        return max(-self.low, self.high)


_ALL = Interval(-(2**63), 2**63 - 1)
_TENSORS = {"int32": Interval(-(2**31), 2**31 - 1), "uint8": Interval(0, 255)}


def intervals(result: Node, tensors: list[tuple[str, int]]) -> dict[int, Interval]:
    """The interval of each integer of the graph, by the node's index; tensors: the captured ones, as Graph has them."""
    found: dict[int, Interval] = {}
    for node in ordered(result):
        if node.type == "i":
            interval = _of(node, [found[arg.index] for arg in node.args if arg.type == "i"], tensors)
            wraps = interval.low < _ALL.low or interval.high > _ALL.high
            found[node.index] = _ALL if wraps else interval
    return found


def _of(node: Node, inner: list[Interval], tensors: list[tuple[str, int]]) -> Interval:
    op = node.op
    if node.is_constant:
        return Interval(node.data, node.data)
    if op in SMALL:
        return Interval(-SMALL[op], SMALL[op])
    if op == "load":
        return _TENSORS.get(tensors[node.data][0], _ALL)
    if op == "int":
        return Interval(0, 1) if node.args[0].type == "b" else _ALL
    if op == "select":
        return _hull(*inner[0], *inner[1])
    if op in ("neg", "abs", "not"):
        return _of_one(op, inner[0])
    return _of_two(op, *inner)


def _hull(*values: int) -> Interval:
    return Interval(min(values), max(values))


def _of_one(op: str, a: Interval) -> Interval:
    if op == "neg":
        return Interval(-a.high, -a.low)
    if op == "not":
        return Interval(~a.high, ~a.low)
    return Interval(max(a.low, -a.high, 0), a.farthest)


def _of_two(op: str, a: Interval, b: Interval) -> Interval:
    if op == "add":
        return Interval(a.low + b.low, a.high + b.high)
    if op == "sub":
        return Interval(a.low - b.high, a.high - b.low)
    if op == "mul":
        return _hull(*[x * y for x in a for y in b])
    if op == "min":
        return Interval(min(a.low, b.low), min(a.high, b.high))
    if op == "max":
        return Interval(max(a.low, b.low), max(a.high, b.high))
    if op in ("div", "mod"):
        return _divided(op, a, b)
    if op in ("shl", "shr"):
        return _shifted(op, a, b)
    return _of_bits(op, a, b)


def _divided(op: str, a: Interval, b: Interval) -> Interval:
    """Rounded to −∞; 0 for a divisor of 0."""
    if op == "mod":  # the divisor's sign, and nearer to 0 than it
        return Interval(min(b.low + 1, 0), max(b.high - 1, 0))
    if b.low > 0 or b.high < 0:
        return _hull(*[x // y for x in a for y in b])
    return Interval(-a.farthest, a.farthest)


def _shifted(op: str, a: Interval, b: Interval) -> Interval:
    """By the lowest 6 bits."""
    if b.low != b.high:
        return _ALL if op == "shl" else _hull(*a, 0, -1)
    bits = b.low & 63
    return Interval(a.low << bits, a.high << bits) if op == "shl" else Interval(a.low >> bits, a.high >> bits)


def _of_bits(op: str, a: Interval, b: Interval) -> Interval:
    if op == "and" and (a.low >= 0 or b.low >= 0):
        return Interval(0, min([x.high for x in (a, b) if x.low >= 0]))
    bits = max([(~x if x < 0 else x).bit_length() for x in (*a, *b)])
    return Interval(0 if a.low >= 0 and b.low >= 0 else -(1 << bits), (1 << bits) - 1)
