# SPDX-License-Identifier: Apache-2.0
"""Descales as they come from elsewhere."""

from __future__ import annotations

from typing import Any

Array = Any


def packed(descale: Array | None) -> Array | None:
    """Itself, or a copy if its last dimension is not contiguous: one number that is expanded to all of them."""
    if hasattr(descale, "is_contiguous"):  # torch
        return descale if descale.is_contiguous() or descale.stride(-1) == 1 else descale.contiguous()
    strides = getattr(descale, "strides", None)
    if strides and strides[-1] != descale.itemsize and type(descale).__module__ == "numpy":
        return descale.copy()
    return descale
