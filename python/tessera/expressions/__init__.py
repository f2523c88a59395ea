# SPDX-License-Identifier: Apache-2.0
"""Scores and masks written in Python: functions of symbols, traced to expression graphs that every backend runs.

`attention(score=f, mask=g)` does this by itself. What a function may use: Python's operators, torch's and NumPy's
functions of symbols, and those of this module, which need neither. `captured(array)` is an array whose elements a
function reads by symbols; torch tensors need no wrapping. docs/python.md, section 13, has examples.
"""

from .captured import Captured as captured
from .functions import (
    clamp,
    cos,
    exp,
    floor,
    integer,
    log,
    maximum,
    minimum,
    real,
    sigmoid,
    sin,
    sqrt,
    tanh,
    truth,
    where,
)
from .register import mask_of, score_of
from .symbols import Symbol, TraceError

__all__ = [
    "Symbol",
    "TraceError",
    "captured",
    "clamp",
    "cos",
    "exp",
    "floor",
    "integer",
    "log",
    "mask_of",
    "maximum",
    "minimum",
    "real",
    "score_of",
    "sigmoid",
    "sin",
    "sqrt",
    "tanh",
    "truth",
    "where",
]
