# SPDX-License-Identifier: Apache-2.0
"""torch.compile(fullgraph=True): one operator in the graph, the same results and gradients, dynamic shapes."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
import torch_problems as problems  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()


def gradients(call, inputs):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = call(*leaves)
    seen = lse.masked_fill(lse == -torch.inf, 0).sin()
    grads = torch.autograd.grad(out.float().square().sum() + seen.sum(), leaves)
    return out, lse, *grads


# torch warns where it traces through a cache; only with out= does it meet any of ours.
@pytest.mark.filterwarnings("error:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("name", problems.ALL)
def test_every_feature_compiles(name):
    problem = problems.ALL[name](torch.float32)
    call = problem.call
    if name == "varlen":  # compiled code cannot read the longest sequence from cu_seqlens
        ends = torch.tensor([0, 13, 13, 70], dtype=torch.int32)

        def call(q, k, v):
            sequences = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 57, "max_seqlen_k": 57}
            out, lse = tessera.attention(q, k, v, causal=True, return_lse=True, **sequences)
            return out[None], lse[None]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(gradients(compiled, problem.inputs), gradients(call, problem.inputs), strict=True):
        assert torch.equal(got, wanted)


def test_longest_sequence_by_token_count():
    """Without max_seqlen, compiled code plans for one sequence of all tokens: the same values."""
    ends = torch.tensor([0, 13, 13, 70], dtype=torch.int32)
    q, k, v = (x[0] for x in problems.full(torch.float32).inputs)

    def call(q, k, v, ends):
        return tessera.attention(q, k, v, causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends)

    torch.testing.assert_close(
        torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, ends), call(q, k, v, ends)
    )


def test_the_first_call_of_a_process_compiles():
    """Also where torch was imported after tessera, so that the trace itself brings the operators in."""
    lines = (
        "import tessera",
        "import torch",
        "q = torch.randn(1, 9, 2, 16)",
        "call = torch.compile(lambda q: tessera.attention(q, q, q, causal=True), fullgraph=True, backend='aot_eager')",
        "assert torch.equal(call(q), tessera.attention(q, q, q, causal=True))",
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", "\n".join(lines)], check=True)


def test_inductor():
    problem = problems.sinks(torch.float32)
    compiled = torch.compile(problem.call, fullgraph=True)
    for got, wanted in zip(gradients(compiled, problem.inputs), gradients(problem.call, problem.inputs), strict=True):
        torch.testing.assert_close(got, wanted)


def test_dynamic_shapes_compile_once():
    """Once where seqlen_q and seqlen_k are the same number, which torch takes for one size, and once where not."""
    counted = CompileCounterWithBackend("aot_eager")
    compiled_so_far = []

    def call(q, k, v):
        out, lse, mass = tessera.attention(
            q, k, v, causal=True, return_lse=True, tiles=tessera.Tiles(mass="mean", block=(4, 4))
        )
        return out * 2, lse + mass.sum()

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counted)
    for b, sq, sk in ((2, 9, 9), (3, 17, 21), (4, 5, 33), (6, 40, 7)):
        inputs = [torch.randn(b, s, h, 32) for s, h in ((sq, 4), (sk, 2), (sk, 2))]
        leaves = [[x.clone().requires_grad_() for x in inputs] for _ in range(2)]
        for (out, lse), its in ((compiled(*leaves[0]), leaves[0]), (call(*leaves[1]), leaves[1])):
            (out.sum() + lse.masked_fill(lse == -torch.inf, 0).sum()).backward()
            its.append(out)
            its.append(lse)
        for got, wanted in zip(*leaves, strict=True):
            assert torch.equal(got, wanted)
            if got.is_leaf:
                assert torch.equal(got.grad, wanted.grad)
        compiled_so_far.append(counted.frame_count)
    assert compiled_so_far[1] == compiled_so_far[-1]


def test_one_operator_in_the_graph():
    graphs = []

    def keep(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    q, k, v = problems.full(torch.float32).inputs
    torch.compile(lambda q, k, v: tessera.attention(q, k, v, causal=True, softcap=2.0), backend=keep)(q, k, v)
    assert [sum(name.startswith("tessera.") for name in names) for names in graphs] == [1]


def test_names_of_scores():
    def call(q, k, v, score):
        return tessera.attention(q, k, v, score=score, causal=True)

    inputs = problems.full(torch.float32).inputs
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs, "relative"), call(*inputs, "relative"))
    with pytest.raises(ValueError, match=r"^score: got .*nonsense"):
        compiled(*inputs, "nonsense")


def test_next_list_of_one_call_is_the_tiles_of_another():
    def call(q, k, v):
        _, listed = tessera.attention(q, k, v, tiles=tessera.Tiles(next="indices", threshold=0.05, block=(8, 8)))
        return tessera.attention(q, k, v, tiles=listed)

    q, k, v = problems.full(torch.float32).inputs
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v))


def test_dropout_is_drawn_by_each_call():
    q, k, v = (x.requires_grad_() for x in problems.full(torch.float32).inputs)
    compiled = torch.compile(lambda *x: tessera.attention(*x, dropout=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    first, second = compiled(q, k, v), compiled(q, k, v)
    torch.manual_seed(1)
    again = compiled(q, k, v)
    assert torch.equal(first, again) and not torch.equal(first, second)
    torch.manual_seed(1)
    eager = tessera.attention(q, k, v, dropout=0.5)
    assert torch.equal(first, eager)
    grads = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (first, eager))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_out_is_mutated_in_compiled_code():
    q, k, v = problems.full(torch.float32).inputs

    def call(q, k, v, out):
        tessera.attention(q, k, v, out=out)
        return out + 1

    out = torch.zeros_like(q)
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, out)
    assert torch.equal(out, tessera.attention(q, k, v)) and torch.equal(got, out + 1)


def test_autocast_inside_of_compiled_code():
    q, k, v = (x.requires_grad_() for x in problems.full(torch.float32).inputs)

    def call(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return tessera.attention(q, k, v, causal=True)

    outs = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v)
    grads = (torch.autograd.grad(out.float().sum(), (q, k, v)) for out in outs)
    assert outs[0].dtype == torch.bfloat16 and torch.equal(*outs)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return tessera.attention(q, k, v, causal=True)

    q, k, v = problems.full(torch.float32).inputs
    tokens = torch.export.Dim("tokens", min=2, max=512)
    shapes = [{1: tokens}] * 3
    exported = torch.export.export(Layer(), (q, k, v), dynamic_shapes=shapes).module()
    fewer = [x[:, :31] for x in (q, k, v)]
    assert torch.equal(exported(*fewer), Layer()(*fewer))
