# SPDX-License-Identifier: Apache-2.0
"""The operators ``tessera::attention``, ``tessera::attention_out`` and ``tessera::attention_backward``.

Registered with ``torch.library`` as plain functions: no schema is inspected and nothing is wrapped in a call, so that a
Python operator costs about 10 µs instead of 80. What an operator is told of the problem beyond its tensors is

- slots: names of the bound tensors besides q, k, v, in the order of `tensors`, separated by spaces
- features: ``Features.text`` of the call's
- sizes: longest query sequence, longest key sequence of each source; 0: the tensors' shapes say it
- scalars: dropout's seed and offset (64 bits each, as int64), batch_offset, head_offset

The forward always writes the LSE, because whether a backward follows is not the operator's to know; only a call that
goes past the operators may leave it out. `extra` holds what
else the features ask for: the residual of out, the tile masses, then the next list. A backward gets that residual as
one of `tensors`, in the slot o_residual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _execute
from .._features import Features, features_of, with_lse, with_residual
from .._gpu import run_on_gpu
from .._libraries import CPU, dtype_name, library_of
from .layouts import with_aligned_rows, with_rows, with_rows_apart

_CALL = "Tensor q, Tensor k, Tensor v, Tensor[] tensors, str slots, str features, SymInt[] sizes, int[] scalars"

LIBRARY = torch.library.Library("tessera", "DEF")
LIBRARY.define(f"attention({_CALL}) -> (Tensor out, Tensor lse, Tensor[] extra)")
LIBRARY.define(f"attention_out(Tensor(a!) out, Tensor(b!) lse, Tensor(c!)[] extra, {_CALL}) -> ()")
LIBRARY.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_CALL})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor[] others)"
)

attention = torch.ops.tessera.attention.default
attention_out = torch.ops.tessera.attention_out.default
attention_backward = torch.ops.tessera.attention_backward.default

Shape = tuple[int, ...]
Allocations = tuple[tuple[Shape, Shape, torch.dtype], ...]  # shape and strides, because empty_strided is the quickest

# In the order of `others`; q, k and v have gradients besides.
DIFFERENTIABLE = ("sink", "k2", "v2")

# Types of outputs, and those that a plan will refuse.
_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_INTEGRAL = (torch.int8, torch.int32, torch.int64, torch.uint8, torch.uint32)
DTYPES = {dtype_name(dtype): dtype for dtype in (*_FLOATING, *_INTEGRAL)}
_SEEDS = frozenset(("dropout_seed", "dropout_offset"))
BITS_64 = (1 << 64) - 1


class _Route(NamedTuple):
    """What a call does once its shapes and dtypes are known."""

    plan: Any  # _core.Plan
    bound: tuple[str, ...]  # slots in the order that run gets their tensors
    taken: tuple[int, ...] | None  # which of the call's tensors it binds; None: all
    made: Allocations  # outputs to allocate
    seeds: tuple[int, ...]  # which of the call's tensors are dropout's uint64 scalars


def signed(word: int) -> int:
    """64 bits as the int64 that an operator's schema can carry."""
    return word - (1 << 64) if word >= 1 << 63 else word


def as_features(features: str | Features) -> Features:
    """An operator gets them as text, which a graph can hold; a call that goes past the dispatcher keeps the object."""
    return features_of(features) if isinstance(features, str) else features


@lru_cache(maxsize=1024)
def keeping_residual(features: str | Features, slots: str, dtype: torch.dtype, on_gpu: bool) -> tuple[Any, str] | None:
    """(features of a forward that also writes what rounding its output loses, slots of the backward that reads it).

    None where nothing is lost, or where it is not to be kept; parts of the keys, which a GPU's plan may be wished to
    have, do not keep it either. `dtype`: of q.
    """
    asked = as_features(features)
    if "residual" not in asked.fields:
        loses = (asked.out or dtype_name(dtype)) in ("bf16", "fp16")
        if asked.drops_residual or not loses or (on_gpu and "splits=" in asked.wishes):
            return None
    kept = with_residual(asked)
    return kept.text() if isinstance(features, str) else kept, f"{slots} o_residual".lstrip()


@lru_cache(maxsize=1024)
def names_of(slots: str) -> tuple[str, ...]:
    return tuple(slots.split())


@lru_cache(maxsize=2048)
def _forward_route(
    features: str | Features,
    slots: str,
    sizes: tuple[int, int, int],
    q: Shape,
    k: Shape,
    v: Shape,
    shapes: tuple[Shape, ...],
    dtypes: Any,
    device: int,
    threads: int,
    recorded: bool = False,
    lse: bool = True,
) -> _Route:
    """`dtypes` of q, k, v, and of out if the caller has allocated it, else None. `threads`: 0 on a GPU.

    `recorded`: a backward may follow, and is planned too, so that what has none is refused before it is computed.
    `lse`: it is written, whether the features have it or not.
    """
    names = names_of(slots)
    asked = with_lse(as_features(features)) if lse else as_features(features)
    route = _execute.forward_route(asked, names, sizes, q, k, v, shapes, dtypes[:3], dtypes[3], threads, device)
    made = tuple((shape, _packed_strides(shape), DTYPES[dtype]) for shape, dtype in route.made)
    if recorded:
        types = (*dtypes[:3], made[0][2])
        try:
            _backward_route(features, slots, sizes, q, k, v, shapes, types, False, False, device, threads)
        except NotImplementedError as error:
            raise NotImplementedError(f"{error}; or torch.no_grad(), where no gradient is wanted") from None
    return _Route(route.plan, route.slots, route.taken, made, _seeds(names))


_BACKWARD_WISHES = ("implementation=cpu.", "implementation=cuda.bwd_")


@lru_cache(maxsize=2048)
def _backward_route(
    features: str | Features,
    slots: str,
    sizes: tuple[int, int, int],
    q: Shape,
    k: Shape,
    v: Shape,
    shapes: tuple[Shape, ...],
    dtypes: Any,
    dlse: bool,
    deterministic: bool,
    device: int,
    _: int,
) -> _Route:
    """Wishes are for the forward's tiles; the backward follows only those of an implementation that has it."""
    asked = as_features(features)
    fields = {**asked.fields, "deterministic": True} if deterministic else asked.fields
    wishes = " ".join([wish for wish in asked.wishes.split() if wish.startswith(_BACKWARD_WISHES)])
    asked = Features(fields, asked.out, asked.threads, wishes)
    extra = ("dlse",) if dlse else ()
    names = names_of(slots)
    try:
        plan, bound, taken = _execute.plan_for(
            _execute.BACKWARD, asked, names, sizes, q, k, v, shapes, dtypes, extra, device
        )
    except NotImplementedError as error:
        argument, _, words = str(error).partition(": ")
        argument = _without_backward(asked, dtypes) if argument == "problem" else argument
        raise NotImplementedError(f"{argument}: {words}") from None
    return _Route(plan, bound, taken, (), _seeds(names))


def _without_backward(features: Features, dtypes: Any) -> str:
    """The argument to look at first where no backward takes a problem that has a forward."""
    if features.fields.get("list") is not None:
        return "tiles"
    if features.fields.get("bwd_list") is not None:
        return "tiles.backward"
    if features.fields.get("score") is not None:
        return "score"
    return "q" if dtypes[3] == dtypes[0] else "out_dtype"


def forward_route(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    slots: str,
    features: str | Features,
    sizes: Sequence[int],
    recorded: bool,
    lse: bool = True,
) -> _Route:
    """Of a forward that allocates its outputs; `recorded` as in `attention_on_device`, `lse` as in `_forward_route`."""
    device = q.get_device()
    shapes = tuple([x.shape for x in tensors]) if tensors else ()
    dtypes = (q.dtype, k.dtype, v.dtype, None)
    threads, recorded = (_execute.get_threads(), False) if device == CPU else (0, recorded)
    return _forward_route(
        features, slots, tuple(sizes), q.shape, k.shape, v.shape, shapes, dtypes, device, threads, recorded, lse
    )


def _packed_strides(shape: Shape) -> Shape:
    return tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))


def _seeds(names: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(i for i, name in enumerate(names) if name in _SEEDS)


def _bound_tensors(route: _Route, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    if route.seeds:  # torch draws int64, the slots are uint64: the same bits
        tensors = [x.view(torch.uint64) if i in route.seeds else x for i, x in enumerate(tensors)]
    return tensors if route.taken is None else [tensors[i] for i in route.taken]


def _run(route: _Route, device: int, q: Tensor, arrays: tuple[Tensor, ...], scalars: Sequence[int]) -> None:
    """On a GPU on its current stream: reads no tensor's data on the host and waits for nothing."""
    unsigned = (scalars[0] & BITS_64, scalars[1] & BITS_64, scalars[2], scalars[3])
    if device == CPU:
        route.plan.run(route.bound, arrays, *unsigned)
    else:
        run_on_gpu(library_of(q, "q"), route.plan, route.bound, arrays, q, unsigned)


def attention_on_device(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    slots: str,
    features: str | Features,
    sizes: Sequence[int],
    scalars: Sequence[int],
    recorded: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Forward where q lies; see the module for the arguments. Shapes are those of ``tessera.attention``.

    `recorded`: for autograd. Then NotImplementedError is raised where a GPU has no backward; the CPU has one of all.
    """
    route = forward_route(q, k, v, tensors, slots, features, sizes, recorded)
    outputs = _computed(route, q, k, v, tensors, scalars)
    return outputs[0], outputs[1], outputs[2:]


def outputs_on_device(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    slots: str,
    features: str | Features,
    sizes: Sequence[int],
    scalars: Sequence[int],
) -> list[Tensor]:
    """The same where nothing is recorded: out and what the features ask for, so that an LSE is not always written."""
    route = forward_route(q, k, v, tensors, slots, features, sizes, False, False)
    return _computed(route, q, k, v, tensors, scalars)


def _computed(
    route: _Route, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], scalars: Sequence[int]
) -> list[Tensor]:
    outputs = [q.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in route.made]
    bound = _bound_tensors(route, tensors) if tensors else ()
    _run(route, q.get_device(), q, (q, k, v, *bound, *outputs), scalars)
    return outputs


def attention_out_on_device(
    out: Tensor,
    lse: Tensor,
    extra: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    slots: str,
    features: str | Features,
    sizes: Sequence[int],
    scalars: Sequence[int],
) -> None:
    """The same into the caller's memory."""
    device = q.get_device()
    shapes = tuple([x.shape for x in tensors])
    dtypes = (q.dtype, k.dtype, v.dtype, out.dtype)
    threads = _execute.get_threads() if device == CPU else 0
    route = _forward_route(features, slots, tuple(sizes), q.shape, k.shape, v.shape, shapes, dtypes, device, threads)
    _run(route, device, q, (q, k, v, *_bound_tensors(route, tensors), out, lse, *extra), scalars)


def attention_backward_on_device(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    slots: str,
    features: str | Features,
    sizes: Sequence[int],
    scalars: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of q, k, v and of those tensors whose slots are DIFFERENTIABLE, in the inputs' dtypes.

    dout and dlse, and on a GPU q, k and v, are copied where they lie as no kernel reads them, as dout does after
    ``out.sum().backward()``. Raises NotImplementedError where no kernel computes it.
    """
    dout = with_aligned_rows(dout)
    dlse = None if dlse is None else with_rows(dlse)
    device = q.get_device()
    if device != CPU:
        q, k, v = map(with_rows_apart, (q, k, v))
    route = _backward_route(
        features,
        slots,
        tuple(sizes),
        q.shape,
        k.shape,
        v.shape,
        tuple([x.shape for x in tensors]) if tensors else (),
        (q.dtype, k.dtype, v.dtype, out.dtype),
        dlse is not None,
        torch.are_deterministic_algorithms_enabled(),
        device,
        _execute.get_threads() if device == CPU else 0,
    )
    dq, dk, dv, others = _empty_gradients(q, k, v, tensors, slots)
    upstream = (out, lse, dout) if dlse is None else (out, lse, dout, dlse)
    bound = _bound_tensors(route, tensors) if tensors else ()
    _run(route, device, q, (q, k, v, *bound, *upstream, dq, dk, dv, *others), scalars)
    return dq, dk, dv, others


def _empty_gradients(
    q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], slots: str
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients laid out as their inputs (dense ones keep their strides), so that accumulation needs no copy."""
    others = []
    if tensors:
        by_slot = dict(zip(names_of(slots), tensors, strict=True))
        others = [torch.empty_like(by_slot[name]) for name in DIFFERENTIABLE if name in by_slot]
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), others


def empty_outputs(
    features: str | Features,
    names: tuple[str, ...],
    sizes: tuple[int, int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    """Memory for out, lse and extra; sizes may be symbolic."""
    shapes = tuple([x.shape for x in tensors])
    dtype = dtype_name(q.dtype)
    outputs = _execute.forward_outputs(
        with_lse(as_features(features)), names, sizes, q.shape, k.shape, v.shape, shapes, dtype
    )
    return [q.new_empty(shape, dtype=DTYPES[dtype]) for _, shape, dtype in outputs]


def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], slots: str, features: str, sizes: Any, scalars: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    out, lse, *extra = empty_outputs(features, names_of(slots), tuple(sizes), q, k, v, tensors)
    return out, lse, extra


def _attention_out_fake(*_: Any) -> None:
    """Everything it writes is given."""


def _attention_backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    slots: str,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    return _empty_gradients(q, k, v, tensors, slots)


for key in ("CPU", "CUDA"):
    LIBRARY.impl("attention", attention_on_device, key)
    LIBRARY.impl("attention_out", attention_out_on_device, key)
    LIBRARY.impl("attention_backward", attention_backward_on_device, key)
torch.library.register_fake("tessera::attention", _attention_fake, lib=LIBRARY)
torch.library.register_fake("tessera::attention_out", _attention_out_fake, lib=LIBRARY)
torch.library.register_fake("tessera::attention_backward", _attention_backward_fake, lib=LIBRARY)
