# SPDX-License-Identifier: Apache-2.0
"""Whole pipelines of diffusers, of random weights: text embeddings, transformer, scheduler and VAE."""

import numpy
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from diffusers_models import (  # noqa: E402
    cogvideox_pipeline,
    hunyuan_pipeline,
    wan_pipeline,
    wan_pipeline_of_two_experts,
)
from tessera.diffusers import install  # noqa: E402

STEPS = 6
BLOCK = {"steps": STEPS, "block": (16, 16)}
KEEP = {**BLOCK, "ramp": (1e-9, 1e-9), "warm_up": 0}  # no tile weighs as little: all stay active
DROP = {**BLOCK, "ramp": (0.078, 0.078), "warm_up": 1}  # 12 or 13 tiles a row, of nearly equal weight

PIPELINES = (wan_pipeline, wan_pipeline_of_two_experts, hunyuan_pipeline, cogvideox_pipeline)
BY_NAME = pytest.mark.parametrize("make", PIPELINES, ids=lambda make: make.__name__)


def made(make):
    pipe, given = make()
    pipe.set_progress_bar_config(disable=True)
    return pipe, given


def run(pipe, given, side=128, output="latent"):
    """Latents of 192 tokens for a side of 128, or the video's frames."""
    shape = {"height": side, "width": side, "num_frames": 9, "num_inference_steps": STEPS}
    return pipe(**given, **shape, output_type=output, generator=torch.Generator().manual_seed(0)).frames


def installed(pipe, **options):
    """A handle for each transformer: those of Wan 2.2 are two."""
    models = (pipe.transformer, getattr(pipe, "transformer_2", None))
    return [install(model, **options) for model in models if model is not None]


def recorded(pipe, given):
    """Arguments and output of each call of the transformer in a run."""
    calls = []

    def keep(_, args, kwargs, output):
        assert not args
        calls.append((kwargs, output[0]))

    hook = pipe.transformer.register_forward_hook(keep, with_kwargs=True)
    latents = run(pipe, given)
    hook.remove()
    return latents, calls


def replayed(pipe, calls, **options):
    """The same calls as one stream, and its states by layer."""
    handle = install(pipe.transformer, **{**DROP, "steps": len(calls), **options})
    with torch.no_grad(), handle.stream("alone"):
        outputs = [pipe.transformer(**kwargs)[0] for kwargs, _ in calls]
    states = {name: skip.state("alone") for name, skip in handle.layers.items()}
    handle.remove()
    return outputs, states


def same(outputs, calls):
    return all(torch.equal(output, want) for output, (_, want) in zip(outputs, calls, strict=True))


@BY_NAME
def test_all_tiles_active_is_diffusers_own_video(make):
    pipe, given = made(make)
    wanted, video = run(pipe, given), run(pipe, given, 64, "pt")
    for options in ({"dense": True}, KEEP):
        handles = installed(pipe, **options)
        torch.testing.assert_close(run(pipe, given), wanted, rtol=1e-4, atol=2e-5)
        shares = [share for handle in handles for share in handle.active.values()]
        assert all(share == 1 for share in shares)
        assert bool(shares) == (options is KEEP)
        torch.testing.assert_close(run(pipe, given, 64, "pt"), video, rtol=1e-4, atol=1e-4)
        for handle in handles:
            handle.remove()
    assert torch.equal(run(pipe, given), wanted)


@BY_NAME
def test_a_second_video_begins_anew(make):
    pipe, given = made(make)
    dense = run(pipe, given)
    handles = installed(pipe, **DROP)
    first = run(pipe, given)
    shares = [handle.active for handle in handles]
    assert all(any(share < 1 for share in each.values()) for each in shares)
    assert not torch.equal(first, dense)
    assert torch.equal(run(pipe, given), first)
    assert [handle.active for handle in handles] == shares


@pytest.mark.parametrize("make", [wan_pipeline, hunyuan_pipeline], ids=lambda make: make.__name__)
def test_conditional_and_unconditional_calls_stay_apart(make):
    """In LiteAttention the two calls of a step overwrite each other's list."""
    pipe, given = made(make)
    handle = install(pipe.transformer, **DROP)
    latents, calls = recorded(pipe, given)
    assert {stream for _, stream in handle.active} == {"cond", "uncond"}
    handle.remove()
    streams = {"cond": calls[0::2], "uncond": calls[1::2]}
    assert [len(each) for each in streams.values()] == [STEPS, STEPS]
    for each in streams.values():
        assert same(replayed(pipe, each)[0], each)
    # One state for both gives other outputs: the comparison above sees that they have one each.
    assert not same(replayed(pipe, calls)[0], calls)
    assert latents.isfinite().all()


def test_conditional_and_unconditional_halves_of_a_batch_stay_apart():
    """CogVideoX calls its transformer once for both. Whatever the other half is, a half's output and lists stay."""
    pipe, given = made(cogvideox_pipeline)
    handle = install(pipe.transformer, **DROP)
    _, calls = recorded(pipe, given)
    assert {stream for _, stream in handle.active} == {"cond_uncond"}
    handle.remove()
    assert len(calls) == STEPS
    outputs, states = replayed(pipe, calls)
    assert same(outputs, calls)
    generator = torch.Generator().manual_seed(3)
    for kept in (0, 1):
        changed = []
        for kwargs, output in calls:
            other = dict(kwargs)
            for name in ("hidden_states", "encoder_hidden_states"):
                other[name] = kwargs[name].clone()
                other[name][1 - kept] = torch.randn(kwargs[name].shape[1:], generator=generator)
            changed.append((other, output))
        got, lists = replayed(pipe, changed)
        for output, (_, want) in zip(got, calls, strict=True):
            assert torch.equal(output[kept], want[kept])
            assert not torch.equal(output[1 - kept], want[1 - kept])
        for name, state in lists.items():
            before, after = (each.tile_list().bits for each in (states[name], state))
            numpy.testing.assert_array_equal(after[kept], before[kept])
            assert (after[1 - kept] != before[1 - kept]).any()
