# SPDX-License-Identifier: Apache-2.0
"""SGLang's own cases for its attention backends, which its wheel carries, with Tessera: on a GPU where there is one.

They run a layer of random weights under a `ModelRunner` that loads no model, against a textbook of SGLang's: at once,
and with the metadata of captured decode steps, padded. Their cases of windows have no decode step, so that is added.
"""

from __future__ import annotations

import unittest

import pytest

torch = pytest.importorskip("torch")

from requests_of_sglang import one_rank  # noqa: E402, F401
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

KIT = "sglang.test.kits.attention_unittest"
dense = pytest.importorskip(f"{KIT}.attention_methods.dense_attention", exc_type=ImportError)
graphs = pytest.importorskip(f"{KIT}.runner_modes.cuda_graph_decode_runner", exc_type=ImportError)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WINDOW = {"backend": "tessera", "num_heads": 4, "num_kv_heads": 2, "sliding_window_size": 4}
CASES = [
    *dense.make_dense_cases("tessera"),
    *dense.make_swa_no_prefix_input_config_cases("tessera"),
    *dense.make_swa_prefix_input_config_cases("tessera"),
    *(
        dense.DenseAttentionCase(
            name=f"swa_decode_page_size_{page_size}",
            forward_mode=ForwardMode.DECODE,
            page_size=page_size,
            prefix_lens=(3, 4, 5, 30),
            **WINDOW,
        )
        for page_size in (1, 16)
    ),
]
DECODES = [case for case in CASES if case.forward_mode.is_decode()]


@pytest.fixture(autouse=True)
def as_a_server_calls(monkeypatch):
    """Without gradients. A window of n is the query's own key and n before it, as for most of SGLang's backends."""
    known = dense._SWA_DECODE_EXTEND_WINDOW | {"tessera"}
    monkeypatch.setattr(dense, "_SWA_DECODE_EXTEND_WINDOW", known)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("layout", ["contiguous", "shuffled_pages", "interleaved_pages"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case, layout):
    dense.run_dense_attention_case(unittest.TestCase(), case, device=DEVICE, loc_layout=layout)


@pytest.mark.parametrize("case", DECODES, ids=lambda case: case.name)
def test_captured_decode(case):
    graphs.run_dense_cuda_graph_decode_case(unittest.TestCase(), case, device=DEVICE)
