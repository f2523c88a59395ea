# SPDX-License-Identifier: Apache-2.0
"""Traced scores and masks on torch tensors: the zoo beside torch's operations and torch's flex_attention."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

import expressions_zoo  # noqa: E402
import tessera  # noqa: E402
from expressions_zoo import LENGTH  # noqa: E402

ZOO = expressions_zoo.zoo()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(dtype=torch.float32, sq=LENGTH, sk=LENGTH, batch=2):
    generator = torch.Generator().manual_seed(6)
    shapes = (batch, sq, 4, 32), (batch, sk, 2, 32), (batch, sk, 2, 24)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def gradients(tensors, call):
    out = call(*tensors)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, tensors, dout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_and_its_gradients(name, dtype):
    score, mask = ZOO[name]
    tensors = inputs(dtype)
    got = gradients(tensors, lambda *x: tessera.attention(*x, score=score, mask=mask))
    wide = [x.detach().double().requires_grad_() for x in tensors]
    want = gradients(wide, lambda *x: expressions_zoo.attention(*x, score, mask))
    plain = [x.detach().clone().requires_grad_() for x in tensors]
    theirs = gradients(plain, lambda *x: expressions_zoo.attention(*x, score, mask).to(dtype))
    for ours, exact, unfused in zip(got, want, theirs, strict=True):
        # as near to float64 as torch's own operations in this type, up to a factor
        error = (unfused.double() - exact).abs().max()
        limit = 3 * error + 4 * torch.finfo(dtype).eps * exact.abs().max()
        assert (ours.double() - exact).abs().max() <= limit


@pytest.mark.parametrize("name", ZOO)
def test_a_step_of_decoding_stands_at_the_last_key(name):
    score, mask = ZOO[name]
    q, k, v = [x.detach() for x in inputs(sq=3)]
    want = expressions_zoo.attention(q, k, v, score, mask, shift=LENGTH - 3)
    torch.testing.assert_close(tessera.attention(q, k, v, score=score, mask=mask), want, atol=1e-5, rtol=1e-5)


def test_packed_sequences_count_their_own_positions():
    score, mask = ZOO["relative bias"][0], ZOO["dilated"][1]
    q, k, v = [x.detach() for x in inputs(batch=1)]
    lengths = [0, 40, 41, LENGTH]
    cu = torch.tensor(lengths, dtype=torch.int32)
    got = tessera.attention(q[0], k[0], v[0], score=score, mask=mask, cu_seqlens_q=cu, cu_seqlens_k=cu)
    for begin, end in itertools.pairwise(lengths):
        want = expressions_zoo.attention(*(x[:, begin:end] for x in (q, k, v)), score, mask)
        torch.testing.assert_close(got[begin:end], want[0], atol=1e-5, rtol=1e-5)


def by_flex(q, k, v, score=None, block_mask=None, **options):
    """torch's, uncompiled."""
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        return flex.flex_attention(q, k, v, score, block_mask, enable_gqa=True, **options)
    finally:
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = False


@pytest.mark.parametrize("sq", [LENGTH, 77])
@pytest.mark.parametrize("name", ZOO)
def test_flex_attention_is_torchs(name, sq):
    score, mask = ZOO[name]
    q, k, v = [x.detach().transpose(1, 2) for x in inputs(sq=sq)]
    made = mask or flex.noop_mask
    theirs = flex.create_block_mask(made, None, 4, sq, LENGTH, device="cpu", BLOCK_SIZE=32)
    ours = tessera.create_block_mask(made, None, 4, sq, LENGTH)
    listed = tessera.create_block_mask(made, None, 4, sq, LENGTH)
    listed.tiles = tessera.TileList.from_function(made, listed.shape, q_offset=0, block=(32, 32))  # as for a GPU
    want, aux = by_flex(q, k, v, score, theirs, return_aux=flex.AuxRequest(lse=True))
    for block_mask in (theirs, ours, listed.to("cpu")):
        got, lse = tessera.flex_attention(q, k, v, score, block_mask, enable_gqa=True, return_lse=True)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse, aux.lse, atol=1e-5, rtol=1e-5)


def test_flex_attention_has_gradients_and_the_scale():
    tensors = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs()]
    either = tessera.or_masks(ZOO["global"][1], ZOO["document"][1])
    mask = tessera.create_block_mask(tessera.and_masks(ZOO["causal"][1], either), 2, None, LENGTH, LENGTH)
    got = gradients(tensors, lambda *x: tessera.flex_attention(*x, None, mask, 0.3, True))

    def unfused(q, k, v):
        q = q * (0.3 * 32**0.5)
        return expressions_zoo.attention(*(x.transpose(1, 2) for x in (q, k, v)), None, mask.mask_mod).transpose(1, 2)

    def sees(b, h, q, k):
        return (q >= k) & ((k < 8) | (abs(q - k) <= 16) | (q // 37 == k // 37))

    mask.mask_mod = sees
    for ours, theirs in zip(got, gradients(tensors, unfused), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_joined_masks_of_torch_and_the_empty_ones():
    q, k, v = [x.detach().transpose(1, 2) for x in inputs()]
    plain = tessera.flex_attention(q, k, v, enable_gqa=True)
    for mask in (tessera.noop_mask, flex.noop_mask, tessera.and_masks(), flex.and_masks()):
        block_mask = tessera.create_block_mask(mask, None, None, LENGTH, LENGTH)
        torch.testing.assert_close(tessera.flex_attention(q, k, v, None, block_mask, enable_gqa=True), plain)
    nothing = tessera.create_block_mask(tessera.or_masks(), None, None, LENGTH, LENGTH)
    assert not tessera.flex_attention(q, k, v, None, nothing, enable_gqa=True).any()


def test_what_flex_attention_refuses():
    q, k, v = [x.detach().transpose(1, 2) for x in inputs()]
    mask = tessera.create_block_mask(tessera.noop_mask, 3, None, LENGTH, LENGTH)
    short = tessera.create_block_mask(tessera.noop_mask, None, None, LENGTH, LENGTH - 1)
    for call, error, words in (
        (lambda: tessera.flex_attention(q, k, v), ValueError, "enable_gqa: got False"),
        (lambda: tessera.flex_attention(q[0], k, v), ValueError, "query: got shape"),
        (lambda: tessera.flex_attention(q, k, v, None, mask, None, True), ValueError, "one of B = 3; want 1 or 2"),
        (lambda: tessera.flex_attention(q, k, v, None, short, None, True), ValueError, "149"),
        (lambda: tessera.flex_attention(q, k, v, None, "causal", None, True), TypeError, "block_mask"),
        (lambda: tessera.create_block_mask(None, 1, 1, 8, 8), TypeError, "mask_mod: got None"),
        (lambda: tessera.and_masks(3), RuntimeError, "mask_mods: got 3"),
        (
            lambda: tessera.flex_attention(q, k, v, enable_gqa=True, return_aux=flex.AuxRequest(max_scores=True)),
            NotImplementedError,
            "max_scores",
        ),
    ):
        with pytest.raises(error, match=words):
            call()


def test_the_names_and_defaults_are_torchs():
    import inspect

    for name in ("flex_attention", "create_block_mask", "and_masks", "or_masks", "noop_mask"):
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (tessera, flex))
        assert [(p.name, p.default, p.kind) for p in ours.values()] == [
            (p.name, p.default, p.kind) for p in theirs.values()
        ]


def test_compiled_calls_take_the_name_of_a_traced_function():
    score, mask = ZOO["relative bias"][0], ZOO["dilated"][1]
    names = tessera.expressions.score_of(score), tessera.expressions.mask_of(mask, False)

    def call(q, k, v):
        extras = (*names[0].tensors, *names[1].tensors)
        return tessera.attention(q, k, v, score=names[0].name, mask=names[1].name, extras=extras)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    want = gradients(inputs(), lambda *x: tessera.attention(*x, score=score, mask=mask))
    for ours, eager in zip(gradients(inputs(), compiled), want, strict=True):
        torch.testing.assert_close(ours, eager, atol=2e-6, rtol=2e-6)
    function = lambda *x: tessera.attention(*x, score=score)  # noqa: E731
    with pytest.raises(Exception, match=r"score: got a Python function under torch.compile"):
        torch.compile(function, fullgraph=True, backend="eager")(*inputs())
    broken = torch.compile(function, backend="eager")(*inputs())  # traced between two graphs
    torch.testing.assert_close(broken, function(*inputs()))


def test_explain_prints_the_steps():
    q, k, v = [x.detach() for x in inputs()]
    text = tessera.explain(q, k, v, score=ZOO["captured cap"][0], mask=ZOO["prefix"][1])
    assert "mask:           query;key;const.i 31;lt 1 2;le 1 0;or 3 4;value 5" in text
    assert "score:          score;load 0;div 0 1;tanh 2;mul 1 3;" in text


def test_the_gallery_is_what_the_zoo_gives():
    script = Path(__file__).resolve().parent.parent.parent / "bench" / "gallery.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_extras_that_are_no_tuple_are_refused_before_anyone_asks_for_their_truth():
    q, k, v = (torch.zeros(1, 20, 2, 16) for _ in range(3))
    bias = torch.zeros(20)
    name = tessera.expressions.score_of(lambda s, b, h, i, j: s + bias[j]).name
    words = r"^extras: got an array of shape \(20,\) and dtype float32; want a tuple or list of arrays"
    for extras in (bias, bias.clone().requires_grad_()):
        for options in (
            {"score": name},
            {},
            {"score": name, "mask": lambda b, h, i, j: i >= j},
            {"score": lambda *x: x[0]},
        ):
            with pytest.raises(TypeError, match=words):
                tessera.attention(q, k, v, extras=extras, **options)
