# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention as one node of autograd, whose backward holds little more than its inputs and results.

Three things keep its memory small, in units of the bytes U of a q of 16 bits:

- The backward takes some key heads at a time, and the query heads that share them. Sums of gradients in fp32, what the
  kernels need beside them (2 U for dq of all heads) and results that are computed again are those of a group.
- Where results are to be computed again, the forward keeps that of the compressed branch alone: 1.5 U with what
  rounding lost. The other two would be 3 U; they cost little to compute.
- All branches add to the same sums in fp32, so that no gradient of a branch exists by itself, and each gradient is
  rounded once.

Gates of 1/3 are applied to the sums, others to the gradient of each branch's result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack

# As modules: torch keeps the class below to the very end, and through a function of theirs every cached plan.
from .. import _arguments, _execute, native_sparse
from .. import tiles as tile_lists
from ..native_sparse import branches
from ..native_sparse import gates as nsa_gates
from ..native_sparse import operations as nsa_operations
from . import autograd, head_groups, layouts, operators
from .gradients import first_derivatives_only

# Bytes: results of the selected and window branches that are kept where nobody says; on a GPU more, up to this share of
# the memory that is free. A backward needs about as much again beside what it is given.
MOST_KEPT = 4 << 30
MOST_SHARE_KEPT = 0.25
_ORDER = (2, 1, 0)  # of branches in the backward


class Parameters(NamedTuple):
    """Tensors of a call beside q, k and v, or their gradients."""

    gate_weight: Tensor | None
    gates: Tensor | None
    k_projection: Tensor | None
    v_projection: Tensor | None
    cu_seqlens: Tensor | None


class Result(NamedTuple):
    """Of a branch. residual: what rounding lost, None of fp32."""

    out: Tensor
    lse: Tensor
    residual: Tensor | None = None


class Sums(NamedTuple):
    """fp32 gradients of some heads, which branches add to."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def nsa_is_one_node(q: Any, k: Any, v: Any, given: tuple[Any, ...], lists: tuple[Any, Any]) -> bool:
    """Whether `nsa` takes this call: plain tensors of one place that nothing else wants to see, and lists of such."""
    if torch.compiler.is_compiling() or _len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    tensors = [q, k, v, *(x for x in given if x is not None)]
    for tiles in lists:
        if tiles is not None:
            if not isinstance(tiles, tile_lists.TileList):
                return False
            tensors += [array for _, array in tiles.arrays()]
    if not all(isinstance(x, Tensor) for x in tensors):
        return False
    place, device = q.get_device(), q.device.type
    if not all(autograd.is_plain_tensor(x, place) for x in tensors):
        return False
    return not torch.is_autocast_enabled(device) or {q.dtype, k.dtype, v.dtype} == {torch.get_autocast_dtype(device)}


def nsa(
    call: branches.NsaCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: tuple[Tensor | None, ...],
    lists: tuple[tile_lists.TileList | None, tile_lists.TileList | None],
    recompute: bool | None,
) -> tuple[Tensor, tile_lists.TileList, tile_lists.TileList | None]:
    """The result and both lists, recorded by autograd."""
    parameters = Parameters(*given)
    with torch.no_grad():
        pooled = nsa_operations.nsa_pool(k, v, **_pooling(call, parameters))
        tiles = native_sparse.lists_of(call, q, pooled[0], lists, parameters.cu_seqlens)
    if recompute is None:
        recompute = _is_too_much(2 * q.numel() // q.shape[-1] * v.shape[-1] * (q.element_size() + _has_residual(q)), q)
    out: Tensor = NsaFunction.apply(call, tiles, recompute, pooled, q, k, v, *parameters)
    return (out, *tiles)


def _has_residual(q: Tensor) -> bool:
    return q.element_size() == 2


def _is_too_much(kept: int, q: Tensor) -> bool:
    """Whether results of so many bytes are computed again rather than kept."""
    if kept < MOST_KEPT or not q.is_cuda:
        return kept >= MOST_KEPT
    own = torch.cuda.memory_reserved(q.device) - torch.cuda.memory_allocated(q.device)
    return kept > MOST_SHARE_KEPT * (torch.cuda.mem_get_info(q.device)[0] + own)


class NsaFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: branches.NsaCall,
        lists: tuple[tile_lists.TileList, tile_lists.TileList | None],
        recompute: bool,
        pooled: tuple[Tensor, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *given: Tensor | None,
    ) -> Tensor:
        parameters = Parameters(*given)
        work = _Work(call, q, k, v, parameters, pooled, lists)
        if q.is_cuda:
            work.refuse_without_backward()
        if recompute:
            kept = [work.attend_for_backward(0)]
            result = torch.empty_like(kept[0].out)
            for heads in work.groups():
                work.of_heads(heads).finish(heads.of_queries(kept[0].out), heads.of_queries(result))
        else:
            outs = q.new_empty((nsa_gates.BRANCHES, *q.shape[:-1], v.shape[-1]))
            kept = [work.attend_for_backward(branch, out) for branch, out in enumerate(outs)]
            result = nsa_gates.nsa_gate(outs, **work.gating())
        saved = [q, k, v, *parameters, *(x for one in kept for x in (*one, None)[:3])]
        arrays = [tiles.arrays() for tiles in lists if tiles is not None]
        ctx.save_for_backward(*saved, *pooled, *(array for listed in arrays for _, array in listed))
        ctx.call, ctx.kept, ctx.pooled = call, len(kept), len(pooled)
        ctx.lists = [
            (tiles.form, tiles.block, [name.removeprefix("tile_") for name, _ in listed])
            for tiles, listed in zip((x for x in lists if x is not None), arrays, strict=True)
        ]
        return result

    @staticmethod
    @first_derivatives_only("nsa")
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        q, k, v = (next(saved) for _ in range(3))
        parameters = Parameters(*(next(saved) for _ in Parameters._fields))
        kept = [Result(*(next(saved) for _ in Result._fields)) for _ in range(ctx.kept)]
        pooled = tuple(next(saved) for _ in range(ctx.pooled))
        lists = [
            tile_lists.TileList(form=form, block=block, **{name: next(saved) for name in names})
            for form, block, names in ctx.lists
        ]
        found = (lists[0], lists[1] if len(lists) > 1 else None)
        q, k, v = layouts.with_rows_apart(q), layouts.with_rows_apart(k), layouts.with_rows_apart(v)
        work = _Work(ctx.call, q, k, v, parameters, pooled, found)
        return (None,) * 4 + work.differentiate(layouts.with_aligned_rows(dout), kept)


def _pooling(call: branches.NsaCall, parameters: Parameters) -> dict[str, Any]:
    """Keywords of nsa_pool and its gradient."""
    return {
        "length": call.options.length,
        "stride": call.options.stride,
        "k_projection": parameters.k_projection,
        "v_projection": parameters.v_projection,
        "cu_seqlens_k": parameters.cu_seqlens,
        "max_seqlen_k": call.max_seqlen,
        "threads": call.threads,
    }


class _Work:
    """A call whose compressed keys and lists are known, of all heads or of some."""

    def __init__(
        self,
        call: branches.NsaCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        parameters: Parameters,
        pooled: tuple[Tensor, ...],
        lists: tuple[tile_lists.TileList, tile_lists.TileList | None],
    ) -> None:
        self.call, self.q, self.k, self.v = call, q, k, v
        self.parameters, self.pooled, self.lists = parameters, pooled, lists
        self.keys = (pooled[:2], (k, v), (k, v))
        blocks = pooled[2] if len(pooled) > 2 else None
        self.options = branches.branch_options(call, lists, parameters.cu_seqlens, blocks)
        self.has_residual = _has_residual(q)
        self.is_mean = parameters.gate_weight is None and parameters.gates is None

    def of_heads(self, heads: head_groups.Heads) -> _Work:
        parameters = heads.of_parameters(self.parameters)
        pooled = (*(heads.of_keys(x) for x in self.pooled[:2]), *self.pooled[2:])
        q, k, v = heads.of_queries(self.q), heads.of_keys(self.k), heads.of_keys(self.v)
        tiles, compressed_tiles = self.lists
        lists = (
            heads.of_list(tiles, self.q, self.k),
            None if compressed_tiles is None else heads.of_list(compressed_tiles, self.q, self.k),
        )
        return _Work(self.call, q, k, v, parameters, pooled, lists)

    def groups(self) -> Iterator[head_groups.Heads]:
        return head_groups.groups_of(self.q, self.k)

    def gating(self) -> dict[str, Any]:
        """Keywords of nsa_gate and its gradient."""
        gate_weight, gates, _, _, cu_seqlens = self.parameters
        return {
            "q": None if gate_weight is None else self.q,
            "gate_weight": gate_weight,
            "gates": gates,
            "cu_seqlens": cu_seqlens,
            "max_seqlen": self.call.max_seqlen,
            "threads": self.call.threads,
        }

    def finish(self, compressed: Tensor, to: Tensor) -> None:
        """Writes the result, from that of the compressed branch."""
        outs = self._beside(compressed)
        for branch in range(1, nsa_gates.BRANCHES):
            branches.attention(self.q, *self.keys[branch], out=outs[branch], **self.options[branch])
        nsa_gates.nsa_gate(outs, out=to, **self.gating())

    def _beside(self, compressed: Tensor) -> Tensor:
        """Memory for the results of all branches, with that of the first."""
        outs = compressed.new_empty((nsa_gates.BRANCHES, *compressed.shape))
        outs[0].copy_(compressed)
        return outs

    def attend_for_backward(self, branch: int, out: Tensor | None = None) -> Result:
        made: dict[str, Any] = {"return_lse": True, "return_residual": self.has_residual}
        return Result(*branches.attention(self.q, *self.keys[branch], out=out, **made, **self.options[branch]))

    def refuse_without_backward(self) -> None:
        """Plans the backward of each branch, as it will run. Raises NotImplementedError where there is none."""
        group = self.of_heads(next(self.groups()))
        q, dtypes = group.q, (self.q.dtype, self.k.dtype, self.v.dtype, self.q.dtype)
        for branch, ((keys, values), options) in enumerate(zip(group.keys, group.options, strict=True)):
            adds = branch != _ORDER[0] or self._adds_to_zero()
            extra = ("grad_fp32", "accumulate") if adds else ("grad_fp32",)
            call = _arguments.parse(q, keys, values, **_in_backward(options), return_residual=self.has_residual)
            if self.has_residual:
                residual = torch.empty((*q.shape[:-1], values.shape[-1]), dtype=torch.int8, device="meta")
                call = call._replace(slots=(*call.slots, "o_residual"), tensors=(*call.tensors, residual))
            shapes = _execute.shapes_of(call, q, keys, values)
            try:
                _execute.plan_for(_execute.BACKWARD, call.features, shapes, dtypes, extra, q.get_device())
            except NotImplementedError as error:
                raise NotImplementedError(f"{error}; or torch.no_grad(), where no gradient is wanted") from None

    def differentiate(self, dout: Tensor, kept: list[Result]) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v and the parameters."""
        gradients = Sums(*(torch.empty_like(x) for x in (self.q, self.k, self.v)))
        of_parameters = Parameters(*(None if x is None else torch.empty_like(x) for x in self.parameters[:4]), None)
        for heads in self.groups():
            own = [Result(*(None if x is None else heads.of_queries(x) for x in one)) for one in kept]
            to = Sums(heads.of_queries(gradients.dq), heads.of_keys(gradients.dk), heads.of_keys(gradients.dv))
            self.of_heads(heads)._differentiate(heads.of_queries(dout), own, to, heads.of_parameters(of_parameters))
        return (*gradients, *of_parameters)

    def _differentiate(self, dout: Tensor, kept: list[Result], to: Sums, of_parameters: Parameters) -> None:
        """Likewise, of all heads that there are, written to `to` and `of_parameters`."""
        sums = Sums(*(_sums_for(x) for x in to))
        if self._adds_to_zero():
            for x in sums:
                x.zero_()
        pooled = Sums(sums.dq, *(torch.zeros_like(x, dtype=torch.float32) for x in self.pooled[:2]))
        self._add_branches(dout, kept, sums, pooled, of_parameters)
        shares = self._add_pool(pooled, sums)
        factor = 1 / nsa_gates.BRANCHES if self.is_mean else 1.0
        targets = (*to, *(x for x in of_parameters[2:4] if x is not None))
        for target, found in zip(targets, (*sums, *shares), strict=True):
            if target is not found or factor != 1:
                torch.mul(found, factor, out=target)

    def _add_branches(
        self, dout: Tensor, kept: list[Result], sums: Sums, pooled: Sums, of_parameters: Parameters
    ) -> None:
        """Adds the gradients of all branches, and of gates that are no constant. The order of the sums is that in which
        autograd adds up gradients where each branch is a node. pooled: gradients of q and the compressed keys."""
        douts = [dout] * nsa_gates.BRANCHES
        if not self.is_mean:
            kept = self._all(kept)
            douts = self._add_gates(dout, kept, sums, of_parameters)
        for branch in _ORDER:
            result = kept[branch] if branch < len(kept) else None
            self._add_branch(branch, douts[branch], result, sums if branch else pooled)

    def _add_gates(self, dout: Tensor, kept: list[Result], sums: Sums, of_parameters: Parameters) -> list[Tensor]:
        """The gradients of the branches' results."""
        outs = tuple(x.out for x in kept)
        douts, *others = nsa_gates.nsa_gate_backward(dout, outs, **self.gating())
        if of_parameters.gate_weight is not None:
            sums.dq.add_(others[0])
            of_parameters.gate_weight.copy_(others[1])
        elif of_parameters.gates is not None:
            of_parameters.gates.copy_(others[0])
        return list(douts.unbind(0))

    def _adds_to_zero(self) -> bool:
        """Whether the first branch adds to sums, instead of writing them: gates have given a gradient of q, or there
        are rows of no sequence, which it need not write."""
        return not self.is_mean or self.parameters.cu_seqlens is not None

    def _all(self, kept: list[Result]) -> list[Result]:
        """Results of all branches; those that were not kept lie in one memory, with a copy of the first."""
        if len(kept) == nsa_gates.BRANCHES:
            return kept
        outs = self._beside(kept[0].out)
        again = [self.attend_for_backward(branch, outs[branch]) for branch in range(1, nsa_gates.BRANCHES)]
        return [kept[0]._replace(out=outs[0]), *again]

    def _add_branch(self, branch: int, dout: Tensor, result: Result | None, sums: Sums) -> None:
        """result: None where it was not kept."""
        if result is None:
            result = self.attend_for_backward(branch)
        branches.differentiate_branch(
            _in_backward(self.options[branch]),
            dout,
            self.q,
            self.keys[branch],
            result._replace(lse=result.lse.contiguous()),
            sums,
            accumulate=branch != _ORDER[0] or self._adds_to_zero(),
        )

    def _add_pool(self, of_pooled: Sums, sums: Sums) -> tuple[Tensor, ...]:
        """Adds the gradients of what was pooled to those of keys and values; gives those of the projections."""
        parameters = self.parameters
        keys = sums.dk, sums.dv  # nothing but their shapes and types is read without projections
        if parameters.k_projection is not None and parameters.v_projection is not None:
            keys = self.k.float(), self.v.float()
            wide = parameters.k_projection.float(), parameters.v_projection.float()
            parameters = parameters._replace(k_projection=wide[0], v_projection=wide[1])
        dk, dv, *shares = nsa_operations.nsa_pool_backward(
            of_pooled.dk, of_pooled.dv, *keys, **_pooling(self.call, parameters)
        )
        sums.dk.add_(dk)
        sums.dv.add_(dv)
        return tuple(shares)


def _in_backward(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"deterministic": operators.is_deterministic(options["deterministic"])}


def _sums_for(target: Tensor) -> Tensor:
    """fp32 memory to add gradients up in: the target itself where it is fp32."""
    return target if target.dtype == torch.float32 else torch.empty_like(target, dtype=torch.float32)
