# SPDX-License-Identifier: Apache-2.0
"""bench/native_sparse.py on the CPU, and small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = Path(__file__).resolve().parents[2] / "bench" / "native_sparse.py"


def run(*words):
    return subprocess.run(list(map(str, (sys.executable, PROGRAM, *words))), capture_output=True, text=True)


def test_a_row_for_each_call_and_pass(tmp_path):
    file = tmp_path / "rows.json"
    words = ["--tokens", "256", "512", "--heads", "4x2", "--dim", "32", "--calls", "all", "recent", "--repeat", "1"]
    done = run(*words, "--dense-up-to", "256", "--json", file)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    calls = ["dense", "all", "recent"]
    expected = [(which, tokens, call) for which in ("forward", "both") for tokens in (256, 512) for call in calls]
    assert [(row["pass"], row["tokens"], row["call"]) for row in rows] == expected
    for measured, longer in ((0, 3), (6, 9)):  # dense attention of 512 tokens is not measured
        assert rows[longer]["from_tokens"] == 256
        assert rows[longer]["us"] == pytest.approx(4 * rows[measured]["us"])
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + 4
    assert "no window" in lines[0] and ", from 256" in lines[2]


def test_the_peer_has_to_be_there():
    try:
        import fla  # noqa: F401
    except ImportError:
        done = run("--fla", "--tokens", "256")
        assert done.returncode == 2
        assert "--fla: got no package fla; want flash-linear-attention" in done.stderr
    else:
        pytest.skip("fla is installed")
