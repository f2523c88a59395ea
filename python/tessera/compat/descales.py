# SPDX-License-Identifier: Apache-2.0
"""flash-attn 3's descales of fp8 inputs, fp32 (batch, heads_kv)."""

from __future__ import annotations

from typing import Any

from tessera._libraries import dtype_name, library_of

from .arguments import Array, array_module, refuse


def descales_of(
    q: Array, k: Array, batch: int, q_descale: Array | None, k_descale: Array | None, v_descale: Array | None
) -> dict[str, Any]:
    """The keywords of :func:`tessera.attention`; a descale that is not given is 1. None is read beside another q than
    float8_e4m3fn, as flash-attn 3 does: serving engines pass them always."""
    given = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    if dtype_name(q.dtype, "q") != "e4m3":
        return {}
    return {name: _packed(name, value, q, (batch, k.shape[-2])) for name, value in given.items()}


def _packed(name: str, value: Array | None, like: Array, shape: tuple[int, int]) -> Array:
    """As (batch, heads_kv) in memory, which serving engines expand one number to."""
    module, place = array_module(like)
    if value is None:
        return module.ones(shape, dtype=module.float32, **place)
    library_of(value, name)
    if tuple(value.shape) != shape:
        refuse(name, value, f"fp32 {shape}, (batch, heads_kv)", ValueError)
    return value.contiguous() if hasattr(value, "contiguous") else module.ascontiguousarray(value)
