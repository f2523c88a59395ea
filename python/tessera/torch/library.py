# SPDX-License-Identifier: Apache-2.0
"""torch as one of the package's array libraries, and the operators that take calls with its tensors over."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import _core
from .._libraries import CPU, LIBRARY_NAMES, Library, Shape, register_tracer
from . import hooks


def _current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


class Torch(Library):
    name = "torch"
    operators = hooks

    def __init__(self) -> None:
        self._empty = torch.empty
        # torch.cuda.current_stream makes an object first, which takes longer than all the rest of a launch.
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)
        self._dtypes = {name: getattr(torch, its) for name, its in LIBRARY_NAMES.items() if hasattr(torch, its)}

    def device(self, array: Tensor) -> int:
        return array.get_device() if array.is_cuda else CPU

    def stream(self, device: int) -> int | None:
        return self._raw_stream(device)

    def on(self, array: Tensor) -> AbstractContextManager[Any]:
        return nullcontext()  # what torch makes of tensors lies where they do

    def empty(self, shape: Shape, dtype: str, like: Tensor) -> Tensor:
        if len(shape) == 1:  # a workspace; half a microsecond sooner than the other
            return like.new_empty_strided(shape, (1,), dtype=self._dtypes[dtype])
        return self._empty(shape, dtype=self._dtypes[dtype], device=like.device)

    def stack(self, parts: tuple[Tensor, ...]) -> Tensor:
        return torch.stack(parts)

    def to_numpy(self, array: Tensor) -> Any:
        import numpy

        return numpy.asarray(array.detach().cpu())

    def from_numpy(self, array: Any, like: Tensor) -> Tensor:
        return torch.from_numpy(array).to(like.device)

    def to_bytes(self, array: Tensor) -> bytes:
        """Without NumPy."""
        host = array.detach().cpu().contiguous()
        return ctypes.string_at(host.data_ptr(), host.nbytes) if host.nbytes else b""

    def from_bytes(self, data: bytes, shape: Shape, dtype: str, like: Tensor | None) -> Tensor:
        """Without NumPy."""
        its = self._dtypes[dtype]
        flat = torch.frombuffer(bytearray(data), dtype=its) if data else torch.empty(0, dtype=its)
        return flat.reshape(shape).to("cpu" if like is None else like.device)

    def refuse_gradient(self, name: str, array: Tensor, operation: str, instead: str) -> None:
        """Refuses a view with a lazy sign too."""
        if array.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: got a tensor that requires grad; want one that does not: {operation} {instead}")
        # A compiler cannot trace this, and needs not: before an operator's kernel torch resolves the sign.
        if not torch.compiler.is_compiling() and array.is_neg():
            raise ValueError(f"{name}: got a tensor with a lazy negative sign; want tensor.resolve_neg()")

    def draw_seed(self, like: Tensor) -> Any:
        """From torch's default generator, so that manual_seed repeats it.

        While torch.compile traces or a CUDA graph is captured it stays a tensor where `like` is, to be drawn anew by
        each call of what is compiled and each replay.
        """
        stays = torch.compiler.is_compiling() or (like.is_cuda and _is_capturing(like.get_device()))
        device = like.device if stays and like.is_cuda else "cpu"
        drawn = torch.randint(0, 1 << 62, (1,), dtype=torch.int64, device=device)
        return drawn if stays else int(drawn)

    def seed_words(self, seed: Tensor) -> Tensor:
        """torch draws int64: the same bits."""
        return seed.view(torch.uint64) if seed.dtype == torch.int64 else seed


LIBRARY = Torch()


@torch.compiler.disable
def _run_untraced(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return function(*arguments, **options)


register_tracer(torch.compiler.is_compiling, _run_untraced)


def _is_capturing(device: int) -> bool:
    """Of the stream that a call with tensors on `device` will use, whichever device is current."""
    return _core.is_capturing(device, _current_stream(device))
