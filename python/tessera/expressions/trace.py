# SPDX-License-Identifier: Apache-2.0
"""A Python function as an expression graph: it is called with symbols, and what it returns is the graph's result."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from .functions import watching
from .graph import Graph, GraphError, Node, program
from .symbols import Symbol, TraceError, as_symbol

SCORE, MASK = "score", "mask"
_ARGUMENTS = {SCORE: ("score", "batch", "head", "query", "key"), MASK: ("batch", "head", "query", "key")}
_RESULT = {SCORE: ("f", "a float"), MASK: ("b", "a truth, as a comparison gives it")}


class Traced(NamedTuple):
    """graph: with the captured arrays; result: of type f for a score, b for a mask."""

    graph: Graph
    result: Node


# Functions that gave the same graph twice.
_steady: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def trace(function: Callable[..., Any], kind: str) -> Traced:
    """The graph of score(score, batch, head, query, key) or mask(batch, head, query, key).

    A function that has not been seen before is called twice, and has to give the same graph.

    Raises TraceError, which names the line, for what no graph can say.
    """
    traced = _once(function, kind)
    if not _is_steady(function):
        again = _once(function, kind)
        try:
            programs = program(traced.result), program(again.result)
        except GraphError as error:
            raise TraceError(f"{kind}: {error}") from None
        if programs[0] != programs[1] or not _same(traced.graph.arrays, again.graph.arrays):
            raise TraceError(
                f"{kind}: got another expression from the second call of {_name(function)} than from the first; want a "
                "function of its arguments alone, without randomness or counters, that makes no tensors"
            )
        _remember(function)
    return traced


def _same(one: list[Any], other: list[Any]) -> bool:
    """Whether both are the same memory: a view that the function makes is another object in each call."""
    return len(one) == len(other) and all([a is b or _place(a) == _place(b) for a, b in zip(one, other, strict=True)])


def _place(array: Any) -> Any:
    if hasattr(array, "data_ptr"):
        return array.data_ptr(), tuple(array.shape), array.stride(), array.dtype
    described = getattr(array, "__array_interface__", None)
    return id(array) if described is None else tuple(map(described.get, ("data", "shape", "strides", "typestr")))


def _is_steady(function: Any) -> bool:
    try:
        return function in _steady
    except TypeError:  # neither hashable nor weakly referable
        return False


def _remember(function: Any) -> None:
    try:
        _steady[function] = True
    except TypeError:
        return


def _name(function: Any) -> str:
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", repr(function))
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _once(function: Callable[..., Any], kind: str) -> Traced:
    graph = Graph()
    symbols = [Symbol(graph, graph.input(name)) for name in _ARGUMENTS[kind]]
    with watching():
        try:
            answer = function(*symbols)
        except IndexError as error:  # NumPy's words for an index that is no integer
            code = error.__traceback__.tb_next  # type: ignore[union-attr]
            where = "" if code is None else f"{code.tb_frame.f_code.co_filename}:{code.tb_lineno}: "
            raise TraceError(
                f"{where}got a symbol as the index of an array; want tessera.expressions.captured(array)[…]"
            ) from error
    type_, want = _RESULT[kind]
    number = isinstance(answer, (bool, int, float)) or type(answer).__name__ == "bool_"
    if not number and not isinstance(answer, Symbol) and len(getattr(answer, "shape", (0,))):
        raise TraceError(f"{kind}: got {type(answer).__name__} from {_name(function)}; want {want}")
    result = as_symbol(graph, answer)
    if result.graph is not graph:
        raise TraceError(f"{kind}: got a symbol of another call from {_name(function)}; want {want}")
    node = result.node
    if node.type != type_ and not (kind == SCORE and node.type == "i" and node.is_constant):
        got = {"f": "a float", "i": "an integer", "b": "a truth"}[node.type]
        raise TraceError(f"{kind}: got {got} from {_name(function)}; want {want}")
    return Traced(graph, graph.cast(node, type_))
