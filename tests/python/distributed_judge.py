# SPDX-License-Identifier: Apache-2.0
"""Whether what ranks computed is what one process computes."""

from __future__ import annotations

from functools import lru_cache, partial

import distributed_problems as problems
import torch
import torch_textbook as textbook
from distributed_worker import Case
from tessera.distributed import layout_of
from torch import Tensor


def joined(case: Case, ranks: int, shares: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole tensors of the shares of ranks; of sinks, their sum."""
    problem = problems.ALL[case.problem]
    sizes = {"seqlen": problem.tokens} if problem.ends is None else {"cu_seqlens": problem.ends}
    layout = layout_of(ranks, balance=case.balance, **sizes)
    found = {}
    for name in shares[0]:
        if name == "dsinks":
            found[name] = sum(share[name] for share in shares)
            continue
        dim = -1 if name == "lse" else 0 if problem.ends is not None else 1
        shape = list(shares[0][name].shape)
        shape[dim] = problem.tokens
        whole = shares[0][name].new_full(shape, torch.nan)
        for rank, share in enumerate(shares):
            whole.index_copy_(dim % whole.dim(), layout.index(rank), share[name])
        found[name] = whole
    return found


@lru_cache(maxsize=64)
def _single(problem: str, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    found = problems.ALL[problem]
    given = {name: x.to(device) for name, x in problems.inputs(found, dtype).items()}
    return {name: x.cpu() for name, x in problems.single(found, given).items()}


@lru_cache(maxsize=4096)
def _plain(problem: str, dtype: torch.dtype, arithmetic: torch.dtype, run: int) -> dict[str, Tensor]:
    found = problems.ALL[problem]
    order = textbook.orders(found.tokens)(run)
    return problems.plain(found, problems.inputs(found, dtype), arithmetic, order)


def judge(case: Case, ranks: int, shares: list[dict[str, Tensor]]) -> None:
    """out and lse at most 2 units in the last place further from the textbook in float64 than the single process's, out
    in half types also at most 2 from that; gradients by the rule of all tests (docs/testing.md), or the single
    process's bits."""
    for share in shares:
        assert isinstance(share, dict), share
    got, single = joined(case, ranks, shares), _single(case.problem, case.dtype, case.device)
    oracle = _plain(case.problem, case.dtype, torch.float64, 0)
    for name in ("out", "lse"):
        mine, one, true = got[name].double(), single[name].double(), oracle[name]
        assert torch.equal(mine == -torch.inf, one == -torch.inf), f"{name}: -inf elsewhere"
        finite = one.isfinite()
        error, of_single = ((x - true)[finite].abs().max().item() for x in (mine, one))
        most = 2 * textbook.ulp(one[finite].abs().max().item(), got[name].dtype)
        assert error <= of_single + most, f"{name}: error {error:.3g}; want at most {of_single:.3g} + {most:.3g}"
        if name == "out" and case.dtype != torch.float32:
            apart = (mine - one)[finite].abs().max().item()
            assert apart <= most, f"{name}: {apart:.3g} from the single process; want at most {most:.3g}"
    for name in got:
        if not torch.equal(got[name], single[name]):
            plain = partial(_plain_tensor, case, name)
            textbook.judge(name, got[name], oracle[name], plain)


def _plain_tensor(case: Case, name: str, run: int) -> Tensor:
    return _plain(case.problem, case.dtype, case.dtype, run)[name]
