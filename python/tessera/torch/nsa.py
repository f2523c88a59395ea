# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention's module; gradients of its pooling and gates by themselves, where it is no single node
(nsa_function): under modes of torch. Graphs of torch.compile have the operators of nsa_operators instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# As modules: torch keeps the classes below to the very end, and through a function of theirs every cached plan.
from .. import native_sparse, tiles
from ..native_sparse import gates as nsa_gates
from ..native_sparse import operations as nsa_operations
from .gradients import first_derivatives_only
from .nsa_operators import nsa_gate as gate_operator
from .nsa_operators import nsa_pool as pool_operator
from .nsa_operators import nsa_select as select_operator


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        k_projection: Tensor | None,
        v_projection: Tensor | None,
        cu_seqlens_k: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(k, v, k_projection, v_projection, cu_seqlens_k)
        ctx.options = options
        made = nsa_operations.nsa_pool(
            k, v, k_projection=k_projection, v_projection=v_projection, cu_seqlens_k=cu_seqlens_k, **options
        )
        if cu_seqlens_k is not None:
            ctx.mark_non_differentiable(made[2])
        return made

    @staticmethod
    @first_derivatives_only("nsa")
    def backward(ctx: Any, dk_pooled: Tensor, dv_pooled: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        k, v, k_projection, v_projection, cu_seqlens_k = ctx.saved_tensors
        gradients = nsa_operations.nsa_pool_backward(
            dk_pooled.contiguous(),
            dv_pooled.contiguous(),
            k,
            v,
            k_projection=k_projection,
            v_projection=v_projection,
            cu_seqlens_k=cu_seqlens_k,
            **ctx.options,
        )
        if k_projection is None:
            return (*gradients, None, None, None, None)
        dk, dv, dk_projection, dv_projection = gradients
        return dk, dv, dk_projection.to(k_projection.dtype), dv_projection.to(v_projection.dtype), None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        compressed: Tensor,
        selected: Tensor,
        window: Tensor,
        q: Tensor | None,
        gate_weight: Tensor | None,
        gates: Tensor | None,
        cu_seqlens: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        branches = (compressed, selected, window)
        ctx.is_mean = gate_weight is None and gates is None
        if not ctx.is_mean:
            ctx.save_for_backward(*branches, q, gate_weight, gates, cu_seqlens)
        ctx.options = options
        return nsa_gates.nsa_gate(branches, q=q, gate_weight=gate_weight, gates=gates, cu_seqlens=cu_seqlens, **options)

    @staticmethod
    @first_derivatives_only("nsa")
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_mean:  # one gradient for all branches, as nsa_gate_backward rounds each
            third = dout.contiguous() * (1 / nsa_gates.BRANCHES)
            return (third,) * nsa_gates.BRANCHES + (None,) * 5
        compressed, selected, window, q, gate_weight, gates, cu_seqlens = ctx.saved_tensors
        made = nsa_gates.nsa_gate_backward(
            dout.contiguous(),
            (compressed, selected, window),
            q=q,
            gate_weight=gate_weight,
            gates=gates,
            cu_seqlens=cu_seqlens,
            **ctx.options,
        )
        dbranches = made[0].unbind(0)
        if gate_weight is not None:
            return (*dbranches, made[1], made[2].to(gate_weight.dtype), None, None, None)
        return (*dbranches, None, None, made[1] if gates is not None else None, None, None)


def wants_operators(*arrays: Any) -> bool:
    """Whether nsa_pool and nsa_gate of this file are to be called: a graph is made, or a gradient of any of the arrays,
    None for what is not given, will be asked for."""
    if torch.compiler.is_compiling():
        return True
    return torch.is_grad_enabled() and any(getattr(array, "requires_grad", False) for array in arrays)


def nsa_pool(
    k: Tensor,
    v: Tensor,
    *,
    k_projection: Tensor | None,
    v_projection: Tensor | None,
    cu_seqlens_k: Tensor | None,
    **options: Any,
) -> tuple[Tensor, ...]:
    if torch.compiler.is_compiling():
        call = (options["max_seqlen_k"], options["length"], options["stride"], options["threads"])
        return pool_operator(k, v, k_projection, v_projection, cu_seqlens_k, *call)
    return _Pool.apply(k, v, k_projection, v_projection, cu_seqlens_k, options)


def nsa_gate(
    branches: tuple[Tensor, Tensor, Tensor],
    *,
    q: Tensor | None,
    gate_weight: Tensor | None,
    gates: Tensor | None,
    cu_seqlens: Tensor | None,
    **options: Any,
) -> Tensor:
    if torch.compiler.is_compiling():
        call = (options["max_seqlen"], options["threads"])
        return gate_operator(*branches, q, gate_weight, gates, cu_seqlens, *call)
    return _Gate.apply(*branches, q, gate_weight, gates, cu_seqlens, options)


def nsa_select(
    q: Tensor, k_pooled: Tensor, options: tuple[Any, ...], cu_seqlens: Tensor | None, max_seqlen: int | None
) -> tuple[Tensor, ...]:
    """Counts and indices of both lists, in a graph. `options` in the order of the operator."""
    return select_operator(q.detach(), k_pooled.detach(), cu_seqlens, max_seqlen, *options)


class NativeSparseAttention(torch.nn.Module):
    """`tessera.nsa` with gates of its own, for heads of q (hq) and of k and v (hkv).

    gate_weight (hq, 3, d) begins at 0, where every gate is 1/2. project: k_projection (hkv, d, d) and v_projection
    (hkv, dv, dv), which begin as identities. preset, recompute, deterministic and **options as for `tessera.nsa`.

    forward(q, k, v, cu_seqlens=None, max_seqlen=None, tiles=None, compressed_tiles=None) gives its result. Raises as it
    does.
    """

    def __init__(
        self,
        heads_q: int,
        heads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        preset: str = "strict",
        causal: bool = True,
        project: bool = False,
        recompute: bool | None = None,
        deterministic: bool = False,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        native_sparse.options_of(preset, options)  # raises for those that do not fit
        self.preset, self.causal, self.recompute, self.deterministic = preset, causal, recompute, deterministic
        self._given = options
        made = {"device": device, "dtype": dtype}
        self.gate_weight = torch.nn.Parameter(torch.zeros(heads_q, nsa_gates.BRANCHES, head_dim, **made))
        self.k_projection: torch.nn.Parameter | None = None
        self.v_projection: torch.nn.Parameter | None = None
        if project:
            dims = {"k_projection": head_dim, "v_projection": head_dim if head_dim_v is None else head_dim_v}
            for name, dim in dims.items():
                setattr(self, name, torch.nn.Parameter(torch.eye(dim, **made).repeat(heads_kv, 1, 1)))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        tiles: tiles.TileList | None = None,
        compressed_tiles: tiles.TileList | None = None,
    ) -> Tensor:
        return native_sparse.nsa(
            q,
            k,
            v,
            preset=self.preset,  # type: ignore[arg-type]
            causal=self.causal,
            gate_weight=self.gate_weight,
            k_projection=self.k_projection,
            v_projection=self.v_projection,
            tiles=tiles,
            compressed_tiles=compressed_tiles,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            recompute=self.recompute,
            deterministic=self.deterministic,
            **self._given,
        )
