# SPDX-License-Identifier: Apache-2.0
"""From the arguments of `attention` to what a call carries: features, tensors by slot, scalars."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _core
from ._checks import pair, real, shown, whole
from ._dropout_seed import add_dropout
from ._features import BLOCK, Features, features
from ._libraries import CPU, device_of, dtype_name, is_compiling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .tiles import TileList

Array = Any
Window = tuple["int | None", "int | None"]

_WINDOW = "(left, right), each an integer or None"


class Call(NamedTuple):
    """Everything of a call but q, k and v, checked as far as no data is needed.

    features: what is asked for besides the tensors.
    slots, tensors: names of the slots that are bound besides q, k and v, and the tensors in the same order.
    sizes: max_seqlen_q, max_seqlen_k, max_seqlen_k2; 0: the tensors' shapes say it.
    scalars: dropout's seed and offset, batch_offset, head_offset.
    callables: Python functions for score and mask, or None.
    """

    features: Features
    slots: tuple[str, ...]
    tensors: tuple[Any, ...]
    sizes: tuple[int, int, int]
    scalars: tuple[int, int, int, int]
    callables: tuple[Any, Any] = (None, None)


@lru_cache(maxsize=1024)
def _interned(slots: tuple[str, ...]) -> tuple[str, ...]:
    """The same tuple for equal ones, so that caches further down can go by identity."""
    return slots


def longest(name: str, boundaries: Array, given: int | None, unit: int = 1) -> int:
    """The longest sequence: `given`, or the largest difference in `boundaries` times `unit`.

    0 while a compiler traces, when there is no data, and for boundaries on a GPU, which a look would have to wait
    for; sizes then come from shapes (the token count).
    """
    if given is not None:
        return whole(name.replace("cu_seqlens", "max_seqlen").replace("page_indptr", "max_seqlen_k"), given)
    if is_compiling() or device_of(boundaries) != CPU:
        return 0
    return _core.longest_step(boundaries, name) * unit


def _callable_name(name: str, given: Any) -> tuple[str | None, Any]:
    """(word of the line, Python function or None) for a score or mask."""
    if given is None:
        return None, None
    if isinstance(given, str):
        known = _core.builtin_scores() if name == "score" else _core.builtin_masks()
        if given not in known and not _core.is_registered(name, given):
            raise ValueError(
                f"{name}: got {given!r}; want a function, a name of register_{name}, or a built-in: {', '.join(known)}"
            )
        return given, None
    if not callable(given):
        raise TypeError(f"{name}: got {shown(given)}; want None, a built-in's name or a function")
    return "python", given


def _add_tiles(tiles: TileList, prefix: str, slots: list[str], tensors: list[Any]) -> str:
    """Binds a list's arrays; returns its form."""
    if not hasattr(tiles, "arrays"):
        raise TypeError(f"{prefix}tiles: got {shown(tiles)}; want a TileList")
    for name, array in tiles.arrays():
        slots.append(prefix + name)
        tensors.append(array)
    return tiles.form


def _common_block(block: Any, *lists: TileList | None) -> tuple[int, int] | None:
    """The block of the call: given, or that of its lists, which must agree."""
    chosen = None if block is None else pair("block", block, BLOCK)
    for tiles in lists:
        own = getattr(tiles, "block", None)
        if own is None:
            continue
        if chosen is not None and tuple(own) != chosen:
            raise ValueError(f"block: got {chosen} and a tile list of {tuple(own)}; want the same for both")
        chosen = tuple(own)
    return chosen


def parse(
    q: Array,
    k: Array,
    v: Array,
    causal: bool = False,
    window: Window | None = None,
    compressed_causal: tuple[int, int] | None = None,
    attention_chunk: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    dropout: float = 0.0,
    seed: Any = None,
    offset: Any = 0,
    score: Any = None,
    mask: Any = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    page_table: Array | None = None,
    page_indptr: Array | None = None,
    page_indices: Array | None = None,
    last_page_len: Array | None = None,
    k2: Array | None = None,
    v2: Array | None = None,
    cu_seqlens_k2: Array | None = None,
    max_seqlen_k2: int | None = None,
    seqused_k2: Array | None = None,
    page_table2: Array | None = None,
    page_indptr2: Array | None = None,
    page_indices2: Array | None = None,
    last_page_len2: Array | None = None,
    q_offset: Array | None = None,
    k_offset: Array | None = None,
    k_offset2: Array | None = None,
    batch_offset: int = 0,
    head_offset: int = 0,
    tiles: TileList | None = None,
    bwd_tiles: TileList | None = None,
    block: tuple[int, int] | None = None,
    mass: str | None = None,
    prior_lse: Array | None = None,
    next_tiles: str | None = None,
    threshold: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    out_dtype: Any = None,
    wishes: str = "",
    threads: int = 0,
    metadata: str | None = None,
    status: Array | None = None,
    extras: Sequence[Array] = (),
) -> Call:
    """The `Call` of `tessera.attention`'s arguments, which are explained there.

    Reads data only of `cu_seqlens` and `page_indptr` whose longest sequence is not given, and draws a seed only where
    dropout has none. Raises ValueError and TypeError; what depends on shapes and dtypes is refused when the plan is
    made, what depends on data when it runs.
    """
    slots: list[str] = []
    tensors: list[Any] = []
    size_q = size_k = size_k2 = 0
    if alibi_slopes is not None:
        slots.append("alibi_slopes")
        tensors.append(alibi_slopes)
    if sinks is not None:
        slots.append("sink")
        tensors.append(sinks)
    if cu_seqlens_q is not None:
        slots.append("cu_seqlens_q")
        tensors.append(cu_seqlens_q)
        size_q = longest("cu_seqlens_q", cu_seqlens_q, max_seqlen_q)
    if seqused_q is not None:
        slots.append("seqused_q")
        tensors.append(seqused_q)
    if cu_seqlens_k is not None or seqused_k is not None or page_table is not None or page_indptr is not None:
        given = (cu_seqlens_k, seqused_k, page_table, page_indptr, page_indices, last_page_len)
        size_k = _add_source("", given, k, max_seqlen_k, slots, tensors)
    if k2 is not None:
        slots += ("k2", "v2")
        tensors += (k2, v2)
        given = (cu_seqlens_k2, seqused_k2, page_table2, page_indptr2, page_indices2, last_page_len2)
        size_k2 = _add_source("2", given, k2, max_seqlen_k2, slots, tensors)
    if q_offset is not None or k_offset is not None or k_offset2 is not None:
        for name, array in (("q_offset", q_offset), ("k_offset", k_offset), ("k_offset2", k_offset2)):
            if array is not None:
                slots.append(name)
                tensors.append(array)
    list_form = bwd_list_form = None
    if tiles is not None or bwd_tiles is not None:
        block = _common_block(block, tiles, bwd_tiles)
        if tiles is not None:
            list_form = _add_tiles(tiles, "", slots, tensors)
        if bwd_tiles is not None:
            bwd_list_form = _add_tiles(bwd_tiles, "bwd_", slots, tensors)
    if prior_lse is not None:
        slots.append("prior_lse")
        tensors.append(prior_lse)
    if status is not None:
        if metadata != "report":
            raise ValueError("status: got an array; want metadata='report' with it")
        slots.append("status")
        tensors.append(status)
    seed_value = offset_value = 0
    if dropout or seed is not None:
        seed_value, offset_value = add_dropout(q, seed, offset, bool(dropout), slots, tensors)
    score_function = mask_function = None
    if score is not None or mask is not None:
        score, score_function = _callable_name("score", score)
        mask, mask_function = _callable_name("mask", mask)
    if type(extras) is not tuple and not isinstance(extras, (tuple, list)):
        raise TypeError(f"extras: got {shown(extras)}; want a tuple or list of arrays")
    for i, extra in enumerate(extras):
        slots.append(f"extra{i}")
        tensors.append(extra)
    if type(batch_offset) is not int or type(head_offset) is not int:
        batch_offset, head_offset = whole("batch_offset", batch_offset), whole("head_offset", head_offset)
    compiling = is_compiling()
    if out_dtype is not None:
        out_dtype = dtype_name.__wrapped__(out_dtype) if compiling else dtype_name(out_dtype)
    if block is not None:
        block = pair("block", block, BLOCK)
    if window is not None:
        left, right = pair("window", window, _WINDOW)
        window = (
            left if left is None else whole("window", left, _WINDOW),
            right if right is None else whole("window", right, _WINDOW),
        )
    if scale is not None and type(scale) is not float:
        scale = real("scale", scale)
    if type(softcap) is not float:
        softcap = 0.0 if softcap is None else real("softcap", softcap)
    if type(dropout) is not float:
        dropout = 0.0 if dropout is None else real("dropout", dropout)
    if type(threshold) is not float:
        threshold = real("threshold", threshold)
    made = features.__wrapped__ if compiling else features
    try:
        asked = made(
            bool(causal),
            window,
            compressed_causal,
            attention_chunk,
            scale,
            softcap,
            dropout,
            score,
            mask,
            list_form,
            bwd_list_form,
            block,
            mass,
            prior_lse is not None,
            next_tiles,
            threshold,
            return_lse,
            deterministic,
            batch_invariant,
            out_dtype,
            wishes,
            threads,
            metadata,
        )
    except (TypeError, ValueError, RuntimeError):  # of the key of the cache, and of the truth of an array
        _refuse_arrays(
            causal=causal,
            compressed_causal=compressed_causal,
            attention_chunk=attention_chunk,
            block=block,
            mass=mass,
            next_tiles=next_tiles,
            return_lse=return_lse,
            deterministic=deterministic,
            batch_invariant=batch_invariant,
            wishes=wishes,
            threads=threads,
            metadata=metadata,
        )
        raise
    return Call(
        asked,
        tuple(slots) if compiling else _interned(tuple(slots)),
        tuple(tensors),
        (size_q, size_k, size_k2),
        (seed_value, offset_value, batch_offset, head_offset),
        (score_function, mask_function),
    )


def _refuse_arrays(**options: Any) -> None:
    """TypeError for the first option that is an array or holds one, or is no key of a cache."""
    for name, value in options.items():
        try:
            hash(value)
        except TypeError:
            raise TypeError(f"{name}: got {shown(value)}; want {_PLAIN.get(name, 'True or False')}") from None
        if getattr(value, "shape", None) is not None:
            raise TypeError(f"{name}: got {shown(value)}; want {_PLAIN.get(name, 'True or False')}")


_PLAIN = {
    "compressed_causal": "(length, stride), two integers",
    "block": BLOCK,
    "mass": "None or a name",
    "next_tiles": "None or a name",
    "metadata": "None or a name",
    "wishes": "a text",
    "threads": "an integer",
}

_SOURCE = ("cu_seqlens_k", "seqused_k", "page_table", "page_indptr", "page_indices", "last_page_len")


def _add_source(
    suffix: str, given: tuple[Array | None, ...], k: Array, most: int | None, slots: list[str], tensors: list[Any]
) -> int:
    """Binds what describes a source of keys; returns its longest sequence, 0 if shapes say it."""
    cu_seqlens, _, page_table, page_indptr, page_indices, _ = given
    for name, array in zip(_SOURCE, given, strict=True):
        if array is not None:
            slots.append(name + suffix)
            tensors.append(array)
    if page_table is not None and page_indptr is not None:
        raise ValueError(f"page_table{suffix}: got a table and page_indptr{suffix}; want one of them, a table or CSR")
    if page_indptr is not None:
        if page_indices is None:
            raise ValueError(f"page_indices{suffix}: got None; want the pages that page_indptr{suffix} points into")
        return longest(f"page_indptr{suffix}", page_indptr, most, k.shape[1])
    if cu_seqlens is not None and page_table is None:
        return longest(f"cu_seqlens_k{suffix}", cu_seqlens, most)
    return whole(f"max_seqlen_k{suffix}", most) if most is not None and page_table is not None else 0
