# SPDX-License-Identifier: Apache-2.0
"""Tensors of all tokens to a rank's rows, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .shards import Layout
from .wire import Team


def own_rows(layout: Layout, rank: int, tensor: Tensor, dim: int) -> Tensor:
    if tensor.shape[dim] != layout.tokens:
        raise ValueError(
            f"tensor: got {tensor.shape[dim]} rows in dimension {dim}; want the {layout.tokens} of {layout}"
        )
    return tensor.index_select(dim, layout.on(tensor.device, "index", rank))


def collected(team: Team, layout: Layout, tensor: Tensor, dim: int) -> Tensor:
    rows = layout.rows(team.rank)
    if tensor.shape[dim] != rows:
        raise ValueError(
            f"tensor: got {tensor.shape[dim]} rows in dimension {dim}; want this rank's {rows} of {layout}"
        )
    return _Collected.apply(team, layout, tensor, dim)


class _Collected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, team: Team, layout: Layout, tensor: Tensor, dim: int) -> Tensor:
        ctx.told = team, layout, dim
        counts = [layout.rows(rank) for rank in range(layout.ranks)]
        given = tensor.detach().movedim(dim, 0)
        padded = given.new_zeros((max(counts), *given.shape[1:]))
        padded[: counts[team.rank]] = given
        parts = team.gather(padded, "the collection of a tensor")
        whole = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        return whole.index_select(0, layout.on(tensor.device, "inverse")).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        team, layout, dim = ctx.told
        return None, None, own_rows(layout, team.rank, grad, dim), None
