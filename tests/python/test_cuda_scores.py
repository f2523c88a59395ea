# SPDX-License-Identifier: Apache-2.0
"""Gradients through scores of C++ text with derivative text, held against functions of Python that the oracle calls."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import tessera  # noqa: E402
from cuda_torch import half, on_gpu  # noqa: E402

ORACLE = {"wishes": "implementation=cpu.reference"}


def qkv(dtype=torch.bfloat16, sq=24, sk=40, hq=2, hkv=1):
    shapes = ((1, sq, hq, 64), (1, sk, hkv, 64), (1, sk, hkv, 64))
    return [half(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes, 1)]


def gradients(inputs, call):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = call(*leaves)
    dout = half(*out.shape, seed=9, dtype=out.dtype).to(out.device)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def close(ours, theirs):
    for i, (got, want) in enumerate(zip(ours, theirs, strict=True)):
        assert got.dtype == want.dtype, i
        torch.testing.assert_close(got.cpu().float(), want.float(), rtol=2e-2, atol=2e-2)


def registered():
    """A factor for each head and distance, then a tanh: a derivative of its own for each element."""
    table = {"table": (torch.bfloat16, 2)}
    factor = "const float x = score * table(at.head, at.query - at.key + 10);\n"
    return tessera.register_score(
        "cuda.tanh",
        factor + "return 2.0F * tanhf(x);",
        table,
        derivative_text=factor
        + "const float t = tanhf(x);\nreturn 2.0F * (1.0F - t * t) * table(at.head, at.query - at.key + 10);",
    )


def of_python(table):
    rows = table.float().tolist()

    def factor(head, query, key):
        return rows[head][min(max(query - key + 10, 0), 20)]

    def score(value, batch, head, query, key):
        return 2.0 * math.tanh(value * factor(head, query, key))

    def derivative(value, batch, head, query, key):
        by = factor(head, query, key)
        return 2.0 * (1.0 - math.tanh(value * by) ** 2) * by

    score.derivative = derivative
    return score


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 5.0}, {"window": (9, 3)}], ids=str)
def test_gradients_are_those_of_the_functions_of_python(dtype, options):
    inputs, table = qkv(dtype), half(2, 21, seed=4, dtype=torch.bfloat16)
    score, there = registered(), on_gpu(table)
    want = gradients(inputs, lambda *x: tessera.attention(*x, score=of_python(table), **options, **ORACLE))
    close(
        gradients(map(on_gpu, inputs), lambda *x: tessera.attention(*x, score=score, extras=(there,), **options)), want
    )


def test_compiled_calls_have_them():
    inputs, table = [on_gpu(x) for x in qkv()], on_gpu(half(2, 21, seed=4, dtype=torch.bfloat16))
    score = registered()

    def call(q, k, v):
        return tessera.attention(q, k, v, score=score, extras=(table,), causal=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, want in zip(gradients(inputs, compiled), gradients(inputs, call), strict=True):
        assert torch.equal(got, want)


def test_builtins_have_them():
    inputs = [4 * qkv()[0], *qkv()[1:]]
    for name in ("relative", "soft_clip"):
        want = gradients(inputs, lambda *x, name=name: tessera.attention(*x, score=name))
        close(gradients(map(on_gpu, inputs), lambda *x, name=name: tessera.attention(*x, score=name)), want)


def test_the_arrays_of_a_text_have_no_gradient():
    q, k, v = map(on_gpu, qkv())
    table = on_gpu(half(2, 21, seed=4, dtype=torch.bfloat16)).requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^extra0: got a tensor that requires grad; want one that does not"):
        tessera.attention(q, k, v, score=registered(), extras=(table,))


def test_a_derivative_that_does_not_compile():
    inputs = [on_gpu(x) for x in qkv()]
    tessera.register_score("cuda.slope", "score * 2.0F", derivative_text="\nnonsense")
    with pytest.raises(ValueError, match=r"(?s)derivative of score cuda.slope: got .*cuda.slope\(2\): error"):
        gradients(inputs, lambda *x: tessera.attention(*x, score="cuda.slope"))
