# SPDX-License-Identifier: Apache-2.0
"""The bound of the flash-attn grids where the textbook's error says nothing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flash_reference import SUMS, Known, Problem, check_error, rounded_delta, stacked  # noqa: E402
from flash_textbook import Lengths, Score, textbook, visibility  # noqa: E402

DROPOUT = 0.17


def drawn(sink: bool, softcap: float) -> tuple[Problem, torch.Tensor]:
    """(problem, pattern of dropout): queries of the first sequence see one key, those of the second six."""
    torch.manual_seed(7)
    q, k, v = (torch.randn(2, n, h, 16).to(torch.bfloat16) for n, h in ((5, 4), (6, 2), (6, 2)))
    lengths = Lengths(torch.tensor([5, 5]), torch.tensor([1, 6]), torch.tensor([0, 0]))
    score = Score(softcap=softcap, sink=torch.randn(4).to(torch.bfloat16) if sink else None)
    return Problem(q, k, v, score, torch.randn_like(q), lengths, DROPOUT), torch.rand(2, 4, 5, 6) > DROPOUT


def change(problem: Problem, out: torch.Tensor, keys: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """What the rounded out of the first sequence adds to its dq and dk: delta's error times the gradient of the LSE."""
    q, k = (x[0].double().requires_grad_() for x in (problem.q, problem.k))
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("ihd,jhd->ihj", q, k[:keys].repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
    if problem.score.softcap:
        scores = problem.score.softcap * torch.tanh(scores / problem.score.softcap)
    lse = scores.logsumexp(-1)
    lse = lse if problem.score.sink is None else torch.logaddexp(lse, problem.score.sink.double())
    off = ((out.to(problem.q.dtype).double() - out.double()) * problem.grad.double())[0].sum(-1)
    return torch.autograd.grad(-(off * lse).sum(), (q, k))


def bounds_of(problem: Problem, keep: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out in fp32, bound of dq, bound of dk)."""
    q, k, v, score, lengths = problem.q, problem.k, problem.v, problem.score, problem.lengths
    out, probabilities = textbook(q, k, v, score, lengths, keep, problem.dropout)
    visible, _ = visibility(q.shape[1], k.shape[1], lengths, score)
    alone = (visible.sum(-1) == 1) & (keep is not None or score.sink is not None)
    return out, *rounded_delta(q, k, out, problem.grad, probabilities.max(-1), alone, score)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_rounding_of_out_where_one_key_is_seen(sink: bool, softcap: float) -> None:
    problem, keep = drawn(sink, softcap)
    problem.q[1] /= 8  # no key of these rows outweighs the five others
    out, *bounds = bounds_of(problem, keep)
    for bound, moved in zip(bounds, change(problem, out), strict=True):
        assert (moved.abs() <= bound[0]).all()
        assert moved.abs().max() > bound[0].max() / 30, "the sum over dim is of 16 errors of random signs"
        assert bound[1].max() == 0, "rows of six keys get nothing"
    assert bounds[1][0, 1:].max() == 0, "nor do keys that no row sees alone"


@pytest.mark.parametrize("sink", [False, True])
def test_only_dropout_and_sink_round_the_out_of_one_key(sink: bool) -> None:
    problem, _ = drawn(sink, 0.0)
    problem.dropout = 0.0
    known = problem.known()
    assert [known[name].rounding is not None for name in ("out", "dq", "dk", "dv")] == [False, True, True, False]
    # Without a sink the rows have what the sums of dP and delta differ by, thousands of times less.
    largest = [known[name].rounding[0].max().item() for name in ("dq", "dk")]
    assert all(1e-3 < x < 1 if sink else 0 < x < 1e-4 for x in largest), largest


def two_keys(scores: list[float], softcap: float) -> Problem:
    """Each row sees two keys, the second of them 0, and has these scores of the first, softcap aside."""
    torch.manual_seed(3)
    k, v = torch.randn(2, 1, 2, 1, 64).half().unbind()
    k[:, 1] = 0
    q = (torch.tensor(scores)[None, :, None, None] * 8 * k[:, :1].float() / k.float().square().sum()).half()
    return Problem(q, k, v, Score(softcap=softcap), torch.randn(q.shape).half())


@pytest.mark.parametrize("softcap", [0.0, 50.0])
def test_rounding_of_out_where_one_key_outweighs_the_other(softcap: float) -> None:
    problem = two_keys([-7.0, -0.1, 0.1, 2.0, 7.0, 40.0], softcap)
    out, _ = textbook(problem.q, problem.k, problem.v, problem.score)
    problem.grad = torch.where(out.half() > out, 1, -1) * problem.grad.abs()  # delta errs as much as it can
    _, bound, _ = bounds_of(problem, None)
    moved, bound = change(problem, out, 2)[0].abs().squeeze(1), bound[0, :, 0]
    assert bound[:2].max() == 0, "the first key weighs less"
    assert moved[5].max() == 0, "out is v, which is not rounded"
    first = textbook(problem.q, problem.k, problem.v, problem.score)[1][0, 0, 2:, :1]
    key = problem.k[0, 0, 0].float()
    score = problem.q[0, 2:, 0].float() @ key[:, None] / 8
    slope = (1 - torch.tanh(score / softcap) ** 2 if softcap else 1) / 8
    sums = SUMS * (problem.grad.float() * out).abs()[0, 2:, 0].sum(-1, keepdim=True) * first * slope * key.abs()
    torch.testing.assert_close(bound[2:], ((moved[2:] + sums) * (2 * first - 1)).float(), rtol=1e-4, atol=0)


def from_stored(problem: Problem, times: float) -> list[torch.Tensor]:
    """dq and dk in double of a delta from the stored out, the error of its rounding taken `times`, then rounded."""
    inputs = [x.double().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    q, k, v = inputs
    scores = 50 * torch.tanh(torch.einsum("bihd,bjhd->bhij", q, k) / 8 / 50)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    off = times * ((out.half() - out) * problem.grad).sum(-1)
    loss = (out * problem.grad).sum() - (off.detach().transpose(1, 2) * scores.logsumexp(-1)).sum()
    return [x.half() for x in torch.autograd.grad(loss, inputs[:2])]


def test_a_gradient_from_the_stored_out_is_within_the_bound() -> None:
    """As with flash-attn's queries of the order of softcap: the textbook errs less than any such backward must."""
    problem = two_keys([7.0, 8.0, 9.0], 50.0)
    known = problem.known()
    for name, right, wrong in zip(("dq", "dk"), from_stored(problem, 1), from_stored(problem, 30), strict=True):
        known[name].check(name, right, 3, 1e-5)
        with pytest.raises(AssertionError, match=f"{name}: error"):
            known[name]._replace(rounding=None).check(name, right, 3, 1e-5)
        with pytest.raises(AssertionError, match=f"{name}: error"):
            known[name].check(name, wrong, 3, 1e-5)


def test_a_bound_is_of_each_element() -> None:
    wide = torch.zeros(2, 3)
    known = Known(wide, 0.5, 0.0, torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0]]))
    ours = torch.tensor([[2.0, -1.0, 1.0], [1.0, 1.0, -3.0]])
    known.check("x", ours, 2, 0.0)
    for at in ((0, 0), (0, 1), (1, 2)):
        more = ours.clone()
        more[at] *= 1.01
        with pytest.raises(AssertionError, match="x: error"):
            known.check("x", more, 2, 0.0)
    transposed = known.folded(lambda x: x.T)
    transposed.check("x", ours.T, 2, 0.0)
    both = stacked([known, Known(wide, 0.25, 0.0)], 0)
    both.check("x", torch.stack([ours, torch.ones(2, 3)]), 2, 0.0)
    with pytest.raises(AssertionError, match="x: error 3"):
        both.check("x", torch.stack([ours, ours]), 2, 0.0)
    with pytest.raises(AssertionError, match="NaN"):
        check_error("x", ours * float("nan"), wide, 1.0)


def test_sums_of_the_same_products_in_two_orders_are_within_the_bound() -> None:
    """As where all rows see one key: the textbook's dS is 0, that of a backward is of the last digits of its sums."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, n, 2, 128).half() for n in (64, 1, 1))
    problem = Problem(q * 50, k, v, Score(softcap=50.0), torch.randn_like(q))
    known = problem.known()
    products = problem.grad.float() * v.float()
    dp, delta = products.sum(-1), products.flip(-1).cumsum(-1)[..., -1]
    slope = 128**-0.5 * (1 - torch.tanh((problem.q.float() * k.float()).sum(-1) * 128**-0.5 / 50) ** 2)
    ds = (dp - delta) * slope
    dk = (ds[..., None] * problem.q.float()).sum(1, keepdim=True)
    assert known["dk"].error == 0 and dk.abs().max() > 1e-5
    known["dk"].check("dk", dk, 3, 1e-5)
    known["dq"].check("dq", ds[..., None] * k.float(), 3, 1e-5)
    with pytest.raises(AssertionError, match="dk: error"):
        known["dk"].check("dk", dk * 100, 3, 1e-5)


def test_gradients_of_the_textbook_are_not_rounded() -> None:
    """Else one that is nearly half way between two numbers may be rounded to the other one than ours, for no error."""
    torch.manual_seed(6)
    q, k, v = (torch.randn(1, n, 1, 64).half() for n in (339, 1, 1))
    problem = Problem(q, k, v, Score(), torch.randn_like(q))
    exact = problem.grad.double().sum(1, keepdim=True)  # of dV: all rows see one key
    known = problem.known()["dv"]
    assert (known.wide.double() - exact).abs().max() < 1e-4
    assert known.error == pytest.approx((exact.half().double() - exact).abs().max().item(), rel=0.1)
