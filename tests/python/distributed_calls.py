# SPDX-License-Identifier: Apache-2.0
"""Checks of test_distributed_calls, each run by four ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import tessera
import torch
import torch.distributed as dist
from tessera import _execute
from tessera.distributed import Mask, context_parallel
from tessera.torch import SkipAttention
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint


def _normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _qkv(tokens: int = 50, heads: int = 4, keys: int = 2, dim: int = 16) -> dict[str, torch.Tensor]:
    shapes = {"q": (2, tokens, heads, dim), "k": (2, tokens, keys, dim), "v": (2, tokens, keys, dim)}
    return {name: _normal(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


def shards_come_back(rank: int) -> None:
    for sizes, dim in (({"seqlen": 51}, 1), ({"cu_seqlens": torch.tensor([0, 20, 51])}, 0), ({"seqlen": 2}, 1)):
        for balance in ("zigzag", "contiguous"):
            cp = context_parallel(balance=balance, **sizes)
            whole = _normal(*((3, cp.layout.tokens) if dim == 1 else (cp.layout.tokens,)), 5)
            mine = cp.shard(whole, dim)
            assert mine.shape[dim] == len(cp.positions())
            assert torch.equal(cp.unshard(mine, dim), whole)


def positions_turn_shards_as_the_whole_is_turned(rank: int) -> None:
    cp = context_parallel(seqlen=37)
    angles = _normal(37, 8)
    whole = _normal(1, 37, 8) * angles.cos()
    assert torch.equal(cp.shard(_normal(1, 37, 8)) * angles[cp.positions()].cos(), cp.shard(whole))


def a_loss_of_the_whole_has_the_gradients_of_one_process(rank: int) -> None:
    """Through unshard, where every rank computes the same loss, and by shares of the loss."""
    given = _qkv()
    alone = {name: x.clone().requires_grad_() for name, x in given.items()}
    tessera.attention(**alone, causal=True).square().mean().backward()
    cp = context_parallel(seqlen=50)
    for whole in (True, False):
        leaves = {name: cp.shard(x).requires_grad_() for name, x in given.items()}
        out = cp.attention(**leaves, causal=True)
        loss = cp.unshard(out).square().mean() if whole else out.square().sum() / (2 * 50 * 4 * 16)
        loss.backward()
        for name, leaf in leaves.items():
            torch.testing.assert_close(leaf.grad, cp.shard(alone[name].grad), rtol=1e-4, atol=1e-7)


def gradients_through_the_lse_alone(rank: int) -> None:
    given = _qkv()
    alone = {name: x.clone().requires_grad_() for name, x in given.items()}
    tessera.attention(**alone, causal=True, return_lse=True)[1].sum().backward()
    for method in ("all_gather", "ring", "ulysses"):
        cp = context_parallel(seqlen=50, method=method)
        leaves = {name: cp.shard(x).requires_grad_() for name, x in given.items()}
        cp.attention(**leaves, causal=True, return_lse=True)[1].sum().backward()
        for name, leaf in leaves.items():
            torch.testing.assert_close(leaf.grad, cp.shard(alone[name].grad), rtol=1e-4, atol=1e-6)


def tensors_that_are_views(rank: int) -> None:
    """(batch, heads, rows, dim) turned, and q, k and v of one projection."""
    cp = context_parallel(seqlen=50)
    given = {name: cp.shard(x) for name, x in _qkv().items()}
    turned = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in given.items()}
    packed = torch.cat(list(given.values()), 2).split([4, 2, 2], 2)
    for method in ("all_gather", "ring", "ulysses"):
        other = context_parallel(seqlen=50, method=method)
        results = []
        for q, k, v in (given.values(), turned.values(), packed):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = other.attention(*leaves, causal=True)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for found in results[1:]:
            for one, want in zip(found, results[0], strict=True):
                torch.testing.assert_close(one, want, rtol=1e-5, atol=1e-6)


def a_mesh_of_two_dimensions_is_two_level(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    cp = context_parallel(mesh, seqlen=50)
    assert (cp.rank, cp.ranks) == (rank, 4)
    given = _qkv()
    out = cp.attention(**{name: cp.shard(x) for name, x in given.items()}, causal=True)
    assert cp.method_of(given["q"], given["k"], given["v"], Mask()) == "two_level"
    torch.testing.assert_close(cp.unshard(out), tessera.attention(**given, causal=True))
    line = context_parallel(mesh["inner"], seqlen=50, method="ring")
    assert (line.rank, line.ranks) == (rank % 2, 2)
    mine = line.attention(**{name: line.shard(x) for name, x in given.items()}, causal=True)
    torch.testing.assert_close(line.unshard(mine), tessera.attention(**given, causal=True))


def methods_are_chosen_alike_and_can_be_asked_for(rank: int) -> None:
    cp = context_parallel(seqlen=50)
    given = {name: cp.shard(x) for name, x in _qkv().items()}
    told = cp.explain(**given, causal=True)
    assert set(told) == {"all_gather", "ring", "ulysses"}
    assert cp.method_of(**given, mask=Mask(None, 0)) == min(told, key=lambda method: told[method].seconds)


def sequences_may_change_from_call_to_call(rank: int) -> None:
    cp = context_parallel(seqlen=50, method="ring")
    for tokens in (20, 50, 20):
        given, other = _qkv(tokens), cp.over(seqlen=tokens)
        out = other.attention(**{name: other.shard(x) for name, x in given.items()}, causal=True)
        torch.testing.assert_close(other.unshard(out), tessera.attention(**given, causal=True))


def a_seed_that_is_not_given_is_one_for_all(rank: int) -> None:
    torch.manual_seed(rank)
    given = _qkv()
    results = []
    for method in ("ring", "ulysses"):
        torch.manual_seed(7 + rank)
        cp = context_parallel(seqlen=50, method=method)
        results.append(cp.unshard(cp.attention(**{n: cp.shard(x) for n, x in given.items()}, dropout=0.5)))
    torch.testing.assert_close(*results)


def checkpoints_and_autocast(rank: int) -> None:
    cp = context_parallel(seqlen=50, method="ring")
    given = _qkv()
    grads = []
    for wrapped in (False, True):
        leaves = {name: cp.shard(x).requires_grad_() for name, x in given.items()}

        def layer(q, k, v):
            return cp.attention(q * 2, k, v, causal=True)

        q, k, v = leaves.values()
        out = checkpoint(layer, q, k, v, use_reentrant=False) if wrapped else layer(q, k, v)
        out.square().sum().backward()
        grads.append([x.grad for x in leaves.values()])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert cp.attention(**{name: cp.shard(x) for name, x in given.items()}).dtype == torch.bfloat16


def compiled_code_breaks_once_and_computes_the_same(rank: int) -> None:
    cp = context_parallel(seqlen=50, method="ring")
    leaves = [cp.shard(x).requires_grad_() for x in _qkv().values()]

    def layer(q, k, v):
        return cp.attention(q * 2, k, v, causal=True) * 3

    out, compiled = layer(*leaves), torch.compile(layer, backend="aot_eager")(*leaves)
    assert torch.equal(out, compiled)
    grads = [torch.autograd.grad(x.square().sum(), leaves) for x in (out, compiled)]
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    assert torch._dynamo.utils.counters["graph_break"].total() == 1


def flash_attn_arguments(rank: int) -> None:
    cp = context_parallel(seqlen=50)
    given = _qkv()
    out = cp.flash_attn_func(*[cp.shard(x) for x in given.values()], 0.0, 0.2, True, (9, -1))
    torch.testing.assert_close(cp.unshard(out), tessera.flash_attn_func(*given.values(), 0.0, 0.2, True, (9, -1)))


def a_double_backward_is_refused(rank: int) -> None:
    cp = context_parallel(seqlen=50, method="all_gather")
    leaves = {name: cp.shard(x).requires_grad_() for name, x in _qkv().items()}
    out = cp.attention(**leaves)
    (dq,) = torch.autograd.grad(out.square().sum(), leaves["q"], create_graph=True)
    for loss in (dq.sum(), out.sum() + dq.sum()):  # a term that has derivatives hides none that has not
        try:
            loss.backward(retain_graph=True)
        except NotImplementedError as error:
            assert "attention_backward: got a derivative of a gradient (double backward)" in str(error)
        else:
            raise AssertionError("no error")


def deterministic_algorithms_reach_each_backward(rank: int) -> None:
    own, told = _execute.plan_for, []

    def planned(*arguments: Any) -> Any:
        answer = own(*arguments)
        told.append("deterministic" in answer.plan.problem)
        return answer

    def backwards(call: Callable[..., torch.Tensor], **more: Any) -> set[bool]:
        leaves = [cp.shard(x).requires_grad_() for x in _qkv(64).values()]
        loss = call(*leaves, **more).sum()
        told.clear()
        with patch.object(_execute, "plan_for", planned):
            loss.backward()
        return set(told)

    for method in ("all_gather", "ring", "ulysses"):
        cp = context_parallel(seqlen=64, method=method, multiple=8)
        calls = [(cp.attention, {"causal": True})]
        if method == "all_gather":
            calls.append((cp.nsa, {"length": 8, "stride": 8, "block": 8, "top": 3, "tile": 8}))
        for call, options in calls:
            assert backwards(call, **options) == {False}
            assert backwards(call, **options, deterministic=True) == {True}
            torch.use_deterministic_algorithms(True)
            try:
                assert backwards(call, **options) == {True}
            finally:
                torch.use_deterministic_algorithms(False)


def decoding_over_a_cache_in_parts(rank: int) -> None:
    """A rank may have no keys of a sequence; sinks enter once; the same bits on every rank."""
    lengths = torch.tensor([[30, 5], [0, 5], [11, 0], [9, 1]], dtype=torch.int32)  # (rank, sequence)
    total = lengths.sum(0, dtype=torch.int32)
    k, v, q = _normal(2, 50, 2, 16, seed=1), _normal(2, 50, 2, 24, seed=2), _normal(2, 3, 8, 16, seed=3)
    sinks, slopes = _normal(8, seed=4), 2.0 ** -torch.arange(1, 9)
    starts = torch.cat((torch.zeros(1, 2, dtype=torch.int32), lengths.cumsum(0)))[rank].long()
    cache_k, cache_v = torch.full((2, 32, 2, 16), torch.nan), torch.full((2, 32, 2, 24), torch.nan)
    for s in range(2):
        n, first = int(lengths[rank, s]), int(starts[s])
        cache_k[s, :n], cache_v[s, :n] = k[s, first : first + n], v[s, first : first + n]
    cp = context_parallel(seqlen=0)
    where = total.long() - 3
    for options in ({}, {"causal": True, "alibi_slopes": slopes}, {"window": (12, 0)}, {"softcap": 5.0}):
        place = tessera.Offsets(q=where, k=starts)
        out, lse = cp.decode(
            q, cache_k, cache_v, seqused_k=lengths[rank], sinks=sinks, return_lse=True, offsets=place, **options
        )
        want, want_lse = tessera.attention(
            q, k, v, seqused_k=total, sinks=sinks, return_lse=True, offsets=tessera.Offsets(q=where), **options
        )
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-6)
        everywhere = [torch.empty_like(out) for _ in range(4)]
        dist.all_gather(everywhere, out)
        assert all(torch.equal(out, other) for other in everywhere)


def decoding_in_pages(rank: int) -> None:
    pages = _normal(8, 4, 2, 16, seed=rank, dtype=torch.bfloat16)
    table, used = torch.tensor([[3, 0, 7]], dtype=torch.int32), torch.tensor([4 + 2 * rank], dtype=torch.int32)
    cp = context_parallel(seqlen=0)
    q = _normal(1, 1, 4, 16, dtype=torch.bfloat16)
    out = cp.decode(q, tessera.KeySource(pages, pages, page_table=table, seqused=used))
    whole = []
    for other in range(4):
        rows = _normal(8, 4, 2, 16, seed=other, dtype=torch.bfloat16)[table[0].long()].flatten(0, 1)
        whole.append(rows[: 4 + 2 * other])
    keys = torch.cat(whole)[None]
    torch.testing.assert_close(out, tessera.attention(q, keys, keys), rtol=2**-7, atol=1e-3)


def skip_states_are_those_of_the_single_call(rank: int) -> None:
    """Out by bits, and each rank's states those of its heads; ranges count tokens of the whole."""
    options = {"block": (16, 16), "steps": 4, "ramp": (0.02, 0.1), "warm_up": 1}
    for keys, balance in ((4, "contiguous"), (2, "zigzag"), (8, "contiguous")):
        alone, mine = SkipAttention(**options), SkipAttention(**options)
        cp = context_parallel(seqlen=150, balance=balance)
        for step in range(4):
            x = _qkv(150, heads=8, keys=keys)
            x = {name: tensor + 0.1 * _normal(*tensor.shape, seed=9 + step) for name, tensor in x.items()}
            given = {"step": step, "stream": "cond", "must_do": [(16, 48)] if step == 2 else None}
            want = alone(**x, **given)
            got = cp.skip_attention(mine, **{name: cp.shard(tensor) for name, tensor in x.items()}, **given)
            assert torch.equal(cp.unshard(got), want)
        mean = torch.tensor(mine.state("cond").active)
        dist.all_reduce(mean)
        assert 0.1 < alone.state("cond").active < 0.95
        assert abs(float(mean) / 4 - alone.state("cond").active) < 1e-6


def skip_states_refuse(rank: int) -> None:
    given = {name: tensor[:, :13] for name, tensor in _qkv(52).items()}
    module = SkipAttention(block=(16, 16), steps=2, warm_up=0)
    for cp, error, words in (
        (context_parallel(seqlen=52, method="ring"), NotImplementedError, "method: got 'ring'"),
        (context_parallel(cu_seqlens=torch.tensor([0, 52])), NotImplementedError, "cu_seqlens: got packed"),
    ):
        with pytest.raises(error, match=f"^{words}"):
            cp.skip_attention(module, **given, step=0)
    cp = context_parallel(seqlen=52)
    with pytest.raises(TypeError, match=r"^module: got Linear"):
        cp.skip_attention(torch.nn.Linear(1, 1), **given, step=0)
    with pytest.raises(ValueError, match=r"^step: got 0 on rank 0 and 1 on rank [123]"):
        cp.skip_attention(module, **given, step=int(rank > 0))
    with pytest.raises(ValueError, match=r"^q: got 6 heads; want a multiple of the 4 ranks"):
        cp.skip_attention(module, *(_normal(2, 13, 6, 16) for _ in "qkv"), step=0)


ALL = {
    f.__name__: f
    for f in (
        shards_come_back,
        positions_turn_shards_as_the_whole_is_turned,
        a_loss_of_the_whole_has_the_gradients_of_one_process,
        gradients_through_the_lse_alone,
        tensors_that_are_views,
        a_mesh_of_two_dimensions_is_two_level,
        methods_are_chosen_alike_and_can_be_asked_for,
        sequences_may_change_from_call_to_call,
        a_seed_that_is_not_given_is_one_for_all,
        checkpoints_and_autocast,
        compiled_code_breaks_once_and_computes_the_same,
        flash_attn_arguments,
        a_double_backward_is_refused,
        deterministic_algorithms_reach_each_backward,
        decoding_over_a_cache_in_parts,
        decoding_in_pages,
        skip_states_are_those_of_the_single_call,
        skip_states_refuse,
    )
}


def check(rank: int, size: int, name: str) -> None:
    ALL[name](rank)
