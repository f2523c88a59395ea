# SPDX-License-Identifier: Apache-2.0
"""Native sparse attention of sequences that are spread over ranks: docs/nsa.md defines it.

A rank fetches the keys and values that its queries may see, as `Gather` does, pools them, selects for its own queries
at their positions in the whole, and computes the three branches. So no compressed key is moved, and blocks that overlap
(a stride below the length) may cross the ends of shards. Gradients of keys, of all branches together, go back to their
owner in fp32, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..native_sparse import NsaCall, options_of, tile_of
from ..native_sparse.gates import BRANCHES, nsa_gate, nsa_gate_backward
from ..native_sparse.operations import compressed_blocks, nsa_pool, nsa_pool_backward, nsa_select
from ..tiles import TileList
from ..torch.gradients import first_derivatives_only
from ..torch.head_groups import Heads, groups_of
from . import partial
from .arguments import Given, refuse_bad_gates, refuse_bad_tensors, sparse_summary
from .gather import Call, Gather, Pair, call_of
from .partial import Asked, Result, Sums, Upstream, zeros_like
from .reach import Mask
from .ring import bounds, joined, upstream_rows
from .shards import Layout, Part

if TYPE_CHECKING:
    from .api import ContextParallel


class Parameters(NamedTuple):
    """Tensors of a call beside q, k and v; gates are of this rank's rows, the others are whole on every rank."""

    gate_weight: Tensor | None
    gates: Tensor | None
    k_projection: Tensor | None
    v_projection: Tensor | None


def refuse_tiles_that_are_cut(layout: Layout, tile: int) -> None:
    """Raises ValueError unless every piece of a sequence begins at a multiple of `tile` rows, which share a list."""
    for rank in range(layout.ranks):
        for part in layout.parts(rank):
            for start, length in zip(*part, strict=True):
                if length and start % tile:
                    raise ValueError(
                        f"{'cu_seqlens' if layout.packed else 'seqlen'}: got a piece of rank {rank} that begins at "
                        f"token {start}, in {layout}; want multiples of the tile of {tile} rows, as multiple={tile} of "
                        "context_parallel cuts them"
                    )


class SparseAsked(NamedTuple):
    """What a call asks for, as it came."""

    preset: str
    options: dict[str, Any]
    causal: bool
    scale: float | None
    deterministic: bool
    threads: int


def _call_of(cp: ContextParallel, asked: SparseAsked, q: Tensor, k: Tensor, given: Parameters) -> NsaCall:
    """Raises for what this rank's own arguments are refused for."""
    if cp.method not in ("auto", "all_gather"):
        raise NotImplementedError(f"method: got {cp.method!r} for nsa; want 'auto' or 'all_gather'")
    if cp.team.outer is not None:
        raise NotImplementedError("group: got two levels for nsa; want one group")
    options = options_of(asked.preset, asked.options)
    if options.compressed_top:
        raise NotImplementedError(
            f"compressed_top: got {options.compressed_top} over ranks; want 0, which is all compressed keys"
        )
    tile = tile_of(options, q.shape[-2], k.shape[-2])
    refuse_tiles_that_are_cut(cp.layout, tile)
    refuse_bad_gates(cp.layout, q, given)
    return NsaCall(options, tile, asked.causal, asked.scale, None, asked.threads, asked.deterministic)


def examined(
    cp: ContextParallel, asked: SparseAsked, q: Tensor, k: Tensor, v: Tensor, given: Parameters
) -> tuple[NsaCall | None, dict[str, str], Any, Exception | None]:
    """(the call, what must be the same on every rank, a key of it, what this rank's own arguments are refused for)."""
    shown = {"preset": asked.preset, **asked.options, "scale": asked.scale, "deterministic": asked.deterministic}
    shown["threads"] = asked.threads
    plain = Given(q, k, v, (asked.causal, None, 0), shown, None, None, None, False)
    failure = refuse_bad_tensors(cp.layout, cp.rank, plain)
    if failure is None:
        try:
            call = _call_of(cp, asked, q, k, given)
            return call, *sparse_summary(cp, plain, call, given), None
        except (TypeError, ValueError, NotImplementedError) as error:
            failure = error
    return None, {}, None, failure


def run(schedule: SparseGather, call: NsaCall, q: Tensor, k: Tensor, v: Tensor, given: Parameters) -> Tensor:
    """out of this rank's rows, recorded by autograd."""
    tensors = (q, k, v, *given)
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    asked = schedule.fetched(call, schedule.layout.packed, q.shape[-2])._replace(keeps_residual=recorded)
    out: Tensor = SparseFunction.apply(schedule, call, asked, *tensors)
    return out


class Branch(NamedTuple):
    """A branch as a call of attention. pooled: its keys are the compressed ones."""

    asked: Asked
    pooled: bool = False


class Work(NamedTuple):
    """A part of a rank's queries, and its keys. begin, end: its rows in the rank's tensors."""

    number: int
    fetched: Call
    begin: int
    end: int
    queries: Part
    keys: Part
    k: Tensor
    v: Tensor
    pooled: tuple[Tensor, ...]
    compressed: Part


class SparseGather(Gather):
    """The branches of a rank's queries over the keys of all ranks."""

    def fetched(self, call: NsaCall, packed: bool, heads: int) -> Asked:
        """What is fetched and given back: keys up to each row, and to the end of a compressed key that has started."""
        started = call.options.length - 1 if call.options.visible == "started" else 0
        mask = Mask(None, started) if call.causal else Mask()
        options: dict[str, Any] = {"threads": call.threads, "deterministic": call.deterministic}
        options |= {} if call.scale is None else {"scale": call.scale}
        return Asked(mask, options, packed, heads)

    def branches(self, call: NsaCall, asked: Asked, tiles: TileList) -> tuple[Branch, ...]:
        o, side = call.options, 0 if call.causal else call.options.window - 1
        seen_from = o.length if o.visible == "complete" else 1
        compressed = {"compressed_causal": (seen_from, o.stride)} if call.causal else {}
        own = Mask(None, 0) if call.causal else Mask()
        return (
            Branch(asked._replace(mask=Mask(), options=asked.options | compressed), pooled=True),
            Branch(asked._replace(mask=own, options=asked.options | {"tiles": tiles})),
            Branch(asked._replace(mask=Mask(o.window - 1, side))),
        )

    def work(self, call: NsaCall, asked: Asked, k: Tensor, v: Tensor, given: Parameters) -> list[Work]:
        """Parts that have queries, with their keys: an exchange between all ranks."""
        pieces = self._fetch(asked, k, v)
        found, own = [], bounds(self.layout, self.rank)
        for i, ((begin, end), queries) in enumerate(zip(own, self.layout.parts(self.rank), strict=True)):
            needed = call_of(asked.mask, self.layout, self.rank, i)
            if needed is None or not queries.rows:
                continue
            k1, v1 = self._keys(asked, pieces, needed, i)
            o, lengths = call.options, needed.keys.lengths
            pooled = nsa_pool(k1, v1, **self._pooling(call, asked, needed.keys, k1, given))
            blocks = tuple(compressed_blocks(n, o.length, o.stride) for n in lengths)
            compressed = Part((0,) * len(blocks), blocks)
            found.append(Work(i, needed, begin, end, queries, needed.keys, k1, v1, pooled, compressed))
        return found

    def _pooling(self, call: NsaCall, asked: Asked, keys: Part, like: Tensor, given: Parameters) -> dict[str, Any]:
        options: dict[str, Any] = {
            "length": call.options.length,
            "stride": call.options.stride,
            "k_projection": given.k_projection,
            "v_projection": given.v_projection,
            "threads": call.threads,
        }
        if asked.packed:
            options |= {"cu_seqlens_k": partial.ends_on(keys, like.device), "max_seqlen_k": max(keys.lengths)}
        return options

    def select(self, call: NsaCall, asked: Asked, q: Tensor, part: Work) -> TileList:
        """The blocks of one part's rows, at their positions in the whole."""
        o, device = call.options, q.device
        where: dict[str, Any] = {"seqlen_k": part.keys.rows}
        if asked.packed:
            where = {
                "cu_seqlens_q": partial.ends_on(part.queries, device),
                "cu_seqlens_k": partial.ends_on(part.keys, device),
                "max_seqlen_q": max(part.queries.lengths),
                "max_seqlen_k": max(part.keys.lengths),
            }
        return nsa_select(
            q,
            part.pooled[0],
            length=o.length,
            stride=o.stride,
            block=o.block,
            top=o.top,
            tile=call.tile,
            heads=o.heads,
            score=o.score,
            reduce=o.reduce,
            visible=o.visible,
            initial=o.initial,
            local=o.local,
            causal=call.causal,
            scale=call.scale,
            q_offset=partial.starts_on(asked, part.queries, q),
            threads=call.threads,
            **where,
        )

    def attend(
        self, call: NsaCall, asked: Asked, q: Tensor, k: Tensor, v: Tensor, given: Parameters
    ) -> tuple[list[Result], list[TileList]]:
        """Results of the three branches for this rank's rows, and the list of each part that has any."""
        by_branch: list[list[Result]] = [[] for _ in range(BRANCHES)]
        lists = []
        for part in self.work(call, asked, k, v, given):
            q1 = asked.rows(q, part.begin, part.end)
            lists.append(self.select(call, asked, q1, part))
            for found, branch in zip(by_branch, self.branches(call, asked, lists[-1]), strict=True):
                k1, v1, keys = _keys_of(branch, part)
                found.append(partial.forward(branch.asked, q1, k1, v1, part.queries, keys, partial=False))
        if not lists:
            return [partial.finish(asked, None, q, v.shape[-1])] * BRANCHES, []
        return [joined(asked, found) for found in by_branch], lists

    def differentiate(
        self,
        call: NsaCall,
        asked: Asked,
        given: Parameters,
        upstream: list[Upstream],
        lists: list[TileList],
        k: Tensor,
        v: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Pair | None]:
        """dq, dk and dv in fp32, and this rank's share of the gradients of both projections."""
        parts = self.work(call, asked, k, v, given)
        dq = zeros_like(upstream[0].q)
        grads, sums = self._zeros(asked, k, v)
        projections = given.k_projection, given.v_projection
        shares = [zeros_like(x) for x in projections if x is not None]
        for part, tiles in zip(parts, lists, strict=True):
            dq1 = asked.rows(dq, part.begin, part.end)
            above = [upstream_rows(asked, x, part.begin, part.end) for x in upstream]
            for heads in groups_of(above[0].q, part.k):
                own = heads.of_keys(part.k), heads.of_keys(part.v)
                pooled = (*(heads.of_keys(x) for x in part.pooled[:2]), *part.pooled[2:])
                listed = heads.of_list(tiles, above[0].q, part.k)
                told = asked.of_heads(heads.first_query, heads.first_query + heads.queries)
                gradients = self._gradients(
                    call,
                    told,
                    heads.of_parameters(given),
                    [_of_heads(heads, x) for x in above],
                    listed,
                    part._replace(k=own[0], v=own[1], pooled=pooled),
                    heads.of_queries(dq1),
                    [heads.of_keys(x, 0) for x in shares],
                )
                found = {at: (heads.of_keys(dk), heads.of_keys(dv)) for at, (dk, dv) in grads.items()}
                self._spread(asked, found, part.fetched, part.number, gradients)
        dk, dv = self._return(asked, k, v, grads, sums)
        return dq, dk, dv, (shares[0], shares[1]) if shares else None

    def _gradients(
        self,
        call: NsaCall,
        asked: Asked,
        given: Parameters,
        upstream: list[Upstream],
        tiles: TileList,
        part: Work,
        dq: Tensor,
        shares: list[Tensor],
    ) -> Pair:
        """Of the keys and values of some heads, in fp32; those of q and the projections are added to dq and shares."""
        own, compressed = ((zeros_like(x), zeros_like(y)) for x, y in ((part.k, part.v), part.pooled[:2]))
        for branch, above in zip(self.branches(call, asked, tiles), upstream, strict=True):
            k, v, keys = _keys_of(branch, part)
            to = Sums(dq, *(compressed if branch.pooled else own), None)
            partial.backward(branch.asked, above, k, v, part.queries, keys, to)
        for total, more in zip(
            (*own, *shares), self._pool_gradients(call, asked, given, part, compressed, own), strict=True
        ):
            total.add_(more)
        return own

    def _pool_gradients(
        self, call: NsaCall, asked: Asked, given: Parameters, part: Work, compressed: Pair, own: Pair
    ) -> tuple[Tensor, ...]:
        """Of keys, values and projections, from those of the compressed ones; fp32, as these are shares of sums. own:
        tensors of such gradients, of which shapes and types alone are read."""
        keys, wide = own, Parameters(None, None, None, None)
        if given.k_projection is not None and given.v_projection is not None:
            keys = part.k.float(), part.v.float()
            wide = Parameters(None, None, given.k_projection.float(), given.v_projection.float())
        return nsa_pool_backward(*compressed, *keys, **self._pooling(call, asked, part.keys, keys[0], wide))


def _of_heads(heads: Heads, given: Upstream) -> Upstream:
    """Of tensors that have all query heads; nobody has a gradient of the LSE."""
    return Upstream(*(None if x is None else heads.of_queries(x) for x in given))  # type: ignore[arg-type]


def _keys_of(branch: Branch, part: Work) -> tuple[Tensor, Tensor, Part]:
    if branch.pooled:
        return part.pooled[0], part.pooled[1], part.compressed
    return part.k, part.v, part.keys


def _gating(q: Tensor, given: Parameters, packed: bool) -> dict[str, Any]:
    """Keywords of nsa_gate; packed rows are one sequence to it."""
    rows = {"q": None if given.gate_weight is None else q, "gates": given.gates}
    if packed:
        rows = {name: None if x is None else x[None] for name, x in rows.items()}
    return {**rows, "gate_weight": given.gate_weight}


class SparseFunction(torch.autograd.Function):
    """out of a rank's rows, with first derivatives of q, k, v and the parameters."""

    @staticmethod
    def forward(
        ctx: Any, schedule: SparseGather, call: NsaCall, asked: Asked, q: Tensor, k: Tensor, v: Tensor, *given: Any
    ) -> Tensor:
        q, k, v = (x.detach() for x in (q, k, v))
        parameters = Parameters(*(None if x is None else x.detach() for x in given))
        results, lists = schedule.attend(call, asked, q, k, v, parameters)
        outs = [x.out[None] if asked.packed else x.out for x in results]
        if lists:
            out = nsa_gate(outs, **_gating(q, parameters, asked.packed), threads=call.threads)
            out = out[0] if asked.packed else out
        else:
            out = results[0].out.clone()
        ctx.save_for_backward(q, k, v, *parameters, *(x for result in results for x in result[:3]))
        ctx.told, ctx.lists = (schedule, call, asked), lists
        return out

    @staticmethod
    @first_derivatives_only("nsa")
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        schedule, call, asked = ctx.told
        q, k, v, *rest = ctx.saved_tensors
        parameters, kept = Parameters(*rest[:4]), [Result(*rest[i : i + 3]) for i in range(4, len(rest), 3)]
        dout = dout.contiguous()
        douts, of_gates = [dout] * BRANCHES, []
        if parameters.gate_weight is None and parameters.gates is None:
            douts = [dout * (1 / BRANCHES)] * BRANCHES  # one for all branches, as nsa_gate_backward rounds each
        elif ctx.lists:
            outs = [x.out[None] if asked.packed else x.out for x in kept]
            gating = _gating(q, parameters, asked.packed)
            dbranches, *of_gates = nsa_gate_backward(
                dout[None] if asked.packed else dout, outs, **gating, threads=call.threads
            )
            douts = [x[0] if asked.packed else x for x in dbranches.unbind(0)]
        upstream = [Upstream(q, do, x.out, x.residual, x.lse, None) for do, x in zip(douts, kept, strict=True)]
        dq, dk, dv, shares = schedule.differentiate(call, asked, parameters, upstream, ctx.lists, k, v)
        dweight = None if parameters.gate_weight is None else torch.zeros_like(parameters.gate_weight)
        dgates = None if parameters.gates is None else torch.zeros_like(parameters.gates)
        if of_gates:
            first = of_gates[0][0] if asked.packed else of_gates[0]
            if dweight is None:
                dgates = first
            else:
                dq, dweight = dq.add_(first), of_gates[1].to(dweight.dtype)
        made = (None, None) if shares is None else shares
        projections = [
            None if share is None or x is None else share.to(x.dtype)
            for share, x in zip(made, parameters[2:], strict=True)
        ]
        return None, None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dweight, dgates, *projections
