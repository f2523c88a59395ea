# SPDX-License-Identifier: Apache-2.0
"""Linear attention's torch operators: gradients against torch's own of the recurrence, opcheck, compile; refusals."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402

SLOPES = torch.tensor([0.0, 0.05, 1.5])
STARTS = torch.tensor([0, 33, 33, 100], dtype=torch.int32)


def recurrence(q, k, v, slopes, state, scale):
    """(out, last state) by operations that torch differentiates; state: (b, h, d, dv)."""
    out = []
    for t in range(q.shape[1]):
        state = torch.exp(-slopes)[:, None, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append(torch.einsum("bhd,bhde->bhe", scale * q[:, t], state))
    return torch.stack(out, 1), state


def tensors(batch=2, tokens=70, states=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    rows = [normal(batch, tokens, 3, dim) for dim in (16, 16, 24)]
    return (*rows, normal(states or batch, 3, 16, 24))


def gradients(results, inputs):
    weights = [(torch.arange(x.numel()) % 7 - 3).view(x.shape).to(x.dtype) for x in results]
    return torch.autograd.grad(results, inputs, weights)


def assert_near(got, want):
    for one, other in zip(got, [x.detach() for x in want], strict=True):
        torch.testing.assert_close(one.detach(), other.to(one.dtype), rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def doubled(inputs):
    return [x.detach().double().requires_grad_() for x in inputs]


@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_results_and_gradients(layout):
    inputs = tensors()
    wide = doubled(inputs)
    want = recurrence(*wide[:3], SLOPES.double(), wide[3], 0.3)
    state = inputs[3] if layout == "kv" else inputs[3].transpose(-1, -2)
    out, final = tessera.linear_attention(
        *inputs[:3], SLOPES, initial_state=state, output_final_state=True, scale=0.3, layout=layout
    )
    final = final if layout == "kv" else final.transpose(-1, -2)
    assert_near((out, final), want)
    assert_near(gradients((out, final), inputs), gradients(want, wide))


def test_gradients_of_packed_sequences():
    inputs = tensors(1, 100, states=3)
    wide = doubled(inputs)
    parts = [
        recurrence(*(x[:, a:b] for x in wide[:3]), SLOPES.double(), wide[3][i : i + 1], 0.25)
        for i, a, b in ((0, 0, 33), (2, 33, 100))
    ]
    want = torch.cat([part[0] for part in parts], 1)
    theirs = gradients((want,), wide)
    for starts in (STARTS, STARTS.long()):
        out, final = tessera.linear_attention(*inputs[:3], SLOPES, initial_state=inputs[3], cu_seqlens=starts)
        assert final is None
        assert_near((out,), (want,))
        assert_near(gradients((out,), inputs), theirs)


def test_gradients_without_states_and_through_the_last_state_alone():
    q, k, v, _ = tensors()
    wide = doubled((q, k, v))
    zeros = torch.zeros(2, 3, 16, 24, dtype=torch.float64)
    want, _ = recurrence(*wide, SLOPES.double(), zeros, 0.25)
    out = tessera.linear_chunk(q, k, v, None, SLOPES)
    assert_near(gradients((out,), (q, k, v)), gradients((want,), wide))
    _, last = recurrence(*wide, SLOPES.double(), zeros, 0.25)
    _, final = tessera.linear_attention(q, k, v, SLOPES, output_final_state=True)
    assert_near(gradients((final,), (k, v)), gradients((last,), wide[1:]))


def test_a_state_handed_on():
    """Two halves, the second from the first's last state: the gradients of the whole."""
    inputs = tensors()
    half = [x[:, :31] for x in inputs[:3]], [x[:, 31:] for x in inputs[:3]]
    first, state = tessera.linear_attention(*half[0], SLOPES, initial_state=inputs[3], output_final_state=True)
    second, _ = tessera.linear_attention(*half[1], SLOPES, initial_state=state)
    whole, _ = tessera.linear_attention(*inputs[:3], SLOPES, initial_state=inputs[3])
    parts = torch.cat([first, second], 1)
    assert_near((parts,), (whole,))
    assert_near(gradients((parts,), inputs), gradients((whole,), inputs))


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("form", ["zeros", "state", "packed"])
def test_opcheck(form, keeps):
    q, k, v, state = tensors(2, 20)
    state = None if form == "zeros" else state
    starts = None
    if form == "packed":
        q, k, v = (x.detach()[0].requires_grad_() for x in (q, k, v))
        starts = torch.tensor([0, 7, 20], dtype=torch.int32)
    call = (q, k, v, SLOPES, state, starts, None, 0.5, "kv", keeps)
    torch.library.opcheck(torch.ops.tessera.linear_attention.default, call)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in call]
    upstream = torch.ones_like(plain[2]), torch.ones(2, 3, 16, 24) if keeps else None
    torch.library.opcheck(torch.ops.tessera.linear_attention_backward.default, (*upstream, *plain))


def test_compiled():
    inputs = tensors()

    def loss(q, k, v, state):
        out, final = tessera.linear_attention(q, k, v, SLOPES, initial_state=state, output_final_state=True)
        return (out * out).sum() + final.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_near(torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(loss(*inputs), inputs))


def test_half_types():
    inputs = tensors(dtype=torch.bfloat16)
    wide = doubled(inputs)
    want = recurrence(*wide[:3], SLOPES.double(), wide[3], 0.25)
    out, final = tessera.linear_attention(*inputs[:3], SLOPES, initial_state=inputs[3], output_final_state=True)
    assert out.dtype == torch.bfloat16 and final.dtype == torch.float32
    torch.testing.assert_close(final.detach().double(), want[1].detach(), rtol=1e-4, atol=1e-3)
    for got, ours in zip(gradients((out,), inputs), gradients((want[0],), wide), strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), ours, rtol=0.02, atol=0.02 * float(ours.abs().max()))


def test_refusals():
    q, k, v, state = tensors()
    pool = state.detach().clone()
    with pytest.raises(
        ValueError, match="q: got a tensor that requires grad; want one that does not: linear_chunk has none"
    ):
        tessera.linear_chunk(q, k, v, pool, SLOPES, layout="kv")
    with pytest.raises(ValueError, match="decay_slopes: got a tensor that requires grad"):
        tessera.linear_attention(q, k, v, SLOPES.clone().requires_grad_())
    with pytest.raises(TypeError, match="decay_slopes: got an array of numpy; want one of torch, as q is"):
        tessera.linear_attention(q, k, v, SLOPES.numpy())
    with pytest.raises(TypeError, match="cu_seqlens: got an array of numpy; want one of torch, as q is"):
        starts = torch.tensor([0, q.shape[1]], dtype=torch.int32).numpy()
        tessera.linear_attention(q[0], k[0], v[0], SLOPES, cu_seqlens=starts)
    out, _ = tessera.linear_attention(q, k, v, SLOPES)
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        gradient.sum().backward()
    with torch.no_grad():
        before = pool.clone()
        tessera.linear_chunk(q, k, v, pool, SLOPES, layout="kv")
    assert not torch.equal(pool, before)


def test_no_sequences():
    q, k, v, state = tensors(batch=0, tokens=3)
    out, final = tessera.linear_attention(q, k, v, SLOPES, initial_state=state, output_final_state=True)
    assert out.shape == (0, 3, 3, 24)
    assert final.shape == (0, 3, 16, 24)
    assert [x.shape for x in torch.autograd.grad((out.sum(), final.sum()), (q, k, v, state))] == [
        x.shape for x in (q, k, v, state)
    ]


def test_refuses_states_of_other_shapes_and_arguments_that_a_pool_wants():
    q, k, v, _ = tensors()
    for batch in (1, 3):
        with pytest.raises(ValueError, match=r"^initial_state: got shape .*; want \(2, 3, 16, 24\)"):
            tessera.linear_attention(q, k, v, SLOPES, initial_state=torch.zeros(batch, 3, 16, 24))
    with pytest.raises(ValueError, match=r"^layout: got 'qk'; want"):
        tessera.linear_attention(q, k, v, SLOPES, layout="qk")
    q, k, v = (x.detach() for x in (q, k, v))
    with pytest.raises(ValueError, match="state_slots"):
        tessera.linear_chunk(q, k, v, None, SLOPES, state_slots=torch.tensor([7, 9], dtype=torch.int32))


def test_a_seed_may_be_what_torch_draws():
    """int64, as drawn while a CUDA graph is captured, stands for the same bits of uint64."""
    q, k, v, state = (x.detach() for x in tensors(tokens=1, states=2))
    states = []
    for seed in (torch.tensor([-5]), 2**64 - 5, 5):
        rounded = state.transpose(2, 3).to(torch.bfloat16).contiguous()
        tessera.linear_decode(q, k, v, rounded, SLOPES, rounding="stochastic", seed=seed)
        states.append(rounded)
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
