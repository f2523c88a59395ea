# SPDX-License-Identifier: Apache-2.0
"""What the flash-attn interfaces share: windows, head dims that need padding, refusals, and the library of an array."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from tessera._checks import flag, pair, real, rename, shown, whole
from tessera._libraries import CPU, device_of, dtype_name, library_of
from tessera.values import KeySource

__all__ = [
    "CACHE_NAMES",
    "CPU",
    "NAMES",
    "Array",
    "Window",
    "array_module",
    "cap",
    "check_inputs",
    "check_int32",
    "check_shapes",
    "device_of",
    "empty",
    "forward_only",
    "in_pages",
    "is_torch",
    "pad_head_dim",
    "refuse",
    "rename",
    "split_wish",
    "unpack",
    "visible_window",
]

Array = Any
Window = tuple["int | None", "int | None"]


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


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
    raise error(f"{argument}: got {shown(got)}; want {want}")


# What the names of tessera.attention's arguments, and of its problems, are in every version of flash-attn.
NAMES = {
    "window": "window_size",
    "scale": "softmax_scale",
    "q_type": "q",
    "k_type": "k",
    "v_type": "v",
    "heads_q": "heads of q",
    "heads_kv": "heads of k",
    "head_dim_qk": "head_dim of q",
    "head_dim_v": "head_dim of v",
}
# Likewise for flash_attn_with_kvcache, which calls tessera.kv_append too.
CACHE_NAMES = {
    **NAMES,
    "k": "k_cache",
    "v": "v_cache",
    "k_type": "k_cache",
    "v_type": "v_cache",
    "k_new": "k",
    "v_new": "v",
    "seqused_k": "cache_seqlens",
}


def check_inputs(q: Array, k: Array, v: Array, names: tuple[str, str, str] = ("q", "k", "v")) -> None:
    """Refuses what is no array, and dtypes that differ."""
    dtype = getattr(q, "dtype", None)
    if dtype is not None and dtype is getattr(k, "dtype", None) and dtype is getattr(v, "dtype", None):
        return
    check_shapes(q, k, v, names)


def check_shapes(q: Array, k: Array, v: Array, names: tuple[str, str, str] = ("q", "k", "v")) -> None:
    """As check_inputs, and refuses what has no head dim, and one of k that is not q's, which padding would hide."""
    dtypes = []
    for name, array in zip(names, (q, k, v), strict=True):
        library_of(array, name)
        if len(array.shape) not in (3, 4):
            refuse(name, array, "(batch, seqlen, heads, dim) or (tokens, heads, dim)", ValueError)
        dtypes.append(dtype_name(array.dtype, name))
        if dtypes[-1] != dtypes[0]:
            refuse(name, array, f"the dtype of {names[0]}, {dtypes[0]}", ValueError)
    if q.shape[-1] != k.shape[-1]:
        refuse(names[1], k, f"the head dim of {names[0]}, {q.shape[-1]}", ValueError)


def check_int32(name: str, array: Array, dims: str, rank: int) -> None:
    """Refuses all but an int32 array of `rank` dimensions, which `dims` names."""
    library_of(array, name)
    if len(array.shape) != rank or dtype_name(array.dtype, name) != "int32":
        refuse(name, array, f"int32 {dims}", ValueError)


_WINDOW = "(left, right), each an integer, -1 for unbounded"


def cap(softcap: float) -> float:
    """`softcap` as Tessera has it: 0 for none, which flash-attn also writes as a negative number."""
    if type(softcap) is not float:
        softcap = real("softcap", softcap)
    return softcap if softcap > 0.0 else 0.0


def visible_window(causal: bool, window_size: Any) -> tuple[bool, Window | None]:
    """(causal, window) for :func:`tessera.attention` from flash-attn 2's and 3's arguments, where −1 is unbounded.

    `causal` closes the right end at the query's own position and keeps the left one.
    """
    try:
        left, right = window_size
    except (TypeError, ValueError):
        left, right = pair("window_size", window_size, _WINDOW)
    if type(left) is not int or type(right) is not int:
        left, right = (whole("window_size", end, _WINDOW) for end in (left, right))
    if type(causal) is not bool:
        causal = flag("causal", causal)
    if causal:
        return (True, None) if left < 0 else (False, (left, 0))
    if left < 0 and right < 0:
        return False, None
    return False, (None if left < 0 else left, None if right < 0 else right)


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


def unpack(name: str, packed: Array, axis: int, count: int) -> tuple[Array, ...]:
    """`count` views along `axis` of a packed tensor, (…, count, heads, dim). For torch their gradients come back as one
    tensor, stacked once."""
    library_of(packed, name)
    shape = tuple(packed.shape)
    if len(shape) != axis + 3 or shape[axis] != count:
        outer = "tokens" if axis == 1 else "batch, seqlen"
        refuse(name, packed, f"({outer}, {count}, heads, dim)", ValueError)
    if is_torch(packed):
        return packed.unbind(axis)
    before = (slice(None),) * axis
    return tuple(packed[(*before, i)] for i in range(packed.shape[axis]))


def in_pages(k: Array, v: Array, page_table: Array, lengths: dict[str, Any]) -> tuple[KeySource, None, dict[str, Any]]:
    """k, v and `lengths` for :func:`tessera.attention` where k and v are pages."""
    others = {name: value for name, value in lengths.items() if name not in ("seqused_k", "max_seqlen_k")}
    longest = lengths.get("max_seqlen_k")
    return KeySource(k, v, max_seqlen=longest, seqused=lengths["seqused_k"], page_table=page_table), None, others


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
    splits = whole("num_splits", num_splits)
    if splits < 0:
        refuse("num_splits", splits, "0, for the plan's choice, or more", ValueError)
    return f"splits={splits}" if splits > 0 else ""


def empty(like: Array) -> Array:
    """An array of shape (0,) in the library and dtype of `like`."""
    if is_torch(like):
        return like.new_empty((0,))
    return array_module(like)[0].empty((0,), like.dtype)
