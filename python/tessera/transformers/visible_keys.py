# SPDX-License-Identifier: Apache-2.0
"""The mask function: from what transformers says about a mask to the cheapest form that says the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import masking_utils

from tessera.transformers.forms import Pieces, Tiles, VisibleKeys, Window, pack_bits
from tessera.transformers.mask_functions import Pattern, read

# Elements of a boolean mask that may exist at a time while it is packed into bits.
_PACKED_AT_ONCE = 1 << 22


def visible_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    *,
    device: torch.device | str = "cpu",
    **context: Any,
) -> VisibleKeys:
    """The mask function that `register` enters into transformers' ``AttentionMaskInterface``.

    Args:
        batch_size, q_length, kv_length: sizes of the attention to come.
        q_offset: index of the first query in the sequence; a static cache gives a tensor of one int.
        kv_offset: index of the first key; not 0 once a sliding cache has dropped some.
        mask_function: predicate on (batch, head, query, key).
        attention_mask: bool (b, tokens so far), False: padding. Positions beyond its end are padding.
        device: where the model's inputs are.

    Raises:
        ValueError: an `attention_mask` of other than two dimensions.
        NotImplementedError: inside torch.compile, a mask that only a look at the data can tell.
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask: got {attention_mask.ndim} dimensions; want (batch, tokens) or (b, 1, sq, sk)"
        )
    tracing = torch.compiler.is_compiling()
    if not tracing:
        q_offset = int(q_offset)
    call = _Call(batch_size, q_length, kv_length, q_offset, kv_offset, device, tracing)
    pattern: Pattern | None
    one_document = None
    if tracing and attention_mask is None and _may_be_packed(call, context):
        pattern, one_document = _traced_pattern(call, mask_function, context)
    else:
        pattern = read(mask_function)
    form = None
    if pattern is not None:
        form = _form_of(call, pattern, _runs(call, attention_mask))
    if pattern is None or form is None:
        pattern = Pattern()
        form = _pairs(call, mask_function, attention_mask, bool(context.get("use_vmap", False)))
    return VisibleKeys((batch_size, 1, q_length, kv_length), form, pattern.left, pattern.right, one_document)


@dataclass
class _Call:
    b: int
    sq: int
    sk: int
    q_offset: int | torch.Tensor
    k_offset: int
    device: Any
    tracing: bool

    @property
    def shift(self) -> Any:
        """Index of query 0 among the keys of this call."""
        return self.q_offset - self.k_offset

    def per_sequence(self, value: Any, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.to(self.device, dtype).expand(self.b).contiguous()
        return torch.full((self.b,), value, dtype=dtype, device=self.device)


@dataclass
class _Runs:
    """Keys that are no padding: `first` to below `end`, (b), if they are one run a sequence, `real` (b, sk) if not."""

    real: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    whole: bool  # one run a sequence
    from_start: bool  # and it begins at key 0


def _runs(call: _Call, attention_mask: torch.Tensor | None) -> _Runs | None:
    if attention_mask is None:
        return None
    real = attention_mask[:, call.k_offset : call.k_offset + call.sk].to(torch.bool)
    real = torch.nn.functional.pad(real, (0, call.sk - real.shape[1]))
    count = real.sum(1)
    first = real.to(torch.uint8).argmax(1)
    end = torch.where(count > 0, call.sk - real.flip(1).to(torch.uint8).argmax(1), 0)
    whole = (count == end - first).all()
    if call.tracing:
        torch._assert_async(
            whole, "attention_mask: got padding between tokens; under torch.compile want it at the ends"
        )
        return _Runs(real, first, end, True, False)
    if bool((count == call.sk).all()):
        return None
    return _Runs(real, first, end, bool(whole), bool((first == 0).all()))


def _form_of(call: _Call, pattern: Pattern, runs: _Runs | None) -> Window | Pieces | Tiles | None:
    """The cheapest form that says it, or None if only pairs of query and key do."""
    if pattern.documents is not None:
        return None if runs is not None else _documents(call, pattern, pattern.documents)
    if pattern.positions is not None:
        return None
    size = pattern.chunk  # None where one chunk holds everything, too
    if size is not None and _in_one_chunk(call, size, pattern.chunk_start, runs):
        size = None
    if runs is not None and not runs.whole:
        return Tiles(_window(call, pattern), pack_bits(runs.real[:, None, None, :]), call.sq) if size is None else None
    if call.sq == 1 and (size is not None or runs is not None):
        return _single_query(call, pattern, runs, size)
    if size is not None:
        return _chunks(call, pattern, runs, size)
    if runs is None or runs.from_start:
        return _window(call, pattern, runs)
    return _padded(call, pattern, runs)


def _window(call: _Call, pattern: Pattern, runs: _Runs | None = None) -> Window:
    bounded = pattern.left is not None or pattern.right is not None
    # The last query stands at the last used key, unless told otherwise.
    told = bounded and (runs is not None or isinstance(call.shift, torch.Tensor) or call.shift != call.sk - call.sq)
    return Window(
        pattern.left,
        pattern.right,
        call.per_sequence(call.shift, torch.int64) if told else None,
        None if runs is None else runs.end.to(torch.int32),
    )


def _single_query(call: _Call, pattern: Pattern, runs: _Runs | None, size: int | None) -> Window:
    """One query sees one run of keys: it stands at the first of them and sees all from there to the used length.
    `size`: tokens of a chunk, None for no chunks."""
    shift = call.per_sequence(call.shift, torch.int64)
    first = torch.zeros_like(shift) if runs is None else runs.first
    end = torch.full_like(shift, call.sk) if runs is None else runs.end
    if pattern.left is not None:
        first = torch.maximum(first, shift - pattern.left)
    if pattern.right is not None:
        end = torch.minimum(end, shift + pattern.right + 1)
    if size is not None:
        start = call.per_sequence(0 if pattern.chunk_start is None else pattern.chunk_start, torch.int64)
        begin = (shift + call.k_offset - start) // size * size + start - call.k_offset
        first = torch.maximum(first, begin)
        end = torch.minimum(end, begin + size)
    return Window(0, None, first.to(torch.int64), end.clamp(0, call.sk).to(torch.int32))


def _padded(call: _Call, pattern: Pattern, runs: _Runs) -> Pieces:
    """A piece a sequence: all its queries, and its keys without the padding on either side."""
    shift = call.per_sequence(call.shift, torch.int64)
    zero = torch.zeros((call.b, 1), dtype=torch.int32, device=runs.first.device)
    return Pieces(
        pattern.left,
        pattern.right,
        first_key=runs.first[:, None].to(torch.int32),
        used=(runs.end - runs.first)[:, None].to(torch.int32),
        first_query=zero,
        q_offset=(shift - runs.first)[:, None],
        longest_q=call.sq,
    )


def _documents(call: _Call, pattern: Pattern, documents: torch.Tensor) -> Pieces | None:
    """Packed sequences: a piece a document, or a chunk of one. None if documents are not runs of tokens whose positions
    follow each other."""
    documents = documents.expand(call.b, -1)
    if documents.shape[1] != call.sk or call.sq != call.sk or call.shift != 0:
        return None
    step = documents.diff(dim=1)
    ends = step != 0
    if pattern.positions is not None:
        positions = pattern.positions.expand(call.b, -1)
        if not bool(((positions.diff(dim=1) == 1) | ends).all()):
            return None
        if pattern.chunk is not None:
            start = 0 if pattern.chunk_start is None else pattern.chunk_start[:, None]
            chunk = torch.div(positions - start, pattern.chunk, rounding_mode="floor")
            ends = ends | (chunk.diff(dim=1) != 0)
    elif pattern.chunk is not None:
        return None
    if not bool((step >= 0).all()):
        return None
    # Rows have as many pieces as the row of most documents; the others get empty ones at their end.
    begins = torch.nn.functional.pad(ends, (1, 0), value=True)
    at = torch.arange(call.sk, device=documents.device).expand(call.b, -1)
    first = at.masked_fill(~begins, call.sk).sort(dim=1).values[:, : int(begins.sum(1).max())].to(torch.int32)
    used = torch.nn.functional.pad(first, (0, 1), value=call.sk).diff(dim=1)
    q_offset = torch.zeros_like(first, dtype=torch.int64)
    return Pieces(pattern.left, pattern.right, first, used, first, q_offset, int(used.max()))


def _in_one_chunk(call: _Call, size: int, chunk_start: torch.Tensor | None, runs: _Runs | None) -> bool:
    """Whether every query, and every key that is no padding, is in the first chunk, which begins where padding ends."""
    end = call.k_offset + call.sk
    if isinstance(call.q_offset, int):
        end = max(end, call.q_offset + call.sq)
    if end > size:
        return False
    if chunk_start is None or runs is not None:
        return True
    return not call.tracing and not bool(chunk_start.any())


def _chunks(call: _Call, pattern: Pattern, runs: _Runs | None, size: int) -> Pieces | None:
    """A piece a chunk, of `size` tokens. None if padding ends inside one, or queries stand where there are no keys."""
    if isinstance(call.shift, int) and not 0 <= call.shift <= call.sk - call.sq:
        return None
    start = call.per_sequence(0 if pattern.chunk_start is None else pattern.chunk_start, torch.int64)
    zeroth = torch.div(call.k_offset - start, size, rounding_mode="floor") * size + start  # begin of key 0's chunk
    pieces = (call.sk - 1) // size + 2
    begin = zeroth[:, None] + size * torch.arange(pieces, dtype=torch.int64, device=start.device)
    first_key = (begin - call.k_offset).clamp(0, call.sk)
    end_key = (begin + size - call.k_offset).clamp(0, call.sk)
    first_query = (begin - call.q_offset).clamp(0, call.sq)
    if runs is not None:
        inside = (first_key < runs.first[:, None]) & (runs.first[:, None] < end_key)
        if call.tracing:
            torch._assert_async(
                ~inside.any(), "attention_mask: got padding that ends inside a chunk; want it at the ends"
            )
        elif bool(inside.any()):
            return None
        end_key = torch.minimum(end_key, runs.end[:, None])
        end_key = torch.where(first_key < runs.first[:, None], first_key, end_key)
    return Pieces(
        pattern.left,
        pattern.right,
        first_key.to(torch.int32),
        (end_key - first_key).clamp(min=0).to(torch.int32),
        first_query.to(torch.int32),
        first_query + call.shift - first_key,
        min(size, call.sq),
    )


def _pairs(call: _Call, mask_function: Any, attention_mask: torch.Tensor | None, vmap: bool) -> Tiles:
    """Any mask at all, one bit for a query and a key; the boolean mask exists for a few rows at a time."""
    rows = max(1, _PACKED_AT_ONCE // max(1, call.b * call.sk))
    parts = []
    for row in range(0, call.sq, rows):
        visible = masking_utils.sdpa_mask(
            batch_size=call.b,
            q_length=min(rows, call.sq - row),
            kv_length=call.sk,
            q_offset=call.q_offset + row,
            kv_offset=call.k_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=vmap,
            device=call.device,
        )
        parts.append(pack_bits(visible))
    return Tiles(Window(None, None), torch.cat(parts, dim=2), 1)


def _may_be_packed(call: _Call, context: dict[str, Any]) -> bool:
    """transformers looks for packed sequences only without cache and padding, and cannot see data inside a trace."""
    whole = isinstance(call.q_offset, int) and call.q_offset == 0 and call.sq == call.sk and call.sq > 1
    causal = "allow_is_bidirectional_skip" not in context
    return whole and causal and not context.get("allow_is_causal_skip", True)


def _traced_pattern(call: _Call, mask_function: Any, context: dict[str, Any]) -> tuple[Pattern, torch.Tensor | None]:
    """Inside a trace, the pattern of a mask that may be of packed sequences, and whether it is of one sequence only."""
    local, config = context.get("local_size"), context.get("config")
    chunk = local if local is not None and local == getattr(config, "attention_chunk_size", None) else None
    custom = context.get("use_vmap", False) or mask_function.__code__ is masking_utils.or_masks().__code__
    if custom or (chunk is not None and local == getattr(config, "sliding_window", None)):
        raise NotImplementedError(
            "attention_mask: got a mask function of several kinds under torch.compile; want the model called with an "
            "attention_mask, or a mask made outside the compiled function"
        )
    pattern = Pattern(None if local is None or chunk is not None else local - 1, 0, chunk=chunk)
    if local == 1:
        return pattern, None  # a query sees itself, whatever the sequences
    row = torch.arange(call.b, device=call.device)[:, None, None, None]
    query = torch.arange(1, call.sq, device=call.device)[None, None, :, None]
    head = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=call.device)
    # Neighbours see each other unless a sequence, or a chunk, ends between them.
    neighbours = mask_function(row, head, query, query - 1)
    if chunk is not None:
        neighbours = neighbours | (query % chunk == 0)
    return pattern, neighbours.all()
