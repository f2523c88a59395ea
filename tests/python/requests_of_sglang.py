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
        device="cpu",
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

    def __init__(self, page_size=16, dtype=torch.float32, two_pools=False, sinks=None, chunk=None, **layer):
        self.g = torch.Generator().manual_seed(4)
        self.page_size, self.dtype, self.sinks, self.chunk = page_size, dtype, sinks, chunk
        pages = -(-CONTEXT // page_size)
        size = (3 * pages + 2) * page_size
        self.req_to_token_pool = ReqToTokenPool(5, CONTEXT, "cpu", enable_memory_saver=False)
        shapes = {"head_num": KEY_HEADS, "head_dim": DIM, "v_head_dim": VALUE_DIM, "device": "cpu"}
        if two_pools:
            self.pool = SWAKVPool(
                size, size, page_size, dtype, **shapes, swa_attention_layer_ids=[LAYER], full_attention_layer_ids=[0]
            )
            moved = torch.cat(
                [torch.zeros(1, dtype=torch.int64), torch.randperm(size // page_size, generator=self.g) + 1]
            )
            slots = moved[:, None] * page_size + torch.arange(page_size)
            self.pool.register_mapping(torch.cat([slots.flatten(), torch.tensor([-1])]))
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
        self.rows = torch.tensor([4, 2, 5])  # of req_to_token
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
            self.req_to_token_pool.write((self.rows[i], slice(before[i], lengths[i])), taken[-1].int())
            rows = slice(start, start + count)
            self.keys[i] = torch.cat([self.keys[i], k[rows].view(-1, KEY_HEADS, DIM)])
            self.values[i] = torch.cat([self.values[i], v[rows].view(-1, KEY_HEADS, VALUE_DIM)])
            start += count
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=3,
            input_ids=torch.zeros(total, dtype=torch.int64),
            req_pool_indices=self.rows,
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            seq_lens_sum=sum(lengths),
            out_cache_loc=torch.cat([*taken, torch.zeros(padding, dtype=torch.int64)]),
            extend_num_tokens=sum(counts),
            extend_seq_lens=torch.tensor(counts, dtype=torch.int32),
            extend_seq_lens_cpu=counts,
            extend_prefix_lens=torch.tensor(before, dtype=torch.int32),
            extend_prefix_lens_cpu=before,
        )
        return batch, q, k, v

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
        parts = q[: sum(counts)].view(-1, HEADS, DIM).split(counts)
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
            norm = torch.logaddexp(norm, self.sinks.double()[:, None, None])
        return torch.einsum("hij,jhd->ihd", (scores - norm).exp(), v)


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got, want, rtol=10 * tolerance, atol=tolerance)
