# SPDX-License-Identifier: Apache-2.0
"""Rows of 8 bits and their descales."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, NamedTuple

from .. import _core
from .._arguments import longest
from .._checks import renamed, shown, whole
from .._libraries import common_library, dtype_name, is_compiling, library_of, refuse_gradient, untraced
from ..operations import run_problem
from .descales import packed

Array = Any
Shape = tuple[int, ...]
Grain = Literal["head", "token"] | int


class Quantized(NamedTuple):
    """What `quantize` gives.

    values: e4m3, e5m2 or int8, as x. descale: fp32, by which they are multiplied. mean: fp32 (b, heads, dim) of what
    was taken away from every row, or None. saturated: int64 (1), elements out of range, or None.
    """

    values: Array
    descale: Array
    mean: Array | None = None
    saturated: Array | None = None


@lru_cache(maxsize=512)
def _problem(
    shape: Shape,
    dtype: str,
    to: str,
    batch: int,
    longest_row: int,
    heads_kv: int,
    seqused: bool,
    descale: Grain,
    flags: tuple[bool, bool, bool, bool],
) -> _core.Problem:
    rows: dict[str, Any] = {"seqlen_q": shape[1]}
    if len(shape) == 3:
        rows = {"seqlen_q": longest_row, "q_layout": "varlen", "total_q": shape[0]}
    names = ("smooth", "hadamard", "given_descales", "counts_saturated")
    return _core.Problem(
        "quantize",
        batch=batch,
        **rows,
        heads_q=shape[-2],
        heads_kv=heads_kv,
        head_dim_qk=shape[-1],
        q_type=dtype,
        o_type=to,
        seqused_q=seqused,
        descale=descale,
        **dict(zip(names, flags, strict=True)),
    )


# What the core calls the arguments of `quantize`.
_SLOTS = {
    "x_descale": "given",
    "q_type": "x",
    "head_dim_qk": "x",
    "heads_q": "x",
    "cu_seqlens_q": "cu_seqlens",
    "seqused_q": "seqused",
    "seqlen_q": "max_seqlen",
    "quantization.block": "descale",
}
_TYPES = ("e4m3", "e5m2", "int8")


def _type_of(to: Any) -> str:
    if isinstance(to, str) and to in _TYPES:
        return to
    try:
        name = dtype_name(to, "to")
    except (TypeError, ValueError):
        name = ""
    if name not in _TYPES:
        raise ValueError(f"to: got {to!r}; want 'e4m3', 'e5m2' or 'int8'")
    return name


@untraced
def quantize(
    x: Array,
    *,
    to: Any = "e4m3",
    descale: Grain = "head",
    heads_kv: int | None = None,
    smooth: bool = False,
    hadamard: bool = False,
    seed: int = 0,
    given: Array | None = None,
    saturated: bool = False,
    cu_seqlens: Array | None = None,
    max_seqlen: int | None = None,
    seqused: Array | None = None,
    threads: int = 0,
) -> Quantized:
    """Rows x in 8 bits: round(x / descale), where a descale brings the largest magnitude of its elements to the end of
    the range.

    x: (b, s, heads, d), or (tokens, heads, d) with int32 `cu_seqlens` (b + 1), in fp32, fp16 or bf16; `seqused` int32
    (b): rows in use. to: "e4m3", "e5m2" or "int8", or such a dtype. numpy's arrays of e4m3 and e5m2 are those of
    ml_dtypes.

    descale: which elements share one. "head": those of a key head in a sequence, fp32 (b, heads_kv), where heads are
    heads_kv (default: all) times a group that shares; N: blocks of N rows of a head, (b, heads, ceil(s / N)); "token":
    (b, heads, s) or (heads, tokens). `given`: descales of that shape to be used instead.

    smooth: without the mean over the sequence's rows, which is returned. hadamard: rows are rotated first, by signs
    that `seed` draws and a Hadamard matrix of the largest power of two that divides d: q and k rotated alike have the
    same products, and outliers are spread over the row. saturated: count elements out of range too.

    A group of zeros has a descale of 1. NaN and ∞ are no magnitudes. ∞ becomes the largest number, out of range. NaN
    stays NaN, which is not counted; in int8 it becomes 0, out of range.

    Raises as `attention` does; ValueError for torch tensors that require grad.

    Source: FP8: Micikevicius et al. 2022 (arXiv:2209.05433); smoothing of K: Zhang et al. 2024, SageAttention
    (arXiv:2410.02367); rotations: Shah et al. 2024, FlashAttention-3 (arXiv:2407.08608).
    """
    named = {"x": x, "cu_seqlens": cu_seqlens, "seqused": seqused, "given": given}
    library = common_library([(name, array) for name, array in named.items() if array is not None])
    refuse_gradient("quantize", "has no gradient: `attention` with quantization= has", x=x)
    shape = tuple(x.shape)
    rank = 4 if cu_seqlens is None else 3
    if len(shape) != rank:
        want = "(tokens, heads, dim)" if rank == 3 else "(batch, seqlen, heads, dim), or cu_seqlens"
        raise ValueError(f"x: got {len(shape)} dimensions, shape {shape}; want {want}")
    to = _type_of(to)
    seed = whole("seed", seed)
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed: got {seed}; want 0 to below 2^64")
    batch = shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    most = 0 if cu_seqlens is None else longest("cu_seqlens", cu_seqlens, max_seqlen) or shape[0]
    kv = shape[-2] if heads_kv is None else whole("heads_kv", heads_kv)
    flags = (bool(smooth), bool(hadamard), given is not None, bool(saturated))
    with renamed(_SLOTS):
        problem = _problem(shape, dtype_name(x.dtype, "x"), to, batch, most, kv, seqused is not None, descale, flags)
    made = {"x_quantized": library.empty(shape, to, x)}
    if given is None:
        made["x_descale"] = library.empty(_descale_shape(shape, batch, kv, descale, most), "fp32", x)
    if smooth:
        made["x_mean"] = library.empty((batch, *shape[-2:]), "fp32", x)
    if saturated:
        made["saturated"] = library.empty((1,), "int64", x)
    read = {"x": x, "cu_seqlens_q": cu_seqlens, "seqused_q": seqused, "x_descale": packed(given)}
    arrays = {**{name: array for name, array in read.items() if array is not None}, **made}
    with renamed(_SLOTS):
        run_problem(library, problem, threads, tuple(arrays), tuple(arrays.values()), x, (seed, 0))
    done = {name: library.finish(array, x) for name, array in made.items()}
    return Quantized(done["x_quantized"], done.get("x_descale", given), done.get("x_mean"), done.get("saturated"))


def _descale_shape(shape: Shape, batch: int, heads_kv: int, descale: Grain, longest_row: int) -> Shape:
    """`longest_row`: of packed sequences."""
    packed = len(shape) == 3
    if descale == "head":
        return (batch, heads_kv)
    if descale == "token":
        return (shape[1], shape[0]) if packed else (batch, shape[2], shape[1])
    return (batch, shape[-2], -(-(longest_row if packed else shape[1]) // whole("descale", descale)))


def dequantize(
    values: Array,
    descale: Array,
    *,
    grain: Grain = "head",
    mean: Array | None = None,
    cu_seqlens: Array | None = None,
) -> Array:
    """The fp32 numbers that rows of 8 bits stand for: values · descale + mean, of torch tensors or numpy's arrays.

    `grain`: the `descale` that `quantize` was given. Of blocks and tokens, pages are sequences. Packed rows behind the
    last sequence hold anything.

    Raises ValueError for shapes and dtypes that do not belong together, TypeError for what is no array.
    """
    step = _check_dequantize(values, descale, grain, mean, cu_seqlens)
    torch = _torch_of(values)
    rows = values.float() if torch else values.astype("float32")
    heads = values.shape[-2]
    if cu_seqlens is None:
        if grain == "head":
            factors = descale[:, _heads_of(torch, values, heads, descale.shape[1])][:, None]
        elif grain == "token":
            factors = descale.swapaxes(1, 2)
        else:
            factors = descale[:, :, _count(torch, values, values.shape[1]) // step].swapaxes(1, 2)
        shift = None if mean is None else mean[:, None]
    elif cu_seqlens.shape[0] == 1:  # all rows are behind the last sequence
        return rows
    else:
        places = _sequences(torch, cu_seqlens, _count(torch, values, values.shape[0]))
        if grain == "head":
            factors = descale[places][:, _heads_of(torch, values, heads, descale.shape[1])]
        elif grain == "token":
            factors = descale.swapaxes(0, 1)
        else:
            blocks = (_count(torch, values, values.shape[0]) - cu_seqlens[places]) // step
            factors = descale[places, :, blocks.clip(0, descale.shape[2] - 1)]
        shift = None if mean is None else mean[places]
    rows = rows * factors[..., None]
    return rows if shift is None else rows + shift


def _check_dequantize(values: Array, descale: Array, grain: Grain, mean: Array | None, cu_seqlens: Array | None) -> int:
    """Rows that share a descale where `grain` is their number, else 1."""
    for name, array in (("values", values), ("descale", descale), ("mean", mean), ("cu_seqlens", cu_seqlens)):
        if array is not None:
            library_of(array, name)
    shape, given = tuple(values.shape), tuple(descale.shape)
    rank = 4 if cu_seqlens is None else 3
    if len(shape) != rank:
        want = "(tokens, heads, dim)" if rank == 3 else "(batch, seqlen, heads, dim), or cu_seqlens"
        raise ValueError(f"values: got {shown(values)}; want {want}")
    if _dtype_name(values.dtype) not in _TYPES:
        raise ValueError(f"values: got {shown(values)}; want e4m3, e5m2 or int8")
    step = 1 if isinstance(grain, str) else whole("grain", grain)
    if step < 1 or (isinstance(grain, str) and grain not in ("head", "token")):
        raise ValueError(f"grain: got {grain!r}; want 'head', 'token' or a number of rows")
    heads = shape[-2]
    batch = shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if grain == "head":
        shared = given[1] if len(given) == 2 and given[1] and heads % given[1] == 0 else heads
        want_shape: Shape = (batch, shared)
    elif cu_seqlens is None or grain == "token":
        want_shape = _descale_shape(shape, batch, heads, grain, 0)
    else:
        want_shape = (batch, heads, max(given[2], 1) if len(given) == 3 else 1)
    for name, array, want_its in (("descale", descale, want_shape), ("mean", mean, (batch, heads, shape[-1]))):
        if array is not None and (tuple(array.shape) != want_its or _dtype_name(array.dtype) != "fp32"):
            raise ValueError(f"{name}: got {shown(array)}; want fp32 {want_its}")
    return step


def _dtype_name(dtype: Any) -> str:
    """A compiler warns of an lru_cache that it traces."""
    return dtype_name.__wrapped__(dtype) if is_compiling() else dtype_name(dtype)


def _torch_of(values: Array) -> Any:
    """torch, or None for numpy."""
    if type(values).__module__.partition(".")[0] == "torch":
        import torch

        return torch
    return None


def _count(torch: Any, like: Array, count: int) -> Array:
    if torch:
        return torch.arange(count, device=like.device)
    import numpy

    return numpy.arange(count)


def _heads_of(torch: Any, like: Array, heads: int, heads_kv: int) -> Array:
    return _count(torch, like, heads) // (heads // heads_kv)


def _sequences(torch: Any, cu_seqlens: Array, tokens: Array) -> Array:
    """The sequence of each token; tokens behind the last one count as its."""
    if torch:
        return torch.searchsorted(cu_seqlens[1:].long(), tokens, right=True).clamp(max=cu_seqlens.shape[0] - 2)
    import numpy

    return numpy.minimum(numpy.searchsorted(cu_seqlens[1:], tokens, side="right"), cu_seqlens.shape[0] - 2)
