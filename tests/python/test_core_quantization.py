# SPDX-License-Identifier: Apache-2.0
"""`quantize`, `dequantize` and attention of 8-bit operands on numpy arrays: against ml_dtypes, formulas, bad input."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import tessera

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "int8": np.int8}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def attend(q, k, v, causal=False):
    """In double."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    scores = np.einsum("bihd,bjhd->bhij", q, k.repeat(group, 2)) * q.shape[-1] ** -0.5
    if causal:
        scores[..., ~np.tri(q.shape[1], k.shape[1], k.shape[1] - q.shape[1], dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    lse = np.log(weights.sum(-1)) + scores.max(-1)
    out = np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v.repeat(group, 2))
    return out, lse


@pytest.mark.parametrize("to", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_every_half_rounds_as_ml_dtypes(to, dtype):
    x = np.arange(65536, dtype=np.uint16).view(dtype).reshape(1, 128, 1, 512)
    values = tessera.quantize(x, to=to, given=np.ones((1, 1), np.float32)).values
    wide = x.astype(np.float32)
    with np.errstate(invalid="ignore"):
        want = np.clip(wide, -LARGEST[to], LARGEST[to]).astype(TYPES[to])
    assert np.array_equal(np.isnan(values.astype(np.float32)), np.isnan(wide))
    numbers = ~np.isnan(wide)
    assert np.array_equal(values.view(np.uint8)[numbers], want.view(np.uint8)[numbers])


def test_int8_rounds_to_even_and_saturates():
    x = np.array([0.5, 1.5, -2.5, 126.5, 127.49, 127.5, -127.5, -300, np.nan, np.inf], np.float32)
    made = tessera.quantize(x.reshape(1, 1, 1, 10), to="int8", given=np.ones((1, 1), np.float32), saturated=True)
    assert made.values.ravel().tolist() == [0, 2, -2, 126, 127, 127, -127, -127, 0, 127]
    assert made.saturated.tolist() == [5]


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("descale", ["head", 16, "token"])
def test_the_largest_is_the_end_of_the_range(rng, to, descale):
    x = normal(rng, 2, 50, 4, 24)
    x[0, 3, 1] = 0
    made = tessera.quantize(x, to=to, descale=descale, heads_kv=2, saturated=True)
    assert made.values.dtype == TYPES[to]
    assert made.saturated.tolist() == [0]
    wide = np.abs(x)
    if descale == "head":
        want = wide.reshape(2, 50, 2, 48).max((1, 3)) / LARGEST[to]
    elif descale == "token":
        want = wide.max(-1).swapaxes(1, 2) / LARGEST[to]
        want[0, 1, 3] = 1  # of zeros
    else:
        padded = np.pad(wide, ((0, 0), (0, 14), (0, 0), (0, 0)))
        want = padded.reshape(2, 4, 16, 4, 24).max((2, 4)).swapaxes(1, 2) / LARGEST[to]
    np.testing.assert_allclose(made.descale, want, rtol=1e-6)
    back = tessera.dequantize(made.values, made.descale, grain=descale)
    relative = {"e4m3": 2**-4, "e5m2": 2**-3, "int8": 0.5 / 127}[to]
    bound = relative * (x.max() if to == "int8" else np.abs(x)) + (0.01 if to != "int8" else 1e-5)
    assert (np.abs(back - x) <= bound).all()


def test_a_rotation_keeps_products_and_spreads_outliers(rng):
    q, k = normal(rng, 1, 40, 2, 96), normal(rng, 1, 60, 2, 96)
    k[..., 5] *= 40
    turned = [tessera.dequantize(*made[:2], grain="token") for made in turn(q, k, seed=12)]
    exact = np.einsum("bihd,bjhd->bhij", q, k)
    got = np.einsum("bihd,bjhd->bhij", *turned)
    assert np.linalg.norm(got - exact) < 0.02 * np.linalg.norm(exact)
    assert np.abs(turned[1]).max() < 0.6 * np.abs(k).max()
    other = tessera.dequantize(*turn(q, k, seed=13)[0][:2], grain="token")
    assert not np.array_equal(turned[0], other)


def turn(q, k, seed):
    return [tessera.quantize(x, to="int8", descale="token", hadamard=True, seed=seed) for x in (q, k)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("descale", ["head", 32, "token"])
@pytest.mark.parametrize("kind", ["e4m3", "int8"])
def test_attention_of_quantised_values(rng, kind, descale, causal):
    q, k, v = normal(rng, 2, 50, 4, 32), normal(rng, 2, 70, 2, 32) + 3, normal(rng, 2, 70, 2, 40)
    a = tessera.quantize(q, to=kind, descale=descale, heads_kv=2)
    b = tessera.quantize(k, to=kind, descale=descale, smooth=kind == "int8")
    options = {"q_descale": a.descale, "k_descale": b.descale, "k_mean": b.mean, "descale": descale}
    wide_v = v
    if kind == "e4m3":
        c = tessera.quantize(v, descale=descale)
        options["v_descale"], v = c.descale, c.values
        wide_v = tessera.dequantize(c.values, c.descale, grain=descale)
    out, lse = tessera.attention(a.values, b.values, v, causal=causal, return_lse=True, out_dtype="float32", **options)
    wide_q = tessera.dequantize(a.values, a.descale, grain=descale)
    wide_k = tessera.dequantize(b.values, b.descale, grain=descale, mean=b.mean)
    want, want_lse = attend(wide_q, wide_k, wide_v, causal)
    np.testing.assert_allclose(out, want, atol=2e-5)
    np.testing.assert_allclose(lse, want_lse, atol=2e-5)


@pytest.mark.parametrize("descale", ["head", 16, "token"])
def test_packed_sequences_are_single_ones(rng, descale):
    lengths = [33, 0, 20]
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    q, k, v = normal(rng, 53, 4, 16), normal(rng, 53, 2, 16), normal(rng, 53, 2, 16)
    packed = tessera.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, quantization="int8", descale=descale)
    for begin, end in pairwise(cu):
        one = tessera.attention(*(x[None, begin:end] for x in (q, k, v)), quantization="int8", descale=descale)
        assert np.array_equal(one[0], packed[begin:end])
    made = tessera.quantize(k, to="int8", descale=descale, cu_seqlens=cu)
    back = tessera.dequantize(made.values, made.descale, grain=descale, cu_seqlens=cu)
    assert np.abs(back - k).max() <= np.abs(k).max() / 254 + 1e-6


def test_pages_of_8_bits_under_queries_of_16(rng):
    q = normal(rng, 2, 3, 4, 32).astype(ml_dtypes.bfloat16)
    k, v = normal(rng, 6, 16, 2, 32), normal(rng, 6, 16, 2, 32)
    a, b = tessera.quantize(k, descale="token"), tessera.quantize(v, descale="token")
    table = np.array([[3, 0, 5], [1, 4, 2]], np.int32)
    used = np.array([40, 17], np.int32)
    source = tessera.KeySource(a.values, b.values, seqused=used, page_table=table)
    out = tessera.attention(q, source, k_descale=a.descale, v_descale=b.descale, descale="token")
    assert out.dtype == ml_dtypes.bfloat16
    for sequence in range(2):
        rows = [
            tessera.dequantize(x.values, x.descale, grain="token")[table[sequence]].reshape(1, 48, 2, 32)
            for x in (a, b)
        ]
        want, _ = attend(q[sequence][None], *(x[:, : used[sequence]] for x in rows))
        np.testing.assert_allclose(out[sequence][None].astype(np.float32), want, atol=0.01)


@pytest.mark.parametrize(("kind", "limit"), [("fp8", 0.05), ("int8", 0.02)])
def test_attention_quantises_by_itself(rng, kind, limit):
    q, k, v = (normal(rng, 1, 200, 2, 64) for _ in range(3))
    out, lse = tessera.attention(q, k, v, quantization=kind, return_lse=True)
    want, want_lse = attend(q, k, v)
    assert np.linalg.norm(out - want) < limit * np.linalg.norm(want)
    assert out.dtype == np.float32
    np.testing.assert_allclose(lse, want_lse, atol=0.1)
    again = tessera.attention(q, k, v, quantization=kind, out=np.empty_like(out))
    assert np.array_equal(again, out)


def test_rows_behind_the_last_sequence_count_as_no_ones(rng):
    x = normal(rng, 100, 2, 16)
    for cu in (np.array([0, 4], np.int32), np.array([0], np.int32)):
        for grain in ("head", 16, "token"):
            made = tessera.quantize(x, cu_seqlens=cu, descale=grain)
            back = tessera.dequantize(made.values, made.descale, grain=grain, cu_seqlens=cu)
            assert back.shape == x.shape
            assert np.abs(back - x)[: cu[-1]].max(initial=0) < 0.2


def test_a_descale_may_be_one_number_expanded(rng):
    x = normal(rng, 2, 9, 2, 16)
    one = np.broadcast_to(np.float32(0.01), (2, 2))
    a = tessera.quantize(x, given=one)
    assert np.array_equal(a.values.view(np.uint8), tessera.quantize(x, given=one.copy()).values.view(np.uint8))
    values = (a.values,) * 3
    out = tessera.attention(*values, q_descale=one, k_descale=one, v_descale=one)
    assert np.array_equal(out, tessera.attention(*values, **dict.fromkeys(DESCALES, one.copy())))


DESCALES = ("q_descale", "k_descale", "v_descale")


def test_a_type_by_any_name(rng):
    x = normal(rng, 1, 9, 2, 16)
    for to in (ml_dtypes.float8_e4m3fn, "float8_e4m3fn", np.int8, np.dtype(np.int8)):
        assert tessera.quantize(x, to=to).values.dtype == np.dtype(to)


class TestRefusals:
    @pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
    @pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
    def test_descales_that_are_none(self, rng, name, bad):
        made = [tessera.quantize(normal(rng, 2, 9, 2, 16)) for _ in range(3)]
        options = {f"{x}_descale": each.descale.copy() for x, each in zip("qkv", made, strict=True)}
        options[name][1, 1] = bad
        with pytest.raises(ValueError, match=rf"^{name}: got \[1, 1\] = .*; want a positive, finite number"):
            tessera.attention(*(each.values for each in made), **options)
        del options[name]
        with pytest.raises(ValueError, match=rf"^{name}: got unbound; want fp32"):
            tessera.attention(*(each.values for each in made), **options)

    def test_descales_that_no_one_asked_for(self, rng):
        x = normal(rng, 1, 9, 2, 16)
        with pytest.raises(ValueError, match="k_descale"):
            tessera.attention(x, x, x, k_descale=np.ones((1, 2), np.float32))
        with pytest.raises(ValueError, match="quantization"):
            tessera.attention(x, x, x, descale="token")
        with pytest.raises(ValueError, match=r"^k_descale: got .* beside quantization='fp8'"):
            tessera.attention(x, x, x, quantization="fp8", k_descale=np.ones((1, 2), np.float32))

    def test_mixtures(self, rng):
        x = normal(rng, 1, 9, 2, 16)
        a, b = tessera.quantize(x), tessera.quantize(x, to="int8")
        with pytest.raises(ValueError, match=r"^k_type: got q e4m3, k int8, v e4m3; want "):
            tessera.attention(a.values, b.values, a.values)
        with pytest.raises(ValueError, match=r"^k_type: got q fp32, k int8, v int8; want "):
            tessera.attention(x, b.values, b.values)

    def test_words(self, rng):
        x = normal(rng, 1, 9, 2, 16)
        with pytest.raises(ValueError, match=r"^quantization: got 'fp4'; want None, 'fp8' or 'int8'"):
            tessera.attention(x, x, x, quantization="fp4")
        with pytest.raises(ValueError, match=r"^descale: got 'row'; want "):
            tessera.attention(x, x, x, quantization="fp8", descale="row")
        with pytest.raises(ValueError, match=r"^to: got 'fp8'; want "):
            tessera.quantize(x, to="fp8")
        with pytest.raises(ValueError, match=r"^x: got 3 dimensions"):
            tessera.quantize(x[0])
        with pytest.raises(ValueError, match=r"^quantization: got 'fp8'; want None"):
            tessera.explain(x, x, x, quantization="fp8")
        with pytest.raises(NotImplementedError, match=r"^quantization: got keys of a KeySource"):
            tessera.attention(x, tessera.KeySource(x, x), quantization="fp8")

    def test_errors_name_the_arguments(self, rng):
        x = normal(rng, 1, 9, 2, 16)
        cu, long = np.array([1, 9], np.int32), np.array([12], np.int32)
        ones = np.ones((1, 2), np.float32)
        for options, message in (
            ({"given": 0 * ones}, r"^given: got \[0, 0\] = 0"),
            ({"given": np.ones((1, 3), np.float32)}, r"^given: got fp32 \(1, 3\) .*; want fp32 \(1, 2\)"),
            ({"seqused": long}, r"^seqused: got \[0\] = 12; want 0 to 9"),
            ({"seed": -1}, r"^seed: got -1; want 0 to below 2\^64"),
            ({"seed": 2**64}, r"^seed: got 18446744073709551616; want 0 to below 2\^64"),
            ({"to": np.float32}, r"^to: got .*; want 'e4m3', 'e5m2' or 'int8'"),
        ):
            with pytest.raises(ValueError, match=message):
                tessera.quantize(x, **options)
        with pytest.raises(ValueError, match=r"^cu_seqlens: got \[0\] = 1; want 0"):
            tessera.quantize(x[0], cu_seqlens=cu)
        with pytest.raises(ValueError, match=r"^x: got int32; want fp32"):
            tessera.quantize(x.astype(np.int32))

    def test_errors_of_attention_name_its_arguments(self, rng):
        x = normal(rng, 1, 9, 2, 16)
        for arrays, message in (
            ((x[0], x, x), r"^q: got 3 dimensions, shape \(9, 2, 16\); want \(batch, seqlen, heads, dim\)"),
            ((x, x[0, 0, 0], x), r"^k: got 1 dimensions"),
            ((x, x, x[..., ::2]), r"^v: got stride 2"),
            ((x, x.astype(np.int32), x), r"^k: got int32"),
            ((x[:, :, [0, 1, 0]], x, x), r"^k: got 2 heads; want a divisor of q's 3"),
        ):
            with pytest.raises(ValueError, match=message):
                tessera.attention(*arrays, quantization="fp8")
        with pytest.raises(ValueError, match=r"^seqused_k: got \[0\] = 12"):
            tessera.attention(x, x, x, quantization="fp8", seqused_k=np.array([12], np.int32))

    def test_what_does_not_belong_together(self, rng):
        made = tessera.quantize(normal(rng, 2, 9, 2, 16))
        values, descale = made.values, made.descale
        for arguments, options, message in (
            ((values, descale), {"grain": "row"}, r"^grain: got 'row'; want 'head', 'token' or a number of rows"),
            ((values, descale), {"grain": 0}, r"^grain: got 0; want"),
            ((values, descale), {"grain": "token"}, r"^descale: got .*; want fp32 \(2, 2, 9\)"),
            ((values, descale), {"grain": 4}, r"^descale: got .*; want fp32 \(2, 2, 3\)"),
            ((values, descale[:1]), {}, r"^descale: got .*; want fp32 \(2, 2\)"),
            ((values, descale.astype(np.float64)), {}, r"^descale: got .*float64; want fp32 \(2, 2\)"),
            ((values, descale), {"mean": descale}, r"^mean: got .*; want fp32 \(2, 2, 16\)"),
            ((values[0], descale), {}, r"^values: got .*; want \(batch, seqlen, heads, dim\)"),
            ((descale[:, :, None, None], descale), {}, r"^values: got .*; want e4m3, e5m2 or int8"),
        ):
            with pytest.raises(ValueError, match=message):
                tessera.dequantize(*arguments, **options)
