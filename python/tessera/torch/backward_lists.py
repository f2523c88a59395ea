# SPDX-License-Identifier: Apache-2.0
"""Backward lists that a forward makes of its own tile masses."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._arguments import Call, parse
from .._execute import BackwardInputs
from .._features import Features
from ..attention import attention
from ..values import KeySource, Tiles
from .arguments import autocast, check_tensors
from .autograd import is_recorded, refuse_out_with_gradients
from .gradients import gradients, refuse_missing
from .operators import keeping_residual


class Asked(NamedTuple):
    """call: without tensors, and without the list of the backward, whose tiles are of `block`. named: the keywords."""

    call: Call
    named: dict[str, Any]
    block: tuple[int, int]


def attend(q: Tensor, k: Any, v: Tensor | None, out: Tensor | None, named: dict[str, Any]) -> Any:
    """`attention(q, k, v, **named)`, where `tiles.backward` is a share of the mass.

    Without a gradient to record it is that call without a list of the backward. Raises NotImplementedError for keys in
    a `KeySource`, dropout, and gradients that `attention` does not have; also under torch.compile.
    """
    tiles: Tiles = named["tiles"]
    if torch.compiler.is_compiling():
        raise NotImplementedError("tiles.backward: got a number under torch.compile; want a list")
    if isinstance(k, KeySource) or v is None:
        raise NotImplementedError("k: got a KeySource with a number as tiles.backward; want dense or packed keys")
    if named["dropout"] or named["quantization"] is not None:
        raise NotImplementedError("tiles.backward: got a number beside dropout or quantization; want a list")
    second = named["k2"]
    q, k, v, *lowered = autocast(q, k, v, *(second[:2] if isinstance(second, KeySource) else ()))
    if lowered:
        named = {**named, "k2": second._replace(k=lowered[0], v=lowered[1])}
    block = tiles.block or (tiles.forward.block if tiles.forward is not None else (64, 64))
    call = parse(q, k, v, **{**named, "return_residual": False, "tiles": Tiles(tiles.forward, block=block)})
    check_tensors(call, q, k, v, out)
    if not is_recorded(q, k, v, call.tensors):
        return attention(q, k, v, out=out, **{**named, "tiles": tiles._replace(backward=None)})
    refuse_missing(call, q, k, v)
    refuse_out_with_gradients(out)
    if named["return_residual"]:
        raise NotImplementedError("return_residual: got True with a number as tiles.backward; want False")
    result, lse = ByMasses.apply(Asked(call._replace(tensors=()), named, block), q, k, v, *call.tensors)
    return (result, lse) if named["return_lse"] else result


class ByMasses(torch.autograd.Function):
    """The forward's output and LSE; its list is on the context, as a bit mask, beside the tensors of any backward."""

    @staticmethod
    def forward(ctx: Any, asked: Asked, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        call, named, block = asked
        tiles: Tiles = named["tiles"]
        kept = keeping_residual(call.features, "", q.dtype, not q.is_cpu)
        told = {**named, "return_lse": True, "return_residual": kept is not None}
        told["tiles"] = Tiles(forward=tiles.forward, mass="mean", block=block)
        out, lse, *extra = attention(q, k, v, **told)
        bits = heaviest_bits(extra[-1], float(tiles.backward))
        ctx.save_for_backward(q, k, v, out, lse, *tensors, bits, *extra[:-1])
        ctx.set_materialize_grads(False)
        features, slots = (call.features, ()) if kept is None else (kept[0], ("o_residual",))
        ctx.call = call._replace(features=_with_list(features), slots=(*call.slots, "bwd_tile_bits", *slots))
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * (4 + len(tensors))
        dout = torch.zeros_like(out) if dout is None else dout
        call = ctx.call._replace(tensors=tuple(tensors))
        dq, dk, dv, *others = gradients(call, BackwardInputs(q, k, v, out, lse, dout, dlse))
        return None, dq, dk, dv, *others


@lru_cache(maxsize=256)
def _with_list(features: Features) -> Features:
    return features.with_fields(bwd_list="bitmask")


def heaviest_bits(mass: Tensor, dropped: float) -> Tensor:
    """uint32 (B, H, query blocks, words): all tiles of a row but the lightest ones whose masses together stay below
    `dropped` of the row's. mass: fp32 (B, H, query blocks, key blocks).

    A mass that is not finite keeps its tile and counts for nothing. A tile without mass, which has no gradient, is left
    out. Nothing waits for a GPU.
    """
    known = torch.where(mass.isfinite(), mass, 0.0).double()
    light, order = known.sort(dim=-1, stable=True)
    # In units of 2^-52 of a row's mass: sums of integers are the same in any order. Under use_deterministic_algorithms
    # older versions of torch (2.4 is supported) refuse a cumsum of floats on a GPU.
    shares = (light * (2.0**52 / known.sum(-1, keepdim=True).clamp_min(1e-60))).long()
    kept = (shares.cumsum(-1) >= int(dropped * 2**52)) & (light > 0)
    mask = torch.zeros_like(kept).scatter(-1, order, kept) | ~mass.isfinite()
    words = -(-mask.shape[-1] // 32)
    mask = torch.nn.functional.pad(mask, (0, words * 32 - mask.shape[-1])).unflatten(-1, (words, 32))
    values = (mask.long() << torch.arange(32, device=mask.device)).sum(-1)
    return values.to(torch.int32).view(torch.uint32)
