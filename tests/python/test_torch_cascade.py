# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes and trees of speculative tokens on torch tensors: the rule, words of torch, gradients refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import cascade_problems as problems  # noqa: E402
import tessera  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "tree"), [(1, False), (5, False), (5, True)])
@pytest.mark.parametrize("groups", problems.GROUPS.values(), ids=problems.GROUPS)
def test_results_are_those_of_the_textbook(groups, tokens, tree, dtype):
    step = problems.step(groups, dtype, tokens)
    prefixes = tessera.find_shared_prefixes(
        step.source.page_table, step.source.seqused, problems.PAGE, tokens=tokens, levels=len(groups)
    )
    assert prefixes.groups == tuple(sorted(groups, key=lambda group: (group[1], -group[2])))
    out, lse = step.at_once(prefixes, tree)
    assert out.dtype == dtype and lse.dtype == torch.float32
    problems.judge((out, lse), step, tree)


def test_words_and_memory_of_torch():
    step = problems.step(problems.GROUPS["a tree"], torch.float32, 5)
    prefixes = tessera.SharedPrefixes(problems.GROUPS["a tree"], batch=6, page_size=problems.PAGE)
    want = step.at_once(prefixes, tree=True)[0]
    for dtype in (torch.uint32, torch.int64, torch.uint64):
        out = torch.empty_like(want)
        bits = step.bits.to(dtype)
        assert tessera.cascade_attention(step.q, step.source, prefixes, tree=bits, out=out) is out
        assert torch.equal(out, want)


def test_a_gradient_is_refused():
    step = problems.step(problems.GROUPS["all"], torch.float32, 1)
    prefixes = tessera.SharedPrefixes(256, batch=6, page_size=problems.PAGE)
    with pytest.raises(ValueError, match="q: got a tensor that requires grad"):
        tessera.cascade_attention(step.q.requires_grad_(), step.source, prefixes)
    with torch.no_grad():
        assert tessera.cascade_attention(step.q, step.source, prefixes).shape == step.q.shape
