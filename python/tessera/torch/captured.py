# SPDX-License-Identifier: Apache-2.0
"""Gradients of fp32 tensors that a traced score reads, on the CPU.

The call itself runs as any other, with the tensors detached. Its results then go through a function whose backward
computes the softmax once more, some rows of queries at a time, by torch's operations, and the derivative of the score
by each element that it reads from the expression graph: in fp64, as a gradient of few elements sums many terms that
cancel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._options import OPTIONS
from ..attention import attention
from ..expressions.derivative import derivative
from ..expressions.graph import Node, ordered
from ..expressions.register import traced_by_name
from ..expressions.trace import Traced
from ..tiles import Form, TileList
from ..values import KeySource, Offsets
from .arguments import autocast
from .graph_values import inside, values

# Scores of the rows that are computed together: 16 MiB in fp64, and some ten tensors are of this size.
_ELEMENTS = 2**21
_PLAIN = (
    *("causal", "window", "scale", "softcap", "sinks", "score", "mask", "extras", "cu_seqlens_q", "cu_seqlens_k"),
    *("max_seqlen_q", "max_seqlen_k", "offsets", "tiles", "return_lse", "keep_residual", "deterministic"),
    *("batch_invariant", "out_dtype", "wishes", "threads", "metadata"),
)


class Problem(NamedTuple):
    """What the backward has to know besides tensors. score: what was traced; mask: its result; tiles: form and block of
    a list."""

    score: Traced
    mask: Node | None
    tiles: tuple[Form, tuple[int, int]] | None
    window: tuple[int | None, int | None]
    scale: float
    softcap: float
    batch_offset: int
    head_offset: int


class Call(NamedTuple):
    """trained: how many captured tensors the score has; others: names of what else the backward reads."""

    problem: Problem
    trained: int
    others: tuple[str, ...]
    has_lse: bool


def attend(q: Tensor, k: Any, v: Tensor | None, out: Tensor | None, options: Sequence[Any]) -> Any:
    """What `tessera.attention` of these returns, with gradients of the tensors in `extras` too.

    Raises NotImplementedError, which names the tensor or the option, for what there is no such gradient of.
    """
    given = dict(zip([option.name for option in OPTIONS], options, strict=True))
    _refuse_others(q, k, out, given)
    problem = _problem(q, given)
    q, k, v = autocast(q, k, v)
    detached = tuple([x.detach() if isinstance(x, Tensor) else x for x in given["extras"]])
    results = attention(q, k, v, **{**given, "extras": detached})
    several = results if isinstance(results, tuple) else (results,)
    trained = given["extras"][: len(problem.score.graph.tensors)]
    others = _others(given, detached[len(trained) :])
    call = Call(problem, len(trained), tuple(others), given["return_lse"])
    tensors = (*trained, *others.values(), *several[:2])
    attached = CapturedGradients.apply(call, q.detach(), k.detach(), v.detach(), *tensors)
    return attached[0] if len(several) == 1 else tuple(attached)


def _refuse_others(q: Tensor, k: Any, out: Tensor | None, given: dict[str, Any]) -> None:
    for number, tensor in enumerate(given["extras"]):
        if not (isinstance(tensor, Tensor) and tensor.requires_grad):
            continue
        named = f"extras[{number}]: got a captured tensor of shape {tuple(tensor.shape)} that requires grad"
        if not (q.is_cpu and tensor.is_cpu):
            place = tensor.device if q.is_cpu else q.device
            raise NotImplementedError(f"{named} on {place}; want one on cpu: nothing computes its gradient elsewhere")
        if tensor.dtype != torch.float32:
            raise NotImplementedError(f"{named} in {tensor.dtype}; want torch.float32, or detach()")
    defaults = {option.name: option.default for option in OPTIONS if option.name not in _PLAIN}
    other = next((name for name, default in defaults.items() if _is_set(given[name], default)), None)
    if isinstance(k, KeySource):
        other = "k"
    if out is not None:
        other = "out"
    if other is not None:
        raise NotImplementedError(
            f"{other}: got {'a KeySource' if other == 'k' else 'a value'} beside a captured tensor that requires grad; "
            "want none, or detach() of that tensor"
        )
    if given["tiles"] is not None and not isinstance(given["tiles"], TileList):
        raise NotImplementedError("tiles: got Tiles beside a captured tensor that requires grad; want a TileList")


def _is_set(value: Any, default: Any) -> bool:
    return value is not None and (isinstance(value, Tensor) or value != default)


def _problem(q: Tensor, given: dict[str, Any]) -> Problem:
    mask, tiles = given["mask"], given["tiles"]
    if mask is not None:
        traced = traced_by_name(mask)
        if traced is None:
            raise NotImplementedError(
                f"mask: got {mask!r} beside a captured tensor that requires grad; want a function of Python"
            )
        mask = traced.result
    left, right = (None, None) if given["window"] is None else given["window"]
    if given["causal"]:
        right = 0 if right is None else min(right, 0)
    offsets = given["offsets"] or Offsets()
    return Problem(
        traced_by_name(given["score"]),
        mask,
        None if tiles is None else (tiles.form, tiles.block),
        (left, right),
        q.shape[-1] ** -0.5 if given["scale"] is None else float(given["scale"]),
        float(given["softcap"] or 0.0),
        offsets.batch,
        offsets.head,
    )


def _others(given: dict[str, Any], of_mask: Sequence[Tensor]) -> dict[str, Tensor]:
    """By name what the backward reads besides q, k, v and the score's captured tensors; of_mask: the mask's."""
    offsets = given["offsets"] or Offsets()
    named = {name: given[name] for name in ("sinks", "cu_seqlens_q", "cu_seqlens_k")}
    named |= {"offset_q": offsets.q, "offset_k": offsets.k}
    named |= {} if given["tiles"] is None else dict(given["tiles"].arrays())
    named |= {f"mask {number}": array for number, array in enumerate(of_mask)}
    return {name: array.detach() for name, array in named.items() if array is not None}


class CapturedGradients(torch.autograd.Function):
    """The results of a call, in the same memory; the backward adds the gradients of the captured tensors.

    All that the backward reads is an input, so that autograd notes whether it is written to between the passes.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Any:
        count = call.trained + len(call.others)
        ctx.save_for_backward(q, k, v, *tensors[:count])
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple([x.detach() for x in tensors[count:]])  # inputs as they are would be views, not to be written to

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        problem, count, names, has_lse = ctx.call
        q, k, v, *saved = ctx.saved_tensors
        passed = (dout, dlse) if has_lse else (dout,)
        if dout is None and dlse is None:
            return (None,) * (4 + len(saved) + len(passed))
        arrays, others = saved[:count], dict(zip(names, saved[count:], strict=True))
        with torch.no_grad():
            sums = _Sums(problem.score, arrays, ctx.needs_input_grad[4 : 4 + count])
            for sequence in _sequences(q, k, v, dout, dlse, others, problem.tiles):
                for block in sequence.blocks(problem.window):
                    _add_block(sums, problem, others, block)
        found = sums.gradients()
        if torch.is_grad_enabled():
            read = [x for x in (*arrays, dout, dlse) if x is not None and x.requires_grad]
            found = [None if x is None else _FirstDerivative.apply(x, *read) for x in found]
        return (None, None, None, None, *found, *(None for _ in names), *passed)


class _FirstDerivative(torch.autograd.Function):
    """A gradient where its own graph is asked for (create_graph=True): refused if differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *read: Tensor) -> Tensor:
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            "score: got a derivative of a captured tensor's gradient (double backward); want first derivatives only"
        )


class _Sums:
    """Gradients of the captured tensors, summed in fp64. by_load: derivatives of the score by what its loads read."""

    def __init__(self, score: Traced, arrays: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        graph, self.result = score.graph.unbounded(score.result)
        self.arrays = arrays
        self.sums = [
            torch.zeros(x.numel(), dtype=torch.float64) if asked else None
            for x, asked in zip(self.arrays, wanted, strict=True)
        ]
        loads = [node for node in ordered(self.result) if node.op == "load" and self.sums[node.data] is not None]
        self.by_load = [(load, derivative(graph, self.result, load)) for load in loads]

    def add(self, load: Node, indices: Sequence[Tensor], gradient: Tensor) -> None:
        """gradient (heads, rows, keys) of the elements at `indices`, each of which broadcasts to that shape."""
        array, total = self.arrays[load.data], self.sums[load.data]
        place = torch.zeros((1, 1, 1), dtype=torch.int64)
        for index, size in zip(inside(array, indices), array.shape, strict=True):
            place = place * size + index
        same = [dim for dim in range(3) if place.shape[dim] == 1]  # those read the same element
        gradient = gradient.sum(same, keepdim=True) if same else gradient
        total.index_add_(0, place.expand(gradient.shape).reshape(-1), gradient.reshape(-1))

    def gradients(self) -> list[Tensor | None]:
        return [
            None if total is None else total.float().view(array.shape)
            for total, array in zip(self.sums, self.arrays, strict=True)
        ]


class Block(NamedTuple):
    """Some rows of one sequence in fp64: q (hq, rows, d), k and v (hkv, sk, d | dv), dout (hq, rows, dv) and dlse
    (hq, rows), or None; int64 positions batch (1, 1, 1), query (1, rows, 1), key (1, 1, sk); listed and full (hq or 1,
    rows, sk), of a tile list."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None
    dlse: Tensor | None
    batch: int
    query: Tensor
    key: Tensor
    listed: Tensor | None
    full: Tensor | None


class Rows(NamedTuple):
    """All rows of one sequence, in one block. lists: (listed, full) of tiles, bool (hq or 1, query blocks, key
    blocks)."""

    whole: Block
    lists: tuple[Tensor, Tensor] | None
    tile: tuple[int, int]

    def blocks(self, window: tuple[int | None, int | None]) -> Iterator[Block]:
        """Some rows each, and the keys that their window reaches."""
        whole, (heads, length) = self.whole, self.whole.q.shape[:2]
        step = max(1, _ELEMENTS // max(1, heads * whole.k.shape[1]))
        for begin in range(0, length, step):
            rows = slice(begin, min(begin + step, length))
            keys = _reached(whole, rows, window)
            if keys.start >= keys.stop:
                continue
            listed = full = None
            if self.lists is not None:
                ranges = zip((rows, keys), self.tile, strict=True)
                tiles, others = (torch.arange(part.start, part.stop) // size for part, size in ranges)
                listed, full = (each[:, tiles[:, None], others[None, :]] for each in self.lists)
            yield whole._replace(
                q=whole.q[:, rows],
                k=whole.k[:, keys],
                v=whole.v[:, keys],
                key=whole.key[..., keys],
                dout=None if whole.dout is None else whole.dout[:, rows],
                dlse=None if whole.dlse is None else whole.dlse[:, rows],
                query=whole.query[:, rows],
                listed=listed,
                full=full,
            )


def _reached(whole: Block, rows: slice, window: tuple[int | None, int | None]) -> slice:
    """The keys in the window of one of the rows."""
    (left, right), count = window, whole.k.shape[1]
    if count == 0:
        return slice(0, 0)
    shift = int(whole.query[0, rows.start, 0]) - int(whole.key[0, 0, 0])  # key that the first row stands at
    begin = 0 if left is None else min(max(shift - left, 0), count)
    end = count if right is None else min(max(shift + rows.stop - rows.start + right, 0), count)
    return slice(begin, end)


def _sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    others: Mapping[str, Tensor],
    form: tuple[Form, tuple[int, int]] | None,
) -> Iterator[Rows]:
    cu_seqlens_q, cu_seqlens_k = others.get("cu_seqlens_q"), others.get("cu_seqlens_k")
    offset_q, offset_k = others.get("offset_q"), others.get("offset_k")
    count = (q if cu_seqlens_q is None else k).shape[0]
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        count = cu_seqlens_q.shape[0] - 1
    lists, tile = None, (1, 1)
    if form is not None:
        listing = {name.removeprefix("tile_"): x for name, x in others.items() if name.startswith(("tile_", "full_"))}
        tiles = TileList(form=form[0], block=form[1], **listing)
        lists, tile = _lists(tiles, q.shape[-3], k.shape[-3], q.shape[-2]), tiles.block
    for b in range(count):
        rows, keys = (_part(b, cu) for cu in (cu_seqlens_q, cu_seqlens_k))
        length, count_k = q[rows].shape[0], k[keys].shape[0]
        first = count_k - length if offset_q is None else int(offset_q[b])
        first_key = 0 if offset_k is None else int(offset_k[b])
        lse_rows = rows if isinstance(rows, int) else (slice(None), rows)
        whole = Block(
            *(x[part].double().transpose(0, 1) for x, part in ((q, rows), (k, keys), (v, keys))),
            None if dout is None else dout[rows].double().transpose(0, 1),
            None if dlse is None else dlse[lse_rows].double(),
            b,
            (torch.arange(length) + first).view(1, -1, 1),
            (torch.arange(count_k) + first_key).view(1, 1, -1),
            None,
            None,
        )
        own = None if lists is None else tuple([each[b if each.shape[0] > 1 else 0] for each in lists])
        yield Rows(whole, own, tile)


def _part(sequence: int, cu_seqlens: Tensor | None) -> int | slice:
    return sequence if cu_seqlens is None else slice(int(cu_seqlens[sequence]), int(cu_seqlens[sequence + 1]))


def _lists(tiles: TileList, queries: int, keys: int, heads: int) -> tuple[Tensor, Tensor]:
    """(listed, full), bool (b or 1, hq or 1, query blocks, key blocks)."""
    sizes = {"query_blocks": -(-queries // tiles.block[0]), "key_blocks": -(-keys // tiles.block[1])}
    listed = torch.as_tensor(tiles.to_mask(**sizes))
    full = torch.zeros_like(listed)
    waived = {name: array for name, array in tiles.arrays() if name.startswith("full")}
    if waived:
        own = {name.removeprefix("full_"): array for name, array in waived.items()}
        full = torch.as_tensor(TileList(form=tiles.form, block=tiles.block, **own).to_mask(**sizes))
    if listed.shape[1] not in (1, heads):
        listed, full = (x.repeat_interleave(heads // x.shape[1], 1) for x in (listed, full))
    return listed, full


def _add_block(sums: _Sums, problem: Problem, others: Mapping[str, Tensor], block: Block) -> None:
    heads, group = block.q.shape[0], block.q.shape[0] // block.k.shape[0]
    k, v = (x.repeat_interleave(group, 0) for x in (block.k, block.v))
    scores = block.q @ k.transpose(-1, -2) * problem.scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    inputs = {
        "score": scores,
        "batch": torch.tensor(block.batch + problem.batch_offset).view(1, 1, 1),
        "head": (torch.arange(heads) + problem.head_offset).view(-1, 1, 1),
        "query": block.query,
        "key": block.key,
    }
    by_load = sums.by_load
    results = (sums.result, *(slope for _, slope in by_load), *(i for load, _ in by_load for i in load.args))
    found = values(results, inputs, sums.arrays)
    hidden = _hidden(problem, others, block, inputs)
    biased = torch.where(hidden, -torch.inf, found[sums.result.index])
    slope_of_score = _by_score(biased, v, others.get("sinks"), hidden, block)
    for load, slope in by_load:
        gradient = slope_of_score * found[slope.index]
        gradient = torch.where(slope_of_score == 0, 0.0, gradient)  # where no probability is, the slope may be NaN
        sums.add(load, [found[index.index] for index in load.args], gradient)


def _by_score(biased: Tensor, v: Tensor, sinks: Tensor | None, hidden: Tensor, block: Block) -> Tensor:
    """dS (hq, rows, sk) behind the traced score: P (dP − Σ P dP), and the gradient of the LSE."""
    lse = torch.logsumexp(biased, -1, keepdim=True)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.double().view(-1, 1, 1))
    found = torch.zeros_like(biased)
    if block.dout is not None:
        p = torch.exp(biased - total)
        dp = torch.where(hidden, 0.0, block.dout @ v.transpose(-1, -2))
        found = p * (dp - (p * dp).sum(-1, keepdim=True))
    if block.dlse is not None:
        found = found + torch.exp(biased - lse) * block.dlse[..., None]
    return torch.where(hidden | (lse == -torch.inf), 0.0, found)  # a row that sees nothing gives nothing


def _hidden(problem: Problem, others: Mapping[str, Tensor], block: Block, inputs: dict[str, Tensor]) -> Tensor:
    """bool, of a shape that broadcasts to (hq, rows, sk)."""
    distance = block.query - block.key
    left, right = problem.window
    seen = torch.ones((1, 1, 1), dtype=torch.bool)
    if problem.mask is not None:
        arrays = [x for name, x in others.items() if name.startswith("mask ")]
        seen = values([problem.mask], inputs, arrays)[problem.mask.index]
    if block.listed is not None:
        seen = block.listed & (block.full | seen)
    if left is not None:
        seen = seen & (distance <= left)
    if right is not None:
        seen = seen & (distance >= -right)
    return ~seen
