# SPDX-License-Identifier: Apache-2.0
"""Requests over SGLang's own pools, batches and layers, for the tests of `tessera.sglang`, and what fp64 says of them.

pip install --no-deps sglang==0.5.23   # and the few packages that its modules import

The model runner, which loads a model, is a stand-in with the attributes that a backend reads. All else is SGLang's.
"""

from __future__ import annotations

import importlib.util
import types

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)
if torch.version.cuda is None and importlib.util.find_spec("torchvision") is not None:
    # PyPI's torchvision has its operators compiled for CUDA. Beside a torch without CUDA it wants these declared to be
    # imported, which SGLang does; none is called.
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
pytest.importorskip("sglang.srt.layers.attention.attention_registry")

import tessera.sglang  # noqa: E402
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

tessera.sglang.register()
HEADS, KEY_HEADS, DIM, VALUE_DIM, CONTEXT, LAYER = 4, 2, 32, 24, 112, 1
GARBAGE, SCALE = 2**30, 0.25
OPTIONS = {
    "plain": {},
    "window": {"sliding_window_size": 11},
    "window of 1": {"sliding_window_size": 1, "two_pools": True},
    "two pools": {"sliding_window_size": 11, "two_pools": True},
    "softcap": {"logit_cap": 1.5},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.bfloat16)},
    "chunks": {"use_irope": True, "chunk": 8},
}
# A prefill, a chunk beside decodes, decodes, a padded prefill behind what is there.
STEPS = [
    ([40, 7, 23], ForwardMode.EXTEND, 0),
    ([33, 1, 1], ForwardMode.MIXED, 0),
    ([1, 1, 1], ForwardMode.DECODE, 0),
    ([5, 17, 2], ForwardMode.EXTEND, 6),
    ([1, 1, 1], ForwardMode.DECODE, 0),
]
ON_CPU = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="SGLang writes to its pools by kernels of the GPU that it sees: CUDA_VISIBLE_DEVICES=",
)


@pytest.fixture(autouse=True)
def one_rank():
    """The sizes of groups that SGLang's processes agree on when they start."""
    with get_parallel().override(attn_tp_size=1, attn_dcp_size=1, attn_cp_size=1):
        yield


def runner_of(pool, req_to_token_pool, page_size, **changes):
    """What stands in for SGLang's ModelRunner."""
    translator = KVIndexTranslator(
        req_to_token=req_to_token_pool.req_to_token,
        token_to_kv_pool_allocator=types.SimpleNamespace(page_size=page_size, get_kvcache=lambda: pool),
        token_to_kv_pool=pool,
        page_size=page_size,
        device=str(req_to_token_pool.req_to_token.device),
        is_draft_worker=False,
    )
    return types.SimpleNamespace(
        **{
            "req_to_token_pool": req_to_token_pool,
            "token_to_kv_pool": pool,
            "page_size": page_size,
            "kv_index_translator": translator,
            "attention_chunk_size": None,
            "use_mla_backend": False,
            "spec_algorithm": SpeculativeAlgorithm.NONE,
            "model_config": types.SimpleNamespace(is_encoder_decoder=False),
        }
        | changes
    )


class Requests:
    """Three requests whose pages lie anywhere in a pool that is NaN where nobody wrote; two layers, the second is run.

    two_pools: sliding layers have a pool of their own, in which each page has another number.
    """

    def __init__(
        self, page_size=16, dtype=torch.float32, two_pools=False, sinks=None, chunk=None, device="cpu", **layer
    ):
        self.g = torch.Generator().manual_seed(4)
        self.page_size, self.dtype, self.chunk, self.device = page_size, dtype, chunk, device
        self.sinks = None if sinks is None else self.there(sinks)  # a model's parameters are there before a capture
        pages = -(-CONTEXT // page_size)
        size = (3 * pages + 2) * page_size
        self.req_to_token_pool = ReqToTokenPool(5, CONTEXT, device, enable_memory_saver=False)
        shapes = {"head_num": KEY_HEADS, "head_dim": DIM, "v_head_dim": VALUE_DIM, "device": device}
        if two_pools:
            self.pool = SWAKVPool(
                size, size, page_size, dtype, **shapes, swa_attention_layer_ids=[LAYER], full_attention_layer_ids=[0]
            )
            moved = torch.cat(
                [torch.zeros(1, dtype=torch.int64), torch.randperm(size // page_size, generator=self.g) + 1]
            )
            slots = moved[:, None] * page_size + torch.arange(page_size)
            self.pool.register_mapping(torch.cat([slots.flatten(), torch.tensor([-1])]).to(device))
        else:
            self.pool = MHATokenToKVPool(size, page_size, dtype, layer_num=2, enable_memory_saver=False, **shapes)
        for layer_id in (0, LAYER):
            self.pool.get_key_buffer(layer_id).fill_(torch.nan)
            self.pool.get_value_buffer(layer_id).fill_(torch.nan)
        # What stands behind a request: of two pools some slot, which has one in the other; else no slot at all.
        self.req_to_token_pool.req_to_token.fill_(size if two_pools else GARBAGE)
        self.req_to_token_pool.req_to_token[0] = 0  # rows that pad a captured batch
        own = (torch.randperm(3 * pages, generator=self.g) + 1).reshape(3, pages)  # page 0 is nobody's
        self.slots = (own[:, :, None] * page_size + torch.arange(page_size)).flatten(1)
        self.rows = [4, 2, 5]  # of req_to_token
        self.layer = RadixAttention(HEADS, DIM, SCALE, KEY_HEADS, LAYER, v_head_dim=VALUE_DIM, **layer)
        self.runner = runner_of(self.pool, self.req_to_token_pool, page_size, attention_chunk_size=chunk)
        self.backend = ATTENTION_BACKENDS["tessera"](self.runner)
        self.keys, self.values = [torch.empty(0, KEY_HEADS, DIM)] * 3, [torch.empty(0, KEY_HEADS, VALUE_DIM)] * 3

    def tokens(self, counts, padding=0):
        """(batch, q, k, v) of so many tokens of each request, whose slots are taken."""
        before = [len(x) for x in self.keys]
        lengths = [length + count for length, count in zip(before, counts, strict=True)]
        total, taken = sum(counts) + padding, []
        q, k, v = (
            torch.randn((total, heads * dim), generator=self.g).to(self.dtype)
            for heads, dim in ((HEADS, DIM), (KEY_HEADS, DIM), (KEY_HEADS, VALUE_DIM))
        )
        start = 0
        for i, count in enumerate(counts):
            taken.append(self.slots[i, before[i] : lengths[i]])
            self.req_to_token_pool.write((self.rows[i], slice(before[i], lengths[i])), self.there(taken[-1].int()))
            rows = slice(start, start + count)
            self.keys[i] = torch.cat([self.keys[i], k[rows].view(-1, KEY_HEADS, DIM)])
            self.values[i] = torch.cat([self.values[i], v[rows].view(-1, KEY_HEADS, VALUE_DIM)])
            start += count
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=3,
            input_ids=self.there(torch.zeros(total, dtype=torch.int64)),
            req_pool_indices=self.there(torch.tensor(self.rows)),
            seq_lens=self.there(torch.tensor(lengths)),
            seq_lens_cpu=torch.tensor(lengths),
            seq_lens_sum=sum(lengths),
            out_cache_loc=self.there(torch.cat([*taken, torch.zeros(padding, dtype=torch.int64)])),
            extend_num_tokens=sum(counts),
            extend_seq_lens=self.there(torch.tensor(counts, dtype=torch.int32)),
            extend_seq_lens_cpu=counts,
            extend_prefix_lens=self.there(torch.tensor(before, dtype=torch.int32)),
            extend_prefix_lens_cpu=before,
        )
        return batch, *map(self.there, (q, k, v))

    def there(self, x):
        return x.to(self.device)

    def call(self, batch, q, k, v):
        """The layer, as a model calls it."""
        more = {} if self.sinks is None else {"sinks": self.sinks}
        with forward_context(ForwardContext(attn_backend=self.backend)):
            return self.layer(q, k, v, batch, **more)

    def step(self, counts, mode=ForwardMode.EXTEND, padding=0):
        """(output, what fp64 says) of a step that runs at once."""
        batch, q, k, v = self.tokens(counts, padding)
        batch.forward_mode = mode
        self.backend.init_forward_metadata(batch)
        got = self.call(batch, q, k, v)
        assert got.shape == (len(q), HEADS * VALUE_DIM) and not got[sum(counts) :].any()
        return got[: sum(counts)], self.textbook(q, counts)

    def textbook(self, q, counts):
        parts = q[: sum(counts)].cpu().view(-1, HEADS, DIM).split(counts)
        return torch.cat([self.textbook_of(part, i) for i, part in enumerate(parts)]).flatten(1).to(self.dtype)

    def textbook_of(self, q, request):
        k, v = (x[request].double().repeat_interleave(HEADS // KEY_HEADS, 1) for x in (self.keys, self.values))
        scores = torch.einsum("ihd,jhd->hij", q.double(), k) * SCALE
        if cap := self.layer.logit_cap:
            scores = cap * torch.tanh(scores / cap)
        at = torch.arange(len(k) - len(q), len(k))[:, None]
        visible = torch.ones(len(q), len(k), dtype=torch.bool)
        if self.layer.attn_type == AttentionType.DECODER:
            visible &= torch.arange(len(k)) <= at
        if self.layer.sliding_window_size >= 0:
            visible &= torch.arange(len(k)) >= at - self.layer.sliding_window_size
        if self.chunk is not None:
            visible &= torch.arange(len(k)) // self.chunk == at // self.chunk
        scores = scores.masked_fill(~visible, -torch.inf)
        norm = scores.logsumexp(-1, keepdim=True)
        if self.sinks is not None:
            norm = torch.logaddexp(norm, self.sinks.cpu().double()[:, None, None])
        return torch.einsum("hij,jhd->ihd", (scores - norm).exp(), v)


class Captured:
    """A decode step whose arrays stay where they lie, as SGLang's runner captures and replays it (`capture_one_shape`,
    `build_replay_fb_view`): rows behind a replayed step's requests have a key of slot 0, where nobody writes."""

    def __init__(self, requests: Requests, rows: int, most: int):
        self.requests, self.backend, there = requests, requests.backend, requests.there
        self.backend.init_cuda_graph_state(most, most)
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        self.batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=rows,
            input_ids=there(torch.zeros(rows, dtype=torch.int64)),
            req_pool_indices=there(torch.zeros(rows, dtype=torch.int64)),
            seq_lens=there(torch.full((rows,), fill)),
            seq_lens_cpu=torch.full((rows,), fill),
            seq_lens_sum=rows * fill,
            out_cache_loc=there(torch.zeros(rows, dtype=torch.int64)),
        )
        self.q, self.k, self.v = (
            there(torch.ones(rows, heads * dim, dtype=requests.dtype))
            for heads, dim in ((HEADS, DIM), (KEY_HEADS, DIM), (KEY_HEADS, VALUE_DIM))
        )
        self.out = None
        self.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        self.metadata = self.backend.forward_metadata

    def run(self):
        """What is captured."""
        self.backend.init_forward_metadata_in_graph(self.batch)
        self.out = self.requests.call(self.batch, self.q, self.k, self.v)

    def fill(self, batch, q, k, v):
        """What a replay of another batch prepares; the captured metadata hold it."""
        live = batch.batch_size
        for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"):
            getattr(self.batch, name)[:live].copy_(getattr(batch, name))
        for mine, its in ((self.q, q), (self.k, k), (self.v, v)):
            mine[:live].copy_(its)
        view = types.SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=self.batch.batch_size,
            req_pool_indices=self.batch.req_pool_indices,
            seq_lens=self.batch.seq_lens,
            seq_lens_cpu=self.batch.seq_lens_cpu,
            out_cache_loc=batch.out_cache_loc,
            spec_info=None,
        )
        self.backend.init_forward_metadata_out_graph(view)
        now = addresses(self.backend.forward_metadata)
        assert now == addresses(self.metadata)
        self.backend.forward_metadata = self.metadata


def addresses(metadata):
    return {
        name: (value.data_ptr(), tuple(value.shape), value.stride())
        for name, value in vars(metadata).items()
        if isinstance(value, torch.Tensor)
    }


def check_captured_steps(requests: Requests, capture):
    """3 requests that replay a captured step of 4, by what `capture` makes of a function: they are right, and those of
    a step that runs at once."""
    captured = Captured(requests, rows=4, most=6)
    replay = capture(captured.run)
    for counts in ([40, 7, 23], [50, 1, 30], [1, 1, 1]):
        requests.step(counts)
        batch, q, k, v = requests.tokens([1, 1, 1])
        batch.forward_mode = ForwardMode.DECODE
        if requests.backend.two_pools:  # what a step of more requests left there: a slot that is in use
            used = requests.there(requests.slots)[0, 38]
            captured.metadata.window_slots.fill_(int(requests.pool.full_to_swa_index_mapping[used]))
        captured.fill(batch, q, k, v)
        replay()
        got = captured.out[:3].clone()
        want = requests.textbook(q, [1, 1, 1])
        close(got, want)
        requests.backend.init_forward_metadata(batch)
        close(requests.call(batch, q, k, v), got.cpu())
    return captured


def check_keys_that_left_the_window(requests: Requests):
    """Their pages are given back, and read as page 0 since, where nobody wrote."""
    close(*requests.step([40, 7, 60]))
    mapping, page_size = requests.pool.full_to_swa_index_mapping, requests.page_size
    for keys, slots in zip(requests.keys, requests.slots, strict=True):
        mapping[requests.there(slots[: max(len(keys) - 11, 0) // page_size * page_size])] = 0
    close(*requests.step([1, 1, 1], ForwardMode.DECODE))
    close(*requests.step([5, 1, 20]))


def check_lengths_that_no_host_has(requests: Requests):
    """The table has all columns."""
    requests.req_to_token_pool.req_to_token.clamp_(max=0)
    requests.step([40, 7, 23])
    batch, q, k, v = requests.tokens([1, 1, 1])
    batch.forward_mode, batch.seq_lens_cpu = ForwardMode.DECODE, None
    requests.backend.init_forward_metadata(batch)
    assert requests.backend.forward_metadata.table.shape == (3, CONTEXT // 16)
    close(requests.call(batch, q, k, v), requests.textbook(q, [1, 1, 1]))


def close(got, want):
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[want.dtype]
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=10 * tolerance, atol=tolerance)
