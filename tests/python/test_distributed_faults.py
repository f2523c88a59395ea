# SPDX-License-Identifier: Apache-2.0
"""What every living rank hears where ranks disagree, die, hang or have nothing."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("no Gloo", allow_module_level=True)

import distributed_faults as faults  # noqa: E402
from distributed_ranks import Died, run_ranks  # noqa: E402
from tessera.distributed import RankError  # noqa: E402


def refused(ranks, function, *arguments, error=ValueError, text, alive=None):
    """Every living rank raises `error` with `text`."""
    silent = () if alive is None else set(range(ranks)) - set(alive)
    found = run_ranks(ranks, function, *arguments, timeout=60, silent=silent)
    for rank, result in enumerate(found):
        if alive is None or rank in alive:
            assert isinstance(result, error), f"rank {rank}: {result!r}"
            assert text in str(result), f"rank {rank}: {result}"
    return found


DISAGREEMENTS = {
    "causal": "causal: got True on rank 0 and False on rank 2",
    "window": "window: got None on rank 0 and (5, 0) on rank 2",
    "dtype": "k: got float32 with batch, heads and dim (1, 2, 16) on rank 0 and bfloat16 with",
    "heads": "k: got float32 with batch, heads and dim (1, 2, 16) on rank 0 and float32 with batch, heads",
    "seqlen": "seqlen: got (24,) on rank 0 and (30,) on rank 2",
    "balance": "balance: got zigzag on rank 0 and contiguous on rank 2",
    "method": "method: got ring on rank 0 and all_gather on rank 2",
    "sinks": "sinks: got None on rank 0 and (4,) on rank 2",
    "seed": "seed: got 1 on rank 0 and 2 on rank 2",
    "requires_grad": "requires_grad: got False on rank 0 and True on rank 2",
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree(what):
    refused(3, faults.disagree, what, text=DISAGREEMENTS[what])


@pytest.mark.parametrize("what", ["rows", "slopes"])
def test_arguments_that_one_rank_is_refused_for(what):
    texts = {
        "rows": "v: got shape (1, 7, 2, 16); want (batch, rows, heads, dim) with 8 rows, this rank's of Layout(24",
        "slopes": "alibi_slopes: got torch.float32 (3,) on cpu; want torch.float32 (4,) on cpu",
    }
    found = refused(3, faults.disagree, what, text=texts[what])
    assert str(found[0]).endswith("(on rank 2)")
    assert not str(found[2]).endswith("(on rank 2)")


def test_later_calls_are_compared_too_where_wanted():
    refused(2, faults.second_call_differs, error=ValueError, text="softcap: got 0.0 on rank 0 and 2.0 on rank 1")


def test_heads_that_do_not_split():
    refused(3, faults.call, {"method": "ulysses"}, text="q: got 4 heads; want a multiple of the 3 ranks")


def test_decode_steps_that_disagree():
    refused(
        3, faults.decode_disagrees, text="q: got float32 (1, 1, 4, 16) on rank 0 and float32 (1, 2, 4, 16) on rank 2"
    )


@pytest.mark.parametrize("method", ["all_gather", "ring", "ulysses"])
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_rank_that_does_not_answer(method, how):
    """The others say which within the timeout, though some of them wait for one that waits for it."""
    begin = time.monotonic()
    ranks = 8 if method == "ring" else 4  # in a ring of 8 some have not met rank 2 yet
    alive = [rank for rank in range(ranks) if rank != 2]
    text = "rank 2: got no answer within 4 s"
    found = refused(ranks, faults.silent_rank, how, method, error=RankError, text=text, alive=alive)
    assert isinstance(found[2], Died)
    assert all(found[rank].ranks == (2,) for rank in alive), found
    assert time.monotonic() - begin < 40


def test_a_rank_that_dies_between_forward_and_backward():
    found = run_ranks(3, faults.dies_before_backward, timeout=60)
    assert all(isinstance(found[rank], RankError) and found[rank].ranks == (1,) for rank in (0, 2)), found


def test_a_slow_rank_is_waited_for():
    assert run_ranks(2, faults.slow_rank, timeout=60) == [True, True]


@pytest.mark.parametrize("method", ["all_gather", "ring", "ulysses"])
def test_more_ranks_than_tokens(method):
    assert run_ranks(4, faults.three_tokens, method, timeout=60) == [True] * 4


def test_bad_calls():
    found = run_ranks(2, faults.bad_calls, timeout=60)
    assert found == [faults.WANTED] * 2
