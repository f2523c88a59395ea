# SPDX-License-Identifier: Apache-2.0
"""`linear_decode` with tokens that wait in a ring beside the state, `linear_flush` and `ring_advance`, on numpy arrays
and torch tensors against the same steps without a ring."""

import numpy as np
import pytest
import tessera
from tessera._core import Plan
from tessera.linear import MOST_RING_TOKENS

SLOTS = np.array([4, 0, 2], np.int32)
SLOPES = np.array([0.0, 0.1, 0.7, 3.0], np.float32)
RING = 6


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.fixture
def tokens():
    return [normal(np.random.default_rng(11), 3, 40, 4, 32) for _ in range(3)]


@pytest.fixture
def pool():
    return normal(np.random.default_rng(12), 5, 4, 32, 32)


class Rings:
    """Steps on a pool; what has not been written stays NaN."""

    def __init__(self, pool, **options):
        self.pool, self.options = pool, options
        self.k, self.v = (np.full((5, 4, 2 * RING, 32), np.nan, np.float32) for _ in range(2))
        self.cursor = np.zeros(3, np.int32)

    def step(self, q, k, v, kept=None):
        out = tessera.linear_decode(
            *(np.ascontiguousarray(x) for x in (q, k, v)),
            self.pool,
            SLOPES,
            state_slots=SLOTS,
            ring_k=self.k,
            ring_v=self.v,
            ring_cursor=self.cursor,
            **self.options,
        )
        self.cursor = tessera.ring_advance(self.cursor, q.shape[1], RING)
        if kept is not None:
            self.cursor -= q.shape[1] - np.asarray(kept, np.int32)
        return out

    def flush(self):
        arrays = (self.pool, SLOPES, self.k, self.v, self.cursor)
        assert tessera.linear_flush(*arrays, state_slots=SLOTS, **self.options) is None
        self.cursor = np.zeros(3, np.int32)


class TestRing:
    @pytest.mark.parametrize("layout", ["vk", "kv"])
    @pytest.mark.parametrize("step", [1, 4, 6])
    def test_is_steps_without(self, tokens, pool, layout, step):
        rings, plain = Rings(pool.copy(), layout=layout), pool.copy()
        for first in range(0, 24, step):
            now = [np.ascontiguousarray(x[:, first : first + step]) for x in tokens]
            out = rings.step(*now)
            close(out, tessera.linear_decode(*now, plain, SLOPES, state_slots=SLOTS, layout=layout))
        assert not np.array_equal(rings.pool, plain)
        rings.flush()
        close(rings.pool, plain)
        np.testing.assert_array_equal(rings.pool[[1, 3]], pool[[1, 3]])
        assert np.isnan(rings.k[[1, 3]]).all() and np.isnan(rings.v[[1, 3]]).all()

    def test_each_sequence_rejects_its_own(self, tokens, pool):
        rings, at = Rings(pool.copy()), np.zeros(3, int)
        for kept in ([1, 4, 0], [2, 0, 4], [4, 4, 4], [0, 1, 0], [4, 3, 4]):
            rings.step(*(np.stack([x[b, at[b] : at[b] + 4] for b in range(3)]) for x in tokens), kept=kept)
            at += kept
        rings.flush()
        for b, slot in enumerate(SLOTS):
            state = pool[slot : slot + 1].copy()
            for t in range(at[b]):
                tessera.linear_decode(*(x[b : b + 1, t : t + 1] for x in tokens), state, SLOPES)
            close(rings.pool[slot], state[0])

    def test_the_state_is_written_by_flushes_alone(self, tokens, pool):
        rings = Rings(pool.copy())
        for t in range(RING):
            rings.step(*(x[:, t : t + 1] for x in tokens))
            np.testing.assert_array_equal(rings.pool, pool)
        rings.step(*(x[:, RING : RING + 1] for x in tokens))
        assert not np.array_equal(rings.pool, pool)

    def test_torch_and_bfloat16(self, tokens, pool):
        torch = pytest.importorskip("torch")
        q, k, v = (torch.from_numpy(x).bfloat16() for x in tokens)
        state, slopes, slots = torch.from_numpy(pool), torch.from_numpy(SLOPES), torch.from_numpy(SLOTS)
        plain = state.clone()
        ring_k, ring_v = (torch.zeros(5, 4, 2 * RING, 32, dtype=torch.bfloat16) for _ in range(2))
        cursor = torch.zeros(3, dtype=torch.int32)
        for t in range(9):
            now = [x[:, t : t + 1] for x in (q, k, v)]
            out = tessera.linear_decode(
                *now, state, slopes, state_slots=slots, ring_k=ring_k, ring_v=ring_v, ring_cursor=cursor
            )
            want = tessera.linear_decode(*now, plain, slopes, state_slots=slots)
            np.testing.assert_allclose(out.float(), want.float(), rtol=0.01, atol=0.01)
            cursor = tessera.ring_advance(cursor, 1, RING)
            assert cursor.dtype == torch.int32
        tessera.linear_flush(state, slopes, ring_k, ring_v, cursor, state_slots=slots)
        close(state, plain)
        with pytest.raises(ValueError, match="state: got a tensor that requires grad"):
            tessera.linear_flush(state.requires_grad_(), slopes, ring_k, ring_v, cursor, state_slots=slots)

    def test_refusals(self, tokens, pool):
        now, before = [np.ascontiguousarray(x[:, :2]) for x in tokens], pool.copy()
        ring = np.zeros((5, 4, 2 * RING, 32), np.float32)
        rings = {"ring_k": ring, "ring_v": ring.copy(), "ring_cursor": np.zeros(3, np.int32)}

        def step(**options):
            return tessera.linear_decode(*now, pool, SLOPES, state_slots=SLOTS, **{**rings, **options})

        with pytest.raises(ValueError, match=r"ring_cursor: got \[1\] = 14; want 0 to 13, what ring_advance\(\) gives"):
            step(ring_cursor=np.array([0, 14, 0], np.int32))
        with pytest.raises(ValueError, match=r"dest_slots: got .*; want nothing bound"):
            step(dest_slots=SLOTS)
        with pytest.raises(ValueError, match="ring_v: got unbound"):
            step(ring_v=None)
        with pytest.raises(ValueError, match=r"ring_k: got .*; want fp32"):
            step(ring_k=ring[:, :1])
        for rows in (2, 9, 130):
            with pytest.raises(ValueError, match=rf"ring_k: got {rows} rows a head, .* of a ring of 2 to 64 tokens"):
                step(ring_k=np.zeros((5, 4, rows, 32), np.float32))
        with pytest.raises(ValueError, match="ring_k: got 3 dimensions"):
            step(ring_k=ring[0])
        with pytest.raises(ValueError, match=r"ring_cursor: got .*; want nothing bound"):
            tessera.linear_decode(*now, pool, SLOPES, state_slots=SLOTS, ring_cursor=np.zeros(3, np.int32))
        with pytest.raises(ValueError, match="ring_cursor: got 2 dimensions"):
            tessera.linear_flush(pool, SLOPES, ring, ring.copy(), np.zeros((3, 1), np.int32))
        with pytest.raises(ValueError, match=r"ring_cursor: got \[0\] = -1"):
            tessera.linear_flush(pool, SLOPES, ring, ring.copy(), np.full(3, -1, np.int32))
        with pytest.raises(ValueError, match=r"ring_k: got 130 rows a head, .* of a ring of 1 to 64 tokens"):
            tessera.linear_flush(pool, SLOPES, np.zeros((5, 4, 130, 32), np.float32), ring, np.zeros(3, np.int32))
        np.testing.assert_array_equal(pool, before)

    def test_the_longest_ring_is_the_cores(self):
        line = f"linear_decode t=1 h=1 d=32 slots=1 ring={MOST_RING_TOKENS}"
        Plan(line)
        with pytest.raises(ValueError, match=f"ring: got {MOST_RING_TOKENS + 1}; want .* to {MOST_RING_TOKENS} tokens"):
            Plan(line.replace(f"ring={MOST_RING_TOKENS}", f"ring={MOST_RING_TOKENS + 1}"))


class TestStochasticRounding:
    def test_seeds_repeat_and_the_mean_is_the_state(self, tokens, pool):
        torch = pytest.importorskip("torch")
        q, k, v = (torch.from_numpy(np.ascontiguousarray(x[:, :1])) for x in tokens)
        slots, slopes = torch.from_numpy(SLOTS), torch.from_numpy(SLOPES)
        exact = torch.from_numpy(pool).bfloat16().float()
        tessera.linear_decode(q, k, v, exact, slopes, state_slots=slots)

        def step(**options):
            state = torch.from_numpy(pool).bfloat16()
            tessera.linear_decode(q, k, v, state, slopes, state_slots=slots, rounding="stochastic", **options)
            return state

        one = step(seed=5, offset=3)
        assert torch.equal(one, step(seed=torch.tensor([5], dtype=torch.uint64), offset=3))
        assert not torch.equal(one, step(seed=5, offset=4))
        assert not torch.equal(step(), step())
        mean = sum(step(seed=5, offset=i).double() for i in range(400)) / 400
        assert (mean - exact).abs().max() < 0.2 * (one - exact).abs().max()
        with pytest.raises(ValueError, match="rounding: got 'up'; want"):
            tessera.linear_decode(q, k, v, exact, slopes, rounding="up")
        with pytest.raises(ValueError, match="rounding: got stochastic for states in fp32; want nearest"):
            tessera.linear_decode(q, k, v, exact, slopes, state_slots=slots, rounding="stochastic")

    def test_of_a_flush(self, pool):
        torch = pytest.importorskip("torch")
        ring = torch.ones(5, 4, 2, 32)
        cursor, slopes = torch.tensor([1, 0, 3, 2, 1], dtype=torch.int32), torch.from_numpy(SLOPES)

        def flushed(offset):
            state = torch.from_numpy(pool).bfloat16()
            options = {"rounding": "stochastic", "seed": 9, "offset": offset}
            tessera.linear_flush(state, slopes, ring, ring.clone(), cursor, **options)
            return state

        first, again, later = flushed(1), flushed(1), flushed(2)
        assert torch.equal(first, again)
        assert not torch.equal(first[[0, 2]], later[[0, 2]])
        assert torch.equal(first[[1, 3]], torch.from_numpy(pool).bfloat16()[[1, 3]])


class TestRingAdvance:
    def test_walks_both_halves(self):
        cursor, seen = 0, []
        for _ in range(9):
            cursor = tessera.ring_advance(cursor, 1, 3)
            seen.append(cursor)
        assert seen == [1, 2, 3, 5, 6, 7, 1, 2, 3]
        assert tessera.ring_advance(5, 3, 3) == 3
        assert tessera.ring_advance(4, 3, 3) == 7
        assert tessera.ring_advance(2, 2, 3) == 6

    def test_of_arrays(self):
        cursors = np.arange(14, dtype=np.int32)
        moved = tessera.ring_advance(cursors, 2, 6)
        assert moved.dtype == np.int32
        assert moved.tolist() == [tessera.ring_advance(int(cursor), 2, 6) for cursor in cursors]
