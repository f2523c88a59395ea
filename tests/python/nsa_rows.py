# SPDX-License-Identifier: Apache-2.0
"""Some rows of native sparse attention (preset "strict", gates of 1/3), and gradients that follow from them, by plain
torch: of sequences too long for masks over all pairs of rows and tokens."""

from __future__ import annotations

import tessera
import torch
from torch import Tensor

BLOCK, WINDOW = 64, 512


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (group, d), k and v (keys, d | dv): of one key head; 0 where there are no keys."""
    if len(k) == 0:
        return q @ k.T @ v
    return torch.softmax(q @ k.T * q.shape[-1] ** -0.5, -1) @ v


class Sequence:
    """One sequence of whole blocks, k and v (tokens, hkv, d | dv); its last block's keys and values are `tail`, whose
    gradients are wanted."""

    def __init__(self, k: Tensor, v: Tensor, tiles: tessera.TileList) -> None:
        self.first = len(k) - BLOCK
        self.whole, self.tiles = (k.detach(), v.detach()), tiles
        self.tail = [x[self.first :].double().requires_grad_() for x in self.whole]
        shapes = [(-1, BLOCK, *x.shape[1:]) for x in self.whole]
        self.pooled = [x.reshape(shape).double().mean(1) for x, shape in zip(self.whole, shapes, strict=True)]

    def tokens(self, which: int, at: Tensor, head: int) -> Tensor:
        """Keys (which = 0) or values of tokens `at`, of a key head."""
        in_tail = (at >= self.first)[:, None]
        own = self.tail[which][(at - self.first).clamp(0), head]
        return torch.where(in_tail, own, self.whole[which][at, head].double())

    def compressed(self, which: int, count: int, head: int) -> Tensor:
        before = self.pooled[which][: min(count, self.first // BLOCK), head]
        return before if count * BLOCK <= self.first else torch.cat([before, self.tail[which][:, head].mean(0)[None]])

    def row(self, q: Tensor, at: int) -> Tensor:
        """q (hq, d) of the row at token `at`; its result (hq, dv)."""
        groups = q.unflatten(0, (self.whole[0].shape[1], -1))
        made = []
        for head, own in enumerate(groups):
            tile = at // self.tiles.block[0]
            listed = self.tiles.indices[0, head, tile, : self.tiles.counts[0, head, tile]].long()
            selected = (listed[:, None] * BLOCK + torch.arange(BLOCK, device=q.device)).flatten()
            window = torch.arange(max(0, at - WINDOW + 1), at + 1, device=q.device)
            branches = [attend(own, *(self.compressed(which, (at + 1) // BLOCK, head) for which in (0, 1)))]
            for seen in (selected[selected <= at], window):
                branches.append(attend(own, *(self.tokens(which, seen, head) for which in (0, 1))))
            made.append(sum(branches) / 3)
        return torch.cat(made)


def check(tokens: int, heads: int, key_heads: int, dim: int, rows: list[int], device: str, dtype: torch.dtype) -> None:
    """Results and dq of `rows`, and dk and dv of the last block, whose keys only the last rows see."""
    torch.manual_seed(0)
    shapes = [(1, tokens, count, dim) for count in (heads, key_heads, key_heads)]
    q, k, v = (torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes)
    out, tiles = tessera.nsa(q, k, v, return_tiles=True)
    dout = torch.randn(out.shape, device=device, dtype=dtype)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    sequence = Sequence(k[0], v[0], tiles)
    places = sorted({*rows, *range(tokens - BLOCK, tokens)})
    own = [q.detach()[0, at].double().requires_grad_() for at in places]
    want = [sequence.row(row, at) for row, at in zip(own, places, strict=True)]
    gradients = [dout[0, at].double() for at in places]
    *wanted, of_keys, of_values = torch.autograd.grad(want, [*own, *sequence.tail], gradients)
    for at, row, of_row in zip(places, want, wanted, strict=True):
        near(out[0, at], row, f"out of row {at}")
        near(dq[0, at], of_row, f"dq of row {at}")
    near(dk[0, -BLOCK:], of_keys, "dk")
    near(dv[0, -BLOCK:], of_values, "dv")


def near(got: Tensor, want: Tensor, what: str) -> None:
    """Relative to what gradients of N(0, 1) are at least: those of a row that sees one key are 0."""
    want, bound = want.detach(), 1e-4 if got.dtype == torch.float32 else 0.01
    error, size = (got.double() - want).norm(), max(want.norm(), 0.02 * want.numel() ** 0.5)
    assert error <= bound * size, f"{what}: {error / size:.2g}"
