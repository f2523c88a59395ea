# SPDX-License-Identifier: Apache-2.0
"""Attention as a textbook has it, on padded torch tensors, in fp32 or with every intermediate rounded to a half type.

The rule of flash-attn's tests: the error of an implementation against fp32 is at most a small multiple of the error
of the textbook in the same dtype. Matrix products of half types accumulate in fp32 and round once, as tensor cores
do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Lengths(NamedTuple):
    """Tokens that count in each padded sequence: int64 (batch,). Keys count from `first_key` on."""

    queries: Tensor
    keys: Tensor
    first_key: Tensor

    @staticmethod
    def full(batch: int, queries: int, keys: int) -> Lengths:
        whole = torch.ones(batch, dtype=torch.int64)
        return Lengths(whole * queries, whole * keys, whole * 0)

    def to(self, device: torch.device) -> Lengths:
        return Lengths(*(x.to(device) for x in self))


class Score(NamedTuple):
    """What happens to a score besides the scale. `window` (left, right), −1 unbounded; `slopes` fp32 (batch, heads).

    `chunk`: queries see keys of their own chunk of so many positions only; 0: no chunks.
    """

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    slopes: Tensor | None = None
    scale: float | None = None
    sink: Tensor | None = None
    chunk: int = 0

    def to(self, device: torch.device) -> Score:
        moved = {name: x.to(device) for name, x in self._asdict().items() if isinstance(x, Tensor)}
        return self._replace(**moved)


def random_lengths(longest: int, batch: int, zero: bool = False) -> Tensor:
    """int64 (batch,): the last 20 lengths up to `longest`; with `zero` the first and the last sequence are empty."""
    lengths = torch.randint(max(0 if zero else 1, longest - 20), longest + 1, (batch,))
    if zero:
        lengths[0] = lengths[-1] = 0
    return lengths


def visibility(queries: int, keys: int, lengths: Lengths, score: Score) -> tuple[Tensor, Tensor]:
    """(visible bool, distance int64), both (batch, 1, queries, keys); distance = key's position − query's position."""
    device = lengths.queries.device
    i, j = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    by_batch = [x[:, None, None, None] for x in lengths]
    used_queries, used_keys, first_key = by_batch
    distance = j - i - (used_keys - used_queries)
    visible = (j < used_keys) & (j >= first_key) & (i < used_queries)
    left, right = score.window
    if score.causal:
        right = 0
    if left >= 0:
        visible = visible & (distance >= -left)
    if right >= 0:
        visible = visible & (distance <= right)
    if score.chunk > 0:
        # Positions count from the first key; queries before it are in chunks of their own.
        position = i + (used_keys - used_queries) - first_key
        visible = visible & ((j - first_key) // score.chunk == position // score.chunk)
    return visible, distance


def product(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """einsum in the dtype of a, accumulated in fp32."""
    return torch.einsum(equation, a.float(), b.float()).to(a.dtype)


def textbook(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score,
    lengths: Lengths | None = None,
    keep: Tensor | None = None,
    dropout: float = 0.0,
    wide: bool = True,
) -> tuple[Tensor, Tensor]:
    """(out (b, sq, h, dv), probabilities (b, h, sq, sk) before dropout): all in fp32 if `wide`, else in q's dtype.

    Without `wide`, the scale goes to k instead of q, which is as right and rounds differently. `keep` is bool
    (b, h, sq, sk). All tensors are on the device of q.
    """
    if lengths is None:
        lengths = Lengths.full(q.shape[0], q.shape[1], k.shape[1]).to(q.device)
    if wide:
        q, k, v = q.float(), k.float(), v.float()
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scale = q.shape[-1] ** -0.5 if score.scale is None else score.scale
    scores = product("bqhd,bkhd->bhqk", q * scale, k) if wide else product("bqhd,bkhd->bhqk", q, k * scale)
    if score.softcap > 0:
        scores = score.softcap * torch.tanh(scores / score.softcap)
    visible, distance = visibility(q.shape[1], k.shape[1], lengths, score)
    if score.slopes is not None:
        scores = scores - score.slopes[:, :, None, None] * distance.abs()
    scores = scores.float().masked_fill(~visible, float("-inf"))
    empty = ~visible.any(-1, keepdim=True)
    # Weights below 1e-26 are nothing in fp32, but denormal numbers among them take a hundred times as long.
    scores = scores.masked_fill(scores < scores.detach().amax(-1, keepdim=True) - 60, float("-inf"))
    scores = scores.masked_fill(empty, 0.0)
    if score.sink is not None:
        column = score.sink.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        probabilities = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        probabilities = torch.softmax(scores, -1)
    probabilities = probabilities.to(v.dtype).masked_fill(empty, 0.0)
    dropped = probabilities if keep is None else probabilities.masked_fill(~keep, 0.0)
    return product("bhqk,bkhd->bqhd", dropped, v / (1 - dropout)), probabilities


def worst(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference."""
    return (a.detach().float() - b.detach().float()).abs().max().item() if a.numel() else 0.0


def packed(x: Tensor, lengths: Tensor) -> Tensor:
    """(b, s, …) to (tokens, …)."""
    return torch.cat([x[b, : int(n)] for b, n in enumerate(lengths)])


def padded(x: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """(tokens, …) to (b, longest, …), zeros behind each sequence."""
    out = x.new_zeros((len(lengths), longest, *x.shape[1:]))
    for b, part in enumerate(x.split([int(n) for n in lengths])):
        out[b, : part.shape[0]] = part
    return out


def starts(lengths: Tensor) -> Tensor:
    """cu_seqlens: int32 (b + 1,)."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x (b, s, h, d) turned by the angles of positions (b, s), in fp32, rounded once."""
    half = cos.shape[1]
    c, s = cos[positions].float()[:, :, None], sin[positions].float()[:, :, None]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        out = torch.cat([a * c - b * s, b * c + a * s], -1)
    return torch.cat([out.to(x.dtype), rest], -1)
