# SPDX-License-Identifier: Apache-2.0
"""Linear attention with a decay for each head: whole sequences, and decode steps on a pool of states."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, Literal

from . import _core
from ._arguments import longest
from ._dropout_seed import add_dropout
from ._libraries import common_library, dtype_name, library_of, refuse_gradient
from .operations import run_problem

Array = Any
Shape = tuple[int, ...]
Layout = Literal["vk", "kv"]
Rounding = Literal["nearest", "stochastic"]

MOST_RING_TOKENS = 64


def linear_decode(
    q: Array,
    k: Array,
    v: Array,
    state: Array,
    decay_slopes: Array,
    *,
    state_slots: Array | None = None,
    dest_slots: Array | None = None,
    ring_k: Array | None = None,
    ring_v: Array | None = None,
    ring_cursor: Array | None = None,
    rounding: Rounding = "nearest",
    seed: Any = None,
    offset: Any = 0,
    scale: float | None = None,
    layout: Layout = "vk",
    out: Array | None = None,
    status: Array | None = None,
    threads: int = 0,
) -> Array:
    """One step of decoding: S ← exp(−slope) · S + k ⊗ v, then out = (scale · q) · S, for each token in turn.

    q, k: (b, t, h, d), v: (b, t, h, dv), t from 1 to 8, fp32, fp16 or bf16 each, any strides between tokens and heads
    (views of a packed projection too). decay_slopes: fp32 (h), 0 or more. scale: default 1 / sqrt(d).

    state: the pool, written in place: (slots, h, dv, d), or (slots, h, d, dv) with layout="kv", fp32 or bf16, any
    strides between slots. It is updated in fp32; bf16 is rounded once, after the last token. state_slots: int32 or
    int64 (b), where each sequence's state is; default: sequence i has state i. A negative slot stands for none: the
    sequence's out is 0. dest_slots, likewise: where the new states go, the sources then keeping theirs; default: where
    they came from; negative: nowhere. A state that is written may be named by one sequence only.

    ring_k (slots, h, 2 · ring, d), ring_v (slots, h, 2 · ring, dv), in the dtypes of k and v, written in place, and
    ring_cursor, int32 (b): the last tokens of each sequence, up to ring, wait there, and a state is written only where
    a step's tokens find no room. One cursor serves all layers of a model: the caller moves it once after they have run,
    to `ring_advance(ring_cursor, t, ring)`, less the tokens that it rejects; at first it is 0. `linear_flush` puts all
    that waits into the states. Not with dest_slots.

    rounding="stochastic", of bf16 states: up or down by chance, so that the expected value is the fp32 state and
    updates smaller than its spacing are not lost. seed, offset: int, or uint64 arrays of 1; equal ones round alike, so
    the caller counts offset from step to step and layer to layer. Without a seed one is drawn, as by `attention`.

    Returns out, (b, t, h, dv) in the library and dtype of q, or `out`. Raises ValueError for shapes, types, slots
    beyond the pool, cursors beyond the ring and negative slopes, before anything is written (on a GPU, where no one
    reads them here, a slot beyond the pool stands for none and a cursor for the nearest that there is, and `status`,
    int32 (1) that holds 0, notes the first: `violation_of`), and for torch tensors that require grad; TypeError for
    what is no array.

    Source: Katharopoulos et al. 2020 (arXiv:2006.16236); Qin et al. 2024, Lightning Attention-2 (arXiv:2401.04658).
    """
    rings = bound_arrays(ring_k=ring_k, ring_v=ring_v)
    refuse_gradient("linear_decode", "has no gradient", q=q, k=k, v=v, state=state, **rings)
    bound = bound_arrays(state=state, decay_slopes=decay_slopes, state_slots=state_slots, dest_slots=dest_slots)
    bound |= rings | bound_arrays(ring_cursor=ring_cursor)
    arrays, seeds = seeds_of(rounding, seed, offset, q)
    bound |= arrays
    return _forward("linear_decode", (q, k, v), bound, None, scale, layout, out, status, threads, rounding, seeds)


def linear_chunk(
    q: Array,
    k: Array,
    v: Array,
    state: Array | None,
    decay_slopes: Array,
    *,
    state_slots: Array | None = None,
    dest_slots: Array | None = None,
    cu_seqlens: Array | None = None,
    max_seqlen: int | None = None,
    scale: float | None = None,
    layout: Layout = "vk",
    out: Array | None = None,
    status: Array | None = None,
    threads: int = 0,
) -> Array:
    """`linear_decode` for sequences of any length: prefills that leave their states in the pool, and training.

    q, k, v: as there, t of any size, or packed (tokens, h, d | dv) with cu_seqlens int32 (b + 1) and max_seqlen, which
    is read from cu_seqlens if it is not given (on a GPU, where no one reads it here, the token count stands for it).
    state: the pool, or None: every sequence begins with zeros and its last state is dropped. A sequence whose slot is
    negative begins with zeros; where it has a destination, its last state goes there all the same.

    With state=None, and none of slots, out, status and threads, torch tensors may require grad; for gradients of states
    see `linear_attention`. Returns and raises otherwise as `linear_decode` does.

    Source: Qin et al. 2024, Lightning Attention-2 (arXiv:2401.04658).
    """
    plain = state is None and out is None and state_slots is None and dest_slots is None and status is None
    if plain and not threads and library_of(q, "q").operators is not None:
        final = linear_attention(
            q, k, v, decay_slopes, scale=scale, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, layout=layout
        )
        return final[0]
    refuse_gradient("linear_chunk", "has none beside a pool or out, linear_attention has", q=q, k=k, v=v, state=state)
    bound = bound_arrays(
        state=state,
        decay_slopes=decay_slopes,
        state_slots=state_slots,
        dest_slots=dest_slots,
        cu_seqlens_q=cu_seqlens,
    )
    return _forward("linear_chunk", (q, k, v), bound, max_seqlen, scale, layout, out, status, threads)


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    decay_slopes: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    max_seqlen: int | None = None,
    layout: Layout = "kv",
) -> tuple[Array, Array | None]:
    """(out, final state or None) of whole sequences: `linear_chunk` with states as arguments and results.

    The shapes of the Flash Linear Attention library's calls, whose g_gamma is −decay_slopes: q, k: (b, t, h, d), v:
    (b, t, h, dv); with cu_seqlens (b + 1), int32 or int64, (1, tokens, h, d | dv) or (tokens, h, d | dv).
    initial_state: (b, h, d, dv), or (b, h, dv, d) with layout="vk", fp32 or bf16; None: zeros. The final state is fp32,
    shaped alike.

    Tokens past cu_seqlens[-1] belong to no sequence: out and gradients of theirs are not written.

    torch, numpy and cupy arrays. Torch tensors have first derivatives: of q, k, v and initial_state, through both
    results. Raises as `linear_chunk` does.
    """
    named = {"q": q, "k": k, "v": v, "decay_slopes": decay_slopes}
    optional = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    library = common_library([*named.items(), *((name, x) for name, x in optional.items() if x is not None)])
    unpacked = cu_seqlens is not None and len(q.shape) == 4
    if unpacked:
        if q.shape[0] != 1:
            raise ValueError(f"q: got {q.shape[0]} sequences beside cu_seqlens; want (1, tokens, h, d)")
        q, k, v = q[0], k[0], v[0]
    _check_first_state(q, v, initial_state, cu_seqlens, layout)
    if library.operators is not None:
        for name, x in (("decay_slopes", decay_slopes), ("cu_seqlens", cu_seqlens)):
            if x is not None and library_of(x, name).name != library.name:
                raise TypeError(
                    f"{name}: got an array of {library_of(x, name).name}; want one of {library.name}, as q is"
                )
        keeps = bool(output_final_state)
        out, final = library.operators.linear_attention(
            q, k, v, decay_slopes, initial_state, cu_seqlens, max_seqlen, scale, layout, keeps
        )
    elif library.name in ("numpy", "cupy"):
        numpy = sys.modules[library.name]
        final = None
        with library.on(q):
            if initial_state is not None:
                final = numpy.array(initial_state, dtype="float32")
            elif output_final_state:
                batch = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
                final = numpy.zeros(state_shape(batch, q.shape, v.shape, layout), "float32")
            starts = None if cu_seqlens is None else cu_seqlens.astype("int32")
        pool = None if final is None or final.shape[0] == 0 else final
        out = linear_chunk(
            q, k, v, pool, decay_slopes, cu_seqlens=starts, max_seqlen=max_seqlen, scale=scale, layout=layout
        )
    else:
        raise TypeError(f"q: got an array of {library.name}; want one of torch, numpy or cupy, or linear_chunk")
    return out[None] if unpacked else out, final if output_final_state else None


def _check_first_state(q: Array, v: Array, initial_state: Array | None, cu_seqlens: Array | None, layout: str) -> None:
    if layout not in ("kv", "vk"):
        raise ValueError(f'layout: got {layout!r}; want "kv" or "vk"')
    if initial_state is None:
        return
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    want = state_shape(batch, tuple(q.shape), tuple(v.shape), layout)
    if tuple(initial_state.shape) != want:
        raise ValueError(f"initial_state: got shape {tuple(initial_state.shape)}; want {want}")


def state_shape(batch: int, q: Shape, v: Shape, layout: str) -> Shape:
    return (batch, q[-2], q[-1], v[-1]) if layout == "kv" else (batch, q[-2], v[-1], q[-1])


def seeds_of(rounding: str, seed: Any, offset: Any, like: Array) -> tuple[dict[str, Array], tuple[int, int]]:
    """Arrays by slot, and seed and offset where they are none. Raises ValueError for an unknown rounding."""
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f'rounding: got {rounding!r}; want "nearest" or "stochastic"')
    slots: list[str] = []
    arrays: list[Array] = []
    seeds = add_dropout(like, seed, offset, rounding == "stochastic", slots, arrays)
    return dict(zip(slots, arrays, strict=True)), seeds


def bits_of_seeds(bound: dict[str, Array]) -> dict[str, Array]:
    """`bound` with seeds as uint64."""
    for name in ("dropout_seed", "dropout_offset"):
        if name in bound:
            bound = {**bound, name: library_of(bound[name], name).seed_words(bound[name])}
    return bound


def bound_arrays(**arrays: Array | None) -> dict[str, Array]:
    return {name: array for name, array in arrays.items() if array is not None}


def _forward(
    operation: str,
    rows: tuple[Array, Array, Array],
    bound: dict[str, Array],
    max_seqlen: int | None,
    scale: float | None,
    layout: str,
    out: Array | None,
    status: Array | None,
    threads: int,
    rounding: str = "nearest",
    seeds: tuple[int, int] = (0, 0),
) -> Array:
    """`bound`: arrays by slot besides `rows`, which are q, k and v."""
    q, k, v = rows
    optional = bound_arrays(out=out, status=status)
    library = common_library([("q", q), ("k", k), ("v", v), *bound.items(), *optional.items()])
    result = library.empty((*q.shape[:-1], v.shape[-1]), dtype_name(q.dtype), q) if out is None else out
    if status is not None:
        bound = {**bound, "status": status}
    call = (rows, {**bound, "o": result}, max_seqlen, scale, layout, rounding, seeds, threads)
    (compute if library.operators is None else library.operators.linear)(operation, *call)
    return library.finish(result, q) if out is None else out


def compute(
    operation: str,
    rows: tuple[Array, Array, Array],
    bound: dict[str, Array],
    max_seqlen: int | None,
    scale: float | None,
    layout: str,
    rounding: str,
    seeds: tuple[int, int],
    threads: int,
) -> None:
    """A forward into `bound["o"]`, with arrays by slot besides `rows`."""
    q, k, v = rows
    problem = problem_of(operation, (q, k, v, bound["o"]), bound, max_seqlen, scale, layout, rounding)
    bound = bits_of_seeds(bound)
    run_problem(library_of(q, "q"), problem, threads, ("q", "k", "v", *bound), (*rows, *bound.values()), q, seeds)


def problem_of(
    operation: str,
    rows: tuple[Array, Array, Array, Array],
    bound: dict[str, Array],
    max_seqlen: int | None,
    scale: float | None,
    layout: str,
    rounding: str = "nearest",
    backward: bool = False,
) -> _core.Problem:
    """`rows`: q, k, v, and o or dout."""
    q, _, v, _ = rows
    starts, state, ring = bound.get("cu_seqlens_q"), bound.get("state"), bound.get("ring_k")
    sequences = None
    if starts is not None:  # lengths that no one reads here are at most that of all tokens
        sequences = (starts.shape[0] - 1, longest("cu_seqlens", starts, max_seqlen) or q.shape[0])
    dtypes = tuple(dtype_name(x.dtype) for x in rows)
    return _problem(
        operation,
        tuple(q.shape),
        tuple(v.shape),
        sequences,
        dtypes if state is None else (*dtypes, dtype_name(state.dtype)),
        None if state is None else tuple(state.shape),
        None if ring is None else tuple(ring.shape),
        None if scale is None else float(scale),
        layout,
        rounding,
        "status" in bound,
        backward,
    )


@lru_cache(maxsize=512)
def _problem(
    operation: str,
    q: Shape,
    v: Shape,
    sequences: tuple[int, int] | None,
    dtypes: tuple[str, ...],
    state: Shape | None,
    ring: Shape | None,
    scale: float | None,
    layout: str,
    rounding: str,
    reports: bool,
    backward: bool,
) -> _core.Problem:
    """`sequences`: how many, and the longest, of packed tokens."""
    rank = 4 if sequences is None else 3
    for name, shape, want in (("q", q, rank), ("v", v, rank), ("state", state, 4), ("ring_k", ring, 4)):
        if shape is not None and len(shape) != want:
            raise ValueError(f"{name}: got {len(shape)} dimensions, shape {shape}; want {want}")
    batch, tokens = q[:2] if sequences is None else sequences
    fields: dict[str, Any] = {} if sequences is None else {"q_layout": "varlen", "total_q": q[0]}
    if state is not None:
        fields = {**fields, **state_fields(dtypes[4], layout, state[0])}
    if ring is not None:
        fields["ring"] = ring_tokens(ring, tokens)
    q_type, k_type, v_type, o_type = dtypes[:4]
    return _core.Problem(
        operation,
        batch=batch,
        seqlen_q=tokens,
        heads_q=q[-2],
        head_dim_qk=q[-1],
        head_dim_v=v[-1],
        q_type=q_type,
        k_type=k_type,
        v_type=v_type,
        o_type=o_type,
        scale=scale,
        rounding=rounding,
        metadata="report" if reports else None,
        backward=backward,
        **fields,
    )


def state_fields(dtype: str, layout: str, slots: int) -> dict[str, Any]:
    """Fields of a problem that has states."""
    if layout not in ("vk", "kv"):
        raise ValueError(f'layout: got {layout!r}; want "vk" or "kv"')
    return {"state_type": dtype, "state_layout": layout, "slots": slots}


def ring_tokens(ring_k: Shape, tokens: int) -> int:
    """How many tokens a ring of this shape has room for, for steps of `tokens`."""
    rows = ring_k[2]
    if rows % 2 != 0 or not 2 * max(tokens, 1) <= rows <= 2 * MOST_RING_TOKENS:
        want = f"2 · ring, of a ring of {max(tokens, 1)} to {MOST_RING_TOKENS} tokens"
        raise ValueError(f"ring_k: got {rows} rows a head, shape {ring_k}; want {want}")
    return rows // 2
