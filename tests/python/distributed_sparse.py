# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention under context parallelism: problems, what ranks compute of them, and the textbook."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import tessera
import torch
import torch_textbook as textbook
from distributed_problems import normal
from nsa_textbook import listed
from tessera.distributed import context_parallel
from tessera.native_sparse import options_of
from tessera.torch import head_groups
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NAMES = ("q", "k", "v", "gate_weight", "gates", "k_projection", "v_projection")
BY_ROW = ("q", "k", "v", "gates")


class Problem(NamedTuple):
    """shape: batch, heads of q, of k, dim, dim of v. options: of `tessera.nsa`. ends: cu_seqlens."""

    shape: tuple[int, int, int, int, int]
    tokens: int
    multiple: int
    options: dict[str, Any]
    gate: str = "mean"
    projected: bool = False
    ends: tuple[int, ...] | None = None
    collectives: bool = False

    @property
    def dim(self) -> int:
        return 1 if self.ends is None else 0

    @property
    def spans(self) -> list[tuple[int, int]]:
        return list(pairwise((0, self.tokens) if self.ends is None else self.ends))


class Case(NamedTuple):
    problem: str
    balance: str
    dtype: torch.dtype


SMALL = {"length": 16, "stride": 16, "block": 16, "top": 4, "window": 24}
OVERLAPPING = {"length": 8, "stride": 4, "block": 16, "top": 5, "window": 20}
ENDS = (0, 13, 13, 60, 64, 171)
ALL = {
    # Tiles of 128 / 4 rows: 7 of them, so that pieces differ and some of 8 are empty.
    "strict": Problem((2, 8, 2, 16, 24), 200, 32, SMALL, "weight"),
    "collectives": Problem((1, 8, 2, 16, 24), 200, 32, SMALL, "weight", True, collectives=True),
    "paper": Problem((1, 4, 2, 16, 16), 101, 1, OVERLAPPING | {"preset": "paper"}, "weight", True),
    # Pieces end inside of compressed blocks, which the last rows see nevertheless.
    "reference": Problem((2, 4, 2, 16, 16), 150, 8, SMALL | {"preset": "reference", "tile": 8}, "given"),
    "full": Problem((1, 4, 4, 16, 16), 90, 8, SMALL | {"tile": 8, "causal": False, "scale": 0.3}),
    "packed": Problem(
        (1, 4, 2, 16, 24), 171, 8, OVERLAPPING | {"preset": "paper", "tile": 8, "reduce": "max"}, "weight", True, ENDS
    ),
    "packed_given": Problem((1, 4, 1, 16, 16), 171, 16, SMALL | {"tile": 16}, "given", False, ENDS),
    # 26, 27 and 28 rows on three ranks: one has the mean.
    "collectives_packed": Problem(
        (1, 4, 2, 16, 16), 81, 1, OVERLAPPING | {"preset": "paper"}, ends=(0, 40, 81), collectives=True
    ),
    # Below a compressed block; three rows, so that some ranks have none.
    "short": Problem((1, 4, 2, 16, 16), 3, 1, SMALL | {"tile": 1}, "weight", True),
}


def inputs(problem: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    """q, k, v, dout and the parameters that the problem has."""
    b, hq, hkv, d, dv = problem.shape
    rows = (b, problem.tokens) if problem.ends is None else (problem.tokens,)
    made = {
        "q": normal(*rows, hq, d, dtype=dtype, seed=1),
        "k": normal(*rows, hkv, d, dtype=dtype, seed=2),
        "v": normal(*rows, hkv, dv, dtype=dtype, seed=3),
        "dout": normal(*rows, hq, dv, dtype=dtype, seed=4),
    }
    if problem.gate == "weight":
        made["gate_weight"] = normal(hq, 3, d, dtype=dtype, seed=5)
    if problem.gate == "given":
        made["gates"] = normal(*rows, hq, 3, dtype=torch.float32, seed=6).sigmoid()
    if problem.projected:
        made["k_projection"] = normal(hkv, d, d, dtype=dtype, seed=7) / 4
        made["v_projection"] = normal(hkv, dv, dv, dtype=dtype, seed=8) / 4
    return made


def leaves_of(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: given[name].clone().requires_grad_() for name in NAMES if name in given}


def with_gradients(out: Tensor, leaves: dict[str, Tensor], dout: Tensor) -> dict[str, Tensor]:
    grads = torch.autograd.grad(out, tuple(leaves.values()), dout)
    return {"out": out.detach()} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def share(case: Case, device: str = "cpu") -> dict[str, Tensor]:
    """This rank's rows of out and of gradients by row; its shares of the parameters' gradients."""
    problem = ALL[case.problem]
    sizes = {"seqlen": problem.tokens} if problem.ends is None else {"cu_seqlens": problem.ends}
    cp = context_parallel(
        balance=case.balance, multiple=problem.multiple, collectives=problem.collectives or None, **sizes
    )
    given = {name: x.to(device) for name, x in inputs(problem, case.dtype).items()}
    given = {name: cp.shard(x, problem.dim) if name in (*BY_ROW, "dout") else x for name, x in given.items()}
    leaves = leaves_of(given)
    out = cp.nsa(**leaves, **problem.options)
    with torch.no_grad():
        assert torch.equal(cp.nsa(**leaves, **problem.options), out)
    return {name: x.cpu() for name, x in with_gradients(out, leaves, given["dout"]).items()}


def shares(
    rank: int, size: int, cases: list[Case], device: str = "cpu", head_by_head: bool = False
) -> list[dict[str, Tensor]]:
    """head_by_head: a backward takes one key head at a time, as for long sequences."""
    most = 1 if head_by_head else head_groups.MOST_SUMS
    with patch.object(head_groups, "MOST_SUMS", most):
        return [share(case, device) for case in cases]


def single(problem: Problem, dtype: torch.dtype) -> tuple[dict[str, Tensor], tessera.TileList]:
    """What one process computes, and its lists."""
    given = inputs(problem, dtype)
    leaves = leaves_of(given)
    cu_seqlens = None if problem.ends is None else torch.tensor(problem.ends, dtype=torch.int32)
    out, tiles = tessera.nsa(**leaves, cu_seqlens=cu_seqlens, return_tiles=True, **problem.options)
    return with_gradients(out, leaves, given["dout"]), tiles


def _pooled(x: Tensor, options: Any, projection: Tensor | None) -> Tensor:
    """(blocks, hkv, d)"""
    starts = range(0, len(x) - options.length + 1, options.stride)
    means = [x[s : s + options.length].mean(0) for s in starts]
    made = torch.stack(means) if means else x[:0]
    return made if projection is None else torch.einsum("nhd,hde->nhe", made, projection)


def plain(problem: Problem, dtype: torch.dtype, arithmetic: torch.dtype, tiles: Any, run: int) -> dict[str, Tensor]:
    """The textbook's in a dtype, with the single process's lists; another order of sums for each run."""
    words = dict(problem.options)
    causal, scale = words.pop("causal", True), words.pop("scale", None)
    words.pop("tile", None)
    o = options_of(words.pop("preset", "strict"), words)
    given = {name: x.to(arithmetic) for name, x in inputs(problem, dtype).items()}
    leaves = leaves_of(given)
    weight, projections = leaves.get("gate_weight"), (leaves.get("k_projection"), leaves.get("v_projection"))
    seen_from = o.length if o.visible == "complete" else 1
    outs = []
    for b in range(problem.shape[0]):
        q, k, v, gates = (None if x is None else x[b] if problem.ends is None else x for x in map(leaves.get, BY_ROW))
        rows = []
        for s, (begin, end) in enumerate(problem.spans):
            if begin == end:
                continue
            q1, k1, v1 = (x[begin:end] for x in (q, k, v))
            i, j, n = torch.arange(end - begin)[:, None], torch.arange(end - begin)[None], end - begin
            compressed = [_pooled(x, o, w) for x, w in zip((k1, v1), projections, strict=True)]
            first = torch.arange(len(compressed[0]))[None] * o.stride
            before = j <= i if causal else torch.ones(n, n, dtype=torch.bool)
            complete = first + seen_from <= i + 1 if causal else torch.ones(n, first.shape[1], dtype=torch.bool)
            lists = torch.from_numpy(listed(tiles, b if problem.ends is None else s, n, n, q.shape[1]))
            near = (i - j < o.window) & (j - i < o.window) & before
            branches = []
            for keys, values, seen in ((*compressed, complete), (k1, v1, lists & before), (k1, v1, near)):
                order = textbook.orders(len(keys))(run)
                arrays = (x[None] for x in (q1, keys, values))
                branches.append(textbook.attend(*arrays, visible=seen, scale=scale, order=order)[0][0])
            g = torch.full((n, q.shape[1], 3), 1 / 3, dtype=arithmetic)
            if weight is not None:
                g = torch.einsum("ihd,hxd->ihx", q1, weight).sigmoid()
            elif gates is not None:
                g = gates[begin:end]
            rows.append(sum(g[..., x : x + 1] * branch for x, branch in enumerate(branches)))
        outs.append(torch.cat(rows))
    out = torch.stack(outs) if problem.ends is None else outs[0]
    return with_gradients(out, leaves, given["dout"])


def modes(rank: int, size: int) -> None:
    """torch.autocast, activation checkpointing, and compiled code, which breaks its graph."""
    problem = ALL["paper"]
    given = inputs(problem, torch.float32)
    cp = context_parallel(seqlen=problem.tokens)
    leaves = leaves_of({name: cp.shard(x) if name in BY_ROW else x for name, x in given.items()})

    def layer(*tensors: Tensor) -> Tensor:
        return cp.nsa(**dict(zip(leaves, tensors, strict=True)), **problem.options) * 2

    tensors = tuple(leaves.values())
    compiled = torch.compile(layer, backend="aot_eager")
    made = [layer(*tensors), checkpoint(layer, *tensors, use_reentrant=False), compiled(*tensors)]
    grads = [torch.autograd.grad(out.square().sum(), tensors) for out in made]
    for out, found in zip(made, grads, strict=True):
        assert torch.equal(out, made[0])
        assert all(torch.equal(one, other) for one, other in zip(found, grads[0], strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(*tensors)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), made[0], rtol=0.1, atol=0.1)
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(out.sum(), tensors))


# -- what is refused ---------------------------------------------------------------------------------------------------


def _raised(function: Any) -> str:
    try:
        function()
    except (ValueError, TypeError, NotImplementedError) as error:
        return str(error)
    return "nothing"


def disagreements(rank: int, size: int) -> dict[str, str]:
    """The last rank has another argument than the others: what each rank hears. The group goes on."""
    last = rank == size - 1
    problem = Problem((1, 4, 2, 16, 16), 48, 16, {})
    cp = context_parallel(seqlen=48, multiple=16)
    given = {name: cp.shard(x) for name, x in inputs(problem, torch.float32).items() if name != "dout"}
    weight, options = torch.zeros(4, 3, 16), SMALL | {"tile": 16}
    other = {
        "top": {"top": 5},
        "preset": {"preset": "paper", "stride": 16},
        "causal": {"causal": False},
        "gate_weight": {"gate_weight": None},
        "requires_grad": {"gate_weight": weight.clone().requires_grad_()},
        "gates": {"gate_weight": None, "gates": torch.zeros(1, 1, 4, 3)},
        "unknown": {"blocks": 3},
    }
    return {
        name: _raised(
            lambda added=added: cp.nsa(**given, **{"gate_weight": weight, **options, **(added if last else {})})
        )
        for name, added in other.items()
    }


def refusals(rank: int, size: int) -> list[str]:
    problem = Problem((1, 4, 2, 16, 16), 48, 16, {})
    options = SMALL | {"tile": 16}
    found = []
    for group, added in (
        ({"multiple": 8}, {}),
        ({"multiple": 16, "method": "ring"}, {}),
        ({"multiple": 16}, {"tiles": None}),
        ({"multiple": 16}, {"compressed_top": 3}),
        ({"multiple": 16}, {"preset": "dense"}),
        ({"multiple": 16}, {"gates": torch.zeros(1), "gate_weight": torch.zeros(4, 3, 16)}),
        ({"multiple": 16}, {"k_projection": torch.zeros(2, 16, 16)}),
    ):
        cp = context_parallel(seqlen=48, balance="contiguous", **group)
        given = {name: cp.shard(x) for name, x in inputs(problem, torch.float32).items() if name != "dout"}
        found.append(_raised(lambda cp=cp, given=given, added=added: cp.nsa(**given, **options, **added)))
    return found
