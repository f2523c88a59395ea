# SPDX-License-Identifier: Apache-2.0
"""What the tests of CUDA tensors share: to the GPU and back, and calls during which nobody may wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import tessera
import torch
from torch import Tensor

CUDA = torch.device("cuda", 0)


def on_gpu(x: Any) -> Any:
    """Tensors, and what holds tensors, as copies on the GPU; the rest as it is."""
    if isinstance(x, Tensor):
        return x.to(CUDA, copy=True)
    if isinstance(x, tessera.TileList):
        arrays = {name.removeprefix("tile_"): array.to(CUDA, copy=True) for name, array in x.arrays()}
        return tessera.TileList(form=x.form, block=x.block, **arrays)
    if isinstance(x, tessera.KeySource | tessera.Offsets):
        return type(x)(*map(on_gpu, x))
    return x


def on_gpu_and_back() -> SimpleNamespace:
    """In place of the package for problems on the CPU: their calls are computed on the GPU, and results come back."""

    def attention(*tensors: Any, **options: Any) -> tuple[Tensor, ...]:
        out = tessera.attention(*map(on_gpu, tensors), **{key: on_gpu(x) for key, x in options.items()})
        assert all(x.device == CUDA for x in out)
        return tuple(x.cpu() for x in out)

    return SimpleNamespace(
        attention=attention,
        TileList=tessera.TileList,
        KeySource=tessera.KeySource,
        Offsets=tessera.Offsets,
        dropout_keep=tessera.dropout_keep,
    )


@contextmanager
def nobody_waits() -> Iterator[None]:
    """An error where torch would wait for the GPU, for a length's sake for instance.

    Kernels must have been loaded before, because loading one may wait.
    """
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(run: Callable[[], None]) -> Callable[[], None]:
    """What replays a CUDA graph of what a function queues; the function runs once before, which loads its kernels."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def half(*shape: int, seed: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Normal numbers, drawn on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(name: str, gpu: Tensor, cpu: Tensor) -> None:
    """Of the same inputs of a half type: outputs within 2 roundings of each other's weights and result, LSEs of fp32.

    Both sum in fp32; the GPU's kernels round probabilities to the half type before they meet v, which the CPU's do not,
    and both round the result.
    """
    assert gpu.device == CUDA and gpu.shape == cpu.shape and gpu.dtype == cpu.dtype, f"{name}: {gpu.shape} {gpu.dtype}"
    got, want = gpu.cpu().float(), cpu.float()
    assert torch.equal(got == -torch.inf, want == -torch.inf), f"{name}: -inf elsewhere"
    assert not got.isnan().any(), f"{name}: NaN"
    finite = want.isfinite()
    if not finite.any():
        return
    got, want = got[finite], want[finite]
    size = want.abs().max().item()
    bound = 1e-5 * (1 + size) if cpu.dtype == torch.float32 else 2 * torch.finfo(cpu.dtype).eps * (0.5 + size)
    error = (got - want).abs().max().item()
    assert error <= bound, f"{name}: error {error:.3g}; want at most {bound:.3g}"
