# SPDX-License-Identifier: Apache-2.0
"""Linear attention with a decay for each head: decode steps on a pool of states, and the slopes that models use."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal

from ._arrays import common_library, dtype_name, refuse_gradient
from .operations import _run

Array = Any
Shape = tuple[int, ...]


def linear_decode(
    q: Array,
    k: Array,
    v: Array,
    state: Array,
    decay_slopes: Array,
    *,
    state_slots: Array | None = None,
    dest_slots: Array | None = None,
    scale: float | None = None,
    layout: Literal["vk", "kv"] = "vk",
    out: Array | None = None,
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

    Returns out, (b, t, h, dv) in the library and dtype of q, or `out`. Raises ValueError for shapes, types, slots
    beyond the pool and negative slopes, before anything is written (on a GPU, whose slots no one reads here, a slot
    beyond the pool stands for none), and for torch tensors that require grad; TypeError for what is no array.

    Source: Katharopoulos et al. 2020 (arXiv:2006.16236); Qin et al. 2024, Lightning Attention-2 (arXiv:2401.04658).
    """
    named = {"q": q, "k": k, "v": v, "state": state}
    refuse_gradient("linear_decode", "has no gradient", **named)
    optional = {"state_slots": state_slots, "dest_slots": dest_slots, "out": out}
    bound = {name: array for name, array in optional.items() if array is not None}
    library = common_library([*named.items(), ("decay_slopes", decay_slopes), *bound.items()])
    line = _line(
        tuple(q.shape),
        tuple(v.shape),
        tuple(state.shape),
        tuple(map(dtype_name, (q.dtype, k.dtype, v.dtype, q.dtype if out is None else out.dtype, state.dtype))),
        None if scale is None else float(scale),
        layout,
    )
    result = library.empty((*q.shape[:3], v.shape[3]), dtype_name(q.dtype), q) if out is None else out
    bound.pop("out", None)
    slots = ("q", "k", "v", "state", "decay_slopes", *bound, "o")
    _run(library, line, threads, slots, (q, k, v, state, decay_slopes, *bound.values(), result), q)
    return library.finish(result, q) if out is None else out


@lru_cache(maxsize=512)
def _line(q: Shape, v: Shape, state: Shape, dtypes: tuple[str, ...], scale: float | None, layout: str) -> str:
    for name, shape in (("q", q), ("v", v), ("state", state)):
        if len(shape) != 4:
            raise ValueError(f"{name}: got {len(shape)} dimensions, shape {shape}; want 4")
    words = [
        f"linear_decode b={q[0]} t={q[1]} h={q[2]} d={q[3]} dv={v[3]} dtype={':'.join(dtypes[:4])} state={dtypes[4]} "
        f"layout={layout} slots={state[0]}"
    ]
    if scale is not None:
        words.append(f"scale={scale!r}")
    return " ".join(words)


def decay_slopes(
    heads: int, *, layer: int | None = None, layers: int | None = None, rule: Literal["alibi", "linear"] = "alibi"
) -> Array:
    """Slopes of the decay of each head, numpy fp32 (heads), for `linear_decode`.

    rule="alibi": those of ALiBi, 2^(−8 (i + 1) / heads) for a power of two, else those of the next smaller one followed
    by every other one of twice as many heads; with layer and layers multiplied by 1 − layer / (layers − 1) + 1e-5, as
    MiniMax-Text-01 and Ling's linear models do. rule="linear": (8 / heads) · (1 − layer / layers) · i, what the
    Flash Linear Attention library takes: head 0 never forgets, the last ones at once. A rank of tensor parallelism
    takes its heads' part of the array.

    Needs numpy. Raises ValueError for fewer than one head, a layer outside 0 to below layers, one of layer and layers
    without the other, an unknown rule, and for rule="linear" without a layer.

    Source: ALiBi: Press, Smith and Lewis 2022 (arXiv:2108.12409); by layers: MiniMax 2025 (arXiv:2501.08313).
    """
    import numpy

    if heads < 1:
        raise ValueError(f"heads: got {heads}; want 1 or more")
    if (layer is None) != (layers is None):
        raise ValueError(f"layers: got layer={layer} with layers={layers}; want both or neither")
    if layer is not None and layers is not None and not 0 <= layer < layers:
        raise ValueError(f"layer: got {layer}; want 0 to below {layers}")
    if rule == "alibi":
        factor = 1.0 if layer is None or layers is None else 1 - layer / max(layers - 1, 1) + 1e-5
        return numpy.array([slope * factor for slope in _alibi(heads)], numpy.float32)
    if rule != "linear":
        raise ValueError(f'rule: got {rule!r}; want "alibi" or "linear"')
    if layer is None or layers is None:
        raise ValueError('layer: got none; want layer and layers for rule="linear"')
    return numpy.array([8 / heads * (1 - layer / layers) * head for head in range(heads)], numpy.float32)


def _alibi(heads: int) -> list[float]:
    whole = 1 << int(math.log2(heads))  # the largest power of two
    slopes = [2.0 ** (-8 * (head + 1) / whole) for head in range(whole)]
    if whole < heads:
        slopes += _alibi(2 * whole)[0::2][: heads - whole]
    return slopes
