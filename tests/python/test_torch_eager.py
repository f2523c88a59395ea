# SPDX-License-Identifier: Apache-2.0
"""Eager calls, which go past torch's dispatcher and are kept by their options: results are the operators'."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
from tessera import _core, _kept  # noqa: E402
from tessera._arguments import parse  # noqa: E402
from tessera.compat import flash_attn_2  # noqa: E402
from tessera.compat.flash_attn_2 import flash_attn_func  # noqa: E402
from tessera.torch import operators  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch_modes import Seen  # noqa: E402


def qkv(requires_grad=False, dtype=torch.float32, heads=2):
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(2, 12, h, 16, generator=generator).to(dtype) for h in (4, heads, heads)]
    return [x.requires_grad_(requires_grad) for x in made]


def by_operator(q, k, v, **options):
    call = parse(q, k, v, **options)
    scalars = [operators.signed(x) for x in call.scalars]
    told = (list(call.tensors), " ".join(call.slots), call.features.text(), call.sizes, scalars)
    return operators.attention(q, k, v, *told)


@pytest.fixture(autouse=True)
def nothing_kept():
    for table in (_kept.ATTENTION, flash_attn_2._KEPT):
        table.clear()


OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "scale": 0.3},
    "window": {"window": (3, 1), "softcap": 4.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])},
    "dropout": {"dropout": 0.25, "seed": (1 << 63) + 7},
    "lse": {"return_lse": True},
    "out_dtype": {"out_dtype": "fp32"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_results_and_gradients_are_the_operators(name, dtype):
    """Twice: the second call may be kept."""
    leaves = qkv(True, dtype)
    want, want_lse, _ = by_operator(*leaves, **OPTIONS[name])
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(4)).to(want.dtype)
    with_lse = "return_lse" in OPTIONS[name]
    dlse = [torch.ones_like(want_lse)] if with_lse else []
    grads = torch.autograd.grad([want, want_lse] if with_lse else want, leaves, [dout, *dlse])
    for _ in range(2):
        got = tessera.attention(*leaves, **OPTIONS[name])
        results = list(got) if with_lse else [got]
        assert torch.equal(results[0], want) and (not with_lse or torch.equal(results[1], want_lse))
        for one, other in zip(torch.autograd.grad(results, leaves, [dout, *dlse]), grads, strict=True):
            assert torch.equal(one, other)
        with torch.no_grad():
            silent = tessera.attention(*leaves, **OPTIONS[name])
        silent = silent[0] if with_lse else silent
        assert torch.equal(silent, want) and not silent.requires_grad


def test_what_is_kept():
    q, k, v = qkv()
    for call in (lambda: tessera.attention(q, k, v, causal=True), lambda: flash_attn_func(q, k, v, causal=True)):
        first = call()
        kept = len(_kept.ATTENTION), len(flash_attn_2._KEPT)
        assert torch.equal(first, call()) and (len(_kept.ATTENTION), len(flash_attn_2._KEPT)) == kept
    assert kept == (1, 1)
    tessera.attention(q, k, v, dropout=0.5)
    tessera.attention(q, k, v, sinks=torch.zeros(4))
    tessera.attention(q, k, v, tiles=tessera.Tiles(mass="mean"))
    assert len(_kept.ATTENTION) == 1


def test_seeds_that_are_drawn_differ():
    q, k, v = qkv()
    assert not torch.equal(*(flash_attn_func(q, k, v, dropout_p=0.5) for _ in range(2)))


@pytest.mark.parametrize(
    ("good", "bad", "text"),
    [
        ({"window_size": (1, 0)}, {"window_size": (1.5, 0)}, "window_size"),
        ({"window_size": (1, 0)}, {"window_size": ("1", 0)}, "window_size"),
        ({"causal": True}, {"causal": torch.ones(2)}, "causal"),
        ({"softcap": 1.0}, {"softcap": "1.0"}, "softcap"),
        ({"dropout_p": 0.0}, {"dropout_p": -1}, "dropout_p"),
        ({"softmax_scale": 1.0}, {"softmax_scale": (1.0,)}, "softmax_scale"),
    ],
)
def test_a_bad_call_is_refused_as_ever_and_spoils_no_good_one(good, bad, text):
    q, k, v = qkv()

    def refused():
        with pytest.raises((TypeError, ValueError)) as raised:
            flash_attn_func(q, k, v, **bad)
        assert str(raised.value).startswith(f"{text}: got")
        return str(raised.value)

    before = refused()
    want = flash_attn_func(q, k, v, **good)
    assert torch.equal(want, flash_attn_func(q, k, v, **good))
    assert refused() == before
    assert torch.equal(want, flash_attn_func(q, k, v, **good))


def test_equal_numbers_of_other_types_are_kept_apart():
    """True, 1 and 1.0 are the same softcap and the same scale; each is looked at for itself."""
    q, k, v = qkv()
    want = tessera.attention(q, k, v, softcap=1.0, scale=1.0)
    for number in (1.0, 1, True, 1, 1.0):
        assert torch.equal(tessera.attention(q, k, v, softcap=number, scale=number), want)
    assert len(_kept.ATTENTION) == 3
    assert not torch.equal(tessera.attention(q, k, v, scale=-0.0), want)


def test_shapes_dtypes_and_recording_are_told_apart():
    for heads in (2, 1):
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = qkv(dtype=dtype, heads=heads)
            leaves = qkv(True, dtype, heads)
            for _ in range(2):
                out, recorded = tessera.attention(q, k, v), tessera.attention(*leaves)
                assert torch.equal(out, recorded) and recorded.requires_grad and not out.requires_grad
                assert tessera.attention(q, k, leaves[2]).requires_grad
    with pytest.raises(ValueError, match=r"^k: got"):
        tessera.attention(q, k[:, :, :, :8], v)
    with pytest.raises(ValueError, match=r"^v: got"):
        flash_attn_func(q, k, v.float())
    assert torch.equal(tessera.attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v), out)


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("attend", [tessera.attention, flash_attn_func])
def test_whoever_wants_to_see_a_kept_call_sees_it(attend):
    q, k, v = qkv()
    want = [attend(q, k, v) for _ in range(2)][1]
    with Seen() as seen:
        attend(q, k, v)
    assert seen.names.count("tessera.attention.default") == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(q, k, v).dtype == torch.bfloat16
    with torch.profiler.profile() as profile:
        attend(q, k, v)
    assert any(event.key == "tessera::attention" for event in profile.key_averages())
    with _Functions():
        assert torch.equal(attend(q, k, v), want)
    assert torch.equal(torch.vmap(lambda x: attend(x, k, v))(q[None])[0], want)
    assert torch.equal(attend(torch._neg_view(-q), k, v), want)
    with torch.inference_mode():
        assert attend(q, k, v).is_inference()
    with pytest.raises(NotImplementedError, match="tangent"):
        torch.func.jvp(lambda x: attend(x, k, v), (q,), (q,))
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda x: attend(x, k, v).sum())(q)

    class Wrapped(torch.Tensor):
        pass

    assert type(attend(q.as_subclass(Wrapped), k, v)) is Wrapped
    assert attend(q.to("meta"), k.to("meta"), v.to("meta")).is_meta


@pytest.mark.parametrize("attend", [tessera.attention, flash_attn_func, lambda *x: by_operator(*x)[0]])
def test_double_backward_is_refused(attend):
    q, k, v = qkv(True)
    for _ in range(2):
        (dq,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            dq.sum().backward()


@pytest.mark.parametrize("which", range(4))
def test_a_saved_tensor_that_is_written_over_is_noticed(which):
    for _ in range(2):
        leaves = qkv(True)
        inputs = [x * 1 for x in leaves]
        out = tessera.attention(*inputs)
        with torch.no_grad():
            (*inputs, out)[which].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_hooks_of_saved_tensors_and_checkpoints():
    leaves = qkv(True)
    want = torch.autograd.grad(tessera.attention(*leaves).square().sum(), leaves)
    packed = []
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.shape) or x, lambda x: x):
            out = tessera.attention(*leaves)
        again = torch.utils.checkpoint.checkpoint(tessera.attention, *leaves, use_reentrant=False)
        for each in (out, again):
            for one, other in zip(torch.autograd.grad(each.square().sum(), leaves), want, strict=True):
                assert torch.equal(one, other)
    assert len(packed) >= 10  # q, k, v, out and the LSE


def test_needs_input_grad_and_retained_graphs():
    q, k, v = qkv()
    v.requires_grad_()
    for _ in range(2):
        out = tessera.attention(q, k, v)
        (first,) = torch.autograd.grad(out.sum(), v, retain_graph=True)
        assert torch.equal(first, torch.autograd.grad(out.sum(), v)[0])
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()


def test_the_number_of_threads_is_part_of_a_kept_call():
    q, k, v = qkv()
    try:
        for threads in (1, 2):
            tessera.set_threads(threads)
            assert torch.equal(tessera.attention(q, k, v), tessera.attention(q, k, v))
    finally:
        tessera.set_threads(0)
    assert len(_kept.ATTENTION) == 2


def test_options_that_no_key_can_hold_and_other_arrays_are_not_found():
    q, k, v = qkv()
    tessera.attention(q, k, v, window=[3, 0])
    assert len(_kept.ATTENTION) == 0
    tessera.attention(q, k, v)
    table, options = _core.KeptCalls(), (1, (2.0, "x", None))
    table.keep(q, k, v, options, lambda *tensors: len(tensors))
    assert table.call(q, k, v, options) == 3
    assert table.call(q, k, v, (1, (2.0, "y", None))) is None and table.call(q, k, v, (1, [2.0])) is None
    assert table.call(q.numpy(), k, v, options) is None and table.call(q, k, None, options) is None
    assert table.call(q.to_sparse(), k, v, options) is None
    table.keep(q, k, v, (q,), lambda *tensors: 0)
    assert len(table) == 1


def test_nothing_is_left_at_the_end_of_the_process():
    program = """
import tessera, torch
from tessera.compat.flash_attn_2 import flash_attn_func
leaves = [torch.randn(1, 8, 1, 16, requires_grad=True) for _ in range(3)]
for attend in (tessera.attention, flash_attn_func):
    for _ in range(2):
        attend(*leaves).sum().backward()
        with torch.no_grad():
            attend(*leaves)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, capture_output=True, text=True)
    assert "leaked" not in done.stderr
