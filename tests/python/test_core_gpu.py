# SPDX-License-Identifier: Apache-2.0
"""Calls on a GPU as far as they can be seen without one, each in a process of its own (gpu_protocol.py)."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tessera

FOLDER = Path(__file__).resolve().parent
FAKES = Path(os.environ.get("TESSERA_FAKES", FOLDER.parents[1] / "build" / "release" / "fakes"))
_SOURCE = ast.parse((FOLDER / "gpu_protocol.py").read_text())
CHECKS = [each.name for each in _SOURCE.body if isinstance(each, ast.FunctionDef) and not each.args.args]


@pytest.mark.parametrize("check", CHECKS)
def test_protocol(check, tmp_path):
    if not (FAKES / "libcuda.so.1").exists():
        pytest.skip(f"no {FAKES}; cmake --preset release && cmake --build build/release makes it")
    environment = {**os.environ, "TESSERA_FAKES": str(FAKES), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, str(FOLDER / "gpu_protocol.py"), check]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_violation_of_a_status_word():
    slots = ("q", "k", "v", "o", "o_residual", "lse", "dout", "dlse", "dq", "dk", "dv", "sink", "dsink", "alibi_slopes")
    assert tessera.violation_of(7 * 256 + len(slots) + 1) == ("cu_seqlens_q", 7)
    assert tessera.violation_of(0) is None
