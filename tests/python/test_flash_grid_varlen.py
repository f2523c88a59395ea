# SPDX-License-Identifier: Apache-2.0
"""flash-attn 2's functions for packed sequences over its own grid of parameters."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")

import flash_grid  # noqa: E402
import tessera  # noqa: E402
from flash_grid import BOOL, HALF, HEADS, Case, Grid, cheap, heads_of, noise, over, window  # noqa: E402
from flash_reference import Problem, shared, stacked  # noqa: E402
from flash_textbook import Lengths, Score, packed, padded, random_lengths, starts  # noqa: E402
from tessera.compat.flash_attn_2 import (  # noqa: E402
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from test_flash_grid_dense import CAUSAL_PAIRS, DIMS, PAIRS, price, slopes_of  # noqa: E402

pytest_generate_tests = flash_grid.generate
threads = flash_grid.threads

BATCH = 2  # but in the cheap cases


def lengths_of(batch: int, queries: int, keys: int | None = None) -> Lengths:
    """Random lengths up to these, the second ones at most a third; without `keys` the same for both."""

    def drawn(longest: int) -> torch.Tensor:
        lengths = random_lengths(longest, batch)
        lengths[1] = torch.randint(1, longest // 3 + 2, ())
        return lengths

    used = drawn(queries)
    return Lengths(used, used if keys is None else drawn(keys), used * 0)


def places(lengths: Lengths) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)."""
    queries, keys, _ = lengths
    return starts(queries), starts(keys), int(queries.max()), int(keys.max())


def folded_grad(problem: Problem) -> torch.Tensor:
    """The gradient of the packed out."""
    return packed(problem.grad, problem.lengths.queries)


def random_problem(case: Case, q, k, v, score: Score, lengths: Lengths) -> Problem:
    """A gradient that is 0 behind each sequence goes with the inputs, all padded."""
    grad = padded(packed(noise(case, *q.shape[:3], v.shape[3]), lengths.queries), lengths.queries, q.shape[1])
    return Problem(q, k, v, score, grad, lengths, getattr(case, "dropout", 0.0))


def check(problem: Problem, signed: torch.Tensor | None, ours: tuple[torch.Tensor, ...], times: float) -> None:
    """`ours` is (out, dq, dk, dv), packed."""
    known, (queries, keys, _) = problem.known(signed), problem.lengths
    for name, mine, span in zip(("out", "dq", "dk", "dv"), ours, (queries, queries, keys, keys), strict=True):
        at = known[name].folded(partial(packed, lengths=span))
        at.check(name, mine, 2 if name == "out" else times, 1e-5)


QKV = Grid(
    14, 2e7, price, ignored=lambda _: ("deterministic",), inner=1, deterministic=BOOL, dtype=HALF, alibi=BOOL,
    local=BOOL, causal=BOOL, d=[d for d in DIMS if d not in (40, 111)],
    seqlen=[97, 128, 200, 257, 384, 512, 768, 1025, 2048], dropout=[0.0, 0.17],
)  # fmt: skip


@over(QKV)
def test_varlen_qkvpacked(case: Case) -> None:
    def draw() -> tuple[torch.Tensor, Problem]:
        score = Score(case.causal, window(case.local, case.seqlen), 0.0, slopes_of(case.alibi, BATCH, 2))
        qkv, lengths = noise(case, BATCH, case.seqlen, 3, 2, case.d), lengths_of(BATCH, case.seqlen)
        return packed(qkv, lengths.queries), random_problem(case, *qkv.unbind(2), score, lengths)

    folded, problem = shared(case, draw)
    tokens = folded.detach().requires_grad_()
    cu_seqlens, _, longest, _ = places(problem.lengths)
    out, lse, signed = flash_attn_varlen_qkvpacked_func(
        tokens,
        cu_seqlens,
        longest,
        case.dropout,
        causal=case.causal,
        window_size=problem.score.window,
        alibi_slopes=problem.score.slopes,
        deterministic=case.deterministic,
        return_attn_probs=True,
    )
    assert lse.shape == (2, tokens.shape[0])
    (dqkv,) = torch.autograd.grad(out, tokens, folded_grad(problem))
    known, used = problem.known(signed), problem.lengths.queries
    dqkv_known = stacked([known[name] for name in ("dq", "dk", "dv")], 2)
    for name, ours, at in (("out", out, known["out"]), ("dqkv", dqkv, dqkv_known)):
        at.folded(partial(packed, lengths=used)).check(name, ours, 2, 1e-5)


OUTPUT = Grid(
    28, 2e7, price, ignored=lambda _: ("kvpacked", "deterministic"), inner=2, kvpacked=BOOL, deterministic=BOOL,
    dtype=HALF, heads=HEADS, alibi=BOOL, local=BOOL, causal=BOOL, d=[d for d in DIMS if d != 40],
    lengths=[(1, 147), *PAIRS, (1024, 1023), (2048, 2048)], dropout=[0.0, 0.17], softcap=[0.0, 50.0],
)  # fmt: skip


@over(OUTPUT)
def test_varlen_output(case: Case) -> None:
    queries, keys = case.lengths
    batch, (heads, kv) = 4 if cheap(case) else BATCH, heads_of(case, 4 if case.softcap else 6)

    def draw() -> tuple[torch.Tensor, torch.Tensor, Problem]:
        score = Score(case.causal, window(case.local, keys), case.softcap, slopes_of(case.alibi, batch, heads))
        q = noise(case, batch, queries, heads, case.d, scale=case.softcap or 1)
        both, lengths = noise(case, batch, keys, 2, kv, case.d), lengths_of(batch, queries, keys)
        problem = random_problem(case, q, *both.unbind(2), score, lengths)
        return packed(q, lengths.queries), packed(both, lengths.keys), problem

    *folded, problem = shared(case, draw)
    tokens, key_tokens = (x.detach().requires_grad_() for x in folded)
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
        out, lse, signed = flash_attn_varlen_kvpacked_func(tokens, key_tokens, *places(problem.lengths), **options)
    else:
        out, lse, signed = flash_attn_varlen_func(tokens, *key_tokens.unbind(1), *places(problem.lengths), **options)
    assert lse.shape == (heads, tokens.shape[0])
    dq, dkv = torch.autograd.grad(out, (tokens, key_tokens), folded_grad(problem))
    check(problem, signed, (out, dq, *dkv.unbind(1)), 3)


CAUSAL = Grid(
    16, 2e7, price, ignored=lambda _: ("page",), inner=1, page=[None, 256, 512], dtype=HALF, local=BOOL, d=DIMS,
    swap=BOOL, lengths=CAUSAL_PAIRS, dropout=[0.0],
)  # fmt: skip


@over(CAUSAL)
def test_varlen_causal(case: Case) -> None:
    queries, keys = case.lengths[::-1] if case.swap else case.lengths
    batch, heads = (8, 9) if cheap(case) else (BATCH, 2)

    def draw() -> Problem:
        q, k, v = (noise(case, batch, n, heads, case.d) for n in (queries, keys, keys))
        return random_problem(case, q, k, v, Score(True, window(case.local, keys)), lengths_of(batch, queries, keys))

    problem = shared(case, draw)
    lengths, score = problem.lengths, problem.score
    spans = (lengths.queries, lengths.keys, lengths.keys)
    tokens = [packed(x, n).requires_grad_() for x, n in zip((problem.q, problem.k, problem.v), spans, strict=True)]
    plain = flash_attn_varlen_func(*tokens, *places(lengths), causal=True, window_size=score.window)
    check(problem, None, (plain, *torch.autograd.grad(plain, tokens, folded_grad(problem))), 2)
    if case.page is None:
        return
    columns = -(-keys // case.page)
    table = torch.randperm(3 * batch * columns)[: batch * columns].reshape(batch, columns).to(torch.int32)
    pages = [
        torch.full((3 * batch * columns, case.page, heads, case.d), float("nan"), dtype=case.dtype) for _ in range(2)
    ]
    for pool, x in zip(pages, (problem.k, problem.v), strict=True):
        for b, used in enumerate(lengths.keys):
            for at, part in enumerate(x[b, : int(used)].split(case.page)):
                pool[table[b, at], : part.shape[0]] = part
    paged = flash_attn_varlen_func(
        tokens[0], *pages, *places(lengths), causal=True, window_size=score.window, block_table=table
    )
    if paged.is_cuda:  # other tiles of keys than without pages
        known = problem.known(None)["out"].folded(partial(packed, lengths=lengths.queries))
        known.check("paged", paged, 2, 1e-5)
    else:
        assert torch.equal(paged, plain)
    with pytest.raises(NotImplementedError, match="page"):
        paged.sum().backward()


DETERMINISTIC = Grid(8, 1e7, price, dtype=HALF, local=BOOL, causal=BOOL, d=DIMS, swap=BOOL, lengths=CAUSAL_PAIRS)


@over(DETERMINISTIC)
def test_varlen_deterministic(case: Case) -> None:
    torch.manual_seed(case.seed)
    tessera.set_threads(2)
    queries, keys = case.lengths[::-1] if case.swap else case.lengths
    used_q, used_k = random_lengths(queries, 2), random_lengths(keys, 2)
    q, k, v = (noise(case, int(n.sum()), 2, case.d).requires_grad_() for n in (used_q, used_k, used_k))
    out = flash_attn_varlen_func(
        q,
        k,
        v,
        starts(used_q),
        starts(used_k),
        int(used_q.max()),
        int(used_k.max()),
        causal=case.causal,
        window_size=window(case.local, keys),
        deterministic=True,
    )
    grad = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    for _ in range(5):
        again = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


SHORT_KEYS = Grid(6, 1e9, lambda _: 0.0, dtype=[torch.float16], causal=BOOL, d=[16, 32, 64])


@over(SHORT_KEYS)
def test_varlen_one_key_a_sequence(case: Case) -> None:
    """Sequences of many queries and a single key: nothing behind that key may reach a gradient."""
    torch.manual_seed(case.seed)
    q = (torch.randn(256, 5, case.d) * 3).to(case.dtype).requires_grad_()
    k, v = ((torch.randn(3, 5, case.d) * 3).to(case.dtype).requires_grad_() for _ in range(2))
    starts_q, starts_k = torch.tensor([0, 76, 110, 256], dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    out = flash_attn_varlen_func(q, k, v, starts_q, starts_k, 256, 3, causal=case.causal)
    seeing = [75, 109, 255] if case.causal else list(range(256))
    expected = torch.zeros_like(out)
    for row in seeing:
        expected[row] = v[sum(row >= n for n in (76, 110))]
    assert torch.equal(out, expected)
    out.backward(torch.randn_like(out))
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert q.grad.abs().max() < 1e-2, "with one key the probability is 1 whatever the score"
