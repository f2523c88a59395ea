# SPDX-License-Identifier: Apache-2.0
"""Attention probabilities with the dropout pattern in their sign: what flash-attn 2 returns as ``S_dmask`` for tests.

The textbook way, seqlen_q · seqlen_k numbers for every head, from the LSE of the call they explain.
"""

from __future__ import annotations

from typing import Any

from tessera import dropout_keep
from tessera.tiles import as_numpy

from .arguments import Array, array_module, is_torch

Numpy = Any


def signed_probabilities(
    q: Array,
    k: Array,
    lse: Array,
    *,
    seed: int,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    scale: float | None,
    softcap: float,
    alibi_slopes: Array | None,
    dropout: float,
    deterministic: bool,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Array | None = None,
    seqused_k: Array | None = None,
) -> Array:
    """(batch, nheads, seqlen_q, seqlen_k) in q's dtype: exp(S' − lse), negative where dropped, 0 where masked.

    For sequences of several lengths the rest is 0. Pages are gathered here. Computed on the CPU: tensors of a GPU are
    copied, and waited for.
    """
    import numpy

    queries, keys, rows = _fp32(q), _fp32(k), _fp32(lse)
    starts_q = None if cu_seqlens_q is None else as_numpy(cu_seqlens_q)
    starts_k = None if cu_seqlens_k is None else as_numpy(cu_seqlens_k)
    table = None if page_table is None else as_numpy(page_table)
    used = None if seqused_k is None else as_numpy(seqused_k)
    batch = queries.shape[0] if starts_q is None else len(starts_q) - 1
    heads = queries.shape[-2]
    longest_q = queries.shape[1] if max_seqlen_q is None else int(max_seqlen_q)
    longest_k = keys.shape[1] if max_seqlen_k is None else int(max_seqlen_k)
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    slopes = None if alibi_slopes is None else numpy.broadcast_to(_fp32(alibi_slopes), (batch, heads))
    left, right = (None, 0 if causal else None) if window is None else window
    result = numpy.zeros((batch, heads, longest_q, longest_k), numpy.float32)
    for b in range(batch):
        rows_of = slice(None) if starts_q is None else slice(int(starts_q[b]), int(starts_q[b + 1]))
        queries_b = queries[b] if starts_q is None else queries[rows_of]
        lse_b = rows[b] if starts_q is None else rows[:, rows_of]
        if table is not None and used is not None:
            tokens = keys[table[b]].reshape(-1, *keys.shape[2:])
            keys_b = tokens[: int(used[b])]
        else:
            keys_b = keys[b] if starts_k is None else keys[int(starts_k[b]) : int(starts_k[b + 1])]
        p = _probabilities(queries_b, keys_b, lse_b, scale, softcap, None if slopes is None else slopes[b], left, right)
        numpy.negative(p, out=p, where=~dropout_keep((1, *p.shape), dropout, seed, batch_offset=b)[0])
        result[b, :, : p.shape[1], : p.shape[2]] = p
    if is_torch(q):
        import torch

        return torch.from_numpy(result).to(q.device, q.dtype)
    module, _ = array_module(q)
    return module.asarray(result.astype(q.dtype))


def _probabilities(
    q: Numpy,
    k: Numpy,
    lse: Numpy,
    scale: float,
    softcap: float,
    slopes: Numpy | None,
    left: int | None,
    right: int | None,
) -> Numpy:
    """(heads, sq, sk) of one sequence: q (sq, heads, d), k (sk, heads_kv, d), lse (heads, sq). All fp32, in place."""
    import numpy

    k = numpy.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scores = (q * numpy.float32(scale)).transpose(1, 0, 2) @ k.transpose(1, 2, 0)
    if softcap > 0:
        scores /= softcap
        numpy.tanh(scores, out=scores)
        scores *= softcap
    distance = numpy.arange(k.shape[0])[None, :] - (numpy.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0])
    if slopes is not None:
        scores -= slopes[:, None, None] * abs(distance).astype(numpy.float32)
    scores -= numpy.where(numpy.isneginf(lse), 0, lse)[..., None]
    if left is not None:
        numpy.copyto(scores, -numpy.inf, where=distance < -left)
    if right is not None:
        numpy.copyto(scores, -numpy.inf, where=distance > right)
    return numpy.exp(scores, out=scores)


def _fp32(array: Array) -> Numpy:
    import numpy

    if is_torch(array):
        return as_numpy(array.float())
    return as_numpy(array).astype(numpy.float32)
