# SPDX-License-Identifier: Apache-2.0
"""Whether a function would be traced to the same graph again, told without calling it."""

from __future__ import annotations

import builtins
import dis
import sys
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

# What these modules and builtins are stays the same, and so do their answers to the same arguments.
_MODULES = frozenset(("torch", "math", "operator", "tessera", "tessera.expressions"))
_BUILTINS = frozenset(
    [
        "abs",
        "all",
        "any",
        "bool",
        "divmod",
        "enumerate",
        "float",
        "int",
        "isinstance",
        "len",
        "max",
        "min",
        "pow",
        "range",
        "reversed",
        "round",
        "sum",
        "tuple",
        "zip",
    ]
)
_SCALARS = (int, float, bool, str, bytes, type(None))
_MISSING = object()


class Unchanged:
    """What a function reads besides its arguments: `holds(function)` while all of it is the same. It does not keep the
    function alive, so that it may be the value of a weak table's key."""

    def __init__(self, function: FunctionType) -> None:
        self._own = _form(function)
        self._inner: list[tuple[FunctionType, tuple[Any, ...]]] = []
        self._cells: list[tuple[Any, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._tensors: list[tuple[Any, tuple[Any, ...]]] = []
        self.is_known = self._reads_known(function, (function,))

    def holds(self, function: FunctionType) -> bool:
        if not _is_same(_form(function), self._own):
            return False
        for inner, form in self._inner:
            if not _is_same(_form(inner), form):
                return False
        try:
            for cell, value in self._cells:
                if cell.cell_contents is not value:
                    return False
        except ValueError:  # an empty cell
            return False
        for names, name, value in self._globals:
            if names.get(name, _MISSING) is not value:
                return False
        return all([_state(tensor) == state for tensor, state in self._tensors])

    def _knows(self, value: Any, outer: tuple[FunctionType, ...]) -> bool:
        """Takes note of a value; False for one that may change without its being seen."""
        kind = type(value)
        if kind in _SCALARS:
            return True
        if kind is BuiltinFunctionType:
            return value.__self__ is None or isinstance(value.__self__, (ModuleType, type))
        if kind is ModuleType:
            return value.__name__ in _MODULES
        if kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_fields") and not hasattr(value, "__dict__")):
            return all([self._knows(item, outer) for item in value])
        if kind is FunctionType:
            if value in outer:  # the table's entry would keep its own key alive
                return False
            self._inner.append((value, _form(value)))
            return self._reads_known(value, (*outer, value))
        torch = sys.modules.get("torch")
        if torch is None:
            return False
        if kind is torch.dtype:
            return True
        if kind not in (torch.Tensor, torch.nn.Parameter) or value.requires_grad or value.is_inference():
            return False  # gradients depend on the call, and tensors of inference_mode count no writes
        self._tensors.append((value, _state(value)))
        return True

    def _reads_known(self, function: FunctionType, outer: tuple[FunctionType, ...]) -> bool:
        if str(function.__module__).partition(".")[0] == "torch" and function.__closure__ is None:
            return True
        if function.__kwdefaults__ or not self._knows(function.__defaults__ or (), outer):
            return False
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:
                return False
            self._cells.append((cell, value))
            if not self._knows(value, outer):
                return False
        names: set[str] = set()
        if not _collect_names(function.__code__, names):
            return False
        for name in names:
            value = function.__globals__.get(name, _MISSING)
            self._globals.append((function.__globals__, name, value))
            if value is _MISSING:
                if hasattr(builtins, name) and name not in _BUILTINS:
                    return False
            elif not self._knows(value, outer):
                return False
        return True


def unchanged(function: Any) -> Unchanged | None:
    """None for what is no plain function, for one that writes to anything but its own variables, and for one that reads
    what may change unseen: lists, dicts, objects with attributes, other modules than torch and math, tensors that
    require grad."""
    if type(function) is not FunctionType:
        return None
    found = Unchanged(function)
    return found if found.is_known else None


def _form(function: FunctionType) -> tuple[Any, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__, function.__closure__


def _is_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(map(is_, one, other))


def _state(tensor: Any) -> tuple[Any, ...]:
    """Changes with the tensor's memory, form and values; only writes past torch are not seen."""
    return tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


_WRITES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR")


def _collect_names(code: CodeType, names: set[str]) -> bool:
    """Adds the names of globals, builtins and attributes in a function and in those that it defines. False if it
    imports something, or writes to anything but its own variables."""
    names.update(code.co_names)
    for step in dis.get_instructions(code):
        if step.opname in _WRITES or step.opname.startswith("IMPORT_"):
            return False
        if step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars:
            return False
    return all([_collect_names(x, names) for x in code.co_consts if isinstance(x, CodeType)])
