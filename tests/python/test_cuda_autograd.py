# SPDX-License-Identifier: Apache-2.0
"""torch's own machinery around the backward on CUDA: layouts, streams, graphs, compilers, and what is refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import tessera  # noqa: E402
from cuda_torch import CUDA, half, nobody_waits, on_gpu  # noqa: E402
from tessera._arguments import parse  # noqa: E402
from tessera.torch import operators  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402


def qkv(b=2, sq=64, sk=96, hq=4, hkv=2, d=64, dtype=torch.bfloat16, grad=True):
    shapes = ((b, sq, hq, d), (b, sk, hkv, d), (b, sk, hkv, d))
    made = [on_gpu(half(*shape, seed=seed, dtype=dtype)) for seed, shape in enumerate(shapes, 1)]
    return [x.requires_grad_(grad) for x in made]


def same(ones, others):
    assert len(ones) == len(others)
    for i, (one, other) in enumerate(zip(ones, others, strict=True)):
        assert one.dtype == other.dtype and torch.equal(one, other), f"tensor {i}"


def expanded(shape, dtype):
    """As loss.sum().backward() makes it: one number."""
    return torch.ones((), dtype=dtype, device=CUDA).expand(shape)


def one_row(shape, dtype):
    """A row of its own for each sequence and head, the same for all queries."""
    b, s, h, d = shape
    return on_gpu(half(b, 1, h, d, seed=7, dtype=dtype)).expand(b, s, h, d)


def heads_first(shape, dtype):
    b, s, h, d = shape
    return on_gpu(half(b, h, s, d, seed=7, dtype=dtype)).transpose(1, 2)


def dims_first(shape, dtype):
    return on_gpu(half(shape[0], shape[3], shape[1], shape[2], seed=7, dtype=dtype)).permute(0, 2, 3, 1)


def every_second_row(shape, dtype):
    b, s, h, d = shape
    return on_gpu(half(b, 2 * s, h, d, seed=7, dtype=dtype))[:, ::2]


def odd_rows(shape, dtype):
    """Rows that begin 2 bytes after a multiple of 16, and 134 bytes apart."""
    return on_gpu(half(*shape[:-1], shape[-1] + 3, seed=7, dtype=dtype))[..., 1 : shape[-1] + 1]


@pytest.mark.parametrize("make", [expanded, one_row, heads_first, dims_first, every_second_row, odd_rows])
def test_upstream_gradients_of_any_layout(make):
    leaves = qkv()
    out = tessera.attention(*leaves, causal=True)
    dout = make(out.shape, out.dtype)
    grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    same(grads, torch.autograd.grad(out, leaves, dout.contiguous()))


def test_queries_expanded_over_the_rows():
    """One query for all rows: its gradient is the sum of theirs."""
    _, k, v = qkv()
    one = on_gpu(half(2, 1, 4, 64, seed=5, dtype=torch.bfloat16)).requires_grad_()
    rows = one.detach().repeat(1, 64, 1, 1).requires_grad_()
    grads = [
        torch.autograd.grad(tessera.attention(q, k, v, causal=True).float().square().sum(), (x, k, v))
        for q, x in ((one.expand(2, 64, 4, 64), one), (rows, rows))
    ]
    same(grads[0][1:], grads[1][1:])
    torch.testing.assert_close(grads[0][0], grads[1][0].sum(1, keepdim=True), rtol=2**-6, atol=2**-6)


def test_an_expanded_gradient_of_the_lse():
    leaves = qkv()
    _, lse = tessera.attention(*leaves, return_lse=True)
    grads = torch.autograd.grad(lse.sum(), leaves[:2], retain_graph=True)
    same(grads, torch.autograd.grad(lse, leaves[:2], torch.ones_like(lse), retain_graph=True))
    assert not torch.autograd.grad(lse.sum(), leaves[2])[0].any()


def test_views_of_a_packed_tensor():
    """Slices with gaps between rows, then heads before tokens: used where they lie, and gradients that fit them."""
    for packed, take in (
        (half(2, 70, 3, 4, 64, seed=1), lambda x: x.unbind(2)),
        (half(3, 2, 4, 70, 64, seed=1), lambda x: [each.transpose(1, 2) for each in x.unbind(0)]),
        (half(2, 70, 4, 200, seed=1), lambda x: x[..., :192].split(64, -1)),
    ):
        leaf = on_gpu(packed).requires_grad_()
        out = tessera.attention(*take(leaf), causal=True)
        (grad,) = torch.autograd.grad(out.square().sum(), leaf, retain_graph=True)
        copies = [x.detach().contiguous().requires_grad_() for x in take(leaf)]
        again = tessera.attention(*copies, causal=True)
        assert torch.equal(out, again)
        again.square().sum().backward()
        same(take(grad), [x.grad for x in copies])


def test_gradients_have_the_layout_of_their_inputs():
    leaves = [on_gpu(half(2, 4, 70, 64, seed=seed)).requires_grad_() for seed in range(3)]
    out = tessera.attention(*(x.transpose(1, 2) for x in leaves))
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(grad.stride() == x.stride() for grad, x in zip(grads, leaves, strict=True))


def test_keys_expanded_over_the_heads():
    """One head of keys as four by a stride of 0 has the sum of the four heads' gradients."""
    q, k, v = qkv(hkv=1)
    dout = torch.randn_like(q)
    wide = [x.expand(-1, -1, 4, -1) for x in (k, v)]
    grads = torch.autograd.grad(tessera.attention(q, *wide), (q, k, v), dout)
    grouped = torch.autograd.grad(tessera.attention(q, k, v), (q, k, v), dout)
    for one, other in zip(grads, grouped, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("wanted", range(3))
def test_only_one_input_requires_grad(wanted):
    inputs = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(qkv())]
    tessera.attention(*inputs, causal=True).sum().backward()
    everything = qkv()
    tessera.attention(*everything, causal=True).sum().backward()
    assert [x.grad is not None for x in inputs] == [i == wanted for i in range(3)]
    assert torch.equal(inputs[wanted].grad, everything[wanted].grad)


def test_only_the_sinks_require_grad():
    q, k, v = qkv(grad=False)
    sinks = torch.randn(4, device=CUDA, requires_grad=True)
    tessera.attention(q, k, v, sinks=sinks).square().sum().backward()
    assert sinks.grad.shape == (4,) and sinks.grad.abs().min() > 0


def test_gradients_accumulate_and_second_backwards_are_refused():
    leaves = qkv()
    out = tessera.attention(*leaves, causal=True)
    out.sum().backward(retain_graph=True)
    first = [x.grad.clone() for x in leaves]
    out.sum().backward()
    for x, once in zip(leaves, first, strict=True):
        torch.testing.assert_close(x.grad, 2 * once, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_double_backward_is_refused():
    q, k, v = qkv()
    (dq,) = torch.autograd.grad(tessera.attention(q, k, v).square().sum(), q, create_graph=True)
    (want,) = torch.autograd.grad(tessera.attention(q, k, v).square().sum(), q)
    assert dq.requires_grad and torch.equal(dq, want)
    with pytest.raises(NotImplementedError, match=r"got a derivative of a gradient \(double backward\)"):
        torch.autograd.grad(dq.sum(), q)


@pytest.mark.parametrize("own", [False, True], ids=["forward's list", "backward's own list"])
@pytest.mark.parametrize("form", ["indices", "bitmask", "transposed"])
def test_lists_train_as_on_the_cpu(form, own):
    mask = torch.rand(2, 4, 3, 4, generator=torch.Generator().manual_seed(5)) < 0.5

    def grads(device):
        leaves = [x.detach().to(device).requires_grad_() for x in qkv(sq=300, sk=400, d=128)]
        tiles = tessera.TileList.from_mask(mask.to(device), form=form, block=(128, 128))
        asked = tessera.Tiles(backward=tiles) if own else tiles
        out = tessera.attention(*leaves, causal=True, tiles=asked)
        return torch.autograd.grad(out, leaves, half(*out.shape, seed=9).to(device))

    for got, want in zip(grads(CUDA), grads("cpu"), strict=True):
        torch.testing.assert_close(got.cpu().float(), want.float(), rtol=2e-2, atol=2e-2)


def scored():
    return tessera.register_score("cuda.halved", "score / 2")  # and no derivative


# Argument, reason, how q, k and v are made, the other options. The LSE has a gradient where out has none.
REFUSALS = {
    "score": (
        "score",
        "has no derivative of score callable cuda.halved: register_score takes it as derivative_text",
        {},
        lambda: {"score": scored()},
    ),
    "wide heads": ("q", "wants head dims of at most 256", {"d": 320}, dict),
    "fp32 out": ("out_dtype", "wants o and dout in q's type", {}, lambda: {"out_dtype": torch.float32}),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_has_no_backward_is_refused_by_the_forward(name):
    """Before anything is computed, naming the argument; and it is computed where nothing is recorded."""
    argument, reason, shape, more = REFUSALS[name]
    leaves, options = qkv(**shape), more()
    words = rf"^{argument}: got attention pass=backward .*{reason}.*; or torch.no_grad\(\), where no gradient is wanted"
    with pytest.raises(NotImplementedError, match=words):
        tessera.attention(*leaves, causal=True, **options)
    with torch.autocast(CUDA.type, torch.bfloat16), pytest.raises(NotImplementedError, match=words):  # no plain call
        tessera.attention(*leaves, causal=True, **options)
    with torch.no_grad():
        out = tessera.attention(*leaves, causal=True, **options)
    assert torch.equal(out, tessera.attention(*(x.detach() for x in leaves), causal=True, **options))
    compiled = torch.compile(lambda *x: tessera.attention(*x, causal=True, **options), backend="aot_eager")
    with pytest.raises(NotImplementedError, match=f"{argument}: got attention pass=backward .*{reason}"):
        compiled(*leaves).sum().backward()


def test_nobody_waits():
    starts = on_gpu(torch.tensor([0, 20, 64], dtype=torch.int32))
    q, k, v = (x.detach()[0, :64].requires_grad_() for x in qkv())
    options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": True, "dropout": 0.1}

    def both():
        tessera.attention(q, k, v, **options).sum().backward()

    both()
    with nobody_waits():
        both()
    assert q.grad.isfinite().all()


def test_backward_runs_on_the_stream_of_the_forward():
    leaves = qkv(sq=512, sk=512)
    want = torch.autograd.grad(tessera.attention(*(x * 2 for x in leaves), deterministic=True).sum(), leaves)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # some 10 ms: what does not wait for it reads q before it is doubled
        out = tessera.attention(*(x * 2 for x in leaves), deterministic=True)
    grads = torch.autograd.grad(out.sum(), leaves)
    same(grads, want)


def test_deterministic_algorithms():
    leaves = qkv(sq=300, sk=300, d=128)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(tessera.attention(*leaves, causal=True).sum(), leaves) for _ in range(10)]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs:
        same(run, runs[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_dropout(reentrant):
    leaves = qkv()
    grads = []
    for keep in (True, False):
        torch.manual_seed(3)
        # Without the residual, whose kernel has other bits than that of a forward without gradients.
        call = lambda *x: tessera.attention(*x, causal=True, dropout=0.4, keep_residual=False)  # noqa: E731
        out = call(*leaves) if keep else checkpoint(call, *leaves, use_reentrant=reentrant)
        out.square().sum().backward()
        grads.append([x.grad for x in leaves])
        for x in leaves:
            x.grad = None
    same(*grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype):
    """fp32 leaves get fp32 gradients, which are those of leaves of the lower type."""
    wide = [x.detach().float().requires_grad_() for x in qkv(dtype=dtype)]
    narrow = qkv(dtype=dtype)
    with torch.autocast(CUDA.type, dtype):
        out = tessera.attention(*wide, causal=True)
        assert out.dtype == dtype
    same(
        [x.to(dtype) for x in torch.autograd.grad(out.float().square().sum(), wide)],
        torch.autograd.grad(tessera.attention(*narrow, causal=True).float().square().sum(), narrow),
    )


def operator_call(inputs, **options):
    call = parse(*inputs, **options)
    return *inputs, list(call.tensors), " ".join(call.slots), call.features.text(), call.sizes, call.scalars


OPTIONS = {
    "causal": {"causal": True},
    "dropout": {"dropout": 0.3, "seed": 5},
    "sinks": {"sinks": True, "window": (30, 0)},
    "alibi": {"alibi_slopes": True, "softcap": 5.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_opcheck(name):
    options = {
        key: torch.ones(4, device=CUDA) if x is True and key != "causal" else x for key, x in OPTIONS[name].items()
    }
    torch.library.opcheck(operators.attention, operator_call(qkv(), **options))
    call = operator_call(qkv(grad=False), **options)
    out, lse, _ = operators.attention(*call)
    for dlse in (None, torch.randn_like(lse)):
        torch.library.opcheck(operators.attention_backward, (torch.randn_like(out), dlse, out, lse, *call))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_training_step(dynamic, backend):
    """One graph; inductor hands over upstream gradients in layouts of its own."""

    def step(q, k, v):
        out, lse = tessera.attention(q, k, v, window=(40, 0), softcap=8.0, return_lse=True)
        return (out.float().square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()) / 3

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=backend)
    for sq, sk in ((64, 96), (130, 130)) if dynamic else ((64, 96),):
        leaves = qkv(sq=sq, sk=sk)
        want = torch.autograd.grad(step(*leaves), leaves)
        for one, other in zip(torch.autograd.grad(compiled(*leaves), leaves), want, strict=True):
            torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7)
    torch._dynamo.reset()


def warmed(call):
    """On a side stream, as a capture wants it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)


def test_a_graph_of_forward_and_backward():
    """Captured once, replayed with other contents; the workspace is the graph's."""
    leaves, dout = qkv(), on_gpu(half(2, 64, 4, 64, seed=9, dtype=torch.bfloat16))

    def step():
        out = tessera.attention(*leaves, causal=True)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    warmed(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for seed in (20, 30):
        with torch.no_grad():
            for i, x in enumerate((*leaves, dout)):
                x.copy_(half(*x.shape, seed=seed + i, dtype=x.dtype))
        graph.replay()
        kept = [x.clone() for x in results]
        same(kept, step())


def test_graphed_callables():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(64, 3 * 64, bias=False)

        def forward(self, x):
            q, k, v = self.project(x).unflatten(-1, (3, 1, 64)).unbind(2)
            return tessera.attention(q, k, v, causal=True)

    torch.manual_seed(1)
    layer = Layer().to(CUDA, torch.bfloat16)
    x = on_gpu(half(2, 80, 64, seed=1, dtype=torch.bfloat16))
    want = []
    for each in (x, x * 2):
        layer.zero_grad()
        layer(each).square().sum().backward()
        want.append(layer.project.weight.grad.clone())
    graphed = torch.cuda.make_graphed_callables(layer, (x.clone(),))
    for each, wanted in zip((x, x * 2), want, strict=True):
        layer.zero_grad()
        graphed(each).square().sum().backward()
        assert torch.equal(layer.project.weight.grad, wanted)


def test_each_replay_drops_the_same_in_both_passes():
    """Σ dv · v = Σ out² where dout = out, by linearity; other draws would give about 0.6 of it."""
    q, k, v = qkv(sq=128, sk=128)

    def step():
        out = tessera.attention(q, k, v, dropout=0.4)
        return out.detach(), torch.autograd.grad(out, v, out.detach())[0]

    warmed(step)
    # A graph's seed is a tensor, which other kernels read.
    tessera.attention(q, k, v, dropout=0.4, seed=torch.tensor([1], device=CUDA)).sum().backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dv = step()
    outs = []
    for _ in range(3):
        graph.replay()
        outs.append(out.clone())
        total = out.double().square().sum().item()
        assert (dv.double() * v.double()).sum().item() == pytest.approx(total, rel=0.01)
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])
