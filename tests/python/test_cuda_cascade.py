# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes and trees of speculative tokens on a GPU: the rule, without a wait, and in a graph."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import cascade_problems as problems  # noqa: E402
import tessera  # noqa: E402
from cuda_torch import close, nobody_waits, on_gpu  # noqa: E402


def there(step):
    return problems.Step(*map(on_gpu, step))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "tree"), [(1, False), (5, False), (5, True)])
@pytest.mark.parametrize("groups", problems.GROUPS.values(), ids=problems.GROUPS)
def test_results_are_those_of_the_textbook(groups, tokens, tree, dtype):
    step = problems.step(groups, dtype, tokens)
    prefixes = tessera.SharedPrefixes(groups, batch=6, page_size=problems.PAGE)
    moved = there(step)
    prefixes.check(moved.source.page_table, moved.source.seqused, tokens=tokens)
    moved.at_once(prefixes, tree)
    with nobody_waits():
        got = moved.at_once(prefixes, tree)
    problems.judge(tuple(x.cpu() for x in got), step, tree)


@pytest.mark.parametrize(("tokens", "tree"), [(1, False), (5, True)])
def test_a_graph_serves_other_lengths_and_pages(tokens, tree):
    groups = problems.GROUPS["a tree"]
    prefixes = tessera.SharedPrefixes(groups, batch=6, page_size=problems.PAGE)
    moved = there(problems.step(groups, torch.bfloat16, tokens))
    moved.at_once(prefixes, tree)  # kernels are loaded, and what the groups need is copied, outside of graphs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = moved.at_once(prefixes, tree)
    for seed in (2, 3):
        lengths = [length + 7 * seed for length in problems.LENGTHS[:2]] + problems.LENGTHS[2:]
        other = problems.step(groups, torch.bfloat16, tokens, seed, lengths)
        moved.q.copy_(other.q)
        for mine, its in zip(moved.source, other.source, strict=True):
            if mine is not None:
                mine.copy_(its)
        graph.replay()
        problems.judge(tuple(x.cpu() for x in got), other, tree)


def test_lengths_shorter_than_their_prefix_are_no_violation():
    """Nothing reads them on the host: a sequence of no keys of its own has its prefix's result."""
    step = there(problems.step(problems.GROUPS["all"], torch.bfloat16, 1))
    prefixes = tessera.SharedPrefixes(256, batch=6, page_size=problems.PAGE)
    source = step.source._replace(seqused=torch.full_like(step.source.seqused, 100))
    got = tessera.cascade_attention(step.q, source, prefixes)
    whole = step.source._replace(seqused=torch.full_like(step.source.seqused, 256))
    close("out", got, tessera.attention(step.q, whole).cpu())
    with pytest.raises(ValueError, match="seqused: got 100 keys of sequence 0"):
        prefixes.check(source.page_table, source.seqused)
