# SPDX-License-Identifier: Apache-2.0
"""Context parallel attention of N processes against one process: every method, mask, kind of shards and dtype.

By default a spread of the cases; --complete takes all of them.
"""

from __future__ import annotations

from itertools import product

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("no Gloo", allow_module_level=True)

import distributed_judge  # noqa: E402
import distributed_problems as problems  # noqa: E402
from distributed_ranks import run_ranks  # noqa: E402
from distributed_worker import Case, shares  # noqa: E402

BALANCES = ("zigzag", "contiguous")
DTYPES = (torch.float32, torch.bfloat16)
METHODS = ("all_gather", "ring", "ulysses", "two_level")
# One case of so many in the spread, odd numbers so that kinds of shards and dtypes take turns.
EVERY = {2: 3, 3: 3, 4: 3, 8: 7}


def cases_of(ranks: int, method: str, complete: bool) -> list[Case]:
    inners = {4: (2,), 8: (2, 4)}.get(ranks, ()) if method == "two_level" else (1,)
    found = [
        Case(problem, method, balance, dtype, inner)
        for problem, balance, dtype, inner in product(problems.ALL, BALANCES, DTYPES, inners)
    ]
    return found if complete else found[METHODS.index(method) % 3 :: EVERY[ranks]]


def failures(ranks: int, cases: list[Case], found: list[list]) -> list[str]:
    wrong = []
    for i, case in enumerate(cases):
        try:
            distributed_judge.judge(case, ranks, [of_rank[i] for of_rank in found])
        except AssertionError as error:
            wrong.append(f"{case}: {error}")
    return wrong


def computed(ranks: int, cases: list[Case]) -> list[list]:
    found = run_ranks(ranks, shares, cases, timeout=1000)
    assert all(isinstance(of_rank, list) for of_rank in found), found
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", EVERY)
def test_ranks_compute_what_one_process_does(ranks, method, pytestconfig):
    cases = cases_of(ranks, method, pytestconfig.getoption("--complete"))
    if not cases or (method == "ulysses" and ranks == 3):
        pytest.skip("8 heads do not split")
    wrong = failures(ranks, cases, computed(ranks, cases))
    assert not wrong, f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(wrong[:20])


def test_collectives_of_the_backend():
    """As with NCCL: all-gather and reduce-scatter instead of sends and receives."""
    names = ("causal", "window", "sinks", "packed", "dropout")
    cases = [Case(name, "all_gather", "zigzag", torch.bfloat16, collectives=True) for name in names]
    cases += [Case("full", "all_gather", "contiguous", torch.float32, collectives=True, deterministic=True)]
    wrong = failures(3, cases, computed(3, cases))
    assert not wrong, "\n".join(wrong)


def test_runs_repeat_bit_for_bit():
    cases = [Case("causal", method, "zigzag", torch.bfloat16) for method in ("all_gather", "ring", "ulysses")] * 2
    cases += [Case("packed", "ring", "contiguous", torch.float32)] * 2
    for of_rank in computed(4, cases):
        for one, other in ((0, 3), (1, 4), (2, 5), (6, 7)):
            for name in of_rank[one]:
                assert torch.equal(of_rank[one][name], of_rank[other][name]), f"{cases[one].method}: {name}"
