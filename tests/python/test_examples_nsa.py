# SPDX-License-Identifier: Apache-2.0
"""examples/nsa, run as a user runs it, on a text of a few kilobytes."""

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("numpy")

RUN = Path(__file__).resolve().parents[2] / "examples" / "nsa" / "run.py"


def command(*words):
    return subprocess.run([sys.executable, RUN, *map(str, words)], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Ten files, of which the first is held out."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(10):
        (folder / f"{number}.md").write_text("".join(f"{i} times {number} is {i * number}.\n" for i in range(200)))
    return folder


def test_both_attentions_learn_and_tell_what_they_cost(text, tmp_path):
    out, picture = tmp_path / "runs.json", tmp_path / "chosen.svg"
    words = ["--text", text, "--steps", 40, "--context", 500, "--dim", 128, "--head-dim", 16, "--layers", 2]
    words += ["--top", 4, "--window", 64, "--json", out]  # 8 query heads, 2 key heads, 8 blocks
    if importlib.util.find_spec("matplotlib"):
        words += ["--picture", picture]
    done = command(*words)
    assert done.returncode == 0, done.stderr
    runs = json.loads(out.read_text())["runs"]
    assert list(runs) == ["dense", "NSA"]
    for name, found in runs.items():
        losses = found["run"]["losses"]
        assert len(losses) == 40 and abs(losses[0] - math.log(256)) < 0.2, name
        assert losses[-1] < 3, name
        assert found["peak_memory"] > found["memory_before"] > 10, name
    dense, sparse = (found["run"] for found in runs.values())
    assert dense["losses"] != sparse["losses"]
    assert abs(dense["held_out_bits_per_byte"] - sparse["held_out_bits_per_byte"]) < 0.5
    assert re.search(r"\| tokens a second, median step \| \d+ \| \d+ \| \d", done.stdout)
    assert "| peak memory, MiB |" in done.stdout and "Mean loss of the last 4 steps" in done.stdout
    # A tile of 32 rows has the first block, its own, that before it and the best other, as far as they are there:
    # (1 + 2 + 3 + 5 * 4) / 8 is 3.25.
    assert "NSA selects 3.2 of 8 blocks" in done.stdout
    if importlib.util.find_spec("matplotlib"):
        assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--dim", "40"], "--dim: got 40; want a multiple of 64"),
        (["--head-dim", "12"], "--head-dim: got 12; want a multiple of 8"),
        (["--steps", "0"], "--steps: got 0; want 1 or more"),
        (["--held-out", "0"], "--held-out: got 0; want 1 or more"),
        (["--device", "cuda:99"], "--device: got cuda:99; want cpu, or a cuda device that torch finds"),
        (["--context", "4000", "--text", "{text}"], "--context: got 4000; want less than"),
        (["--context", "100", "--text", "{text}", "--steps", "1", "--top", "2"], "top: got 2"),
        (["--context", "100", "--text", "{text}", "--steps", "1", "--window", "0"], "window: got 0; want 1 key"),
    ],
)
def test_refusals_name_the_argument(text, words, told):
    done = command(*(word.replace("{text}", str(text)) for word in words))
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr
