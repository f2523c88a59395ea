# SPDX-License-Identifier: Apache-2.0
"""flash-attn 2's functions over its own grid of parameters: dense tensors, packed and not."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import flash_grid  # noqa: E402
import tessera  # noqa: E402
from flash_grid import BOOL, HALF, HEAD_COUNTS, HEADS, Case, Grid, batch_of, cheap, noise, over, window  # noqa: E402
from flash_reference import Problem, shared, stacked  # noqa: E402
from flash_textbook import Score  # noqa: E402
from tessera.compat.flash_attn_2 import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)

pytest_generate_tests = flash_grid.generate
threads = flash_grid.threads

DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
PAIRS = [(113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024)]
CAUSAL_PAIRS = [(1, 239), (3, 799), (127, 512), (127, 513), *PAIRS[:5], (1023, 1024)]
SPLIT_PAIRS = [
    (3, 1024), (1, 339), (64, 800), (3, 799), (64, 2048), (16, 20000), (16, 100000), (128, 128), (256, 256)
]  # fmt: skip


def price(case: Case) -> float:
    queries, keys = getattr(case, "lengths", None) or (case.seqlen, case.seqlen)
    return queries * keys * (case.d + 64)


def slopes_of(alibi: bool, batch: int, heads: int) -> torch.Tensor | None:
    return torch.rand(batch, heads) * 0.3 if alibi else None


QKV = Grid(
    16, 2e7, price, ignored=lambda _: ("deterministic",), inner=1, deterministic=BOOL, dtype=HALF, alibi=BOOL,
    local=BOOL, causal=BOOL, d=DIMS, seqlen=[97, 128, 200, 384, 768, 1024, 1025, 2048], dropout=[0.0, 0.17],
)  # fmt: skip


@over(QKV)
def test_qkvpacked(case: Case) -> None:
    batch, heads = batch_of(case), 2

    def draw() -> tuple[torch.Tensor, Problem]:
        score = Score(case.causal, window(case.local, case.seqlen), 0.0, slopes_of(case.alibi, batch, heads))
        qkv = noise(case, batch, case.seqlen, 3, heads, case.d)
        grad = noise(case, batch, case.seqlen, heads, case.d)
        return qkv, Problem(*qkv.unbind(2), score, grad, dropout=case.dropout)

    packed, problem = shared(case, draw)
    qkv = packed.detach().requires_grad_()
    out, lse, signed = flash_attn_qkvpacked_func(
        qkv,
        case.dropout,
        causal=case.causal,
        window_size=problem.score.window,
        alibi_slopes=problem.score.slopes,
        deterministic=case.deterministic,
        return_attn_probs=True,
    )
    assert lse.shape == (batch, heads, case.seqlen) and lse.dtype == torch.float32
    (dqkv,) = torch.autograd.grad(out, qkv, problem.grad)
    known = problem.known(signed)
    known["out"].check("out", out, 2, 1e-5)
    stacked([known[name] for name in ("dq", "dk", "dv")], 2).check("dqkv", dqkv, 2, 1e-5)


OUTPUT = Grid(
    32, 2e7, price, ignored=lambda _: ("kvpacked", "deterministic"), inner=2, kvpacked=BOOL, deterministic=BOOL,
    dtype=HALF, heads=HEADS, alibi=BOOL, local=BOOL, causal=BOOL, d=[d for d in DIMS if d != 80],
    lengths=[*PAIRS, (1024, 1023), (2048, 2048)], dropout=[0.0, 0.17], softcap=[0.0, 50.0],
)  # fmt: skip


@over(OUTPUT)
def test_output(case: Case) -> None:
    queries, keys = case.lengths
    batch, (heads, kv) = batch_of(case), HEAD_COUNTS[case.heads]

    def draw() -> tuple[torch.Tensor, Problem]:
        score = Score(case.causal, window(case.local, keys), case.softcap, slopes_of(case.alibi, batch, heads))
        q = noise(case, batch, queries, heads, case.d, scale=case.softcap or 1)
        both = noise(case, batch, keys, 2, kv, case.d)
        grad = noise(case, batch, queries, heads, case.d)
        return both, Problem(q, *both.unbind(2), score, grad, dropout=case.dropout)

    both, problem = shared(case, draw)
    q, packed_kv = (x.detach().requires_grad_() for x in (problem.q, both))
    options = {
        "dropout_p": case.dropout,
        "causal": case.causal,
        "window_size": problem.score.window,
        "softcap": case.softcap,
        "alibi_slopes": problem.score.slopes,
        "deterministic": case.deterministic,
        "return_attn_probs": True,
    }
    if case.kvpacked:
        out, lse, signed = flash_attn_kvpacked_func(q, packed_kv, **options)
    else:
        out, lse, signed = flash_attn_func(q, *packed_kv.unbind(2), **options)
    assert lse.shape == (batch, heads, queries)
    dq, dkv = torch.autograd.grad(out, (q, packed_kv), problem.grad)
    known = problem.known(signed)
    known["out"].check("out", out, 2, 1e-5)
    for name, ours in (("dq", dq), ("dk", dkv[:, :, 0]), ("dv", dkv[:, :, 1])):
        known[name].check(name, ours, 3, 1e-5)


def gradients(case: Case, causal: bool, alibi: bool, batch: int, heads: int, times: float, at_least: float) -> None:
    """Out and gradients of plain q, k, v against the textbook."""
    queries, keys = case.lengths[::-1] if case.swap else case.lengths

    def draw() -> Problem:
        score = Score(causal, window(case.local, keys), 0.0, slopes_of(alibi, batch, heads))
        return Problem(
            *(noise(case, batch, n, heads, case.d) for n in (queries, keys, keys)),
            score,
            noise(case, batch, queries, heads, case.d),
        )

    problem = shared(case, draw)
    leaves = problem.leaves()
    out = flash_attn_func(
        *leaves,
        0.0,
        causal=causal,
        window_size=problem.score.window,
        alibi_slopes=problem.score.slopes,
        deterministic=getattr(case, "deterministic", False),
    )
    grads = torch.autograd.grad(out, leaves, problem.grad)
    known = problem.known()
    known["out"].check("out", out, 2, 1e-5)
    for name, ours in zip(("dq", "dk", "dv"), grads, strict=True):
        known[name].check(name, ours, times, at_least)


CAUSAL = Grid(16, 2e7, price, dtype=HALF, local=BOOL, d=DIMS, swap=BOOL, lengths=CAUSAL_PAIRS)


@over(CAUSAL)
def test_causal(case: Case) -> None:
    gradients(case, True, False, batch_of(case, 8), 9 if cheap(case) else 2, 2, 1e-5)


SPLIT = Grid(
    20, 2e7, price, ignored=lambda _: ("deterministic",), inner=1, deterministic=BOOL, dtype=HALF, alibi=BOOL,
    local=BOOL, causal=BOOL, d=DIMS, swap=BOOL, lengths=SPLIT_PAIRS,
)  # fmt: skip


@over(SPLIT)
def test_few_queries_many_keys(case: Case) -> None:
    gradients(case, case.causal, case.alibi, 1, 12 if cheap(case) else 3, 8 if case.alibi else 2, 2e-4)


REPEAT = Grid(
    8, 1e7, price, dtype=[torch.float16], causal=BOOL, d=DIMS, dropout=[0.0, 0.17],
    lengths=[(1, 239), (239, 1), (3, 799), (799, 3), (1024, 128)]
    + [(n, n) for n in (97, 128, 200, 256, 257, 384, 512, 768, 1024)],
)  # fmt: skip


@over(REPEAT)
def test_repeats_bit_for_bit(case: Case) -> None:
    """Many sequences on several threads: out, LSE and, being of one order of additions, gradients come out the same."""
    torch.manual_seed(case.seed)
    tessera.set_threads(2)
    queries, keys = case.lengths
    q, k, v = (noise(case, 4, n, 2, case.d).requires_grad_() for n in (queries, keys, keys))
    grad = noise(case, 4, queries, 2, case.d)

    def run():
        torch.manual_seed(42)
        out, lse, _ = flash_attn_func(
            q, k, v, case.dropout, causal=case.causal, deterministic=True, return_attn_probs=True
        )
        return out, lse, *torch.autograd.grad(out, (q, k, v), grad)

    first = run()
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


DETERMINISTIC = Grid(8, 1e7, price, dtype=HALF, local=BOOL, causal=BOOL, d=DIMS, swap=BOOL, lengths=CAUSAL_PAIRS)


@over(DETERMINISTIC)
def test_deterministic(case: Case) -> None:
    torch.manual_seed(case.seed)
    tessera.set_threads(2)
    queries, keys = case.lengths[::-1] if case.swap else case.lengths
    q, k, v = (noise(case, batch_of(case), n, 2, case.d).requires_grad_() for n in (queries, keys, keys))
    out = flash_attn_func(q, k, v, causal=case.causal, window_size=window(case.local, keys), deterministic=True)
    grad = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    for _ in range(5):
        again = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


LARGE = Grid(12, 1e9, price, dtype=[torch.float16], causal=BOOL, d=[16, 32, 64], seqlen=[1, 2, 5, 17, 128])


def rounded_delta(q, k, out, grad) -> dict[str, float]:
    """What rounding out to fp16 may do to the gradients: any backward from the stored output takes Σ dout·out of it.

    With probabilities near 1 that is a difference of large numbers, which the textbook's softmax cancels exactly. The
    error of the sum is at most 2^-11 Σ |dout·out| a row; it goes times the scale and k into dq, and summed over rows
    times q into dk.
    """
    row = (grad * out.to(grad.device)).abs().sum(-1, keepdim=True).float() * 2**-11 * q.shape[-1] ** -0.5
    return {"dq": (row * k.abs().amax()).max().item(), "dk": (row * q.abs()).sum(1).max().item(), "dv": 0.0}


@over(LARGE)
def test_large_scores_have_finite_gradients(case: Case) -> None:
    def draw() -> Problem:
        q, k, v = (noise(case, 2, case.seqlen, 5, case.d, scale=n) for n in (5, 3, 3))
        return Problem(q, k, v, Score(case.causal), torch.randn_like(q))

    problem = shared(case, draw)
    leaves = problem.leaves()
    out = flash_attn_func(*leaves, causal=case.causal)
    grads = torch.autograd.grad(out, leaves, problem.grad)
    known = problem.known()
    known["out"].check("out", out, 2, 1e-5)
    extra = rounded_delta(problem.q, problem.k, known["out"].wide, problem.grad)
    for name, ours in zip(("dq", "dk", "dv"), grads, strict=True):
        known[name].check(name, ours, 5, 1e-3 + extra[name])


TRANSPOSED = Grid(8, 1e9, price, dtype=HALF, causal=BOOL, d=[64, 128], seqlen=[97, 128, 200, 256])


@over(TRANSPOSED)
def test_gradient_with_strides_of_its_own(case: Case) -> None:
    def draw() -> Problem:
        q, k, v = (noise(case, 3, case.seqlen, 2, case.d) for _ in range(3))
        grad = noise(case, case.seqlen, 6, 2, case.d)[:, ::2].transpose(0, 1)
        return Problem(q, k, v, Score(case.causal), grad)

    problem = shared(case, draw)
    leaves = problem.leaves()
    out = flash_attn_func(*leaves, causal=case.causal)
    grads = torch.autograd.grad(out, leaves, problem.grad)
    for name, ours in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        problem.known()[name].check(name, ours, 2, 1e-5)
