# SPDX-License-Identifier: Apache-2.0
"""torch's CUDA tensors: the same results as on the CPU, on the current stream, without a wait."""

from __future__ import annotations

import threading
from functools import partial

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import tessera  # noqa: E402
import torch_problems as problems  # noqa: E402
import torch_textbook as textbook  # noqa: E402
from cuda_torch import CUDA, close, half, nobody_waits, on_gpu, on_gpu_and_back  # noqa: E402
from tessera import _core  # noqa: E402
from tessera.torch import operators  # noqa: E402


def qkv(b=2, sq=64, sk=96, hq=4, hkv=2, d=64, dtype=torch.float16):
    return [half(b, sq, hq, d, seed=1, dtype=dtype), *(half(b, sk, hkv, d, seed=s, dtype=dtype) for s in (2, 3))]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float16) for name in problems.ALL), ("varlen", torch.bfloat16), ("dropout", torch.bfloat16)],
    ids=str,
)
def test_results_are_those_of_the_textbook(name, dtype, monkeypatch):
    """By the rule of every test: at most twice the error of an unfused implementation in the same dtype."""

    monkeypatch.setattr(problems, "tessera", on_gpu_and_back())
    problem = problems.ALL[name](dtype)
    with torch.no_grad():
        got = textbook.results(problem.inputs, problem.call, None)
    oracle = textbook.results(problem.inputs, problem.plain, None, dtype=torch.float64)
    order = textbook.orders(problem.keys)
    for i, part in enumerate(("out", "lse")):
        textbook.judge(part, got[i], oracle[i], lambda run, i=i: problem.plain(*problem.inputs, order=order(run))[i])


def test_masses_and_next_list():
    q, k, v = qkv(sq=128, sk=128)
    options = {"causal": True, "tiles": tessera.Tiles(mass="mean", next="bitmask", threshold=0.01), "return_lse": True}
    cpu = tessera.attention(q, k, v, **options)
    gpu = tessera.attention(*map(on_gpu, (q, k, v)), **options)
    for name, ours, theirs in zip(("out", "lse", "mass"), gpu, cpu, strict=False):
        close(name, ours, theirs)
    assert gpu[3].bits.device == CUDA
    listed = tessera.TileList.from_mass(gpu[2], share=0.9)  # on the CPU, then back
    assert listed.counts.device == CUDA
    again = tessera.attention(*map(on_gpu, (q, k, v)), causal=True, tiles=listed)
    here = tessera.TileList.from_mass(gpu[2].cpu(), share=0.9)
    close("out with the list", again, tessera.attention(q, k, v, causal=True, tiles=here))


def test_texts_and_their_tensors_are_the_functions_of_python():
    q, k, v = qkv(b=1, sq=24, sk=40, hq=2, hkv=1)
    table, ids = half(2, 21, seed=4, dtype=torch.bfloat16), (torch.arange(40) // 16).to(torch.int32)
    score = tessera.register_score(
        "cuda.table", "score + table(at.head, at.query - at.key + 10)", {"table": (torch.bfloat16, 2)}
    )
    mask = tessera.register_mask("cuda.ids", "return ids(at.query) == ids(at.key);", {"ids": (torch.int32, 1)})
    rows, documents = table.float().tolist(), ids.tolist()

    def tabled(score, batch, head, query, key):
        return score + rows[head][min(max(query - key + 10, 0), 20)]

    def together(batch, head, query, key):
        return documents[query] == documents[key]

    oracle = {"wishes": "implementation=cpu.reference", "return_lse": True}
    cpu = tessera.attention(q, k, v, score=tabled, mask=together, **oracle)
    gpu = tessera.attention(
        *map(on_gpu, (q, k, v)), score=score, mask=mask, extras=(on_gpu(table), on_gpu(ids)), return_lse=True
    )
    for name, ours, theirs in zip(("out", "lse"), gpu, cpu, strict=True):
        close(name, ours, theirs)
    tessera.register_score("cuda.wrong", "score +\n nonsense")
    with pytest.raises(ValueError, match=r"(?s)score cuda.wrong: got .*score cuda.wrong\(2\): error"):
        tessera.attention(*map(on_gpu, (q, k, v)), score="cuda.wrong")


def test_packed_sequences_without_a_wait():
    lengths = [5, 0, 120, 31]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    q, k, v = (x[0] for x in qkv(b=1, sq=156, sk=156))
    given = {"causal": True, "return_lse": True}
    cpu = tessera.attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, **given)
    gq, gk, gv, there = map(on_gpu, (q, k, v, starts))
    for most in ({}, {"max_seqlen_q": 120, "max_seqlen_k": 120}):  # read on the CPU if not given; here the token count
        call = {"cu_seqlens_q": there, "cu_seqlens_k": there, **most, **given}
        tessera.attention(gq, gk, gv, **call)
        with nobody_waits():
            gpu = tessera.attention(gq, gk, gv, **call)
        close("out", gpu[0], cpu[0])
        close("lse", gpu[1], cpu[1])


def test_runs_on_the_current_stream():
    q, k, v = map(on_gpu, qkv(sq=512, sk=512))
    want = tessera.attention(q * 2, k, v)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # some 10 ms: what does not wait for it reads q before it is doubled
        doubled = q * 2
        got = tessera.attention(doubled, k, v)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(got, want)


def test_memory_of_the_caller():
    q, k, v = map(on_gpu, qkv())
    want = tessera.attention(q, k, v, causal=True)
    out = torch.empty_like(q)
    assert tessera.attention(q, k, v, causal=True, out=out) is out
    assert torch.equal(out, want)
    wide = tessera.attention(q, k, v, causal=True, out_dtype=torch.float32)
    assert wide.dtype == torch.float32 and (wide.to(q.dtype) - want).abs().max() <= 2**-10


def test_views_are_used_in_place():
    packed = half(2, 40, 3, 4, 64, seed=4)
    q, k, v = on_gpu(packed).unbind(2)
    close("out", tessera.attention(q, k, v), tessera.attention(*packed.unbind(2)))


def test_one_token_of_many_sequences_in_seqlen_first_layout():
    """The stride between its rows, 2^24 elements, is that of no row."""
    q = on_gpu(half(1, 1 << 14, 16, 64, seed=1)).transpose(0, 1)
    k, v = (on_gpu(half(1 << 14, 2, 1, 64, seed=seed)) for seed in (2, 3))
    packed = torch.empty(1 << 14, 1, 16, 64, dtype=q.dtype, device=CUDA).copy_(q)
    assert q.stride(1) == 1 << 24 and packed.stride(1) == 1 << 10
    assert torch.equal(tessera.attention(q, k, v), tessera.attention(packed, k, v))


def test_a_plan_keeps_its_workspace():
    q, k, v = map(on_gpu, qkv(b=1, sq=16, sk=4096))
    plan = tessera.plan(q, k, v, wishes="splits=8")
    assert plan.implementation.startswith("cuda.fwd_") and plan.workspace_bytes > 0
    want = tessera.attention(q, k, v, wishes="splits=8")
    first = plan(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    again = plan(q, k, v, out=first)
    assert torch.cuda.max_memory_allocated() == held  # nothing was asked of the allocator
    assert torch.equal(again, want)
    assert "implementation: cuda.fwd_" in tessera.explain(q, k, v)


def test_streams_are_told_apart():
    """Of two threads, whose default streams have one handle (2), and of streams that come and go; 0 and 1 are one."""
    seen = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: seen.append(_core.stream_id(0, 2)))
        thread.start()
        thread.join()
    assert None not in seen and len(set(seen)) == 2
    assert _core.stream_id(0, 0) == _core.stream_id(0, 1) not in seen
    ids = [_core.stream_id(0, torch.cuda.Stream().cuda_stream) for _ in range(4)]
    assert len(set(ids)) == 4


def test_combine_and_append():
    q, k, v = qkv(sk=128)
    halves = [tessera.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 50), slice(50, 128))]
    moved = [[on_gpu(x) for x in each] for each in halves]
    want = tessera.merge_states(*halves[0], *halves[1])
    with nobody_waits():
        got = tessera.merge_states(*moved[0], *moved[1])
    close("out", got[0], want[0])
    close("lse", got[1], want[1])
    new_k, new_v = k[:, :7].contiguous(), v[:, :7].contiguous()
    used = torch.tensor([3, 100], dtype=torch.int32)
    there = [on_gpu(x) for x in (k, v, new_k, new_v, used)]
    tessera.kv_append(*there[:4], seqused_k=there[4])
    tessera.kv_append(k, v, new_k, new_v, seqused_k=used)
    assert torch.equal(there[0].cpu(), k) and torch.equal(there[1].cpu(), v)


def test_dropout_drops_what_it_drops_on_the_cpu():
    q, k, v = qkv()
    cpu = tessera.attention(q, k, v, dropout=0.3, seed=5)
    close("by number", tessera.attention(*map(on_gpu, (q, k, v)), dropout=0.3, seed=5), cpu)
    seed = torch.tensor([5], device=CUDA).view(torch.uint64)
    close("by tensor", tessera.attention(*map(on_gpu, (q, k, v)), dropout=0.3, seed=seed), cpu)
    there = list(map(on_gpu, (q, k, v)))
    torch.manual_seed(1)
    first = tessera.attention(*there, dropout=0.3)
    torch.manual_seed(1)
    assert torch.equal(first, tessera.attention(*there, dropout=0.3))


def test_each_replay_draws_a_seed_of_its_own():
    q, k, v = (on_gpu(half(2, 1, 4, 64, seed=seed, dtype=torch.bfloat16)) for seed in range(3))
    state = torch.zeros(2, 4, 64, 64, dtype=torch.bfloat16, device=CUDA)
    slopes = torch.zeros(4, device=CUDA)

    def step():
        tessera.linear_decode(q, k, v, state, slopes, rounding="stochastic")

    step()  # kernels are loaded outside of graphs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    states = []
    for _ in range(2):
        state.zero_()
        graph.replay()
        states.append(state.float())
    assert not torch.equal(*states)
    exact = torch.einsum("bthk,bthv->bhvk", k.float(), v.float())
    for each in states:
        assert torch.all((each - exact).abs() <= exact.abs() / 128)


def test_autocast():
    q, k, v = (x.float() for x in qkv())
    with torch.autocast("cuda", torch.bfloat16):
        out = tessera.attention(*map(on_gpu, (q, k, v)))
    close("out", out, tessera.attention(*(x.to(torch.bfloat16) for x in (q, k, v))))


def test_what_is_wrong_is_reported():
    q, k, v = map(on_gpu, qkv())
    status = torch.zeros(1, dtype=torch.int32, device=CUDA)
    used = torch.tensor([96, 97], dtype=torch.int32, device=CUDA)
    out = tessera.attention(q, k, v, seqused_k=used, metadata="report", status=status)
    assert tessera.violation_of(int(status)) == ("seqused_k", 1)
    assert torch.equal(out, tessera.attention(q, k, v))  # clamped
    status.zero_()
    tessera.attention(q, k, v, seqused_k=used.clamp(max=96), metadata="report", status=status)
    assert tessera.violation_of(int(status)) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (20, 0)}, {"softcap": 5.0}, {"dropout": 0.25, "seed": 7}, {"d": 128}, {"d": 256}],
    ids=str,
)
def test_gradients_are_those_of_the_cpu(options, dtype):
    options = dict(options)
    inputs = qkv(d=options.pop("d", 64), dtype=dtype)
    upstream = half(*inputs[0].shape, seed=4, dtype=dtype)

    def gradients(move):
        leaves = [move(x).requires_grad_() for x in inputs]
        tessera.attention(*leaves, **options).backward(move(upstream))
        return [x.grad for x in leaves]

    for name, gpu, cpu in zip("qkv", gradients(on_gpu), gradients(torch.clone), strict=True):
        assert gpu.device == CUDA and gpu.dtype == dtype
        error = (gpu.cpu().float() - cpu.float()).abs().max().item()
        # Both round P and dS, or their results, to the half type; o's rounding comes in by its product with dout.
        assert error <= 8 * torch.finfo(dtype).eps * (1 + cpu.abs().max().item()), f"d{name}: error {error:.3g}"


def test_gradients_are_the_same_bits_every_time():
    inputs = [on_gpu(x).requires_grad_() for x in qkv(sq=500, sk=700, dtype=torch.bfloat16)]
    call = partial(tessera.attention, *inputs, causal=True, deterministic=True)
    runs = [torch.autograd.grad(call().sum(), inputs) for _ in range(20)]
    assert all(torch.equal(x, first) for run in runs for x, first in zip(run, runs[0], strict=True))


@pytest.mark.parametrize(
    ("error", "text", "change"),
    [
        (NotImplementedError, "wants q, k and v of one type, bf16 or fp16", lambda q, k, v: ((q.float(), k, v), {})),
        (ValueError, "^k: got a tensor on cpu; want one on cuda:0, as q is", lambda q, k, v: ((q, k.cpu(), v), {})),
        (ValueError, "^q: got a tensor on cpu|^k: got a tensor on cuda:0", lambda q, k, v: ((q.cpu(), k, v), {})),
        (
            ValueError,
            "^seqused_k: got a tensor on cpu; want one on cuda:0",
            lambda q, k, v: ((q, k, v), {"seqused_k": torch.tensor([9, 9], dtype=torch.int32)}),
        ),
        (NotImplementedError, "runs on the CPU", lambda q, k, v: ((q, k, v), {"wishes": "implementation=cpu.tiled"})),
        (
            ValueError,
            "^q: got .*16 bytes",
            lambda q, k, v: ((q.flatten()[1:].view(-1)[: 64 * 8].view(1, 2, 4, 64), k[:1], v[:1]), {}),
        ),
    ],
)
def test_refusals(error, text, change):
    tensors, options = change(*map(on_gpu, qkv()))
    with pytest.raises(error, match=text):
        tessera.attention(*tensors, **options)


def test_operators_keep_their_promises():
    q, k, v = map(on_gpu, qkv())
    call = (q, k, v, [], "", "window=*:0 lse", (0, 0, 0), (0, 0, 0, 0))
    torch.library.opcheck(operators.attention, call, test_utils=("test_schema", "test_faketensor"))
    out, lse, _ = operators.attention(*call)
    memory = (torch.empty_like(out), torch.empty_like(lse), [])
    torch.library.opcheck(operators.attention_out, (*memory, *call), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    """One graph, from which the operators run on the stream of whoever calls it."""
    starts = torch.tensor([0, 30, 64], dtype=torch.int32)

    @torch.compile(fullgraph=True, dynamic=dynamic)
    def step(q, k, v, starts):
        packed = tessera.attention(q[0], k[0, :64], v[0, :64], cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True)
        return tessera.attention(q, k, v, window=(31, 0)) * 2, packed, tessera.attention(q, k, v, dropout=0.5)

    inputs = [*qkv(), starts]
    want = tessera.attention(*inputs[:3], window=(31, 0))
    got, packed, dropped = step(*map(on_gpu, inputs))
    assert not torch.equal(dropped, step(*map(on_gpu, inputs))[2])  # every call draws anew
    close("out", got / 2, want)
    parts = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": True}
    close("packed", packed, tessera.attention(inputs[0][0], inputs[1][0, :64], inputs[2][0, :64], **parts))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_gpu():
    q, k, v = qkv()
    there = [x.to("cuda:1") for x in (q, k, v)]
    out = tessera.attention(*there, causal=True)
    assert out.device == torch.device("cuda:1")
    assert torch.equal(out.cpu(), tessera.attention(*map(on_gpu, (q, k, v)), causal=True).cpu())
    with pytest.raises(ValueError, match="k: got a tensor on cuda:0; want one on cuda:1"):
        tessera.attention(there[0], on_gpu(k), there[2])
