# SPDX-License-Identifier: Apache-2.0
"""8-bit tensors of torch, gradients of attention with quantization=, and flash-attn 3's descales."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
from tessera.compat import flash_attn_3  # noqa: E402


def tensors(*leading, dtype=torch.float32, grad=False):
    generator = torch.Generator().manual_seed(3)
    shapes = (4, 32), (2, 32), (2, 32)
    made = [torch.randn((*leading, *shape), generator=generator).to(dtype) for shape in shapes]
    return [x.requires_grad_(grad) for x in made]


def attend(q, k, v, causal=False):
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.repeat_interleave(group, 2))


def test_every_byte_and_half_converts_as_torch_does():
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(1, 128, 1, 512)
    x = torch.nan_to_num(x.float(), 1.0, 448.0, -448.0).clamp(-448, 448).bfloat16()
    made = tessera.quantize(x, given=torch.ones(1, 1))
    assert made.values.dtype is torch.float8_e4m3fn
    assert torch.equal(made.values.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("grain", ["head", 16, "token"])
@pytest.mark.parametrize(("kind", "causal"), [("fp8", True), ("int8", False)])
def test_gradients_are_those_of_the_dequantised_values(kind, causal, grain):
    q, k, v = tensors(2, 37, grad=True)
    out, lse = tessera.attention(q, k, v, causal=causal, quantization=kind, descale=grain, return_lse=True)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out * weights).sum().backward()
    to, smooth = ("e4m3", False) if kind == "fp8" else ("int8", True)
    with torch.no_grad():
        a = tessera.quantize(q, to=to, descale=grain, heads_kv=2)
        b = tessera.quantize(k, to=to, descale=grain, smooth=smooth)
        c = tessera.quantize(v, to=to, descale=grain)
        wide = [
            tessera.dequantize(*a[:2], grain=grain),
            tessera.dequantize(*b[:2], grain=grain, mean=b.mean),
            tessera.dequantize(*c[:2], grain=grain) if kind == "fp8" else v.detach(),
        ]
    wide = [x.requires_grad_() for x in wide]
    want = attend(*wide, causal=causal)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
    (want * weights).sum().backward()
    for x, y in zip((q, k, v), wide, strict=True):
        torch.testing.assert_close(x.grad, y.grad, atol=1e-5, rtol=1e-3)
    assert lse.shape == (2, 4, 37)


def test_sinks_packed_sequences_and_16_bits_have_gradients():
    q, k, v = tensors(50, dtype=torch.bfloat16, grad=True)
    sinks = torch.zeros(4, requires_grad=True)
    cu = torch.tensor([0, 20, 50], dtype=torch.int32)
    out = tessera.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, sinks=sinks, quantization="fp8")
    assert out.dtype is torch.bfloat16
    out.float().square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v, sinks))
    assert sinks.grad.abs().sum() > 0


def test_what_has_no_gradient_says_so():
    q, k, v = tensors(1, 20, grad=True)
    with pytest.raises(ValueError, match="quantize"):
        tessera.quantize(q)
    with pytest.raises(ValueError, match=r"^seed: got None"):
        tessera.attention(q, k, v, dropout=0.1, quantization="fp8")
    with pytest.raises(NotImplementedError, match=r"^quantization: got out"):
        tessera.attention(q, k, v, quantization="fp8", return_residual=True, out_dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"^alibi_slopes: got a tensor that requires grad"):
        tessera.attention(q, k, v, quantization="fp8", alibi_slopes=torch.ones(4, requires_grad=True))


def quantised(*leading):
    return [tessera.quantize(x, heads_kv=2) for x in tensors(*leading)]


def test_autocast_leaves_8_bits_alone():
    a, b, c = quantised(1, 20)
    descales = {"q_descale": a.descale, "k_descale": b.descale, "v_descale": c.descale}
    want = tessera.attention(a.values, b.values, c.values, **descales)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = tessera.attention(a.values, b.values, c.values, **descales)
    assert torch.equal(got, want)


def test_a_compiler_traces_attention_of_8_bits():
    a, b, c = quantised(1, 20)

    def attend_8(q, k, v, q_descale, k_descale, v_descale):
        return tessera.attention(q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)

    given = (a.values, b.values, c.values, a.descale, b.descale, c.descale)
    compiled = torch.compile(attend_8, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*given), attend_8(*given))


def test_8_bits_themselves_have_no_gradient():
    a, b, c = quantised(1, 20)
    descales = {"q_descale": a.descale, "k_descale": b.descale, "v_descale": c.descale}
    with pytest.raises(ValueError, match=r"^pass: got a backward of 8-bit operands; want "):
        tessera.attention(a.values.requires_grad_(), b.values, c.values, **descales).float().sum().backward()


class TestFlashAttention3:
    def test_descales_by_head(self):
        a, b, c = quantised(2, 40)
        values, descales = (a.values, b.values, c.values), (a.descale, b.descale, c.descale)
        names = ("q_descale", "k_descale", "v_descale")
        out, lse = flash_attn_3.flash_attn_func(
            *values, causal=True, return_attn_probs=True, **dict(zip(names, descales, strict=True))
        )
        assert out.dtype is torch.bfloat16
        assert lse.shape == (2, 4, 40)
        want = attend(*(tessera.dequantize(*x[:2]) for x in (a, b, c)), causal=True)
        torch.testing.assert_close(out.float(), want, atol=0.02, rtol=0.02)

    def test_a_descale_that_is_missing_is_one_and_one_number_may_be_expanded(self):
        a, b, c = quantised(2, 40)
        two = torch.tensor(2.0).expand(2, 2)
        ones = flash_attn_3.flash_attn_func(a.values, b.values, c.values, v_descale=two)
        plain = flash_attn_3.flash_attn_func(a.values, b.values, c.values, 32**-0.5)
        torch.testing.assert_close(ones.float(), 2 * plain.float())

    def test_caches(self):
        cache = [torch.zeros((2, 64, 2, 32), dtype=torch.float8_e4m3fn) for _ in range(2)]
        a, b, c = quantised(2, 8)
        used = torch.tensor([5, 20], dtype=torch.int32)
        descales = {"q_descale": a.descale, "k_descale": b.descale, "v_descale": c.descale}
        out = flash_attn_3.flash_attn_with_kvcache(a.values, *cache, b.values, c.values, cache_seqlens=used, **descales)
        assert out.dtype is torch.bfloat16
        for row, first in enumerate(used.tolist()):
            assert torch.equal(cache[0][row, first : first + 8].view(torch.uint8), b.values[row].view(torch.uint8))

    def test_packed(self):
        q, k, v = tensors(50)
        cu = torch.tensor([0, 20, 50], dtype=torch.int32)
        a, b, c = (tessera.quantize(x, heads_kv=2, cu_seqlens=cu) for x in (q, k, v))
        descales = {"q_descale": a.descale, "k_descale": b.descale, "v_descale": c.descale}
        values = (a.values, b.values, c.values)
        out = flash_attn_3.flash_attn_varlen_func(*values, cu, cu, 30, 30, **descales)
        assert torch.equal(out, tessera.attention(*values, cu_seqlens_q=cu, cu_seqlens_k=cu, **descales))

    def test_shapes(self):
        a, b, c = quantised(2, 40)
        with pytest.raises(ValueError, match=r"^k_descale: got .*; want fp32 \(2, 2\), \(batch, heads_kv\)"):
            flash_attn_3.flash_attn_func(a.values, b.values, c.values, k_descale=torch.ones(2, 4))
