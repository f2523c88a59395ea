# SPDX-License-Identifier: Apache-2.0
"""`tessera.jax` on a GPU as far as it can be seen without one and without jax, each check in a process of its own
(xla_protocol.py)."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
FAKES = Path(os.environ.get("TESSERA_FAKES", FOLDER.parents[1] / "build" / "release" / "fakes"))
_SOURCE = ast.parse((FOLDER / "xla_protocol.py").read_text())
CHECKS = [each.name for each in _SOURCE.body if isinstance(each, ast.FunctionDef) and not each.args.args]


@pytest.mark.parametrize("check", [name for name in CHECKS if name.startswith("check_")])
def test_call_of_xla(check, tmp_path):
    if not (FAKES / "libcuda.so.1").exists():
        pytest.skip(f"no {FAKES}; cmake --preset release && cmake --build build/release makes it")
    environment = {**os.environ, "TESSERA_FAKES": str(FAKES), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, str(FOLDER / "xla_protocol.py"), check]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
