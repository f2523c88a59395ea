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
from typing import Any

import torch
from torch import Tensor

from .. import _core, _execute
from .._features import Features, features_of, with_lse, with_residual
from .._libraries import CPU, dtype_name
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

# In the order of `others`; q, k and v have gradients besides.
DIFFERENTIABLE = ("sink", "k2", "v2")

# Types of outputs, and those that a plan will refuse.
_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_INTEGRAL = (torch.int8, torch.int32, torch.int64, torch.uint8, torch.uint32)
DTYPES = {dtype_name(dtype): dtype for dtype in (*_FLOATING, *_INTEGRAL)}
BITS_64 = (1 << 64) - 1


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


def returns_residual(features: str | Features) -> bool:
    """Whether it is asked for as a result, not only by a backward."""
    return "residual" in as_features(features).fields


@lru_cache(maxsize=1024)
def names_of(slots: str) -> tuple[str, ...]:
    return tuple(slots.split())


class Signature:
    """What decides how a call is computed, but for threads and what its backward is asked. Two are the same only if
    they are one object, so that caches go by identity: equal calls give one.

    q, k, v, shapes: of q, k, v and the other tensors. dtypes: of q, k, v. device: a GPU's index, or CPU.
    """

    __slots__ = ("device", "dtypes", "features", "k", "names", "q", "shapes", "sizes", "slots", "v")

    def __init__(
        self,
        features: str | Features,
        slots: str,
        sizes: tuple[int, int, int],
        q: Shape,
        k: Shape,
        v: Shape,
        shapes: tuple[Shape, ...],
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
        device: int,
    ) -> None:
        self.features = as_features(features)
        self.slots = slots
        self.names = names_of(slots)
        self.sizes = sizes
        self.q, self.k, self.v, self.shapes = q, k, v, shapes
        self.dtypes = dtypes
        self.device = device

    @property
    def threads(self) -> int:
        return _execute.get_threads() if self.device == CPU else 0


_signature = lru_cache(maxsize=2048)(Signature)


def signature_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    slots: str,
    features: str | Features,
    sizes: Sequence[int],
) -> Signature:
    shapes = tuple([x.shape for x in tensors]) if tensors else ()
    dtypes = (q.dtype, k.dtype, v.dtype)
    return _signature(features, slots, tuple(sizes), q.shape, k.shape, v.shape, shapes, dtypes, q.get_device())


@lru_cache(maxsize=2048)
def recorded_calls(call: Signature) -> tuple[Signature, Signature]:
    """The calls of a forward whose backward may follow, and of that backward: with out's residual where it is kept."""
    kept = keeping_residual(call.features, call.slots, call.dtypes[0], call.device != CPU)
    if kept is None:
        return call, call
    features, slots = kept
    sizes = call.sizes, call.q, call.k, call.v
    residual = (*call.q[:-1], call.v[-1])
    return (
        _signature(features, call.slots, *sizes, call.shapes, call.dtypes, call.device),
        _signature(features, slots, *sizes, (*call.shapes, residual), call.dtypes, call.device),
    )


@lru_cache(maxsize=2048)
def forward_run(
    call: Signature, threads: int, lse: bool, backward: Signature | None = None, into: torch.dtype | None = None
) -> _core.TorchRun:
    """Of q, k, v and the call's tensors.

    `lse`: it is written, whether the features have it or not. `backward`: it may follow, and is planned too on a GPU,
    so that what has none is refused before it is computed; the CPU has one of all. `into`: the outputs are the
    caller's, and come last; the dtype of out.
    """
    features = with_lse(call.features) if lse else call.features
    shapes = _execute.Shapes(call.names, call.sizes, call.q, call.k, call.v, call.shapes)
    route = _execute.forward_route(features, shapes, call.dtypes, into, threads, call.device)
    inputs = _inputs(call, route.taken)
    slots = route.slots[len(route.slots) - len(route.made) :]
    if into is not None:
        return _core.TorchRun(route.plan, (*inputs, *slots), ())
    made = [(shape, _packed_strides(shape), DTYPES[dtype]) for shape, dtype in route.made]
    if backward is not None and call.device != CPU:
        try:
            backward_run(backward, made[0][2], False, False, threads)
        except NotImplementedError as error:
            raise NotImplementedError(f"{error}; or torch.no_grad(), where no gradient is wanted") from None
    return _core.TorchRun(route.plan, inputs, tuple(zip(slots, made, strict=True)))


def refuse_without_backward(q: Tensor, k: Tensor, v: Tensor, *told: Any) -> None:
    """NotImplementedError where no backward can follow; `told`: tensors, slots, features, sizes."""
    forward, backward = recorded_calls(signature_of(q, k, v, *told))
    forward_run(forward, forward.threads, True, backward)


def _inputs(call: Signature, taken: tuple[int, ...] | None) -> tuple[str | None, ...]:
    """Slots of q, k, v and the call's tensors; None for those that a plan does not take."""
    return "q", "k", "v", *[name if taken is None or i in taken else None for i, name in enumerate(call.names)]


_BACKWARD_WISHES = ("implementation=cpu.", "implementation=cuda.bwd_")


def is_deterministic(asked: Any = False) -> bool:
    """Whether gradients are to have the same bits in every run: the call has asked for it, or torch does for all."""
    return bool(asked) or torch.are_deterministic_algorithms_enabled()


@lru_cache(maxsize=1024)
def backward_features(features: Features, deterministic: bool) -> Features:
    """Those of a call's backward.

    Wishes are for the forward's tiles; the backward follows only those of an implementation that has it.
    """
    fields = {**features.fields, "deterministic": True} if deterministic else features.fields
    wishes = " ".join([wish for wish in features.wishes.split() if wish.startswith(_BACKWARD_WISHES)])
    return Features(fields, features.out, features.threads, wishes)


@lru_cache(maxsize=2048)
def backward_run(call: Signature, out: torch.dtype, dlse: bool, deterministic: bool, threads: int) -> _core.TorchRun:
    """Of q, k, v, the call's tensors, out, lse, dout and, with `dlse`, dlse. `out`: its dtype."""
    asked = backward_features(call.features, deterministic)
    extra = ("dlse",) if dlse else ()
    shapes = _execute.Shapes(call.names, call.sizes, call.q, call.k, call.v, call.shapes)
    dtypes = (*call.dtypes, out)
    try:
        plan, slots, taken = _execute.plan_for(_execute.BACKWARD, asked, shapes, dtypes, extra, call.device)
    except NotImplementedError as error:
        argument, _, words = str(error).partition(": ")
        argument = _without_backward(words, dtypes) if argument == "problem" else argument
        raise NotImplementedError(f"{argument}: {words}") from None
    inputs = (*_inputs(call, taken), "o", "lse", "dout", *extra)
    # Gradients are laid out as their inputs (dense ones keep their strides), so that accumulation needs no copy.
    likes = [0, 1, 2, *[3 + call.names.index(name) for name in DIFFERENTIABLE if name in call.names]]
    outputs = tuple(zip(slots[len(slots) - len(likes) :], likes, strict=True))
    rows = with_rows_apart if call.device != CPU else None
    others = (None,) * (len(call.names) + 2)  # of the call's tensors, out and lse
    return _core.TorchRun(
        plan, inputs, outputs, (rows, rows, rows, *others, with_aligned_rows, with_rows)[: len(inputs)]
    )


def _without_backward(words: str, dtypes: Any) -> str:
    """The argument to look at first where no backward takes a problem that has a forward, for the reason in `words`."""
    if "derivative of score callable" in words:
        return "score"
    return "q" if dtypes[3] == dtypes[0] else "out_dtype"


def _packed_strides(shape: Shape) -> Shape:
    return tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))


def attention_on_device(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    slots: str,
    features: str | Features,
    sizes: Sequence[int],
    scalars: Sequence[int],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Forward where q lies; see the module for the arguments. Shapes are those of ``tessera.attention``."""
    call = signature_of(q, k, v, tensors, slots, features, sizes)
    out, lse, *extra = forward_run(call, call.threads, True).run((q, k, v, *tensors), tuple(scalars))
    return out, lse, extra


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
    call = signature_of(q, k, v, tensors, slots, features, sizes)
    run = forward_run(call, call.threads, True, into=out.dtype)
    run.run((q, k, v, *tensors, out, lse, *extra), tuple(scalars))


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
    call = signature_of(q, k, v, tensors, slots, features, sizes)
    dq, dk, dv, *others = gradients(call, (q, k, v, *tensors, out, lse, dout), dlse, tuple(scalars))
    return dq, dk, dv, others


def gradients(
    call: Signature, tensors: tuple[Tensor, ...], dlse: Tensor | None, scalars: tuple[int, ...]
) -> list[Tensor]:
    """Likewise; `tensors`: q, k, v, the call's, out, lse and dout."""
    run = backward_run(call, tensors[-3].dtype, dlse is not None, is_deterministic(), call.threads)
    return run.run(tensors if dlse is None else (*tensors, dlse), scalars)


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
    shapes = _execute.Shapes(names, sizes, q.shape, k.shape, v.shape, tuple([x.shape for x in tensors]))
    outputs = _execute.forward_outputs(with_lse(as_features(features)), shapes, dtype_name(q.dtype))
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
    by_slot = dict(zip(names_of(slots), tensors, strict=True))
    others = [torch.empty_like(by_slot[name]) for name in DIFFERENTIABLE if name in by_slot]
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), others


for key in ("CPU", "CUDA"):
    LIBRARY.impl("attention", attention_on_device, key)
    LIBRARY.impl("attention_out", attention_out_on_device, key)
    LIBRARY.impl("attention_backward", attention_backward_on_device, key)
torch.library.register_fake("tessera::attention", _attention_fake, lib=LIBRARY)
torch.library.register_fake("tessera::attention_out", _attention_out_fake, lib=LIBRARY)
torch.library.register_fake("tessera::attention_backward", _attention_backward_fake, lib=LIBRARY)
