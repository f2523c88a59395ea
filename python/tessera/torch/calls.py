# SPDX-License-Identifier: Apache-2.0
"""From a call's arguments to the operator: what ``tessera.attention`` does with torch tensors."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .. import _execute
from .._arguments import Call
from . import autograd, operators

_SIGN_64 = 1 << 63


@lru_cache(maxsize=1024)
def _joined(slots: tuple[str, ...]) -> str:
    return " ".join(slots)


def _signed(word: int) -> int:
    """64 bits as the int64 that an operator's schema can carry."""
    return word - 2 * _SIGN_64 if word >= _SIGN_64 else word


def attention(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(out, lse, extra) of a call, which is what ``tessera._arguments.parse`` makes of the arguments.

    `extra` holds the tile masses and the next list's tensors as far as the call asks for them. The LSE is always there:
    fp32 (batch, heads_q, seqlen_q) or (heads_q, tokens).

    Raises TypeError for arrays of another library, ValueError for tensors on another device, NotImplementedError for
    gradients that there are none of, and what the plan and its run refuse.
    """
    _check_tensors(call, q, k, v, out)
    if call.callables != (None, None):
        return _with_callables(call, q, k, v, out)
    seed, offset, batch_offset, head_offset = call.scalars
    arguments = (
        list(call.tensors),
        _joined(call.slots),
        call.features,
        call.sizes,
        (_signed(seed), _signed(offset), batch_offset, head_offset),
    )
    if out is None:
        return operators.attention(q, k, v, *arguments)
    return out, *operators.attention_out(out, q, k, v, *arguments)


def _check_tensors(call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> None:
    if (
        q.is_cpu
        and isinstance(k, Tensor)
        and k.is_cpu
        and isinstance(v, Tensor)
        and v.is_cpu
        and not call.tensors
        and out is None
    ):
        return
    named = [("q", q), ("k", k), ("v", v), *zip(call.slots, call.tensors, strict=True)]
    if out is not None:
        named.append(("out", out))
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            kind = type(tensor)
            raise TypeError(f"{name}: got {kind.__module__}.{kind.__qualname__}; want a torch.Tensor, as q is one")
        if not tensor.is_cpu and not tensor.is_meta:
            raise ValueError(f"{name}: got a tensor on {tensor.device}; want one on cpu, the only device so far")


def _with_callables(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Python functions for score or mask: run by the oracle outside of any operator, which could not carry them."""
    if torch.is_grad_enabled() and autograd.needs_grad((q, k, v, *call.tensors)):
        name = "score" if call.callables[0] is not None else "mask"
        raise NotImplementedError(
            f"{name}: got a Python function and tensors that require grad; want a built-in's name, or torch.no_grad()"
        )
    features = _execute.with_lse(call.features)
    shapes = tuple([x.shape for x in call.tensors])
    made = _execute.forward_outputs(
        features, call.slots, call.sizes, q.shape, k.shape, v.shape, shapes, operators.dtype_name(q.dtype)
    )
    outputs = [torch.empty(shape, dtype=operators.DTYPES[dtype]) for _, shape, dtype in made]
    if out is not None:
        outputs[0] = out
    _execute.run_forward(
        features, call.slots, call.sizes, call.scalars, q, k, v, call.tensors, tuple(outputs), call.callables
    )
    return outputs[0], outputs[1], outputs[2:]
