# SPDX-License-Identifier: Apache-2.0
"""Gradients of native sparse attention against torch's own of the same formulas, with the same blocks; the module."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import tessera  # noqa: E402
from nsa_textbook import listed  # noqa: E402
from tessera.torch import head_groups, nsa_function  # noqa: E402
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


def test_gradients_of_equal_gates():
    q, k, v, _, k_projection, v_projection = tensors(1, 40)
    inputs = (q, k, v, k_projection, v_projection)
    out, tiles = tessera.nsa(
        q, k, v, k_projection=k_projection, v_projection=v_projection, return_tiles=True, **OPTIONS
    )
    got = torch.autograd.grad(out.square().sum(), inputs)
    double = [x.detach().double().requires_grad_() for x in inputs]
    thirds = torch.full((40, 4, 3), 1 / 3, dtype=torch.float64)
    want = textbook(*(x[0] for x in double[:3]), None, *double[3:], tiles, gates=thirds)
    check(got, torch.autograd.grad(want.square().sum(), double))


FORMS = ["sigmoid", "given", "equal", "packed", "reference", "compressed lists", "bit masks", "bf16"]


def call_of(form):
    """Inputs, and a function of them and of whether results are computed again."""
    options, packed = dict(OPTIONS), form == "packed"
    q, k, v, weight, *projections = tensors(
        *((80,) if packed else (2, 75)), dtype=torch.bfloat16 if form == "bf16" else torch.float32
    )
    if form == "reference":
        options |= {"score": "dot", "stride": 8, "block": 8, "preset": "reference", "tile": 32}
    if form == "compressed lists":
        options |= COMPRESSED
    if form == "bit masks":
        mask = torch.rand(2, 2, 5, 5, generator=torch.Generator().manual_seed(6)) < 0.5
        options["tiles"] = tessera.TileList.from_mask(mask, form="bitmask", block=(16, 16))
    if packed:
        options |= {"cu_seqlens": torch.tensor([0, 30, 30, 37, 80], dtype=torch.int32), "max_seqlen": 50}
    inputs = [q, k, v]
    if form == "given":
        inputs.append(torch.rand(2, 75, 4, 3, generator=torch.Generator().manual_seed(5)).requires_grad_())
    elif form != "equal":
        inputs += [weight, *projections]

    def call(recompute, *given):
        names = ("gates",) if form == "given" else ("gate_weight", "k_projection", "v_projection")
        more = dict(zip(names, given[3:], strict=len(given) > 3))
        return tessera.nsa(*given[:3], recompute=recompute, **more, **options)

    return inputs, call


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("recompute", [False, True])
def test_heads_by_themselves_and_results_computed_again_give_the_same_bits(form, recompute, monkeypatch):
    inputs, call = call_of(form)
    want = call(False, *inputs)
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(4)).to(want.dtype)
    wanted = torch.autograd.grad(want, inputs, dout)
    monkeypatch.setattr(head_groups, "MOST_SUMS", 1)
    got = call(recompute, *inputs)
    for one, other in zip((got, *torch.autograd.grad(got, inputs, dout)), (want, *wanted), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("form", FORMS)
def test_one_node_and_a_node_for_each_operation_differ_by_rounding(form, monkeypatch):
    """In fp32 by that of gates of 1/3 alone; in bf16 one node, which rounds once, is nearer to what fp32 computes."""
    inputs, call = call_of(form)
    one = call(None, *inputs)
    assert type(one.grad_fn).__name__ == "NsaFunctionBackward"
    dout = torch.randn(one.shape, generator=torch.Generator().manual_seed(4)).to(one.dtype)
    by_one = torch.autograd.grad(one, inputs, dout)
    monkeypatch.setattr("tessera.torch.hooks.nsa_is_one_node", lambda *_: False)
    many = call(None, *inputs)
    assert torch.equal(one, many)
    by_many = torch.autograd.grad(many, inputs, dout)
    if form == "bf16":
        wide = [x.detach().float().requires_grad_() for x in inputs]
        exact = torch.autograd.grad(call(None, *wide), wide, dout.float())
        for name, x, y, z in zip("qkv", by_one, by_many, exact, strict=False):
            assert (x.float() - z).norm() < (y.float() - z).norm() < 0.02 * z.norm(), name
    else:
        for x, y in zip(by_one, by_many, strict=True):
            assert torch.equal(x, y) or (form == "equal" and torch.allclose(x, y, rtol=1e-5, atol=1e-6))


def peak_bytes(function):
    """The result, and the most bytes that torch's allocations of it held at a time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        result = function()
    now = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return result, most


@pytest.mark.parametrize("gated", [False, True])
def test_memory_of_a_step(gated, monkeypatch):
    """In bytes of q: what the forward keeps, and the most that both passes hold beside q, k, v and dout."""
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, 2048, heads, 64, generator=generator).bfloat16().requires_grad_() for heads in (32, 8, 8))
    weight = torch.zeros(32, 3, 64, dtype=torch.bfloat16, requires_grad=True) if gated else None
    inputs = [q, k, v] + ([weight] if gated else [])
    unit, given = 2 * q.numel(), {x.untyped_storage().data_ptr() for x in inputs}
    dout = torch.randn(q.shape, generator=generator).bfloat16()
    found, gradients = {}, {}
    for recompute in (False, True):
        monkeypatch.setattr(head_groups, "MOST_SUMS", 1 if recompute else 2 << 30)
        storages = {}

        def keep(x, storages=storages):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out, forward = peak_bytes(
                lambda recompute=recompute: tessera.nsa(q, k, v, gate_weight=weight, recompute=recompute)
            )
        kept = sum(size for at, size in storages.items() if at not in given)
        gradients[recompute], backward = peak_bytes(lambda out=out: torch.autograd.grad(out, inputs, dout))
        found[recompute] = [x / unit for x in (kept, forward, backward)]
    for x, y in zip(*gradients.values(), strict=True):
        assert (x.float() - y.float()).norm() <= 1e-4 * y.float().norm()
    # Three results with what rounding lost are 4.5; LSEs, compressed keys and lists take little.
    assert 4.5 < found[False][0] < 4.9 and 1.5 < found[True][0] < 1.75, found
    # Beside what is kept: the result, and memory for the branches of a key head, an eighth of all.
    assert found[True][1] < 1.75 + 1 + 3 / 8 + 0.15, found
    # Gradients are 1.5. For a key head: sums of dq, dk and dv 3 / 8, a copy of those of dq, which CPUs make to round
    # them, 2 / 8; with gates three results, what rounding lost of two, their gradients, one of q and its copy in fp32.
    assert found[True][2] < 1.5 + (3 + (2 if not gated else 3 + 1 + 3 + 1 + 2)) / 8 + 0.1, found
    assert found[False][2] > 4, found


def test_gradients_through_hooks_and_of_expanded_results():
    inputs, call = call_of("sigmoid")
    want = torch.autograd.grad(call(True, *inputs).sum(), inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        out = call(False, *inputs)
    for one, other in zip(torch.autograd.grad(out.sum(), inputs), want, strict=True):
        assert torch.equal(one, other)


def test_gates_write_into_given_memory():
    branches = torch.randn(3, 2, 40, 4, 24)
    memory = torch.full((2, 40, 8, 24), 7.0)
    assert tessera.nsa_gate(branches, out=memory[:, :, 2:6]).data_ptr() == memory[:, :, 2:6].data_ptr()
    assert torch.equal(memory[:, :, 2:6], tessera.nsa_gate(branches))
    assert (memory[:, :, :2] == 7).all() and (memory[:, :, 6:] == 7).all()


def test_the_module_says_what_is_computed_again(monkeypatch):
    q, k, v = tensors(1, 75)[:3]
    told = []
    original = nsa_function.nsa
    monkeypatch.setattr("tessera.torch.hooks.nsa", lambda *given: told.append(given[-1]) or original(*given))
    for recompute in (None, False, True):
        module = tessera.torch.NativeSparseAttention(4, 2, 16, 24, recompute=recompute, **OPTIONS)
        module(q, k, v).sum().backward()
        assert module.gate_weight.grad is not None
    assert told == [None, False, True]


@pytest.mark.parametrize("recompute", [False, True])
def test_deterministic_reaches_the_backward_of_each_branch(recompute, monkeypatch):
    from tessera import _execute

    own, told = _execute.plan_for, []

    def planned(*arguments):
        answer = own(*arguments)
        told.append("deterministic" in answer.plan.problem)
        return answer

    monkeypatch.setattr(_execute, "plan_for", planned)
    q, k, v = tensors(1, 75)[:3]
    wanted = torch.autograd.grad(tessera.nsa(q, k, v, recompute=recompute, **OPTIONS).sum(), (q, k, v))
    assert told == [False] * 3
    out = tessera.nsa(q, k, v, recompute=recompute, deterministic=True, **OPTIONS)
    got = torch.autograd.grad(out.sum(), (q, k, v))
    module = tessera.torch.NativeSparseAttention(4, 2, 16, 24, recompute=recompute, deterministic=True, **OPTIONS)
    module(q, k, v).sum().backward()
    assert told[3:] == [True] * 6
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize(("most", "kept"), [(2 * 75 * 4 * 24 * 4 + 1, 3), (2 * 75 * 4 * 24 * 4, 1)])
def test_what_is_kept_where_nobody_says(most, kept, monkeypatch):
    monkeypatch.setattr(nsa_function, "MOST_KEPT", most)
    q, k, v = tensors(1, 75)[:3]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        out = tessera.nsa(q, k, v, **OPTIONS)
    assert saved.count(out.shape) == kept


def test_second_derivatives_are_refused():
    inputs, call = call_of("sigmoid")
    want = torch.autograd.grad(call(True, *inputs).sum(), inputs)
    gradients = torch.autograd.grad(call(True, *inputs).sum(), inputs, create_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(gradients, want, strict=True))
    for gradient in gradients:
        with pytest.raises(NotImplementedError, match="nsa: got a derivative of a gradient"):
            gradient.sum().backward()


@pytest.mark.parametrize("gates", [None, torch.rand(1, 75, 4, 3)])
def test_second_derivatives_of_pooling_and_gates_are_refused(gates):
    q, k, v = tensors(1, 75)[:3]
    lengths = {"length": 8, "stride": 4, "max_seqlen_k": None, "threads": 0}
    pooled = operators_of_nsa.nsa_pool(k, v, k_projection=None, v_projection=None, cu_seqlens_k=None, **lengths)
    named = {"q": None, "gate_weight": None, "gates": gates, "cu_seqlens": None, "max_seqlen": None, "threads": 0}
    mixed = operators_of_nsa.nsa_gate((q, 2 * q, 3 * q), **named)
    for out, leaf in ((pooled[0], k), (mixed, q)):
        (first,) = torch.autograd.grad(out.sum(), leaf, retain_graph=True)
        (gradient,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
        assert torch.equal(gradient, first)
        for loss in (gradient.sum(), out.sum() + gradient.sum()):
            with pytest.raises(NotImplementedError, match="nsa: got a derivative of a gradient"):
                loss.backward(retain_graph=True)
        if out is not mixed or gates is not None:  # the gradient of a mean depends on nothing
            with pytest.raises(NotImplementedError, match="nsa: got a derivative of a gradient"):
                torch.autograd.grad(gradient.sum(), leaf, retain_graph=True)


def test_autocast():
    q, k, v = tensors(1, 75)[:3]
    with torch.autocast("cpu", torch.bfloat16):
        out = tessera.nsa(q, k, v, **OPTIONS)
        assert out.dtype == torch.bfloat16 and out.grad_fn is not None
        with pytest.raises(NotImplementedError, match="recompute: got True under"):
            tessera.nsa(q, k, v, recompute=True, **OPTIONS)
        halves = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
        out = tessera.nsa(*halves, recompute=True, **OPTIONS)
        assert type(out.grad_fn).__name__ == "NsaFunctionBackward"
    got = torch.autograd.grad(out, halves, torch.ones_like(out))
    same = tessera.nsa(*halves, **OPTIONS)
    for one, other in zip(got, torch.autograd.grad(same, halves, torch.ones_like(out)), strict=True):
        assert torch.equal(one, other)


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
