# SPDX-License-Identifier: Apache-2.0
"""From Python functions to what a call names: traced callables in the registry, their tensors, the window of a mask."""

from __future__ import annotations

import hashlib
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

from .. import _core
from .._checks import check_extras, frames_of_the_package, pair
from .._libraries import is_compiling
from .captured import bindable
from .cuda_text import cuda_text, extra_name
from .derivative import derivative
from .graph import INPUTS, Graph, GraphError, Node, ordered, program
from .symbols import TraceError
from .trace import MASK, SCORE, Traced, trace
from .unchanged import Unchanged, unchanged
from .windows import Window, without_window

# What was traced and registered last, by name, without captured arrays. The library's registry of texts keeps all.
_MOST = 1024
_traced: OrderedDict[str, Traced] = OrderedDict()
_made = 0
_lock = threading.Lock()


def traced_by_name(name: str) -> Traced | None:
    """What was traced to `name`, without its captured arrays; None for a name that is no traced function's, or one of
    1024 functions ago."""
    with _lock:
        found = _traced.get(name)
        if found is not None:
            _traced.move_to_end(name)
        return found


class Resolved(NamedTuple):
    """name: in the registry of this process; None for a mask that is a window alone, or hides nothing. tensors: what it
    reads, for `extras=`.

    window: keys from `left` before to `right` after the query's position, None without an end, that hold besides.
    inputs: which of "batch", "head", "query", "key" and "score" the expression reads.
    """

    name: str | None
    tensors: tuple[Any, ...]
    window: Window = (None, None)
    inputs: frozenset[str] = frozenset()


class Options(NamedTuple):
    """The options of `attention` that functions of Python stand in, with what they were traced to."""

    causal: bool
    window: Any
    score: Any
    mask: Any
    extras: Any


def with_traced(options: Options, tiles: Any, wishes: Any) -> Options:
    """Options in which names stand for functions, for every backend but the oracle, which calls the functions.

    Extra tensors are the score's, then the mask's; those of `extras` belong to the one that is a name. The part of a
    mask that is a window becomes one, but where a tile list may waive the mask.

    Raises TraceError, ValueError for extras that belong to nothing, TypeError for extras that are no tuple or list.
    """
    if isinstance(wishes, str) and "cpu.reference" in wishes:
        return options
    if is_compiling():
        name = "score" if callable(options.score) else "mask"
        raise NotImplementedError(
            f"{name}: got a Python function under torch.compile; want the name that expressions.{name}_of gave outside"
        )
    causal, window, score, mask, extras = options
    check_extras(extras)
    given = tuple(extras)
    if given and not isinstance(score, str) and not isinstance(mask, str):
        raise ValueError(
            f"extras: got {len(given)} arrays beside functions of Python; want none, functions read tensors by name"
        )
    if callable(score):
        traced = score_of(score)
        score, given = traced.name, (*traced.tensors, *given)
    if callable(mask):
        traced = mask_of(mask, tiles is None)
        joined = _narrower(causal, window, traced.window)
        if joined is None:  # no key is in both: the mask says it
            traced = mask_of(mask, False)
        else:
            causal, window = joined
        mask, given = traced.name, (*given, *traced.tensors)
    return Options(causal, window, score, mask, given)


def _narrower(causal: Any, window: Any, own: Window) -> tuple[Any, Any] | None:
    """(causal, window) of a call whose mask has the window `own`; None where no key is left."""
    if own == (None, None):
        return causal, window
    left, right = own
    if window is not None:
        given_left, given_right = pair("window", window, "(left, right), each an integer or None")
        left = _least(left, given_left)
        right = _least(right, given_right)
    if causal:
        right = _least(right, 0)
    if left is not None and right is not None and left + right < 0:
        return None
    return (True, None) if (left, right) == (None, 0) else (False, (left, right))


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


# What functions were traced to last, and what it follows from. An entry goes with its function.
_Entry = tuple[Unchanged, Resolved]
_resolved: weakref.WeakKeyDictionary[Any, dict[str, _Entry]] = weakref.WeakKeyDictionary()


def _kept(function: Callable[..., Any], kind: str) -> Resolved | None:
    """What the function was traced to, if nothing that it reads has changed since."""
    if type(function) is not FunctionType:
        return None
    entries = _resolved.get(function)
    entry = None if entries is None else entries.get(kind)
    if entry is None or not entry[0].holds(function):
        return None
    name = entry[1].name
    return entry[1] if name is None or traced_by_name(name) is not None else None


def kept_score(function: Callable[..., Any]) -> Resolved | None:
    """What `score_of` would return without tracing; None where it has to trace."""
    return _kept(function, SCORE)


def kept_mask(function: Callable[..., Any]) -> Resolved | None:
    """Likewise of `mask_of`."""
    return _kept(function, MASK)


def _kept_as(function: Callable[..., Any], kind: str, before: Unchanged | None, resolved: Resolved) -> Resolved:
    """`before`: made before the function was called."""
    if before is not None and before.holds(function):  # type: ignore[arg-type]
        _resolved.setdefault(function, {})[kind] = before, resolved
    return resolved


def score_of(function: Callable[..., Any]) -> Resolved:
    """A score function, traced and registered with its derivative, for calls that take a name: `attention(score=name,
    extras=tensors)`, which torch.compile traces.

    function(score, batch, head, query, key) -> float: the score in fp32, the others int64. Raises TraceError (a
    ValueError) for what no expression can say or more than 256 steps with the derivative, NotImplementedError for a
    captured tensor that requires grad and is not in fp32 on the CPU.

    A function is traced again whenever something that it reads may have changed since it was traced last. Not traced
    again is a plain Python function that writes to its own variables alone and reads nothing but numbers, strings,
    dtypes, torch tensors that require no grad, tuples of these, the modules torch and math, and functions of which the
    same holds, as long as the code and the defaults of each are the same objects, each variable of closures and modules
    holds the same object, and each tensor has the same memory, shape, strides, dtype and, by torch's counter of writes
    in place, the same values.
    """
    kept = _kept(function, SCORE)
    if kept is not None:
        return kept
    before = unchanged(function)
    graph, result = trace(function, SCORE)
    for array in graph.arrays:
        _check_gradient(function, array)
    tensors = tuple(map(bindable, graph.arrays))
    with _named(SCORE):
        slope = derivative(graph, result)
        key = (SCORE, program(result, slope), *graph.tensors)
    name = _name_of(key)
    if traced_by_name(name) is None:
        texts = cuda_text(result, graph.tensors), cuda_text(slope, graph.tensors)
        _core.register_score(name, texts[0], _extras(graph.tensors), texts[1], key[1])
        _keep(name, graph, result)
    return _kept_as(function, SCORE, before, Resolved(name, tensors, inputs=_inputs(result)))


def mask_of(function: Callable[..., Any], windows: bool = True) -> Resolved:
    """A mask function, likewise: `attention(mask=name, extras=tensors)`, and `window=window` unless `windows` is False.

    function(batch, head, query, key) -> truth, all int64. Raises TraceError as `score_of` does, and for a captured
    tensor that requires grad. It is traced again when that is.
    """
    kind = MASK if windows else "mask with its window"
    kept = _kept(function, kind)
    if kept is not None:
        return kept
    before = unchanged(function)
    graph, result = trace(function, MASK)
    window: Window = (None, None)
    if windows:
        window, result = without_window(graph, result)
    if result.is_constant and result.data:
        return _kept_as(function, kind, before, Resolved(None, (), window))
    with _named(MASK):
        graph, result = graph.only(result)
        key = (MASK, program(result), *graph.tensors)
    tensors = tuple(map(_of_mask, graph.arrays))
    name = _name_of(key)
    if traced_by_name(name) is None:
        _core.register_mask(name, cuda_text(result, graph.tensors), _extras(graph.tensors), key[1])
        _keep(name, graph, result)
    return _kept_as(function, kind, before, Resolved(name, tensors, window, _inputs(result)))


def _keep(name: str, graph: Graph, result: Node) -> None:
    global _made
    graph.arrays = []
    with _lock:
        _traced[name] = Traced(graph, result)
        if len(_traced) > _MOST:
            _traced.popitem(last=False)
        _made += 1
        many = _made >= _MOST and _made & (_made - 1) == 0
    if many:
        warnings.warn(
            f"score, mask: got {_made} different expressions in this process; want numbers that change from call to "
            "call in a tensor without dimensions: every constant is another expression, whose text stays",
            RuntimeWarning,
            stacklevel=frames_of_the_package(),
        )


@contextmanager
def _named(kind: str) -> Iterator[None]:
    """Errors of the graph as those of the argument."""
    try:
        yield
    except GraphError as error:
        raise TraceError(f"{kind}: {error}") from None


def _inputs(result: Node) -> frozenset[str]:
    return frozenset(node.op for node in ordered(result) if node.op in INPUTS)


def _name_of(key: tuple[Any, ...]) -> str:
    return "traced." + hashlib.sha256(repr(key).encode()).hexdigest()[:16]


def _extras(tensors: list[tuple[str, int]]) -> list[tuple[str, str, int]]:
    return [(extra_name(number), dtype, rank) for number, (dtype, rank) in enumerate(tensors)]


def _requires_grad(array: Any) -> bool:
    return getattr(array, "requires_grad", False) and sys.modules["torch"].is_grad_enabled()


def _check_gradient(function: Callable[..., Any], array: Any) -> None:
    """Raises NotImplementedError for a captured tensor of a score whose gradient is asked for where there is none."""
    if not _requires_grad(array):
        return
    place, dtype = str(array.device), str(array.dtype).removeprefix("torch.")
    if place == "cpu" and dtype == "float32":
        return
    raise NotImplementedError(
        f"score: got the captured tensor {_own_name(function, array)}of shape {tuple(array.shape)} in {dtype} on "
        f"{place} that requires grad; want float32 on cpu: nothing computes its gradient elsewhere, detach() says that "
        "none is wanted"
    )


def _own_name(function: Callable[..., Any], array: Any) -> str:
    """What the function calls the array, with a space; nothing where it is no variable of its closure or module."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    named = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    for name, cell in named.items():
        if cell.cell_contents is array:
            return f"{name} "
    return next((f"{name} " for name in code.co_names if function.__globals__.get(name) is array), "")


def _of_mask(array: Any) -> Any:
    if _requires_grad(array):
        raise TraceError(
            f"mask: got a captured tensor of shape {tuple(array.shape)} that requires grad; want one without: a mask "
            "has no derivative, detach() says that none is wanted"
        )
    return bindable(array)
