# SPDX-License-Identifier: Apache-2.0
"""Arrays of any library: names of dtypes, devices and streams, and results in the library of the argument.

Imports no library by itself.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Protocol

from . import _core

Array = Any
Shape = tuple[int, ...]

CPU = -1  # as a device; a GPU is its index
_DLPACK_CUDA = 2

# Tessera's names and those that numpy, ml_dtypes, torch and jax have for them.
_NAMES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "int8",
    "int32": "int32",
    "int64": "int64",
    "uint8": "uint8",
    "uint32": "uint32",
    "uint64": "uint64",
}
_LIBRARY_NAMES = {name: library_name for library_name, name in _NAMES.items()}


class Library(Protocol):
    """How results are made in one library."""

    name: str

    def device(self, array: Array) -> int:
        """Index of the GPU that holds `array`, or CPU."""
        ...

    def stream(self, device: int) -> int | None:
        """Handle of the CUDA stream that is current on GPU `device`; None where the library does not tell."""
        ...

    def on(self, array: Array) -> AbstractContextManager[Any]:
        """Where the library itself makes arrays meanwhile: on the device of `array`."""
        ...

    def empty(self, shape: Shape, dtype: str, like: Array) -> Array:
        """Uninitialised memory that a run may write, where `like` is; `dtype` is Tessera's name."""
        ...

    def finish(self, array: Array, like: Array) -> Array:
        """What `empty` gave, as the caller will see it."""
        ...


@lru_cache(maxsize=256)
def dtype_name(dtype: Any, argument: str = "dtype") -> str:
    """Tessera's name ("bf16") of a dtype of numpy, torch or jax, of a scalar type, or of either's name.

    Raises ValueError naming `argument` for any other.
    """
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = name.rpartition(".")[2]
    if name in _LIBRARY_NAMES:
        return name
    if name not in _NAMES:
        raise ValueError(f"{argument}: got {name}; want one of {', '.join(_NAMES)}")
    return _NAMES[name]


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def numpy_dtype(name: str) -> Any:
    """numpy's dtype of Tessera's name; bf16 and fp8 need ml_dtypes."""
    import numpy

    if name in ("bf16", "e4m3", "e5m2"):
        import ml_dtypes

        return numpy.dtype(getattr(ml_dtypes, _LIBRARY_NAMES[name]))
    return numpy.dtype(_LIBRARY_NAMES[name])


class _Host:
    """What is the same for libraries without GPUs, or without a word about their streams."""

    def device(self, array: Array) -> int:
        return CPU

    def stream(self, device: int) -> int | None:
        return None

    def on(self, array: Array) -> AbstractContextManager[Any]:
        return nullcontext()


class _Numpy(_Host):
    name = "numpy"

    def __init__(self) -> None:
        import numpy

        self._empty = numpy.empty
        self._dtype = lru_cache(maxsize=None)(numpy_dtype)

    def empty(self, shape: Shape, dtype: str, like: Array) -> Array:
        return self._empty(shape, self._dtype(dtype))

    def finish(self, array: Array, like: Array) -> Array:
        return array


class _Torch:
    name = "torch"

    def __init__(self) -> None:
        import torch

        self._empty = torch.empty
        self._current_stream = torch.cuda.current_stream
        self._dtypes = {name: getattr(torch, its) for name, its in _LIBRARY_NAMES.items() if hasattr(torch, its)}

    def device(self, array: Array) -> int:
        return array.get_device() if array.is_cuda else CPU

    def stream(self, device: int) -> int | None:
        return self._current_stream(device).cuda_stream

    def on(self, array: Array) -> AbstractContextManager[Any]:
        return nullcontext()  # what torch makes of tensors lies where they do

    def empty(self, shape: Shape, dtype: str, like: Array) -> Array:
        return self._empty(shape, dtype=self._dtypes[dtype], device=like.device)

    def finish(self, array: Array, like: Array) -> Array:
        return array


class _Cupy:
    name = "cupy"

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._dtype = lru_cache(maxsize=None)(numpy_dtype)

    def device(self, array: Array) -> int:
        return array.device.id

    def stream(self, device: int) -> int | None:
        return self._cupy.cuda.get_current_stream(device).ptr

    def on(self, array: Array) -> AbstractContextManager[Any]:
        return array.device

    def empty(self, shape: Shape, dtype: str, like: Array) -> Array:
        with self.on(like):
            return self._cupy.empty(shape, self._dtype(dtype))

    def finish(self, array: Array, like: Array) -> Array:
        return array


class _ArrayApi(_Host):
    """jax and every other library of the array API standard: memory of ours, which from_dlpack takes over.

    On a GPU, whose streams the standard does not know, such arrays are ready before a run begins and results before it
    returns.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def device(self, array: Array) -> int:
        kind, index = array.__dlpack_device__()
        return int(index) if kind == _DLPACK_CUDA else CPU

    def empty(self, shape: Shape, dtype: str, like: Array) -> Array:
        return _core.Buffer(shape, dtype, device=self.device(like))

    def finish(self, array: Array, like: Array) -> Array:
        return like.__array_namespace__().from_dlpack(array)


def _find_library(kind: type) -> Library | None:
    if not (hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__")):
        return None
    roots = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if "torch" in roots:
        return _Torch()
    if "numpy" in roots:
        return _Numpy()
    if "cupy" in roots:
        return _Cupy()
    if hasattr(kind, "__array_namespace__"):
        return _ArrayApi(kind.__module__.partition(".")[0])
    return _Numpy()  # anything else that can be read gets numpy arrays back


_library_of_type: Callable[[type], Library | None] = lru_cache(maxsize=64)(_find_library)


def library_of(array: Array, argument: str) -> Library:
    """The library of `array`. Raises TypeError naming `argument` for what is no array."""
    library = _library_of_type(type(array))
    if library is None:
        kind = type(array)
        want = "an array with shape, dtype and __dlpack__"
        if any(base.__module__.startswith("jax.") and base.__name__ == "Tracer" for base in kind.__mro__):
            want = "an array with memory, outside of jax.jit, grad and vmap, or inside of jax.pure_callback"
        raise TypeError(f"{argument}: got {kind.__module__}.{kind.__qualname__}; want {want}")
    return library


def device_of(array: Any) -> int:
    """Index of the GPU that holds `array`; CPU for all others, and for what is no array."""
    library = _library_of_type(type(array))
    return CPU if library is None else library.device(array)


class KeptWorkspaces:
    """Workspaces that a plan keeps between runs, for each stream; of the streams used last, MOST_STREAMS at most.

    A run behind another one on the same stream may use its workspace, one on another stream may not. Streams are told
    apart by the driver's ids: a handle may come back with another stream, and is one for the default streams of all
    threads.
    """

    MOST_STREAMS = 16

    def __init__(self) -> None:
        self._free: OrderedDict[int, list[Array]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, device: int, stream: int) -> list[Array]:
        """Those that no run holds; a run takes one from there and appends it when it is queued. Not kept for a stream
        that is being captured, whose graph needs a workspace of its own, or that cannot be told from others."""
        stream_id = None if _core.is_capturing(device, stream) else _core.stream_id(device, stream)
        if stream_id is None:
            return []
        with self._lock:
            free = self._free.setdefault(stream_id, [])
            self._free.move_to_end(stream_id)
            if len(self._free) > self.MOST_STREAMS:
                self._free.popitem(last=False)
            return free


def run_on_gpu(
    library: Library,
    plan: Any,
    slots: tuple[str, ...],
    arrays: tuple[Array, ...],
    like: Array,
    scalars: Iterable[int] = (),
    callables: Iterable[Any] = (),
    kept: KeptWorkspaces | None = None,
) -> None:
    """Runs a `_core.Plan` of the GPU of `like` on the current stream of its library, with a workspace made there.

    A workspace by the library's own allocator is reused in the order of the stream, and belongs to the graph if one is
    captured. `kept`: the workspaces that a plan keeps.
    """
    device = library.device(like)
    stream = library.stream(device)
    if stream is None:
        plan.run(slots, arrays, *scalars, *callables, wait=True)
        return
    size = plan.workspace_bytes
    free = [] if kept is None or size == 0 else kept.of(device, stream)
    try:
        workspace = free.pop()
    except IndexError:  # none, or another thread has it
        workspace = library.empty((size,), "uint8", like) if size > 0 else None
    plan.run(slots, arrays, *scalars, *callables, stream=stream, workspace=workspace)
    free.append(workspace)  # what follows on the stream comes behind the run


def common_library(named: Iterable[tuple[str, Array]]) -> Any:
    """The `Library` of q, which k and v share; lengths, pages and lists may be numpy's too.

    `named` are (argument, array), q first. Raises TypeError for an array of another library.
    """
    library = first = None
    for name, array in named:
        other = _library_of_type(type(array)) or library_of(array, name)
        if library is None:
            library, first = other, name
        elif other is not library and other.name != library.name and (other.name != "numpy" or name in _VALUES):
            raise TypeError(f"{name}: got an array of {other.name}; want one of {library.name}, as {first} is")
    return library


# Arrays of numbers; all others of a call say where and how long, and are small.
_VALUES = frozenset(
    (
        "k",
        "v",
        "k2",
        "v2",
        "out",
        "lse",
        "dout",
        "dlse",
        "k_cache",
        "v_cache",
        "k_new",
        "v_new",
        "state",
        "initial_state",
    )
)


def refuse_gradient(operation: str, instead: str, **arrays: Array) -> None:
    """ValueError for a torch tensor that requires grad where `operation` has none, and for a view with a lazy sign."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for name, array in arrays.items():
        if not isinstance(array, torch.Tensor):
            continue
        if array.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: got a tensor that requires grad; want one that does not: {operation} {instead}")
        # A compiler cannot trace this, and needs not: before an operator's kernel torch resolves the sign.
        if not torch.compiler.is_compiling() and array.is_neg():
            raise ValueError(f"{name}: got a tensor with a lazy negative sign; want tensor.resolve_neg()")
