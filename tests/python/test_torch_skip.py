# SPDX-License-Identifier: Apache-2.0
"""Skip states in torch: the module, its streams, and gradients of a step's list."""

import ctypes
import gc
import sys

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
from tessera.torch import SkipAttention  # noqa: E402


def inputs(seed=0, seqlen=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, seqlen, 2, 16, generator=generator).to(dtype) for _ in range(3)]


def made(**options):
    return SkipAttention(**{"block": (16, 16), "steps": 6, "ramp": (0.1, 0.3), "layer": "blocks.0", **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_steps_as_a_state(dtype):
    module = made()
    state = tessera.SkipState(
        seqlen_q=64, seqlen_k=64, heads_q=2, block=(16, 16), steps=6, ramp=(0.1, 0.3), layer="blocks.0"
    )
    for step in range(4):
        q, k, v = inputs(step // 2, dtype=dtype)
        out = module(q, k, v, step=step)
        assert out.dtype == dtype
        assert torch.equal(out, state(q, k, v, step=step))
    assert module.state().to_bytes() == state.to_bytes()
    assert module.nbytes == state.nbytes and "tile_bits" in repr(module)


def test_conditional_and_unconditional_calls_keep_apart():
    module, alone = made(), made()
    for step in range(5):
        module(*inputs(step), step=step, stream="cond")
        module(*inputs(100 + step), step=step, stream="uncond")
        alone(*inputs(step), step=step)
    assert module.state("cond").to_bytes() == alone.state().to_bytes()
    assert module.state("uncond").to_bytes() != alone.state().to_bytes()


def test_state_dict_brings_a_run_back():
    module, other = made(), made()
    for step in range(3):
        module(*inputs(step), step=step)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(*inputs(9), step=3), module(*inputs(9), step=3))
    with pytest.raises(ValueError, match=r"^layer: got"):
        made(layer="blocks.1").load_state_dict(module.state_dict())


def test_another_shape_waits_for_step_0():
    module = made()
    module(*inputs(), step=0)
    with pytest.raises(ValueError, match=r"^q: got"):
        module(*inputs(0, 80), step=1)
    module(*inputs(), step=1)
    module(*inputs(0, 80), step=0)
    module(*inputs(0, 80), step=1)
    assert module.state().next_step == 2


def test_ranges_stay_until_others_come():
    module = made(ramp=(3.9, 3.9), warm_up=0)
    module(*inputs(), step=0, must_do=[(0, 16)])
    module(*inputs(), step=1)
    assert module.state().active == pytest.approx(0.25)
    module(*inputs(), step=2, must_do=[(0, 16), (48, 64)])
    assert module.state().active == pytest.approx(0.5)
    module(*inputs(), step=3, must_do=())
    assert module.state().active == 0


def test_a_gradient_is_refused_and_the_list_has_one():
    """Its autograd function gave as many gradients as a version before had inputs (LiteAttention)."""
    module = made(warm_up=0, ramp=(0.27, 0.27))
    q, k, v = inputs()
    module(q, k, v, step=0)
    module(q, k, v, step=1)
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    with pytest.raises(ValueError, match="SkipState"):
        module(*leaves, step=2)
    listed = module.state().tile_list(q)
    assert 0 < module.state().active < 1
    out = tessera.attention(*leaves, tiles=listed)
    assert torch.equal(out.detach(), module(q, k, v, step=2))
    out.square().sum().backward()
    shown = listed.to_mask(key_blocks=4)
    hidden = ~shown.repeat_interleave(16, 2).repeat_interleave(16, 3)
    same = [each.detach().double().transpose(1, 2).requires_grad_() for each in leaves]
    scores = (same[0] @ same[1].mT / 4).masked_fill(hidden, -torch.inf)
    weights = torch.where(scores.isneginf().all(-1, keepdim=True), 0.0, scores.softmax(-1).nan_to_num())
    (weights @ same[2]).square().sum().backward()
    for leaf, want in zip(leaves, same, strict=True):
        torch.testing.assert_close(leaf.grad.double(), want.grad.transpose(1, 2), atol=1e-5, rtol=1e-4)


def test_options_are_checked_when_the_module_is_made():
    for options, error, name in (
        ({"ramp": (0.1, 5.0)}, ValueError, "ramp.last"),
        ({"rule": "none"}, ValueError, "rule"),
        ({"seqlen_q": 5}, TypeError, "seqlen_q"),
    ):
        with pytest.raises(error, match=rf"^{name}: got"):
            made(**options)
    made(heads={7: (0.1, 0.2)})
    with pytest.raises(ValueError, match=r"^q: got"):
        made()(*[each[0] for each in inputs()], step=0)


def in_use():
    """Objects of Python, and bytes that malloc has given to the main thread and not got back."""

    class Info(ctypes.Structure):
        names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keep")
        _fields_ = [(name, ctypes.c_size_t) for name in names]

    call = ctypes.CDLL(None).mallinfo2
    call.restype = Info
    gc.collect()
    info = call()
    return sys.getallocatedblocks(), info.uordblks + info.hblkhd


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="no glibc")
def test_a_thousand_steps_of_changing_shapes_leak_nothing():
    shapes = [(1, 40, 90), (2, 100, 100), (1, 333, 50), (3, 64, 257)]
    given = []
    for batch, seqlen_q, seqlen_k in shapes:
        sizes = ((batch, seqlen_q, 4, 16), (batch, seqlen_k, 2, 16), (batch, seqlen_k, 2, 16))
        given.append([torch.randn(size) for size in sizes])
    module = SkipAttention(block=(16, 16), steps=5, warm_up=1, ramp=(0.05, 0.2))
    used = []
    for run in range(100):
        for step in range(5):
            for stream in ("cond", "uncond"):
                module(*given[run % 4], step=step, stream=stream)
        if run % 4 == 3:
            used.append(in_use())
    assert len(used) == 25
    # Plans are kept for a shape, so that the first runs add some. From the fifth reading on there are 800 steps.
    blocks, sizes = zip(*used[4:], strict=True)
    assert max(blocks) - blocks[0] < 400
    assert max(sizes) - sizes[0] < 20_000
