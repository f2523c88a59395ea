# SPDX-License-Identifier: Apache-2.0
"""Symbols: what a score or mask function of Python is called with instead of numbers, to be written down as a graph."""

from __future__ import annotations

import linecache
import math
import numbers
import os
import sys
from collections.abc import Callable
from typing import Any

from .graph import Graph, GraphError, Node

_HERE = os.path.dirname(__file__)


class TraceError(ValueError):
    """What a function does cannot be written down as an expression; the text names the line."""


def refuse(got: str, want: str) -> TraceError:
    """The error about the line of the user's function that is running now."""
    frame = sys._getframe(1)
    while frame is not None and _is_inside(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return TraceError(f"got {got}; want {want}")
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()
    return TraceError(f"{file}:{line}: got {got}; want {want}" + (f"\n    {text}" if text else ""))


def _is_inside(file: str) -> bool:
    if os.path.dirname(file) == _HERE:
        return True
    found = [getattr(sys.modules.get(name), "__file__", None) for name in ("torch", "numpy")]
    return any(file.startswith(os.path.dirname(module) + os.sep) for module in found if module)


class _Known:
    """What modules that need symbols put here for symbols to use."""

    apply: Any  # functions.apply: torch's and NumPy's functions
    method: Any  # functions.method: a tensor's methods
    element_of: Any  # captured.element_of: a tensor of one element as a symbol


known = _Known()


class Symbol:
    """A number that is known when the kernel runs: the score, a position, an element of a tensor, and what is computed
    of them.

    It has no dimensions and is of one of three types: float (fp32), integer (int64, wrapping) or truth; an operation of
    two types is one of the first of these. It has Python's operators, torch's functions and methods and NumPy's
    functions of `functions.py`. What needs its value raises TraceError: `if`, `and`, `or`, `not`, int(), float(), a
    loop, an array's index.
    """

    __slots__ = ("graph", "node")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node

    def __repr__(self) -> str:
        return f"<symbol of type {_TYPE_NAMES[self.node.type]}>"

    def __bool__(self) -> bool:
        raise refuse(
            "the truth of a symbol (an `if`, `and`, `or`, `not`, a chained comparison, min() or max())",
            "torch.where or tessera.expressions.where, &, |, ~, minimum, maximum",
        )

    def __index__(self) -> int:
        raise refuse("a symbol as a Python integer", "tessera.expressions.captured(array)[…] to index an array by one")

    def __int__(self) -> int:
        raise refuse("int() of a symbol", "tessera.expressions.integer")

    def __float__(self) -> float:
        raise refuse("float() of a symbol, or a function of math", "torch's, NumPy's or tessera.expressions' function")

    def __iter__(self) -> Any:
        raise refuse("a loop over a symbol", "a number")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return known.method(self, name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return known.apply(function, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, how: str, *args: Any, **kwargs: Any) -> Any:
        # NumPy makes a new array without dimensions of a number on the left: no captured one.
        numbers_of = [x[()] if getattr(x, "shape", None) == () and not isinstance(x, Symbol) else x for x in args]
        return known.apply(ufunc, tuple(numbers_of), kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return known.apply(function, args, kwargs)


_TYPE_NAMES = {"f": "float", "i": "integer", "b": "truth"}


def as_symbol(graph: Graph, value: Any) -> Symbol:
    """`value` itself, or the constant that it is."""
    if isinstance(value, Symbol):
        return value
    if isinstance(value, (bool, numbers.Integral, numbers.Real)) or type(value).__name__ in ("bool_", "bool"):
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        number = int(value) if whole else bool(value) if not isinstance(value, numbers.Real) else value
        try:
            return Symbol(graph, graph.constant(number if isinstance(number, (bool, int)) else float(number)))
        except GraphError as error:
            raise refuse(str(error).removeprefix("got ").partition(";")[0], "an integer of 64 bits") from None
    element = known.element_of(graph, value)
    if element is not None:
        return element
    raise refuse(f"an operand of type {type(value).__name__}", "a number, a symbol or a tensor without dimensions")


def together(graph: Graph, *values: Any) -> tuple[Symbol, ...]:
    """Operands of one type: float where one is, else integer where one is."""
    symbols = [as_symbol(graph, value) for value in values]
    types = {symbol.node.type for symbol in symbols}
    type_ = "f" if "f" in types else "i" if "i" in types else "b"
    return tuple([Symbol(graph, graph.cast(symbol.node, type_)) for symbol in symbols])


def graph_of(*values: Any) -> Graph:
    for value in values:
        if isinstance(value, Symbol):
            return value.graph
    raise refuse("no symbol among the operands", "one")


def built(graph: Graph, make: Callable[..., Node], *args: Any) -> Symbol:
    """The symbol of a node that `make` makes; its error with the line."""
    try:
        return Symbol(graph, make(*args))
    except GraphError as error:
        got, _, want = str(error).removeprefix("got ").partition("; want ")
        raise refuse(got, want) from None


def binary(op: str, a: Any, b: Any) -> Any:
    graph = graph_of(a, b)
    x, y = together(graph, a, b)
    type_ = x.node.type
    if op in ("lt", "le", "eq", "ne"):
        return built(graph, graph.compare, op, x.node, y.node)
    if op in ("gt", "ge"):
        return built(graph, graph.compare, "lt" if op == "gt" else "le", y.node, x.node)
    if op in ("and", "or", "xor"):
        if type_ == "f":
            raise refuse(f"a bitwise {op} of floats", "integers or truths")
        return built(graph, graph.binary, op, x.node, y.node)
    if op in ("min", "max") and type_ == "b":
        return built(graph, graph.binary, "and" if op == "min" else "or", x.node, y.node)
    if type_ == "b":
        raise refuse(f"{op} of two truths", "&, |, ^ of them, or a cast of one to an integer or float")
    if op in ("shl", "shr"):
        if type_ == "f" or (y.node.is_constant and not 0 <= y.node.data < 64):
            raise refuse("a shift of a float, or by less than 0 or more than 63", "integers")
        return built(graph, graph.binary, op, x.node, y.node)
    if op == "truediv":
        return built(graph, graph.binary, "div", graph.cast(x.node, "f"), graph.cast(y.node, "f"))
    if op == "floordiv":
        quotient = built(graph, graph.binary, "div", x.node, y.node)
        return quotient if type_ == "i" else built(graph, graph.unary, "floor", quotient.node)
    if op == "pow":
        return _power(graph, x, y)
    return built(graph, graph.binary, op, x.node, y.node)


def _power(graph: Graph, x: Symbol, y: Symbol) -> Symbol:
    """By multiplications where the exponent is a small whole constant, by sqrt where it is a half."""
    exponent = y.node.data if y.node.is_constant else None
    if exponent is not None and math.isfinite(exponent) and exponent == int(exponent) and 0 <= exponent <= 16:
        result, square, left = graph.constant(1, x.node.type), x.node, int(exponent)
        while left:
            if left & 1:
                result = square if result.is_constant and result.data == 1 else graph.binary("mul", result, square)
            left >>= 1
            if left:
                square = graph.binary("mul", square, square)
        return Symbol(graph, result)
    if x.node.type == "i":
        raise refuse("a power of integers whose exponent is no constant from 0 to 16", "such a one, or a float base")
    if exponent == 0.5:
        return unary("sqrt", x)
    return built(graph, graph.binary, "pow", x.node, y.node)


_FLOAT_ONLY = frozenset(("exp", "log", "sqrt", "tanh", "sin", "cos"))


def unary(op: str, x: Any) -> Any:
    if not isinstance(x, Symbol):
        raise refuse(f"{op} of {type(x).__name__}", "a symbol")
    graph, node = x.graph, x.node
    if op in ("floor", "ceil", "trunc") and node.type != "f":
        return Symbol(graph, graph.cast(node, "i"))
    if op == "not":
        if node.type == "f":
            raise refuse("~ of a float", "an integer or a truth")
        return built(graph, graph.unary, "not", node)
    if node.type == "b":
        node = graph.cast(node, "i")
    if op in _FLOAT_ONLY:
        node = graph.cast(node, "f")
    return built(graph, graph.unary, op, node)


def where(condition: Any, a: Any, b: Any) -> Any:
    """`a` where `condition` is not 0, else `b`: symbols or numbers, in fp32 if one of `a` and `b` is. Only the
    chosen one's NaN counts. Raises TraceError where none of the three is a symbol."""
    graph = graph_of(condition, a, b)
    chosen = graph.cast(as_symbol(graph, condition).node, "b")
    x, y = together(graph, a, b)
    return built(graph, graph.select, chosen, x.node, y.node)


def cast(x: Any, type_: str) -> Any:
    if not isinstance(x, Symbol):
        raise refuse(f"a cast of {type(x).__name__}", "a symbol")
    return Symbol(x.graph, x.graph.cast(x.node, type_))


def _operator(op: str, reflected: bool = False) -> Any:
    if reflected:
        return lambda self, other: binary(op, other, self)
    return lambda self, other: binary(op, self, other)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    _op = {"lshift": "shl", "rshift": "shr"}.get(_name, _name)
    setattr(Symbol, f"__{_name}__", _operator(_op))
    setattr(Symbol, f"__r{_name}__", _operator(_op, True))
for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
    setattr(Symbol, f"__{_name}__", _operator(_name))
for _name, _op in (("neg", "neg"), ("abs", "abs"), ("invert", "not")):
    setattr(Symbol, f"__{_name}__", lambda self, op=_op: unary(op, self))
for _name in ("floor", "ceil", "trunc"):  # math's functions of these names: to an integer, as they do
    setattr(Symbol, f"__{_name}__", lambda self, op=_name: cast(unary(op, self), "i"))
Symbol.__pos__ = lambda self: self  # type: ignore[attr-defined]
