# SPDX-License-Identifier: Apache-2.0
"""Video transformers of diffusers, of random weights: all tiles active, streams, steps, and the way back."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from diffusers_models import cogvideox, hunyuan, wan, wan_with_an_image  # noqa: E402
from tessera.calibration import Calibration  # noqa: E402
from tessera.diffusers import TesseraProcessor, install  # noqa: E402

BLOCK = {"block": (16, 16)}
KEEP = {**BLOCK, "ramp": (1e-9, 1e-9), "warm_up": 0}  # no tile weighs as little: all stay active
DROP = {**BLOCK, "ramp": (0.076, 0.08), "warm_up": 1}  # 13 tiles a row, of nearly equal weight


MODELS = (wan, wan_with_an_image, hunyuan, cogvideox)
BY_NAME = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)


def call(model, given, stream=None):
    with torch.no_grad():
        if stream is None:
            return model(**given, return_dict=False)[0]
        with model.cache_context(stream):
            return model(**given, return_dict=False)[0]


@BY_NAME
@pytest.mark.parametrize("options", [{"dense": True}, {"steps": 4, **KEEP}], ids=["dense", "states"])
def test_all_tiles_active_is_diffusers_own_output(make, options):
    model, inputs = make()
    given = [inputs(step, 900 - step) for step in range(4)]
    wanted = [call(model, each, "cond") for each in given]
    handle = install(model, **options)
    for each, want in zip(given, wanted, strict=True):
        torch.testing.assert_close(call(model, each, "cond"), want, rtol=1e-4, atol=2e-5)
    assert all(share == 1 for share in handle.active.values())
    handle.remove()
    assert not any(isinstance(each, TesseraProcessor) for each in model.attn_processors.values())
    assert torch.equal(call(model, given[0], "cond"), wanted[0])


@BY_NAME
def test_streams_stay_apart(make):
    """Conditional and unconditional calls overwrite each other's list in LiteAttention."""
    model, inputs = make()
    handle = install(model, steps=5, **DROP)
    both = {"cond": [], "uncond": []}
    for step in range(5):
        for seed, stream in enumerate(both):
            both[stream].append(call(model, inputs(100 * seed + step, 900 - step), stream))
            assert handle.step == step
    assert {stream for _, stream in handle.active} == {"cond", "uncond"}
    assert any(0 < share < 1 for share in handle.active.values())
    handle.remove()
    for seed, stream in enumerate(both):
        handle = install(model, steps=5, **DROP)
        for step in range(5):
            assert torch.equal(call(model, inputs(100 * seed + step, 900 - step), stream), both[stream][step])
        handle.remove()


@BY_NAME
def test_layers_have_states_of_their_own_and_text_has_none(make):
    """LiteAttention's CogVideoX example had one list for all layers of a shape."""
    model, inputs = make()
    handle = install(model, steps=2, **DROP)
    call(model, inputs(0, 900))
    names = {wan: ["blocks.0.attn1", "blocks.1.attn1"], cogvideox: [f"transformer_blocks.{n}.attn1" for n in (0, 1)]}
    names[wan_with_an_image] = names[wan]
    names[hunyuan] = ["transformer_blocks.0.attn", "single_transformer_blocks.0.attn"]
    assert list(handle.layers) == names[make]
    assert all(skip.state().layer == name for name, skip in handle.layers.items())


def test_a_run_ends_by_reset_by_a_higher_timestep_and_by_an_index_that_goes_back():
    model, inputs = wan()
    handle = install(model, steps=3, **DROP)
    for reset in (handle.reset, model._reset_stateful_cache, lambda: None):  # the second is what pipelines call
        first = [call(model, inputs(step, 900 - step), "cond") for step in range(3)]
        assert handle.step == 2
        reset()
        again = [call(model, inputs(step, 900 - step), "cond") for step in range(3)]
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
        handle.reset()
    seen = []
    for index in (0, 2, 1, 2):  # a solver may leave steps out, and tell all the same timestep
        with torch.no_grad(), model.cache_context("cond", step_index=index):
            model(**inputs(0, 900))
        seen.append(handle.step)
    assert seen == [0, 1, 0, 1]


def test_two_calls_of_a_step_want_streams():
    model, inputs = wan()
    handle = install(model, steps=3, **DROP)
    call(model, inputs(0, 900))
    with pytest.raises(ValueError, match=r"^timestep: got 900.0 twice"):
        call(model, inputs(1, 900))
    handle.reset()
    for step in range(3):
        for stream in ("a", "b"):
            with handle.stream(stream):
                call(model, inputs(step, 900 - step))
    assert {stream for _, stream in handle.active} == {"", "a", "b"}
    with pytest.raises(ValueError, match=r"^step: got 3; want 0 to below the run's 3 steps"), handle.stream("a"):
        call(model, inputs(0, 800))


def test_text_tokens_can_be_kept():
    """Those of CogVideoX come first: 9 of them, and 192 of the video."""
    model, inputs = cogvideox()
    handle = install(model, steps=3, **{**DROP, "ramp": (3.9, 3.9)})
    handle.set_ranges(must_do=[(0, 16)])
    for step in range(3):
        call(model, inputs(step, 900 - step))
    for skip in handle.layers.values():
        words = skip.state().tile_list().bits
        assert (words == 1).all()


def test_a_calibration_s_thresholds_are_taken_by_layer():
    model, inputs = wan()
    calibration = Calibration(0.05, steps=3, warm_up=0, **BLOCK)
    generator = torch.Generator().manual_seed(0)
    for name in ("blocks.0.attn1", "blocks.1.attn1"):
        for step in range(3):
            q, k, v = (2 * torch.randn(1, 192, 2, 16, generator=generator) for _ in range(3))
            calibration(q, k, v, layer=name, step=step)
    found = calibration.solve()
    handle = install(model, thresholds=found)
    call(model, inputs(0, 900))
    assert handle.layers["blocks.1.attn1"]._options["ramp"] == found.layers["blocks.1.attn1"].ramp
    handle.remove()
    with pytest.raises(TypeError, match="steps: got an argument beside thresholds"):
        install(model, thresholds=found, steps=4)


def test_gradients_are_those_of_dense_attention():
    model, inputs = wan()
    given = inputs(0, 900)
    grads = []
    for dense in (False, True):
        handle = install(model, dense=True) if dense else None
        model.zero_grad()
        model(**given).sample.square().sum().backward()
        grads.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
        del handle
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()) + 1e-6)


def test_what_cannot_be_computed_is_named():
    model, inputs = hunyuan()
    handle = install(model, steps=3, only=lambda name: name.startswith("single"), **KEEP)
    assert list(handle.layers) == ["single_transformer_blocks.0.attn"]
    given = inputs(0, 900)
    given["encoder_attention_mask"] = given["encoder_attention_mask"].flip(1)
    call(model, given)  # the mask is made of lengths, whichever tokens they were
    with pytest.raises(ValueError, match=r"^model: got one with Tessera's processors"):
        install(model, dense=True)
    with pytest.raises(TypeError, match=r"^dense: got True"):
        install(model, dense=True, steps=3)
    with pytest.raises(ValueError, match=r"^model: got Linear without"):
        install(torch.nn.Linear(2, 2), dense=True)
    model.set_attention_backend("flex")
    try:
        with pytest.raises(RuntimeError, match="want diffusers' backend"):
            call(model, inputs(0, 800))
    finally:
        model.set_attention_backend("native")  # diffusers keeps it for all models to come
