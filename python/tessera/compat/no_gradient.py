# SPDX-License-Identifier: Apache-2.0
"""Results of torch calls that have no gradient, but whose inputs require one: the refusal comes at the backward."""

from __future__ import annotations

from typing import Any

import torch


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, out: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise NotImplementedError(
            f"{ctx.name}: got a backward; want torch.no_grad(): a cache is written in place, a page may belong to "
            "several sequences, and neither has a gradient"
        )


def without_gradient(name: str, result: Any, inputs: list[torch.Tensor]) -> Any:
    """`result`, out or (out, lse), as the output of a node over `inputs` whose backward raises NotImplementedError."""
    if isinstance(result, tuple):
        return tuple(x if x is None else _NoGradient.apply(name, x, *inputs) for x in result)
    return _NoGradient.apply(name, result, *inputs)
