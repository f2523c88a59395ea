# SPDX-License-Identifier: Apache-2.0
"""The expression graph of a score or a mask: one node for equal expressions, constants folded where that is exact.

Values have three types: "f", fp32 (the oracle and tests evaluate it in double); "i", int64, whose arithmetic wraps;
"b", truth. The text form that `program` writes is what C++ reads: src/problem/expressions/expression.h has its grammar.
"""

from __future__ import annotations

import math
import operator
import struct
from typing import Any

INPUTS = {"score": "f", "batch": "i", "head": "i", "query": "i", "key": "i"}
MOST_NODES = 256

_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1
_COMMUTATIVE = frozenset(("add", "mul", "and", "or", "xor", "min", "max", "eq", "ne"))


class GraphError(ValueError):
    """An expression that cannot be: too large, or a division by a constant 0."""


def fp32(value: float) -> float:
    """The fp32 number nearest to `value`, infinity beyond the largest."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


class Node:
    """One expression. args: Nodes; data: a constant's value, or the number of the tensor that a load reads."""

    __slots__ = ("args", "data", "index", "op", "type")

    def __init__(self, index: int, op: str, type_: str, args: tuple[Node, ...], data: Any) -> None:
        self.index, self.op, self.type, self.args, self.data = index, op, type_, args, data

    @property
    def is_constant(self) -> bool:
        return self.op == "const"

    def __repr__(self) -> str:
        return f"<{self.op} {self.data if self.data is not None else ''}{list(self.args) if self.args else ''}>"


class Graph:
    """Makes nodes, at most `most` if that is given. tensors: (dtype name, dimensions) of each captured tensor, in the
    order in which loads name them."""

    def __init__(self, most: int | None = 4 * MOST_NODES) -> None:
        self._most = most
        self._made: dict[tuple[Any, ...], Node] = {}
        self.tensors: list[tuple[str, int]] = []
        self.arrays: list[Any] = []  # the captured arrays themselves

    def _make(self, op: str, type_: str, args: tuple[Node, ...] = (), data: Any = None) -> Node:
        # −0 and 0 are equal keys of a dict, and are two constants; so are 1, 1.0 and True
        shown = data.hex() if isinstance(data, float) else data
        key = (op, type_, tuple([arg.index for arg in args]), type(data), shown)
        found = self._made.get(key)
        if found is None:
            if self._most is not None and len(self._made) >= self._most:
                raise GraphError(f"got an expression of more than {self._most} steps; want at most {MOST_NODES}")
            found = self._made[key] = Node(len(self._made), op, type_, args, data)
        return found

    def input(self, name: str) -> Node:
        return self._make(name, INPUTS[name])

    def constant(self, value: bool | int | float, type_: str | None = None) -> Node:
        """A constant of `type_`, by default that of the Python value; of a float the nearest fp32 number."""
        if type_ is None:
            type_ = "b" if isinstance(value, bool) else "i" if isinstance(value, int) else "f"
        if type_ == "i":
            value = int(value)
            if not _INT_MIN <= value <= _INT_MAX:
                raise GraphError(f"got the integer {value}; want one of 64 bits")
            return self._make("const", "i", (), value)
        return self._make("const", type_, (), bool(value) if type_ == "b" else fp32(float(value)))

    def load(self, tensor: int, indices: tuple[Node, ...]) -> Node:
        """An element of a captured tensor; indices outside are moved to the nearest inside."""
        dtype, _ = self.tensors[tensor]
        return self._make("load", "f" if dtype in ("fp32", "fp16", "bf16") else "i", indices, tensor)

    def cast(self, x: Node, type_: str) -> Node:
        """float: the nearest; int: of a float towards 0; truth: whether it is not 0."""
        if x.type == type_:
            return x
        if x.is_constant and not (type_ == "i" and not -(2.0**63) <= x.data < 2.0**63):
            return self.constant(x.data != 0 if type_ == "b" else x.data, type_)
        if type_ == "b":
            return self.compare("ne", x, self.constant(0, x.type))
        return self._make("float" if type_ == "f" else "int", type_, (x,))

    def unary(self, op: str, x: Node) -> Node:
        if x.is_constant:
            folded = _fold_unary(op, x)
            if folded is not None:
                return self.constant(folded, x.type)
        if op in ("neg", "not") and x.op == op:
            return x.args[0]
        if op in ("floor", "ceil", "trunc") and x.op in ("floor", "ceil", "trunc", "float"):
            return x
        return self._make(op, x.type, (x,))

    def binary(self, op: str, a: Node, b: Node) -> Node:
        """Both of one type, the result's. Integer div and mod round to −∞; a float's mod has the divisor's sign."""
        if op in ("div", "mod") and a.type == "i" and b.is_constant and b.data == 0:
            raise GraphError("got a division by 0; want another divisor")
        if a.is_constant and b.is_constant:
            folded = _fold_binary(op, a, b)
            if folded is not None:
                return self.constant(folded, a.type)
        if op in _COMMUTATIVE and (a.is_constant, a.index) > (b.is_constant, b.index):
            a, b = b, a
        same = self._simpler(op, a, b)
        return self._make(op, a.type, (a, b)) if same is None else same

    def _simpler(self, op: str, a: Node, b: Node) -> Node | None:
        """What equals the operation to the bit, if it is one of its operands or a constant."""
        if a is b and op in ("min", "max", "and", "or"):
            return a
        if a is b and a.type != "f" and op in ("sub", "xor"):
            return self.constant(0, a.type)
        if not b.is_constant:
            return None
        if a.type == "b":
            if op == "xor":
                return self.unary("not", a) if b.data else a
            return (a if b.data == (op == "and") else b) if op in ("and", "or") else None
        if b.data == 1 and op in ("mul", "div"):
            return a
        if a.type == "i":
            if b.data == 0 and op in ("add", "sub", "or", "xor", "shl", "shr"):
                return a
            if b.data == 0 and op in ("mul", "and"):
                return b
            return self.constant(0) if op == "mod" and b.data in (1, -1) else None
        return a if op == "sub" and b.data == 0 and math.copysign(1, b.data) > 0 else None

    def compare(self, op: str, a: Node, b: Node) -> Node:
        """lt, le, eq or ne of two of one type."""
        if a.type == "b":
            different = self.binary("xor", a, b)
            if op in ("eq", "ne"):
                return different if op == "ne" else self.unary("not", different)
            a, b = self.cast(a, "i"), self.cast(b, "i")
        if a.is_constant and b.is_constant:
            return self.constant(bool(getattr(operator, op)(a.data, b.data)))
        if a is b and a.type == "i":
            return self.constant(op in ("le", "eq"))
        if op in _COMMUTATIVE and (a.is_constant, a.index) > (b.is_constant, b.index):
            a, b = b, a
        return self._make(op, "b", (a, b))

    def select(self, condition: Node, a: Node, b: Node) -> Node:
        if condition.is_constant:
            return a if condition.data else b
        if a is b:
            return a
        if condition.op == "not":
            condition, a, b = condition.args[0], b, a
        if a.type == "b":  # truth has no select
            kept = self.binary("and", condition, a)
            return self.binary("or", kept, self.binary("and", self.unary("not", condition), b))
        return self._make("select", a.type, (condition, a, b))

    def unbounded(self, result: Node) -> tuple[Graph, Node]:
        """A graph of `result` alone to which any number of nodes may be added; loads keep their numbers. This graph
        is not changed, so that threads may share it."""
        graph, made = Graph(most=None), {}
        graph.tensors = list(self.tensors)
        for node in ordered(result):
            operands = tuple([made[arg.index] for arg in node.args])
            made[node.index] = graph._make(node.op, node.type, operands, node.data)
        return graph, made[result.index]

    def only(self, result: Node) -> tuple[Graph, Node]:
        """A graph of `result` alone: its captured tensors are those that it reads."""
        graph, made = Graph(), dict[int, Node]()
        number: dict[int, int] = {}
        for node in ordered(result):
            data = node.data
            if node.op == "load":
                if data not in number:
                    number[data] = len(graph.arrays)
                    graph.arrays.append(self.arrays[data])
                    graph.tensors.append(self.tensors[data])
                data = number[data]
            made[node.index] = graph._make(node.op, node.type, tuple([made[arg.index] for arg in node.args]), data)
        return graph, made[result.index]


def _fold_unary(op: str, x: Node) -> Any:
    value = x.data
    if op == "neg":
        return None if value == _INT_MIN and x.type == "i" else -value
    if op == "abs":
        return None if value == _INT_MIN and x.type == "i" else abs(value)
    if op == "not":
        return (not value) if x.type == "b" else ~value
    if op in ("floor", "ceil", "trunc"):
        return float(getattr(math, op)(value)) if math.isfinite(value) and value else value
    if op == "sqrt" and value >= 0:
        return math.sqrt(value)  # rounded twice, to double and to fp32, which is as good as once
    return None  # what is rounded otherwise elsewhere is left to there


def _fold_binary(op: str, a: Node, b: Node) -> Any:
    x, y = a.data, b.data
    if a.type == "b":
        return {"and": x and y, "or": x or y, "xor": x != y}[op]
    if a.type == "i":
        return _fold_integers(op, x, y)
    if op in ("add", "sub", "mul"):  # in double and then to fp32: as good as rounded once
        return getattr(operator, op)(x, y)
    if op == "div" and y != 0:
        return x / y
    if op in ("min", "max") and x == x and y == y and x != y:
        return min(x, y) if op == "min" else max(x, y)
    return None


def _fold_integers(op: str, x: int, y: int) -> int | None:
    if op in ("shl", "shr"):
        found = (x << (y & 63)) if op == "shl" else x >> (y & 63)
    elif op in ("min", "max"):
        found = min(x, y) if op == "min" else max(x, y)
    else:
        names = {"div": "floordiv", "and": "and_", "or": "or_"}
        found = getattr(operator, names.get(op, op))(x, y)
    return found if _INT_MIN <= found <= _INT_MAX else None


def ordered(*results: Node | None) -> list[Node]:
    """The nodes that the results need, operands first. Raises GraphError for more than MOST_NODES."""
    found = needed(*results)
    if len(found) > MOST_NODES:
        raise GraphError(f"got an expression of {len(found)} steps; want at most {MOST_NODES}")
    return found


def needed(*results: Node | None) -> list[Node]:
    """The nodes that the results need, operands first, however many."""
    found: dict[int, Node] = {}
    waiting = [result for result in results if result is not None]
    while waiting:
        node = waiting.pop()
        if node.index not in found:
            found[node.index] = node
            waiting += node.args
    return [found[index] for index in sorted(found)]


def program(value: Node, derivative: Node | None = None) -> str:
    """The text form: an instruction a node, separated by ";", operands by the numbers of their instructions."""
    number: dict[int, int] = {}
    lines = []
    for node in ordered(value, derivative):
        operands = [str(number[arg.index]) for arg in node.args]
        if node.is_constant:
            shown = node.data.hex() if node.type == "f" else str(int(node.data))
            words = [f"const.{node.type}", shown]
        elif node.op == "load":
            words = ["load", str(node.data), *operands]
        else:
            words = [node.op, *operands]
        number[node.index] = len(lines)
        lines.append(" ".join(words))
    lines.append(f"value {number[value.index]}")
    if derivative is not None:
        lines.append(f"derivative {number[derivative.index]}")
    return ";".join(lines)
