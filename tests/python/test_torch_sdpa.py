# SPDX-License-Identifier: Apache-2.0
"""sdpa_replacement: the same results as torch's scaled_dot_product_attention, and a report of what was not replaced."""

from __future__ import annotations

import math
import threading

import pytest

torch = pytest.importorskip("torch")

import torch_textbook as textbook  # noqa: E402
from tessera.torch import sdpa_replacement  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as imported_before  # noqa: E402

B, H, SQ, SK, D = 2, 4, 33, 47, 32


def tensors(dtype=torch.float32, hkv=H, sq=SQ, sk=SK, requires_grad=False):
    generator = torch.Generator().manual_seed(1)
    shapes = ((B, H, sq, D), (B, hkv, sk, D), (B, hkv, sk, D))
    made = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
    return [x.requires_grad_(requires_grad) for x in made]


def below(diagonal, sq=SQ, sk=SK):
    return torch.ones(sq, sk, dtype=torch.bool).tril(diagonal)


def keys_of(*lengths, sk=SK):
    return (torch.arange(sk) < torch.tensor(lengths)[:, None])[:, None, None]


BAND = below(5) & ~below(-9)
REPLACED = {
    "plain": {},
    "top left causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "causal mask": {"attn_mask": below(0)},
    "bottom right mask": {"attn_mask": below(SK - SQ)},
    "window": {"attn_mask": BAND},
    "window as float": {"attn_mask": torch.zeros(SQ, SK).masked_fill(~BAND, -torch.inf)},
    "expanded over batch and heads": {"attn_mask": BAND.expand(B, H, SQ, SK)},
    "padding": {"attn_mask": keys_of(11, SK)},
    "padding, all": {"attn_mask": keys_of(0, 29)},
    "padding of every row": {"attn_mask": keys_of(11, SK).expand(B, 1, SQ, SK).clone()},
    "causal and padding": {"attn_mask": below(0) & keys_of(11, SK)},
    "padded queries": {"attn_mask": keys_of(20, 33) & keys_of(20, 33, sk=SQ).transpose(2, 3)},
    "nothing visible": {"attn_mask": torch.zeros(SQ, SK, dtype=torch.bool)},
    "one key for all rows": {"attn_mask": torch.ones(SQ, 1, dtype=torch.bool)},
}


def oracle_and_plain(inputs, options, dout):
    """Results of torch's own kernels: in float64, and those in the inputs' dtype in several orders of keys."""

    def of(dtype, order=None):
        moved = [x.detach().to(dtype).requires_grad_() for x in inputs]
        q, k, v = moved if order is None else (moved[0], moved[1][:, :, order], moved[2][:, :, order])
        words = {
            name: x.to(dtype) if name == "attn_mask" and x.is_floating_point() else x for name, x in options.items()
        }
        if order is not None:
            mask = words.pop("attn_mask", None)
            if words.pop("is_causal", False):
                mask = below(0)
            if mask is not None:
                words["attn_mask"] = mask.expand(*mask.shape[:-1], SK)[..., order]
        out = imported_before(q, k, v, **words)
        return [out.detach(), *torch.autograd.grad(out, moved, dout.to(dtype))]

    orders = textbook.orders(SK)
    return of(torch.float64), lambda run: of(inputs[0].dtype, orders(run))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", REPLACED)
def test_same_function_as_torch(name, dtype):
    inputs = tensors(dtype, requires_grad=True)
    options = {
        key: x.to(dtype) if key == "attn_mask" and x.is_floating_point() else x for key, x in REPLACED[name].items()
    }
    with sdpa_replacement(strict=True) as report:
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, **options)
    assert (report.calls, report.replaced, report.fallbacks) == (1, 1, {})
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    got = [out.detach(), *torch.autograd.grad(out, inputs, dout)]
    oracle, plain = oracle_and_plain(inputs, options, dout)
    for i, what in enumerate(("out", "dq", "dk", "dv")):
        textbook.judge(f"{name}: {what}", got[i], oracle[i], lambda run, i=i: plain(run)[i])


@pytest.mark.parametrize("left_padded", [False, True])
def test_decode_with_padding(left_padded):
    """One query row: keys from a start of each sequence to its end."""
    q, k, v = tensors(sq=1)
    mask = keys_of(11, 40)
    if left_padded:
        mask = mask & ~keys_of(3, 0)
    with sdpa_replacement(strict=True):
        out = imported_before(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out, imported_before(q, k, v, attn_mask=mask))


@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_queries(is_causal):
    q, k, v = tensors(hkv=2)
    with sdpa_replacement(strict=True):
        out = imported_before(q, k, v, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(out, imported_before(q, k, v, is_causal=is_causal, enable_gqa=True))


def test_three_dimensions_are_one_head():
    q, k, v = (x[:, 0] for x in tensors())
    for mask in (None, below(2), (below(2) & keys_of(11, SK)[:, 0])):
        with sdpa_replacement(strict=True):
            out = imported_before(q, k, v, mask)
        torch.testing.assert_close(out, imported_before(q, k, v, mask))


def left_padding():
    return ~keys_of(3, 0)


def alibi():
    return -0.1 * (torch.arange(SQ)[:, None] - torch.arange(SK)).abs()


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("dtype torch.float64", lambda o: o | {"dtype": torch.float64}),
        ("a float mask of values other than 0 and -inf", lambda o: o | {"attn_mask": alibi()}),
        ("a mask that requires grad", lambda o: o | {"attn_mask": torch.zeros(SQ, SK).requires_grad_()}),
        ("a mask that differs between heads", lambda o: o | {"attn_mask": torch.rand(B, H, SQ, SK) < 0.5}),
        ("a mask that is neither a window nor lengths", lambda o: o | {"attn_mask": torch.rand(SQ, SK) < 0.5}),
        ("a mask that hides leading keys from every row", lambda o: o | {"attn_mask": left_padding()}),
        ("head dims 12 and 32", lambda o: o | {"d": 12}),
        ("a last dimension that is not contiguous", lambda o: o | {"transposed": True}),
        ("attn_mask together with is_causal", lambda o: o | {"attn_mask": below(3), "is_causal": True}),
        ("batch sizes that broadcast", lambda o: o | {"one_batch": True}),
        ("no heads", lambda o: o | {"heads": 0}),
        ("dropout_p 1.0", lambda o: o | {"dropout_p": 1.0}),
        ("scale inf", lambda o: o | {"scale": math.inf}),
        ("scale 1e\\+300", lambda o: o | {"scale": 1e300}),
    ],
)
def test_what_is_not_replaced_goes_to_torch(reason, change):
    options = change({})
    q, k, v = tensors(options.pop("dtype", torch.float32))
    d, heads = options.pop("d", D), options.pop("heads", H)
    q, k, v = q[:, :heads, :, :d], k[:, :heads, :, :d], v[:, :heads]
    if options.pop("transposed", False):
        q = q.mT.contiguous().mT
    if options.pop("one_batch", False):
        k, v = k[:1], v[:1]
    with sdpa_replacement() as report:
        out = imported_before(q, k, v, **options)
    assert (report.calls, report.replaced, report.fallbacks) == (1, 0, {reason.replace("\\", ""): 1})
    torch.testing.assert_close(out, imported_before(q, k, v, **options), rtol=0, atol=0, equal_nan=True)
    with sdpa_replacement(strict=True) as report, pytest.raises(NotImplementedError, match=reason):
        imported_before(q, k, v, **options)


@pytest.mark.parametrize("options", [{"dropout_p": 1.0}, {"scale": math.inf}, {"heads": 0}])
def test_compiled_calls_that_are_torchs(options):
    heads = options.pop("heads", H)
    q, k, v = (x[:, :heads] for x in tensors())
    with sdpa_replacement() as report:
        out = torch.compile(lambda *x: imported_before(*x, **options), fullgraph=True, backend="eager")(q, k, v)
    assert report.replaced == 0 and sum(report.fallbacks.values()) == 1
    torch.testing.assert_close(out, imported_before(q, k, v, **options), equal_nan=True)


def test_errors_of_torch_stay_those_of_torch():
    q, k, v = tensors()
    for wrong in ((q, k[..., :8], v), (q[:, :3], k, v)):
        with pytest.raises(RuntimeError) as own:
            imported_before(*wrong)
        with sdpa_replacement(), pytest.raises(RuntimeError) as through_us:
            imported_before(*wrong)
        assert str(through_us.value) == str(own.value)


def test_report_in_words():
    q, k, v = tensors()
    with sdpa_replacement() as report:
        imported_before(q, k, v)
        for _ in range(2):
            imported_before(q, k, v, attn_mask=alibi())
    assert str(report).splitlines() == [
        "scaled_dot_product_attention: 1 of 3 calls by Tessera",
        "  2 by torch: a float mask of values other than 0 and -inf",
    ]


def test_a_mask_that_changes_in_place_is_read_again():
    q, k, v = tensors()
    mask = below(0)
    with sdpa_replacement() as report:
        first = imported_before(q, k, v, attn_mask=mask)
        mask[0, SK - 1] = True
        second = imported_before(q, k, v, attn_mask=mask)
    assert report.replaced == 1 and list(report.fallbacks) == ["a mask that is neither a window nor lengths"]
    torch.testing.assert_close(first, imported_before(q, k, v, attn_mask=below(0)))
    torch.testing.assert_close(second, imported_before(q, k, v, attn_mask=mask))


def test_dropout_is_repeatable_and_unbiased():
    q, k, v = tensors()
    with sdpa_replacement(strict=True):
        torch.manual_seed(1)
        first, other = (imported_before(q, k, v, dropout_p=0.5) for _ in range(2))
        torch.manual_seed(1)
        assert torch.equal(first, imported_before(q, k, v, dropout_p=0.5))
        assert not torch.equal(first, other)
        mean = torch.stack([imported_before(q, k, v, dropout_p=0.5) for _ in range(200)]).mean(0)
    # Of 200 draws with p = 1/2 the mean's deviation is sqrt(sum P² v²) / sqrt(200), P about 1/47: 5 of them below 0.1.
    assert (mean - imported_before(q, k, v)).abs().max() < 0.25


def test_only_inside_of_the_block_and_in_its_thread():
    q, k, v = tensors()
    with sdpa_replacement() as report:
        other = threading.Thread(target=imported_before, args=(q, k, v))
        other.start()
        other.join()
        with pytest.raises(KeyError), sdpa_replacement() as inner:
            imported_before(q, k, v)
            raise KeyError
    imported_before(q, k, v)
    assert (report.calls, inner.calls) == (0, 1)


@pytest.mark.parametrize("mask", [None, "causal"])
def test_multihead_attention_module(mask):
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    x = torch.randn(2, 10, 64)
    options = {"need_weights": False}
    if mask is not None:
        options |= {"attn_mask": torch.nn.Transformer.generate_square_subsequent_mask(10), "is_causal": True}
    wanted = module(x, x, x, **options)[0]
    wanted_grads = torch.autograd.grad(wanted.square().sum(), list(module.parameters()))
    with sdpa_replacement(strict=True) as report:
        got = module(x, x, x, **options)[0]
    assert report.replaced == 1
    torch.testing.assert_close(got, wanted)
    grads = torch.autograd.grad(got.square().sum(), list(module.parameters()))
    for a, b in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_autocast_casts_as_torch_does():
    q, k, v = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = imported_before(q, k.bfloat16(), v)
        with sdpa_replacement(strict=True):
            got = imported_before(q, k.bfloat16(), v)
    assert got.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_compiled_code_is_replaced_too():
    q, k, v = tensors()

    def call(q, k, v):
        return imported_before(q, k, v, is_causal=True) * 2

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with sdpa_replacement(strict=True) as report:
        torch.testing.assert_close(compiled(q, k, v), call(q, k, v))
    assert report.replaced == 2
    with sdpa_replacement() as report:
        masked = torch.compile(lambda *x: imported_before(*x, attn_mask=below(0)), backend="aot_eager")(q, k, v)
    assert report.fallbacks == {"a mask under torch.compile": 1}
    torch.testing.assert_close(masked, imported_before(q, k, v, attn_mask=below(0)))
