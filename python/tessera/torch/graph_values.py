# SPDX-License-Identifier: Apache-2.0
"""The values of an expression graph on whole tensors of positions, by torch's operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..expressions.graph import Node, needed

_TYPES = {"f": torch.float64, "i": torch.int64, "b": torch.bool}


def _by_safe_divisor(of: Callable[[Tensor, Tensor], Tensor], by_minus_one: Callable[[Tensor], Tensor]) -> Callable:
    """Integers as on the CPU: by 0 the result is 0; −1 apart, since the smallest integer by it does not fit."""

    def divided(a: Tensor, b: Tensor) -> Tensor:
        special = (b == 0) | (b == -1)
        found = of(a, torch.where(special, 1, b))
        return torch.where(special, torch.where(b == 0, 0, by_minus_one(a)), found)

    return divided


_INTEGERS: dict[str, Callable[..., Tensor]] = {
    "not": torch.bitwise_not,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "shl": lambda a, b: a << (b & 63),
    "shr": lambda a, b: a >> (b & 63),
    "div": _by_safe_divisor(lambda a, b: torch.div(a, b, rounding_mode="floor"), torch.neg),
    "mod": _by_safe_divisor(torch.remainder, torch.zeros_like),
    "float": lambda x: x.to(torch.float64),
    "int": lambda x: x.to(torch.int64),
}
_FLOATS: dict[str, Callable[..., Tensor]] = {"div": torch.div, "mod": torch.remainder}
for _name in ("exp", "log", "sqrt", "tanh", "sin", "cos", "floor", "ceil", "trunc", "pow"):
    _FLOATS[_name] = getattr(torch, _name)
_FLOATS["int"] = lambda x: torch.nan_to_num(x, nan=0.0).to(torch.int64)
_BOTH: dict[str, Callable[..., Tensor]] = {
    name: getattr(torch, name) for name in ("neg", "abs", "add", "sub", "mul", "lt", "le", "eq", "ne")
} | {"min": torch.minimum, "max": torch.maximum, "select": torch.where}


def values(results: Sequence[Node], inputs: Mapping[str, Tensor], arrays: Sequence[Tensor]) -> dict[int, Tensor]:
    """The values of `results` by their indices: fp64, int64 or bool, each of the shape that what it reads broadcasts
    to.

    inputs: score fp64; batch, head, query and key int64. arrays: captured tensors by their numbers. Any number of nodes
    may lie between: a value goes when the last node that reads it has been computed.
    """
    device = inputs["key"].device
    found: dict[int, Tensor] = {}
    nodes = needed(*results)
    readers = Counter([arg.index for node in nodes for arg in node.args] + [result.index for result in results])
    for node in nodes:
        operands = [found[arg.index] for arg in node.args]
        if node.is_constant:
            found[node.index] = torch.tensor(node.data, dtype=_TYPES[node.type], device=device)
        elif node.op == "load":
            element = arrays[node.data][inside(arrays[node.data], operands)]
            found[node.index] = element.to(_TYPES[node.type])
        elif node.op in inputs:
            found[node.index] = inputs[node.op]
        else:
            own = _FLOATS if node.args[0].type == "f" else _INTEGERS
            found[node.index] = (own.get(node.op) or _BOTH[node.op])(*operands)
        for arg in node.args:
            readers[arg.index] -= 1
            if not readers[arg.index]:
                del found[arg.index]
    return found


def inside(array: Tensor, indices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The indices, those outside moved to the nearest inside."""
    return tuple([index.clamp(0, size - 1) for index, size in zip(indices, array.shape, strict=True)])
