# SPDX-License-Identifier: Apache-2.0
"""The programs of bench that time skip states and backward lists, on the CPU and small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

BENCH = Path(__file__).resolve().parents[2] / "bench"


def measured(tmp_path, name, *words):
    """Rows of the JSON file, and the lines of the tables."""
    file = tmp_path / "rows.json"
    command = [sys.executable, BENCH / name, "--repeat", "1", "--json", file, *words]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())["rows"], [line for line in done.stdout.splitlines() if line.startswith("| ")]


def test_steps_of_skip_states(tmp_path):
    words = ["--cost", "256x2", "--workload", "512x1", "--steps", "4", "--thresholds", "-0.5", "--masses", "0.05"]
    rows, lines = measured(tmp_path, "skip_steps.py", *words)
    calls = ["dense", "listed", "mass, first step", "mass", "threshold, first step", "threshold"]
    assert [row["call"] for row in rows if row["kind"] == "cost"] == calls
    found = [row for row in rows if row["kind"] == "workload"]
    assert [row["rule"] for row in found] == ["threshold", "mass"]
    for row in found:  # keys are queries: the tiles of the diagonal are left, a quarter
        # `mass` knows no LSE before step 0, `threshold` sees the tiles from one side there: both settle in two steps.
        assert row["by_step"]["active"] == [1, 1 if row["rule"] == "mass" else 0.625, 0.25, 0.25]
        assert row["by_step"]["relative_l2"][0] < 0.01 < row["by_step"]["relative_l2"][-1] < 0.1
        assert row["by_step"]["cosine"][-1] > 0.99
    assert len(lines) == 2 + 3


def test_training_steps(tmp_path):
    words = ["--shapes", "1x512x2", "--dim", "64", "--left-out", "0", "0.75"]
    rows, lines = measured(tmp_path, "training_step.py", *words)
    assert [row["left_out"] for row in rows] == [None, 0, 0.75]
    assert [row["relative_l2"] for row in rows[:2]] == [0, pytest.approx(0, abs=1e-2)]
    assert 0.5 < rows[2]["relative_l2"] < 1  # of a quarter of the tiles
    assert all(list(row["us"]) == ["clone", "forward", "loss", "backward", "readout"] for row in rows)
    assert len(lines) == 1 + 3
