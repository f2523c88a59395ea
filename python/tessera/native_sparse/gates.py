# SPDX-License-Identifier: Apache-2.0
"""The gates of native sparse attention's branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _core
from .._arguments import longest
from .._libraries import dtype_name, library_of, refuse_gradient
from ..operations import run_problem, stacked

Array = Any

BRANCHES = 3  # compressed, selected, window


class _Gating:
    """What a call of nsa_gate and its gradient share."""

    def __init__(
        self,
        branches: Array | Sequence[Array],
        q: Array | None,
        gate_weight: Array | None,
        gates: Array | None,
        cu_seqlens: Array | None,
        max_seqlen: int | None,
        out_dtype: Any,
        backward: bool,
    ) -> None:
        if gate_weight is not None and gates is not None:
            raise ValueError("gates: got both gates and gate_weight; want one of them, or neither for 1/3 each")
        if gate_weight is not None and q is None:
            raise ValueError("q: got None; want the queries, of which gate_weight makes gates")
        parts = tuple(branches) if isinstance(branches, (tuple, list)) else branches
        count = len(parts) if isinstance(parts, tuple) else parts.shape[0]
        if count != BRANCHES:
            raise ValueError(f"branches: got {count}; want {BRANCHES}: compressed, selected and window")
        self.first = parts[0] if isinstance(parts, tuple) else parts
        packed = cu_seqlens is not None
        shape = tuple(self.first.shape) if isinstance(parts, tuple) else tuple(parts.shape[1:])
        if len(shape) != (3 if packed else 4):
            raise ValueError(
                f"branches: got {len(shape)} dimensions each; want (batch, seqlen, heads, dim), or (tokens, heads, dim)"
                " with cu_seqlens"
            )
        self.shape = shape
        self.library = library_of(self.first, "branches")
        self.parts = stacked(parts, "o_parts") if isinstance(parts, tuple) else parts
        self.part_dtype = dtype_name(self.first.dtype)
        self.out_dtype = self.part_dtype if out_dtype is None else dtype_name(out_dtype)
        self.bound = {"o_parts": self.parts}
        sized = {"batch": shape[0], "seqlen_q": shape[1]}
        if cu_seqlens is not None:
            most = longest("cu_seqlens_q", cu_seqlens, max_seqlen) or shape[0]
            batch = cu_seqlens.shape[0] - 1
            sized = {"batch": batch, "seqlen_q": most, "q_layout": "varlen", "total_q": shape[0]}
            self.bound["cu_seqlens_q"] = cu_seqlens
        if gate_weight is not None:
            self.bound |= {"q": q, "gate_weight": gate_weight}
        if gates is not None:
            self.bound["gates"] = gates
        self.kind = "mean" if gate_weight is None and gates is None else "given" if gates is not None else "sigmoid"
        query = self.first if gate_weight is None else q
        self.problem = _core.Problem(
            "nsa_gate",
            backward=backward,
            **sized,
            heads_q=shape[-2],
            heads_kv=shape[-2],
            head_dim_qk=query.shape[-1],
            head_dim_v=shape[-1],
            q_type=dtype_name(query.dtype),
            v_type=self.part_dtype,
            o_type=self.out_dtype,
            gate=self.kind,
        )


def nsa_gate(
    branches: Array | Sequence[Array],
    *,
    q: Array | None = None,
    gate_weight: Array | None = None,
    gates: Array | None = None,
    cu_seqlens: Array | None = None,
    max_seqlen: int | None = None,
    out_dtype: Any = None,
    out: Array | None = None,
    threads: int = 0,
) -> Array:
    """Σ g · O over the compressed, selected and window branches: (3, b, sq, hq, dv), or a sequence of three.

    Packed: (3, tokens, hq, dv) with cu_seqlens int32 (b + 1). Gates: sigmoid(q · gate_weight), gate_weight (hq, 3, d)
    as q (b, sq, hq, d); or `gates`, fp32 (b, sq, hq, 3); or neither: 1/3. A gate of exactly 0 leaves its branch out,
    whatever it holds. Returns (b, sq, hq, dv) in `out_dtype` (default: that of the branches), or `out`, memory for it.
    Raises as `attention` does; ValueError for torch tensors that require grad: `nsa` has gradients.

    Source: Yuan et al. 2025 (arXiv:2502.11089), equation 5; docs/nsa.md.
    """
    parts = branches if isinstance(branches, (tuple, list)) else (branches,)
    named = {f"branches[{number}]": part for number, part in enumerate(parts)}
    named |= {"q": q, "gate_weight": gate_weight, "gates": gates}
    refuse_gradient("nsa_gate", "has none, nsa has", **{name: x for name, x in named.items() if x is not None})
    dtype = out_dtype if out is None else out.dtype
    call = _Gating(branches, q, gate_weight, gates, cu_seqlens, max_seqlen, dtype, False)
    made = call.library.empty(call.shape, call.out_dtype, call.first) if out is None else out
    slots, arrays = (*call.bound, "o"), (*call.bound.values(), made)
    run_problem(call.library, call.problem, threads, slots, arrays, call.first)
    return call.library.finish(made, call.first) if out is None else out


def nsa_gate_backward(
    dout: Array,
    branches: Array | Sequence[Array],
    *,
    q: Array | None = None,
    gate_weight: Array | None = None,
    gates: Array | None = None,
    cu_seqlens: Array | None = None,
    max_seqlen: int | None = None,
    threads: int = 0,
) -> tuple[Array, ...]:
    """Gradients of `nsa_gate` with the same keywords; dout as its result.

    Returns (dbranches,), (3, b, sq, hq, dv) as branches; with gate_weight (dbranches, dq, dgate_weight), the last fp32;
    with gates (dbranches, dgates). Raises as `nsa_gate` does.
    """
    refuse_gradient("nsa_gate_backward", "has no gradient itself", dout=dout)
    call = _Gating(branches, q, gate_weight, gates, cu_seqlens, max_seqlen, dout.dtype, True)
    empty = call.library.empty
    made = {"do_parts": empty((BRANCHES, *call.shape), call.part_dtype, call.first)}
    if gate_weight is not None and q is not None:
        made["dq"] = empty(tuple(q.shape), dtype_name(q.dtype), call.first)
        made["dgate_weight"] = empty(tuple(gate_weight.shape), "fp32", call.first)
    if gates is not None:
        made["dgates"] = empty(tuple(gates.shape), "fp32", call.first)
    slots = (*call.bound, "dout", *made)
    arrays = (*call.bound.values(), dout, *made.values())
    run_problem(call.library, call.problem, threads, slots, arrays, call.first)
    return tuple(call.library.finish(array, call.first) for array in made.values())
