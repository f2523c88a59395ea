# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of queries and keys where kv_append's positions are not those wanted.

Su et al., "RoFormer", 2021 (arXiv:2104.09864): pairs (x, y) become (x·cos − y·sin, y·cos + x·sin), with pairs (j, j +
r/2) in the half form and (2j, 2j + 1) in the interleaved one; r = rotary_dim. Computed in fp32.
"""

from __future__ import annotations

from .arguments import CPU, Array, array_module, device_of, is_torch


def rotate(
    x: Array, cos: Array, sin: Array, base: Array, moving: bool, interleaved: bool, cu_seqlens: Array | None
) -> Array:
    """A copy of `x` (batch, seqlen, heads, dim), or (tokens, heads, dim) with `cu_seqlens`, rotated.

    Row i of sequence b turns by the angle of position base[b] + i, or base[b] if not `moving`. `cos`, `sin` are
    (positions, rotary_dim / 2). Raises ValueError for positions beyond them; on a GPU, where no one looks, the last
    stands for them, as in kv_append.
    """
    import numpy

    if device_of(x) == CPU:
        positions = _positions(x, base, moving, cu_seqlens)
        _check(positions, cos)
    else:
        positions = _positions_unseen(x, base, moving, cu_seqlens, cos.shape[0])
    if is_torch(x):
        import torch

        at = torch.as_tensor(positions)
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


def _positions(x: Array, base: Array, moving: bool, cu_seqlens: Array | None) -> Array:
    """numpy int64 (batch, seqlen) or (tokens)."""
    import numpy

    start = numpy.asarray(base).astype(numpy.int64)
    if cu_seqlens is None:
        return start[:, None] + (numpy.arange(x.shape[1]) if moving else numpy.zeros(x.shape[1], numpy.int64))
    first = numpy.asarray(cu_seqlens).astype(numpy.int64)
    counts = numpy.diff(first)
    positions = numpy.zeros(x.shape[0], numpy.int64)
    rows = numpy.arange(first[-1]) - numpy.repeat(first[:-1], counts) if moving else 0
    positions[: first[-1]] = numpy.repeat(start, counts) + rows
    return positions


def _positions_unseen(x: Array, base: Array, moving: bool, cu_seqlens: Array | None, most: int) -> Array:
    """The same below `most` in the library of x, without a look at what is in `base` and `cu_seqlens`."""
    module, where = array_module(x)
    if cu_seqlens is None:
        rows = module.arange(x.shape[1], **where) if moving else module.zeros(x.shape[1], dtype=module.int64, **where)
        positions = base[:, None] + rows
    else:
        token = module.arange(x.shape[0], dtype=module.int32, **where)
        sequence = module.searchsorted(cu_seqlens[1:], token, side="right")
        sequence = sequence.clip(0, max(base.shape[0] - 1, 0))  # of tokens behind the last sequence
        positions = base[sequence] + (token - cu_seqlens[sequence] if moving else 0)
    return module.asarray(positions.clip(0, most - 1), dtype=module.int64)


def _check(positions: Array, cos: Array) -> None:
    if positions.size and (positions.min() < 0 or positions.max() >= cos.shape[0]):
        raise ValueError(
            f"rotary_cos: got {cos.shape[0]} positions; want at least {int(positions.max()) + 1}, the largest used + 1"
        )
