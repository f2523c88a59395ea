# SPDX-License-Identifier: Apache-2.0
"""From a call to the operator: what ``tessera.attention`` does with torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import _kept
from .._arguments import Call
from ..expressions.register import traced_by_name
from . import autograd, operators
from .arguments import check_tensors
from .gradients import refuse_missing
from .oracle import OracleFunction


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, options: tuple[Any, ...] | None = None
) -> tuple[Tensor, ...]:
    """Outputs of a call (from ``tessera._arguments.parse``) in the order of ``forward_outputs``.

    `out` takes the first if given; then there must be no gradient to record. `options`: those of ``tessera.attention``
    that the call was made of, for the next one to be found by.

    Raises TypeError for arrays of another library, ValueError for tensors on another device, NotImplementedError for
    gradients that there are none of, and what the plan and its run refuse.
    """
    if (
        out is None
        and call.callables == (None, None)
        and not torch.compiler.is_compiling()
        and autograd.is_plain(q, k, v, call.tensors)
    ):
        computes = _eager(call, q, k, v)
        results = computes(q, k, v, *call.tensors)
        if options is not None and _is_kept(call):
            _kept.ATTENTION.keep(q, k, v, options, computes)
        return results if isinstance(results, tuple) else (results,)
    check_tensors(call, q, k, v, out)
    if "status" in call.slots and torch.compiler.is_compiling():
        raise NotImplementedError("status: got a tensor under torch.compile; want None: no operator declares it")
    if call.callables != (None, None) and not q.is_cpu:
        name = "score" if call.callables[0] is not None else "mask"
        raise NotImplementedError(
            f"{name}: got a Python function for tensors on {q.device}; want a built-in's name, or tensors on cpu"
        )
    out, lse, extra = (
        _by_oracle(call, q, k, v, out) if call.callables != (None, None) else _dispatch(call, q, k, v, out)
    )
    return (out, lse, *extra) if call.features.lse else (out, *extra)


def computes_of(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """What computes calls like this one of q, k, v and its tensors: one result or a tuple. None where operators do."""
    plain = call.callables == (None, None) and not torch.compiler.is_compiling()
    return _eager(call, q, k, v) if plain and autograd.is_plain(q, k, v, call.tensors) else None


def _eager(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """What computes a call of plain tensors, past the operators: a function to its one result or a tuple of them."""
    slots = " ".join(call.slots)
    signature = operators.signature_of(q, k, v, call.tensors, slots, call.features, call.sizes)
    if autograd.records(q, k, v, call.tensors, slots):
        recorded = autograd.recorded_call(signature, signature.threads, call.features.lse)
        return partial(autograd.apply_eagerly, recorded, call.scalars)
    run = operators.forward_run(signature, signature.threads, False)
    return run if call.scalars == _NO_SCALARS else partial(run.with_scalars, call.scalars)


_NO_SCALARS = (0, 0, 0, 0)


def _is_kept(call: Call) -> bool:
    """Whether options say all of a call besides q, k and v: no other tensors, and no seed, which may be drawn."""
    return not call.tensors and call.scalars == _NO_SCALARS and "dropout" not in call.features.fields


def _dispatch(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """By the operators, for whoever wants to see them."""
    seed, offset, batch_offset, head_offset = call.scalars
    arguments = (
        list(call.tensors),
        " ".join(call.slots),
        call.features.text(),
        call.sizes,
        (operators.signed(seed), operators.signed(offset), batch_offset, head_offset),
    )
    if out is None:
        return operators.attention(q, k, v, *arguments)
    made = operators.empty_outputs(call.features, call.slots, call.sizes, q, k, v, call.tensors)
    lse, extra = made[1], made[2:]
    operators.attention_out(out, lse, extra, q, k, v, *arguments)
    return out, lse, extra


def _by_oracle(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    if torch.is_grad_enabled() and autograd.needs_grad((q, k, v, *call.tensors)):
        refuse_missing(call, q, k, v)
        autograd.refuse_out_with_gradients(out)
    out, lse, *extra = OracleFunction.apply(call, out, q, k, v, *call.tensors)
    return out, lse, tuple(extra)


def trains(score: Any, extras: Any) -> bool:
    """Whether a score, traced from Python, reads a tensor whose gradient is asked for. No argument is checked yet."""
    return (
        torch.is_grad_enabled()
        and isinstance(score, str)
        and isinstance(extras, (tuple, list))
        and any([isinstance(x, Tensor) and x.requires_grad for x in extras])
        and traced_by_name(score) is not None
    )


def attend_and_train(q: Tensor, k: Any, v: Tensor | None, out: Tensor | None, options: tuple[Any, ...]) -> Any:
    """What `tessera.attention` of these returns, with gradients of the tensors that its score reads."""
    from .captured import attend

    return attend(q, k, v, out, options)


def attend_by_masses(q: Tensor, k: Any, v: Tensor | None, out: Tensor | None, named: dict[str, Any]) -> Any:
    """What `tessera.attention` of these returns, where a backward's list is to be made of the forward's masses."""
    from .backward_lists import attend

    return attend(q, k, v, out, named)
