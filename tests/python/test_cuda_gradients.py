# SPDX-License-Identifier: Apache-2.0
"""Gradients of CUDA tensors: against the textbook in float64, by the rule of every test, and where they must be 0."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import tessera  # noqa: E402
import torch_problems as problems  # noqa: E402
import torch_textbook as textbook  # noqa: E402
from cuda_torch import CUDA, half, on_gpu, on_gpu_and_back  # noqa: E402

DTYPES = (torch.float16, torch.bfloat16)
NAMES = ("out", "lse", "dq", "dk", "dv", "d_fourth", "d_fifth")


def judge(inputs, call, plain, keys, dout, dlse):
    """At most twice the error of the textbook in the same dtype, unfused, for out, LSE and every gradient."""
    got = textbook.results(inputs, call, dout, dlse)
    oracle = textbook.results(inputs, plain, dout, dlse, torch.float64)
    order = textbook.orders(keys)
    runs = {}

    def rounded(run):
        if run not in runs:
            runs[run] = textbook.results(inputs, lambda *x: plain(*x, order=order(run)), dout, dlse)
        return runs[run]

    for i, (mine, true) in enumerate(zip(got, oracle, strict=True)):
        assert mine.device == inputs[min(max(i - 2, 0), len(inputs) - 1)].device, NAMES[i]
        textbook.judge(NAMES[i], mine, true, lambda run, i=i: rounded(run)[i])


@pytest.mark.parametrize("through", ["out", "lse", "both"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in problems.ALL if name != "tiles"])  # lists have no backward there
def test_every_feature(name, dtype, through, monkeypatch):
    monkeypatch.setattr(problems, "tessera", on_gpu_and_back())
    problem = problems.ALL[name](dtype)
    out, lse = problem.plain(*problem.inputs)
    dout = problems.normal(*out.shape, dtype=dtype, seed=8) if through != "lse" else None
    dlse = problems.normal(*lse.shape, dtype=torch.float32, seed=9) if through != "out" else None
    judge(problem.inputs, problem.call, problem.plain, problem.keys, dout, dlse)


SHAPES = {
    "heads of 64": {"d": 64, "hq": 4, "hkv": 4},
    "heads of 64, causal, groups": {"d": 64, "causal": True},
    "heads of 96": {"d": 96, "causal": True},
    "heads of 128": {"d": 128, "hq": 8, "hkv": 1},
    "heads of 128, causal, groups": {"d": 128, "hq": 8, "causal": True},
    "heads of 128, window": {"d": 128, "window": (70, 0)},
    "heads of 192 and 128": {"d": 192, "dv": 128, "causal": True},
    "heads of 256": {"d": 256, "causal": True},
    "one query": {"d": 128, "sq": 1},
    "more queries than keys": {"d": 64, "sq": 300, "sk": 70, "causal": True},
    "softcap": {"d": 128, "causal": True, "softcap": 5.0},
    "dropout": {"d": 128, "causal": True, "dropout": 0.25},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_models(name, dtype):
    """Several tiles both ways, with ends of tiles that are not full."""
    options = dict(SHAPES[name])
    sq, sk, d = options.pop("sq", 300), options.pop("sk", 333), options.pop("d")
    hq, hkv, dv = options.pop("hq", 4), options.pop("hkv", 2), options.pop("dv", d)
    shapes = ((2, sq, hq, d), (2, sk, hkv, d), (2, sk, hkv, dv))
    inputs = [on_gpu(half(*shape, seed=seed, dtype=dtype)) for seed, shape in enumerate(shapes, 1)]
    left, right = options.get("window", (None, 0 if options.get("causal") else None))
    words = {"visible": textbook.window(2, sq, sk, left, right).to(CUDA), "softcap": options.get("softcap", 0.0)}
    if "dropout" in options:
        options["seed"] = 77
        kept = torch.from_numpy(tessera.dropout_keep((2, hq, sq, sk), options["dropout"], 77))
        words["keep"] = on_gpu(kept * (65536 / round((1 - options["dropout"]) * 65536)))

    def call(q, k, v):
        return tessera.attention(q, k, v, return_lse=True, **options)

    def plain(q, k, v, order=None):
        return textbook.attend(q, k, v, order=order, **words)

    dout, dlse = on_gpu(half(2, sq, hq, dv, seed=4, dtype=dtype)), on_gpu(half(2, hq, sq, seed=5).float())
    judge(inputs, call, plain, sk, dout, dlse)


def test_packed_sequences_are_those_alone():
    """Bit for bit: of each of its own, whatever lies beside it; an empty sequence in the middle."""
    lengths = [5, 0, 150, 31]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    total = int(starts[-1])
    q, k, v, dout = (on_gpu(half(total, h, 128, seed=s, dtype=torch.bfloat16)) for s, h in enumerate((4, 2, 2, 4)))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    sizes = {"max_seqlen_q": 150, "max_seqlen_k": 150}
    there = {"cu_seqlens_q": on_gpu(starts), "cu_seqlens_k": on_gpu(starts)}
    tessera.attention(*leaves, causal=True, **there, **sizes).backward(dout)
    for begin, length in zip(starts.tolist(), lengths, strict=False):
        own = slice(begin, begin + length)
        alone = [x[None, own].clone().requires_grad_() for x in (q, k, v)]
        tessera.attention(*alone, causal=True).backward(dout[None, own])
        for name, packed, single in zip("qkv", leaves, alone, strict=True):
            assert torch.equal(packed.grad[own], single.grad[0]), f"d{name} of {length} tokens"


def test_longest_sequence_that_is_not_said():
    """The token count stands for it, with the same values."""
    starts = on_gpu(torch.tensor([0, 40, 100], dtype=torch.int32))
    leaves = [on_gpu(half(100, h, 64, seed=h)).requires_grad_() for h in (4, 2, 2)]
    grads = []
    for sizes in ({}, {"max_seqlen_q": 60, "max_seqlen_k": 60}):
        out = tessera.attention(*leaves, cu_seqlens_q=starts, cu_seqlens_k=starts, **sizes)
        grads.append(torch.autograd.grad(out.square().sum(), leaves))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-9, atol=2**-9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_rows_and_keys_leak_nothing(dtype):
    """Behind the used lengths all is NaN, upstream too: gradients there are exactly 0, and the others finite."""
    used_q, used_k = (torch.tensor(lengths, dtype=torch.int32, device=CUDA) for lengths in ([50, 0, 90], [70, 33, 0]))
    q, k, v, dout = (
        on_gpu(half(3, s, h, 64, seed=h + s, dtype=dtype)) for s, h in ((90, 4), (100, 2), (100, 2), (90, 4))
    )
    rows, keys = (torch.arange(n, device=CUDA) >= used[:, None] for n, used in ((90, used_q), (100, used_k)))
    for x, hidden in ((q, rows), (dout, rows), (k, keys), (v, keys)):
        x[hidden] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = tessera.attention(*leaves, causal=True, seqused_q=used_q, seqused_k=used_k)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    empty = rows | (used_k == 0)[:, None]
    for name, grad, hidden in (("dq", dq, empty), ("dk", dk, keys), ("dv", dv, keys)):
        assert not grad[hidden].any(), name
        assert grad.isfinite().all() and grad.any(), name


def test_rows_without_keys_give_their_sinks_nothing():
    """More queries than keys under a causal mask: out of the first rows is 0, their LSE −inf, their gradients 0."""
    q, k, v = (on_gpu(half(2, s, h, 64, seed=s + h)).requires_grad_() for s, h in ((90, 4), (60, 2), (60, 2)))
    sinks = torch.zeros(4, device=CUDA, requires_grad=True)
    out, lse = tessera.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert not out[:, :30].any() and (lse[..., :30] == -torch.inf).all()
    first = torch.zeros_like(out)
    first[:, :30] = 1
    for grad in torch.autograd.grad([out, lse], (q, k, v, sinks), [first, torch.zeros_like(lse)], retain_graph=True):
        assert not grad.any()
    assert torch.autograd.grad(out.sum(), sinks)[0].abs().min() > 0


@pytest.mark.parametrize("shape", [(0, 64, 96), (2, 0, 96), (2, 64, 0)], ids=["no batch", "no queries", "no keys"])
def test_nothing_to_compute(shape):
    b, sq, sk = shape
    leaves = [torch.ones(b, s, 2, 64, device=CUDA, dtype=torch.float16).requires_grad_() for s in (sq, sk, sk)]
    tessera.attention(*leaves).sum().backward()
    assert all(x.grad.shape == x.shape and not x.grad.any() for x in leaves)


@pytest.mark.parametrize("how", ["number", "tensor", "drawn"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_of_the_backward_is_that_of_the_forward(dtype, how):
    """out is linear in v, so Σ dv · v = Σ dout · out where both passes drop the same. With dout = out that is Σ out²,
    of which other draws would give about 0.6."""
    shapes = ((2, 130, 4, 128), (2, 200, 2, 128), (2, 200, 2, 128))
    q, k, v = (on_gpu(half(*shape, seed=s, dtype=dtype)).requires_grad_() for s, shape in enumerate(shapes))

    def both(seed):
        out = tessera.attention(q, k, v, dropout=0.4, seed=seed)
        (dv,) = torch.autograd.grad(out, v, out.detach())
        return out, dv

    seed = {"number": 5, "tensor": torch.tensor([5], device=CUDA).view(torch.uint64), "drawn": None}[how]
    out, dv = both(seed)
    assert (dv.double() * v.double()).sum().item() == pytest.approx(out.double().square().sum().item(), rel=0.01)
    other, _ = both(None if how == "drawn" else 6)
    assert not torch.equal(out, other)
    if how != "drawn":
        again, same = both(5)
        assert torch.equal(out, again) and torch.equal(dv, same)
