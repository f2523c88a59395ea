# SPDX-License-Identifier: Apache-2.0
"""What the operators do above the kernels: autograd, autocast, vmap.

The autograd kernels are registered directly, instead of by ``torch.library.register_autograd``, whose handling of lists
of tensors takes longer than a small attention. They get the dispatcher's key set: when it is that of plain CPU tensors
(no mode, no subclass, no functorch layer), nothing below them wants to see the call, and the kernel is called without
another round through the dispatcher. ``is_plain`` finds this out before the first round, which is then left out too:
``EagerFunction`` records such a call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _AutoDispatchBelowAutograd, _ExcludeDispatchKeyGuard
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from .. import _core
from . import operators
from .operators import DIFFERENTIABLE, LIBRARY, Signature, names_of

_PLAIN = DispatchKeySet(DispatchKey.CPU).add(DispatchKey.AutogradCPU).raw_repr()
_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU).add(DispatchKey.AutocastCUDA)
_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))
_STRIDED = torch.strided
_included, _excluded = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set


def _keys_of_thread() -> tuple[int, int]:
    """Dispatch keys that this thread's modes add to every call, and those that they keep from it."""
    return _included().raw_repr(), _excluded().raw_repr()


def _keys_without_modes() -> frozenset[tuple[int, int]]:
    """`_keys_of_thread` where there is no mode, and under inference_mode alone: those of a new thread."""
    found = []

    def look() -> None:
        found.append(_keys_of_thread())
        with torch.inference_mode():
            found.append(_keys_of_thread())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return frozenset(found)


_WITHOUT_MODES = _keys_without_modes()
_core.set_keys_without_modes(list(_WITHOUT_MODES))


def is_plain(q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether these are dense tensors of one CPU or GPU and no mode, subclass, transform, tracer or profiler would see
    the call."""
    place = q.get_device()  # −1: the CPU, or no device at all
    return (
        is_plain_tensor(q, place)
        and is_plain_tensor(k, place)
        and is_plain_tensor(v, place)
        and (not tensors or all([is_plain_tensor(x, place) for x in tensors]))
        and _keys_of_thread() in _WITHOUT_MODES
        and not torch._C._len_torch_function_stack()
        and not torch.autograd._profiler_enabled()
    )


def is_plain_tensor(x: Tensor, place: int) -> bool:
    return (
        type(x) in _PLAIN_TYPES
        and (x.is_cpu if place < 0 else x.is_cuda and x.get_device() == place)
        and x.layout is _STRIDED
        and not x.is_nested
        and not x.is_neg()
    )


def is_recorded(q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether autograd records a call with these."""
    return torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (bool(tensors) and needs_grad(tensors))
    )


class Recorded(NamedTuple):
    """A call whose backward may follow."""

    names: tuple[str, ...]  # of its tensors
    forward: _core.TorchRun  # writes the LSE
    backward: Signature
    lse: bool  # it is among the results
    keeps_residual: bool
    residual: bool  # it is among the results


@lru_cache(maxsize=2048)
def recorded_call(call: Signature, threads: int, lse: bool) -> Recorded:
    forward, backward = operators.recorded_calls(call)
    run = operators.forward_run(forward, threads, True, backward)
    keeps = backward is not forward
    return Recorded(call.names, run, backward, lse, keeps, keeps and operators.returns_residual(call.features))


class EagerFunction(torch.autograd.Function):
    """The results of a `Recorded` call of plain tensors, with first derivatives, past the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, recorded: Recorded, scalars: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor
    ) -> Any:
        out, lse, *extra = recorded.forward.run((q, k, v, *tensors), scalars)
        if recorded.keeps_residual:
            tensors = (*tensors, extra[0])
            if not recorded.residual:
                del extra[0]
        ctx.save_for_backward(q, k, v, *tensors, out, lse)
        ctx.set_materialize_grads(False)
        ctx.call = recorded.backward, recorded.names, scalars, recorded.lse  # no plan: graphs may outlive it
        if extra:
            ctx.mark_non_differentiable(*extra)
        elif not recorded.lse:
            return out
        return (out, lse, *extra) if recorded.lse else (out, *extra)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        call, names, scalars, has_lse = ctx.call
        dlse = others[0] if has_lse else None
        if dout is None:
            if dlse is None:
                return (None,) * (5 + len(names))
            dout = torch.zeros_like(saved[-2])
        # The operator, if anyone may want to see it: a mode entered since, a graph of this backward.
        if torch.is_grad_enabled() or type(dout) is not Tensor or _len_torch_dispatch_stack():
            q, k, v, *tensors, out, lse = saved
            told = (call.slots, call.features.text(), call.sizes, [operators.signed(x) for x in scalars])
            dq, dk, dv, more = operators.attention_backward(dout, dlse, out, lse, q, k, v, tensors, *told)
            gradients = [dq, dk, dv, *more]
        else:
            gradients = operators.gradients(call, (*saved, dout), dlse, scalars)
        return (None, None, *(by_tensor(gradients, names) if names else gradients))


# Function.apply looks for functorch before it comes to this, which takes 4 µs that plain tensors need not wait.
apply_eagerly = super(torch.autograd.Function, EagerFunction).apply


def by_tensor(gradients: Sequence[Tensor], names: tuple[str, ...]) -> tuple[Tensor | None, ...]:
    """Those of q, k, v and of each of the call's tensors, from the order of the operator."""
    dq, dk, dv, *others = gradients
    by_name = dict(zip((name for name in DIFFERENTIABLE if name in names), others, strict=True))
    return dq, dk, dv, *(by_name.get(name) for name in names)


class AttentionFunction(torch.autograd.Function):
    """out, lse and extra of the operator, with first derivatives, where someone wants to see the operator."""

    @staticmethod
    def forward(
        ctx: Any,
        slots: str,
        features: str,
        sizes: Sequence[int],
        scalars: Sequence[int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        asked, kept = features, operators.keeping_residual(features, slots, q.dtype, not q.is_cpu)
        if q.is_cuda and type(q) in _PLAIN_TYPES:  # has data: no tracer's
            operators.refuse_without_backward(q, k, v, tensors, slots, features, sizes)
        if kept is not None:
            features = kept[0]
        with _AutoDispatchBelowAutograd():
            out, lse, extra = operators.attention(q, k, v, tensors, slots, features, sizes, scalars)
        if kept is not None:
            slots, tensors = kept[1], (*tensors, extra[0])
            if not operators.returns_residual(asked):
                extra = extra[1:]
        ctx.save_for_backward(q, k, v, *tensors, out, lse)  # as EagerFunction, which a checkpoint may have run
        ctx.set_materialize_grads(False)
        ctx.call = (slots, features, sizes, scalars)
        if extra:
            ctx.mark_non_differentiable(*extra)
        return (out, lse, *extra)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        q, k, v, *tensors, out, lse = ctx.saved_tensors
        before = (None,) * len(ctx.call)
        if dout is None:
            if dlse is None:
                return (*before, None, None, None, *(None for _ in tensors))
            dout = torch.zeros_like(out)
        dq, dk, dv, others = operators.attention_backward(dout, dlse, out, lse, q, k, v, tensors, *ctx.call)
        return (*before, *by_tensor((dq, dk, dv, *others), names_of(ctx.call[0])))


class _FirstDerivatives(torch.autograd.Function):
    """The backward where its own graph is asked for (create_graph=True): computed, and refused if differentiated."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        with _AutoDispatchBelowAutograd():
            dq, dk, dv, others = operators.attention_backward(*arguments)
        return (dq, dk, dv, *others)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            "attention_backward: got a derivative of a gradient (double backward); want first derivatives only"
        )


def needs_grad(tensors: Sequence[Tensor | None]) -> bool:
    return any([x is not None and x.requires_grad for x in tensors])


def refuse_missing_gradients(q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], slots: str) -> None:
    """NotImplementedError for a tensor that requires grad where there is none."""
    names = names_of(slots)
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.requires_grad and name not in DIFFERENTIABLE:
            raise NotImplementedError(
                f"{name}: got a tensor that requires grad; want one that does not: it has no gradient"
            )
    paged = next((name for name in names if name.startswith("page_")), None)
    if paged is not None:
        name = next(
            (name for name, x in zip(("q", "k", "v", *names), (q, k, v, *tensors), strict=True) if x.requires_grad), "q"
        )
        raise NotImplementedError(
            f"{name}: got a tensor that requires grad, with {paged}; want none that does: a page may belong to several "
            "sequences, so paged keys have no backward"
        )


def refuse_out_with_gradients(out: Tensor | None) -> None:
    if out is not None:
        raise NotImplementedError(
            "out: got a tensor to write into while gradients are recorded; want out=None, or torch.no_grad()"
        )


def _refuse_tangents(tensors: tuple[Tensor, ...]) -> None:
    if any([forward_ad.unpack_dual(x).tangent is not None for x in tensors]):
        raise NotImplementedError("attention: got a tangent (forward-mode AD, jvp); want a gradient by torch.autograd")


def records(q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], slots: str) -> bool:
    """Whether autograd records a call with these. Raises NotImplementedError for a derivative that there is none of."""
    if forward_ad._current_level >= 0:
        _refuse_tangents((q, k, v, *tensors))
    if not is_recorded(q, k, v, tensors):
        return False
    if tensors:
        refuse_missing_gradients(q, k, v, tensors, slots)
    return True


def _attention_autograd(
    keyset: DispatchKeySet,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    slots: str,
    features: str,
    sizes: Sequence[int],
    scalars: Sequence[int],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    plain = keyset.raw_repr() == _PLAIN
    if not records(q, k, v, tensors, slots):
        if plain:
            return operators.attention_on_device(q, k, v, tensors, slots, features, sizes, scalars)
        with _AutoDispatchBelowAutograd():
            return operators.attention(q, k, v, tensors, slots, features, sizes, scalars)
    if plain:
        call = operators.signature_of(q, k, v, tensors, slots, features, sizes)
        recorded = recorded_call(call, call.threads, True)
        out, lse, *extra = apply_eagerly(recorded, tuple(scalars), q, k, v, *tensors)
        return out, lse, extra
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "attention: got a gradient by torch.func (grad, vjp, jacrev, ...); want one by torch.autograd"
        )
    out, lse, *extra = AttentionFunction.apply(slots, features, sizes, scalars, q, k, v, *tensors)
    return out, lse, extra


def _attention_out_autograd(
    keyset: DispatchKeySet,
    out: Tensor,
    lse: Tensor,
    extra: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    *call: Any,
) -> None:
    if torch.is_grad_enabled() and needs_grad((out, q, k, v, *tensors)):
        refuse_out_with_gradients(out)
    if keyset.raw_repr() == _PLAIN:
        operators.attention_out_on_device(out, lse, extra, q, k, v, tensors, *call)
        return
    with _AutoDispatchBelowAutograd():
        operators.attention_out(out, lse, extra, q, k, v, tensors, *call)


def _attention_backward_autograd(
    keyset: DispatchKeySet, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    tensors = (*arguments[:7], *arguments[7])
    if torch.is_grad_enabled() and needs_grad(tensors):
        dq, dk, dv, *others = _FirstDerivatives.apply(arguments, *tensors)
        return dq, dk, dv, others
    if keyset.raw_repr() == _PLAIN:
        return operators.attention_backward_on_device(*arguments)
    with _AutoDispatchBelowAutograd():
        return operators.attention_backward(*arguments)


def lowered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast treats scaled_dot_product_attention: every floating type but fp64, and those of 8 bits."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype.itemsize in (2, 4) else tensor


def _attention_autocast(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], slots: str, *call: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """q, k, v, k2 and v2 in autocast's dtype; sinks and slopes stay fp32, as their slots want them."""
    dtype = torch.get_autocast_dtype(q.device.type)
    tensors = [
        lowered(x, dtype) if name in ("k2", "v2") else x for name, x in zip(names_of(slots), tensors, strict=True)
    ]
    with _ExcludeDispatchKeyGuard(_AUTOCAST):
        return operators.attention(lowered(q, dtype), lowered(k, dtype), lowered(v, dtype), tensors, slots, *call)


def _folded(tensor: Tensor, in_dim: int | None, size: int) -> Tensor:
    """(size, batch, ...) as (size · batch, ...); a view where strides allow it."""
    tensor = tensor.expand(size, *tensor.shape) if in_dim is None else tensor.movedim(in_dim, 0)
    return tensor.flatten(0, 1)


def _attention_vmap(
    info: Any,
    in_dims: tuple[Any, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    slots: str,
    features: str,
    *call: Any,
) -> tuple[Any, Any]:
    """The mapped dimension becomes part of the batch, which changes nothing where no tensor is per sequence."""
    names = names_of(slots)
    shared = all(
        name == "sink" or (name == "alibi_slopes" and x.dim() == 1) for name, x in zip(names, tensors, strict=True)
    )
    if not shared or "dropout=" in features or any(d is not None for d in in_dims[3]):
        raise NotImplementedError(
            f"vmap: got slots ({slots}) and features ({features}); want dense q, k, v, no dropout, and nothing else "
            "mapped or per sequence"
        )
    q, k, v = (_folded(x, d, info.batch_size) for x, d in zip((q, k, v), in_dims[:3], strict=True))
    out, lse, extra = operators.attention(q, k, v, tensors, slots, features, *call)
    shape = (info.batch_size, -1)
    return (
        (out.unflatten(0, shape), lse.unflatten(0, shape), [x.unflatten(0, shape) for x in extra]),
        (0, 0, [0 for _ in extra]),
    )


def _attention_backward_vmap(info: Any, in_dims: Any, *_: Any) -> Any:
    raise NotImplementedError("vmap: got attention_backward; want a loop over the gradients")


def _attention_out_vmap(info: Any, in_dims: Any, *_: Any) -> Any:
    raise NotImplementedError("vmap: got out=; want out=None")


LIBRARY.impl("attention", _attention_autograd, "Autograd", with_keyset=True)
LIBRARY.impl("attention_out", _attention_out_autograd, "Autograd", with_keyset=True)
LIBRARY.impl("attention_backward", _attention_backward_autograd, "Autograd", with_keyset=True)
LIBRARY.impl("attention", _attention_autocast, "AutocastCPU")
LIBRARY.impl("attention", _attention_autocast, "AutocastCUDA")
torch.library.register_vmap("tessera::attention", _attention_vmap, lib=LIBRARY)
torch.library.register_vmap("tessera::attention_out", _attention_out_vmap, lib=LIBRARY)
torch.library.register_vmap("tessera::attention_backward", _attention_backward_vmap, lib=LIBRARY)
