# SPDX-License-Identifier: Apache-2.0
"""Context parallel attention by NCCL, a GPU a rank: what test_distributed_results has of Gloo, in bf16, some in fp16.

The first run compiles kernels for minutes; they are kept on the disk.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.device_count() < 2 or not torch.distributed.is_nccl_available():
    pytest.skip("fewer than two CUDA devices, or no NCCL", allow_module_level=True)

import cuda_distributed  # noqa: E402
import distributed_judge  # noqa: E402
import distributed_problems as problems  # noqa: E402
from distributed_ranks import run_ranks  # noqa: E402
from distributed_worker import Case, shares  # noqa: E402

RANKS = 1 << (min(torch.cuda.device_count(), 8).bit_length() - 1)  # 2, 4 or 8
on_gpus = partial(run_ranks, RANKS, backend="nccl", group_timeout=300)  # another rank may be compiling kernels
METHODS = ("all_gather", "ring", "ulysses", *(("two_level",) if RANKS >= 4 else ()))
BALANCES, DTYPES = ("zigzag", "contiguous"), (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("method", METHODS)
def test_ranks_compute_what_one_gpu_does(method, deterministic):
    cases = [
        Case(problem, method, balance, dtype, 2, deterministic=deterministic, device="cuda")
        for problem, balance, dtype in product(problems.ALL, BALANCES, DTYPES)
        if dtype == torch.bfloat16 or problem in ("causal", "sinks", "packed_window")
    ]
    cases = cases[::3] if deterministic else cases
    found = on_gpus(shares, cases, timeout=580)
    assert all(isinstance(of_rank, list) for of_rank in found), found
    wrong = []
    for i, case in enumerate(cases):
        try:
            distributed_judge.judge(case, RANKS, [of_rank[i] for of_rank in found])
        except AssertionError as error:
            wrong.append(f"{case}: {error}")
    assert not wrong, f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(wrong[:20])


def test_exchanges_instead_of_collectives():
    """The same bits in every run, whatever order NCCL adds up in."""
    assert on_gpus(cuda_distributed.repeats, timeout=300) == [None] * RANKS


@pytest.mark.parametrize("name", cuda_distributed.ALL)
def test_on_every_gpu(name):
    assert on_gpus(cuda_distributed.check, name, timeout=300) == [None] * RANKS


def test_ranks_that_disagree_on_gpus():
    found = on_gpus(cuda_distributed.disagree, timeout=120)
    for result in found:
        assert isinstance(result, ValueError), found
        assert f"softcap: got 0.0 on rank 0 and 2.0 on rank {RANKS - 1}" in str(result)
