# SPDX-License-Identifier: Apache-2.0
"""Which tensors a call takes, and in which type under autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._arguments import Call
from .autograd import lowered


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """q, k and v in autocast's dtype where it is enabled, as `attention` without quantization= has them. Other
    libraries' arrays, which are refused later, stay as they are."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(lowered(x, dtype) if isinstance(x, Tensor) else x for x in tensors)


def check_tensors(call: Call, q: Any, k: Any, v: Any, out: Any = None) -> None:
    """TypeError for arrays of another library, ValueError for tensors in another layout or place than q."""
    named = [("q", q), ("k", k), ("v", v), *zip(call.slots, call.tensors, strict=True)]
    if out is not None:
        named.append(("out", out))
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            kind = type(tensor)
            raise TypeError(f"{name}: got {kind.__module__}.{kind.__qualname__}; want a torch.Tensor, as q is one")
        _refuse_layout(name, tensor)
        # Tensors on "meta" have shapes and no data; results then have neither.
        if not (tensor.is_cpu or tensor.is_cuda or tensor.is_meta):
            raise ValueError(f"{name}: got a tensor on {tensor.device}; want one on cpu or cuda")
        if tensor.device != q.device:
            raise ValueError(f"{name}: got a tensor on {tensor.device}; want one on {q.device}, as q is")


def _refuse_layout(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise ValueError(f"{name}: got {kind}; want torch.strided, sequences of several lengths with cu_seqlens")
