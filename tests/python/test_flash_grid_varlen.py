# SPDX-License-Identifier: Apache-2.0
"""flash-attn 2's functions for packed sequences over its own grid of parameters."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import flash_grid  # noqa: E402
from flash_grid import BOOL, HALF, HEADS, Case, Grid, heads_kv, over, seed_of, window  # noqa: E402
from flash_textbook import Lengths, Score, check_error, packed, padded, random_lengths, starts, textbook  # noqa: E402
from tessera.compat.flash_attn_2 import (  # noqa: E402
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from test_flash_grid_dense import CAUSAL_PAIRS, DIMS, PAIRS, price, slopes_of  # noqa: E402

pytest_generate_tests = flash_grid.generate
threads = flash_grid.threads

BATCH = 3


def kept(signed: torch.Tensor, case: Case, queries: int, keys: int) -> torch.Tensor | None:
    """The dropout mask of S_dmask (b, h, longest, longest) on the padded shape; True where nothing was computed."""
    if case.dropout == 0:
        assert signed.shape == (0,)
        return None
    keep = torch.ones(*signed.shape[:2], queries, keys, dtype=torch.bool)
    keep[:, :, : signed.shape[2], : signed.shape[3]] = ~torch.signbit(signed)
    return keep


def check(case: Case, q, k, v, score: Score, lengths: Lengths, signed, ours, grad, times: float) -> None:
    """`ours` is (out, dq, dk, dv) packed; `q`, `k`, `v` are padded; `grad` is the packed gradient of out."""
    keep = kept(signed, case, q.shape[1], k.shape[1])
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    results = []
    for wide in (True, False):
        out, probabilities = textbook(*inputs, score, lengths, keep, case.dropout, wide)
        out_grad = padded(grad, lengths.queries, q.shape[1]).to(out.dtype)
        results.append((out, probabilities, *torch.autograd.grad(out, inputs, out_grad)))
    wide, same = results
    if keep is not None:
        p = torch.zeros_like(wide[1])
        p[:, :, : signed.shape[2], : signed.shape[3]] = signed.abs()
        check_error("S_dmask", p, same[1], wide[1], 2, 1e-6)
    spans = (lengths.queries, lengths.queries, lengths.keys, lengths.keys)
    for name, mine, at, span in zip(("out", "dq", "dk", "dv"), ours, (0, 2, 3, 4), spans, strict=True):
        check_error(name, mine, packed(same[at], span), packed(wide[at], span), 2 if at == 0 else times, 1e-5)


QKV = Grid(
    14, 2e7, price, dtype=HALF, deterministic=BOOL, alibi=BOOL, local=BOOL, causal=BOOL,
    d=[d for d in DIMS if d not in (40, 111)], seqlen=[97, 128, 200, 257, 384, 512, 768, 1025, 2048],
    dropout=[0.0, 0.17],
)  # fmt: skip


@over(QKV)
def test_varlen_qkvpacked(case: Case) -> None:
    torch.manual_seed(seed_of(case))
    score = Score(case.causal, window(case.local, case.seqlen), 0.0, slopes_of(case.alibi, BATCH, 3))
    qkv = torch.randn(BATCH, case.seqlen, 3, 3, case.d).to(case.dtype)
    used = random_lengths(case.seqlen, BATCH)
    tokens = packed(qkv, used).requires_grad_()
    out, lse, signed = flash_attn_varlen_qkvpacked_func(
        tokens,
        starts(used),
        int(used.max()),
        case.dropout,
        causal=case.causal,
        window_size=score.window,
        alibi_slopes=score.slopes,
        deterministic=case.deterministic,
        return_attn_probs=True,
    )
    assert lse.shape == (3, tokens.shape[0])
    grad = torch.randn_like(out)
    (dqkv,) = torch.autograd.grad(out, tokens, grad)
    lengths = Lengths(used, used, used * 0)
    check(case, *qkv.unbind(2), score, lengths, signed, (out, *dqkv.unbind(1)), grad, 2)


OUTPUT = Grid(
    28, 2e7, price, kvpacked=BOOL, dtype=HALF, heads=HEADS, deterministic=BOOL, alibi=BOOL, local=BOOL, causal=BOOL,
    d=[d for d in DIMS if d != 40], lengths=[(1, 147), *PAIRS, (1024, 1023), (2048, 2048)], dropout=[0.0, 0.17],
    softcap=[0.0, 50.0],
)  # fmt: skip


@over(OUTPUT)
def test_varlen_output(case: Case) -> None:
    torch.manual_seed(seed_of(case))
    queries, keys = case.lengths
    heads, kv = 6, heads_kv(case.heads, 6, 3)
    score = Score(case.causal, window(case.local, keys), case.softcap, slopes_of(case.alibi, BATCH, heads))
    q = (torch.randn(BATCH, queries, heads, case.d) * (case.softcap or 1)).to(case.dtype)
    both = torch.randn(BATCH, keys, 2, kv, case.d).to(case.dtype)
    lengths = Lengths(
        random_lengths(queries, BATCH), random_lengths(keys, BATCH), torch.zeros(BATCH, dtype=torch.int64)
    )
    tokens, key_tokens = packed(q, lengths.queries).requires_grad_(), packed(both, lengths.keys).requires_grad_()
    places = (starts(lengths.queries), starts(lengths.keys), int(lengths.queries.max()), int(lengths.keys.max()))
    options = {
        "dropout_p": case.dropout,
        "causal": case.causal,
        "window_size": score.window,
        "softcap": case.softcap,
        "alibi_slopes": score.slopes,
        "deterministic": case.deterministic,
        "return_attn_probs": True,
    }
    if case.kvpacked:
        out, lse, signed = flash_attn_varlen_kvpacked_func(tokens, key_tokens, *places, **options)
    else:
        out, lse, signed = flash_attn_varlen_func(tokens, *key_tokens.unbind(1), *places, **options)
    assert lse.shape == (heads, tokens.shape[0])
    grad = torch.randn_like(out)
    dq, dkv = torch.autograd.grad(out, (tokens, key_tokens), grad)
    check(case, q, *both.unbind(2), score, lengths, signed, (out, dq, *dkv.unbind(1)), grad, 3)


CAUSAL = Grid(
    16, 2e7, price, dtype=HALF, local=BOOL, d=DIMS, swap=BOOL, lengths=CAUSAL_PAIRS,
    page=[None, 256, 512], dropout=[0.0],
)  # fmt: skip


@over(CAUSAL)
def test_varlen_causal(case: Case) -> None:
    torch.manual_seed(seed_of(case))
    queries, keys = case.lengths[::-1] if case.swap else case.lengths
    score = Score(True, window(case.local, keys))
    q, k, v = (torch.randn(BATCH, n, 3, case.d).to(case.dtype) for n in (queries, keys, keys))
    lengths = Lengths(
        random_lengths(queries, BATCH), random_lengths(keys, BATCH), torch.zeros(BATCH, dtype=torch.int64)
    )
    places = (starts(lengths.queries), starts(lengths.keys), int(lengths.queries.max()), int(lengths.keys.max()))
    tokens = [packed(x, n).requires_grad_() for x, n in zip((q, k, v), (lengths[0], *lengths[1:2] * 2), strict=True)]
    plain = flash_attn_varlen_func(*tokens, *places, causal=True, window_size=score.window)
    grad = torch.randn_like(plain)
    grads = torch.autograd.grad(plain, tokens, grad)
    empty = torch.empty(0)
    check(case, q, k, v, score, lengths, empty, (plain, *grads), grad, 2)
    if case.page is None:
        return
    columns = -(-keys // case.page)
    table = torch.randperm(3 * BATCH * columns)[: BATCH * columns].reshape(BATCH, columns).to(torch.int32)
    pages = [torch.full((3 * BATCH * columns, case.page, 3, case.d), float("nan"), dtype=case.dtype) for _ in range(2)]
    for pool, x in zip(pages, (k, v), strict=True):
        for b, used in enumerate(lengths.keys):
            for at in range(int(used)):
                pool[table[b, at // case.page], at % case.page] = x[b, at]
    paged = flash_attn_varlen_func(tokens[0], *pages, *places, causal=True, window_size=score.window, block_table=table)
    assert torch.equal(paged, plain)
    with pytest.raises(NotImplementedError, match="page"):
        paged.sum().backward()


DETERMINISTIC = Grid(8, 1e7, price, dtype=HALF, local=BOOL, causal=BOOL, d=DIMS, swap=BOOL, lengths=CAUSAL_PAIRS)


@over(DETERMINISTIC)
def test_varlen_deterministic(case: Case) -> None:
    torch.manual_seed(seed_of(case))
    queries, keys = case.lengths[::-1] if case.swap else case.lengths
    used_q, used_k = random_lengths(queries, 2), random_lengths(keys, 2)
    q, k, v = (torch.randn(int(n.sum()), 3, case.d).to(case.dtype).requires_grad_() for n in (used_q, used_k, used_k))
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
    torch.manual_seed(seed_of(case))
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
