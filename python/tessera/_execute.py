# SPDX-License-Identifier: Apache-2.0
"""Runs calls: finds the plan for a call's shapes and dtypes, binds the tensors by slot, computes.

The only state between calls is the cache of plans, and in the extension the number given to `set_threads`.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _core
from ._checks import frames_of_the_package, whole
from ._features import Features
from ._gpu import run_on_gpu
from ._libraries import CPU, device_of, dtype_name, library_of
from ._problem import BACKWARD, FORWARD, Shapes, backward_outputs, forward_outputs, layout_hint, problem_for

if TYPE_CHECKING:
    from ._arguments import Call

__all__ = [
    "BACKWARD",
    "FORWARD",
    "BackwardInputs",
    "Shapes",
    "backward_outputs",
    "forward_outputs",
    "forward_route",
    "get_threads",
    "plan_for",
    "run_backward",
    "run_forward",
    "set_threads",
    "shapes_of",
]

Array = Any
Shape = tuple[int, ...]


def set_threads(threads: int) -> None:
    """Worker threads of later calls whose own `threads` is 0; 0 gives the choice back to OpenMP.

    Raises ValueError for a negative number.
    """
    number = whole("threads", threads)
    if number < 0:
        raise ValueError(f"threads: got {number}; want 0 or more")
    _core.set_threads(number)


def get_threads() -> int:
    """Worker threads of a call that does not say: `set_threads`' number, or else what OpenMP would use.

    That is OMP_NUM_THREADS or every core, and torch.set_num_threads' number where torch loads the same OpenMP runtime.
    """
    return _core.get_threads()


def shapes_of(call: Call, q: Array, k: Array, v: Array) -> Shapes:
    tensors = call.tensors
    shapes = tuple([tensor.shape for tensor in tensors]) if tensors else ()
    return Shapes(call.slots, call.sizes, q.shape, k.shape, v.shape, shapes)


class Planned(NamedTuple):
    """A plan, the slots its run binds in order, and which of the call's tensors it takes (None: all)."""

    plan: _core.Plan
    slots: tuple[str, ...]
    taken: tuple[int, ...] | None


def _takes(kind: str, slot: str) -> bool:
    """A backward list is bound by the backward only, a prior LSE and a status word by the forward only."""
    return not slot.startswith("bwd_") if kind == FORWARD else slot not in ("prior_lse", "status")


def plan_for(
    kind: str,
    features: Features,
    shapes: Shapes,
    dtypes: tuple[Any, ...],
    extra: tuple[str, ...] = (),
    device: int = CPU,
) -> Planned:
    """The plan of a forward or backward for tensors of these shapes and dtypes (q, k, v, o; of any library).

    `extra`: what a backward is asked for besides (dlse, grad_fp32, accumulate). Raises ValueError for shapes that fit
    no problem, NotImplementedError where nothing computes it.
    """
    return _plan_for(kind, features, shapes, dtypes, extra, _threads_on(device), device)


def _threads_on(device: int) -> int:
    return get_threads() if device == CPU else 0


@lru_cache(maxsize=1024)
def _plan_for(
    kind: str,
    features: Features,
    shapes: Shapes,
    dtypes: tuple[Any, ...],
    extra: tuple[str, ...],
    threads: int,
    device: int,
) -> Planned:
    q_type, k_type, v_type = dtype_name(dtypes[0], "q"), dtype_name(dtypes[1], "k"), dtype_name(dtypes[2], "v")
    names = (q_type, k_type, v_type, dtype_name(dtypes[3], "out"))
    hint = layout_hint(shapes)
    try:
        problem = problem_for(kind, features, shapes, names, extra)
        plan = _core.Plan(problem, wishes=features.wishes, threads=features.threads or threads, device=device)
    except (NotImplementedError, ValueError) as error:
        if hint is not None:
            error.args = (f"{error} ({hint})",)
        raise
    if hint is not None:
        warnings.warn(hint, stacklevel=frames_of_the_package())
    slots = shapes.slots
    taken = tuple(i for i, slot in enumerate(slots) if _takes(kind, slot))
    bound = ("q", "k", "v", *(slots[i] for i in taken))
    if kind == FORWARD:
        bound += tuple(slot for slot, _, _ in forward_outputs(features, shapes, q_type))
    else:
        bound += ("o", "lse", "dout", *(("dlse",) if "dlse" in extra else ()))
        bound += tuple(slot for slot, _, _ in backward_outputs(shapes, (q_type, k_type, v_type)))
    return Planned(plan, bound, None if len(taken) == len(slots) else taken)


class Route(NamedTuple):
    """What a forward does once its shapes and dtypes are known."""

    run: Any  # Plan.run
    slots: tuple[str, ...]  # in the order that run gets their arrays
    taken: tuple[int, ...] | None  # which of the call's tensors it binds; None: all
    made: tuple[tuple[Shape, str], ...]  # outputs: shape and Tessera's dtype name
    plan: _core.Plan


@lru_cache(maxsize=1024)
def forward_route(
    features: Features,
    shapes: Shapes,
    dtypes: tuple[Any, Any, Any],
    out_dtype: Any,
    threads: int,
    device: int = CPU,
) -> Route:
    """`dtypes` of q, k, v; `out_dtype` that of memory for the output, None to follow the features."""
    outputs = forward_outputs(features, shapes, dtype_name(dtypes[0], "q"))
    made = tuple((tuple(shape), dtype) for _, shape, dtype in outputs)
    last = (made[0][1] if out_dtype is None else out_dtype,)
    planned = _plan_for(FORWARD, features, shapes, dtypes + last, (), threads, device)
    return Route(planned.plan.run, planned.slots, planned.taken, made, planned.plan)


def run_forward(call: Call, q: Array, k: Array, v: Array, outputs: tuple[Array, ...]) -> None:
    """Computes into `outputs`, which are as `forward_outputs` says and in its order. On the CPU, nothing is copied."""
    dtypes = (q.dtype, k.dtype, v.dtype, outputs[0].dtype)
    plan, bound, taken = _plan_for(FORWARD, call.features, shapes_of(call, q, k, v), dtypes, (), get_threads(), CPU)
    plan.run(bound, (q, k, v, *_taken(call, taken), *outputs), *call.scalars, *call.callables)


class BackwardInputs(NamedTuple):
    """Arrays that a backward takes besides the call's own: flash-attn's, and the gradient of the LSE or None."""

    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    dout: Array
    dlse: Array | None


def run_backward(call: Call, inputs: BackwardInputs, outputs: tuple[Array, ...], accumulate: bool = False) -> None:
    """Computes the gradients into `outputs`, which are as `backward_outputs` says and in its order.

    fp32 outputs for half-type inputs make the gradients fp32. With `accumulate` (fp32 only) they are added to.
    """
    q, k, v, out, *given = inputs
    if inputs.dlse is None:
        given.pop()
    dtypes = (q.dtype, k.dtype, v.dtype, out.dtype)
    grad_dtypes = tuple([each.dtype for each in outputs[:3]])
    extra = _backward_fields(dtypes[:3], grad_dtypes, inputs.dlse is not None, accumulate)
    device = device_of(q)
    plan, bound, taken = plan_for(BACKWARD, call.features, shapes_of(call, q, k, v), dtypes, extra, device)
    arrays = (q, k, v, *_taken(call, taken), out, *given, *outputs)
    if device == CPU:
        plan.run(bound, arrays, *call.scalars, *call.callables)
    else:
        run_on_gpu(library_of(q, "q"), plan, bound, arrays, q, call.scalars, call.callables)


def _taken(call: Call, taken: tuple[int, ...] | None) -> tuple[Array, ...]:
    """The call's tensors that a plan takes."""
    return call.tensors if taken is None else tuple([call.tensors[i] for i in taken])


@lru_cache(maxsize=256)
def _backward_fields(
    dtypes: tuple[Any, ...], grad_dtypes: tuple[Any, ...], dlse: bool, accumulate: bool
) -> tuple[str, ...]:
    names, grad_names = tuple(map(dtype_name, dtypes)), tuple(map(dtype_name, grad_dtypes))
    fields = ["dlse"] if dlse else []
    if accumulate or (grad_names != names and set(grad_names) == {"fp32"}):
        fields.append("grad_fp32")
    if accumulate:
        fields.append("accumulate")
    return tuple(fields)
