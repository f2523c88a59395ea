# SPDX-License-Identifier: Apache-2.0
"""What goes with `linear_decode` where tokens wait in a ring beside the state: how its cursor moves, emptying it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from . import _core
from ._libraries import common_library, dtype_name, library_of, refuse_gradient
from .linear import Array, Layout, Rounding, Shape, bits_of_seeds, bound_arrays, ring_tokens, seeds_of, state_fields
from .operations import run_problem


def ring_advance(cursor: Any, tokens: int, ring: int) -> Any:
    """ring_cursor after a step of `tokens` with a ring of `ring` tokens; `linear_decode` itself moves no cursor.

    cursor: an int, or integers of any library that has arithmetic; on a GPU it can be part of a graph. Of the n tokens
    that wait (cursor = half · (ring + 1) + n) n + tokens remain, or, where these find no room, the step's own in the
    other half. To reject the last r of them, 0 to tokens, subtract r; r = tokens is right after a flush too.
    """
    waiting = cursor % (ring + 1)
    full = waiting + tokens > ring
    return cursor + tokens + full * (ring + 1 + waiting - 2 * cursor)


def linear_flush(
    state: Array,
    decay_slopes: Array,
    ring_k: Array,
    ring_v: Array,
    ring_cursor: Array,
    *,
    state_slots: Array | None = None,
    rounding: Rounding = "nearest",
    seed: Any = None,
    offset: Any = 0,
    layout: Layout = "vk",
    status: Array | None = None,
    threads: int = 0,
) -> None:
    """Puts the tokens that wait in sequences' rings into their states: S ← a^n · S + Σ_i a^(n−1−i) · k_i ⊗ v_i with
    a = exp(−slope). The cursors are 0 from then on, which is the caller's to write.

    For a step without a ring, another holder of the state (a prefix cache), a slot that is given away. Arrays as for
    `linear_decode`; a sequence without tokens, or with a negative slot, is left alone. One launch on a GPU. Raises as
    `linear_decode` does.
    """
    refuse_gradient("linear_flush", "has no gradient", state=state, ring_k=ring_k, ring_v=ring_v)
    bound = {"state": state, "decay_slopes": decay_slopes, "ring_k": ring_k, "ring_v": ring_v}
    arrays, seeds = seeds_of(rounding, seed, offset, state)
    bound |= {"ring_cursor": ring_cursor, **bound_arrays(state_slots=state_slots, status=status), **arrays}
    operators = common_library([*bound.items()]).operators
    (compute_flush if operators is None else operators.flush)(bound, layout, rounding, seeds, threads)


def compute_flush(bound: dict[str, Array], layout: str, rounding: str, seeds: tuple[int, int], threads: int) -> None:
    """`bound`: arrays by slot."""
    bound = bits_of_seeds(bound)
    shapes = tuple(tuple(bound[name].shape) for name in ("ring_cursor", "ring_k", "ring_v", "state"))
    dtypes = tuple(dtype_name(bound[name].dtype) for name in ("ring_k", "ring_v", "state"))
    problem, state = _problem(shapes, dtypes, layout, rounding, "status" in bound), bound["state"]
    run_problem(library_of(state, "state"), problem, threads, tuple(bound), tuple(bound.values()), state, seeds)


@lru_cache(maxsize=512)
def _problem(
    shapes: tuple[Shape, ...], dtypes: tuple[str, ...], layout: str, rounding: str, reports: bool
) -> _core.Problem:
    for name, shape, want in zip(("ring_cursor", "ring_k", "ring_v", "state"), shapes, (1, 4, 4, 4), strict=True):
        if len(shape) != want:
            raise ValueError(f"{name}: got {len(shape)} dimensions, shape {shape}; want {want}")
    (batch,), (_, heads, _, d), (*_, dv), (slots, *_) = shapes
    k, v, state = dtypes
    return _core.Problem(
        "linear_decode",
        batch=batch,
        seqlen_q=0,
        heads_q=heads,
        head_dim_qk=d,
        head_dim_v=dv,
        q_type=k,
        v_type=v,
        ring=ring_tokens(shapes[1], 0),
        rounding=rounding,
        metadata="report" if reports else None,
        **state_fields(state, layout, slots),
    )
