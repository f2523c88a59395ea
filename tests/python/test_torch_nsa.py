# SPDX-License-Identifier: Apache-2.0
"""Gradients of native sparse attention against torch's own of the same formulas, with the same blocks; the module."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import tessera  # noqa: E402
from nsa_textbook import listed  # noqa: E402
from tessera.torch import nsa as operators_of_nsa  # noqa: E402

OPTIONS = {"length": 8, "stride": 4, "block": 16, "top": 5, "window": 20, "score": "softmax", "tile": 16}
COMPRESSED = {"compressed_top": 4, "compressed_block": 3}


def tensors(*leading, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    q, k, v = normal(*leading, 4, 16), normal(*leading, 2, 16), normal(*leading, 2, 24)
    return q, k, v, normal(4, 3, 16), normal(2, 16, 16), normal(2, 24, 24)


def attend(q, k, v, visible):
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
    weights = torch.exp(scores).masked_fill(~visible, 0)
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)
    return torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(group, 1))


def textbook(q, k, v, weight, k_projection, v_projection, tiles, sequence=0, gates=None, compressed_tiles=None):
    """Of one sequence, in double."""
    rows = len(q)
    starts = range(0, rows - OPTIONS["length"] + 1, OPTIONS["stride"])

    def pooled(x, projection):
        means = torch.stack([x[s : s + OPTIONS["length"]].mean(0) for s in starts]) if len(starts) else x[:0]
        return torch.einsum("nhd,hde->nhe", means, projection)

    i, j = torch.arange(rows)[:, None], torch.arange(rows)[None]
    complete = torch.tensor([s + OPTIONS["length"] for s in starts], dtype=torch.long)[None] <= i + 1
    if compressed_tiles is not None:
        complete = complete & torch.from_numpy(listed(compressed_tiles, sequence, rows, len(starts), q.shape[1]))
    blocks = torch.from_numpy(listed(tiles, sequence, rows, rows, q.shape[1]))
    if gates is None:
        gates = torch.sigmoid(torch.einsum("ihd,hxd->ihx", q, weight))
    branches = (
        attend(q, pooled(k, k_projection), pooled(v, v_projection), complete),
        attend(q, k, v, blocks & (j <= i)),
        attend(q, k, v, (j <= i) & (i - j < OPTIONS["window"])),
    )
    return sum(gates[..., x : x + 1] * branch for x, branch in enumerate(branches))


def check(got, want):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one.detach(), other.detach(), rtol=2e-4, atol=2e-4)


def run(arrays, **options):
    q, k, v, weight, k_projection, v_projection = arrays
    return tessera.nsa(
        q,
        k,
        v,
        gate_weight=weight,
        k_projection=k_projection,
        v_projection=v_projection,
        return_tiles=True,
        **OPTIONS,
        **options,
    )


@pytest.mark.parametrize("compressed", [{}, COMPRESSED])
def test_gradients_are_those_of_the_formulas(compressed):
    arrays = tensors(1, 75)
    out, tiles, *more = run(arrays, **compressed)
    lists = {"compressed_tiles": more[0]} if more else {}
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    got = torch.autograd.grad(out, arrays, dout)
    double = [x.detach().double().requires_grad_() for x in arrays]
    want = textbook(*(x[0] for x in double[:3]), *double[3:], tiles, **lists)
    check([out[0]], [want])
    check(got, torch.autograd.grad(want, double, dout[0].double()))


@pytest.mark.parametrize("compressed", [{}, COMPRESSED])
def test_gradients_of_packed_sequences(compressed):
    lengths, starts = [30, 0, 7, 41], torch.tensor([0, 30, 30, 37, 78], dtype=torch.int32)
    arrays = tensors(80)
    out, tiles, *more = run(arrays, cu_seqlens=starts, **compressed)
    lists = {"compressed_tiles": more[0]} if more else {}
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    dout[78:] = 0  # spare tokens
    got = torch.autograd.grad(out, arrays, dout)
    double = [x.detach().double().requires_grad_() for x in arrays]
    rows, begin = [], 0
    for sequence, length in enumerate(lengths):
        part = (x[begin : begin + length] for x in double[:3])
        rows.append(textbook(*part, *double[3:], tiles, sequence, **lists))
        begin += length
    want = torch.cat(rows)
    check([out[:78]], [want])
    wanted = torch.autograd.grad(want, double, dout[:78].double())
    check([x[:78] for x in got[:3]], [x[:78] for x in wanted[:3]])
    check(got[3:], wanted[3:])


def test_gradients_of_given_gates():
    q, k, v, _, k_projection, v_projection = tensors(1, 40)
    gates = torch.rand(1, 40, 4, 3, generator=torch.Generator().manual_seed(5)).requires_grad_()
    inputs = (q, k, v, gates, k_projection, v_projection)
    call = {"gates": gates, "k_projection": k_projection, "v_projection": v_projection}
    out, tiles = tessera.nsa(q, k, v, return_tiles=True, **call, **OPTIONS)
    got = torch.autograd.grad(out.square().sum(), inputs)
    double = [x.detach().double().requires_grad_() for x in inputs]
    want = textbook(*(x[0] for x in double[:3]), None, *double[4:], tiles, gates=double[3][0])
    check(got, torch.autograd.grad(want.square().sum(), double))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_of_equal_gates_is_that_of_each_branch(dtype):
    """Without gates a branch's gradient needs no branch: a third of the result's, in the operation's own bits."""
    branches = [torch.randn(2, 33, 4, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    dout = torch.randn(2, 33, 4, 16, dtype=dtype).transpose(0, 1).contiguous().transpose(0, 1)
    options = {"q": None, "gate_weight": None, "gates": None, "cu_seqlens": None, "max_seqlen": None, "threads": 0}
    out = operators_of_nsa.nsa_gate(tuple(branches), **options)
    found = torch.autograd.grad(out, branches, dout)
    (expected,) = tessera.nsa_gate_backward(dout.contiguous(), tuple(x.detach() for x in branches))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_no_gradient_reaches_what_is_behind_a_row():
    arrays = tensors(1, 75)
    out, _ = run(arrays)
    for row in (0, 7, 30, 60):
        gradients = torch.autograd.grad(out[0, row].sum(), arrays[:3], retain_graph=True)
        assert all((x[0, row + 1 :] == 0).all() for x in gradients), row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", ["strict", "paper", "reference", "strict with lists of compressed keys"])
def test_only_reference_has_gradients_behind_a_row(preset, dtype):
    """Of rows up to a random one: bits of O and of all gradients, with other q, k and v at random places behind it, and
    the gradients of those, which are 0. The preset's own sizes."""
    rows, options = 900, {"preset": preset}
    if "lists" in preset:
        options = {"compressed_top": 4, "compressed_block": 2}
    arrays = tensors(1, rows, dtype=dtype)[:4]
    generator = torch.Generator().manual_seed(8)
    leaks = {"bits": 0, "gradients": 0}
    for row in [0, 63, 64, *torch.randint(rows - 1, (5,), generator=generator).tolist()]:
        dout = torch.randn((1, rows, 4, 24), generator=generator).to(dtype)
        dout[:, row + 1 :] = 0
        places = torch.cat((torch.tensor([row + 1]), torch.randint(row + 1, rows, (20,), generator=generator)))
        others = [x.detach().clone() for x in arrays]
        for x in others[:3]:
            x[:, places] = 3 * torch.randn(x[:, places].shape, generator=generator).to(dtype)
        found = []
        for given in (arrays, [x.requires_grad_() for x in others]):
            out = tessera.nsa(*given[:3], gate_weight=given[3], **options)
            gradients = torch.autograd.grad(out, given, dout)
            found.append([x[:, : row + 1] for x in (out, *gradients[:3])] + [gradients[3]])
            leaks["gradients"] += any((x[:, row + 1 :] != 0).any() for x in gradients[:3])
        leaks["bits"] += not all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        assert preset == "reference" or not any(leaks.values()), (row, leaks)
    assert all(count > 0 for count in leaks.values()) == (preset == "reference")


def test_module_in_bf16_and_its_parameters():
    q, k, v = (x.detach() for x in tensors(2, 100, dtype=torch.bfloat16)[:3])
    module = tessera.torch.NativeSparseAttention(4, 2, 16, 24, project=True, dtype=torch.bfloat16, **OPTIONS)
    assert {name for name, _ in module.named_parameters()} == {"gate_weight", "k_projection", "v_projection"}
    out = module(q, k, v)
    assert out.dtype == torch.bfloat16 and out.shape == (2, 100, 4, 24)
    # Gates of weights that are 0 are 1/2; identities leave means as they are.
    halves = torch.full((2, 100, 4, 3), 0.5)
    np.testing.assert_array_equal(out.detach().float(), tessera.nsa(q, k, v, gates=halves, **OPTIONS).float())
    out.float().square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.bfloat16, name
        assert parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0, name
    plain = tessera.torch.NativeSparseAttention(4, 2, 16, 24, **OPTIONS)
    assert [name for name, _ in plain.named_parameters()] == ["gate_weight"]


def test_operations_by_themselves_refuse_what_wants_a_gradient():
    q, k, v, weight, *_ = tensors(1, 40)
    with pytest.raises(ValueError, match="k: got a tensor that requires grad"):
        tessera.nsa_pool(k, v)
    with pytest.raises(ValueError, match="gate_weight: got a tensor that requires grad"):
        branches = torch.zeros(3, 1, 40, 4, 24)
        tessera.nsa_gate(branches, q=q.detach(), gate_weight=weight)


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
