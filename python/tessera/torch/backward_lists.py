# SPDX-License-Identifier: Apache-2.0
"""Backward lists that a forward makes of its own tile masses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention import attention, attention_backward
from ..tiles import TileList
from ..values import KeySource, Tiles
from .autograd import refuse_out_with_gradients


def attend(q: Tensor, k: Any, v: Tensor | None, out: Tensor | None, named: dict[str, Any]) -> Any:
    """`attention(q, k, v, **named)`, where `tiles.backward` is a share of the mass.

    Without a gradient to record it is that call without a list of the backward. Raises NotImplementedError for keys in
    a `KeySource`, dropout, and gradients of other tensors than q, k, v; also under torch.compile.
    """
    tiles: Tiles = named["tiles"]
    if torch.compiler.is_compiling():
        raise NotImplementedError("tiles.backward: got a number under torch.compile; want a list")
    if isinstance(k, KeySource) or v is None:
        raise NotImplementedError("k: got a KeySource with a number as tiles.backward; want dense or packed keys")
    for name in ("sinks", "k2"):
        given = named[name]
        tensors = (given.k, given.v) if isinstance(given, KeySource) else (given,)
        if any(isinstance(x, Tensor) and x.requires_grad for x in tensors):
            raise NotImplementedError(f"{name}: got a tensor that requires grad; want tiles.backward as a list for it")
    if named["dropout"] or named["quantization"] is not None:
        raise NotImplementedError("tiles.backward: got a number beside dropout or quantization; want a list")
    if not torch.is_grad_enabled() or not (q.requires_grad or k.requires_grad or v.requires_grad):
        return attention(q, k, v, out=out, **{**named, "tiles": tiles._replace(backward=None)})
    refuse_out_with_gradients(out)
    if named["return_residual"]:
        raise NotImplementedError("return_residual: got True with a number as tiles.backward; want False")
    result, lse = ByMasses.apply(named, q, k, v)
    return (result, lse) if named["return_lse"] else result


class ByMasses(torch.autograd.Function):
    """The forward's output and LSE; its list is on the context, as a bit mask, beside the tensors of any backward."""

    @staticmethod
    def forward(ctx: Any, named: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        tiles: Tiles = named["tiles"]
        block = tiles.block or (tiles.forward.block if tiles.forward is not None else (64, 64))
        residual = q.element_size() == 2 and named["keep_residual"]
        told = {**named, "return_lse": True, "return_residual": residual}
        told["tiles"] = Tiles(forward=tiles.forward, mass="mean", block=block)
        out, lse, *extra = attention(q, k, v, **told)
        bits = heaviest_bits(extra[-1], float(tiles.backward))
        ctx.save_for_backward(q, k, v, out, lse, bits, *extra[:-1])
        ctx.set_materialize_grads(False)
        ctx.call = named, block, tiles.forward
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, bits, *residual = ctx.saved_tensors
        if dout is None and dlse is None:
            return None, None, None, None
        named, block, forward = ctx.call
        told = {name: value for name, value in named.items() if name not in ("return_lse", "return_residual")}
        listed = TileList(bits=bits, form="bitmask", block=block)
        told["tiles"] = Tiles(forward=forward, backward=listed)
        dout = torch.zeros_like(out) if dout is None else dout
        more = {"dlse": dlse, "residual": residual[0] if residual else None}
        dq, dk, dv = attention_backward(dout, q, k, v, out, lse, **more, **told)
        return None, dq, dk, dv


def heaviest_bits(mass: Tensor, dropped: float) -> Tensor:
    """uint32 (B, H, query blocks, words): all tiles of a row but the lightest ones whose masses together stay below
    `dropped` of the row's. mass: fp32 (B, H, query blocks, key blocks).

    A mass that is not finite keeps its tile and counts for nothing. A tile without mass, which has no gradient, is left
    out. Nothing waits for a GPU.
    """
    known = torch.where(mass.isfinite(), mass, 0.0).double()
    light, order = known.sort(dim=-1, stable=True)
    kept = (light.cumsum(-1) >= dropped * known.sum(-1, keepdim=True)) & (light > 0)
    mask = torch.zeros_like(kept).scatter(-1, order, kept) | ~mass.isfinite()
    words = -(-mask.shape[-1] // 32)
    mask = torch.nn.functional.pad(mask, (0, words * 32 - mask.shape[-1])).unflatten(-1, (words, 32))
    values = (mask.long() << torch.arange(32, device=mask.device)).sum(-1)
    return values.to(torch.int32).view(torch.uint32)
