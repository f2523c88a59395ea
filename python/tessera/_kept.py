# SPDX-License-Identifier: Apache-2.0
"""Calls with torch tensors that were made before, which go from their options straight to what computes them.

A table belongs to one function and is asked first, unless a compiler traces. Who computes a call for the first time
keeps it there (``tessera.torch.calls``); arrays of other libraries are never found.
"""

from __future__ import annotations

from typing import Any

from . import _core
from ._options import OPTIONS

ATTENTION = _core.KeptCalls()  # of `attention`, by its options in order

Array = Any


def keep_as(table: _core.KeptCalls, options: tuple[Any, ...], q: Array, k: Array, v: Array, **same: Any) -> None:
    """Keeps a call that returned what `attention` returns for the same arrays with the options `same`.

    `options`: all of that call besides q, k and v.
    """
    computes = ATTENTION.find(q, k, v, tuple([same.get(option.name, option.default) for option in OPTIONS]))
    if computes is not None:
        table.keep(q, k, v, options, computes)
