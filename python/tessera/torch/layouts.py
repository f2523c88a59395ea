# SPDX-License-Identifier: Apache-2.0
"""Tensors of a backward, laid out as kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor

_BULK = 16  # bytes


def with_rows(gradient: Tensor) -> Tensor:
    """Itself, or a copy if its last dimension is not contiguous."""
    return gradient if gradient.is_contiguous() or gradient.stride(-1) == 1 else gradient.contiguous()


def with_aligned_rows(gradient: Tensor) -> Tensor:
    """Itself, or a copy if it lies as the bulk copies of GPUs (TMA) cannot read it.

    They want a contiguous last dimension, rows that begin at multiples of 16 bytes and steps above 0: no expanded ones.
    """
    if gradient.data_ptr() % _BULK == 0:
        if gradient.is_contiguous():
            return gradient
        size = gradient.element_size()
        *steps, last = gradient.stride()
        if last == 1 and all(
            step > 0 and step * size % _BULK == 0
            for step, length in zip(steps, gradient.shape, strict=False)
            if length > 1
        ):
            return gradient
    return gradient.clone(memory_format=torch.contiguous_format)


def with_rows_apart(x: Tensor) -> Tensor:
    """Itself, or a copy if all its rows are one, expanded: (batch, rows, heads, dim) or (rows, heads, dim)."""
    return x.contiguous() if x.shape[-3] > 1 and x.stride(-3) == 0 else x
