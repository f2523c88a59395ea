# SPDX-License-Identifier: Apache-2.0
"""What Tessera says no to as SGLang's attention backend, its flags, its name and its entry point."""

from __future__ import annotations

import argparse
import importlib.metadata
import types

import pytest

torch = pytest.importorskip("torch")

import tessera.sglang  # noqa: E402
from requests_of_sglang import ON_CPU, Requests, one_rank, runner_of  # noqa: E402, F401
from sglang.srt.arg_groups.choices import (  # noqa: E402
    ATTENTION_BACKEND_CHOICES,
    DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
    DRAFT_ATTENTION_BACKEND_CHOICES,
)
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

pytestmark = ON_CPU


def test_captured_steps_that_are_refused():
    requests = Requests()
    batch, *_ = requests.tokens([3, 3, 3])
    with pytest.raises(NotImplementedError, match="cuda graph of a prefill: got"):
        requests.backend.init_forward_metadata_out_graph(batch)
    batch.forward_mode = ForwardMode.DECODE
    with pytest.raises(RuntimeError, match="want init_cuda_graph_state"):
        requests.backend.init_forward_metadata_out_graph(batch)


def pool_of(kind=MHATokenToKVPool, dtype=torch.bfloat16, **more):
    return kind(32, 16, dtype, head_num=2, head_dim=32, layer_num=1, device="cpu", enable_memory_saver=False, **more)


class Subclass(MHATokenToKVPool):
    pass


RUNNERS = {
    "use_mla_backend": ({"use_mla_backend": True}, "multi-head latent"),
    "encoder": ({"model_config": types.SimpleNamespace(is_encoder_decoder=True)}, "cross attention"),
    "speculative": ({"spec_algorithm": SpeculativeAlgorithm.EAGLE}, "speculative_algorithm: got EAGLE"),
    "unified": ({"kv_index_translator": types.SimpleNamespace(reads_are_translated=True)}, "unified_memory"),
}


@pytest.mark.parametrize(("changes", "words"), RUNNERS.values(), ids=RUNNERS)
def test_runners_that_are_refused(changes, words):
    rows = ReqToTokenPool(2, 64, "cpu", enable_memory_saver=False)
    ATTENTION_BACKENDS["tessera"](runner_of(pool_of(), rows, 16))
    with pytest.raises(NotImplementedError, match=words):
        ATTENTION_BACKENDS["tessera"](runner_of(pool_of(), rows, 16, **changes))


@pytest.mark.parametrize("name", ["attn_dcp_size", "attn_cp_size"])
def test_context_parallelism_is_refused(name, monkeypatch):
    """SGLang's own sizes fit each other and the groups that processes made, so these are told in their place."""
    sizes = types.SimpleNamespace(**({"attn_dcp_size": 1, "attn_cp_size": 1} | {name: 2}))
    rows = ReqToTokenPool(2, 64, "cpu", enable_memory_saver=False)
    runner = runner_of(pool_of(), rows, 16)
    monkeypatch.setattr("tessera.sglang.refusals.get_parallel", lambda: sizes)
    with pytest.raises(NotImplementedError, match=f"{name}: got 2; want 1"):
        ATTENTION_BACKENDS["tessera"](runner)


@pytest.mark.parametrize(
    ("kind", "more", "words"),
    [
        (MHATokenToKVPool, {"dtype": torch.float8_e4m3fn}, "kv_cache_dtype: got torch.float8_e4m3fn"),
        (Subclass, {}, "token_to_kv_pool: got a Subclass"),
    ],
    ids=["fp8", "another pool"],
)
def test_pools_that_are_refused(kind, more, words):
    rows = ReqToTokenPool(2, 64, "cpu", enable_memory_saver=False)
    pool = pool_of(kind, **more)
    with pytest.raises(NotImplementedError, match=words):
        ATTENTION_BACKENDS["tessera"](runner_of(pool, rows, 16))


def test_layouts_that_are_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    rows = ReqToTokenPool(2, 64, "cpu", enable_memory_saver=False)
    with pytest.raises(NotImplementedError, match="kv_cache_layout: got 'hnd'"):
        ATTENTION_BACKENDS["tessera"](runner_of(pool_of(), rows, 16))


MODES = ["TARGET_VERIFY", "DRAFT_EXTEND_V2", "SPLIT_PREFILL", "DLLM_EXTEND", "PREBUILT"]
BATCHES = {name: ({"forward_mode": ForwardMode[name]}, f"forward_mode: got {name}; want EXTEND") for name in MODES}
BATCHES["spec_info"] = {"spec_info": object()}, "spec_info: got a object"
BATCHES["items"] = {"multi_item_delimiter_indices": [torch.tensor([1])]}, "multi_item_delimiter_indices: got some"


@pytest.mark.parametrize(("changes", "words"), BATCHES.values(), ids=BATCHES)
def test_batches_that_are_refused(changes, words):
    requests = Requests()
    batch, *_ = requests.tokens([3, 3, 3])
    for name, value in changes.items():
        setattr(batch, name, value)
    with pytest.raises(NotImplementedError, match=words):
        requests.backend.init_forward_metadata(batch)


LAYERS = {
    "cross": {"is_cross_attention": True},
    "attn_type": {"attn_type": AttentionType.DECODER_BIDIRECTIONAL},
    "sliding_window_size": {"attn_type": AttentionType.ENCODER_ONLY, "sliding_window_size": 3},
    "logit_capping_method": {"logit_cap": 1.0, "logit_capping_method": "sigmoid"},
    "pos_encoding_mode": {"pos_encoding_mode": "ALIBI"},
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layers_that_are_refused(options):
    with pytest.raises(NotImplementedError, match="got"):
        Requests(**options).step([3, 3, 3])


def test_temperatures_are_refused():
    requests = Requests()
    requests.layer.xai_temperature_len = 1024
    with pytest.raises(NotImplementedError, match="xai_temperature_len: got 1024"):
        requests.step([3, 3, 3])


def test_other_arguments_are_refused():
    requests = Requests()
    batch, q, k, v = requests.tokens([3, 3, 3])
    requests.backend.init_forward_metadata(batch)
    with forward_context(ForwardContext(attn_backend=requests.backend)):
        requests.layer(q, k, v, batch, rel_bias=None)
        with pytest.raises(NotImplementedError, match="rel_bias: got a Tensor; want None"):
            requests.layer(q, k, v, batch, rel_bias=torch.zeros(9))


def test_names():
    """The command line takes the name; what asks for deterministic kernels or drafts does not offer it."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(["--model-path", "m", "--attention-backend", "tessera"])
    assert parsed.attention_backend == "tessera"
    tessera.sglang.register()
    assert ATTENTION_BACKEND_CHOICES.count("tessera") == 1
    assert "tessera" not in DETERMINISTIC_ATTENTION_BACKEND_CHOICES + DRAFT_ATTENTION_BACKEND_CHOICES


def test_flags():
    backend = Requests().backend
    assert backend.needs_cpu_seq_lens
    for name in (
        "supports_ragged_verify_graph",
        "supports_full_cuda_graph_chunked_prefix",
        "use_captured_forward_metadata_for_breakable_cuda_graph",
        "supports_prefill_cuda_graph_max_context_size",
    ):
        assert getattr(backend, name) is False
    assert backend.glue_target_verify_metadata() and backend.glue_draft_metadata()
    assert backend.get_fused_kv_write_buffers(None, None) is None and backend.verify_mask is None


def test_entry_point():
    found = [each for each in importlib.metadata.entry_points(group="sglang.srt.plugins") if each.name == "tessera"]
    if not found:
        pytest.skip("the package is not installed here, but read from its folder")
    assert found[0].load() is tessera.sglang.register
