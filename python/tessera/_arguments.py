# SPDX-License-Identifier: Apache-2.0
"""From the arguments of `attention` to what a call carries: features, tensors by slot, scalars."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _core
from ._checks import check_extras, pair, real, shown, whole
from ._dropout_seed import add_dropout, seed_pair
from ._features import BLOCK, Asked, Features, features
from ._libraries import CPU, device_of, dtype_name, is_compiling
from ._options import FIELDS, refuse_arrays
from .expressions.register import Options, with_traced
from .quantization.descales import packed
from .values import KeySource, Offsets, Tiles, unexpected

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypedDict

    from .tiles import TileList

    class AttentionOptions(TypedDict, total=False):
        """The keywords that `attention_backward`, `plan` and `explain` share with `attention`."""

        # types: begin
        causal: bool
        window: tuple[int | None, int | None] | None
        compressed_causal: tuple[int, int] | None
        attention_chunk: int
        scale: float | None
        softcap: float
        alibi_slopes: Array | None
        sinks: Array | None
        dropout: float
        seed: Any
        score: Any
        mask: Any
        extras: Sequence[Array]
        cu_seqlens_q: Array | None
        cu_seqlens_k: Array | None
        max_seqlen_q: int | None
        max_seqlen_k: int | None
        seqused_q: Array | None
        seqused_k: Array | None
        k2: KeySource | None
        offsets: Offsets | None
        tiles: TileList | Tiles | None
        quantization: str | None
        q_descale: Array | None
        k_descale: Array | None
        v_descale: Array | None
        k_mean: Array | None
        descale: str | int
        return_lse: bool
        return_residual: bool
        keep_residual: bool
        deterministic: bool
        batch_invariant: bool
        out_dtype: Any
        wishes: str
        threads: int
        metadata: str | None
        status: Array | None
        # types: end


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


def _check_callable_name(name: str, given: str) -> None:
    known = _core.builtin_scores() if name == "score" else _core.builtin_masks()
    if given not in known and not _core.is_registered(name, given):
        raise ValueError(
            f"{name}: got {given!r}; want a function, a name of register_{name}, or a built-in: {', '.join(known)}"
        )


def _callable_name(name: str, given: Any) -> tuple[str | None, Any]:
    """(word of the line, Python function or None) for a score or mask."""
    if given is None:
        return None, None
    if isinstance(given, str):
        if not is_compiling():  # which traces no call of the core; the problem's check finds the name unknown then
            _check_callable_name(name, given)
        return given, None
    if not callable(given):
        raise TypeError(f"{name}: got {shown(given)}; want None, a built-in's name or a function")
    return "python", given


def _add_list(tiles: TileList, argument: str, prefix: str, slots: list[str], tensors: list[Any]) -> str:
    """Binds a list's arrays; returns its form."""
    if not hasattr(tiles, "arrays"):
        raise TypeError(f"{argument}: got {shown(tiles)}; want a TileList")
    for name, array in tiles.arrays():
        slots.append(prefix + name)
        tensors.append(array)
    return tiles.form


def _add_tiles(given: TileList | Tiles, slots: list[str], tensors: list[Any]) -> Asked:
    """Binds the lists of both passes and a prior LSE."""
    if not isinstance(given, Tiles):
        return _add_list(given, "tiles", "", slots, tensors), None, given.block, None, False, None, 0.0
    forward, backward, block, mass, prior, following, threshold = given
    form = None if forward is None else _add_list(forward, "tiles", "", slots, tensors)
    bwd_form = None if backward is None else _add_list(backward, "tiles.backward", "bwd_", slots, tensors)
    if prior is not None:
        slots.append("prior_lse")
        tensors.append(prior)
    for name, value in (("mass", mass), ("next", following)):
        if value is not None and not isinstance(value, str):
            raise TypeError(f"tiles.{name}: got {shown(value)}; want None or a name")
    if type(threshold) is not float:
        threshold = real("tiles.threshold", threshold)
    block = _common_block(block, forward, backward)
    return form, bwd_form, block, mass, prior is not None, following, threshold


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
    k: Array | KeySource,
    v: Array | None = None,
    # options: begin
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    compressed_causal: tuple[int, int] | None = None,
    attention_chunk: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    dropout: float = 0.0,
    seed: Any = None,
    score: Any = None,
    mask: Any = None,
    extras: Sequence[Array] = (),
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    k2: KeySource | None = None,
    offsets: Offsets | None = None,
    tiles: TileList | Tiles | None = None,
    quantization: str | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    k_mean: Array | None = None,
    descale: str | int = "head",
    return_lse: bool = False,
    return_residual: bool = False,
    keep_residual: bool = True,
    deterministic: bool = False,
    batch_invariant: bool = False,
    out_dtype: Any = None,
    wishes: str = "",
    threads: int = 0,
    metadata: str | None = None,
    status: Array | None = None,
    # options: end
    **moved: Any,
) -> Call:
    """The `Call` of `tessera.attention`'s arguments, which are explained there.

    Reads data only of `cu_seqlens` and `page_indptr` whose longest sequence is not given, and draws a seed only where
    dropout has none. Raises ValueError and TypeError; what depends on shapes and dtypes is refused when the plan is
    made, what depends on data when it runs.
    """
    if moved:
        raise unexpected("attention", moved)
    if quantization is not None:
        raise ValueError(f"quantization: got {quantization!r}; want None: only `attention` itself quantises")
    if callable(score) or callable(mask):
        options = with_traced(Options(causal, window, score, mask, extras), tiles, wishes)
        causal, window, score, mask, extras = options
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
    if isinstance(k, KeySource):
        _refuse_twice(v=v, cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k, seqused_k=seqused_k)
        size_k = _add_source("", k, slots, tensors)
    elif cu_seqlens_k is not None or seqused_k is not None:
        if cu_seqlens_k is not None:
            slots.append("cu_seqlens_k")
            tensors.append(cu_seqlens_k)
            size_k = longest("cu_seqlens_k", cu_seqlens_k, max_seqlen_k)
        if seqused_k is not None:
            slots.append("seqused_k")
            tensors.append(seqused_k)
    if k2 is not None:
        if not isinstance(k2, KeySource):
            raise TypeError(f"k2: got {shown(k2)}; want a KeySource(k2, v2)")
        slots += ("k2", "v2")
        tensors += (k2.k, k2.v)
        size_k2 = _add_source("2", k2, slots, tensors)
    if k_descale is not None or q_descale is not None or v_descale is not None or k_mean is not None:
        named = (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale), ("k_mean", k_mean))
        for name, array in named:
            if array is not None:
                slots.append(name)
                tensors.append(packed(array))
    batch_offset = head_offset = 0
    if offsets is not None:
        batch_offset, head_offset = _add_offsets(offsets, slots, tensors)
    asked = None if tiles is None else _add_tiles(tiles, slots, tensors)
    if status is not None:
        if metadata != "report":
            raise ValueError("status: got an array; want metadata='report' with it")
        slots.append("status")
        tensors.append(status)
    seed_value = offset_value = 0
    if dropout or seed is not None:
        seed_value, offset_value = add_dropout(q, *seed_pair(seed), bool(dropout), slots, tensors)
    score_function = mask_function = None
    if score is not None or mask is not None:
        score, score_function = _callable_name("score", score)
        mask, mask_function = _callable_name("mask", mask)
    if type(extras) is not tuple:
        check_extras(extras)
    for i, extra in enumerate(extras):
        slots.append(f"extra{i}")
        tensors.append(extra)
    compiling = is_compiling()
    if out_dtype is not None:
        out_dtype = dtype_name.__wrapped__(out_dtype) if compiling else dtype_name(out_dtype)
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
    # fields: begin
    values = (
        compressed_causal,
        attention_chunk,
        scale,
        softcap,
        dropout,
        score,
        mask,
        descale,
        return_lse,
        return_residual,
        keep_residual,
        deterministic,
        batch_invariant,
        metadata,
    )
    # fields: end
    made = features.__wrapped__ if compiling else features
    try:
        found = made(bool(causal), window, asked, out_dtype, wishes, threads, values)
    except (TypeError, ValueError, RuntimeError):  # of the key of the cache, and of the truth of an array
        names = [option.name for option in FIELDS]
        refuse_arrays({"causal": causal, "wishes": wishes, "threads": threads, **dict(zip(names, values, strict=True))})
        raise
    return Call(
        found,
        tuple(slots) if compiling else _interned(tuple(slots)),
        tuple(tensors),
        (size_q, size_k, size_k2),
        (seed_value, offset_value, batch_offset, head_offset),
        (score_function, mask_function),
    )


def _refuse_twice(**given: Any) -> None:
    """TypeError for what stands beside a KeySource that has it, or could."""
    for name, value in given.items():
        if value is not None:
            raise TypeError(f"{name}: got {shown(value)} beside a KeySource; want it as a field of that")


def _add_offsets(offsets: Offsets, slots: list[str], tensors: list[Any]) -> tuple[int, int]:
    """Binds positions; returns those of the first sequence and head."""
    if not isinstance(offsets, Offsets):
        raise TypeError(f"offsets: got {shown(offsets)}; want Offsets(q=…, k=…)")
    for name, array in (("q_offset", offsets.q), ("k_offset", offsets.k), ("k_offset2", offsets.k2)):
        if array is not None:
            slots.append(name)
            tensors.append(array)
    return whole("offsets.batch", offsets.batch), whole("offsets.head", offsets.head)


def _add_source(suffix: str, source: KeySource, slots: list[str], tensors: list[Any]) -> int:
    """Binds what describes a source of keys; returns its longest sequence, 0 if shapes say it."""
    for name, array in source.described_by():
        if array is not None:
            slots.append(name + suffix)
            tensors.append(array)
    most = source.max_seqlen
    if source.page_indptr is not None:
        if source.page_table is not None:
            raise ValueError(
                f"page_table{suffix}: got a table and page_indptr{suffix}; want one of them, a table or CSR"
            )
        if source.page_indices is None:
            raise ValueError(f"page_indices{suffix}: got None; want the pages that page_indptr{suffix} points into")
        return longest(f"page_indptr{suffix}", source.page_indptr, most, source.k.shape[1])
    if source.cu_seqlens is not None and source.page_table is None:
        return longest(f"cu_seqlens_k{suffix}", source.cu_seqlens, most)
    return whole(f"max_seqlen_k{suffix}", most) if most is not None and source.page_table is not None else 0
