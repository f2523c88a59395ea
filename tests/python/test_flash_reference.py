# SPDX-License-Identifier: Apache-2.0
"""The bound of the flash-attn grids where the textbook's error says nothing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flash_reference import Known, Problem, check_error, rounded_delta, stacked  # noqa: E402
from flash_textbook import Lengths, Score, textbook, visibility  # noqa: E402

DROPOUT = 0.17


def drawn(sink: bool, softcap: float) -> tuple[Problem, torch.Tensor]:
    """(problem, pattern of dropout): queries of the first sequence see one key, those of the second six."""
    torch.manual_seed(7)
    q, k, v = (torch.randn(2, n, h, 16).to(torch.bfloat16) for n, h in ((5, 4), (6, 2), (6, 2)))
    lengths = Lengths(torch.tensor([5, 5]), torch.tensor([1, 6]), torch.tensor([0, 0]))
    score = Score(softcap=softcap, sink=torch.randn(4).to(torch.bfloat16) if sink else None)
    return Problem(q, k, v, score, torch.randn_like(q), lengths, DROPOUT), torch.rand(2, 4, 5, 6) > DROPOUT


def change(problem: Problem, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the rounded out of the first sequence adds to its dq and dk: delta's error times the gradient of the LSE."""
    q, k = (x[0].double().requires_grad_() for x in (problem.q, problem.k))
    score = torch.einsum("ihd,hd->ih", q, k[0].repeat_interleave(2, 0)) / 4
    if problem.score.softcap:
        score = problem.score.softcap * torch.tanh(score / problem.score.softcap)
    lse = score if problem.score.sink is None else torch.logaddexp(score, problem.score.sink.double())
    off = ((out.to(problem.q.dtype).double() - out.double()) * problem.grad.double())[0].sum(-1)
    return torch.autograd.grad(-(off * lse).sum(), (q, k))


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_rounding_of_out_where_one_key_is_seen(sink: bool, softcap: float) -> None:
    problem, keep = drawn(sink, softcap)
    inputs = problem.q, problem.k, problem.v, problem.score, problem.lengths
    out, probabilities = textbook(*inputs, keep, DROPOUT)
    visible, _ = visibility(5, 6, problem.lengths, problem.score)
    bounds = rounded_delta(problem.q, problem.k, out, problem.grad, probabilities, visible, problem.score)
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
    assert [known[name].rounding is not None for name in ("out", "dq", "dk", "dv")] == [False, sink, sink, False]


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
