# SPDX-License-Identifier: Apache-2.0
"""Calls whose score or mask is a Python function.

No operator can carry one, so they run beside the operators: eagerly, on the oracle (cpu.reference), with first
derivatives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _execute
from .._arguments import Call
from .._features import with_lse
from .gradients import gradients
from .operators import empty_outputs, keeping_residual


class OracleFunction(torch.autograd.Function):
    """out, lse and what else the call asks for. A gradient through a score needs its attribute `derivative`."""

    @staticmethod
    def forward(ctx: Any, call: Call, out: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Any:
        asked = with_lse(call.features)
        kept = keeping_residual(asked, "", q.dtype, False)
        features = asked if kept is None else kept[0]
        outputs = empty_outputs(features, call.slots, call.sizes, q, k, v, tensors)
        if out is not None:
            outputs[0] = out
            ctx.mark_dirty(out)
        _execute.run_forward(call._replace(features=features, tensors=tensors), q, k, v, tuple(outputs))
        if kept is not None:
            call = call._replace(features=features, slots=(*call.slots, "o_residual"))
            tensors = (*tensors, outputs[2])
            if "residual" not in asked.fields:  # nobody but the backward has asked for it
                del outputs[2]
        ctx.save_for_backward(q, k, v, outputs[0], outputs[1], *tensors)
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.mark_non_differentiable(*outputs[2:])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        call: Call = ctx.call._replace(tensors=tuple(tensors))
        return (None, None, *gradients(call, _execute.BackwardInputs(q, k, v, out, lse, dout, dlse)))
