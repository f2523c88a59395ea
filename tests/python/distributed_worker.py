# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the tests compute; `distributed_ranks.run_ranks` imports it in each of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import distributed_problems as problems
import torch
import torch.distributed as dist
from tessera.distributed import context_parallel


class Case(NamedTuple):
    problem: str
    method: str
    balance: str
    dtype: torch.dtype
    inner: int = 1  # ranks of two_level's inner groups
    collectives: bool = False
    deterministic: bool = False
    device: str = "cpu"


def grid_of(rank: int, size: int, inner: int) -> tuple[Any, Any]:
    """(inner, outer) groups of this rank: every rank makes all of them."""
    insides = [dist.new_group(list(range(first, first + inner))) for first in range(0, size, inner)]
    outsides = [dist.new_group(list(range(first, size, inner))) for first in range(inner)]
    return insides[rank // inner], outsides[rank % inner]


def shares(rank: int, size: int, cases: list[Case]) -> list[Any]:
    """Of each case {name: this rank's rows}, or the text of what was raised."""
    grids: dict[int, Any] = {}
    found: list[Any] = []
    for case in cases:
        if case.method == "two_level" and case.inner not in grids:
            grids[case.inner] = grid_of(rank, size, case.inner)
        try:
            found.append(share(case, grids.get(case.inner)))
        except (ValueError, NotImplementedError) as error:  # of all ranks alike
            found.append(f"{type(error).__name__}: {error}")
    return found


def share(case: Case, grid: Any) -> dict[str, torch.Tensor]:
    problem = problems.ALL[case.problem]
    sizes = {"seqlen": problem.tokens} if problem.ends is None else {"cu_seqlens": problem.ends}
    cp = context_parallel(
        grid if case.method == "two_level" else None,
        method=case.method,
        balance=case.balance,
        collectives=case.collectives or None,
        **sizes,
    )
    given = {name: x.to(case.device) for name, x in problems.inputs(problem, case.dtype).items()}
    dim = 1 if problem.ends is None else 0
    leaves = {name: cp.shard(given[name], dim).requires_grad_() for name in "qkv"}
    options = problems.options_on(problem, case.device)
    if "sinks" in given:
        options["sinks"] = leaves["sinks"] = given["sinks"].clone().requires_grad_()
    q, k, v = (leaves[name] for name in "qkv")
    out, lse = cp.attention(q, k, v, return_lse=True, deterministic=case.deterministic, **options)
    upstream = (cp.shard(given["dout"], dim), cp.shard(given["dlse"], given["dlse"].dim() - 1))
    grads = torch.autograd.grad((out, lse), tuple(leaves.values()), upstream)
    found = {"out": out.detach(), "lse": lse.detach()}
    found |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: x.cpu() for name, x in found.items()}
