# SPDX-License-Identifier: Apache-2.0
"""What the package's functions call where their arrays are torch tensors (`Library.operators`)."""

from __future__ import annotations

from .arguments import autocast
from .calls import attend_and_train, attend_by_masses, computes_of, forward, trains
from .in_place import append, flush, linear
from .linear import linear_attention
from .nsa import nsa_gate, nsa_pool, nsa_select, wants_operators
from .nsa_function import nsa, nsa_is_one_node
from .quantized import attend_quantised, wants_gradient

__all__ = [
    "append",
    "attend_and_train",
    "attend_by_masses",
    "attend_quantised",
    "autocast",
    "computes_of",
    "flush",
    "forward",
    "linear",
    "linear_attention",
    "nsa",
    "nsa_gate",
    "nsa_is_one_node",
    "nsa_pool",
    "nsa_select",
    "trains",
    "wants_gradient",
    "wants_operators",
]
