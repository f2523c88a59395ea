# SPDX-License-Identifier: Apache-2.0
"""complete_grid.py: every case once, failures and crashes on record, a second run does what is missing."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from flash_grid import Grid

# A grid of 40 cases: a = 7 fails with b = 1, and a = 3 ends its process.
PROGRAM = """
import os
import sys
import time

import complete_grid
import torch
from flash_grid import Grid


def test_small(case):
    assert torch.empty(0).device.type == os.environ.get("DEVICE", "cpu")
    if case.a == 3 and os.environ.get("CRASH"):
        os._exit(5)
    if case.a == 3 and os.environ.get("HANG"):
        time.sleep(300)
    assert case.a != 7 or case.b != 1, f"a is {case.a}"


grid = Grid(4, 1.0, lambda case: 1.0, lambda case: case.a < 10, ignored=lambda case: ("b",), inner=1, b=[0, 1, 2, 3],
            a=list(range(12)))
complete_grid.CASES = 8
version = os.environ.get("VERSION", "first")
complete_grid.find_tests = lambda: {("small", "test_small"): complete_grid.Test(grid, test_small, {"": {}}, version)}
sys.exit(complete_grid.main())
"""


def run(
    results: Path, *arguments: str, fault: str = "", version: str = "first", device: str = "cpu"
) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, "--results", str(results), "--processes", "2", *arguments],
        env={
            "PYTHONPATH": str(here),
            "PATH": "",
            "VERSION": version,
            "DEVICE": device,
            **({fault: "1"} if fault else {}),
        },
        cwd=results.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 24])
def test_every_case_is_in_one_shard(shards: int) -> None:
    grid = Grid(1, 1.0, lambda _: 1.0, lambda case: case.a != case.b, inner=2, a=[0, 1, 2], b=[0, 1], c=list(range(24)))
    parts = [[str(case) for case in grid.complete(shard, shards)] for shard in range(shards)]
    valid = [str(case) for case in map(grid.at, range(grid.size)) if grid.valid(case)]
    assert sorted(itertools.chain(*parts)) == sorted(valid)
    assert max(map(len, parts)) <= 4 * -(-24 // shards)


def test_cases_of_a_group_share_a_seed() -> None:
    grid = Grid(1, 1.0, lambda _: 1.0, ignored=lambda _: ("a",), inner=1, a=[0, 1], b=[0, 1])
    first, second, third, _ = grid.complete(0, 1)
    assert first.seed == second.seed and first.group == second.group and str(first) != str(second)
    assert third.seed != first.seed


def test_failures_are_on_record_and_done_shards_are_not_run_again(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    first = run(results, "--share", "0.4")
    lines = results.read_text().splitlines()
    assert first.returncode in (1, 2), first.stderr
    second = run(results)
    assert second.returncode == 1, second.stderr
    assert results.read_text().splitlines()[: len(lines)] == lines
    done = [json.loads(line) for line in results.read_text().splitlines()]
    assert len({(line["shard"], line["shards"]) for line in done}) == len(done) > len(lines)
    assert sum(line["passed"] for line in done) == 39
    (failure,) = [failure for line in done for failure in line["failures"]]
    assert failure == ["b=1-a=7", "AssertionError: a is 7"]
    assert second.stdout.splitlines()[-1].split()[:5] == ["all", "40", "39", "1", "0"]


def test_a_process_that_dies_fails_its_case_and_is_replaced(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    outcome = run(results, fault="CRASH")
    assert outcome.returncode == 1, outcome.stderr
    failures = [failure for line in map(json.loads, results.read_text().splitlines()) for failure in line["failures"]]
    assert ["b=0-a=3", "the process died with exit code 5"] in failures
    assert ["b=1-a=7", "AssertionError: a is 7"] in failures
    assert run(results, "--again").stdout.splitlines()[-1].split()[:5] == ["all", "40", "39", "1", "0"]


def test_lines_of_another_version_do_not_count(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    run(results)
    lines = results.read_text().splitlines()
    results.write_text(
        "".join(f"{line}\n" for line in [*lines, *(x.replace(', "version": "first"', "") for x in lines)])
    )
    outcome = run(results, "--limit", "0", version="second")
    assert outcome.returncode == 2, outcome.stderr
    assert f"0 there already, {2 * len(lines)} stale" in outcome.stdout
    assert outcome.stdout.splitlines()[-1].split()[:5] == ["all", "40", "0", "0", "40"]
    assert run(results, version="second").stdout.splitlines()[-1].split()[:5] == ["all", "40", "39", "1", "0"]
    assert len(results.read_text().splitlines()) == 3 * len(lines)


def test_lines_of_another_device_do_not_count(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    run(results)
    outcome = run(results, "--grid-device", "meta", device="meta")
    assert outcome.returncode == 1, outcome.stderr
    assert " 0 there already, " in outcome.stdout
    assert outcome.stdout.splitlines()[-1].split()[:5] == ["all", "40", "39", "1", "0"]


def test_a_version_is_of_the_contents(tmp_path: Path) -> None:
    """In a process of its own: complete_grid.py sets variables of the environment."""
    program = """
import pathlib
import complete_grid

file = pathlib.Path("inputs.py")
for text in ("a = 1", "a = 2", "a = 1"):
    file.write_text(text)
    print(complete_grid.version_of([file]))
print(*{name[0]: test.version for name, test in complete_grid.find_tests().items()}.values())
"""
    environment = {"PYTHONPATH": str(Path(__file__).parent), "PATH": ""}
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    first, second, third, modules = printed.splitlines()
    assert first == third != second
    assert len(set(modules.split())) == 4


def test_after_the_limit_no_shard_begins(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    outcome = run(results, "--limit", "0")
    assert outcome.returncode == 2, outcome.stderr
    assert results.read_text() == ""
    assert outcome.stdout.splitlines()[-1].split()[:5] == ["all", "40", "0", "0", "40"]


def test_cases_that_do_not_end_are_named(tmp_path: Path) -> None:
    outcome = run(tmp_path / "results.jsonl", "--limit", "5", "--grace", "1", fault="HANG")
    assert outcome.returncode in (1, 2), outcome.stderr
    assert "1 shards did not end within 1 s of grace" in outcome.stdout
    assert "RUNNING small.test_small[b=0-a=3]" in outcome.stdout
