# SPDX-License-Identifier: Apache-2.0
"""examples/hub: its calls against fp32 where there is torch and no NumPy, by the installed package."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

RUN = Path(__file__).resolve().parents[2] / "examples" / "hub" / "run.py"
WITHOUT_NUMPY = f"""
import runpy, sys
sys.modules["numpy"] = None
sys.argv = [{str(RUN)!r}, "--installed"]
runpy.run_path({str(RUN)!r}, run_name="__main__")
"""


def test_four_calls_without_numpy():
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMPY], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "4 examples, 0 errors above 0.01"
    assert sum(line.startswith("  ok") for line in lines) > 20
