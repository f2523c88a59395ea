# SPDX-License-Identifier: Apache-2.0
"""Which rows of the sequences each rank holds, and where they stand.

A rank holds parts: runs of rows that are an attention problem of their own, one run of each sequence. With contiguous
shards a rank has one part. With zigzag shards every sequence is cut into 2 · ranks pieces and rank r holds pieces r and
2 · ranks − 1 − r, as two parts: under a causal mask all ranks then have the same work (Brandon et al. 2023, Striped
Attention, arXiv:2311.09431, has the problem; Megatron-LM and ring-flash-attention cut like this).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from .._checks import whole

Balance = Literal["contiguous", "zigzag"]
BALANCES = ("contiguous", "zigzag")


class Part(NamedTuple):
    """Rows [starts[s], starts[s] + lengths[s]) of each sequence s, behind each other in memory.

    Dense tensors have one sequence here: the rows of all batch entries are the same.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.lengths)

    def cut(self, begin: int, end: int) -> Part:
        """The part of rows [begin, end) of this one."""
        starts, lengths, first = [], [], 0
        for start, length in zip(self.starts, self.lengths, strict=True):
            low, high = max(begin - first, 0), min(end - first, length)
            starts.append(start + min(low, length))
            lengths.append(max(high - low, 0))
            first += length
        return Part(tuple(starts), tuple(lengths))


class Layout:
    """How sequences of `lengths` tokens are spread over `ranks`. Two layouts of the same arguments are equal.

    lengths: one number for dense tensors (batch, seqlen, …), which all batch entries share; with `packed` those of the
    sequences that lie behind each other in (tokens, …). Lengths need not divide: piece i of n of a sequence of L tokens
    is [i · L // n, (i + 1) · L // n), so ranks differ by a row a piece at most and may be empty. multiple: pieces begin
    at multiples of it, so U = ceil(L / multiple) units are cut in place of L tokens.
    """

    def __init__(self, lengths: tuple[int, ...], ranks: int, balance: Balance, packed: bool, multiple: int = 1) -> None:
        if balance not in BALANCES:
            raise ValueError(f"balance: got {balance!r}; want {' or '.join(map(repr, BALANCES))}")
        if ranks < 1:
            raise ValueError(f"ranks: got {ranks}; want 1 or more")
        if not packed and len(lengths) != 1:
            raise ValueError(f"lengths: got {len(lengths)} lengths; want one for dense tensors")
        if any(length < 0 for length in lengths):
            raise ValueError(f"lengths: got {min(lengths)}; want 0 or more")
        multiple = whole("multiple", multiple)
        if multiple < 1:
            raise ValueError(f"multiple: got {multiple}; want 1 or more")
        self.lengths, self.ranks, self.balance, self.packed, self.multiple = lengths, ranks, balance, packed, multiple
        self._on_device: dict[Any, Tensor] = {}
        self._kept: dict[Any, Any] = {}
        self._hash = hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.lengths, self.ranks, self.balance, self.packed, self.multiple

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self._key() == other._key())

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        what = f"{len(self.lengths)} sequences of {sum(self.lengths)} tokens" if self.packed else f"{self.lengths[0]}"
        cut = "" if self.multiple == 1 else f", multiple={self.multiple}"
        return f"Layout({what}, ranks={self.ranks}, balance={self.balance!r}{cut})"

    def over(self, ranks: int) -> Layout:
        """The same rows in the same order of pieces, over a divisor of the ranks: neighbours put together."""
        return Layout(self.lengths, ranks, self.balance, self.packed, self.multiple)

    @property
    def tokens(self) -> int:
        """Rows of the whole tensor."""
        return sum(self.lengths)

    @property
    def whole(self) -> Part:
        return Part((0,) * len(self.lengths), self.lengths)

    @cached_property
    def _parts(self) -> tuple[tuple[Part, ...], ...]:
        return tuple(tuple(self._piece(i) for i in self._pieces_of(rank)) for rank in range(self.ranks))

    def _pieces_of(self, rank: int) -> tuple[int, ...]:
        return (rank, 2 * self.ranks - 1 - rank) if self.balance == "zigzag" else (rank,)

    def _piece(self, i: int) -> Part:
        n, m = (2 * self.ranks if self.balance == "zigzag" else self.ranks), self.multiple
        units = tuple(-(-length // m) for length in self.lengths)
        starts, ends = (
            tuple(min(k * u // n * m, length) for u, length in zip(units, self.lengths, strict=True))
            for k in (i, i + 1)
        )
        return Part(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def parts(self, rank: int) -> tuple[Part, ...]:
        return self._parts[rank]

    def rows(self, rank: int) -> int:
        """Rows of a rank's tensors."""
        return sum(part.rows for part in self.parts(rank))

    def index(self, rank: int) -> Tensor:
        """Rows of the whole tensor that the rank holds, in its order: int64 (rows)."""
        return self._of_rank("index", rank)[0]

    def positions(self, rank: int) -> Tensor:
        """Positions within their sequences of the rank's rows: int64 (rows). For rotary embeddings, say."""
        return self._of_rank("positions", rank)[1]

    def _of_rank(self, kind: str, rank: int) -> tuple[Tensor, Tensor]:
        firsts = [0]
        for length in self.lengths:
            firsts.append(firsts[-1] + length)
        indices, positions = [], []
        for part in self.parts(rank):
            for first, start, length in zip(firsts, part.starts, part.lengths, strict=False):
                if length:
                    positions.append(torch.arange(start, start + length))
                    indices.append(positions[-1] + first)
        none = torch.empty(0, dtype=torch.int64)
        return torch.cat([none, *indices]), torch.cat([none, *positions])

    def inverse(self) -> Tensor:
        """Where each row of the whole tensor lies in the ranks' tensors behind each other: int64 (tokens)."""
        order = torch.cat([self.index(rank) for rank in range(self.ranks)])
        found = torch.empty_like(order)
        found[order] = torch.arange(len(order))
        return found

    def on(self, device: torch.device, name: str, *arguments: Any) -> Tensor:
        """`getattr(self, name)(*arguments)`, a tensor, on a device; made once."""
        key = (device, name, arguments)
        if key not in self._on_device:
            self._on_device[key] = getattr(self, name)(*arguments).to(device)
        return self._on_device[key]


F = TypeVar("F", bound=Callable[..., Any])


def kept_by_layout(function: F) -> F:
    """function(mask, layout, …) that computes once what it is asked, and forgets it with the layout: batches of packed
    sequences come and go."""

    @wraps(function)
    def call(mask: Any, layout: Layout, *arguments: Any) -> Any:
        key = (function.__name__, mask, arguments)
        if key not in layout._kept:
            layout._kept[key] = function(mask, layout, *arguments)
        return layout._kept[key]

    return cast("F", call)


def layout_of(
    ranks: int,
    *,
    seqlen: int | None = None,
    cu_seqlens: Any = None,
    balance: Balance = "zigzag",
    multiple: int = 1,
) -> Layout:
    """The layout of dense sequences of `seqlen` tokens or of packed ones: cu_seqlens (b + 1) of all ranks together,
    from 0, a tensor (read once) or integers. multiple: as `Layout`. Raises ValueError where neither or both are given,
    or they decrease."""
    if (seqlen is None) == (cu_seqlens is None):
        raise ValueError(f"seqlen: got {seqlen} and cu_seqlens {cu_seqlens}; want one of them")
    if cu_seqlens is None:
        return Layout((int(seqlen or 0),), ranks, balance, False, multiple)
    ends = [int(end) for end in (cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens)]
    if not ends or ends[0] != 0 or any(b < a for a, b in pairwise(ends)):
        raise ValueError(f"cu_seqlens: got {ends[:8]}; want b + 1 entries from 0, not decreasing")
    return Layout(tuple(b - a for a, b in pairwise(ends)), ranks, balance, True, multiple)
