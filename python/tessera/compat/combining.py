# SPDX-License-Identifier: Apache-2.0
"""``flash_attn_combine`` of versions 3 and 4: partial results merged, with the LSE laid out (…, seqlen, heads)."""

from __future__ import annotations

from typing import Any

from tessera import combine
from tessera._libraries import library_of

from .arguments import Array, array_module, is_torch, refuse


def combine_parts(
    out_partial: Array, lse_partial: Array, out: Array | None, out_dtype: Any, return_lse: bool = True
) -> tuple[Array, Array | None]:
    """(out, lse): out (b, s, h, d) or (tokens, h, d), lse fp32 (b, s, h) or (tokens, h), or None.

    `out_partial` (parts, b, s, h, d) or (parts, tokens, h, d), `lse_partial` fp32 without the last dimension.
    """
    library_of(out_partial, "out_partial")
    library_of(lse_partial, "lse_partial")
    rank = out_partial.ndim
    if rank not in (4, 5):
        refuse(
            "out_partial", out_partial, "(parts, batch, seqlen, heads, dim) or (parts, tokens, heads, dim)", ValueError
        )
    if tuple(lse_partial.shape) != tuple(out_partial.shape[:-1]):
        refuse(
            "lse_partial",
            lse_partial,
            f"the shape of out_partial without its last dimension, {tuple(out_partial.shape[:-1])}",
            ValueError,
        )
    if out is not None and out_dtype is not None and out.dtype != out_dtype:
        refuse("out_dtype", out_dtype, f"the dtype of out, {out.dtype}", ValueError)
    lse_parts = _heads_first(lse_partial)
    results = combine(out_partial, lse_parts, return_lse=return_lse, out=out, out_dtype=out_dtype)
    if not return_lse:
        return results, None
    merged, lse = results
    return merged, _swap(lse)


def _swap(array: Array) -> Array:
    """The last two dimensions exchanged: a view."""
    return array.transpose(-1, -2) if is_torch(array) else array.swapaxes(-1, -2)


def _heads_first(lse_partial: Array) -> Array:
    """(parts, …, heads, seqlen), contiguous along seqlen: a view if `lse_partial` is laid out so, else a copy."""
    swapped = _swap(lse_partial)
    if is_torch(swapped):
        return swapped if swapped.stride(-1) == 1 or swapped.shape[-1] < 2 else swapped.contiguous()
    module, _ = array_module(swapped)
    if not isinstance(swapped, module.ndarray) or swapped.strides[-1] == swapped.itemsize or swapped.shape[-1] < 2:
        return swapped
    return module.ascontiguousarray(swapped)
