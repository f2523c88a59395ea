# SPDX-License-Identifier: Apache-2.0
"""The operators ``tessera::nsa_pool``, ``nsa_select`` and ``nsa_gate``, which graphs of torch.compile have; two with a
gradient. An operator returns no argument and no None: what there is none of is a tensor without elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# As modules: torch keeps the kernels below to the very end, and through a function of theirs every cached plan.
from ..native_sparse import gates as nsa_gates
from ..native_sparse import operations as nsa_operations
from . import operators

_POOL = (
    "Tensor k, Tensor v, Tensor? k_projection, Tensor? v_projection, Tensor? cu_seqlens, SymInt? max_seqlen,"
    " int length, int stride, int threads"
)
_GATE = (
    "Tensor compressed, Tensor selected, Tensor window, Tensor? q, Tensor? gate_weight, Tensor? gates,"
    " Tensor? cu_seqlens, SymInt? max_seqlen, int threads"
)
for schema in (
    f"nsa_pool({_POOL}) -> (Tensor k_pooled, Tensor v_pooled, Tensor cu_blocks)",
    f"nsa_pool_backward(Tensor dk_pooled, Tensor dv_pooled, {_POOL})"
    " -> (Tensor dk, Tensor dv, Tensor dk_projection, Tensor dv_projection)",
    f"nsa_gate({_GATE}) -> Tensor",
    f"nsa_gate_backward(Tensor dout, {_GATE}) -> (Tensor dbranches, Tensor dq, Tensor dgates)",
    "nsa_select(Tensor q, Tensor k_pooled, Tensor? cu_seqlens, SymInt? max_seqlen, int length, int stride, int block,"
    " int top, int tile, str heads, str score, str reduce, str visible, int initial, int local, int compressed_top,"
    " int compressed_block, bool causal, float? scale, int threads)"
    " -> (Tensor counts, Tensor indices, Tensor compressed_counts, Tensor compressed_indices)",
):
    operators.LIBRARY.define(schema)

nsa_pool = torch.ops.tessera.nsa_pool.default
nsa_select = torch.ops.tessera.nsa_select.default
nsa_gate = torch.ops.tessera.nsa_gate.default
_pool_backward = torch.ops.tessera.nsa_pool_backward.default
_gate_backward = torch.ops.tessera.nsa_gate_backward.default


def _none(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return like.new_empty(0, dtype=dtype)


def _pool_on_device(
    k: Tensor,
    v: Tensor,
    k_projection: Tensor | None,
    v_projection: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    length: int,
    stride: int,
    threads: int,
) -> tuple[Tensor, ...]:
    made = nsa_operations.nsa_pool(
        k,
        v,
        length=length,
        stride=stride,
        k_projection=k_projection,
        v_projection=v_projection,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_k=max_seqlen,
        threads=threads,
    )
    return made if cu_seqlens is not None else (*made, _none(k, torch.int32))


def _pool_fake(
    k: Tensor, v: Tensor, k_projection: Any, v_projection: Any, cu_seqlens: Tensor | None, most: Any, *call: int
) -> tuple[Tensor, ...]:
    length, stride = call[:2]
    if cu_seqlens is not None:
        rows = k.shape[0] // stride
        shapes = [(rows, *x.shape[1:]) for x in (k, v)]
        return k.new_empty(shapes[0]), v.new_empty(shapes[1]), cu_seqlens.new_empty(cu_seqlens.shape)
    blocks = (k.shape[1] - length + stride) // stride if k.shape[1] >= length else 0
    shapes = [(x.shape[0], blocks, *x.shape[2:]) for x in (k, v)]
    return k.new_empty(shapes[0]), v.new_empty(shapes[1]), _none(k, torch.int32)


def _pool_backward_on_device(
    dk_pooled: Tensor,
    dv_pooled: Tensor,
    k: Tensor,
    v: Tensor,
    k_projection: Tensor | None,
    v_projection: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    length: int,
    stride: int,
    threads: int,
) -> tuple[Tensor, ...]:
    made = nsa_operations.nsa_pool_backward(
        dk_pooled.contiguous(),
        dv_pooled.contiguous(),
        k,
        v,
        length=length,
        stride=stride,
        k_projection=k_projection,
        v_projection=v_projection,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_k=max_seqlen,
        threads=threads,
    )
    return made if k_projection is not None else (*made, _none(k), _none(k))


def _pool_backward_fake(
    dk_pooled: Tensor, dv_pooled: Tensor, k: Tensor, v: Tensor, k_projection: Any, v_projection: Any, *_: Any
) -> tuple[Tensor, ...]:
    matrices = (
        _none(k) if x is None else x.new_empty(x.shape, dtype=torch.float32) for x in (k_projection, v_projection)
    )
    return k.new_empty(k.shape), v.new_empty(v.shape), *matrices


def _gate_on_device(
    compressed: Tensor,
    selected: Tensor,
    window: Tensor,
    q: Tensor | None,
    gate_weight: Tensor | None,
    gates: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    threads: int,
) -> Tensor:
    given = {"q": q, "gate_weight": gate_weight, "gates": gates, "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
    made: Tensor = nsa_gates.nsa_gate((compressed, selected, window), **given, threads=threads)  # type: ignore[arg-type]
    return made


def _gate_fake(compressed: Tensor, *_: Any) -> Tensor:
    return compressed.new_empty(compressed.shape)


def _gate_backward_on_device(
    dout: Tensor,
    compressed: Tensor,
    selected: Tensor,
    window: Tensor,
    q: Tensor | None,
    gate_weight: Tensor | None,
    gates: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    threads: int,
) -> tuple[Tensor, ...]:
    given = {"q": q, "gate_weight": gate_weight, "gates": gates, "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
    made = nsa_gates.nsa_gate_backward(
        dout.contiguous(),
        (compressed, selected, window),
        **given,
        threads=threads,  # type: ignore[arg-type]
    )
    if gate_weight is not None:
        return made
    return made[0], _none(dout), made[1] if gates is not None else _none(dout)


def _gate_backward_fake(
    dout: Tensor, compressed: Tensor, selected: Tensor, window: Tensor, q: Any, gate_weight: Any, gates: Any, *_: Any
) -> tuple[Tensor, ...]:
    dbranches = compressed.new_empty((nsa_gates.BRANCHES, *compressed.shape))
    if gate_weight is not None:
        return dbranches, q.new_empty(q.shape), gate_weight.new_empty(gate_weight.shape, dtype=torch.float32)
    return dbranches, _none(dout), _none(dout) if gates is None else gates.new_empty(gates.shape)


def _select_on_device(
    q: Tensor, k_pooled: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None, *call: Any
) -> tuple[Tensor, ...]:
    names = ("length", "stride", "block", "top", "tile", "heads", "score", "reduce", "visible", "initial", "local")
    others = ("compressed_top", "compressed_block", "causal", "scale", "threads")
    options = dict(zip((*names, *others), call, strict=True))
    made = nsa_operations.nsa_select(
        q,
        k_pooled,
        **options,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
    )
    if options["compressed_top"] == 0:
        return made.counts, made.indices, _none(q, torch.int32), _none(q, torch.int32)
    return tuple(x for tiles in made for x in (tiles.counts, tiles.indices))


def _select_fake(
    q: Tensor, k_pooled: Tensor, cu_seqlens: Tensor | None, max_seqlen: Any, *call: Any
) -> tuple[Tensor, ...]:
    top, tile, heads, compressed_top = call[3], call[4], call[5], call[11]
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    rows = q.shape[1] if cu_seqlens is None else max_seqlen or q.shape[0]
    lists = (batch, q.shape[-2] if heads == "q" else k_pooled.shape[-2], (rows + tile - 1) // tile)
    selected = q.new_empty(lists, dtype=torch.int32), q.new_empty((*lists, top), dtype=torch.int32)
    if compressed_top == 0:
        return *selected, _none(q, torch.int32), _none(q, torch.int32)
    return *selected, torch.empty_like(selected[0]), q.new_empty((*lists, compressed_top), dtype=torch.int32)


def _save_pool(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.call = inputs[5:]
    ctx.mark_non_differentiable(output[2])


def _backward_of_pool(ctx: Any, dk_pooled: Tensor, dv_pooled: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    k, v, k_projection, v_projection, starts = ctx.saved_tensors
    made = _pool_backward(dk_pooled, dv_pooled, k, v, k_projection, v_projection, starts, *ctx.call)
    none = (None,) * (1 + len(ctx.call))
    if k_projection is None:
        return made[0], made[1], None, None, *none
    return made[0], made[1], made[2].to(k_projection.dtype), made[3].to(v_projection.dtype), *none


def _save_gate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.call = inputs[7:]


def _backward_of_gate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    *branches, q, gate_weight, gates, starts = ctx.saved_tensors
    dbranches, dq, dgates = _gate_backward(dout, *branches, q, gate_weight, gates, starts, *ctx.call)
    none = (None,) * (1 + len(ctx.call))
    if gate_weight is not None:
        return *dbranches.unbind(0), dq, dgates.to(gate_weight.dtype), None, *none
    return *dbranches.unbind(0), None, None, None if gates is None else dgates, *none


def _refuse_second(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError("nsa: got a derivative of a gradient (double backward); want first derivatives only")


for name, on_device, fake in (
    ("nsa_pool", _pool_on_device, _pool_fake),
    ("nsa_pool_backward", _pool_backward_on_device, _pool_backward_fake),
    ("nsa_gate", _gate_on_device, _gate_fake),
    ("nsa_gate_backward", _gate_backward_on_device, _gate_backward_fake),
    ("nsa_select", _select_on_device, _select_fake),
):
    for key in ("CPU", "CUDA"):
        operators.LIBRARY.impl(name, on_device, key)
    torch.library.register_fake(f"tessera::{name}", fake, lib=operators.LIBRARY)
for name, backward, save in (("nsa_pool", _backward_of_pool, _save_pool), ("nsa_gate", _backward_of_gate, _save_gate)):
    torch.library.register_autograd(f"tessera::{name}", backward, setup_context=save, lib=operators.LIBRARY)
    torch.library.register_autograd(f"tessera::{name}_backward", _refuse_second, lib=operators.LIBRARY)
