# SPDX-License-Identifier: Apache-2.0
"""The residual of out: what autograd keeps of it, and what that is worth."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
from tessera import attention, attention_backward  # noqa: E402


def drawn(shape, dtype, seed):
    """As torch's own samples have them, uniform from −9 to 9: one key nearly always outweighs its row."""
    generator = torch.Generator().manual_seed(seed)
    return [((torch.rand(shape, generator=generator) * 18 - 9).to(dtype)) for _ in range(4)]


def exact_gradients(q, k, v, dout):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", leaves[0], leaves[1]) * q.shape[-1] ** -0.5
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), leaves[2])
    return torch.autograd.grad(out, leaves, dout.double())


def gradients(inputs, **options):
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    return torch.autograd.grad(attention(*leaves, **options), leaves, inputs[3])


def errors(found, want):
    """Largest of each, beyond what rounding the gradient itself costs."""
    return [
        (ours.double() - exact).abs().sub(exact.abs() * torch.finfo(ours.dtype).eps).clamp(min=0).max().item()
        for ours, exact in zip(found, want, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dominated_rows_do_not_inherit_the_rounding_of_out(dtype):
    kept, dropped = [], []
    for seed in range(20):
        inputs = drawn((4, 3, 1, 8), dtype, seed)
        want = exact_gradients(*inputs)
        kept.append(errors(gradients(inputs), want))
        dropped.append(errors(gradients(inputs, keep_residual=False), want))
    usual, without = np.median(kept, axis=0), np.median(dropped, axis=0)
    assert (without[:2] > 8 * usual[:2]).all(), (usual, without)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_of_out_and_residual_is_out_before_its_rounding(dtype):
    q, k, v, _ = drawn((2, 50, 2, 64), torch.float32, 3)
    out, residual = attention(q * 0.1, k, v, out_dtype=dtype, return_residual=True)
    exact = attention(q * 0.1, k, v)
    assert residual.dtype == torch.int8
    assert residual.shape == out.shape
    digits = 7 if dtype == torch.bfloat16 else 10
    spacing = torch.exp2(torch.floor(torch.log2(out.float().abs().clamp(min=2.0**-14))) - digits)
    sums = out.double() + residual.double() * spacing.double() / 254
    assert ((sums - exact.double()).abs() <= spacing.double() / 508 + 2.0**-23 * exact.abs().double()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_arrays_without_autograd_get_the_same_gradients(dtype):
    inputs = drawn((2, 30, 4, 32), dtype, 5)
    q, k, v, dout = inputs
    out, lse, residual = attention(q, k, v, return_lse=True, return_residual=True)
    found = attention_backward(dout, q, k, v, out, lse, residual=residual)
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(inputs), strict=True))
    without = attention_backward(dout, q, k, v, out, lse)
    assert all(torch.equal(a, b) for a, b in zip(without, gradients(inputs, keep_residual=False), strict=True))


def test_half_types_of_numpy():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 20, 2, 16)).astype(np.float16) for _ in range(3))
    out, lse, residual = attention(q, k, v, return_lse=True, return_residual=True)
    assert residual.dtype == np.int8
    assert len(attention_backward(out, q, k, v, out, lse, residual=residual)) == 3


def test_returned_beside_what_autograd_keeps():
    inputs = drawn((1, 20, 2, 16), torch.bfloat16, 7)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out, residual = attention(*leaves, return_residual=True, keep_residual=False)
    assert not residual.requires_grad
    got = torch.autograd.grad(out, leaves, inputs[3])
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(inputs), strict=True))


def test_compiled_calls_keep_it():
    inputs = drawn((1, 40, 2, 16), torch.bfloat16, 9)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True, backend="aot_eager")
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    got = torch.autograd.grad(compiled(*leaves), leaves, inputs[3])
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(inputs, causal=True), strict=True))


def test_score_functions_keep_it():
    def score(value, batch, head, query, key):
        return value

    score.derivative = lambda value, batch, head, query, key: 1.0
    inputs = drawn((1, 6, 2, 16), torch.bfloat16, 11)
    by_oracle = gradients(inputs, score=score, wishes="implementation=cpu.reference")
    for got, want in zip(by_oracle, exact_gradients(*inputs), strict=True):
        assert (got.double() - want).abs().max() <= 0.01 * want.abs().max()


def test_fp32_loses_nothing():
    q = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match="residual"):
        attention(q, q, q, return_residual=True)
    leaf = q.clone().requires_grad_()
    assert attention(leaf, leaf, leaf).requires_grad
    assert tessera.attention(leaf.half(), leaf.half(), leaf.half(), out_dtype="fp32").dtype == torch.float32
