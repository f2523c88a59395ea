# SPDX-License-Identifier: Apache-2.0
"""Calls of `flex_attention` with torch tensors that were made before, found again by their functions and block mask."""

from __future__ import annotations

import weakref
from typing import Any

from .. import _core
from .._arguments import parse
from .._libraries import is_compiling, library_of
from .._options import OPTIONS
from ..expressions.register import Resolved, kept_mask, kept_score

Array = Any


class FlexCalls:
    """Calls of one score function and one mask, as they were traced last, with one list."""

    def __init__(self, score: Resolved | None, mask: Resolved | None, tiles: Any) -> None:
        self._of = score, mask, tiles
        self._shapes = _shapes_of(tiles)
        self._table = _core.KeptCalls()

    def are_of(self, score: Resolved | None, mask: Resolved | None, tiles: Any) -> bool:
        same = self._of[0] is score and self._of[1] is mask and self._of[2] is tiles
        return same and self._shapes == _shapes_of(tiles)

    def call(self, query: Array, key: Array, value: Array, options: tuple[Any, ...]) -> tuple[Any, Any] | None:
        """(out, LSE or None); None for a call that is not kept."""
        return self._table.call(query, key, value, options)

    def keep(self, arrays: tuple[Array, Array, Array], options: tuple[Any, ...], given: dict[str, Any]) -> None:
        """`arrays`: (batch, heads, seqlen, dim); `given`: options of `tessera.attention` that their result came by."""
        operators = library_of(arrays[0], "query").operators
        if operators is None:
            return
        q, k, v = (x.swapaxes(1, 2) for x in arrays)
        call = parse(q, k, v, *(given.get(option.name, option.default) for option in OPTIONS))
        computes, tensors = operators.computes_of(call, q, k, v), call.tensors
        if computes is None:
            return

        def compute(query: Array, key: Array, value: Array) -> tuple[Any, Any]:
            results = computes(query.swapaxes(1, 2), key.swapaxes(1, 2), value.swapaxes(1, 2), *tensors)
            out, lse = results if isinstance(results, tuple) else (results, None)
            return out.swapaxes(1, 2), lse

        self._table.keep(*arrays, options, compute)


# The latest first: of one block mask those of each layer's score.
_MOST_OF_ONE = 8
_calls: weakref.WeakKeyDictionary[Any, list[FlexCalls]] = weakref.WeakKeyDictionary()


def flex_calls(owner: Any, score_mod: Any, mask_mod: Any, tiles: Any) -> FlexCalls | None:
    """Those of a score and a mask, None for neither, as they are now. `owner`: what they go with, when it goes. None
    where a function has to be traced."""
    if is_compiling():
        return None
    score = None if score_mod is None else kept_score(score_mod)
    mask = None if mask_mod is None else kept_mask(mask_mod)
    if (score is None) != (score_mod is None) or (mask is None) != (mask_mod is None):
        return None
    known = _calls.get(owner, [])
    for calls in known:
        if calls.are_of(score, mask, tiles):
            return calls
    made = FlexCalls(score, mask, tiles)
    _calls[owner] = [made, *known[: _MOST_OF_ONE - 1]]
    return made


def _shapes_of(tiles: Any) -> list[Any]:
    return [] if tiles is None else [array.shape for _, array in tiles.arrays()]
