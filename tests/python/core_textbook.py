# SPDX-License-Identifier: Apache-2.0
"""Attention in fp64 by the formula of docs/semantics.md, section 1, with a dense mask, for the core tests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Result(NamedTuple):
    out: np.ndarray  # (b, sq, hq, dv)
    lse: np.ndarray  # (b, hq, sq), without the sink
    probabilities: np.ndarray  # (b, hq, sq, sk), with the sink in the denominator


def attention(q, k, v, *, visible=None, scale=None, softcap=0.0, slopes=None, sinks=None, keep=None, kept_scale=1.0):
    """Dense q (b, sq, hq, d), k, v (b, sk, hkv, d); visible: bool, broadcast to (b, hq, sq, sk); keep: of dropout."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    sq, sk = scores.shape[-2:]
    if slopes is not None:
        distance = np.abs(np.arange(sk) - (np.arange(sq)[:, None] + sk - sq))
        scores = scores - np.asarray(slopes, np.float64)[..., :, None, None] * distance
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.logaddexp.reduce(scores, axis=-1)
    total = lse if sinks is None else np.logaddexp(lse, np.asarray(sinks, np.float64)[:, None])
    empty = np.isneginf(lse)[..., None]
    probabilities = np.where(empty, 0.0, np.exp(scores - np.where(empty, 0.0, total[..., None])))
    weights = probabilities if keep is None else probabilities * keep * kept_scale
    return Result(np.einsum("bhqk,bkhd->bqhd", weights, v), lse, probabilities)


def window(sq: int, sk: int, left=None, right=None, shift: int | None = None) -> np.ndarray:
    """bool (sq, sk): keys from `left` before to `right` after the query, whose position is row + shift (sk − sq)."""
    distance = np.arange(sk) - (np.arange(sq)[:, None] + (sk - sq if shift is None else shift))
    seen = np.ones((sq, sk), bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def gradients(q, k, v, dout, *, visible=None, sinks=None, dlse=None):
    """(dq, dk, dv, dsink) by docs/semantics.md, section 6."""
    r = attention(q, k, v, visible=visible, sinks=sinks)
    q, k, v, dout = (np.asarray(x).astype(np.float64) for x in (q, k, v, dout))
    group = q.shape[2] // k.shape[2]
    k_all, v_all = np.repeat(k, group, 2), np.repeat(v, group, 2)
    delta = np.einsum("bqhd,bqhd->bhq", dout, r.out)
    dp = np.einsum("bqhd,bkhd->bhqk", dout, v_all)
    ds = r.probabilities * (dp - delta[..., None])
    if dlse is not None:
        own = attention(q, k, v, visible=visible).probabilities
        ds += own * np.asarray(dlse, np.float64)[..., None]
    ds *= q.shape[-1] ** -0.5
    dq = np.einsum("bhqk,bkhd->bqhd", ds, k_all)
    dk = np.einsum("bhqk,bqhd->bkhd", ds, q)
    dv = np.einsum("bhqk,bqhd->bkhd", r.probabilities, dout)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3) for x in (dk, dv))
    dsink = None
    if sinks is not None:
        sink = np.asarray(sinks, np.float64)[:, None]
        weight = np.where(np.isneginf(r.lse), 0.0, np.exp(sink - np.logaddexp(r.lse, sink)))
        dsink = -(weight * delta).sum((0, 2))
    return dq, dk, dv, dsink
