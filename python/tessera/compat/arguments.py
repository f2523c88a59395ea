# SPDX-License-Identifier: Apache-2.0
"""What the flash-attn interfaces share: windows, head dims that need padding, refusals, and the library of an array."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NoReturn

from tessera._arrays import CPU, device_of, is_torch

__all__ = [
    "CPU",
    "Array",
    "Band",
    "array_module",
    "device_of",
    "empty",
    "forward_only",
    "is_torch",
    "pad_head_dim",
    "refuse",
    "split_wish",
    "unpack",
    "visible_band",
]

Array = Any
Band = tuple["int | None", "int | None"]


def array_module(like: Array) -> tuple[Any, dict[str, Any]]:
    """The module whose functions make arrays where `like` is, and the keywords that they want for it.

    torch, cupy, or numpy, which stands for every library on the CPU.
    """
    if is_torch(like):
        import torch

        return torch, {"device": like.device}
    if type(like).__module__.partition(".")[0] == "cupy":
        return importlib.import_module("cupy"), {}
    import numpy

    return numpy, {}


def refuse(argument: str, got: Any, want: str, error: type[Exception] = NotImplementedError) -> NoReturn:
    """Raises `error` with the text that every refusal of Tessera has."""
    shape = getattr(got, "shape", None)
    text = repr(got) if shape is None else f"an array of shape {tuple(shape)}"
    raise error(f"{argument}: got {text}; want {want}")


def visible_band(causal: bool, window_size: Any) -> tuple[bool, Band | None]:
    """(causal, band) for :func:`tessera.attention` from flash-attn 2's and 3's arguments, where −1 is unbounded.

    `causal` closes the right end at the query's own position and keeps the left one.
    """
    left, right = window_size
    if causal:
        return (True, None) if left < 0 else (False, (int(left), 0))
    if left < 0 and right < 0:
        return False, None
    return False, (None if left < 0 else int(left), None if right < 0 else int(right))


def pad_head_dim(array: Array) -> Array:
    """`array` with zeros after its last dimension up to the next multiple of 8: a copy, differentiable for torch."""
    missing = -array.shape[-1] % 8
    if missing == 0:
        return array
    if is_torch(array):
        import torch

        return torch.nn.functional.pad(array, (0, missing))
    module, _ = array_module(array)
    if not isinstance(array, module.ndarray):
        refuse("q", array, "a last dimension that is a multiple of 8, or a torch, cupy or numpy array")
    padded = module.zeros((*array.shape[:-1], array.shape[-1] + missing), array.dtype)
    padded[..., :-missing] = array
    return padded


def unpack(packed: Array, axis: int) -> tuple[Array, ...]:
    """Views along `axis` of a packed tensor. For torch their gradients come back as one tensor, stacked once."""
    if is_torch(packed):
        return packed.unbind(axis)
    before = (slice(None),) * axis
    return tuple(packed[(*before, i)] for i in range(packed.shape[axis]))


def forward_only(name: str, inputs: tuple[Array | None, ...], call: Callable[[], Any]) -> Any:
    """``call()``, which has no gradient. Where torch inputs require one, the result's backward refuses, naming `name`.

    So the forward runs without torch.no_grad(), as it does in flash-attn, and no gradient is silently zero.
    """
    if is_torch(inputs[0]):
        import torch

        requiring = [x for x in inputs if x is not None and x.requires_grad]
        if requiring and torch.is_grad_enabled():
            from .no_gradient import without_gradient

            with torch.no_grad():
                result = call()
            return without_gradient(name, result, requiring)
    return call()


def split_wish(num_splits: int) -> str:
    """`num_splits` as a wish: 0 leaves the choice to the plan."""
    return f"splits={num_splits}" if num_splits > 0 else ""


def empty(like: Array) -> Array:
    """An array of shape (0,) in the library and dtype of `like`."""
    if is_torch(like):
        return like.new_empty((0,))
    return array_module(like)[0].empty((0,), like.dtype)
