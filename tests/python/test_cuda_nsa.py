# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention of torch's CUDA tensors: the CPU's results and gradients, graphs, calls without a wait."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import nsa_rows  # noqa: E402
import tessera  # noqa: E402
from cuda_torch import CUDA, nobody_waits, on_gpu  # noqa: E402
from tessera.torch import head_groups, nsa_function  # noqa: E402

SMALL = {"length": 32, "stride": 32, "block": 32, "top": 6, "window": 100}
COMPRESSED = {"compressed_top": 4, "compressed_block": 3}


def tensors(*leading, device="cpu"):
    """q, k, v, gate_weight, k_projection, v_projection in bf16."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=generator).bfloat16().to(device).requires_grad_()

    return (
        normal(*leading, 8, 64),
        normal(*leading, 2, 64),
        normal(*leading, 2, 64),
        normal(8, 3, 64),
        normal(2, 64, 64),
        normal(2, 64, 64),
    )


def run(arrays, **options):
    q, k, v, weight, k_projection, v_projection = arrays
    projections = {"k_projection": k_projection, "v_projection": v_projection}
    return tessera.nsa(q, k, v, gate_weight=weight, **projections, **SMALL, **options)


def near(got, want):
    """In bf16, whose roundings of means, branches and gates add up."""
    got, want = got.detach().float().cpu(), want.detach().float()
    assert (got - want).abs().max() <= 0.02 * want.abs().max()
    assert (got - want).norm() <= 0.01 * want.norm()


@pytest.mark.parametrize("preset", ["strict", "reference"])
def test_results_and_gradients_are_those_of_the_cpu(preset):
    on_cpu, on_cuda = tensors(2, 700), tensors(2, 700, device=CUDA)
    _, tiles = run(on_cpu, preset=preset, return_tiles=True)
    want = run(on_cpu, preset=preset, tiles=tiles)
    got = run(on_cuda, preset=preset, tiles=on_gpu(tiles))
    near(got, want)
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    wanted = torch.autograd.grad(want, on_cpu, dout)
    for one, other in zip(torch.autograd.grad(got, on_cuda, dout.to(CUDA)), wanted, strict=True):
        near(one, other)


@pytest.mark.parametrize("preset", ["strict", "paper", "reference"])
def test_most_blocks_are_those_of_the_cpu(preset):
    with torch.no_grad():
        _, want = run(tensors(1, 700), preset=preset, return_tiles=True)
        _, got = run(tensors(1, 700, device=CUDA), preset=preset, return_tiles=True)
    assert torch.equal(got.counts.cpu(), want.counts)
    # Compressed keys are rounded to bf16, now and then to its other neighbour.
    assert (got.indices.cpu() == want.indices).float().mean() > 0.97


def test_lists_of_compressed_keys_give_the_cpus_results_and_gradients():
    on_cpu, on_cuda = tensors(2, 700), tensors(2, 700, device=CUDA)
    _, tiles, compressed = run(on_cpu, return_tiles=True, **COMPRESSED)
    want = run(on_cpu, tiles=tiles, compressed_tiles=compressed)
    got = run(on_cuda, tiles=on_gpu(tiles), compressed_tiles=on_gpu(compressed))
    near(got, want)
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    wanted = torch.autograd.grad(want, on_cpu, dout)
    for one, other in zip(torch.autograd.grad(got, on_cuda, dout.to(CUDA)), wanted, strict=True):
        near(one, other)
    _, _, own = run(on_cuda, return_tiles=True, **COMPRESSED)
    assert torch.equal(own.counts.cpu(), compressed.counts)
    assert (own.indices.cpu() == compressed.indices).float().mean() > 0.97


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("compressed", [{}, COMPRESSED])
def test_heads_by_themselves_and_results_computed_again(gated, recompute, compressed, monkeypatch):
    arrays = tensors(2, 700, device=CUDA)
    inputs = arrays if gated else arrays[:3]

    def call(recompute):
        if gated:
            return run(arrays, recompute=recompute, **compressed)
        return tessera.nsa(*inputs, recompute=recompute, **SMALL, **compressed)

    want = call(False)
    dout = torch.randn(want.shape, device=CUDA).bfloat16()
    wanted = torch.autograd.grad(want, inputs, dout)
    monkeypatch.setattr(head_groups, "MOST_SUMS", 1)
    got = call(recompute)
    near(got, want.cpu())
    for one, other in zip(torch.autograd.grad(got, inputs, dout), wanted, strict=True):
        near(one, other.cpu())


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_what_is_kept_follows_the_free_memory(share, monkeypatch):
    """Within a graph's capture too."""
    monkeypatch.setattr(nsa_function, "MOST_KEPT", 1)
    monkeypatch.setattr(nsa_function, "MOST_SHARE_KEPT", share)
    arrays = tensors(1, 300, device=CUDA)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        want = run(arrays)
    results = 3 if share > 0 else 1
    assert saved.count(want.shape) == 1 + 2 * results  # q, and each result with what rounding lost
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(arrays)
    graph.replay()
    assert torch.equal(out, want)


def test_deterministic_gradients_have_the_same_bits(monkeypatch):
    monkeypatch.setattr(head_groups, "MOST_SUMS", 1)
    arrays = tensors(2, 700, device=CUDA)
    dout = torch.randn(2, 700, 8, 64, device=CUDA).bfloat16()
    torch.use_deterministic_algorithms(True)
    try:
        found = [torch.autograd.grad(run(arrays, recompute=True), arrays, dout) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for again in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], again, strict=True))


def test_memory_of_a_step(monkeypatch):
    """docs/nsa.md counts it, in bytes of q."""
    rows, heads, dim = 32768, 32, 128
    monkeypatch.setattr(head_groups, "MOST_SUMS", 1)
    shapes = [(1, rows, count, dim) for count in (heads, 8, 8)]
    inputs = [torch.randn(shape, device=CUDA).bfloat16().requires_grad_() for shape in shapes]
    dout = torch.randn(shapes[0], device=CUDA).bfloat16()
    unit = 2 * dout.numel()

    def step():
        return torch.autograd.grad(tessera.nsa(*inputs, recompute=True), inputs, dout)

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    most = (torch.cuda.max_memory_allocated() - before) / unit
    # The result, what is kept, gradients, then an eighth of sums of gradients (3), of a result and its residual (1.5)
    # and of what the kernels need: sums of dq, and in a short sequence as much for parts of keys.
    assert most < 1 + 1.5 + 1.5 + (3 + 1.5 + 4) / 8 + 0.2, most


@pytest.mark.parametrize("compressed", [{}, COMPRESSED])
def test_no_row_depends_on_later_tokens(compressed):
    arrays = [x.detach() for x in tensors(1, 700, device=CUDA)]
    before = run(arrays, **compressed)
    for row in (31, 200, 511):
        later = [x.clone() for x in arrays[:3]]
        for x in later:
            x[:, row + 1 :] = torch.randn_like(x[:, row + 1 :]) * 3
        after = run([*later, *arrays[3:]], **compressed)
        assert torch.equal(after[:, : row + 1], before[:, : row + 1]), row
        assert not torch.equal(after[:, row + 1 :], before[:, row + 1 :])


def test_packed_sequences_are_single_ones():
    starts = torch.tensor([0, 300, 300, 310, 700], dtype=torch.int32, device=CUDA)
    arrays = [x.detach() for x in tensors(700, device=CUDA)]
    packed = run(arrays, cu_seqlens=starts, max_seqlen=390)
    for begin, end in ((0, 300), (300, 310), (310, 700)):
        single = run([*(x[None, begin:end] for x in arrays[:3]), *arrays[3:]])
        near(packed[begin:end], single[0].cpu())


def test_graphs_of_both_passes_take_other_inputs():
    arrays = tensors(1, 700, device=CUDA)
    dout = torch.randn(1, 700, 8, 64, device=CUDA).bfloat16()

    def step():
        out = run(arrays)
        return (out, *torch.autograd.grad(out, arrays, dout))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    with torch.no_grad():
        for x in arrays:
            x.copy_(torch.randn_like(x))
    graph.replay()
    want = step()
    for one, other in zip(got, want, strict=True):
        near(one, other.cpu())


def test_calls_wait_for_nothing():
    arrays = tensors(1, 700, device=CUDA)
    run(arrays).float().sum().backward()
    with nobody_waits():
        run(arrays).float().sum().backward()


@pytest.mark.skipif(torch.cuda.mem_get_info()[1] < 100 << 30, reason="wants 100 GiB of memory")
def test_rows_behind_two_to_the_31_elements():
    """Of q, of 32 heads and 128 columns: token 524288 is the first behind them."""
    nsa_rows.check(640000, 32, 8, 128, [63, 4095, 524287, 524288, 639000], CUDA, torch.bfloat16)


@pytest.mark.parametrize("preset", ["strict", "reference"])
def test_gradients_of_later_tokens(preset):
    """Earlier rows' have none in `strict`, to the bit; `reference` leaks."""
    arrays = [x.detach().requires_grad_() for x in tensors(1, 700, device=CUDA)]
    own = {"length": 32, "stride": 32, "block": 32, "top": 6, "window": 100} if preset == "strict" else {}
    out = tessera.nsa(*arrays[:3], preset=preset, **own)
    leaks = []
    for row in (40, 200, 500):
        gradients = torch.autograd.grad(out[:, : row + 1].float().square().sum(), arrays[:3], retain_graph=True)
        leaks.append(any(x[:, row + 1 :].any().item() for x in gradients))
    assert leaks == [preset == "reference"] * 3
