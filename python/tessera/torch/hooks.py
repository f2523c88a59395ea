# SPDX-License-Identifier: Apache-2.0
"""What the package's functions call where their arrays are torch tensors (`Library.operators`)."""

from __future__ import annotations

from .calls import attend_and_train, forward, trains
from .in_place import append, flush, linear
from .linear import linear_attention
from .nsa import nsa_gate, nsa_pool, wants_gradient

__all__ = [
    "append",
    "attend_and_train",
    "flush",
    "forward",
    "linear",
    "linear_attention",
    "nsa_gate",
    "nsa_pool",
    "trains",
    "wants_gradient",
]
