# SPDX-License-Identifier: Apache-2.0
"""Array libraries: where an array lies, how memory for results is made, and who takes a call over.

No library is imported before one of its arrays comes. A library with operators of its own is registered by the folder
of this package that has them, which the first of its arrays brings in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, wraps
from importlib.util import find_spec
from typing import Any, TypeVar, cast

from . import _core

Array = Any
Shape = tuple[int, ...]
Function = TypeVar("Function", bound=Callable[..., Any])

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
LIBRARY_NAMES = {name: library_name for library_name, name in _NAMES.items()}


@lru_cache(maxsize=256)
def dtype_name(dtype: Any, argument: str = "dtype") -> str:
    """Tessera's name ("bf16") of a dtype of numpy, torch or jax, of a scalar type, or of either's name.

    Raises ValueError naming `argument` for any other.
    """
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = name.rpartition(".")[2]
    if name in LIBRARY_NAMES:
        return name
    if name not in _NAMES:
        raise ValueError(f"{argument}: got {name}; want one of {', '.join(_NAMES)}")
    return _NAMES[name]


def numpy_dtype(name: str) -> Any:
    """numpy's dtype of Tessera's name; bf16 and fp8 need ml_dtypes."""
    import numpy

    if name in ("bf16", "e4m3", "e5m2"):
        import ml_dtypes

        return numpy.dtype(getattr(ml_dtypes, LIBRARY_NAMES[name]))
    return numpy.dtype(LIBRARY_NAMES[name])


class Library:
    """What the package asks of one library. As it stands here: one without GPUs, gradients and operators of its own."""

    name: str
    # Functions that take over calls with arrays of the library, named as in `tessera.torch.hooks`; None: no one does.
    operators: Any = None

    def device(self, array: Array) -> int:
        """Index of the GPU that holds `array`, or CPU."""
        return CPU

    def stream(self, device: int) -> int | None:
        """Handle of the CUDA stream that is current on GPU `device`; None where the library does not tell."""
        return None

    def on(self, array: Array) -> AbstractContextManager[Any]:
        """Where the library itself makes arrays meanwhile: on the device of `array`."""
        return nullcontext()

    def empty(self, shape: Shape, dtype: str, like: Array) -> Array:
        """Uninitialised memory that a run may write, where `like` is; `dtype` is Tessera's name."""
        raise NotImplementedError

    def finish(self, array: Array, like: Array) -> Array:
        """What `empty` gave, as the caller will see it."""
        return array

    def stack(self, parts: tuple[Array, ...]) -> Array:
        """The parts as one array with a dimension more, the first."""
        import numpy

        return numpy.stack(parts)

    def to_numpy(self, array: Array) -> Any:
        """The array as numpy's: a view where the library shares memory, a copy from a GPU."""
        import numpy

        return numpy.asarray(array)

    def from_numpy(self, array: Any, like: Array) -> Array:
        """A numpy array of a number type or bool as the library's, where `like` is."""
        return array

    def to_bytes(self, array: Array) -> bytes:
        """The elements in order. Waits for a GPU."""
        return self.to_numpy(array).tobytes()

    def from_bytes(self, data: bytes, shape: Shape, dtype: str, like: Array) -> Array:
        """An array of those bytes, where `like` is; `dtype` is Tessera's name."""
        import numpy

        return self.from_numpy(numpy.frombuffer(bytearray(data), numpy_dtype(dtype)).reshape(shape), like)

    def refuse_gradient(self, name: str, array: Array, operation: str, instead: str) -> None:
        """ValueError for an array whose gradient would be asked for, which `operation` does not have."""

    def draw_seed(self, like: Array) -> Any:
        """A seed of dropout, an integer or an array, from the library's generator."""
        import random

        return random.getrandbits(63)

    def seed_words(self, seed: Array) -> Array:
        """An array of a seed as uint64."""
        return seed


class _Numpy(Library):
    name = "numpy"

    def __init__(self) -> None:
        import numpy

        self._empty = numpy.empty
        self._dtype = lru_cache(maxsize=None)(numpy_dtype)

    def empty(self, shape: Shape, dtype: str, like: Array) -> Array:
        return self._empty(shape, self._dtype(dtype))


def host_library(other: Library | None) -> Library:
    """NumPy; where there is none, `other` if that is torch. Raises ImportError if it is not."""
    if find_spec("numpy") is not None:
        return _Numpy()
    if other is not None and other.name == "torch":
        return other
    raise ImportError("numpy: got none; want NumPy, or a tensor of torch as `like`")


class _Cupy(Library):
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

    def stack(self, parts: tuple[Array, ...]) -> Array:
        with self.on(parts[0]):
            return self._cupy.stack(parts)

    def to_numpy(self, array: Array) -> Any:
        return array.get()

    def from_numpy(self, array: Any, like: Array) -> Array:
        with self.on(like):
            return self._cupy.asarray(array)


class _ArrayApi(Library):
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

    def stack(self, parts: tuple[Array, ...]) -> Array:
        return parts[0].__array_namespace__().stack(parts)

    def from_numpy(self, array: Any, like: Array) -> Array:
        return like.__array_namespace__().asarray(array)


_loaders: dict[str, Callable[[], Library]] = {}
_traces: Callable[[], bool] = bool  # of the library that has a compiler; bool() is False
_run_untraced: Callable[..., Any]  # its too; called only while it traces


def register_loader(name: str, load: Callable[[], Library]) -> None:
    """`load` imports and gives the library whose types' modules begin with `name`; the first array calls it."""
    _loaders[name] = load


def register_tracer(is_compiling: Callable[[], bool], run_untraced: Callable[..., Any]) -> None:
    """`is_compiling`: whether a compiler of the library traces, so that there is no data to look at.

    `run_untraced`: calls a function with arguments, between two graphs.
    """
    global _traces, _run_untraced
    _traces = is_compiling
    _run_untraced = run_untraced


def is_compiling() -> bool:
    """Whether a compiler traces. It sees through an lru_cache, with a warning: then call what the cache wraps."""
    return _traces()


def untraced(function: Function) -> Function:
    """`function`, which calls the core, where no operator of a graph does: a compiler's graph ends before it."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if is_compiling():
            return _run_untraced(function, *arguments, **options)
        return function(*arguments, **options)

    return cast("Function", call)


def _find_library(kind: type) -> Library | None:
    if not (hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__")):
        return None
    roots = {base.__module__.partition(".")[0] for base in kind.__mro__}
    for root, load in _loaders.items():
        if root in roots:
            return load()
    if "numpy" in roots:
        return _Numpy()
    if "cupy" in roots:
        return _Cupy()
    if hasattr(kind, "__array_namespace__"):
        return _ArrayApi(kind.__module__.partition(".")[0])
    return _Numpy()  # anything else that can be read gets numpy arrays back


_MOST_TYPES = 64
_known: dict[type, Library | None] = {}


def library_of_type(kind: type) -> Library | None:
    """The library of arrays of this type, None for what is none. A dict knows them, which torch.compile traces without
    the warning that it has for an lru_cache."""
    try:
        return _known[kind]
    except KeyError:
        found = _find_library(kind)
        if len(_known) < _MOST_TYPES:
            _known[kind] = found
        return found


def library_of(array: Array, argument: str) -> Library:
    """The library of `array`. Raises TypeError naming `argument` for what is no array."""
    library = library_of_type(type(array))
    if library is None:
        kind = type(array)
        want = "an array with shape, dtype and __dlpack__"
        if any(base.__module__.startswith("jax.") and base.__name__ == "Tracer" for base in kind.__mro__):
            want = "an array with memory, or tessera.jax.attention, which jax.jit, grad and vmap trace"
        raise TypeError(f"{argument}: got {kind.__module__}.{kind.__qualname__}; want {want}")
    return library


def device_of(array: Any) -> int:
    """Index of the GPU that holds `array`; CPU for all others, and for what is no array."""
    library = library_of_type(type(array))
    return CPU if library is None else library.device(array)


def common_library(named: Iterable[tuple[str, Array]]) -> Any:
    """The `Library` of q, which k and v share; lengths, pages and lists may be numpy's too.

    `named` are (argument, array), q first. Raises TypeError for an array of another library.
    """
    library = first = None
    for name, array in named:
        other = library_of_type(type(array)) or library_of(array, name)
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
    """ValueError for the first array that would want a gradient where `operation` has none."""
    for name, array in arrays.items():
        library = library_of_type(type(array))
        if library is not None:
            library.refuse_gradient(name, array, operation, instead)
