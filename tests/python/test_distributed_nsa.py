# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention of N processes against one process, and what ranks are refused for."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("no Gloo", allow_module_level=True)

import distributed_sparse as sparse  # noqa: E402
import torch_textbook as textbook  # noqa: E402
from distributed_ranks import run_ranks  # noqa: E402
from tessera.distributed import layout_of  # noqa: E402

CASES = [sparse.Case(*case) for case in product(sparse.ALL, ("zigzag", "contiguous"), (torch.float32, torch.bfloat16))]


def joined(case, ranks, shares):
    """The whole tensors of rows; of parameters the sum of the shares."""
    problem = sparse.ALL[case.problem]
    sizes = {"seqlen": problem.tokens} if problem.ends is None else {"cu_seqlens": problem.ends}
    layout = layout_of(ranks, balance=case.balance, multiple=problem.multiple, **sizes)
    order = torch.cat([layout.index(rank) for rank in range(ranks)])
    found = {}
    for name in shares[0]:
        if name.removeprefix("d") not in (*sparse.BY_ROW, "out"):
            found[name] = sum(share[name].float() for share in shares).to(shares[0][name].dtype)
            continue
        rows = torch.cat([share[name] for share in shares], problem.dim)
        found[name] = torch.empty_like(rows).index_copy_(problem.dim, order, rows)
    return found


@lru_cache(maxsize=64)
def single(name, dtype):
    return sparse.single(sparse.ALL[name], dtype)


@lru_cache(maxsize=512)
def plain(name, dtype, arithmetic, run):
    return sparse.plain(sparse.ALL[name], dtype, arithmetic, single(name, dtype)[1], run)


def judge(case, got):
    """out at most 2 units in the last place from the single process's; gradients by the rule of all tests."""
    one, dtype = single(case.problem, case.dtype)[0], case.dtype
    most = 2 * textbook.ulp(one["out"].abs().max().item(), dtype)
    apart = (got["out"].double() - one["out"].double()).abs().max().item()
    assert apart <= most, f"out: {apart:.3g} from the single process; want at most {most:.3g}"
    for name, x in got.items():
        oracle = plain(case.problem, dtype, torch.float64, 0)[name]
        textbook.judge(name, x, oracle, lambda run, name=name: plain(case.problem, dtype, dtype, run)[name])


@pytest.mark.parametrize(("ranks", "head_by_head"), [(2, False), (3, True), (4, False)])
def test_ranks_compute_what_one_process_does(ranks, head_by_head):
    found = run_ranks(ranks, sparse.shares, CASES, "cpu", head_by_head, timeout=300)
    assert all(isinstance(of_rank, list) for of_rank in found), found
    wrong = []
    for i, case in enumerate(CASES):
        try:
            judge(case, joined(case, ranks, [of_rank[i] for of_rank in found]))
        except AssertionError as error:
            wrong.append(f"{case}: {error}")
    assert not wrong, f"{len(wrong)} of {len(CASES)} cases:\n" + "\n".join(wrong)


def test_modes_of_autograd():
    assert run_ranks(3, sparse.modes, timeout=60) == [None] * 3


DISAGREEMENTS = {
    "top": "top: got 4 on rank 0 and 5 on rank 2; want the same on every rank",
    "preset": "preset: got strict on rank 0 and paper on rank 2; want the same on every rank",
    "causal": "causal: got True on rank 0 and False on rank 2; want the same on every rank",
    "gate_weight": "gate_weight: got float32 (4, 3, 16) on rank 0 and None on rank 2; want the same on every rank",
    "requires_grad": "requires_grad: got False on rank 0 and True on rank 2; want the same on every rank",
    "gates": "gates: got shape (1, 1, 4, 3); want (1, 16, 4, 3), of this rank's rows of Layout(48, ranks=3, "
    "balance='zigzag', multiple=16)",
    "unknown": "blocks: got a keyword that nsa has not; want one of length, stride, block, top, tile, heads, score, "
    "reduce, visible, initial, local, window, compressed_top, compressed_block",
}


def test_ranks_that_disagree():
    found = run_ranks(3, sparse.disagreements, timeout=60)
    assert all(isinstance(of_rank, dict) for of_rank in found), found
    for rank, of_rank in enumerate(found):
        for name, text in of_rank.items():
            assert text.removesuffix(" (on rank 2)") == DISAGREEMENTS[name], f"rank {rank}, {name}: {text}"
    assert found[0]["unknown"].endswith(" (on rank 2)")


REFUSALS = [
    "seqlen: got a piece of rank 1 that begins at token 24, in Layout(48, ranks=2, balance='contiguous', multiple=8); "
    "want multiples of the tile of 16 rows, as multiple=16 of context_parallel cuts them",
    "method: got 'ring' for nsa; want 'auto' or 'all_gather'",
    "tiles: got a keyword that nsa has not; want one of length, stride, block, top, tile, heads, score, reduce, "
    "visible, initial, local, window, compressed_top, compressed_block",
    "compressed_top: got 3 over ranks; want 0, which is all compressed keys",
    "preset: got 'dense'; want one of strict, paper, reference",
    "gates: got both gates and gate_weight; want one of them, or neither for 1/3 each",
    "v_projection: got None; want projections of both keys and values, or of neither",
]


def test_bad_calls():
    assert run_ranks(2, sparse.refusals, timeout=60) == [REFUSALS] * 2
