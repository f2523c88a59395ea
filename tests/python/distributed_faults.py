# SPDX-License-Identifier: Apache-2.0
"""What the ranks of test_distributed_faults do."""

from __future__ import annotations

import os
import time
from typing import Any

import tessera
import torch
import torch.distributed as dist
from tessera.distributed import context_parallel


def tensors(rows: int, dtype: torch.dtype = torch.float32, keys: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"q": (1, rows, 4, 16), "k": (1, rows, keys, 16), "v": (1, rows, keys, 16)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def call(rank: int, size: int, group: dict[str, Any], options: dict[str, Any] | None = None) -> Any:
    cp = context_parallel(**{"seqlen": 24, **group})
    return cp.attention(**tensors(cp.layout.rows(rank)), **{"causal": True, **(options or {})})


def disagree(rank: int, size: int, what: str) -> Any:
    """The last rank has another argument than the others."""
    other = rank == size - 1
    group: dict[str, Any] = {"seqlen": 24, "method": "ring"}
    options: dict[str, Any] = {"causal": True}
    if what == "seed":
        options |= {"dropout": 0.1, "seed": 1}
    if other and what in ("seqlen", "balance", "method"):
        group |= {"seqlen": {"seqlen": 30}, "balance": {"balance": "contiguous"}, "method": {"method": "all_gather"}}[
            what
        ]
    cp = context_parallel(**group)
    given = tensors(cp.layout.rows(rank))
    if other:
        if what == "dtype":
            given = tensors(cp.layout.rows(rank), torch.bfloat16)
            given["q"] = given["q"].float()
        if what == "heads":
            given = tensors(cp.layout.rows(rank), keys=4)
        if what == "rows":
            given["v"] = given["v"][:, 1:]
        if what == "requires_grad":
            given["q"].requires_grad_()
        options |= {
            "causal": {"causal": False},
            "window": {"window": (5, 0)},
            "sinks": {"sinks": torch.zeros(4)},
            "slopes": {"alibi_slopes": torch.zeros(3)},
            "seed": {"seed": 2},
        }.get(what, {})
    return cp.attention(**given, **options)


def second_call_differs(rank: int, size: int) -> Any:
    cp = context_parallel(seqlen=24, checks="always")
    given = tensors(cp.layout.rows(rank))
    cp.attention(**given)
    cp.attention(**given)
    return cp.attention(**given, softcap=2.0 * rank)


def decode_disagrees(rank: int, size: int) -> Any:
    cp = context_parallel(seqlen=0)
    given = tensors(8)
    return cp.decode(given["q"][:, : 1 + (rank == 2)], given["k"], given["v"])


def silent_rank(rank: int, size: int, how: str, method: str) -> Any:
    cp = context_parallel(seqlen=48, method=method)
    given = tensors(cp.layout.rows(rank))
    cp.attention(**given)  # the first call, which takes longer, and on which the ranks agree
    cp = context_parallel(seqlen=48, method=method, timeout=4)
    cp.attention(**given)
    if rank == 2:
        os._exit(3) if how == "dies" else time.sleep(100)
    return cp.attention(**given)


def dies_before_backward(rank: int, size: int) -> Any:
    cp = context_parallel(seqlen=24, method="ring", timeout=3)
    given = {name: x.requires_grad_() for name, x in tensors(cp.layout.rows(rank)).items()}
    out = cp.attention(**given)
    if rank == 1:
        os._exit(3)
    out.sum().backward()


def slow_rank(rank: int, size: int) -> bool:
    cp = context_parallel(seqlen=24, method="ring", timeout=20)
    given = tensors(cp.layout.rows(rank))
    if rank == 1:
        time.sleep(2)
    return bool(cp.attention(**given).isfinite().all())


def three_tokens(rank: int, size: int, method: str) -> bool:
    """Some ranks have no rows at all."""
    given = tensors(3)
    cp = context_parallel(seqlen=3, method=method)
    leaves = {name: cp.shard(x).requires_grad_() for name, x in given.items()}
    out = cp.attention(**leaves, causal=True)
    whole = cp.unshard(out)
    grads = torch.autograd.grad(out.square().sum(), tuple(leaves.values()))
    alone = {name: x.clone().requires_grad_() for name, x in given.items()}
    want = tessera.attention(**alone, causal=True)
    wanted = torch.autograd.grad(want.square().sum(), tuple(alone.values()))
    pairs = [(whole, want), *[(cp.unshard(g), w) for g, w in zip(grads, wanted, strict=True)]]
    return min(len(x) for x in pairs) == 2 and all(torch.allclose(got, w, atol=1e-5) for got, w in pairs)


WANTED = [
    "method: got 'tree'; want one of 'auto', 'all_gather', 'ring', 'ulysses', 'two_level'",
    "group: got one; want a DeviceMesh of two dimensions, or (inner, outer), for 'two_level'",
    "seqlen: got 5 and cu_seqlens [0, 5]; want one of them",
    "tensor: got 23 rows in dimension 1; want the 24 of Layout(24, ranks=2, balance='zigzag')",
    "mask: got function; want a name, of a built-in or registered",
    "dropout: got one with score or mask; want one of them when heads are spread",
    "alibi_slopes: got a tensor that requires grad; want one that does not",
    "offsets: got None with causal=True; want the positions of queries and of this rank's keys",
]


def bad_calls(rank: int, size: int) -> list[str]:
    cp = context_parallel(seqlen=24)
    given = tensors(cp.layout.rows(rank))
    calls = [
        lambda: context_parallel(seqlen=5, method="tree"),
        lambda: context_parallel(seqlen=5, method="two_level"),
        lambda: context_parallel(seqlen=5, cu_seqlens=[0, 5]),
        lambda: cp.shard(torch.zeros(1, 23)),
        lambda: cp.attention(**given, mask=lambda *_: True),
        lambda: cp.attention(**given, mask="causal_by_name", dropout=0.1),
        lambda: cp.attention(**given, alibi_slopes=torch.zeros(4, requires_grad=True)),
        lambda: cp.decode(**given, causal=True),
    ]
    found = []
    for each in calls:
        try:
            each()
        except (ValueError, TypeError, NotImplementedError) as error:
            found.append(str(error).removesuffix(" (on rank 0)"))
    dist.barrier()
    return found
