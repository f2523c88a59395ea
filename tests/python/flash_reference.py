# SPDX-License-Identifier: Apache-2.0
"""What the textbook makes of a case's inputs: in fp32, and how far the same in the case's dtype is from that.

The textbook runs on the CPU or, with ``--textbook-device cuda``, on a GPU, where its matrices of scores cost next to
nothing. Inputs are drawn where Tessera's calls run (``--grid-device``), and results are compared there. Cases that
differ only in what the textbook ignores, such as the size of a page, follow each other and share inputs and results.
"""

from __future__ import annotations

from collections.abc import Callable
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
# By what a product dO·v in fp32 may differ from the same sum in another order, in parts of the sum of absolute values:
# four units of fp32, since tensor cores cut summands off instead of rounding them.
SUMS = 4 * 2.0**-23

_device = torch.device("cpu")


def use_device(name: str) -> None:
    """Sets where textbooks run: "cpu", "cuda" or "cuda:1"."""
    global _device
    _device = torch.device(name)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


class Known(NamedTuple):
    """One tensor of the textbook: in fp32 arithmetic, and the largest error of the same in the case's dtype.

    `allowance` is twice what adding and subtracting 0.3 costs, of out in fp32, of gradients in the case's dtype.
    `rounding` is of :func:`rounded_delta`: a part of the bound for each element, fp32 of the shape of `wide`, or None
    for zeros.
    """

    wide: Tensor
    error: float
    allowance: float
    rounding: Tensor | None = None

    @staticmethod
    def of(wide: Tensor, same: Tensor, rounding: Tensor | None, dtype: torch.dtype, device: torch.device) -> Known:
        """`dtype` is that of the allowance, `device` where the result is to be."""
        wide = wide.detach()
        given = wide.to(dtype)
        shaken = 2 * worst(given + 0.3 - 0.3, given)
        return Known(wide.to(device), worst(same, wide), shaken, None if rounding is None else rounding.to(device))

    def folded(self, fold: Callable[[Tensor], Tensor]) -> Known:
        """With its tensors in another shape."""
        return self._replace(wide=fold(self.wide), rounding=None if self.rounding is None else fold(self.rounding))

    def check(self, name: str, ours: Tensor, times: float, at_least: float) -> None:
        """The error of `ours` is at most `times` the textbook's in the same dtype, plus `at_least` and the rounding."""
        bound = times * self.error + at_least
        check_error(name, ours, self.wide, bound if self.rounding is None else bound + self.rounding)


def stacked(parts: list[Known], dim: int) -> Known:
    """The tensors of `parts` as one, as packed inputs have them."""
    wide = torch.stack([part.wide for part in parts], dim)
    known = Known(wide, max(part.error for part in parts), max(part.allowance for part in parts))
    if all(part.rounding is None for part in parts):
        return known
    whole = [torch.zeros_like(x.wide, dtype=torch.float32) if x.rounding is None else x.rounding for x in parts]
    return known._replace(rounding=torch.stack(whole, dim))


def check_error(name: str, ours: Tensor, wide: Tensor, bound: float | Tensor) -> None:
    """`bound` is one for all elements or a tensor of one for each."""
    assert ours.shape == wide.shape, f"{name}: {tuple(ours.shape)} is not {tuple(wide.shape)}"
    assert not ours.isnan().any(), f"{name}: NaN"
    if not ours.numel():
        return
    error = (ours.detach().to(wide.device).float() - wide.float()).abs().flatten()
    bounds = torch.as_tensor(bound, device=error.device).expand(ours.shape).flatten()
    at = (error - bounds).argmax()
    assert error[at] <= bounds[at], f"{name}: error {error[at]:.3e}; the bound by the textbook's is {bounds[at]:.3e}"


def rounded_delta(
    q: Tensor, k: Tensor, out: Tensor, grad: Tensor, peaks: tuple[Tensor, Tensor], alone: Tensor, score: Score
) -> tuple[Tensor, Tensor]:
    """What rounding out to a half type may do to dq and dk where the textbook does not err: fp32, shapes of q and k.

    A row's dS = P·(dP − delta), where delta = Σ dout·out = Σ P·dP. Any backward from the stored out has that rounded,
    and so delta off by up to Σ |dout|·|rounding of out|, and dS off by that times P. The textbook rounds dP, not out,
    and its softmax takes delta from that dP: with an error e of each dP, its dS of key j is off by
    P_j·((1 − P_j)·e_j − Σ P_l·e_l over the other keys), at most 2·P_j·(1 − P_j)·max |e|. The errors of dP and of delta
    are of one order. So the textbook shows up to 2·(1 − P_j) of the error of delta, and 1 − 2·(1 − P_j) of it is added
    here, for the key that outweighs all others of its row, if one does. It goes times P, the slope of the score in q·k,
    and k into dq of the row; and times P, the slope and q, summed over the rows of a key, into its dk.

    Where that key has all the weight, the textbook's dS is 0. Ours is what dP and delta differ by, two sums of the same
    products in two orders (`SUMS`). That is taken in the same measure of P.

    `peaks` are the largest probability of each row, before dropout, and its key: fp32 and int64 (b, h, sq). `alone`
    (b, 1, sq) are rows of one key whose out, a multiple of v, is rounded: the textbook errs nowhere in them, whatever
    weight a sink has. Their out may be off by eps/2 of itself, that of other rows by as much as in the fp32 `out`.
    """
    weight, key = peaks
    group = q.shape[2] // k.shape[2]
    lost = (out.to(q.dtype).float() - out).abs()
    lost = torch.where(alone.transpose(1, 2)[..., None], out.abs() * torch.finfo(q.dtype).eps / 2, lost)
    outweighs = (2 * weight - 1).clamp(min=0)
    of_out, of_sums = ((grad.float().abs() * x).sum(-1).transpose(1, 2) * weight for x in (lost, out.abs()))
    off = torch.where(alone, of_out, of_out * outweighs) + SUMS * of_sums * outweighs
    batch, head, row = off.nonzero(as_tuple=True)  # n of them
    at = batch, key[batch, head, row], head // group
    q_row, k_row = q[batch, row, head].float(), k[at].float()
    slope = score.scale or q.shape[-1] ** -0.5
    if score.softcap > 0:
        slope = slope * (1 - torch.tanh((q_row * k_row).sum(-1) * slope / score.softcap) ** 2)
    off = (off[batch, head, row] * slope)[:, None]
    dq, dk = (torch.zeros(x.shape, device=x.device) for x in (q, k))
    dq[batch, row, head] = off * k_row.abs()
    dk.index_put_(at, off * q_row.abs(), accumulate=True)
    return dq, dk


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
        """q, k and v, with a gradient of out as new leaves of a graph."""
        return [x.detach().requires_grad_(self.grad is not None) for x in (self.q, self.k, self.v)]

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
        known = self._compute_on(device, signed)
        if device.type != "cpu" and torch.cuda.memory_reserved(device) > KEPT:
            torch.cuda.empty_cache()
        return known

    def _compute_on(self, device: torch.device, signed: Tensor | None) -> dict[str, Known]:
        inputs = [x.detach().to(device) for x in (self.q, self.k, self.v)]
        score, lengths = self.score.to(device), self.lengths.to(device)
        signed = None if signed is None else signed.to(device)
        keep = None if signed is None else self._kept(signed, score, lengths)
        results, weights, peaks = [], [], None
        for wide in (True, False):
            leaves = [(x.float() if wide else x).detach().requires_grad_(self.grad is not None) for x in inputs]
            out, probabilities = textbook(*leaves, score, lengths, keep, self.dropout, wide)
            grads = ()
            if self.grad is not None:
                grads = torch.autograd.grad(out, leaves, self.grad.to(device, out.dtype))
            results.append((out.detach(), *grads))
            weights.append(None if keep is None else probabilities.detach())
            if grads and wide:
                peaks = probabilities.detach().max(-1)
            del out, probabilities
        if keep is not None:
            p = torch.zeros_like(weights[0])
            p[:, :, : signed.shape[2], : signed.shape[3]] = signed.abs()
            check_error("S_dmask", p, weights[0], 2 * worst(weights[1], weights[0]) + 1e-6)
        names = ("out", "dq", "dk", "dv")[: len(inputs) + 1 if self.grad is not None else 1]
        roundings = {}
        if self.grad is not None:
            visible, _ = visibility(self.q.shape[1], self.k.shape[1], lengths, score)
            # Without dropout and sink, out of a row that sees one key is its v, which is not rounded.
            alone = (visible.sum(-1) == 1) & (keep is not None or score.sink is not None)
            dq, dk = rounded_delta(inputs[0], inputs[1], results[0][0], self.grad.to(device), peaks, alone, score)
            roundings = {"dq": dq, "dk": dk}
        dtypes = (torch.float32, *(self.q.dtype,) * 3)
        return {
            name: Known.of(wide, same, roundings.get(name), dtype, self.q.device)
            for name, wide, same, dtype in zip(names, *results, dtypes[: len(names)], strict=True)
        }

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
