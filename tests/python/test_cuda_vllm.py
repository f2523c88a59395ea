# SPDX-License-Identifier: Apache-2.0
"""Tessera as vLLM's attention backend on a GPU: steps built of vLLM's own classes, at once and as CUDA graphs, against
fp64."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from cuda_torch import CUDA, capture  # noqa: E402
from requests_of_vllm import (  # noqa: E402
    BACKEND,
    CAPTURED,
    OPTIONS,
    STEPS,
    Requests,
    check_captured_steps,
    close,
)
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backend import AttentionType  # noqa: E402

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


@DTYPES
@pytest.mark.parametrize("heads_outside", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps(options, heads_outside, dtype):
    requests = Requests(heads_outside, dtype, CUDA, **options)
    for counts, padding in STEPS:
        close(*requests.step(counts, padding))


@DTYPES
@pytest.mark.parametrize("options", [{}, {"sliding_window": 6}], ids=str)
def test_not_causal(options, dtype):
    close(*Requests(True, dtype, CUDA, **options).step([20, 3, 9], causal=False))


@DTYPES
@pytest.mark.parametrize("kind", CAPTURED)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_graphs_serve_other_lengths_and_pages(options, kind, dtype):
    """Writing keys to the cache and attending to it are captured once, and replayed with batches of other requests."""
    check_captured_steps(Requests(True, dtype, CUDA, **options), kind, capture)


def test_the_device_is_supported():
    """By what vLLM asks of the platform that it finds."""
    asked = {
        "head_size": 128,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": current_platform.get_device_capability(),
        "attn_type": AttentionType.DECODER,
    }
    assert asked["device_capability"] == torch.cuda.get_device_capability()
    assert BACKEND.validate_configuration(dtype=torch.bfloat16, **asked) == []
    assert BACKEND.validate_configuration(dtype=torch.float16, **asked) == []
    assert len(BACKEND.validate_configuration(dtype=torch.float32, **asked)) == 1
