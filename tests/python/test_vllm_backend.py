# SPDX-License-Identifier: Apache-2.0
"""Tessera as vLLM's attention backend, on the CPU: steps built of vLLM's own classes, against fp64.

pip install --no-deps vllm==0.33.0   # and the few packages that its registry imports
"""

from __future__ import annotations

import importlib.metadata
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import tessera.vllm  # noqa: E402
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402

tessera.vllm.register()
BACKEND = AttentionBackendEnum.CUSTOM.get_class()
HEADS, KEY_HEADS, DIM, PAGE, PAGES = 4, 2, 32, 16, 24


class Requests:
    """Some requests over a cache whose layout in memory is heads or tokens outside."""

    def __init__(self, heads_outside: bool, dtype=torch.float32, **options):
        self.g = torch.Generator().manual_seed(4)
        shape = (PAGES, KEY_HEADS, PAGE, 2 * DIM) if heads_outside else (PAGES, PAGE, KEY_HEADS, 2 * DIM)
        cache = torch.full(shape, torch.nan, dtype=dtype)
        self.cache = cache if heads_outside else cache.transpose(1, 2)
        self.impl = BACKEND.get_impl_cls()(HEADS, DIM, DIM**-0.5, KEY_HEADS, **options)
        spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=KEY_HEADS, head_size=DIM, dtype=dtype)
        self.builder = BACKEND.get_builder_cls()(spec, ["layer"], types.SimpleNamespace(), torch.device("cpu"))
        self.table = torch.randperm(PAGES - 1, generator=self.g)[:21].reshape(3, 7).int() + 1  # 0 is nobody's
        self.keys, self.values = [torch.empty(0, KEY_HEADS, DIM)] * 3, [torch.empty(0, KEY_HEADS, DIM)] * 3
        self.dtype, self.options = dtype, options

    def step(self, counts: list[int], padding: int = 0, causal: bool = True):
        """So many tokens of each request: (output, what fp64 says)."""
        total = sum(counts)
        q, k, v = (
            torch.randn((total + padding, n, DIM), generator=self.g).to(self.dtype)
            for n in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        slots, starts = [], [0]
        for request, count in enumerate(counts):
            before = len(self.keys[request])
            slots += [int(self.table[request, at // PAGE]) * PAGE + at % PAGE for at in range(before, before + count)]
            rows = slice(starts[-1], starts[-1] + count)
            self.keys[request] = torch.cat([self.keys[request], k[rows]])
            self.values[request] = torch.cat([self.values[request], v[rows]])
            starts.append(starts[-1] + count)
        lengths = torch.tensor([len(x) for x in self.keys], dtype=torch.int32)
        slot_mapping = torch.tensor(slots + [-1] * padding)
        boundaries = torch.tensor(starts, dtype=torch.int32)
        metadata = self.builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=boundaries,
                query_start_loc_cpu=boundaries,
                seq_lens=lengths,
                num_reqs=3,
                num_actual_tokens=total,
                max_query_len=max(counts),
                max_seq_len=int(lengths.max()) + 9,  # may be an upper bound
                block_table_tensor=self.table,
                slot_mapping=slot_mapping,
                causal=causal,
            ),
        )
        self.impl.do_kv_cache_update(None, k, v, self.cache, slot_mapping)
        output = torch.full((total + padding, HEADS * DIM), torch.nan, dtype=self.dtype)
        got = self.impl.forward(None, q, k, v, self.cache, metadata, output)
        assert got is output
        want = [self.textbook(q[starts[r] : starts[r + 1]], r, causal) for r in range(3)]
        return got[:total].reshape(total, HEADS, DIM), torch.cat(want).to(self.dtype)

    def textbook(self, q, request, causal):
        k, v = (x[request].double().repeat_interleave(HEADS // KEY_HEADS, 1) for x in (self.keys, self.values))
        scores = torch.einsum("ihd,jhd->hij", q.double(), k) * DIM**-0.5
        if cap := self.options.get("logits_soft_cap"):
            scores = cap * torch.tanh(scores / cap)
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        if (slopes := self.options.get("alibi_slopes")) is not None:
            scores = scores - torch.tensor(slopes).double()[:, None, None] * distance.abs()
        window = self.options.get("sliding_window") or len(k)
        visible = (distance < window) & (distance >= 0 if causal else distance > -window)
        scores = scores.masked_fill(~visible, -torch.inf)
        norm = scores.logsumexp(-1, keepdim=True)
        if (sinks := self.options.get("sinks")) is not None:
            norm = torch.logaddexp(norm, sinks.double()[:, None, None])
        return torch.einsum("hij,jhd->ihd", (scores - norm).exp(), v)


OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 12},
    "softcap": {"logits_soft_cap": 1.5},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 3.0, 0.5])},
    "slopes": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
}


@pytest.mark.parametrize("heads_outside", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps(options, heads_outside):
    """A prefill, a chunk beside decodes, decodes, several tokens of a speculative step; padded behind."""
    requests = Requests(heads_outside, **options)
    for counts, padding in (([40, 7, 23], 0), ([33, 1, 1], 5), ([1, 1, 1], 0), ([1, 1, 1], 13), ([4, 4, 4], 0)):
        got, want = requests.step(counts, padding)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype):
    requests = Requests(True, dtype)
    for counts in ([40, 7, 23], [1, 1, 1]):
        got, want = requests.step(counts)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 6}], ids=str)
def test_not_causal(options):
    got, want = Requests(True, **options).step([20, 3, 9], causal=False)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_profiling_run():
    requests = Requests(True)
    output = torch.full((5, HEADS * DIM), torch.nan)
    assert not requests.impl.forward(None, None, None, None, requests.cache, None, output).any()


def test_metadata_of_other_pages():
    requests = Requests(True)
    made = requests.builder.build(
        0,
        types.SimpleNamespace(
            **dict.fromkeys(
                (
                    "num_actual_tokens",
                    "query_start_loc",
                    "max_query_len",
                    "seq_lens",
                    "block_table_tensor",
                    "slot_mapping",
                ),
                1,
            ),
            causal=True,
        ),
    )
    other = requests.builder.update_block_table(made, 2, 3)
    assert (other.table, other.slots, other.lengths) == (2, 3, 1) and made.table == 1
    with pytest.raises(NotImplementedError, match="causal: got a tensor"):
        requests.builder.build(0, types.SimpleNamespace(causal=torch.tensor([True])))


def reasons(**changes):
    asked = {
        "head_size": 64,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": None,
        "attn_type": AttentionType.DECODER,
    }
    return BACKEND.validate_configuration(**(asked | changes))


GOOD = [{}, {"has_sink": True}, {"has_sliding_window": True}, {"use_non_causal": True}, {"block_size": 1}]
GOOD += [{"head_size": n} for n in (8, 80, 96, 256, 512)] + [{"dtype": torch.float32}, {"kv_cache_dtype": "bfloat16"}]
BAD = [{"head_size": 60}, {"head_size": 520}, {"kv_cache_dtype": "fp8"}, {"use_mla": True}, {"use_sparse": True}]
BAD += [{"use_mm_prefix": True}, {"use_per_head_quant_scales": True}, {"attn_type": AttentionType.ENCODER_ONLY}]
BAD += [{"use_batch_invariant": True}, {"use_pcp": True}, {"use_dcp": True}, {"use_rswa": True}]
CAPABILITY = types.SimpleNamespace(major=7, minor=5)
BAD += [{"device_capability": CAPABILITY}]
BAD += [{"device_capability": types.SimpleNamespace(major=9, minor=0), "dtype": torch.float32}]


@pytest.mark.parametrize("changes", GOOD, ids=str)
def test_what_is_supported(changes):
    assert reasons(**changes) == []


@pytest.mark.parametrize("changes", BAD, ids=str)
def test_what_is_not(changes):
    assert len(reasons(**changes)) == 1


@pytest.mark.parametrize("options", [{"attn_type": AttentionType.ENCODER_ONLY}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_layers_that_are_refused(options):
    with pytest.raises(NotImplementedError, match="got"):
        Requests(True, **options)


def test_entry_point():
    found = [each for each in importlib.metadata.entry_points(group="vllm.general_plugins") if each.name == "tessera"]
    if not found:
        pytest.skip("the package is not installed here, but read from its folder")
    assert found[0].load() is tessera.vllm.register
