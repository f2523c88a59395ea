# SPDX-License-Identifier: Apache-2.0
"""Seed and offset of dropout and of stochastic rounding: as numbers, as arrays that only the run reads, or drawn."""

from __future__ import annotations

from typing import Any

from ._checks import pair, whole
from ._libraries import CPU, device_of, library_of

Array = Any


def add_dropout(q: Array, seed: Any, offset: Any, drops: bool, slots: list[str], tensors: list[Any]) -> tuple[int, int]:
    """Seed and offset as integers, or bound as tensors; draws a seed where there is none."""
    if not drops:
        return 0, 0  # a seed without use changes nothing
    values = []
    for name, given in (("dropout_seed", drawn_seed(q) if seed is None else seed), ("dropout_offset", offset)):
        if hasattr(given, "shape") and (given.shape != () or device_of(given) != CPU):
            given = given.reshape(1) if given.shape == () else given
            slots.append(name)
            tensors.append(given)
            values.append(0)
        else:
            values.append(whole(name[8:], given))
            if not 0 <= values[-1] < 1 << 64:
                raise ValueError(f"{name[8:]}: got {values[-1]}; want 0 to below 2^64")
    return values[0], values[1]


def seed_pair(seed: Any) -> tuple[Any, Any]:
    """(seed, offset) of a seed alone, or of both."""
    return pair("seed", seed, "a seed, or (seed, offset)") if isinstance(seed, (tuple, list)) else (seed, 0)


def drawn_seed(q: Array) -> Any:
    """A seed from the generator of q's library, torch's default one, or else from `random`."""
    return library_of(q, "q").draw_seed(q)
