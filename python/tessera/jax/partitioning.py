# SPDX-License-Identifier: Apache-2.0
"""Shardings of a pass under `jax.jit`: each device computes its part of the batch and of the heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from tessera.jax.call import Pass, compute

Array = Any

# Dimensions by slot: b batch, s queries, t keys, h query heads, g key heads; x: never split.
_DIMENSIONS = {
    "q": "bshx",
    "k": "btgx",
    "v": "btgx",
    "o": "bshx",
    "o_residual": "bshx",
    "dout": "bshx",
    "lse": "bhs",
    "dlse": "bhs",
    "sink": "h",
    "dsink": "h",
    "seqused_q": "b",
    "seqused_k": "b",
    "dq": "bshx",
    "dk": "btgx",
    "dv": "btgx",
}
_BY_BATCH = ("q_offset", "k_offset")


def partitioned(run: Pass, arrays: Sequence[Array]) -> tuple[Array, ...]:
    """`compute`, which `jax.jit` may split by batch and heads where they are apart: dense calls without dropout, lists,
    pages and functions of positions. Everything else is computed whole on each device, as are calls in `shard_map`."""
    if jax.device_count() == 1 or not _splits(run) or _in_shard_map():
        return compute(run, arrays)
    return _split(run, tuple(array.ndim for array in arrays), arrays[0].shape[2], arrays[1].shape[2])(*arrays)


def _splits(run: Pass) -> bool:
    if not {"dropout", "score", "mask", "list", "bwd_list"}.isdisjoint(run.features.fields):
        return False
    return {*_DIMENSIONS, *_BY_BATCH, "alibi_slopes"}.issuperset(run.inputs)


def _in_shard_map() -> bool:
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def _dimensions(slot: str, rank: int) -> str:
    if slot == "alibi_slopes":
        return "bh" if rank == 2 else "h"
    return "bx"[:rank] if slot in _BY_BATCH else _DIMENSIONS[slot]


@lru_cache(maxsize=1024)
def _split(run: Pass, ranks: tuple[int, ...], heads_q: int, heads_kv: int) -> Callable[..., tuple[Array, ...]]:
    inputs = [_dimensions(slot, rank) for slot, rank in zip(run.inputs, ranks, strict=True)]
    results = [_dimensions(slot, 0) for slot in run.result_slots]

    def call(*arrays: Array) -> tuple[Array, ...]:
        return compute(run, arrays)

    def axes_of(spec: PartitionSpec, mesh: Any) -> tuple[Any, Any]:
        """Mesh axes that split the batch and the heads. Heads are split where each part has whole key heads."""
        batch, _, heads, *_ = (*spec, None, None, None)
        split = 1
        for name in (heads,) if isinstance(heads, str) else heads or ():
            split *= mesh.shape[name]
        return batch, heads if heads_kv % split == 0 else None

    def shardings(mesh: Any, spec: PartitionSpec, dimensions: list[str]) -> tuple[NamedSharding, ...]:
        batch, heads = axes_of(spec, mesh)
        axes = {"b": batch, "h": heads, "g": heads}
        return tuple(NamedSharding(mesh, PartitionSpec(*[axes.get(each) for each in dims])) for dims in dimensions)

    def partition(mesh: Any, arguments: Any, _results: Any) -> Any:
        spec = arguments[0].sharding.spec
        batch, _ = axes_of(spec, mesh)

        def lower(*arrays: Array) -> tuple[Array, ...]:
            made = compute(run, arrays)
            if batch is None:
                return made
            # What has no batch is a sum over it.
            return tuple(x if "b" in dims else jax.lax.psum(x, batch) for x, dims in zip(made, results, strict=True))

        return mesh, lower, shardings(mesh, spec, results), shardings(mesh, spec, inputs)

    def infer(mesh: Any, arguments: Any, _results: Any) -> Any:
        return shardings(mesh, arguments[0].sharding.spec, results)

    function = custom_partitioning(call)
    group = heads_q // heads_kv
    both = "(g r)" if heads_kv > 1 else "r"
    words = {"b": "b", "s": "s", "t": "t", "g": "g", "h": both if group > 1 else "g"}
    fixed: list[str] = []  # what is never split, in the order in which the rule names it

    def name_of(dimension: str) -> str:
        name = f"x{len(fixed)}" if dimension == "x" else words[dimension]  # each x has a name of its own
        if dimension in "stx" and name not in fixed:
            fixed.append(name)
        return name

    def rule_of(dimensions: str) -> str:
        return " ".join(map(name_of, dimensions))

    rule = ", ".join(map(rule_of, inputs)) + " -> " + ", ".join(map(rule_of, results))
    sizes = {"r": group} if "(" in words["h"] else {}  # g is a whole dimension of k, which says its size
    function.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule=rule,
        need_replication_factors=tuple(fixed),
        **sizes,
    )
    return function
