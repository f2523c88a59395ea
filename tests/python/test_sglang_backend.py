# SPDX-License-Identifier: Apache-2.0
"""Tessera as SGLang's attention backend, on the CPU: steps built of SGLang's own classes, against fp64."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from requests_of_sglang import (  # noqa: E402
    HEADS,
    ON_CPU,
    OPTIONS,
    STEPS,
    VALUE_DIM,
    Requests,
    check_captured_steps,
    check_keys_that_left_the_window,
    check_lengths_that_no_host_has,
    close,
    one_rank,  # noqa: F401
)
from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: E402

pytestmark = ON_CPU


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps(options, page_size):
    requests = Requests(page_size, **options)
    for counts, mode, padding in STEPS:
        close(*requests.step(counts, mode, padding))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype):
    requests = Requests(dtype=dtype)
    for counts, mode, padding in STEPS:
        close(*requests.step(counts, mode, padding))


def test_encoder():
    close(*Requests(attn_type=AttentionType.ENCODER_ONLY).step([40, 7, 23]))


def test_two_dtypes():
    """Queries of fp32 over a cache of bf16, whose rounding the reference shares."""
    requests = Requests(dtype=torch.bfloat16)
    batch, q, k, v = requests.tokens([9, 30, 2])
    requests.backend.init_forward_metadata(batch)
    got = requests.call(batch, q.float(), k, v)
    assert got.dtype == torch.float32
    requests.dtype = torch.float32
    close(got, requests.textbook(q.float(), [9, 30, 2]))


def test_keys_that_are_there_already():
    """A layer that shares another's cache has none of its own to save."""
    requests = Requests()
    requests.step([40, 7, 23])
    batch, q, k, v = requests.tokens([1, 1, 1])
    batch.forward_mode = ForwardMode.DECODE
    requests.backend.init_forward_metadata(batch)
    first = requests.call(batch, q, k, v)
    close(requests.call(batch, q, None, None), first)
    with forward_context(ForwardContext(attn_backend=requests.backend)):
        close(requests.layer(q, torch.full_like(k, torch.nan), v, batch, save_kv_cache=False), first)


def test_idle():
    requests = Requests()
    batch, q, k, v = requests.tokens([0, 0, 0])
    batch.forward_mode = ForwardMode.IDLE
    requests.backend.init_forward_metadata(batch)
    assert requests.call(batch, q, k, v).shape == (0, HEADS * VALUE_DIM)


def test_lengths_that_no_host_has():
    check_lengths_that_no_host_has(Requests())


@pytest.mark.parametrize("page_size", [1, 16])
def test_keys_that_left_the_window(page_size):
    check_keys_that_left_the_window(Requests(page_size, two_pools=True, sliding_window_size=11))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("two_pools", [False, True])
def test_captured_decode_steps(page_size, two_pools):
    """A replay runs the layer on the captured batch and metadata, as a graph would."""
    requests = Requests(page_size, two_pools=two_pools, sliding_window_size=11)
    assert torch.isfinite(check_captured_steps(requests, lambda run: run).out).all()
