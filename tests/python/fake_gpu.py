# SPDX-License-Identifier: Apache-2.0
"""A GPU that is none, for programs that have one process for themselves: tests/fakes in place of libcuda and NVRTC.

Its memory is the host's and its launches are counted instead of run, so that what a call says to the driver and to the
arrays' library can be looked at, not what it computes. Two array libraries live on it: `Array`, of the array API
standard like jax, and `cupy`, which has streams.
"""

from __future__ import annotations

import ctypes
import os
import sys
import types
import typing
from typing import Any

FAKES = os.environ["TESSERA_FAKES"]
os.environ["TESSERA_NVRTC"] = f"{FAKES}/libnvrtc.so.12"


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_uint32),
        ("parameters", ctypes.c_char * 4096),
    )


class _State(ctypes.Structure):
    """FakeCuda of tests/fakes/cuda.h."""

    _fields_ = (
        ("devices", ctypes.c_int),
        ("launches", ctypes.c_int),
        ("last", _Launch),
        ("parameter_bytes", ctypes.c_size_t),
        ("modules", ctypes.c_int),
        ("allocations", ctypes.c_int),
        ("capture", ctypes.c_int),
        ("capture_result", ctypes.c_int),
        ("streams", ctypes.c_ulonglong),
        ("stream_id_result", ctypes.c_int),
        ("launch_result", ctypes.c_int),
        ("module_result", ctypes.c_int),
        ("context_id", ctypes.c_ulonglong),
        ("synchronisations", ctypes.c_int),
    )


# A library of that name is then loaded already when Tessera opens the driver.
_driver = ctypes.CDLL(f"{FAKES}/libcuda.so.1", mode=ctypes.RTLD_LOCAL)
_driver.fake_cuda.restype = ctypes.POINTER(_State)
gpu: _State = _driver.fake_cuda().contents

from tessera import _core  # noqa: E402


class Array:
    """Of the array API standard. `streams`: what __dlpack__ was given, one entry a call."""

    def __init__(self, shape: tuple[int, ...], dtype: str = "float16", device: int = 0) -> None:
        names = {"float16": "fp16", "float32": "fp32"}
        there = device if device < gpu.devices else 0
        self._take(_core.Buffer(shape, names.get(dtype, dtype), device=there), dtype)
        self.number = device

    def _take(self, buffer: Any, dtype: str) -> None:
        self.buffer, self.shape, self.dtype, self.number = buffer, tuple(buffer.shape), dtype, 0
        self.streams: list[Any] = []

    @classmethod
    def from_dlpack(cls, buffer: Any) -> Array:
        taken = cls.__new__(cls)
        taken._take(buffer, buffer.dtype)
        taken.number = buffer.__dlpack_device__()[1]
        return taken

    def __array_namespace__(self) -> Any:
        return Array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.number

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, copy: Any = None) -> Any:
        assert copy is False
        self.streams.append(stream)
        return self.buffer.__dlpack__(max_version=max_version)


class OldArray(Array):
    """Of before DLPack 1.0: __dlpack__ takes a stream and nothing else, and cannot say what is read-only."""

    def __dlpack__(self, *, stream: Any = None) -> Any:  # type: ignore[override]
        self.streams.append(stream)
        return self.buffer.__dlpack__()


class _Stream:
    def __init__(self, handle: int) -> None:
        self.ptr = handle


class _Device:
    """cupy's: an object with an id that makes itself current in a with statement."""

    entered: typing.ClassVar[list[int]] = [0]

    def __init__(self, index: int) -> None:
        self.id = index

    def __enter__(self) -> _Device:
        _Device.entered.append(self.id)
        return self

    def __exit__(self, *_: Any) -> None:
        _Device.entered.pop()


def install_cupy() -> types.ModuleType:
    """A module `cupy`: `made` lists (shape, dtype, device) of what `empty` made, `stream` is the current one."""
    import numpy

    cupy = types.ModuleType("cupy")

    class Ndarray(Array):
        @property
        def device(self) -> _Device:
            return _Device(self.number)

        def __array_namespace__(self) -> Any:
            return cupy

        def astype(self, dtype: Any) -> Ndarray:
            return empty(self.shape, dtype)

    def empty(shape: tuple[int, ...], dtype: Any) -> Ndarray:
        name, device = numpy.dtype(dtype).name, _Device.entered[-1]
        cupy.made.append((shape, name, device))
        return Ndarray(shape, name, device)

    Ndarray.__module__ = "cupy"
    cupy.ndarray, cupy.empty, cupy.zeros, cupy.made, cupy.stream = Ndarray, empty, empty, [], _Stream(0)
    cupy.array = lambda array, dtype: empty(array.shape, dtype)
    cupy.stack = lambda arrays: empty((len(arrays), *arrays[0].shape), arrays[0].dtype)
    cupy.cuda = types.SimpleNamespace(get_current_stream=lambda device: cupy.stream)
    sys.modules["cupy"] = cupy
    return cupy
