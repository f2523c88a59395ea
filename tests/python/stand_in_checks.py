# SPDX-License-Identifier: Apache-2.0
"""Runs the checks of a script, its functions without arguments, on the stand-ins for a driver of `tests/fakes`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
FAKES = Path(os.environ.get("TESSERA_FAKES", FOLDER.parents[1] / "build" / "release" / "fakes"))


def checks_of(script: str) -> list[str]:
    source = ast.parse((FOLDER / script).read_text())
    return [each.name for each in source.body if isinstance(each, ast.FunctionDef) and not each.args.args]


def run_check(script: str, check: str, cache: Path) -> None:
    """In a process of its own, because a process loads one driver; kernels are kept in `cache`."""
    if not (FAKES / "libcuda.so.1").exists():
        pytest.skip(f"no {FAKES}; cmake --preset release && cmake --build build/release makes it")
    environment = {**os.environ, "TESSERA_FAKES": str(FAKES), "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, str(FOLDER / script), check]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
