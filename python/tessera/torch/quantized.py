# SPDX-License-Identifier: Apache-2.0
"""Gradients of `attention` with quantization=: those of the values that the forward saw, in q's, k's and v's dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _features
from .._arguments import parse
from .._execute import BackwardInputs
from .._libraries import dtype_name
from ..attention import compute_forward
from ..quantization.operands import attend_operands, quantize_operands
from ..quantization.operations import dequantize
from .arguments import check_tensors
from .gradients import gradients, refuse_missing
from .layouts import with_rows_apart
from .operators import DTYPES, keeping_residual

_OF_8_BITS = ("quantization", "q_descale", "k_descale", "v_descale", "k_mean", "descale", "out_dtype")


def wants_gradient(*arrays: Any) -> bool:
    """Whether a gradient of any of the arrays, None for what is not given, will be asked for. Those of other libraries
    have none."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arrays)


def _takes_fp32(q: Tensor) -> bool:
    """Whether there are kernels of fp32 operands where q lies."""
    return q.is_cpu


class _Quantised(torch.autograd.Function):
    """out and LSE. Rounding to 8 bits counts as the identity (a straight-through estimate: Bengio et al. 2013).

    `call`: that of the backward, without its tensors, which are inputs of their own, so that autograd notes whether
    they are written to between the passes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        attention: Callable[..., Any],
        call: Any,
        options: dict[str, Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        operands = quantize_operands(q, k, v, options)
        wide = _takes_fp32(q)
        asked = {**options, "return_lse": True, "return_residual": wide and _has_residual(call)}
        out, lse, *residual = attend_operands(attention, operands, v, asked)
        quantised_v = operands.v
        kept_v = (v, None) if quantised_v is None else (quantised_v.values, quantised_v.descale)
        of_out = (out, lse, residual[0] if residual else None) if wide else (None, None, None)
        ctx.save_for_backward(*operands.q[:2], *operands.k[:3], *kept_v, *of_out, *tensors)
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.grain = options["descale"]
        ctx.dtypes = (q.dtype, k.dtype, v.dtype)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, q_descale, k, k_descale, k_mean, v, v_descale, out, lse, residual, *tensors = ctx.saved_tensors
        call = ctx.call._replace(tensors=tuple(tensors))
        if dout is None and dlse is None:
            return (None,) * (6 + len(tensors))
        grain = ctx.grain
        by_slot = dict(zip(call.slots, tensors, strict=True))
        of_q, of_k = by_slot.get("cu_seqlens_q"), by_slot.get("cu_seqlens_k")
        wide_q = dequantize(q, q_descale, grain=grain, cu_seqlens=of_q)
        wide_k = dequantize(k, k_descale, grain=grain, mean=k_mean, cu_seqlens=of_k)
        wide_v = v if v_descale is None else dequantize(v, v_descale, grain=grain, cu_seqlens=of_k)
        if out is None:
            wide_q, wide_k, wide_v = (x.to(its) for x, its in zip((wide_q, wide_k, wide_v), ctx.dtypes, strict=True))
            wide_v = with_rows_apart(wide_v)
            out, lse, *others = compute_forward(
                call._replace(features=_features.with_lse(call.features)), wide_q, wide_k, wide_v
            )
            residual = others[0] if others else None
        dout = torch.zeros_like(out) if dout is None else dout.to(out.dtype)
        if residual is not None:
            call = call._replace(slots=(*call.slots, "o_residual"), tensors=(*tensors, residual))
        dq, dk, dv, *others = gradients(call, BackwardInputs(wide_q, wide_k, wide_v, out, lse, dout, dlse))
        dq, dk, dv = (None if x is None else x.to(its) for x, its in zip((dq, dk, dv), ctx.dtypes, strict=True))
        return (None, None, None, dq, dk, dv, *others)


def _has_residual(call: Any) -> bool:
    return "residual" in call.features.fields


def attend_quantised(
    attention: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    """Raises NotImplementedError for other tensors than q, k, v and sinks that require grad, TypeError for arrays that
    are no tensors."""
    plain = {name: value for name, value in options.items() if name not in _OF_8_BITS}
    plain["return_lse"] = False
    call = parse(q, k, v, **plain)
    check_tensors(call, q, k, v)
    refuse_missing(call, q, k, v)
    kept = keeping_residual(call.features, "", DTYPES[dtype_name(options["out_dtype"])], not _takes_fp32(q))
    if kept is not None:
        call = call._replace(features=kept[0])
    out, lse = _Quantised.apply(attention, call._replace(tensors=()), options, q, k, v, *call.tensors)
    return (out, lse) if options["return_lse"] else out
