# SPDX-License-Identifier: Apache-2.0
"""Autograd around a schedule: its forward, and its backward from what the forward left."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..torch.gradients import first_derivatives_only
from .partial import Asked, Result, Upstream
from .ulysses import Schedule, Ulysses


class ContextParallelFunction(torch.autograd.Function):
    """(out, lse) of a rank's rows, with first derivatives of q, k, v and the sinks."""

    @staticmethod
    def forward(
        ctx: Any, schedule: Schedule | Ulysses, asked: Asked, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.detach() for x in (q, k, v))
        result = schedule.forward(asked, q, k, v)
        kept = result.kept or (q, k, v, result.out, result.lse, result.residual)
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        ctx.dtypes = k.dtype, v.dtype
        ctx.schedule, ctx.asked = schedule, asked
        return result.out, result.lse

    @staticmethod
    @first_derivatives_only("attention_backward")
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        kept = ctx.saved_tensors
        if dout is None:  # the others wait for this rank even so
            if dlse is None:
                raise RuntimeError("context parallel backward: got no gradient; want one of out or lse on every rank")
            like, v = kept[0], kept[2]
            dout = like.new_zeros((*dlse.transpose(-1, -2).shape, v.shape[-1]))
        dout = dout.contiguous()  # sums have gradients whose rows are all one
        dlse = None if dlse is None else dlse.contiguous()
        if isinstance(ctx.schedule, Ulysses):
            dq, dk, dv, dsinks = ctx.schedule.backward(ctx.asked, dout, dlse, kept)
        else:
            q, k, v, out, lse, residual = kept
            given = Upstream(q, dout, out, residual, lse, dlse)
            dq, dk, dv, dsinks = ctx.schedule.backward(ctx.asked, given, k, v)
        return None, None, dq, dk.to(ctx.dtypes[0]), dv.to(ctx.dtypes[1]), dsinks


def run(schedule: Schedule | Ulysses, asked: Asked, q: Tensor, k: Tensor, v: Tensor) -> Result:
    """The result without a residual, recorded by autograd."""
    return Result(*ContextParallelFunction.apply(schedule, asked, q, k, v, asked.sinks))
