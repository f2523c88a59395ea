# SPDX-License-Identifier: Apache-2.0
"""Thresholds of skip states for a wanted error against dense attention."""

import json

import numpy
import pytest
import tessera
from tessera.calibration import Calibration, SkipThresholds

STEPS, BLOCK, HEADS, TOKENS = 8, (16, 16), 4, 640
OPTIONS = {"steps": STEPS, "block": BLOCK, "warm_up": 2}


def run(seed, layer=0):
    """q, k, v of each step: smooth over tokens, each head sharper than the one before, moving slowly with the steps."""
    random = numpy.random.default_rng([seed, layer])

    def smooth():
        x = random.standard_normal((1, TOKENS + 12, HEADS, 16))
        return sum(x[:, at : at + TOKENS] for at in range(12)) / 12**0.5

    base, v = smooth(), random.standard_normal((1, TOKENS, HEADS, 16))
    sharp = numpy.array([1.0, 1.3, 1.6, 2.0])[:, None] * (1 + 0.2 * layer)
    for _ in range(STEPS):
        base = base + 0.05 * smooth()
        q, k = (sharp * (base + 0.05 * smooth()) for _ in range(2))
        yield [x.astype(numpy.float32) for x in (q, k, v)]


def errors(states, seeds, layer):
    """Relative L2 against dense attention, of the layer and of each head, with new states of a seed."""
    wrong, norm = numpy.zeros(HEADS), numpy.zeros(HEADS)
    for seed in seeds:
        state = states()
        for step, (q, k, v) in enumerate(run(seed, layer)):
            dense, out = tessera.attention(q, k, v), state(q, k, v, step=step)
            wrong += numpy.square(out.astype(float) - dense).sum((0, 1, 3))
            norm += numpy.square(dense.astype(float)).sum((0, 1, 3))
    return (wrong.sum() / norm.sum()) ** 0.5, numpy.sqrt(wrong / norm)


def calibrated(target, seeds=(0, 1, 2, 3), layers=(0, 1), **options):
    calibration = Calibration(target, **{**OPTIONS, **options})
    for rounds in range(2):
        if rounds:
            calibration.narrow()
        for layer in layers:
            for seed in seeds:
                for step, (q, k, v) in enumerate(run(seed, layer)):
                    dense = calibration(q, k, v, layer=f"blocks.{layer}", step=step)
                    assert numpy.array_equal(dense, tessera.attention(q, k, v))
    return calibration


@pytest.mark.parametrize("rule", ["mass", "threshold"])
@pytest.mark.parametrize("target", [0.03, 0.1])
def test_held_back_seeds_reach_the_target_by_layer(rule, target):
    found = calibrated(target, rule=rule).solve()
    for layer in (0, 1):
        options = found.options(f"blocks.{layer}")

        def states(options=options):
            return tessera.SkipState(seqlen_q=TOKENS, seqlen_k=TOKENS, heads_q=HEADS, **options)

        assert errors(states, range(10, 18), layer)[0] == pytest.approx(target, rel=0.1)
        assert found.layers[f"blocks.{layer}"].error == pytest.approx(target, rel=0.05)
        assert 0.2 < found.layers[f"blocks.{layer}"].active < 1
    assert found.options("blocks.0")["ramp"] != found.options("blocks.1")["ramp"]


def test_held_back_seeds_reach_the_target_by_head(tmp_path):
    found = calibrated(0.05, range(8), (1,), by_head=True).solve()
    found.save(tmp_path / "thresholds.json")
    options = SkipThresholds.load(tmp_path / "thresholds.json").options("blocks.1")
    assert options["heads"] == found.options("blocks.1")["heads"]
    assert len(set(options["heads"].values())) == HEADS

    def states():
        return tessera.SkipState(seqlen_q=TOKENS, seqlen_k=TOKENS, heads_q=HEADS, **options)

    whole, by_head = errors(states, range(10, 18), 1)
    assert whole == pytest.approx(0.05, rel=0.1)
    assert by_head == pytest.approx(numpy.full(HEADS, 0.05), rel=0.2)


def test_the_standard_error_is_that_of_runs_apart():
    """Eight runs, of which each has its own error by the thresholds found; one run says nothing of others."""
    seeds = range(8)
    layer = calibrated(0.05, seeds, (0,)).solve()
    found, options = layer.layers["blocks.0"], layer.options("blocks.0")

    def states():
        return tessera.SkipState(seqlen_q=TOKENS, seqlen_k=TOKENS, heads_q=HEADS, **options)

    single = numpy.array([errors(states, [seed], 0)[0] for seed in seeds])
    assert found.standard_error == pytest.approx(single.std(ddof=1) / 8**0.5 / single.mean(), rel=0.2)
    assert SkipThresholds.from_json(layer.to_json()).layers["blocks.0"] == found
    alone = calibrated(0.05, (0,), (0,)).solve()
    assert alone.layers["blocks.0"].standard_error is None
    assert SkipThresholds.from_json(alone.to_json()).to_json() == alone.to_json()


def test_errors_are_those_against_dense_attention():
    """LiteAttention's calibration compares with the output of the list before, which is sparse already: an error that
    is repeated in every step is none to it."""
    calibration = Calibration(0.05, **OPTIONS)
    for step, (q, k, v) in enumerate(run(5)):
        calibration(q, k, v, layer="a", step=step)
    curves = calibration.curves("a")
    for at in (3, 6):
        first = float(curves["first"][at, 0])

        def states(first=first):
            heads = dict.fromkeys(range(HEADS), (first, 6 * first))
            return tessera.SkipState(seqlen_q=TOKENS, seqlen_k=TOKENS, heads_q=HEADS, heads=heads, **OPTIONS)

        whole, by_head = errors(states, [5], 0)
        assert curves["error"][at] == pytest.approx([*by_head, whole], rel=1e-3)


def test_streams_have_states_of_their_own():
    both, alone = Calibration(0.05, **OPTIONS), Calibration(0.05, **OPTIONS)
    for step, (one, other) in enumerate(zip(run(1), run(2), strict=True)):
        both(*one, layer="a", step=step, stream="cond")
        both(*other, layer="a", step=step, stream="uncond")
    for seed in (1, 2):
        for step, each in enumerate(run(seed)):
            alone(*each, layer="a", step=step)
    assert numpy.allclose(both.curves("a")["error"], alone.curves("a")["error"], rtol=1e-6)


def test_a_target_out_of_reach_is_said():
    """Below the finest candidate all tiles are kept; above the coarsest one `error` says what is reached."""
    calibration = Calibration(1e-9, **OPTIONS)
    greedy = Calibration(0.99, **OPTIONS)
    for step, (q, k, v) in enumerate(run(0)):
        calibration(q, k, v, layer="a", step=step)
        greedy(q, k, v, layer="a", step=step)
    found = calibration.solve()
    state = tessera.SkipState(seqlen_q=TOKENS, seqlen_k=TOKENS, heads_q=HEADS, **found.options("a"))
    for step, (q, k, v) in enumerate(run(0)):
        assert state.active == 1
        assert numpy.array_equal(state(q, k, v, step=step), tessera.attention(q, k, v))
    assert found.layers["a"].error == 0 and found.layers["a"].active == 1
    assert greedy.solve().layers["a"].error < 0.99


def test_bad_arguments_and_files_are_named():
    for options, name in (
        ({"target": 0}, "target"),
        ({"target": float("nan")}, "target"),
        ({"spread": 0}, "spread"),
        ({"rule": "none"}, "rule"),
        ({"block": (0, 16)}, ""),
    ):
        with pytest.raises(ValueError, match=rf"^{name}.*: got"):
            Calibration(**{"target": 0.1, **options})
    calibration = Calibration(0.1, **OPTIONS)
    with pytest.raises(ValueError, match=r"^calibration: got no call"):
        calibration.solve()
    q, k, v = next(run(0))
    with pytest.raises(ValueError, match=r"^return_lse: got True"):
        calibration(q, k, v, layer="a", step=0, return_lse=True)
    calibration(q, k, v, layer="a", step=0)
    with pytest.raises(ValueError, match=r"^q: got 2 heads; want 4"):
        calibration(q[:, :, :2], k[:, :, :2], v[:, :, :2], layer="a", step=1)
    with pytest.raises(ValueError, match=r"^step: got 0 after|^step: got"):
        calibration(q, k, v, layer="a", step=STEPS)
    found = calibration.solve()
    with pytest.raises(KeyError, match="got 'b'; want one of 'a'"):
        found.options("b")
    told = json.loads(found.to_json())
    assert SkipThresholds.from_json(found.to_json()).to_json() == found.to_json()
    for wrong, name in (
        ("{", "text"),
        ("[]", "format"),
        (json.dumps({**told, "format": "x"}), "format"),
        (json.dumps({name: value for name, value in told.items() if name != "growth"}), "growth"),
        (json.dumps({**told, "layers": {"a": {"ramp": [1, 2]}}}), "heads"),
        (json.dumps({**told, "layers": {"a": {**told["layers"]["a"], "ramp": [1]}}}), "ramp of 'a'"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: got"):
            SkipThresholds.from_json(wrong)
