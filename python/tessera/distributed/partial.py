# SPDX-License-Identifier: Apache-2.0
"""Attention of some rows of queries to some rows of keys of the whole problem, and how such results add up.

Queries and keys know their positions in the whole (`Offsets`), so that every mask, ALiBi and dropout are those of the
single call. Partial outputs are fp32 with sink-free LSE; gradients are added up in fp32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention import attention, attention_backward
from ..torch.operators import is_deterministic
from ..values import Offsets
from .reach import Mask
from .shards import Part


class Asked(NamedTuple):
    """What a call asks for, the same for all of its parts.

    options: keywords of `tessera.attention` that are no tensors and no mask of positions. slopes, sinks: of the heads
    that are computed here, which are those from first_head on of heads.
    """

    mask: Mask
    options: dict[str, Any]
    packed: bool
    heads: int
    first_head: int = 0
    seed: Any = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    keeps_residual: bool = True

    @property
    def dim(self) -> int:
        """The dimension of rows."""
        return 0 if self.packed else 1

    def rows(self, tensor: Tensor, begin: int, end: int) -> Tensor:
        return tensor.narrow(self.dim, begin, end - begin)

    def of_heads(self, begin: int, end: int) -> Asked:
        """The same of query heads [begin, end) of those that are computed."""
        return self._replace(
            first_head=self.first_head + begin,
            slopes=None if self.slopes is None else self.slopes[..., begin:end].contiguous(),
            sinks=None if self.sinks is None else self.sinks[begin:end].contiguous(),
        )

    def makes_residual(self, dtype: torch.dtype) -> bool:
        return self.keeps_residual and dtype in (torch.float16, torch.bfloat16)


class Result(NamedTuple):
    """lse: fp32 (b, hq, rows) or (hq, rows), sink-free. residual: what rounding out lost, or None. kept: what the
    schedule wants its backward to have in place of these and of q, k and v."""

    out: Tensor
    lse: Tensor
    residual: Tensor | None = None
    kept: tuple[Tensor | None, ...] = ()


def zeros_like(x: Tensor) -> Tensor:
    """fp32 and packed, to add to."""
    return torch.zeros_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)


@lru_cache(maxsize=1024)
def _numbers(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def _ends(lengths: tuple[int, ...]) -> tuple[int, ...]:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return tuple(ends)


def ends_on(part: Part, device: torch.device) -> Tensor:
    """cu_seqlens of a part, int32 (b + 1)."""
    return _numbers(_ends(part.lengths), torch.int32, device)


def starts_on(asked: Asked, part: Part, like: Tensor) -> Tensor:
    """Where a part's rows stand, int64 (b): of packed sequences each its own, of dense ones all the same."""
    return _numbers(part.starts if asked.packed else part.starts * like.shape[0], torch.int64, like.device)


def _keywords(asked: Asked, q: Tensor, queries: Part, keys: Part) -> dict[str, Any]:
    """Of `attention` and its backward."""
    device = q.device
    first_q, first_k = (starts_on(asked, part, q) for part in (queries, keys))
    given: dict[str, Any] = {
        **asked.options,
        "window": None if (asked.mask.left, asked.mask.right) == (None, None) else (asked.mask.left, asked.mask.right),
        "attention_chunk": asked.mask.chunk,
        "offsets": Offsets(q=first_q, k=first_k, head=asked.first_head),
        "alibi_slopes": asked.slopes,
    }
    if asked.options.get("dropout"):
        given["seed"] = asked.seed
    if asked.packed:
        given["cu_seqlens_q"], given["cu_seqlens_k"] = (ends_on(part, device) for part in (queries, keys))
        given["max_seqlen_q"], given["max_seqlen_k"] = max(queries.lengths), max(1, *keys.lengths)
    return given


def _alone(asked: Asked, tensors: tuple[Tensor | None, ...], parts: tuple[Part, ...], counts: tuple[int, ...]) -> Any:
    """(asked, tensors, parts) of each sequence where dropout, which counts batch · heads + head, has to be told of
    heads that are not here; else of all of them at once. counts: how many of the tensors go with each part; the last of
    all are (…, rows) of the first part."""
    first = tensors[0]
    assert first is not None
    batch = len(parts[0].starts) if asked.packed else first.shape[0]
    if not asked.options.get("dropout") or asked.heads == first.shape[-2] or batch == 1:
        yield asked, tensors, parts
        return
    for s in range(batch):
        slopes = asked.slopes[s : s + 1] if asked.slopes is not None and asked.slopes.dim() == 2 else asked.slopes
        own = asked._replace(first_head=asked.first_head + s * asked.heads, slopes=slopes)
        if not asked.packed:
            yield own, tuple(None if x is None else x[s : s + 1] for x in tensors), parts
            continue
        ranges = [_ends(part.lengths)[s : s + 2] for part in parts]
        cut = []
        for i, x in enumerate(tensors):
            begin, end = ranges[1] if counts[0] <= i < counts[0] + counts[1] else ranges[0]
            rows_last = i >= counts[0] + counts[1]
            cut.append(None if x is None else x[..., begin:end] if rows_last else x[begin:end])
        yield own, tuple(cut), tuple(Part(p.starts[s : s + 1], p.lengths[s : s + 1]) for p in parts)


def forward(asked: Asked, q: Tensor, k: Tensor, v: Tensor, queries: Part, keys: Part, *, partial: bool) -> Result:
    """partial: out is fp32 and the sinks are left to `finish`; otherwise it is what the whole call returns."""
    found = []
    residual = not partial and asked.makes_residual(q.dtype)
    for own, (q1, k1, v1), (rows, columns) in _alone(asked, (q, k, v), (queries, keys), (1, 2)):
        results = attention(
            q1,
            k1,
            v1,
            return_lse=True,
            return_residual=residual,
            out_dtype=torch.float32 if partial else None,
            sinks=None if partial else asked.sinks,
            **_keywords(own, q1, rows, columns),
        )
        found.append(Result(*results))
    if len(found) == 1:
        return found[0]
    rows_at, lse_at = (0, 1) if asked.packed else (0, 0)
    return Result(
        torch.cat([x.out for x in found], rows_at),
        torch.cat([x.lse for x in found], lse_at),
        torch.cat([x.residual for x in found if x.residual is not None], rows_at) if residual else None,
    )


class Upstream(NamedTuple):
    """What a backward is given for rows of queries. dlse: None without a gradient of the LSE."""

    q: Tensor
    dout: Tensor
    out: Tensor
    residual: Tensor | None
    lse: Tensor
    dlse: Tensor | None


class Sums(NamedTuple):
    """fp32 gradients of rows, which are added to. dsinks: None where there are no sinks."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None


def backward(asked: Asked, given: Upstream, k: Tensor, v: Tensor, queries: Part, keys: Part, sums: Sums) -> None:
    """Adds the gradients of these queries and keys. dsinks does not depend on the keys: add it once for all queries."""
    counts = (5, 4)
    tensors = (given.q, given.dout, given.out, given.residual, sums.dq, k, v, sums.dk, sums.dv, given.lse, given.dlse)
    for own, cut, (rows, columns) in _alone(asked, tensors, (queries, keys), counts):
        q1, dout1, out1, residual1, dq1, k1, v1, dk1, dv1, lse1, dlse1 = cut
        grads: tuple[Tensor, ...] = (dq1, dk1, dv1)
        if asked.sinks is not None:
            grads += (torch.zeros_like(asked.sinks) if sums.dsinks is None else sums.dsinks,)
        options = _keywords(own, q1, rows, columns)
        options["deterministic"] = is_deterministic(options.get("deterministic"))
        attention_backward(
            dout1,
            q1,
            k1,
            v1,
            out1,
            lse1,
            dlse=dlse1,
            residual=residual1,
            sinks=asked.sinks,
            grads=grads,
            accumulate=True,
            **options,
        )


class Merged(NamedTuple):
    """Results over disjoint keys as one. out: fp32, of all of them. Their LSE is most + log(total): most the largest
    L_p so far, total Σ exp(L_p − most). One number, rounded at each step, would cost its digits in out.

    Source: Milakov and Gimelshein 2018 (arXiv:1805.02867).
    """

    out: Tensor
    most: Tensor
    total: Tensor


def _columns(x: Tensor) -> Tensor:
    """(…, h, rows) beside (…, rows, h, d)."""
    return x.transpose(-1, -2)[..., None]


def merge(one: Merged | None, other: Result) -> Merged:
    """`one` is written over. Rows that are empty in every part have most = −∞ and total = 0."""
    if one is None:
        return Merged(other.out, other.lse, (other.lse > -torch.inf).float())
    most = torch.maximum(one.most, other.lse)
    base = most.masked_fill(most == -torch.inf, 0.0)  # exp(−∞ − 0) = 0
    old, new = one.total * torch.exp(one.most - base), torch.exp(other.lse - base)
    total = old + new
    share = (new / total).nan_to_num_(0.0)  # 0 / 0 of rows that are empty
    return Merged(one.out.lerp_(other.out, _columns(share)), most, total)


def finish(asked: Asked, merged: Merged | None, q: Tensor, dim_v: int) -> Result:
    """The result in q's dtype, with the sinks in it and what rounding lost."""
    if merged is None:  # no keys at all
        out = q.new_zeros((*q.shape[:-1], dim_v))
        rows = (q.shape[1], q.shape[0]) if asked.packed else (q.shape[0], q.shape[2], q.shape[1])
        lse = q.new_full(rows, -torch.inf, dtype=torch.float32)
        return Result(out, lse, torch.zeros_like(out, dtype=torch.int8) if asked.makes_residual(q.dtype) else None)
    exact, lse = merged.out, merged.most + torch.log(merged.total)
    if asked.sinks is not None:
        share = torch.sigmoid(lse - asked.sinks[:, None]).nan_to_num_(0.0)  # exp(L) / (exp(L) + exp(sink))
        exact = exact.mul_(_columns(share))
    out = exact.to(q.dtype)
    return Result(out, lse, residual_of(exact, out) if asked.makes_residual(q.dtype) else None)


def residual_of(exact: Tensor, rounded: Tensor) -> Tensor:
    """What rounding lost, int8, as docs/semantics.md, section 6, has it."""
    bits, least = (10, -14) if rounded.dtype == torch.float16 else (7, -119)
    wide = rounded.float()
    exponent = (torch.frexp(wide).exponent - 1).masked_fill_(wide == 0, least).clamp_min_(least)
    return torch.ldexp((exact - wide) * 254, bits - exponent).nan_to_num_(0.0, 0.0, 0.0).round_().to(torch.int8)
