# SPDX-License-Identifier: Apache-2.0
"""Seed and offset of dropout and of stochastic rounding: as numbers, as arrays that only the run reads, or drawn."""

from __future__ import annotations

import sys
from typing import Any

from . import _core
from ._arrays import CPU, device_of
from ._checks import whole

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


def _is_capturing(torch: Any, device: int) -> bool:
    """Of the stream that a call with tensors on `device` will use, whichever device is current."""
    return _core.is_capturing(device, torch.cuda.current_stream(device).cuda_stream)


def drawn_seed(q: Array) -> Any:
    """A seed from torch's default generator for torch tensors (manual_seed repeats it), else from `random`.

    While torch.compile traces or a CUDA graph is captured it stays a tensor where q is, to be drawn anew by each call
    of what is compiled and each replay.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor):
        stays = torch.compiler.is_compiling() or (q.is_cuda and _is_capturing(torch, q.get_device()))
        device = q.device if stays and q.is_cuda else "cpu"
        drawn = torch.randint(0, 1 << 62, (1,), dtype=torch.int64, device=device)
        return drawn if stays else int(drawn)
    import random

    return random.getrandbits(63)
