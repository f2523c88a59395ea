# SPDX-License-Identifier: Apache-2.0
"""Scores and masks of one's own as C++ text, which kernels on GPUs are compiled with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _core
from ._libraries import dtype_name

if TYPE_CHECKING:
    from collections.abc import Mapping


def register_score(
    name: str,
    text: str,
    extras: Mapping[str, tuple[Any, int]] | None = None,
    *,
    derivative_text: str | None = None,
) -> str:
    """Names a score for this process, for good; gives the name, which `attention` takes as `score=`.

    text: a C++ expression, or a function's body if it has a `return`, of `score` (float, after scale and softcap), the
        positions `at.batch`, `at.head`, `at.query` and `at.key` (64-bit integers), the extra arrays as `name(i, j)` and
        CUDA's mathematical functions; its value is the new score.
    extras: (dtype, dimensions) of each array that the text reads, by its name: fp32, fp16 or bf16, read as float,
        int32, int64 or uint8, of 0 to 4 dimensions. `attention` takes them in this order as `extras=`, at most four
        with the mask's. An index outside is moved to the nearest inside.
    derivative_text: likewise, of the same names; its value is d new score / d score at `score`. Gradients on a GPU need
        it; the extra arrays themselves have none.

    Raises ValueError for a name that is built in or another text's, a text that is empty, extras that cannot be. The
    texts are compiled by the first call that uses them, whose ValueError then has the compiler's words.

    Source: docs/semantics.md, section 4.
    """
    _core.register_score(name, text, _described(extras), derivative_text)
    return name


def register_mask(name: str, text: str, extras: Mapping[str, tuple[Any, int]] | None = None) -> str:
    """As `register_score`, without `score`; the text's value is whether the query sees the key."""
    _core.register_mask(name, text, _described(extras))
    return name


def _described(extras: Mapping[str, tuple[Any, int]] | None) -> list[tuple[str, str, int]]:
    return [(name, dtype_name(dtype), rank) for name, (dtype, rank) in (extras or {}).items()]
