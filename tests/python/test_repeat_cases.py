# SPDX-License-Identifier: Apache-2.0
"""repeat_cases.py notices what changes from call to call."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from repeat_cases import Call, repeat  # noqa: E402

SCRIPT = Path(__file__).with_name("repeat_cases.py")


def changing(at: int, change: float):
    """A function that doubles its argument, and in call `at` adds `change` to one element of out and gradient."""
    calls = 0

    def function(x, deterministic=False):
        nonlocal calls
        calls += 1
        added = torch.zeros_like(x)
        added[0] = change if calls == at else 0.0
        return x * (2 + added) + added

    return function


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_changes_is_told(deterministic: bool) -> None:
    x = torch.ones(8, dtype=torch.float16, requires_grad=True)
    options = {"deterministic": deterministic}
    assert repeat(Call(changing(0, 1.0), (x,), options), 5, {64}, math.inf) == (5, {})
    told = repeat(Call(changing(3, 1.0), (x,), options), 5, {64}, math.inf)
    gradient = {"other bits of gradient 0": 1} if deterministic else {}
    assert told == (5, {"other bits of out": 1, **gradient})
    told = repeat(Call(changing(3, float("nan")), (x,), {}), 5, {64}, math.inf)
    assert told == (5, {"NaN in out": 1, "NaN in gradient 0": 1, "other bits of out": 1})
    assert repeat(Call(changing(3, 1.0), (x,), options), 5, {64}, 0.0) == (1, {})


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300)


def test_cases_of_the_grids_on_the_cpu() -> None:
    ran = run("--device", "cpu", "--seconds", "1", "--calls", "2", "--processes", "2", "--case", "d=32", "causal=True")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    cases, rest = ran.stdout.splitlines()[-1].split(" cases, ")
    assert int(cases) >= 2 and rest.endswith(" calls, 0 wrong, dead or without an end")


def test_a_part_that_no_case_has() -> None:
    ran = run("--device", "cpu", "--seconds", "1", "--case", "d=33")
    assert ran.returncode == 1 and "--case: got d=33; want what the name of a case has between dashes" in ran.stderr
