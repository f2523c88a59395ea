# SPDX-License-Identifier: Apache-2.0
"""What the textbook makes of a case's inputs: in fp32, and how far the same in the case's dtype is from that.

The textbook runs on the CPU or, with ``--textbook-device cuda``, on a GPU, where its matrices of scores cost next to
nothing. Inputs are drawn on the CPU, and results are compared there. Cases that differ only in what the textbook
ignores, such as the size of a page, follow each other and share inputs and results.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from flash_textbook import Lengths, Score, Tensor, textbook, visibility, worst

if TYPE_CHECKING:
    from flash_grid import Case

T = TypeVar("T")

# Multiply-adds of one product of matrices below which a CPU is done before the GPU's launches are.
FEW = 4e6
# Bytes that PyTorch may keep of a GPU between two cases: other processes want some, too.
KEPT = 2 << 30

_device = torch.device("cpu")


def use_device(name: str) -> None:
    """Sets where textbooks run: "cpu", "cuda" or "cuda:1"."""
    global _device
    _device = torch.device(name)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@contextmanager
def _turn(device: torch.device) -> Iterator[None]:
    """One process at a time on a GPU: it would switch between them at every small kernel."""
    if device.type == "cpu":
        yield
        return
    path = Path(tempfile.gettempdir(), f"tessera-textbook-{device.index or 0}.lock")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        if torch.cuda.memory_reserved(device) > KEPT:
            torch.cuda.empty_cache()


class Known(NamedTuple):
    """One tensor of the textbook: in fp32 arithmetic, and the largest error of the same in the case's dtype.

    `allowance` is twice what adding and subtracting 0.3 costs in the dtype of `wide`. `rounding` is of
    :func:`rounded_delta`, and part of every bound.
    """

    wide: Tensor
    error: float
    allowance: float
    rounding: float = 0.0

    @staticmethod
    def of(wide: Tensor, same: Tensor) -> Known:
        wide = wide.detach()
        shaken = 2 * worst(wide + 0.3 - 0.3, wide)
        return Known(wide.cpu(), worst(same, wide), shaken)

    def check(self, name: str, ours: Tensor, times: float, at_least: float) -> None:
        """The error of `ours` is at most `times` the textbook's in the same dtype, plus `at_least`."""
        check_error(name, ours, self.wide, times * self.error + at_least + self.rounding)


def stacked(parts: list[Known], dim: int) -> Known:
    """The tensors of `parts` as one, as packed inputs have them."""
    wide = torch.stack([part.wide for part in parts], dim)
    return Known(wide, *(max(values) for values in zip(*(part[1:] for part in parts), strict=True)))


def check_error(name: str, ours: Tensor, wide: Tensor, bound: float) -> None:
    assert ours.shape == wide.shape, f"{name}: {tuple(ours.shape)} is not {tuple(wide.shape)}"
    assert not ours.isnan().any(), f"{name}: NaN"
    error = worst(ours, wide)
    assert error <= bound, f"{name}: error {error:.3e}; the bound by the textbook's is {bound:.3e}"


def rounded_delta(q: Tensor, k: Tensor, out: Tensor, grad: Tensor, visible: Tensor, scale: float) -> dict[str, float]:
    """What rounding out to a half type may do to dq and dk where no query sees two keys, and 0 where one does.

    The one probability is 1, and dq and dk are 0: dP less Σ dout·out, which is the same. The textbook's softmax cancels
    them exactly, so its error says nothing. Any backward from the stored out has that rounded, which matters where
    dropout has scaled it to what the type does not hold: Σ dout·out is off by at most eps/2 · Σ |dout·out|. That goes
    times the scale and k into dq, and times the scale and q, summed over the queries of a key, into dk.
    """
    if visible.sum(-1).max() > 1:
        return {}
    row = (grad * out).abs().sum(-1, keepdim=True).float() * torch.finfo(q.dtype).eps / 2 * scale
    by_head = torch.einsum("bxij,bihd->bjhd", visible.float(), row * q.abs())
    by_key_head = by_head.unflatten(2, (k.shape[2], -1)).sum(3)
    return {"dq": (row * k.abs().amax()).max().item(), "dk": by_key_head.max().item()}


class Problem:
    """Padded inputs (b, s, heads, dim) of one or several cases, and what the textbook makes of them.

    `grad` is the gradient of out (b, sq, h, dv); without it there are no gradients. `lengths` as in the textbook.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score: Score,
        grad: Tensor | None = None,
        lengths: Lengths | None = None,
        dropout: float = 0.0,
    ) -> None:
        self.q, self.k, self.v, self.score, self.grad, self.dropout = q, k, v, score, grad, dropout
        self.lengths = lengths or Lengths.full(q.shape[0], q.shape[1], k.shape[1])
        self._known: dict[str, Known] | None = None
        self._signed: Tensor | None = None

    def leaves(self) -> list[Tensor]:
        """q, k and v as new leaves of a graph."""
        return [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]

    def known(self, signed: Tensor | None = None) -> dict[str, Known]:
        """ "out" and, with a gradient, "dq", "dk", "dv".

        `signed` is S_dmask (b, h, ≤ sq, ≤ sk) of a call with dropout: its signs are taken for the pattern, its values
        are checked against the probabilities and the share it drops against the dropout probability. Without dropout
        it has shape (0,).
        """
        assert signed is None or (signed.shape == (0,)) == (self.dropout == 0)
        if self._known is None or (self.dropout > 0 and not torch.equal(self._signed, signed)):
            self._known = self._compute(signed if self.dropout > 0 else None)
            self._signed = signed
        return self._known

    def _compute(self, signed: Tensor | None) -> dict[str, Known]:
        work = self.q.shape[0] * self.q.shape[1] * self.q.shape[2] * self.k.shape[1] * self.q.shape[3]
        device = _device if work > FEW else torch.device("cpu")
        with _turn(device):
            return self._compute_on(device, signed)

    def _compute_on(self, device: torch.device, signed: Tensor | None) -> dict[str, Known]:
        inputs = [x.detach().to(device).requires_grad_(self.grad is not None) for x in (self.q, self.k, self.v)]
        score, lengths = self.score.to(device), self.lengths.to(device)
        signed = None if signed is None else signed.to(device)
        keep = None if signed is None else self._kept(signed, score, lengths)
        results = []
        for wide in (True, False):
            out, probabilities = textbook(*inputs, score, lengths, keep, self.dropout, wide)
            grads = ()
            if self.grad is not None:
                grads = torch.autograd.grad(out, inputs, self.grad.to(device, out.dtype))
            results.append((out.detach(), *grads))
            if keep is not None:
                results[-1] += (probabilities.detach(),)
        if keep is not None:
            *_, wide = results[0]
            p = torch.zeros_like(wide)
            p[:, :, : signed.shape[2], : signed.shape[3]] = signed.abs()
            check_error("S_dmask", p, wide, 2 * worst(results[1][-1], wide) + 1e-6)
        names = ("out", "dq", "dk", "dv")[: len(inputs) + 1 if self.grad is not None else 1]
        known = {name: Known.of(a, b) for name, a, b in zip(names, *results, strict=False)}
        if keep is not None and self.grad is not None:
            visible, _ = visibility(self.q.shape[1], self.k.shape[1], lengths, score)
            q, k, _ = (x.detach() for x in inputs)
            scale = score.scale or q.shape[-1] ** -0.5
            for name, x in rounded_delta(q, k, results[0][0], self.grad.to(device), visible, scale).items():
                known[name] = known[name]._replace(rounding=x)
        return known

    def _kept(self, signed: Tensor, score: Score, lengths: Lengths) -> Tensor:
        """The pattern in the signs (b, h, sq, sk), True where nothing was computed, after a look at its share."""
        queries, keys = self.q.shape[1], self.k.shape[1]
        keep = torch.ones(*signed.shape[:2], queries, keys, dtype=torch.bool, device=signed.device)
        keep[:, :, : signed.shape[2], : signed.shape[3]] = ~torch.signbit(signed)
        visible, _ = visibility(queries, keys, lengths, score)
        count = max(int(visible.sum()) * keep.shape[1], 1)
        share = (~keep & visible).sum().item() / count
        deviation = (self.dropout * (1 - self.dropout) / count) ** 0.5
        assert abs(share - self.dropout) <= 5 * deviation + 2**-16, f"dropped {share:.4f} of what is visible"
        return keep


_last: tuple[object, object] = (None, None)


def shared(case: Case, draw: Callable[[], T]) -> T:
    """draw(), or what it returned if the case before was of the same group.

    Torch's generator is seeded by the group before and after, so a case is the same alone and behind others.
    """
    global _last
    if _last[0] != case.group:
        _last = (None, None)  # gives its memory back first
        torch.manual_seed(case.seed)
        _last = (case.group, draw())
    torch.manual_seed(case.seed + 1)
    return _last[1]
