# SPDX-License-Identifier: Apache-2.0
"""flash-attn 4's `score_mod` and `mask_mod` as traced scores and masks.

Signatures, as Dao-AILab/flash-attention calls them at 0251105a: score_mod(score, batch, head, q_idx=, kv_idx=,
seqlen_info=, aux_tensors=) and mask_mod(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors), the scalars behind them
where there are any. Indices count from 0 in each sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tessera.expressions import captured
from tessera.expressions.symbols import Symbol, as_symbol
from tessera.values import Offsets

from .arguments import Array, Window, array_module, is_torch, refuse

_SCORE = "a function (score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors"
_MASK = "a function (b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors"


class Modifiers(NamedTuple):
    """The arguments of a call that its functions are made of. aux_tensors: of any dtype that `captured` takes, on the
    device of q; aux_scalars: integers or floats."""

    score_mod: Callable[..., Any] | None
    score_mod_bwd: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    aux_tensors: Sequence[Array] | None
    aux_scalars: Sequence[int | float] | None


class Lengths(NamedTuple):
    """Of the sequences: queries (b, sq, …) or packed, keys (b, sk, …) or packed, both None for keys in pages; int32
    boundaries (b + 1) and lengths in use (b)."""

    batch: int
    queries: int | None
    keys: int | None
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    seqused_q: Array | None
    seqused_k: Array | None


class SeqlenInfo:
    """What a function is told of its sequence, as symbols or numbers: seqlen_q, seqlen_k, and offset_q, offset_k, where
    packed sequences begin (0 of others)."""

    def __init__(self, batch: Symbol, lengths: Lengths) -> None:
        self._batch, self._lengths = batch, lengths

    @property
    def offset_q(self) -> Any:
        return self._begin(self._lengths.cu_seqlens_q)

    @property
    def offset_k(self) -> Any:
        return self._begin(self._lengths.cu_seqlens_k)

    @property
    def seqlen_q(self) -> Any:
        lengths = self._lengths
        return self._length("seqlen_q", lengths.seqused_q, lengths.cu_seqlens_q, lengths.queries)

    @property
    def seqlen_k(self) -> Any:
        lengths = self._lengths
        return self._length("seqlen_k", lengths.seqused_k, lengths.cu_seqlens_k, lengths.keys)

    def _begin(self, cu_seqlens: Array | None) -> Any:
        return 0 if cu_seqlens is None else _indexable(cu_seqlens)[self._batch]

    def _length(self, name: str, used: Array | None, cu_seqlens: Array | None, padded: int | None) -> Any:
        if used is not None:
            return _indexable(used)[self._batch]
        if cu_seqlens is not None:
            boundaries = _indexable(cu_seqlens)
            return boundaries[self._batch + 1] - boundaries[self._batch]
        if padded is None:
            refuse(f"seqlen_info.{name}", None, "a length that the call is given")
        return padded


class _Scalars(Sequence):
    """The scalars as symbols: numbers in a kernel's arguments, so that another value is no other expression."""

    def __init__(self, arrays: Sequence[Array], near: Symbol) -> None:
        self._arrays, self._near = arrays, near

    def __len__(self) -> int:
        return len(self._arrays)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(as_symbol(self._near.graph, array) for array in self._arrays[index])
        return as_symbol(self._near.graph, self._arrays[index])


def _indexable(array: Array) -> Any:
    """The array as a function may index it by symbols."""
    return array if is_torch(array) else captured(array)


def options_of(
    modifiers: Modifiers, q: Array, lengths: Lengths, softcap: float, causal: bool, window: Window | None
) -> dict[str, Any]:
    """`score`, `mask`, `causal`, `window` and `offsets` of :func:`tessera.attention`; `window` is signed.

    A mask_mod takes the place of causal and window, as there. Raises TypeError for what is no function of these
    arguments, ValueError for a score_mod beside a softcap, or what belongs to no function.
    """
    score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars = modifiers
    kept = {"causal": causal, "window": window}
    if score_mod is None and mask_mod is None:
        for name, value in modifiers._asdict().items():
            if value is not None and not (isinstance(value, (list, tuple)) and not value):
                refuse(name, value, "None without a score_mod or mask_mod", ValueError)
        return kept
    if score_mod_bwd is not None and not callable(score_mod_bwd):
        refuse("score_mod_bwd", score_mod_bwd, "a function or None: the derivative is score_mod's own", TypeError)
    if score_mod is not None and softcap:
        refuse("softcap", softcap, "0 beside a score_mod, which may do the same by tanh", ValueError)
    scalars = [_array_of(q, number) for number in aux_scalars or ()]
    tensors = None if aux_tensors is None else [_indexable(tensor) for tensor in aux_tensors]
    count = 7 + bool(scalars)
    if score_mod is not None:
        _check("score_mod", score_mod, count, _SCORE)
    if mask_mod is not None:
        _check("mask_mod", mask_mod, count - 1, _MASK)
        kept = {"causal": False, "window": None}
    kept, offsets = _from_zero(q, lengths, **kept)
    later = offsets is None and not _is_from_zero(lengths)  # positions are those of the window

    def score(value: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        info = SeqlenInfo(batch, lengths)
        first = info.seqlen_k - info.seqlen_q if later else 0
        named = {"seqlen_info": info, "aux_tensors": () if tensors is None else tensors}
        if scalars:
            named["aux_scalars"] = _Scalars(scalars, batch)
        return score_mod(value, batch, head, q_idx=query - first, kv_idx=key, **named)

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        more = (_Scalars(scalars, batch),) if scalars else ()
        return mask_mod(batch, head, query, key, SeqlenInfo(batch, lengths), tensors, *more)

    return {
        **kept,
        "score": None if score_mod is None else score,
        "mask": None if mask_mod is None else mask,
        "offsets": offsets,
    }


def _is_from_zero(lengths: Lengths) -> bool:
    """Whether queries count from 0 by themselves: there are as many keys."""
    same = lengths.cu_seqlens_q is lengths.cu_seqlens_k and lengths.seqused_q is lengths.seqused_k
    return same and lengths.queries == lengths.keys


def _from_zero(
    q: Array, lengths: Lengths, causal: bool, window: Window | None
) -> tuple[dict[str, Any], Offsets | None]:
    """(causal and window, offsets) with which queries count from 0; offsets of None: as they stand, at the last key,
    since a window needs that and lengths are known to the run only."""
    bounded = causal or window is not None
    kept = {"causal": causal, "window": window}
    fixed = all(x is None for x in lengths[3:]) and lengths.queries is not None and lengths.keys is not None
    if _is_from_zero(lengths) or (bounded and not fixed):
        return kept, None
    if bounded:
        left, right = (None, 0) if window is None else window
        if causal:
            right = 0 if right is None else min(right, 0)
        shift = lengths.keys - lengths.queries
        moved = None if left is None else left - shift, None if right is None else right + shift
        kept = {"causal": False, "window": moved}
    module, keywords = array_module(q)
    return kept, Offsets(q=module.zeros((lengths.batch,), dtype=module.int64, **keywords))


def _array_of(q: Array, number: Any) -> Array:
    if not isinstance(number, (int, float)):
        refuse("aux_scalars", number, "integers or floats", TypeError)
    module, keywords = array_module(q)
    # A fill: a copy from the host would wait for a GPU and break a graph's capture.
    return module.full((), number, dtype=module.float32 if isinstance(number, float) else module.int64, **keywords)


def _check(name: str, function: Any, count: int, want: str) -> None:
    want += ", aux_scalars)" if count == (8 if name == "score_mod" else 7) else ")"
    if not callable(function):
        refuse(name, function, want, TypeError)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of what is written in C
        return
    names = ("q_idx", "kv_idx", "seqlen_info", "aux_tensors", "aux_scalars")
    by_name = dict.fromkeys(names[: count - 3]) if name == "score_mod" else {}
    try:
        signature.bind(*(None,) * (count - len(by_name)), **by_name)
    except TypeError:
        refuse(name, f"a function of {signature}", want, TypeError)
