# SPDX-License-Identifier: Apache-2.0
"""A forward or backward as one call of XLA's FFI, for arrays of any shapes that it is traced with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tessera import _core
from tessera._execute import BACKWARD, FORWARD, _takes, plan_for
from tessera._features import Features
from tessera._libraries import CPU, LIBRARY_NAMES, dtype_name
from tessera._problem import Shapes, backward_outputs, forward_outputs

Array = Any

_TARGET = "tessera_run"
# Slots of 64-bit integers, which arrays of jax are not unless it is told to allow them.
_WIDE = {
    "q_offset": "int64",
    "k_offset": "int64",
    "k_offset2": "int64",
    "dropout_seed": "uint64",
}


class Pass(NamedTuple):
    """What is computed, but for shapes and dtypes.

    features, slots, sizes, scalars: as of `tessera._arguments.Call`; slots name the tensors behind q, k and v.
    extra: what a backward is asked for besides: dlse.
    """

    kind: str
    features: Features
    slots: tuple[str, ...]
    sizes: tuple[int, int, int]
    scalars: tuple[int, int, int, int]
    extra: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Slots of the arrays that `compute` takes, in order."""
        if self.kind == FORWARD:
            return ("q", "k", "v", *self.slots)
        residual = ("o_residual",) if "residual" in self.features.fields else ()
        return ("q", "k", "v", *self.slots, "o", "lse", *residual, "dout", *self.extra)

    @property
    def result_slots(self) -> tuple[str, ...]:
        """Slots of what `compute` gives, in order."""
        if self.kind == FORWARD:
            fields = self.features.fields
            lse = ("lse",) if self.features.lse else ()
            return ("o", *lse, *(("o_residual",) if "residual" in fields else ()))
        sources = ("dk2", "dv2") if "k2" in self.slots else ()
        return ("dq", "dk", "dv", *(("dsink",) if "sink" in self.slots else ()), *sources)

    def outputs(self, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str]) -> list[tuple[str, Any, str]]:
        """(slot, shape, Tessera's dtype name) of what `compute` gives, for inputs of these, by slot."""
        all_shapes = self.shapes(shapes)
        types = (dtypes["q"], dtypes["k"], dtypes["v"])
        made = (
            forward_outputs(self.features, all_shapes, types[0])
            if self.kind == FORWARD
            else backward_outputs(all_shapes, types)
        )
        return [(slot, tuple(shape), dtype) for slot, shape, dtype in made]

    def shapes(self, by_slot: dict[str, tuple[int, ...]]) -> Shapes:
        tensors = tuple(by_slot[slot] for slot in self.slots)
        return Shapes(self.slots, self.sizes, by_slot["q"], by_slot["k"], by_slot["v"], tensors)


def compute(run: Pass, arrays: Sequence[Array]) -> tuple[Array, ...]:
    """The outputs of a pass, in the order of `Pass.outputs`; `arrays` are in that of `Pass.inputs`.

    Rows that no sequence of packed ones has are 0, of the LSE −inf.

    Raises:
        ValueError: shapes and dtypes that fit no problem.
        NotImplementedError: what nothing computes.
    """
    _register()
    shapes = {slot: tuple(array.shape) for slot, array in zip(run.inputs, arrays, strict=True)}
    dtypes = {slot: _dtype_of(array, slot) for slot, array in zip(run.inputs, arrays, strict=True)}
    outputs = run.outputs(shapes, dtypes)
    types = (dtypes["q"], dtypes["k"], dtypes["v"], outputs[0][2] if run.kind == FORWARD else dtypes["o"])
    plan = plan_for(run.kind, run.features, run.shapes(shapes), types, run.extra, CPU).plan
    names = [_bound_as(run.kind, slot, dtypes[slot]) for slot in run.inputs]
    given = [_words(array) if ":" in name else array for name, array in zip(names, arrays, strict=True)]
    aliases = {}
    like = arrays[0]
    results = [_struct(shape, dtype, like) for _, shape, dtype in outputs]
    if "cu_seqlens_q" in run.slots or "cu_seqlens_k" in run.slots:
        for i, ((slot, *_), result) in enumerate(zip(outputs, results, strict=True)):
            if slot == "dsink":
                continue
            aliases[len(given)] = i
            names.append("-")
            given.append(_filled(result, -np.inf if slot == "lse" else 0, like))
    call = jax.ffi.ffi_call(_TARGET, results, input_output_aliases=aliases)
    return tuple(
        call(
            *given,
            problem=plan.problem,
            wishes=run.features.wishes,
            inputs=" ".join(names),
            outputs=" ".join(slot for slot, *_ in outputs),
            scalars=np.array([*(_signed(each) for each in run.scalars), run.features.threads], np.int64),
        )
    )


@lru_cache(maxsize=1)
def _register() -> None:
    cpu, cuda = _core.ffi_handlers()
    jax.ffi.register_ffi_target(_TARGET, cpu, platform="cpu")
    jax.ffi.register_ffi_target(_TARGET, cuda, platform="CUDA")


def _bound_as(kind: str, slot: str, dtype: str) -> str:
    """The slot as the handler reads it."""
    if not _takes(kind, slot):
        return "-"
    wide = _WIDE.get(slot)
    return slot if wide is None or dtype in ("int64", "uint64") else f"{slot}:{wide}"


def _words(array: Array) -> Array:
    """Integers of 64 bits as pairs of uint32, the low word first; such pairs as they are."""
    if array.dtype == jnp.uint32:
        return array
    low = array.astype(jnp.int32)
    return jnp.stack([low, low >> 31], axis=-1).astype(jnp.uint32)


def _dtype_of(array: Array, slot: str) -> str:
    return dtype_name(array.dtype, slot)


def varying_axes(array: Array) -> frozenset[Any]:
    """Axes of a `jax.shard_map` along which the array is different from device to device."""
    kind = jax.typeof(array)
    manual = getattr(kind, "manual_axis_type", None)
    return getattr(kind, "vma", frozenset()) if manual is None else manual.varying


def varying_alike(arrays: Sequence[Array]) -> tuple[Array, ...]:
    """The arrays, each varying along every axis that one of them varies along; the gradient is then a sum over it."""
    every = frozenset().union(*map(varying_axes, arrays))
    missing = [tuple(every - varying_axes(array)) for array in arrays]
    return tuple(
        jax.lax.pcast(array, axes, to="varying") if axes else array for array, axes in zip(arrays, missing, strict=True)
    )


def _struct(shape: tuple[int, ...], dtype: str, like: Array) -> jax.ShapeDtypeStruct:
    """What a call gives, varying as `like` does."""
    given: dict[str, Any] = {}
    if varying_axes(like):
        manual = getattr(jax.typeof(like), "manual_axis_type", None)
        given = {"vma": varying_axes(like)} if manual is None else {"manual_axis_type": manual}
        given["sharding"] = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
    return jax.ShapeDtypeStruct(shape, jnp.dtype(LIBRARY_NAMES[dtype]), **given)


def _filled(result: jax.ShapeDtypeStruct, value: float, like: Array) -> Array:
    return varying_alike([jnp.full(result.shape, value, result.dtype), like])[0]


def _signed(word: int) -> int:
    """The bits of an unsigned 64-bit integer, or a signed one, as a signed one."""
    return (word & (1 << 64) - 1 ^ 1 << 63) - (1 << 63)


__all__ = ["BACKWARD", "FORWARD", "Pass", "compute", "varying_alike"]
