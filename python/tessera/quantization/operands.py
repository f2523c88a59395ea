# SPDX-License-Identifier: Apache-2.0
"""`attention` that quantises q, k and v by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .._checks import renamed, shown
from .._dropout_seed import drawn_seed, seed_pair
from .._libraries import dtype_name, library_of, untraced
from ..values import KeySource, Tiles
from .operations import Quantized, quantize

Array = Any

# What attention's quantization= quantises, and how K is.
_KINDS = {"fp8": ("e4m3", "e4m3", False), "int8": ("int8", None, True)}


class Operands(NamedTuple):
    """Quantised q, k and v; v is itself where it keeps its dtype."""

    q: Quantized
    k: Quantized
    v: Quantized | None


def quantize_operands(q: Array, k: Array, v: Array, options: dict[str, Any]) -> Operands:
    """As `options` of `attention` ask for."""
    to, v_to, smooth = _KINDS[options["quantization"]]
    heads_kv = k.shape[-2]
    shared = {"descale": options["descale"], "threads": options["threads"]}
    rows_q = {name: options[f"{name}_q"] for name in ("cu_seqlens", "max_seqlen", "seqused")}
    rows_k = {name: options[f"{name}_k"] for name in ("cu_seqlens", "max_seqlen", "seqused")}
    return Operands(
        _quantized("q", q, to=to, heads_kv=heads_kv, **shared, **rows_q),
        _quantized("k", k, to=to, smooth=smooth, **shared, **rows_k),
        None if v_to is None else _quantized("v", v, to=v_to, **shared, **rows_k),
    )


def _quantized(name: str, x: Array, **options: Any) -> Quantized:
    """`quantize`, whose errors name the arguments of `attention`."""
    rows = "q" if name == "q" else "k"
    with renamed({"x": name, **{each: f"{each}_{rows}" for each in ("cu_seqlens", "max_seqlen", "seqused")}}):
        return quantize(x, **options)


def attend_operands(
    attention: Callable[..., Any], operands: Operands, v: Array, options: dict[str, Any], out: Array | None = None
) -> Any:
    """`attention` of quantised operands."""
    q, k, quantised_v = operands
    given = {**options, "quantization": None, "q_descale": q.descale, "k_descale": k.descale, "k_mean": k.mean}
    if quantised_v is not None:
        given["v_descale"] = quantised_v.descale
    return attention(q.values, k.values, v if quantised_v is None else quantised_v.values, out=out, **given)


@untraced
def attend_quantised(
    attention: Callable[..., Any], q: Array, k: Array, v: Array | None, out: Array | None, options: dict[str, Any]
) -> Any:
    """`attention` with quantization=, which `options` name among all others."""
    kind = options["quantization"]
    if kind not in _KINDS:
        raise ValueError(f"quantization: got {kind!r}; want None, 'fp8' or 'int8'")
    if v is None or isinstance(k, KeySource) or options["k2"] is not None:
        raise NotImplementedError(
            "quantization: got keys of a KeySource; want k and v as arrays, or a cache that `quantize` made, with its "
            "descales"
        )
    for name in ("q_descale", "k_descale", "v_descale", "k_mean"):
        if options[name] is not None:
            raise ValueError(f"{name}: got {shown(options[name])} beside quantization={kind!r}; want one of them")
    _check_shapes(q, k, v, options)
    operators = library_of(q, "q").operators
    if operators is not None:
        q, k, v = operators.autocast(q, k, v)
    if options["out_dtype"] is None:
        options = {**options, "out_dtype": dtype_name(q.dtype, "q")}
    if operators is not None and operators.wants_gradient(q, k, v, options["sinks"]):
        tiles = options["tiles"]
        if out is not None or options["return_residual"] or (isinstance(tiles, Tiles) and (tiles.mass or tiles.next)):
            raise NotImplementedError(
                "quantization: got out, a residual, masses or a next list while gradients are recorded; want none, or "
                "torch.no_grad()"
            )
        seed, offset = seed_pair(options["seed"])
        if options["dropout"] and seed is None:  # both passes drop the same
            options = {**options, "seed": (drawn_seed(q), offset)}
        return operators.attend_quantised(attention, q, k, v, options)
    return attend_operands(attention, quantize_operands(q, k, v, options), v, options, out)


def _check_shapes(q: Array, k: Array, v: Array, options: dict[str, Any]) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        library_of(array, name)
        starts = "cu_seqlens_q" if name == "q" else "cu_seqlens_k"
        packed = options[starts] is not None
        if len(array.shape) != (3 if packed else 4):
            want = "(tokens, heads, dim)" if packed else f"(batch, seqlen, heads, dim), or {starts}"
            raise ValueError(f"{name}: got {len(array.shape)} dimensions, shape {tuple(array.shape)}; want {want}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2] != 0:
        raise ValueError(f"k: got {k.shape[-2]} heads; want a divisor of q's {q.shape[-2]}")
