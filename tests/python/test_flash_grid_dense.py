# SPDX-License-Identifier: Apache-2.0
"""flash-attn 2's functions over its own grid of parameters: dense tensors, packed and not."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import flash_grid  # noqa: E402
from flash_grid import BOOL, HALF, HEADS, Case, Grid, heads_kv, over, seed_of, window  # noqa: E402
from flash_textbook import Score, check_error, textbook  # noqa: E402
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


def check_dropout(
    case: Case, signed: torch.Tensor, score: Score, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor | None:
    """The mask in the signs of S_dmask, after a look at the share that it drops among visible keys."""
    if case.dropout == 0:
        assert signed.shape == (0,)
        return None
    keep = ~torch.signbit(signed)
    from flash_textbook import Lengths, visibility

    visible, _ = visibility(q.shape[1], k.shape[1], Lengths.full(q.shape[0], q.shape[1], k.shape[1]), score)
    visible = visible.expand_as(keep)
    count = max(int(visible.sum()), 1)
    share = ((~keep) & visible).sum().item() / count
    deviation = (case.dropout * (1 - case.dropout) / count) ** 0.5
    assert abs(share - case.dropout) <= 5 * deviation + 2**-16
    return keep


def run_both(q, k, v, score, case, signed, grad, inputs):
    """Outputs, probabilities and gradients of the textbook in fp32 and in the same dtype."""
    keep = check_dropout(case, signed, score, q, k)
    results = []
    for wide in (True, False):
        out, probabilities = textbook(q, k, v, score, None, keep, case.dropout, wide)
        grads = torch.autograd.grad(out, inputs, grad.to(out.dtype))
        results.append((out, probabilities, grads))
    if keep is not None:
        (_, wide, _), (_, same, _) = results
        check_error("S_dmask", signed.abs(), same, wide, 2, 1e-6)
    return results


QKV = Grid(
    16, 2e7, price, dtype=HALF, deterministic=BOOL, alibi=BOOL, local=BOOL, causal=BOOL, d=DIMS,
    seqlen=[97, 128, 200, 384, 768, 1024, 1025, 2048], dropout=[0.0, 0.17],
)  # fmt: skip


@over(QKV)
def test_qkvpacked(case: Case) -> None:
    torch.manual_seed(seed_of(case))
    qkv = torch.randn(2, case.seqlen, 3, 3, case.d).to(case.dtype).requires_grad_()
    score = Score(case.causal, window(case.local, case.seqlen), 0.0, slopes_of(case.alibi, 2, 3))
    out, lse, signed = flash_attn_qkvpacked_func(
        qkv,
        case.dropout,
        causal=case.causal,
        window_size=score.window,
        alibi_slopes=score.slopes,
        deterministic=case.deterministic,
        return_attn_probs=True,
    )
    assert lse.shape == (2, 3, case.seqlen) and lse.dtype == torch.float32
    grad = torch.randn_like(out)
    (dqkv,) = torch.autograd.grad(out, qkv, grad)
    wide, same = run_both(*qkv.unbind(2), score, case, signed, grad, (qkv,))
    check_error("out", out, same[0], wide[0], 2, 1e-5)
    check_error("dqkv", dqkv, same[2][0], wide[2][0], 2, 1e-5)


OUTPUT = Grid(
    32, 2e7, price, kvpacked=BOOL, dtype=HALF, heads=HEADS, deterministic=BOOL, alibi=BOOL, local=BOOL, causal=BOOL,
    d=[d for d in DIMS if d != 80], lengths=[*PAIRS, (1024, 1023), (2048, 2048)], dropout=[0.0, 0.17],
    softcap=[0.0, 50.0],
)  # fmt: skip


@over(OUTPUT)
def test_output(case: Case) -> None:
    torch.manual_seed(seed_of(case))
    queries, keys = case.lengths
    heads, kv = 6, heads_kv(case.heads, 6, 3)
    score = Score(case.causal, window(case.local, keys), case.softcap, slopes_of(case.alibi, 2, heads))
    q = (torch.randn(2, queries, heads, case.d) * (case.softcap or 1)).to(case.dtype).requires_grad_()
    packed_kv = torch.randn(2, keys, 2, kv, case.d).to(case.dtype).requires_grad_()
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
        out, lse, signed = flash_attn_kvpacked_func(q, packed_kv, **options)
    else:
        out, lse, signed = flash_attn_func(q, *packed_kv.unbind(2), **options)
    assert lse.shape == (2, heads, queries)
    grad = torch.randn_like(out)
    dq, dkv = torch.autograd.grad(out, (q, packed_kv), grad)
    wide, same = run_both(q, *packed_kv.unbind(2), score, case, signed, grad, (q, packed_kv))
    check_error("out", out, same[0], wide[0], 2, 1e-5)
    check_error("dq", dq, same[2][0], wide[2][0], 3, 1e-5)
    for name, part in (("dk", 0), ("dv", 1)):
        check_error(name, dkv[:, :, part], same[2][1][:, :, part], wide[2][1][:, :, part], 3, 1e-5)


def gradients(
    case: Case, causal: bool, slopes: torch.Tensor | None, batch: int, heads: int, times: float, at_least: float
):
    """Out and gradients of plain q, k, v against the textbook."""
    queries, keys = case.lengths[::-1] if case.swap else case.lengths
    q, k, v = (torch.randn(batch, n, heads, case.d).to(case.dtype).requires_grad_() for n in (queries, keys, keys))
    score = Score(causal, window(case.local, keys), 0.0, slopes)
    out = flash_attn_func(
        q,
        k,
        v,
        0.0,
        causal=causal,
        window_size=score.window,
        alibi_slopes=slopes,
        deterministic=getattr(case, "deterministic", False),
    )
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v), grad)
    wide_out, _ = textbook(q, k, v, score)
    same_out, _ = textbook(q, k, v, score, wide=False)
    check_error("out", out, same_out, wide_out, 2, 1e-5)
    wide = torch.autograd.grad(wide_out, (q, k, v), grad.float())
    same = torch.autograd.grad(same_out, (q, k, v), grad)
    for name, a, b, c in zip(("dq", "dk", "dv"), ours, same, wide, strict=True):
        check_error(name, a, b, c, times, at_least)


CAUSAL = Grid(16, 2e7, price, dtype=HALF, local=BOOL, d=DIMS, swap=BOOL, lengths=CAUSAL_PAIRS)


@over(CAUSAL)
def test_causal(case: Case) -> None:
    torch.manual_seed(seed_of(case))
    gradients(case, True, None, 2, 3, 2, 1e-5)


SPLIT = Grid(
    20, 2e7, price, dtype=HALF, deterministic=BOOL, alibi=BOOL, local=BOOL, causal=BOOL, d=DIMS, swap=BOOL,
    lengths=SPLIT_PAIRS,
)  # fmt: skip


@over(SPLIT)
def test_few_queries_many_keys(case: Case) -> None:
    torch.manual_seed(seed_of(case))
    gradients(case, case.causal, slopes_of(case.alibi, 1, 4), 1, 4, 8 if case.alibi else 2, 2e-4)


REPEAT = Grid(
    8, 1e7, price, dtype=[torch.float16], causal=BOOL, d=DIMS, dropout=[0.0, 0.17],
    lengths=[(1, 239), (239, 1), (3, 799), (799, 3), (1024, 128)]
    + [(n, n) for n in (97, 128, 200, 256, 257, 384, 512, 768, 1024)],
)  # fmt: skip


@over(REPEAT)
def test_repeats_bit_for_bit(case: Case) -> None:
    """Many sequences on several threads: out, LSE and, being of one order of additions, gradients come out the same."""
    torch.manual_seed(seed_of(case))
    queries, keys = case.lengths
    q, k, v = (torch.randn(6, n, 2, case.d).to(case.dtype).requires_grad_() for n in (queries, keys, keys))
    grad = torch.randn(6, queries, 2, case.d).to(case.dtype)

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
    torch.manual_seed(seed_of(case))
    queries, keys = case.lengths[::-1] if case.swap else case.lengths
    q, k, v = (torch.randn(2, n, 3, case.d).to(case.dtype).requires_grad_() for n in (queries, keys, keys))
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
    row = (grad * out).abs().sum(-1, keepdim=True).float() * 2**-11 * q.shape[-1] ** -0.5
    return {"dq": (row * k.abs().amax()).max().item(), "dk": (row * q.abs()).sum(1).max().item(), "dv": 0.0}


@over(LARGE)
def test_large_scores_have_finite_gradients(case: Case) -> None:
    torch.manual_seed(seed_of(case))
    q, k, v = ((torch.randn(2, case.seqlen, 5, case.d) * n).to(case.dtype).requires_grad_() for n in (5, 3, 3))
    score = Score(case.causal)
    out = flash_attn_func(q, k, v, causal=case.causal)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v), grad)
    wide_out, same_out = (textbook(q, k, v, score, wide=wide)[0] for wide in (True, False))
    check_error("out", out, same_out, wide_out, 2, 1e-5)
    wide = torch.autograd.grad(wide_out, (q, k, v), grad.float())
    same = torch.autograd.grad(same_out, (q, k, v), grad)
    extra = rounded_delta(q.detach(), k.detach(), wide_out.detach(), grad)
    for name, a, b, c in zip(("dq", "dk", "dv"), ours, same, wide, strict=True):
        check_error(name, a, b, c, 5, 1e-3 + extra[name])


TRANSPOSED = Grid(8, 1e9, price, dtype=HALF, causal=BOOL, d=[64, 128], seqlen=[97, 128, 200, 256])


@over(TRANSPOSED)
def test_gradient_with_strides_of_its_own(case: Case) -> None:
    torch.manual_seed(seed_of(case))
    q, k, v = (torch.randn(3, case.seqlen, 2, case.d).to(case.dtype).requires_grad_() for _ in range(3))
    out = flash_attn_func(q, k, v, causal=case.causal).transpose(0, 1)
    grad = torch.randn(case.seqlen, 6, 2, case.d).to(case.dtype)[:, ::2]
    ours = torch.autograd.grad(out, (q, k, v), grad)
    wide_out, same_out = (textbook(q, k, v, Score(case.causal), wide=w)[0].transpose(0, 1) for w in (True, False))
    check_error("out", out, same_out, wide_out, 2, 1e-5)
    wide = torch.autograd.grad(wide_out, (q, k, v), grad.float())
    same = torch.autograd.grad(same_out, (q, k, v), grad)
    for name, a, b, c in zip(("dq", "dk", "dv"), ours, same, wide, strict=True):
        check_error(name, a, b, c, 2, 1e-5)
