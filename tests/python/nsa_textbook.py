# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention by masks over all pairs of rows and tokens, for one sequence: docs/nsa.md in a few lines."""

from __future__ import annotations

import numpy as np


def pooled(x, length, stride, projection=None):
    """(n, hkv, d)"""
    n = 0 if len(x) < length else (len(x) - length) // stride + 1
    means = np.stack([x[j * stride : j * stride + length].mean(0) for j in range(n)]) if n else x[:0]
    return means if projection is None else np.einsum("nhd,hde->nhe", means, projection)


def attend(q, k, v, visible, scale):
    """visible (hq, rows, keys)."""
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("ihd,jhd->hij", q, np.repeat(k, group, 1)) * scale
    scores = np.where(visible, scores, -np.inf)
    largest = scores.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    total = weights.sum(-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.einsum("hij,jhd->ihd", weights, np.repeat(v, group, 1))


def listed(tiles, sequence, rows, tokens, heads_q):
    """bool (hq, rows, tokens) of a TileList."""
    counts, indices = np.asarray(tiles.counts)[sequence], np.asarray(tiles.indices)[sequence]
    seen = np.zeros((heads_q, rows, tokens), bool)
    for h in range(heads_q):
        head = h // (heads_q // counts.shape[0])
        for i in range(rows):
            tile = i // tiles.block[0]
            for block in indices[head, tile, : counts[head, tile]]:
                seen[h, i, block * tiles.block[1] : (block + 1) * tiles.block[1]] = True
    return seen


def nsa(
    q,
    k,
    v,
    tiles,
    *,
    compressed_tiles=None,
    sequence=0,
    length,
    stride,
    seen_from,
    window,
    causal,
    gates,
    projections=(None, None),
):
    """(rows, hq, dv) in double; seen_from: tokens of a block that have passed once it is seen; gates (rows, hq, 3)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    rows, scale = len(q), q.shape[-1] ** -0.5
    k_cmp, v_cmp = (pooled(x, length, stride, w) for x, w in zip((k, v), projections, strict=True))
    i, j, block = np.arange(rows)[:, None], np.arange(rows)[None], np.arange(len(k_cmp))[None]
    before = j <= i if causal else np.ones((rows, rows), bool)
    complete = block * stride + seen_from <= i + 1 if causal else np.ones((rows, len(k_cmp)), bool)
    near = (i - j < window) & (j - i < window) & before
    heads = q.shape[1]
    seen = np.broadcast_to(complete, (heads, *complete.shape))
    if compressed_tiles is not None:
        seen = seen & listed(compressed_tiles, sequence, rows, len(k_cmp), heads)
    branches = (
        attend(q, k_cmp, v_cmp, seen, scale),
        attend(q, k, v, listed(tiles, sequence, rows, rows, heads) & before, scale),
        attend(q, k, v, np.broadcast_to(near, (heads, rows, rows)), scale),
    )
    return sum(gates[..., x : x + 1] * branch for x, branch in enumerate(branches))


def sigmoid_gates(q, weight):
    return 1 / (1 + np.exp(-np.einsum("...hd,hxd->...hx", q.astype(np.float64), weight.astype(np.float64))))
