# SPDX-License-Identifier: Apache-2.0
"""`context_parallel`: attention over sequences that are spread over the ranks of torch.distributed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..native_sparse import Preset
from ..torch.skip import SkipAttention
from . import cost, function, native_sparse, skip
from .arguments import Given, asked_of, decode_summary, refuse_bad_tensors, seed_of, summary_of
from .decode import decode
from .faults import agree
from .gather import Gather
from .ring import Ring
from .shards import Balance, Layout, layout_of
from .spread import collected, own_rows
from .ulysses import Schedule, Ulysses
from .wire import Team, Wire, groups_of

Method = Literal["auto", "all_gather", "ring", "ulysses", "two_level"]
METHODS = ("auto", "all_gather", "ring", "ulysses", "two_level")
CHECKS = ("signature", "always", "never")


def context_parallel(
    group: Any = None,
    *,
    seqlen: int | None = None,
    cu_seqlens: Any = None,
    balance: Balance = "zigzag",
    multiple: int = 1,
    method: Method = "auto",
    timeout: float | None = None,
    machine: cost.Machine | None = None,
    memory_limit: int | None = None,
    checks: Literal["signature", "always", "never"] = "signature",
    collectives: bool | None = None,
) -> ContextParallel:
    """Attention over sequences whose rows are spread over a group. Every rank of it calls this, and each method after.

    group: a process group (None: all ranks), a DeviceMesh of one dimension; for "two_level" a DeviceMesh of two, the
        groups first, or a pair (inner, outer) of process groups: heads are exchanged inside, keys go around outside.
    seqlen: tokens of dense sequences, of all ranks together; cu_seqlens (b + 1): where packed ones begin, likewise.
    balance: "zigzag", for causal masks: two pieces of each sequence a rank; or "contiguous", one. multiple: pieces
        begin at multiples of so many tokens, which `nsa` wants of its tiles.
    method: what moves (docs/context-parallel.md); "auto" takes the one that ranks wait least for, by the model of
        `machine` (`Machine`: bandwidth, latency, flops) among those within `memory_limit` bytes.
    timeout: seconds that a rank is waited for on CPUs; None for the group's own, which is NCCL's in any case.
    checks: whether ranks compare their arguments: at the first call of each "signature", "always" or "never".
    collectives: all-gather and reduce-scatter by the backend's own instead of sends and receives; None: with NCCL.

    Raises ValueError for arguments that are wrong, RankError for a rank that does not answer.
    """
    if method not in METHODS:
        raise ValueError(f"method: got {method!r}; want one of {', '.join(map(repr, METHODS))}")
    if checks not in CHECKS:
        raise ValueError(f"checks: got {checks!r}; want one of {', '.join(map(repr, CHECKS))}")
    inner, outer = groups_of(group)
    if outer is None and method == "two_level":
        raise ValueError("group: got one; want a DeviceMesh of two dimensions, or (inner, outer), for 'two_level'")
    if outer is not None and method not in ("auto", "two_level"):
        raise ValueError(f"method: got {method!r} with two groups; want 'two_level'")
    wires = [None if x is None else Wire(x, timeout, collectives) for x in (inner, outer)]
    assert wires[0] is not None
    team = Team(wires[0], wires[1])
    layout = layout_of(team.size, seqlen=seqlen, cu_seqlens=cu_seqlens, balance=balance, multiple=multiple)
    return ContextParallel(team, layout, method, machine, memory_limit, checks)


class ContextParallel:
    """What `context_parallel` returns. Rows of this rank's tensors are those of `layout`, in its order.

    Calls that move tensors break torch.compile's graph, once each; what is in front and behind is compiled.
    """

    def __init__(
        self,
        team: Team,
        layout: Layout,
        method: Method,
        machine: cost.Machine | None,
        memory_limit: int | None,
        checks: str,
    ) -> None:
        self.team, self.layout, self.method = team, layout, method
        self._machine, self._memory_limit, self._checks = machine, memory_limit, checks
        self._agreed: set[Any] = set()
        self._schedules: dict[Any, Schedule | Ulysses] = {}

    def __repr__(self) -> str:
        return f"ContextParallel(rank {self.rank} of {self.ranks}, {self.layout}, method={self.method!r})"

    @property
    def rank(self) -> int:
        return self.team.rank

    @property
    def ranks(self) -> int:
        return self.team.size

    def over(
        self,
        *,
        seqlen: int | None = None,
        cu_seqlens: Any = None,
        balance: Balance | None = None,
        multiple: int | None = None,
    ) -> ContextParallel:
        """The same group for other sequences; nothing is moved."""
        other = copy.copy(self)
        kind = self.layout.balance if balance is None else balance
        unit = self.layout.multiple if multiple is None else multiple
        other.layout = layout_of(self.ranks, seqlen=seqlen, cu_seqlens=cu_seqlens, balance=kind, multiple=unit)
        other._schedules = {}
        return other

    def positions(self, device: Any = "cpu") -> Tensor:
        """int64 (rows): where this rank's rows stand in their sequences, for rotary embeddings."""
        return self.layout.on(torch.device(device), "positions", self.rank)

    def shard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a tensor that all ranks have, a copy. dim: that of tokens; 0 for packed ones."""
        return own_rows(self.layout, self.rank, tensor, dim)

    @torch.compiler.disable
    def unshard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor on every rank, in the order of the sequences. Its gradient is this rank's rows of the
        whole's, as if every rank computed the same loss from it."""
        return collected(self.team, self.layout, tensor, dim)

    @torch.compiler.disable
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        attention_chunk: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
        seed: Any = None,
        score: str | None = None,
        mask: str | None = None,
        return_lse: bool = False,
        keep_residual: bool = True,
        deterministic: bool = False,
        threads: int = 0,
    ) -> Any:
        """`tessera.attention` of the whole sequences: this rank's rows of it.

        q (b, rows, hq, d), k and v (b, rows, hkv, d | dv), or (rows, h, d) for packed sequences. Keywords as
        `tessera.attention` has them, the same on every rank, tensors by all heads; score and mask by name. Dropout
        draws the bits of the single call, whatever the number of ranks; without a seed the first rank draws one.

        Returns out, or (out, lse) with the LSE (b, hq, rows) or (hq, rows). Gradients: of q, k and v whole; that of the
        sinks is this rank's share, to be added up over ranks as every replicated parameter's.

        Raises ValueError on every rank where they disagree or one was given what is refused, NotImplementedError as
        `tessera.attention` does, RankError for a rank that does not answer.
        """
        options = {
            "scale": scale,
            "softcap": softcap,
            "dropout": dropout,
            "score": score,
            "mask": mask,
            "deterministic": deterministic,
            "threads": threads,
        }
        q, k, v = _autocast(q, k, v)
        masks = (causal, window, attention_chunk)
        self._compare(Given(q, k, v, masks, options, alibi_slopes, sinks, seed, return_lse))
        recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
        residual = keep_residual and recorded
        asked = asked_of(masks, options, alibi_slopes, sinks, self.layout.packed, q.shape[-2], residual)
        if dropout:
            asked = asked._replace(seed=seed_of(self.team, seed))
        schedule = self._schedule(self.method_of(q, k, v, asked.mask), q.shape[-2], k.shape[-2])
        out, lse, *_ = function.run(schedule, asked, q, k, v)
        return (out, lse) if return_lse else out

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> Tensor:
        """`attention` by flash-attn 2's arguments; its `flash_attn_varlen_func` too, where the sequences are packed."""
        left, right = (None if side < 0 else side for side in window_size)
        return self.attention(
            q,
            k,
            v,
            causal=causal,
            window=None if left is None and right is None else (left, right),
            scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            dropout=dropout_p,
            deterministic=deterministic,
        )

    @torch.compiler.disable
    def nsa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        preset: Preset = "strict",
        causal: bool = True,
        gate_weight: Tensor | None = None,
        gates: Tensor | None = None,
        k_projection: Tensor | None = None,
        v_projection: Tensor | None = None,
        scale: float | None = None,
        deterministic: bool = False,
        threads: int = 0,
        **options: Any,
    ) -> Tensor:
        """`tessera.nsa` of the whole sequences: this rank's rows of it. Keys and values move as by "all_gather".

        q (b, rows, hq, d), k and v (b, rows, hkv, d | dv), gates fp32 (b, rows, hq, 3): this rank's rows; packed
        without b. gate_weight (hq, 3, d), k_projection (hkv, d, d), v_projection (hkv, dv, dv) and keywords: as
        `tessera.nsa` has them, the same on every rank. Pieces of sequences begin at multiples of the tile, which
        `context_parallel(multiple=tile)` sees to; each rank selects for its own queries. torch.autocast casts all but
        the gates.

        Returns out (b, rows, hq, dv). Gradients: of q, k, v and gates whole; those of gate_weight and the projections
        are this rank's shares, to be added up over ranks as every replicated parameter's.

        Raises as `attention`; ValueError for a piece that cuts a tile, NotImplementedError for another method.
        """
        weights = (gate_weight, k_projection, v_projection)
        gate_weight, k_projection, v_projection = (x if x is None else _autocast(q, x)[1] for x in weights)
        q, k, v = _autocast(q, k, v)
        parameters = native_sparse.Parameters(gate_weight, gates, k_projection, v_projection)
        asked = native_sparse.SparseAsked(preset, options, causal, scale, deterministic, threads)
        call, summary, key, failure = native_sparse.examined(self, asked, q, k, v, parameters)
        self._settle(summary, key, failure)
        assert call is not None
        return native_sparse.run(native_sparse.SparseGather(self.team.inner, self.layout), call, q, k, v, parameters)

    @torch.compiler.disable
    @torch.no_grad()
    def skip_attention(
        self,
        module: SkipAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        step: int,
        stream: str = "",
        must_do: Sequence[tuple[int, int]] | None = None,
        must_skip: Sequence[tuple[int, int]] | None = None,
        **options: Any,
    ) -> Tensor:
        """`module` of the whole sequence in step `step`: this rank's rows of it. Tensors move as by "ulysses".

        module: a `tessera.torch.SkipAttention`, the same on every rank; this rank's carries the states of its heads,
        [rank · hq / ranks, (rank + 1) · hq / ranks), to which overrides by head refer. q (b, rows, hq, d), k and v
        (b, rows, hkv, d | dv): this rank's rows. must_do, must_skip: ranges of key tokens of the whole. Other keywords
        as the module takes them. Where the layout's rows stand does not matter.

        Returns out (b, rows, hq, dv), with the bits of the single call's heads. No gradient. Raises on every rank where
        they disagree, and as the module does; ValueError for heads that do not split over the ranks,
        NotImplementedError for another method and for packed sequences, RankError for a rank that does not answer.
        """
        given = {"stream": stream, "must_do": must_do, "must_skip": must_skip, **options}
        self._settle(*skip.examined(self, module, q, k, v, step, stream, given))
        exchange = self._schedule("ulysses", q.shape[-2], k.shape[-2])
        assert isinstance(exchange, Ulysses)
        return skip.run(exchange, module, q, k, v, step, given)

    @torch.compiler.disable
    def decode(
        self,
        q: Tensor,
        k: Any,
        v: Tensor | None = None,
        *,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        out_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Any:
        """Attention of queries that every rank has to keys of which each has some: a cache that is spread over ranks.

        q (b, sq, hq, d), the same everywhere. k, v and options: as `tessera.attention` takes them, of this rank's keys
        only, a `KeySource` in pages too; `offsets` must say where queries and keys stand if any mask or ALiBi reads
        positions. A rank without keys of a sequence has length 0 there. Returns out, or (out, lse), with the same bits
        on every rank: partial results are fp32, gathered and merged in the order of ranks. No gradient.
        """
        if options.get("causal") and options.get("offsets") is None:
            raise ValueError(
                "offsets: got None with causal=True; want the positions of queries and of this rank's keys"
            )
        summary = decode_summary(q, sinks, out_dtype, options)
        self._settle(summary, tuple(summary.items()))
        return decode(self.team, q, k, v, sinks=sinks, return_lse=return_lse, out_dtype=out_dtype, options=options)

    def method_of(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> str:
        """The method that a call of these shapes takes. mask: a `Mask`."""
        if self.method != "auto":
            return self.method
        if self.team.outer is not None:
            return "two_level"
        return self._choice(q, k, v, mask)[0]

    def explain(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Any = None, attention_chunk: int = 0
    ) -> dict[str, cost.Estimate]:
        """What the model says of each method for a call of these shapes."""
        asked = asked_of((causal, window, attention_chunk), {}, None, None, self.layout.packed, q.shape[-2], True)
        return self._choice(q, k, v, asked.mask)[1]

    def _choice(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> tuple[str, dict[str, cost.Estimate]]:
        shape = cost.Shape(
            q.shape[-2],
            k.shape[-2],
            q.shape[-1],
            v.shape[-1],
            q.element_size(),
            k.element_size(),
            1 if self.layout.packed else q.shape[0],
        )
        machine = self._machine or (cost.GPU if q.is_cuda else cost.CPU)
        inner = self.team.inner.size if self.team.outer is not None else 1
        return cost.choose(mask, self.layout, shape, machine, inner, self._memory_limit)

    def _compare(self, given: Given) -> None:
        """Raises on every rank what any rank is refused for, and where they disagree."""
        failure = refuse_bad_tensors(self.layout, self.rank, given)
        summary, key = summary_of(self, given) if failure is None else ({}, None)
        self._settle(summary, key, failure)

    def _settle(self, summary: dict[str, str], key: Any, failure: Exception | None = None) -> None:
        """Raises on every rank what any rank is refused for, and where a summary is not that of the other ranks, which
        are not asked if one of this key agreed before."""
        if self._checks == "never" or self.ranks == 1:
            if failure is not None:
                raise failure
            return
        if self._checks == "always" or key is None or key not in self._agreed:
            agree(self.team, summary, failure)
            self._agreed.add(key)

    def _schedule(self, method: str, heads_q: int, heads_kv: int) -> Schedule | Ulysses:
        key = method, heads_q, heads_kv
        if key in self._schedules:
            return self._schedules[key]
        inner, outer, layout = self.team.inner, self.team.outer, self.layout
        made: Schedule | Ulysses
        if method == "all_gather":
            made = Gather(inner, layout)
        elif method == "ring":
            made = Ring(inner, layout)
        elif method == "ulysses":
            alone = layout.over(1)
            made = Ulysses(inner, layout, 0, Gather(None, alone), alone, 0, (heads_q, heads_kv))
        else:
            assert outer is not None
            groups = layout.over(outer.size)
            made = Ulysses(
                inner, layout, outer.rank * inner.size, Ring(outer, groups), groups, outer.rank, (heads_q, heads_kv)
            )
        self._schedules[key] = made
        return made


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As torch.autocast casts what `tessera.attention` is given."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) for x in tensors)
