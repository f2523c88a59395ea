# SPDX-License-Identifier: Apache-2.0
"""`linear_decode` and `linear_chunk` on numpy arrays and torch tensors against the recurrence in a few lines, and
`decay_slopes`."""

import numpy as np
import pytest
import tessera


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def recurrence(q, k, v, state, slopes, scale):
    """(out, new states) in double; state: (b, h, d, dv)."""
    q, k, v, state = (x.astype(np.float64) for x in (q, k, v, state))
    out = np.empty((*q.shape[:3], v.shape[3]))
    for t in range(q.shape[1]):
        state = np.exp(-slopes.astype(np.float64))[:, None, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        out[:, t] = np.einsum("bhd,bhde->bhe", scale * q[:, t], state)
    return out, state


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def step(rng):
    q, k, v = (normal(rng, 3, 2, 4, 32) for _ in range(3))
    return q, k, v, normal(rng, 5, 4, 32, 32), np.array([0.0, 0.1, 0.7, 3.0], np.float32)


class TestLinearDecode:
    @pytest.mark.parametrize("layout", ["vk", "kv"])
    def test_states_by_slot(self, step, layout):
        q, k, v, pool, slopes = step
        slots = np.array([4, 0, 2], np.int64)
        before = pool.copy()
        of_slots = before[slots] if layout == "kv" else before[slots].swapaxes(-1, -2)
        want, states = recurrence(q, k, v, of_slots, slopes, 32**-0.5)
        out = tessera.linear_decode(q, k, v, pool, slopes, state_slots=slots, layout=layout)
        close(out, want)
        close(pool[slots] if layout == "kv" else pool[slots].swapaxes(-1, -2), states)
        np.testing.assert_array_equal(pool[[1, 3]], before[[1, 3]])

    def test_sequences_in_order_without_slots_and_a_scale(self, step):
        q, k, v, pool, slopes = step
        want, states = recurrence(q, k, v, pool[:3], slopes, 0.5)
        close(tessera.linear_decode(q, k, v, pool, slopes, scale=0.5, layout="kv"), want)
        close(pool[:3], states)

    def test_skipped_sequences_and_destinations(self, step):
        q, k, v, pool, slopes = step
        before = pool.copy()
        out = tessera.linear_decode(
            q,
            k,
            v,
            pool,
            slopes,
            state_slots=np.array([1, -1, 1], np.int32),
            dest_slots=np.array([3, 2, -1], np.int32),
            layout="kv",
        )
        want, states = recurrence(q, k, v, before[[1, 1, 1]], slopes, 32**-0.5)
        close(out[[0, 2]], want[[0, 2]])
        assert not out[1].any()
        close(pool[3], states[0])
        np.testing.assert_array_equal(np.delete(pool, 3, 0), np.delete(before, 3, 0))

    def test_views_of_a_packed_projection_and_out(self, rng, step):
        *_, pool, slopes = step
        packed = normal(rng, 3, 2, 3, 4, 32)
        q, k, v = (packed[:, :, i] for i in range(3))
        want, _ = recurrence(q, k, v, pool[:3], slopes, 32**-0.5)
        out = np.empty((3, 2, 4, 32), np.float16)
        assert tessera.linear_decode(q, k, v, pool, slopes, layout="kv", out=out) is out
        np.testing.assert_allclose(out, want, rtol=1e-3, atol=1e-3)

    def test_torch_and_bfloat16_states(self, step):
        torch = pytest.importorskip("torch")
        q, k, v, pool, slopes = (torch.from_numpy(array) for array in step)
        state = pool.bfloat16()
        want, states = recurrence(*(x.numpy() for x in (q, k, v, state[:3].float(), slopes)), 32**-0.5)
        out = tessera.linear_decode(q.bfloat16().float(), k, v, state, slopes, layout="kv")
        assert isinstance(out, torch.Tensor)
        np.testing.assert_allclose(out.numpy(), want, rtol=0.02, atol=0.1)
        np.testing.assert_allclose(state[:3].float().numpy(), states, rtol=0.01, atol=0.01)
        with pytest.raises(ValueError, match="q: got a tensor that requires grad"):
            tessera.linear_decode(q.requires_grad_(), k, v, state, slopes)

    def test_refusals(self, step):
        q, k, v, pool, slopes = step
        before = pool.copy()
        with pytest.raises(ValueError, match=r"state_slots: got \[2\] = 5; want a state below 5, or -1 for none"):
            tessera.linear_decode(q, k, v, pool, slopes, state_slots=np.array([0, 1, 5], np.int32))
        with pytest.raises(ValueError, match=r"decay_slopes: got \[1\] = -0\.1"):
            tessera.linear_decode(q, k, v, pool, np.array([0, -0.1, 0, 0], np.float32))
        with pytest.raises(ValueError, match="state_slots: got unbound; want bound: 3 sequences share a pool of 2"):
            tessera.linear_decode(q, k, v, pool[:2], slopes)
        with pytest.raises(ValueError, match="seqlen_q: got 9; want 1 to 8 tokens a step"):
            tessera.linear_decode(*(np.zeros((3, 9, 4, 32), np.float32) for _ in range(3)), pool, slopes)
        with pytest.raises(ValueError, match="q: got 3 dimensions"):
            tessera.linear_decode(q[0], k, v, pool, slopes)
        with pytest.raises(ValueError, match="layout"):
            tessera.linear_decode(q, k, v, pool, slopes, layout="dd")
        with pytest.raises(ValueError, match="state"):
            tessera.linear_decode(q, k, v[..., :16], pool, slopes)
        with pytest.raises(TypeError, match=r"decay_slopes: got builtins\.list"):
            tessera.linear_decode(q, k, v, pool, [0.0] * 4)
        np.testing.assert_array_equal(pool, before)


@pytest.fixture
def sequences(rng):
    """150 tokens of two sequences, a pool, slopes."""
    q, k, v = (normal(rng, 2, 150, 4, 32) for _ in range(3))
    return q, k, v, normal(rng, 5, 4, 32, 32), np.array([0.0, 0.1, 0.7, 3.0], np.float32)


def near(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * np.abs(want).max())


class TestLinearChunk:
    @pytest.mark.parametrize("layout", ["vk", "kv"])
    def test_states_by_slot_and_decoding_from_there(self, rng, sequences, layout):
        q, k, v, pool, slopes = sequences
        slots, before = np.array([4, 0], np.int64), pool.copy()
        of_slots = before[slots] if layout == "kv" else before[slots].swapaxes(-1, -2)
        want, states = recurrence(q, k, v, of_slots, slopes, 32**-0.5)
        prefill = [x[:, :145] for x in (q, k, v)]
        near(tessera.linear_chunk(*prefill, pool, slopes, state_slots=slots, layout=layout), want[:, :145])
        steps = [x[:, 145:] for x in (q, k, v)]
        near(tessera.linear_decode(*steps, pool, slopes, state_slots=slots, layout=layout), want[:, 145:])
        near(pool[slots] if layout == "kv" else pool[slots].swapaxes(-1, -2), states)
        np.testing.assert_array_equal(pool[1:4], before[1:4])

    def test_packed_sequences_from_zeros_to_destinations(self, sequences):
        q, k, v, pool, slopes = (*(x[0] for x in sequences[:3]), *sequences[3:])
        starts, before = np.array([0, 100, 100, 150], np.int32), pool.copy()
        out = tessera.linear_chunk(
            q,
            k,
            v,
            pool,
            slopes,
            state_slots=np.array([-1, -1, 2], np.int32),
            dest_slots=np.array([1, 0, -1], np.int32),
            cu_seqlens=starts,
            scale=0.5,
            layout="kv",
        )
        first, state = recurrence(q[None, :100], k[None, :100], v[None, :100], np.zeros((1, 4, 32, 32)), slopes, 0.5)
        last, _ = recurrence(q[None, 100:], k[None, 100:], v[None, 100:], before[2:3], slopes, 0.5)
        near(out, np.concatenate([first[0], last[0]]))
        near(pool[1], state[0])
        assert not pool[0].any()
        np.testing.assert_array_equal(pool[2:], before[2:])

    def test_without_a_pool_and_out(self, sequences):
        q, k, v, _, slopes = sequences
        want, _ = recurrence(q, k, v, np.zeros((2, 4, 32, 32)), slopes, 32**-0.5)
        out = np.empty_like(v)
        assert tessera.linear_chunk(q, k, v, None, slopes, out=out) is out
        near(out, want)

    def test_states_as_arguments_and_results(self, sequences):
        q, k, v, pool, slopes = sequences
        want, states = recurrence(q, k, v, pool[:2], slopes, 32**-0.5)
        before = pool.copy()
        out, final = tessera.linear_attention(q, k, v, slopes, initial_state=pool[:2], output_final_state=True)
        near(out, want)
        near(final, states)
        np.testing.assert_array_equal(pool, before)
        out, final = tessera.linear_attention(q, k, v, slopes)
        near(out, recurrence(q, k, v, np.zeros_like(pool[:2]), slopes, 32**-0.5)[0])
        assert final is None

    def test_packed_as_one_sequence(self, sequences):
        q, k, v, pool, slopes = (*(x[:1] for x in sequences[:3]), *sequences[3:])
        options = {"initial_state": pool[:2], "output_final_state": True, "cu_seqlens": np.array([0, 60, 150])}
        out, final = tessera.linear_attention(q, k, v, slopes, **options)
        first = recurrence(*(x[:, :60] for x in (q, k, v)), pool[:1], slopes, 32**-0.5)
        last = recurrence(*(x[:, 60:] for x in (q, k, v)), pool[1:2], slopes, 32**-0.5)
        parts = [first, last]
        near(out, np.concatenate([part[0] for part in parts], 1))
        near(final, np.concatenate([part[1] for part in parts]))

    def test_refusals(self, sequences):
        q, k, v, pool, slopes = sequences
        before = pool.copy()
        with pytest.raises(ValueError, match=r"state_slots: got \[1\] = 5; want a state below 5"):
            tessera.linear_chunk(q, k, v, pool, slopes, state_slots=np.array([0, 5], np.int32))
        with pytest.raises(ValueError, match="state_slots: got unbound; want bound: 2 sequences share a pool of 1"):
            tessera.linear_chunk(q, k, v, pool[:1], slopes)
        with pytest.raises(ValueError, match="state: got 3 dimensions"):
            tessera.linear_chunk(q, k, v, pool[0], slopes)
        with pytest.raises(ValueError, match="q: got 4 dimensions"):
            tessera.linear_chunk(q, k, v, pool, slopes, cu_seqlens=np.array([0, 300], np.int32))
        with pytest.raises(ValueError, match="cu_seqlens_q"):
            tessera.linear_chunk(q[0], k[0], v[0], None, slopes, cu_seqlens=np.array([0, 151], np.int32))
        with pytest.raises(ValueError, match="q: got 2 sequences beside cu_seqlens"):
            tessera.linear_attention(q, k, v, slopes, cu_seqlens=np.array([0, 150], np.int32))
        with pytest.raises(TypeError, match=r"decay_slopes: got builtins\.list"):
            tessera.linear_attention(q, k, v, [0.0] * 4)
        np.testing.assert_array_equal(pool, before)


class TestStatus:
    """A word that notes what a GPU finds; on the host bad slots are errors with it too."""

    def test_stays_zero(self, step):
        q, k, v, pool, slopes = step
        status = np.zeros(1, np.int32)
        out = tessera.linear_decode(q, k, v, pool.copy(), slopes, status=status)
        np.testing.assert_array_equal(out, tessera.linear_decode(q, k, v, pool.copy(), slopes))
        tessera.linear_chunk(q, k, v, pool.copy(), slopes, status=status)
        assert status[0] == 0
        with pytest.raises(ValueError, match="state_slots"):
            tessera.linear_decode(q, k, v, pool, slopes, state_slots=np.array([0, 1, 9]), status=status)
        with pytest.raises(ValueError, match="status"):
            tessera.linear_decode(q, k, v, pool, slopes, status=np.zeros(2, np.int32))


class TestDecaySlopes:
    def test_alibi(self):
        np.testing.assert_allclose(tessera.decay_slopes(8), [2.0**-i for i in range(1, 9)])
        twelve = tessera.decay_slopes(12)
        np.testing.assert_allclose(twelve[:8], tessera.decay_slopes(8))
        np.testing.assert_allclose(twelve[8:], [2.0 ** -(i + 0.5) for i in range(4)], rtol=1e-6)

    def test_by_layers(self):
        first, last = tessera.decay_slopes(64, layer=0, layers=80), tessera.decay_slopes(64, layer=79, layers=80)
        np.testing.assert_allclose(first, tessera.decay_slopes(64) * (1 + 1e-5), rtol=1e-6)
        np.testing.assert_allclose(last, tessera.decay_slopes(64) * 1e-5, rtol=1e-3)
        assert first.dtype == np.float32

    def test_linear(self):
        slopes = tessera.decay_slopes(4, layer=6, layers=24, rule="linear")
        np.testing.assert_allclose(slopes, [0.0, 1.5, 3.0, 4.5])

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"heads": 0}, "heads: got 0"),
            ({"heads": 4, "layer": 3}, "layers: got layer=3 with layers=None"),
            ({"heads": 4, "layer": 3, "layers": 3}, "layer: got 3; want 0 to below 3"),
            ({"heads": 4, "rule": "square"}, "rule: got 'square'"),
            ({"heads": 4, "rule": "linear"}, "layer: got none"),
        ],
    )
    def test_refusals(self, arguments, error):
        with pytest.raises(ValueError, match=error):
            tessera.decay_slopes(**arguments)
