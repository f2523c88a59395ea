# SPDX-License-Identifier: Apache-2.0
"""Skip states of torch's CUDA tensors: graphs, the way between devices, and calls without a wait."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import tessera  # noqa: E402
from cuda_torch import CUDA, nobody_waits  # noqa: E402
from tessera.torch import SkipAttention  # noqa: E402

RULES = {"mass": (0.02, 0.06), "threshold": (-4.0, -1.0)}


def inputs(seed=0, seqlen=512, device=CUDA):
    """Scores of the 64 keys around a query are above all others by 8, so that tiles off the diagonal are skipped."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, seqlen, 2, 64, generator=generator) for _ in range(3))
    block = 8 * torch.eye(64)[torch.arange(seqlen) // 64, None]
    return [x.bfloat16().to(device) for x in (q + block, k + block, v)]


def made(rule, **options):
    return SkipAttention(**{"block": (64, 64), "steps": 10, "rule": rule, "ramp": RULES[rule], "warm_up": 1, **options})


@pytest.mark.parametrize("rule", RULES)
def test_a_graph_of_ten_steps_is_ten_calls(rule):
    calls, captured = made(rule), made(rule)
    steps = [inputs(step // 3) for step in range(10)]
    want = [calls(*each, step=step) for step, each in enumerate(steps)]
    captured(*steps[0], step=0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [captured(*each, step=step) for step, each in enumerate(steps)]
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert captured.state().to_bytes() == calls.state().to_bytes()
    assert 0 < calls.state().active < 1


@pytest.mark.parametrize("rule", RULES)
def test_a_state_goes_from_device_to_device(rule):
    module = made(rule)
    for step in range(3):
        module(*inputs(step, device="cpu"), step=step)
    before = module.state().to_bytes()
    out = module(*inputs(3), step=3)
    assert out.is_cuda and module.state().device == 0
    other = made(rule)
    other.load_state_dict(module.state_dict())
    assert other.state().to_bytes() == module.state().to_bytes() != before
    assert torch.equal(other(*inputs(4), step=4), module(*inputs(4), step=4))


def test_steps_wait_for_nothing():
    module = made("mass")
    q, k, v = inputs()
    module(q, k, v, step=0, must_do=[(0, 64)])
    module(q, k, v, step=1)
    with nobody_waits():
        for step in range(2, 6):
            module(q, k, v, step=step)
        module(q, k, v, step=0)


def test_a_state_of_another_place_is_refused():
    state = tessera.SkipState(seqlen_q=512, seqlen_k=512, heads_q=2, block=(64, 64))
    with pytest.raises(ValueError, match=r"^q: got an array on GPU 0; want one on the CPU"):
        state(*inputs(), step=0)


def test_what_gpus_refuse_says_why():
    with pytest.raises((ValueError, NotImplementedError), match="mass:own"):
        made("mass", own_lse=True)(*inputs(), step=0)


@pytest.mark.parametrize("rule", RULES)
def test_a_thousand_steps_of_changing_shapes_leak_nothing(rule):
    given = [inputs(seed, seqlen) for seed, seqlen in enumerate((512, 300, 1024, 64))]
    module, used = made(rule, steps=5), []
    for run in range(100):
        for step in range(5):
            for stream in ("cond", "uncond"):
                module(*given[run % 4], step=step, stream=stream)
        if run % 4 == 3:
            torch.cuda.synchronize()
            used.append((torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]))
    allocated, free = zip(*used[5:], strict=True)
    assert len(set(allocated)) == 1
    assert max(free) - min(free) < 4 << 20  # of the driver: kernels are loaded by then
