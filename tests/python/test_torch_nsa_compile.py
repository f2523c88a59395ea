# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention under torch.compile, and its operators as torch has them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
from test_torch_nsa import COMPRESSED, OPTIONS, tensors  # noqa: E402


@pytest.mark.parametrize("form", ["dense", "packed", "given gates", "reference", "compressed lists"])
def test_compiles_into_one_graph_with_the_same_bits(form):
    torch.compiler.reset()
    packed, given = form == "packed", form == "given gates"
    options = dict(OPTIONS)
    if form == "reference":
        options |= {"score": "dot", "stride": 8, "block": 8, "preset": "reference", "tile": 32}
    if form == "compressed lists":
        options |= COMPRESSED
    if packed:
        options |= {"cu_seqlens": torch.tensor([0, 30, 30, 37, 80], dtype=torch.int32), "max_seqlen": 50}

    def call(q, k, v, gate, k_projection=None, v_projection=None):
        gates = {"gates" if given else "gate_weight": gate}
        return tessera.nsa(q, k, v, k_projection=k_projection, v_projection=v_projection, **gates, **options)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for rows in (80,) if packed else (75, 90, 101):  # sizes become symbols
        inputs = tensors(80) if packed else tensors(2, rows)
        if given:
            gates = torch.rand(2, rows, 4, 3, generator=torch.Generator().manual_seed(5)).requires_grad_()
            inputs = (*inputs[:3], gates)
        want, got = call(*inputs), compiled(*inputs)
        dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(4))
        wanted = torch.autograd.grad(want, inputs, dout)
        for one, other in zip((got, *torch.autograd.grad(got, inputs, dout)), (want, *wanted), strict=True):
            assert torch.equal(one, other)


def test_module_compiles_into_one_graph():
    torch.compiler.reset()
    q, k, v = (x.detach() for x in tensors(2, 100, dtype=torch.bfloat16)[:3])
    module = tessera.torch.NativeSparseAttention(4, 2, 16, 24, project=True, dtype=torch.bfloat16, **OPTIONS)
    assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(q, k, v), module(q, k, v))


def test_operators_are_what_they_say():
    q, k, v, weight, k_projection, v_projection = tensors(2, 40)
    starts = torch.tensor([0, 20, 40], dtype=torch.int32)  # blocks of 4 leave no row that holds anything
    ops = torch.ops.tessera
    for projections in ((None, None), (k_projection, v_projection)):
        torch.library.opcheck(ops.nsa_pool, (k, v, *projections, None, None, 8, 4, 0))
        torch.library.opcheck(ops.nsa_pool, (k[0], v[0], *projections, starts, 20, 4, 4, 0))
    branches = [torch.randn(2, 40, 4, 24, requires_grad=True) for _ in range(3)]
    gates = torch.rand(2, 40, 4, 3).requires_grad_()
    for given in ((q, weight, None), (None, None, gates), (None, None, None)):
        torch.library.opcheck(ops.nsa_gate, (*branches, *given, None, None, 0))
    cache = ops.nsa_pool(k, v, None, None, None, None, 8, 8, 0)[0].detach()
    for compressed in ((0, 64), (3, 2)):
        options = (8, 8, 8, 5, 16, "kv", "dot", "first", "complete", 1, 2, *compressed, True, None, 0)
        torch.library.opcheck(ops.nsa_select, (q.detach(), cache, None, None, *options))
