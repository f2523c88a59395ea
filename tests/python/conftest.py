# SPDX-License-Identifier: Apache-2.0
"""Options and fixtures of all Python tests."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

# torch brings an OpenMP of its own beside Tessera's. Idle threads of either that spin keep the cores from the other's:
# the tests of small models take four times as long. Read when the runtimes are loaded, which is after this.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROOT = Path(__file__).resolve().parents[2]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--complete", action="store_true", help="every combination of the grids instead of a spread")
    parser.addoption("--complete-shard", default="0/1", help="I/N: with --complete, the I-th of N parts")
    parser.addoption("--grid-device", default="cpu", help="where the grids' calls of Tessera run: cpu, cuda, cuda:1")
    parser.addoption("--textbook-device", default="cpu", help="where the textbooks of the grids run: cpu, cuda, cuda:1")


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread_a_worker() -> None:
    """Under pytest-xdist the workers share the cores: torch's own threads would only wait for each other's."""
    if "PYTEST_XDIST_WORKER" in os.environ and find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tessera_command() -> Path:
    """The command of the C++ build: $TESSERA_COMMAND, or that of build/release."""
    path = Path(os.environ.get("TESSERA_COMMAND", ROOT / "build" / "release" / "tessera"))
    if not path.exists():
        pytest.skip(f"no {path}; cmake --preset release && cmake --build build/release makes it")
    return path


@pytest.fixture
def command(tessera_command, tmp_path):
    """`tessera run` on arrays, in a folder of the test's own."""
    from command_run import Command

    return Command(tessera_command, tmp_path)


@pytest.fixture
def rng():
    import numpy as np

    return np.random.default_rng(77)
