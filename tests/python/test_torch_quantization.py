# SPDX-License-Identifier: Apache-2.0
"""8-bit tensors of torch, gradients of attention with quantization=, and flash-attn 3's descales."""

from __future__ import annotations

import itertools
import re

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
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).reshape(1, 128, 1, 512)
        made = tessera.quantize(x, given=torch.ones(1, 1))
        assert made.values.dtype is torch.float8_e4m3fn
        numbers = ~x.isnan()
        assert torch.equal(made.values.float().isnan(), ~numbers)
        want = x.float().clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(made.values.view(torch.uint8)[numbers], want.view(torch.uint8)[numbers])
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).reshape(1, 1, 1, 256)
    numbers = tessera.dequantize(every, torch.ones(1, 1))
    torch.testing.assert_close(numbers, every.float(), equal_nan=True, rtol=0, atol=0)


@pytest.fixture
def flushing():
    """The processor reads subnormals of fp32 as 0."""
    if not torch.set_flush_denormal(True):
        pytest.skip("a processor that has no such mode")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("rows", [1, 60])
def test_subnormals_of_8_bits_are_none_of_fp32(flushing, dtype, rows):
    a, b, _ = quantised(1, rows)
    small = torch.arange(32, dtype=torch.uint8).view(dtype)
    v = small.expand(1, rows, 2, 32).contiguous()
    descales = {"q_descale": a.descale, "k_descale": b.descale, "v_descale": torch.ones(1, 2)}
    out = tessera.attention(a.values, b.values, v, out_dtype=torch.float32, threads=1, **descales)
    torch.testing.assert_close(out, small.float().expand(out.shape), atol=0, rtol=1e-5)


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


def dequantised(q, k, v, kind, dtype=torch.float32):
    """q, k and v as the forward saw them, rounded to `dtype`."""
    to, smooth = ("e4m3", False) if kind == "fp8" else ("int8", True)
    with torch.no_grad():
        a, b = tessera.quantize(q, to=to, heads_kv=2), tessera.quantize(k, to=to, smooth=smooth)
        c = tessera.quantize(v, to=to)
        wide = [
            tessera.dequantize(*a[:2]),
            tessera.dequantize(*b[:2], mean=b.mean),
            tessera.dequantize(*c[:2]) if kind == "fp8" else v.detach(),
        ]
    return [x.to(dtype).requires_grad_() for x in wide]


def distance(got, want):
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("result", ["sum", "transposed", "lse"])
def test_gradients_of_results_come_in_any_strides(kind, result):
    q, k, v = tensors(2, 37, grad=True)
    weights = torch.randn((2, 37, 32, 4), generator=torch.Generator().manual_seed(5))

    def loss(out, lse):
        return {"sum": out.sum(), "transposed": (out.transpose(-1, -2) * weights).sum(), "lse": lse.sum()}[result]

    loss(*tessera.attention(q, k, v, quantization=kind, return_lse=True)).backward()
    wide = dequantised(q, k, v, kind)
    loss(*tessera.attention(*wide, return_lse=True)).backward()
    for x, y in zip((q, k, v), wide, strict=True):
        torch.testing.assert_close(x.grad, y.grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_gradients_of_16_bits_are_those_of_what_the_forward_saw(kind):
    """Scores of ±16 make rounding q and k to bf16 once more visible in the gradient: 4%."""
    q, k, v = tensors(2, 200)
    q, k, v = [x.bfloat16().requires_grad_() for x in (q * 4, k * 4, v)]
    weights = torch.randn(q.shape, generator=torch.Generator().manual_seed(5))
    (tessera.attention(q, k, v, quantization=kind).float() * weights).sum().backward()
    wide = dequantised(q, k, v, kind)
    (attend(wide[0], wide[1], wide[2].float()) * weights.bfloat16().float()).sum().backward()
    for x, y in zip((q, k, v), wide, strict=True):
        assert x.grad.dtype is torch.bfloat16
        assert distance(x.grad, y.grad) < 0.005


def test_where_no_kernel_takes_fp32_gradients_are_those_of_rounded_operands(monkeypatch):
    from tessera.torch import quantized

    monkeypatch.setattr(quantized, "_takes_fp32", lambda _: False)
    q, k, v = [(x * 4).bfloat16().requires_grad_() for x in tensors(2, 200)]
    weights = torch.randn(q.shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    out, lse = tessera.attention(q, k, v, quantization="fp8", return_lse=True)
    ((out * weights).sum() + lse.sum()).backward()
    wide = dequantised(q, k, v, "fp8", torch.bfloat16)
    out, lse = tessera.attention(*wide, return_lse=True)
    ((out * weights).sum() + lse.sum()).backward()
    for x, y in zip((q, k, v), wide, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


def test_where_keys_are_split_the_residual_is_not_kept(monkeypatch):
    """As on a GPU, whose forward does not have it then; without quantization it is not kept either."""
    from tessera.torch import quantized

    q, k, v = [(x * 4).bfloat16().requires_grad_() for x in tensors(2, 200)]
    weights = torch.randn(q.shape, generator=torch.Generator().manual_seed(5)).bfloat16()

    def gradients(**options):
        out = tessera.attention(q, k, v, quantization="fp8", **options)
        return torch.autograd.grad(out, (q, k, v), weights)

    assert not torch.equal(gradients(wishes="splits=2")[0], gradients(wishes="splits=2", keep_residual=False)[0])
    monkeypatch.setattr(quantized, "_takes_fp32", lambda _: False)
    for wishes in ("", "splits=2"):
        kept, without = gradients(wishes=wishes), gradients(wishes=wishes, keep_residual=False)
        assert torch.equal(kept[0], without[0]) == (wishes != "")


def test_wishes_for_tiles_are_the_forward_s(monkeypatch):
    """As without quantization."""
    from tessera import _execute

    own, wishes = _execute.plan_for, []

    def planned(kind, features, *more):
        wishes.append((kind, features.wishes))
        return own(kind, features, *more)

    monkeypatch.setattr(_execute, "plan_for", planned)
    q, k, v = tensors(2, 200, grad=True)
    tessera.attention(q, k, v, quantization="fp8", wishes="splits=2 tile_kv=8").sum().backward()
    assert wishes == [(_execute.BACKWARD, "")]


def options_by_shape_in_errors():
    return {
        "IntTensor [3]": ("cu_seqlens_q", torch.tensor([0, 20, 50], dtype=torch.int32)),
        "IntTensor [2]": ("seqused_k", torch.tensor([20, 30], dtype=torch.int32)),
        "FloatTensor [4]": ("alibi_slopes", torch.ones(4)),
    }


@pytest.mark.parametrize("written", options_by_shape_in_errors())
def test_an_option_that_is_written_to_before_the_backward_is_noticed(written):
    q, k, v = tensors(50, grad=True)
    options = dict(options_by_shape_in_errors().values())
    options["cu_seqlens_k"] = options["cu_seqlens_q"].clone()
    one, other = (tessera.attention(q, k, v, quantization="fp8", **options) for _ in range(2))
    one.sum().backward()
    assert q.grad.isfinite().all()
    options[options_by_shape_in_errors()[written][0]].mul_(1)
    with pytest.raises(RuntimeError, match=rf"inplace operation: \[torch\.{re.escape(written)}\] is at version 1"):
        other.sum().backward()


def test_arrays_of_another_library_beside_torchs_are_refused_by_name():
    for name, place, grad in itertools.product(("k", "v", "sinks"), (True, False), (True, False)):
        q, k, v = tensors(2, 20)
        given = {"q": q.requires_grad_(grad), "k": k, "v": v, "sinks": torch.zeros(4)}
        given[name] = given[name].numpy()
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=place),
            pytest.raises(
                TypeError, match=rf"^{name.rstrip('s')}: got numpy.ndarray; want a torch.Tensor, as q is one"
            ),
        ):
            tessera.attention(**given, quantization="fp8")


def test_tokens_behind_the_last_sequence_have_descales_of_no_one():
    q, k, v = tensors(100, grad=True)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    out = tessera.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, quantization="fp8", descale=2)
    out[:4].sum().backward()
    assert q.grad[:4].isfinite().all()
    one = tessera.attention(*(x.detach()[None, :4] for x in (q, k, v)), quantization="fp8", descale=2)
    assert torch.equal(out[:4], one[0])


def test_there_are_first_derivatives_only():
    q, k, v = tensors(1, 20, grad=True)
    out = tessera.attention(q, k, v, quantization="fp8")
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.sum().backward()


def test_autocast_decides_of_what_is_quantised():
    q, k, v = tensors(1, 20, grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = tessera.attention(q, k, v, quantization="fp8")
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, tessera.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), quantization="fp8"))
    out.sum().backward()
    assert q.grad.dtype is torch.float32


def test_a_compiler_makes_a_graph_of_what_stands_beside():
    q, k, v = tensors(1, 20)

    def attend_8(q, k, v):
        made = tessera.quantize(k)
        out = tessera.attention(q * 2, k, v, quantization="int8")
        return out + 1, tessera.dequantize(made.values, made.descale) + 1

    compiled = torch.compile(attend_8, backend="eager")
    for got, want in zip(compiled(q, k, v), attend_8(q, k, v), strict=True):
        assert torch.equal(got, want)
    x = q.clone().requires_grad_()
    torch.compile(lambda x: tessera.attention(x, k, v, quantization="fp8").sum(), backend="eager")(x).backward()
    assert x.grad.abs().sum() > 0
    parts, lses = torch.stack([q, q]), torch.zeros(2, 1, 4, 20)
    merged = torch.compile(lambda parts, lses: tessera.combine(parts, lses)[0], backend="eager")(parts, lses)
    torch.testing.assert_close(merged, q)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
        torch.compile(lambda q: tessera.quantize(q).values, backend="eager", fullgraph=True)(q)


@pytest.mark.parametrize("seed", [None, (None, 5)])
def test_a_seed_that_is_drawn_is_that_of_both_passes(seed):
    q, k, v = tensors(2, 37, grad=True)
    options = {"dropout": 0.4, "seed": seed, "quantization": "int8"}
    torch.manual_seed(8)
    out = tessera.attention(q, k, v, **options)
    torch.manual_seed(8)
    with torch.no_grad():
        assert torch.equal(out, tessera.attention(q, k, v, **options))
        assert not torch.equal(out, tessera.attention(q, k, v, **options))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out * weights).sum().backward()  # out is linear in v, which stays as it is
    torch.testing.assert_close((v.grad * v).sum(), (out * weights).sum())


def test_what_has_no_gradient_says_so():
    q, k, v = tensors(1, 20, grad=True)
    with pytest.raises(ValueError, match="quantize"):
        tessera.quantize(q)
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
            keys, values = (
                tessera.dequantize(x[row : row + 1], y.descale[row : row + 1])[:, : first + 8]
                for x, y in zip(cache, (b, c), strict=True)
            )
            queries = tessera.dequantize(a.values[row : row + 1], a.descale[row : row + 1])
            torch.testing.assert_close(out[row : row + 1].float(), attend(queries, keys, values), atol=0.02, rtol=0.02)

    def test_descales_are_not_read_beside_other_types(self):
        q, k, v = tensors(2, 40)
        q_descale = torch.full((2, 2), 3.0)
        descales = {"q_descale": q_descale, "k_descale": q_descale, "v_descale": torch.ones(1)}
        assert torch.equal(flash_attn_3.flash_attn_func(q, k, v, **descales), flash_attn_3.flash_attn_func(q, k, v))

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
