# SPDX-License-Identifier: Apache-2.0
"""Tessera as vLLM's attention backend, on the CPU: steps built of vLLM's own classes, against fp64; its flags."""

from __future__ import annotations

import importlib.metadata
import types

import pytest

torch = pytest.importorskip("torch")

import tessera.vllm  # noqa: E402
from requests_of_vllm import (  # noqa: E402
    BACKEND,
    CAPTURED,
    DIM,
    HEADS,
    OPTIONS,
    STEPS,
    Requests,
    check_captured_steps,
    close,
)
from vllm.config.compilation import CompilationConfig, CompilationMode, CUDAGraphMode  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType  # noqa: E402


@pytest.mark.parametrize("heads_outside", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps(options, heads_outside):
    requests = Requests(heads_outside, **options)
    for counts, padding in STEPS:
        close(*requests.step(counts, padding))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype):
    requests = Requests(True, dtype)
    for counts in ([40, 7, 23], [1, 1, 1]):
        close(*requests.step(counts))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 6}], ids=str)
def test_not_causal(options):
    close(*Requests(True, **options).step([20, 3, 9], causal=False))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", CAPTURED)
def test_captured_steps(kind, options):
    """A replay runs the layer on what the captured metadata hold, as a graph would."""
    check_captured_steps(Requests(**options), kind, lambda run: run)


FULL = [CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE]


@pytest.mark.parametrize("mode", [*FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE], ids=lambda mode: mode.name)
def test_cuda_graphs(mode):
    """All batches, those of speculative steps included: vLLM leaves the mode that it is asked for."""
    support = BACKEND.get_builder_cls().get_cudagraph_support(None, None)
    assert support is AttentionCGSupport.ALWAYS
    sizes = {"cudagraph_capture_sizes": [8, 16], "max_cudagraph_capture_size": 16}
    for uniform in (1, 4):
        config = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=mode, **sizes)
        assert config.resolve_cudagraph_mode_and_sizes(support, "CUSTOM", uniform) == mode


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
GOOD += [{"use_adaptive_verification": True}, {"use_kv_connector": True}]
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
