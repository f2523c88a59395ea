# SPDX-License-Identifier: Apache-2.0
"""The operators ``tessera::linear_attention`` and ``tessera::linear_attention_backward``.

The state of each sequence is an argument and a result, where ``tessera.linear_chunk`` keeps a pool: what a backward
needs of the states that a sequence began with must not be written over. An operator returns no argument, so that a
final state that nobody asked for is a tensor without elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# As modules: torch keeps the kernels below to the very end, and through a function of theirs every cached plan.
from .. import linear, operations
from .._libraries import library_of
from . import operators
from .layouts import with_rows

_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor decay_slopes, Tensor? initial_state, Tensor? cu_seqlens, SymInt? max_seqlen,"
    " float? scale, str layout, bool output_final_state"
)
operators.LIBRARY.define(f"linear_attention({_CALL}) -> (Tensor out, Tensor final_state)")
operators.LIBRARY.define(
    f"linear_attention_backward(Tensor dout, Tensor? dfinal_state, {_CALL})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dinitial_state)"
)

_operator = torch.ops.tessera.linear_attention.default
_backward_operator = torch.ops.tessera.linear_attention_backward.default


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay_slopes: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    scale: float | None,
    layout: str,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    if decay_slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "decay_slopes: got a tensor that requires grad; want one that does not: linear_attention has no gradient "
            "of slopes"
        )
    return _operator(q, k, v, decay_slopes, initial_state, cu_seqlens, max_seqlen, scale, layout, output_final_state)


def _final_shape(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, layout: str) -> Any:
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return linear.state_shape(batch, q.shape, v.shape, layout)


def _first_state(
    q: Tensor, v: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None, layout: str, keeps: bool
) -> Tensor | None:
    """Memory of its own: what the sequences begin with. None where no state goes in or out."""
    shape = _final_shape(q, v, cu_seqlens, layout)
    if shape[0] == 0:
        return None
    if initial is not None:
        return initial.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return torch.zeros(shape, dtype=torch.float32, device=q.device) if keeps else None


def _bound_of(state: Tensor | None, decay_slopes: Tensor, cu_seqlens: Tensor | None) -> dict[str, Tensor]:
    starts = None if cu_seqlens is None else cu_seqlens.to(torch.int32)
    return linear.bound_arrays(state=state, decay_slopes=decay_slopes, cu_seqlens_q=starts)


def _on_device(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay_slopes: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    scale: float | None,
    layout: str,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    state = _first_state(q, v, initial_state, cu_seqlens, layout, output_final_state)
    bound = _bound_of(state, decay_slopes, cu_seqlens)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    problem = linear.problem_of("linear_chunk", (q, k, v, out), bound, max_seqlen, scale, layout)
    operations.run_problem(
        library_of(q, "q"), problem, 0, ("q", "k", "v", *bound, "o"), (q, k, v, *bound.values(), out), q
    )
    if not output_final_state:
        return out, q.new_empty(0, dtype=torch.float32)
    none = q.new_empty(_final_shape(q, v, cu_seqlens, layout), dtype=torch.float32)  # of no sequences
    return out, none if state is None else state


def _backward_on_device(
    dout: Tensor,
    dfinal_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay_slopes: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    scale: float | None,
    layout: str,
    output_final_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dout = with_rows(dout)
    state = _first_state(q, v, initial_state, cu_seqlens, layout, dfinal_state is not None)
    bound = _bound_of(state, decay_slopes, cu_seqlens)
    problem = linear.problem_of("linear_chunk", (q, k, v, dout), bound, max_seqlen, scale, layout, backward=True)
    made = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
    dinitial = q.new_empty(0 if initial_state is None else initial_state.shape, dtype=torch.float32)
    if initial_state is not None and state is not None:
        made["dstate_initial"] = dinitial
    final = None if dfinal_state is None or state is None else dfinal_state.contiguous()
    bound = {**bound, **linear.bound_arrays(dstate_final=final), "dout": dout, **made}
    operations.run_problem(library_of(q, "q"), problem, 0, ("q", "k", "v", *bound), (q, k, v, *bound.values()), q)
    return made["dq"], made["dk"], made["dv"], dinitial if initial_state is None else dinitial.to(initial_state.dtype)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay_slopes: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    scale: float | None,
    layout: str,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    shape = _final_shape(q, v, cu_seqlens, layout) if output_final_state else (0,)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(shape, dtype=torch.float32)


def _backward_fake(
    dout: Tensor, dfinal_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *call: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    initial = call[1]
    none = q.new_empty(0, dtype=torch.float32)
    dinitial = none if initial is None else torch.empty_like(initial, memory_format=torch.contiguous_format)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dinitial


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.call = inputs[6:]
    ctx.set_materialize_grads(False)
    if not ctx.call[-1]:
        ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dout: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, slopes, initial, starts = ctx.saved_tensors
    if dout is None:
        dout = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    dq, dk, dv, dinitial = _backward_operator(dout, dfinal, q, k, v, slopes, initial, starts, *ctx.call)
    return dq, dk, dv, None, None if initial is None else dinitial, None, *(None for _ in ctx.call)


def _refuse_second(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError(
        "linear_attention_backward: got a derivative of a gradient (double backward); want first derivatives only"
    )


for key in ("CPU", "CUDA"):
    operators.LIBRARY.impl("linear_attention", _on_device, key)
    operators.LIBRARY.impl("linear_attention_backward", _backward_on_device, key)
torch.library.register_fake("tessera::linear_attention", _fake, lib=operators.LIBRARY)
torch.library.register_fake("tessera::linear_attention_backward", _backward_fake, lib=operators.LIBRARY)
torch.library.register_autograd("tessera::linear_attention", _backward, setup_context=_save, lib=operators.LIBRARY)
torch.library.register_autograd("tessera::linear_attention_backward", _refuse_second, lib=operators.LIBRARY)
