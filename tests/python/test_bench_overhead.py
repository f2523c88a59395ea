# SPDX-License-Identifier: Apache-2.0
"""The program of bench that times the host's part of calls on a GPU, on the CPU and short."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = Path(__file__).resolve().parents[2] / "bench" / "python_overhead_cuda.py"


def test_host_time_of_calls_and_of_their_parts(tmp_path):
    file = tmp_path / "rows.json"
    command = [sys.executable, PROGRAM, "--device", "cpu", "--calls", "2", "--repetitions", "2", "--parts"]
    done = subprocess.run([*map(str, command), "--json", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert len(done.stdout.splitlines()) == len(rows)
    us = {row["call"]: row["us"] for row in rows}
    assert {"forward, flash_attn_func", "forward and gradients, flash_attn_func", "forward, torch SDPA"} < us.keys()
    assert all(0 < row["least_us"] <= row["us"] <= row["most_us"] for row in rows)
