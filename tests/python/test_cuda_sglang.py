# SPDX-License-Identifier: Apache-2.0
"""Tessera as SGLang's attention backend on a GPU: steps built of SGLang's own classes, at once and as CUDA graphs,
against fp64. Keys and values are written to the pools as SGLang does it on a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from cuda_torch import CUDA, capture  # noqa: E402
from requests_of_sglang import (  # noqa: E402
    OPTIONS,
    STEPS,
    Requests,
    check_captured_steps,
    check_keys_that_left_the_window,
    check_lengths_that_no_host_has,
    close,
    one_rank,  # noqa: F401
)
from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
PAGES = pytest.mark.parametrize("page_size", [1, 16])
DEVICE = str(CUDA)


@pytest.fixture(autouse=True)
def without_gradients():
    """As a server calls."""
    with torch.no_grad():
        yield


@DTYPES
@PAGES
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps(options, page_size, dtype):
    requests = Requests(page_size, dtype, device=DEVICE, **options)
    for counts, mode, padding in STEPS:
        close(*requests.step(counts, mode, padding))


@DTYPES
def test_encoder(dtype):
    close(*Requests(dtype=dtype, device=DEVICE, attn_type=AttentionType.ENCODER_ONLY).step([40, 7, 23]))


@DTYPES
@PAGES
def test_keys_that_left_the_window(page_size, dtype):
    requests = Requests(page_size, dtype, two_pools=True, device=DEVICE, sliding_window_size=11)
    check_keys_that_left_the_window(requests)


def test_lengths_that_no_host_has():
    check_lengths_that_no_host_has(Requests(dtype=torch.bfloat16, device=DEVICE))


@DTYPES
@PAGES
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_graphs_serve_other_lengths_and_pages(options, page_size, dtype):
    """Writing keys to the pools and attending to them are captured once, and replayed with other lengths and slots."""
    check_captured_steps(Requests(page_size, dtype, device=DEVICE, **options), capture)
