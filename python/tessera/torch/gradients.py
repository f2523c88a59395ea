# SPDX-License-Identifier: Apache-2.0
"""Gradients of calls that run beside the operators: by a list of the forward's masses, of 8 bits, by the oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._arguments import Call
from .._execute import BackwardInputs, backward_outputs, run_backward, shapes_of
from .._libraries import dtype_name
from .autograd import by_tensor, refuse_missing_gradients
from .layouts import with_aligned_rows, with_rows, with_rows_apart
from .operators import DTYPES, backward_features, is_deterministic


def refuse_missing(call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    """NotImplementedError for a tensor that requires grad, or a score of the oracle, where there is no gradient."""
    refuse_missing_gradients(q, k, v, call.tensors, " ".join(call.slots))
    score = call.callables[0]
    if score is not None and not hasattr(score, "derivative"):
        raise NotImplementedError(
            "score: got a Python function without the attribute derivative; want one with it, d new score / d score, "
            "or torch.no_grad(), where no gradient is wanted"
        )


def gradients(call: Call, given: BackwardInputs) -> tuple[Tensor | None, ...]:
    """Of q, k, v and each of the call's tensors, None for those that have none.

    call: of the backward, with the residual of out among its tensors where that is kept. Tensors are copied where they
    lie as no kernel reads them, as those of the operator are, and derivatives of the gradients are refused as its are.
    """
    with torch.no_grad():
        found = _computed(call._replace(features=backward_features(call.features, is_deterministic())), given)
    if torch.is_grad_enabled():
        found = _refusing("attention_backward", found, (*given, *call.tensors))
    return by_tensor(found, call.slots)


def first_derivatives_only(name: str) -> Callable[[Callable[..., tuple[Any, ...]]], Callable[..., tuple[Any, ...]]]:
    """A decorator of a Function's backward: derivatives of what it returns are refused, by an error that names `name`.

    torch's once_differentiable refuses them only where the upstream gradient requires grad, and leaves them out of a
    larger sum otherwise.
    """

    def decorate(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        @functools.wraps(backward)
        def compute(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
            with torch.no_grad():
                found = backward(ctx, *upstream)
            return _refusing(name, found, (*upstream, *ctx.saved_tensors)) if torch.is_grad_enabled() else found

        return compute

    return decorate


def _refusing(name: str, found: tuple[Any, ...], read: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The gradients in a graph that cannot be differentiated, for create_graph=True; `read`: what they depend on."""
    made = [x.requires_grad_() for x in found if x is not None]
    behind = [x for x in read if x is not None and x.requires_grad]
    marked = iter(FirstDerivatives.apply(name, len(made), *made, *behind))
    return tuple(None if x is None else next(marked) for x in found)


def _computed(call: Call, given: BackwardInputs) -> tuple[Tensor, ...]:
    q, k, v, out, lse, dout, dlse = given
    if not q.is_cpu:
        q, k, v = with_rows_apart(q), with_rows_apart(k), with_rows_apart(v)
    wanted = backward_outputs(shapes_of(call, q, k, v), (dtype_name(q.dtype), dtype_name(k.dtype), dtype_name(v.dtype)))
    made = tuple([torch.empty(shape, dtype=DTYPES[dtype], device=q.device) for _, shape, dtype in wanted])
    upstream = with_aligned_rows(dout), None if dlse is None else with_rows(dlse)
    run_backward(call, BackwardInputs(q, k, v, out, lse, *upstream), made)
    return made


class FirstDerivatives(torch.autograd.Function):
    """Gradients where their own graph is asked for (create_graph=True): refused if differentiated.

    name: of what computed them. count: of the gradients; the tensors that they are made of stand behind them.
    """

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.name}: got a derivative of a gradient (double backward); want first derivatives only"
        )
