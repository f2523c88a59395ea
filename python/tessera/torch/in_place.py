# SPDX-License-Identifier: Apache-2.0
"""The operators ``tessera::linear_decode``, ``linear_chunk``, ``linear_flush`` and ``kv_append``.

Their schemas say what they write: states, rings, caches and results, all of which are the caller's. So torch.compile
can trace them, in whole graphs and with dynamic shapes, and put copies where a graph needs what was there before.
Tensors that no mode, subclass, transform or tracer wants to see go past them to the kernel.

Arguments are those of ``tessera.linear_decode`` and its relatives, but

- tensors, written, slots: tensors by the names of their slots, separated by spaces, those of `tensors` first
- rounding: of bf16 states, "nearest" or "stochastic"
- seeds: seed and offset of stochastic rounding, 64 bits each, as int64
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# As modules: torch keeps the kernels below to the very end, and through a function of theirs every cached plan.
from .. import linear as linear_calls
from .. import linear_ring, operations
from . import autograd
from .operators import BITS_64, LIBRARY, names_of, signed

_BOUND = "Tensor[] tensors, Tensor(a!)[] written, str slots"
_CALL = "str layout, str rounding, int[] seeds, int threads"
_LINEAR = f"Tensor q, Tensor k, Tensor v, {_BOUND}, SymInt? max_seqlen, float? scale, {_CALL}"
LIBRARY.define(f"linear_decode({_LINEAR}) -> ()")
LIBRARY.define(f"linear_chunk({_LINEAR}) -> ()")
LIBRARY.define(f"linear_flush({_BOUND}, {_CALL}) -> ()")
LIBRARY.define(
    "kv_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_new, Tensor v_new, Tensor? q, Tensor(c!)? q_rotated,"
    " Tensor[] tensors, str slots, SymInt? max_seqlen_q, bool rotary_interleaved, int threads) -> ()"
)
_linear_operators = {
    "linear_decode": torch.ops.tessera.linear_decode.default,
    "linear_chunk": torch.ops.tessera.linear_chunk.default,
}
_flush_operator = torch.ops.tessera.linear_flush.default
_append_operator = torch.ops.tessera.kv_append.default

_WRITTEN = ("state", "ring_k", "ring_v", "status", "o")


def _goes_past(tensors: tuple[Any, ...]) -> bool:
    """Whether torch has no need to see a call with these; not with other libraries' lengths, which only we can take."""
    if torch.compiler.is_compiling():
        return False
    q, k, v, *others = tensors
    return autograd.is_plain(q, k, v, others) or not all(isinstance(x, Tensor) for x in tensors)


def _by_use(bound: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor], str]:
    """tensors, written and slots of an operator."""
    names = [*(x for x in bound if x not in _WRITTEN), *(x for x in bound if x in _WRITTEN)]
    tensors = [bound[name] for name in names]
    first = sum(name not in _WRITTEN for name in names)
    return tensors[:first], tensors[first:], " ".join(names)


def _by_slot(tensors: list[Tensor], written: list[Tensor], slots: str) -> dict[str, Tensor]:
    return dict(zip(names_of(slots), (*tensors, *written), strict=True))


def _unsigned(seeds: list[int]) -> tuple[int, int]:
    return seeds[0] & BITS_64, seeds[1] & BITS_64


def linear(
    operation: str,
    rows: tuple[Tensor, Tensor, Tensor],
    bound: dict[str, Tensor],
    max_seqlen: int | None,
    scale: float | None,
    layout: str,
    rounding: str,
    seeds: tuple[int, int],
    threads: int,
) -> None:
    """`linear.compute`, for torch to see where it wants to."""
    if _goes_past((*rows, *bound.values())):
        linear_calls.compute(operation, rows, bound, max_seqlen, scale, layout, rounding, seeds, threads)
        return
    bits = [signed(seeds[0]), signed(seeds[1])]
    _linear_operators[operation](*rows, *_by_use(bound), max_seqlen, scale, layout, rounding, bits, threads)


def flush(bound: dict[str, Tensor], layout: str, rounding: str, seeds: tuple[int, int], threads: int) -> None:
    """`linear_ring.compute_flush`, likewise."""
    if _goes_past(tuple(bound.values())):
        linear_ring.compute_flush(bound, layout, rounding, seeds, threads)
        return
    _flush_operator(*_by_use(bound), layout, rounding, [signed(seeds[0]), signed(seeds[1])], threads)


def append(
    arrays: tuple[Tensor, Tensor, Tensor, Tensor],
    bound: dict[str, Tensor],
    q: Tensor | None,
    turned: Tensor | None,
    max_seqlen_q: int | None,
    rotary_interleaved: bool,
    threads: int,
) -> None:
    """`operations.compute_append`, likewise."""
    if _goes_past((*arrays, *bound.values(), *(() if q is None else (q, turned)))):
        operations.compute_append(arrays, bound, q, turned, max_seqlen_q, rotary_interleaved, threads)
        return
    slots = " ".join(bound)
    _append_operator(*arrays, q, turned, list(bound.values()), slots, max_seqlen_q, rotary_interleaved, threads)


def _linear_on_device(operation: str) -> Any:
    def on_device(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: list[Tensor],
        written: list[Tensor],
        slots: str,
        max_seqlen: int | None,
        scale: float | None,
        layout: str,
        rounding: str,
        seeds: list[int],
        threads: int,
    ) -> None:
        bound = _by_slot(tensors, written, slots)
        rows = (q, k, v)
        linear_calls.compute(operation, rows, bound, max_seqlen, scale, layout, rounding, _unsigned(seeds), threads)

    return on_device


def _flush_on_device(
    tensors: list[Tensor],
    written: list[Tensor],
    slots: str,
    layout: str,
    rounding: str,
    seeds: list[int],
    threads: int,
) -> None:
    linear_ring.compute_flush(_by_slot(tensors, written, slots), layout, rounding, _unsigned(seeds), threads)


def _append_on_device(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    q: Tensor | None,
    q_rotated: Tensor | None,
    tensors: list[Tensor],
    slots: str,
    max_seqlen_q: int | None,
    rotary_interleaved: bool,
    threads: int,
) -> None:
    arrays, bound = (k_cache, v_cache, k_new, v_new), _by_slot(tensors, [], slots)
    operations.compute_append(arrays, bound, q, q_rotated, max_seqlen_q, rotary_interleaved, threads)


def _fake(*_: Any) -> None:
    """Everything that is written is given."""


for key in ("CPU", "CUDA"):
    for name in _linear_operators:
        LIBRARY.impl(name, _linear_on_device(name), key)
    LIBRARY.impl("linear_flush", _flush_on_device, key)
    LIBRARY.impl("kv_append", _append_on_device, key)
for name in (*_linear_operators, "linear_flush", "kv_append"):
    torch.library.register_fake(f"tessera::{name}", _fake, lib=LIBRARY)
