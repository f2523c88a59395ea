# SPDX-License-Identifier: Apache-2.0
"""What the operators do above the kernels: autograd, autocast, vmap.

The autograd kernels are registered directly, instead of by ``torch.library.register_autograd``, whose handling of lists
of tensors takes longer than a small attention. They get the dispatcher's key set: when it is that of plain CPU tensors
(no mode, no subclass, no functorch layer), nothing below them wants to see the call, and the kernel is called without
another round through the dispatcher. ``is_plain`` finds this out before the first round, which is then left out too.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _AutoDispatchBelowAutograd, _ExcludeDispatchKeyGuard
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from .._features import Features
from . import operators
from .operators import DIFFERENTIABLE, LIBRARY, names_of

_PLAIN = DispatchKeySet(DispatchKey.CPU).add(DispatchKey.AutogradCPU).raw_repr()
_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU).add(DispatchKey.AutocastCUDA)
_NOT_TENSORS = (None,) * 5  # arguments of AttentionFunction.forward before q
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


def is_plain(q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether these are dense tensors of one CPU or GPU and no mode, subclass, transform, tracer or profiler would see
    the call."""
    place = q.get_device()  # −1: the CPU, or no device at all
    return (
        _is_plain_tensor(q, place)
        and _is_plain_tensor(k, place)
        and _is_plain_tensor(v, place)
        and (not tensors or all([_is_plain_tensor(x, place) for x in tensors]))
        and _keys_of_thread() in _WITHOUT_MODES
        and not torch._C._len_torch_function_stack()
        and not torch.autograd._profiler_enabled()
    )


def _is_plain_tensor(x: Tensor, place: int) -> bool:
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


def is_watched(q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether autograd, in either direction, has to see a call with these."""
    return forward_ad._current_level >= 0 or is_recorded(q, k, v, tensors)


class AttentionFunction(torch.autograd.Function):
    """out (or None where the caller has it), lse and extra, with first derivatives."""

    @staticmethod
    def forward(
        ctx: Any,
        plain: bool,
        slots: str,
        features: str | Features,
        sizes: Sequence[int],
        scalars: Sequence[int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        asked, kept = features, operators.keeping_residual(features, slots, q.dtype, not q.is_cpu)
        if kept is not None:
            features = kept[0]
        if plain:
            out, lse, extra = operators.attention_on_device(q, k, v, tensors, slots, features, sizes, scalars, True)
        else:
            if q.is_cuda and type(q) in _PLAIN_TYPES:  # has data: no tracer's
                operators.forward_route(q, k, v, tensors, slots, features, sizes, True)
            with _AutoDispatchBelowAutograd():
                out, lse, extra = operators.attention(q, k, v, tensors, slots, features, sizes, scalars)
        if kept is not None:
            slots, tensors = kept[1], (*tensors, extra[0])
            if "residual" not in operators.as_features(asked).fields:  # nobody but the backward has asked for it
                extra = extra[1:]
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.set_materialize_grads(False)
        ctx.call = (slots, features, sizes, scalars)
        ctx.plain = plain
        if extra:
            ctx.mark_non_differentiable(*extra)
        return (out, lse, *extra)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        if dout is None:
            if dlse is None:
                return (*_NOT_TENSORS, None, None, None, *(None for _ in tensors))
            dout = torch.zeros_like(out)
        # The operator, if anyone may want to see it: a mode entered since, a graph of this backward.
        plain = ctx.plain and not torch.is_grad_enabled() and type(dout) is Tensor and not _len_torch_dispatch_stack()
        backward = operators.attention_backward_on_device if plain else operators.attention_backward
        slots, features, sizes, scalars = ctx.call
        if not plain and not isinstance(features, str):
            features = features.text()
        dq, dk, dv, others = backward(dout, dlse, out, lse, q, k, v, tensors, slots, features, sizes, scalars)
        if not tensors:
            return (*_NOT_TENSORS, dq, dk, dv)
        gradients = dict(zip((name for name in DIFFERENTIABLE if name in names_of(slots)), others, strict=True))
        return (*_NOT_TENSORS, dq, dk, dv, *(gradients.get(name) for name in names_of(slots)))


# Function.apply looks for functorch before it comes to this, which takes 4 µs that plain tensors need not wait.
_apply_plain = super(torch.autograd.Function, AttentionFunction).apply


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


def _attention_autograd(
    keyset: DispatchKeySet,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    slots: str,
    features: str | Features,
    sizes: Sequence[int],
    scalars: Sequence[int],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    plain = keyset.raw_repr() == _PLAIN
    return attention(plain, q, k, v, tensors, slots, features, sizes, scalars)


def attention(
    plain: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    slots: str,
    features: str | Features,
    sizes: Sequence[int],
    scalars: Sequence[int],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The operator with autograd; `plain`: tensors for which `is_plain`."""
    if forward_ad._current_level >= 0:
        _refuse_tangents((q, k, v, *tensors))
    if is_recorded(q, k, v, tensors):
        if tensors:
            refuse_missing_gradients(q, k, v, tensors, slots)
        if not plain and torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "attention: got a gradient by torch.func (grad, vjp, jacrev, ...); want one by torch.autograd"
            )
        apply = _apply_plain if plain else AttentionFunction.apply
        out, lse, *extra = apply(plain, slots, features, sizes, scalars, q, k, v, *tensors)
        return out, lse, extra
    if plain:
        return operators.attention_on_device(q, k, v, tensors, slots, features, sizes, scalars)
    with _AutoDispatchBelowAutograd():
        return operators.attention(q, k, v, tensors, slots, features, sizes, scalars)


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


def _lowered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast treats scaled_dot_product_attention: every floating type but fp64."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _attention_autocast(
    q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], slots: str, *call: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """q, k, v, k2 and v2 in autocast's dtype; sinks and slopes stay fp32, as their slots want them."""
    dtype = torch.get_autocast_dtype(q.device.type)
    tensors = [
        _lowered(x, dtype) if name in ("k2", "v2") else x for name, x in zip(names_of(slots), tensors, strict=True)
    ]
    with _ExcludeDispatchKeyGuard(_AUTOCAST):
        return operators.attention(_lowered(q, dtype), _lowered(k, dtype), _lowered(v, dtype), tensors, slots, *call)


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
