# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of queries and keys where kv_append's positions are not those wanted.

Su et al., "RoFormer", 2021 (arXiv:2104.09864): pairs (x, y) become (x·cos − y·sin, y·cos + x·sin), with pairs (j, j +
r/2) in the half form and (2j, 2j + 1) in the interleaved one; r = rotary_dim. Computed in fp32.
"""

from __future__ import annotations

from .arguments import Array, is_torch


def rotate(
    x: Array, cos: Array, sin: Array, base: Array, moving: bool, interleaved: bool, cu_seqlens: Array | None
) -> Array:
    """A copy of `x` (batch, seqlen, heads, dim), or (tokens, heads, dim) with `cu_seqlens`, rotated.

    Row i of sequence b turns by the angle of position base[b] + i, or base[b] if not `moving`. `cos`, `sin` are
    (positions, rotary_dim / 2).
    """
    import numpy

    start = numpy.asarray(base).astype(numpy.int64)
    if cu_seqlens is None:
        rows = numpy.arange(x.shape[1]) if moving else numpy.zeros(x.shape[1], numpy.int64)
        positions = start[:, None] + rows
    else:
        first = numpy.asarray(cu_seqlens).astype(numpy.int64)
        counts = numpy.diff(first)
        positions = numpy.zeros(x.shape[0], numpy.int64)
        rows = numpy.arange(first[-1]) - numpy.repeat(first[:-1], counts) if moving else 0
        positions[: first[-1]] = numpy.repeat(start, counts) + rows
    _check(positions, cos)
    if is_torch(x):
        import torch

        at = torch.from_numpy(positions)
        c, s, out, wide = cos[at].float()[..., None, :], sin[at].float()[..., None, :], x.clone(), x.float()
    else:
        c, s = cos[positions].astype(numpy.float32)[..., None, :], sin[positions].astype(numpy.float32)[..., None, :]
        out, wide = x.copy(), x.astype(numpy.float32)
    half = cos.shape[1]
    first_of, second_of = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    a, b = wide[..., first_of], wide[..., second_of]
    out[..., first_of] = a * c - b * s
    out[..., second_of] = b * c + a * s
    return out


def _check(positions: Array, cos: Array) -> None:
    if positions.size and (positions.min() < 0 or positions.max() >= cos.shape[0]):
        raise ValueError(
            f"rotary_cos: got {cos.shape[0]} positions; want at least {int(positions.max()) + 1}, the largest used + 1"
        )
