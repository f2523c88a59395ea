# SPDX-License-Identifier: Apache-2.0
"""Calls on a GPU as far as they can be seen without one, each in a process of its own (gpu_protocol.py)."""

from __future__ import annotations

import pytest
import tessera
from stand_in_checks import checks_of, run_check

SCRIPT = "gpu_protocol.py"


@pytest.mark.parametrize("check", checks_of(SCRIPT))
def test_protocol(check, tmp_path):
    run_check(SCRIPT, check, tmp_path)


def test_violation_of_a_status_word():
    slots = ("q", "k", "v", "o", "o_residual", "lse", "dout", "dlse", "dq", "dk", "dv", "sink", "dsink", "alibi_slopes")
    assert tessera.violation_of(7 * 256 + len(slots) + 1) == ("cu_seqlens_q", 7)
    assert tessera.violation_of(0) is None
