# SPDX-License-Identifier: Apache-2.0
"""`jax.vmap` of a pass: the mapped axis becomes a part of the batch where that is the same, else calls follow each
other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from tessera.jax.call import BACKWARD, Pass
from tessera.jax.partitioning import partitioned

Array = Any

# Tensors besides q, k, v and what is like them whose first dimension is the batch.
_BY_BATCH = frozenset(("seqused_q", "seqused_k", "q_offset", "k_offset"))
_ROWS = frozenset(("q", "k", "v", "o", "lse", "o_residual", "dout", "dlse"))
_SHARED = frozenset(("sink", "alibi_slopes"))


@lru_cache(maxsize=1024)
def batched(run: Pass) -> Callable[..., tuple[Array, ...]]:
    """A pass as a function of its arrays that `jax.vmap` knows how to map."""

    @jax.custom_batching.custom_vmap
    def call(*arrays: Array) -> tuple[Array, ...]:
        return partitioned(run, arrays)

    @call.def_vmap
    def rule(size: int, mapped: Sequence[bool], *arrays: Array) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
        if folds(run, mapped) and not any(map(_has_explicit_sharding, arrays)):
            return _folded(run, size, mapped, arrays)

        def each(those: list[Array]) -> tuple[Array, ...]:
            taken = iter(those)
            return call(*[next(taken) if each else array for each, array in zip(mapped, arrays, strict=True)])

        results = jax.lax.map(each, [array for is_mapped, array in zip(mapped, arrays, strict=True) if is_mapped])
        return results, (True,) * len(results)

    return call


def folds(run: Pass, mapped: Sequence[bool]) -> bool:
    """Whether a longer batch gives what calls one by one would give.

    It does not where results are sums over the batch (the gradient of sinks), where they depend on a sequence's number
    (dropout, functions of it), or where the batch is laid out otherwise than by a first dimension.
    """
    fields = run.features.fields
    if "dropout" in fields or "score" in fields or "mask" in fields or (run.kind == BACKWARD and "sink" in run.slots):
        return False
    if not _ROWS.union(_BY_BATCH, _SHARED).issuperset(run.inputs):
        return False
    return not any(is_mapped and slot == "sink" for slot, is_mapped in zip(run.inputs, mapped, strict=True))


def _has_explicit_sharding(array: Array) -> bool:
    """Whether the array's type says how it is spread over devices, so that its first dimensions cannot be joined."""
    return any(axes is not None for axes in jax.typeof(array).sharding.spec)


def _folded(
    run: Pass, size: int, mapped: Sequence[bool], arrays: Sequence[Array]
) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
    by_slot = dict(zip(run.inputs, zip(arrays, mapped, strict=True), strict=True))
    q, q_mapped = by_slot["q"]
    batch = q.shape[1 if q_mapped else 0]

    def with_axis(array: Array, is_mapped: bool) -> Array:
        return array if is_mapped else jnp.broadcast_to(array[None], (size, *array.shape))

    def fold(slot: str) -> Array:
        array, is_mapped = by_slot[slot]
        if slot in _SHARED and not is_mapped and (slot == "sink" or array.ndim == 1):
            return array
        array = with_axis(array, is_mapped)
        if slot == "alibi_slopes" and array.ndim == 2:  # of heads alone
            array = jnp.broadcast_to(array[:, None], (size, batch, array.shape[-1]))
        return array.reshape(size * array.shape[1], *array.shape[2:])

    results = batched(run)(*[fold(slot) for slot in run.inputs])
    return tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in results), (True,) * len(results)
