# SPDX-License-Identifier: Apache-2.0
"""Skip states: what the C++ tests hold against the oracle, as Python calls it."""

import pickle

import numpy as np
import pytest
import tessera

ORACLE = "implementation=cpu.reference"
RAMPS = {"mass": (0.05, 0.2), "threshold": (-2.0, -0.5)}


def made(rule="mass", **options):
    usual = {"batch": 2, "seqlen_q": 40, "seqlen_k": 90, "heads_q": 4, "block": (16, 16), "steps": 5}
    return tessera.SkipState(**{**usual, "rule": rule, "ramp": RAMPS.get(rule), **options})


def inputs(seed=0, seqlen_k=90):
    random = np.random.default_rng(seed)
    shapes = ((2, 40, 4, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 16))
    return tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)


@pytest.mark.parametrize("rule", ["mass", "threshold"])
def test_steps_give_what_the_oracle_gives(rule):
    state, oracle = made(rule, heads={1: RAMPS[rule]}), made(rule, heads={1: RAMPS[rule]})
    q, k, v = inputs()
    for step in range(5):
        q = q + 0.2 * inputs(step + 1)[0]
        out, lse = state(q, k, v, step=step, return_lse=True)
        want, want_lse = oracle(q, k, v, step=step, return_lse=True, wishes=ORACLE)
        np.testing.assert_allclose(out, want, atol=2e-6)
        np.testing.assert_allclose(lse, want_lse, atol=2e-6)
        np.testing.assert_array_equal(state.tile_list().bits, oracle.tile_list().bits)
    assert 0 < state.active < 1


def test_a_step_computes_the_listed_tiles():
    state = made(warm_up=1)
    q, k, v = inputs()
    state(q, k, v, step=0)
    state(q, k, v, step=1)
    listed = state.tile_list()
    np.testing.assert_array_equal(state(q, k, v, step=2), tessera.attention(q, k, v, tiles=listed))
    assert state.active < listed.to_mask(key_blocks=6).mean() + 1e-9


def test_warm_up_keeps_every_tile():
    state = made(warm_up=3, ramp=(3.9, 3.9))
    q, k, v = inputs()
    for step, want in enumerate((1, 1, 1, 0)):
        state(q, k, v, step=step)
        assert state.active == want


def test_a_step_that_goes_back_is_refused():
    state, (q, k, v) = made(), inputs()
    for step in (0, 1, 3):
        state(q, k, v, step=step)
    before = state.to_bytes()
    for step in (2, 3, 5, -1):
        with pytest.raises(ValueError, match=r"^step: got"):
            state(q, k, v, step=step)
    assert state.to_bytes() == before
    state(q, k, v, step=0)
    assert state.next_step == 1 and state.active == 1


@pytest.mark.parametrize("rule", ["mass", "threshold"])
def test_step_0_begins_anew(rule):
    state, fresh, (q, k, v) = made(rule, warm_up=0), made(rule, warm_up=0), inputs()
    for step in range(5):
        state(q, k, v, step=step)
    assert state.active < 1
    np.testing.assert_array_equal(state(q, k, v, step=0), fresh(q, k, v, step=0))
    assert state.to_bytes() == fresh.to_bytes()


@pytest.mark.parametrize("call", [(inputs(0, 91), {}), ((inputs()[0][:, :39], *inputs()[1:]), {})])
def test_another_shape_is_refused_and_leaves_the_state(call):
    state = made()
    state(*inputs(), step=0)
    before = state.to_bytes()
    with pytest.raises(ValueError, match=r"^seqlen_[qk]: got"):
        state(*call[0], step=1, **call[1])
    assert state.to_bytes() == before
    state(*inputs(), step=1)


def test_arguments_that_are_wrong():
    for options, name in (
        ({"rule": "all"}, "rule"),
        ({"steps": 0}, "steps"),
        ({"warm_up": 6}, "warm_up"),
        ({"ramp": (0.1, 4.0)}, "ramp.last"),
        ({"ramp": (float("nan"), 0.1)}, "ramp.first"),
        ({"rule": "threshold", "ramp": (-5, 1)}, "ramp.last"),
        ({"heads": {4: (0.1, 0.1)}}, "heads"),
        ({"growth": 256}, "skip.growth"),
        ({"rule": "threshold", "own_lse": True}, "skip"),
        ({"block": (0, 16)}, "block_q"),
        ({"layer": "a\nb"}, "layer"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: got"):
            made(**options)
    state = made()
    with pytest.raises(TypeError, match=r"^tiles: got"):
        state(*inputs(), step=0, tiles=state.tile_list())


def test_ranges_are_rounded_inward_and_act_at_once():
    state, (q, k, v) = made(), inputs()  # six tiles, the last of ten keys
    state(q, k, v, step=0)
    state.set_ranges(must_skip=[(1, 79)])
    assert state.active == pytest.approx(3 / 6)
    mask = np.zeros((1, 1, 3, 6), bool)
    mask[..., [0, 4, 5]] = True
    wanted = tessera.attention(q, k, v, tiles=tessera.TileList.from_mask(mask, block=(16, 16)))
    np.testing.assert_allclose(state(q, k, v, step=1), wanted, atol=1e-6)
    state.set_ranges(must_do=[(80, 90)], must_skip=[(0, 64)])
    assert state.active == pytest.approx(2 / 6)
    for do, skip, name in (
        ([(1, 16)], (), "must_do"),
        ((), [(80, 89)], "must_skip"),
        ((), [(0, 91)], "must_skip"),
        ([(0, 32)], [(16, 48)], "must_skip"),
        ((), [(0, 90)], "must_skip"),
        ((), [3], "must_skip"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: got"):
            state.set_ranges(do, skip)
        assert state.active == pytest.approx(2 / 6)


def test_files(tmp_path):
    state, (q, k, v) = made(layer="blocks.3"), inputs()
    for step in range(3):
        state(q, k, v, step=step)
    state.save(tmp_path / "state")
    line = b"attention b=2 sq=40 sk=90 hq=4 block=16x16 list=bitmask skip=mass"
    assert (tmp_path / "state").read_bytes().startswith(b"tessera skip state 1\n" + line + b"\nblocks.3\n3\n")
    other = made(layer="blocks.3")
    other.load(tmp_path / "state")
    for each in (other, pickle.loads(pickle.dumps(state))):
        assert each.to_bytes() == state.to_bytes()
        assert each.next_step == 3
    np.testing.assert_array_equal(other(q, k, v, step=3), state(q, k, v, step=3))
    saved = state.to_bytes()
    for bad, name in ((b"", "saved"), (saved[:-1], "saved"), (saved + b"0", "saved"), (b"x" + saved, "saved")):
        with pytest.raises(ValueError, match=rf"^{name}: got"):
            other.from_bytes(bad)
    for options, name in (({"layer": "blocks.4"}, "layer"), ({"seqlen_k": 91}, "problem"), ({"growth": 2}, "problem")):
        with pytest.raises(ValueError, match=rf"^{name}: got"):
            made(**{"layer": "blocks.3", **options}).from_bytes(saved)
    # Six key blocks: the lowest byte of the list's first word has two bits behind them.
    list_at = len(saved) - state.nbytes
    with pytest.raises(ValueError, match=r"^saved: got a list with key block 6; want key blocks below 6"):
        other.from_bytes(saved[:list_at] + b"\x41" + saved[list_at + 1 :])


def test_memory_of_a_video_model():
    wan = {"seqlen_q": 75600, "seqlen_k": 75600, "heads_q": 40}
    state = tessera.SkipState(**wan)
    assert state.nbytes <= 28e6
    assert "tile_bits 1.80 MB, skip_memory 13.97 MB, skip_lse 12.10 MB" in repr(state)
    assert tessera.SkipState(**wan, rule="threshold").nbytes <= 1.9e6


def test_packed_queries():
    random = np.random.default_rng(3)
    q, k, v = (random.standard_normal((tokens, 4, 16)).astype(np.float32) for tokens in (60, 120, 120))
    boundaries = {"cu_seqlens_q": np.array([0, 40, 60], np.int32), "cu_seqlens_k": np.array([0, 30, 120], np.int32)}
    state = made(total_q=60, warm_up=0, ramp=(0.2, 0.2))
    for step in range(3):
        listed = state.tile_list() if step else None
        out = state(q, k, v, step=step, **boundaries)
        want = tessera.attention(q, k, v, tiles=listed, **boundaries)
        np.testing.assert_allclose(out, want, atol=2e-6)
    assert 0 < state.active < 1


def test_reshape_begins_anew():
    state = made()
    state(*inputs(), step=0)
    state(*inputs(), step=1)
    state.set_ranges(must_skip=[(0, 64)])
    state.reshape(batch=2, seqlen_q=40, seqlen_k=91, heads_q=4)
    assert state.active == 1 and state.next_step == 0
    state(*inputs(0, 91), step=0)
