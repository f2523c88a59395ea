# SPDX-License-Identifier: Apache-2.0
"""Gradients of `attention` with quantization=: those of the values that the forward saw, in q's dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..attention import attention_backward
from ..quantization.operands import attend_operands, quantize_operands
from ..quantization.operations import dequantize


class _Quantised(torch.autograd.Function):
    """out and LSE. Rounding to 8 bits counts as the identity (a straight-through estimate: Bengio et al. 2013)."""

    @staticmethod
    def forward(
        ctx: Any,
        attention: Callable[..., Any],
        options: dict[str, Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        operands = quantize_operands(q, k, v, options)
        out, lse = attend_operands(attention, operands, v, {**options, "sinks": sinks, "return_lse": True})
        quantised_v = operands.v
        kept_v = (v, None) if quantised_v is None else (quantised_v.values, quantised_v.descale)
        ctx.save_for_backward(*operands.q[:2], *operands.k[:3], *kept_v, sinks, out, lse)
        ctx.set_materialize_grads(False)
        ctx.options = options
        ctx.dtypes = (q.dtype, k.dtype, v.dtype)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, q_descale, k, k_descale, k_mean, v, v_descale, sinks, out, lse = ctx.saved_tensors
        if dout is None:
            if dlse is None:
                return (None,) * 6
            dout = torch.zeros_like(out)
        options = dict(ctx.options)
        grain, of_q, of_k = options["descale"], options["cu_seqlens_q"], options["cu_seqlens_k"]
        q_type, k_type, v_type = ctx.dtypes
        wide_q = dequantize(q, q_descale, grain=grain, cu_seqlens=of_q).to(q_type)
        wide_k = dequantize(k, k_descale, grain=grain, mean=k_mean, cu_seqlens=of_k).to(k_type)
        wide_v = v if v_descale is None else dequantize(v, v_descale, grain=grain, cu_seqlens=of_k).to(v_type)
        for name in ("quantization", "q_descale", "k_descale", "v_descale", "k_mean", "descale", "out_dtype"):
            options.pop(name)
        options["sinks"] = sinks
        gradients = attention_backward(dout, wide_q, wide_k, wide_v, out, lse, dlse=dlse, **options)
        dsinks = gradients[3] if sinks is not None else None
        return (None, None, *gradients[:3], dsinks)


def attend_quantised(
    attention: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    """Raises NotImplementedError for slopes that require grad."""
    slopes = options["alibi_slopes"]
    if slopes is not None and slopes.requires_grad:
        raise NotImplementedError("alibi_slopes: got a tensor that requires grad; want one that does not")
    out, lse = _Quantised.apply(attention, {**options, "sinks": None}, q, k, v, options["sinks"])
    return (out, lse) if options["return_lse"] else out
