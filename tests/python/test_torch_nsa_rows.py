# SPDX-License-Identifier: Apache-2.0
"""Some rows of native sparse attention by the formulas of one row, which test_cuda_nsa asks of long sequences."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import nsa_rows  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_some_rows(dtype):
    nsa_rows.check(1024, 4, 2, 32, [0, 63, 64, 127, 700], "cpu", dtype)
