# SPDX-License-Identifier: Apache-2.0
"""Tessera as SGLang's attention backend, on the CPU: steps built of SGLang's own classes, against fp64."""

from __future__ import annotations

import types

import pytest

torch = pytest.importorskip("torch")

from requests_of_sglang import CONTEXT, HEADS, ON_CPU, VALUE_DIM, Requests, close, one_rank  # noqa: E402, F401
from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: E402

pytestmark = ON_CPU

OPTIONS = {
    "plain": {},
    "window": {"sliding_window_size": 11},
    "window of 1": {"sliding_window_size": 1, "two_pools": True},
    "two pools": {"sliding_window_size": 11, "two_pools": True},
    "softcap": {"logit_cap": 1.5},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.bfloat16)},
    "chunks": {"use_irope": True, "chunk": 8},
}
STEPS = [
    ([40, 7, 23], ForwardMode.EXTEND, 0),
    ([33, 1, 1], ForwardMode.MIXED, 0),
    ([1, 1, 1], ForwardMode.DECODE, 0),
    ([5, 17, 2], ForwardMode.EXTEND, 6),
    ([1, 1, 1], ForwardMode.DECODE, 0),
]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps(options, page_size):
    """A prefill, a chunk beside decodes, decodes, a padded prefill behind what is there."""
    requests = Requests(page_size, **options)
    for counts, mode, padding in STEPS:
        close(*requests.step(counts, mode, padding))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype):
    requests = Requests(dtype=dtype)
    for counts, mode, padding in STEPS:
        close(*requests.step(counts, mode, padding), tolerance=1e-2)


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
    requests = Requests()
    requests.req_to_token_pool.req_to_token.clamp_(max=0)
    requests.step([40, 7, 23])
    batch, q, k, v = requests.tokens([1, 1, 1])
    batch.forward_mode, batch.seq_lens_cpu = ForwardMode.DECODE, None
    requests.backend.init_forward_metadata(batch)
    assert requests.backend.forward_metadata.table.shape == (3, CONTEXT // 16)
    close(requests.call(batch, q, k, v), requests.textbook(q, [1, 1, 1]))


@pytest.mark.parametrize("page_size", [1, 16])
def test_keys_that_left_the_window(page_size):
    """Their pages are given back, and read as page 0 since, where nobody wrote."""
    requests = Requests(page_size, two_pools=True, sliding_window_size=11)
    requests.step([40, 7, 60])
    mapping = requests.pool.full_to_swa_index_mapping
    for keys, slots in zip(requests.keys, requests.slots, strict=True):
        mapping[slots[: max(len(keys) - 11, 0) // page_size * page_size]] = 0
    close(*requests.step([1, 1, 1], ForwardMode.DECODE))
    close(*requests.step([5, 1, 20]))


def addresses(metadata):
    return {
        name: (value.data_ptr(), tuple(value.shape), value.stride())
        for name, value in vars(metadata).items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("two_pools", [False, True])
def test_captured_decode_steps(page_size, two_pools):
    """The metadata of a captured step of 4 requests stay where they are, and 3 requests are copied there to replay it.

    A replay runs the layer on the captured batch and metadata, as a graph would.
    """
    requests = Requests(page_size, two_pools=two_pools, sliding_window_size=11)
    backend = requests.backend
    backend.init_cuda_graph_state(6, 6)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    static = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=4,
        input_ids=torch.zeros(4, dtype=torch.int64),
        req_pool_indices=torch.zeros(4, dtype=torch.int64),
        seq_lens=torch.full((4,), fill),
        seq_lens_cpu=torch.full((4,), fill),
        seq_lens_sum=4 * fill,
        out_cache_loc=torch.zeros(4, dtype=torch.int64),
    )
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    backend.init_forward_metadata_in_graph(static)
    captured = backend.forward_metadata
    before = addresses(captured)
    for counts in ([40, 7, 23], [50, 1, 30]):
        requests.step(counts)
        batch, q, k, v = requests.tokens([1, 1, 1])
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1), value=1.0) for x in (q, k, v))
        view = types.SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=4,
            req_pool_indices=static.req_pool_indices,
            seq_lens=static.seq_lens,
            seq_lens_cpu=static.seq_lens_cpu,
            out_cache_loc=batch.out_cache_loc,
            spec_info=None,
        )
        for mine, theirs in ((static.req_pool_indices, requests.rows), (static.seq_lens, batch.seq_lens)):
            mine[:3].copy_(theirs)
        static.seq_lens_cpu[:3].copy_(batch.seq_lens)
        static.out_cache_loc[:3].copy_(batch.out_cache_loc)
        if two_pools:  # what a step of more requests left there: a slot that is in use
            captured.window_slots.fill_(int(requests.pool.full_to_swa_index_mapping[requests.slots[0, 38]]))
        backend.init_forward_metadata_out_graph(view)
        assert addresses(backend.forward_metadata) == before
        backend.forward_metadata = captured
        got = requests.call(static, q, k, v)
        close(got[:3], requests.textbook(q[:3], [1, 1, 1]))
        assert torch.isfinite(got).all()
