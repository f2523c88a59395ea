# SPDX-License-Identifier: Apache-2.0
"""Attention as in a textbook, in torch operations of the tensors' own dtype, and the rule that results are judged by.

In float64 it is the oracle; in the problem's dtype it is what an unfused implementation gives, rounded after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    keep: Tensor | None = None,
    order: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (b, sq, hq, dv) and lse (b, hq, sq) of q (b, sq, hq, d), k (b, sk, hkv, d), v (b, sk, hkv, dv).

    visible: bool, bias: floating, keep: weights of dropout, each broadcast to (b, hq, sq, sk). sinks: (hq,). order: a
    permutation of the keys, which changes rounding and nothing else.
    """
    if order is not None:
        sk = k.shape[1]
        k, v = k[:, order], v[:, order]
        visible, bias, keep = (
            None if x is None else x.expand(*x.shape[:-1], sk)[..., order] for x in (visible, bias, keep)
        )
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    norm = lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype)[:, None].expand(lse.shape[1:]))
    norm = norm.masked_fill(norm == -torch.inf, 0)  # exp(-inf - 0) = 0 for empty rows
    probabilities = torch.exp(scores - norm[..., None])
    if keep is not None:
        probabilities = probabilities * keep.to(probabilities.dtype)
    return (probabilities @ v.transpose(1, 2)).transpose(1, 2), lse


def window(b: int, sq: int, sk: int, left: int | None, right: int | None, shift: int | None = None) -> Tensor:
    """Visible (b, 1, sq, sk) of a window; row i stands at i + shift, by default at the bottom right corner."""
    position = torch.arange(sq)[:, None] + (sk - sq if shift is None else shift)
    key = torch.arange(sk)
    shown = torch.ones(sq, sk, dtype=torch.bool)
    if left is not None:
        shown &= key >= position - left
    if right is not None:
        shown &= key <= position + right
    return shown.expand(b, 1, sq, sk)


def ulp(value: float, dtype: torch.dtype) -> float:
    """Spacing of the numbers of dtype at value."""
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** torch.tensor(max(abs(value), info.tiny), dtype=torch.float64).log2().floor().item()


def judge(name: str, got: Tensor, oracle: Tensor, plain: Callable[[int], Tensor], runs: int = 64) -> None:
    """Fails unless max|got - oracle| <= 2 max|plain - oracle| + 2 ulp(max|oracle|), plain the worst of `runs` runs.

    plain(0) is the textbook in its usual order; plain(n) sums in another. docs/testing.md says why there are several.
    """
    assert got.shape == oracle.shape, f"{name}: {tuple(got.shape)} for {tuple(oracle.shape)}"
    assert torch.equal(got == -torch.inf, oracle == -torch.inf), f"{name}: -inf elsewhere"
    assert not got.isnan().any(), f"{name}: NaN"
    finite = oracle.isfinite()
    if not finite.any():
        return
    oracle = oracle[finite]
    error = (got.double()[finite] - oracle).abs().max().item()
    term = 2 * ulp(oracle.abs().max().item(), got.dtype)
    worst = 0.0
    for run in range(runs):
        worst = max(worst, (plain(run).double()[finite] - oracle).abs().max().item())
        if error <= 2 * worst + term:
            return
    raise AssertionError(f"{name}: error {error:.3g}; want at most 2 * {worst:.3g} + {term:.3g}")


def orders(sk: int, seed: int = 7) -> Callable[[int], Tensor | None]:
    """The n-th order of keys: None for the usual one."""

    def order(run: int) -> Tensor | None:
        return torch.randperm(sk, generator=torch.Generator().manual_seed(seed + run)) if run else None

    return order


def results(
    inputs: Sequence[Tensor],
    call: Callable[..., tuple[Tensor, Tensor]],
    dout: Tensor | None,
    dlse: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """[out, lse, gradient of each input]; call gets fresh leaves, converted to dtype if given."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    out, lse = call(*leaves)
    if dout is None and dlse is None:
        return [out.detach(), lse.detach()]
    heads = [(x, g.to(x.dtype)) for x, g in ((out, dout), (lse, dlse)) if g is not None]
    upstream = [g for _, g in heads]
    grads = torch.autograd.grad([x for x, _ in heads], leaves, upstream, allow_unused=True, materialize_grads=True)
    return [out.detach(), lse.detach(), *grads]
