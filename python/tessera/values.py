# SPDX-License-Identifier: Apache-2.0
"""Arguments of `attention` that belong together: a source of keys, positions, what is asked of tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._checks import shown
from .tiles import TileList

Array = Any


class KeySource(NamedTuple):
    """Keys and values: dense, packed, or in pages. `attention(q, source)` takes one, `k2=` another beside it.

    k, v: (b, sk, hkv, d | dv); packed (tokens, hkv, d | dv) with cu_seqlens int32 (b + 1); pages (pages, page_size,
    hkv, d | dv) with a table or CSR. seqused: int32 (b), keys in use of each sequence.

    page_table: int32 (b, columns), with seqused. CSR: page_indptr int32 (b + 1), page_indices int32 (n), last_page_len
    int32 (b). max_seqlen: the longest sequence, read from cu_seqlens or page_indptr when it is not given; on a GPU the
    number of all tokens then stands for it.
    """

    k: Array
    v: Array
    cu_seqlens: Array | None = None
    max_seqlen: int | None = None
    seqused: Array | None = None
    page_table: Array | None = None
    page_indptr: Array | None = None
    page_indices: Array | None = None
    last_page_len: Array | None = None

    def described_by(self) -> tuple[tuple[str, Array | None], ...]:
        """(slot of the first source, array) of what says where the keys lie."""
        return (
            ("cu_seqlens_k", self.cu_seqlens),
            ("seqused_k", self.seqused),
            ("page_table", self.page_table),
            ("page_indptr", self.page_indptr),
            ("page_indices", self.page_indices),
            ("last_page_len", self.last_page_len),
        )


def arrays_of(k: Array | KeySource, v: Array | None) -> tuple[Array, Array]:
    """Keys and values, given apart or as a source. Raises TypeError where the values are missing."""
    if isinstance(k, KeySource):
        return k.k, k.v
    if v is None:
        raise TypeError("v: got None; want an array, or a KeySource in place of k")
    return k, v


class Offsets(NamedTuple):
    """Positions where they do not begin at 0, or the last query does not stand at the last key.

    q, k, k2: int64 (b), positions of the first query, and of the first key of either source. batch, head: of the first
    sequence and head in the whole problem, for dropout and for functions.
    """

    q: Array | None = None
    k: Array | None = None
    k2: Array | None = None
    batch: int = 0
    head: int = 0


class Tiles(NamedTuple):
    """What a call computes and tells of tiles (docs/semantics.md, section 5).

    forward: the tiles to compute, backward: those of the gradient (default: the same). block: (query rows, keys) of a
    tile where no list says it, default (64, 64).

    backward may also be a bool array (B, H, query blocks, key blocks), uint32 words of that as a bit mask has them, a
    `SkipState`, whose list it is then, or, for torch's autograd, a number above 0 and below 1: the gradient leaves out
    the lightest tiles of a query block that hold less than that share of its mass together, masses being this
    forward's (as BackLite has it). The list is made by the forward and kept for its backward.

    mass: "mean" or "rms", the probability mass per tile, fp32 (b, hq, query blocks, key blocks), normalised by this
    run's LSE or by prior_lse. next: "indices" or "bitmask", the list of the tiles with mass > threshold.
    """

    forward: TileList | None = None
    backward: TileList | Any = None
    block: tuple[int, int] | None = None
    mass: str | None = None
    prior_lse: Array | None = None
    next: str | None = None
    threshold: float = 0.0


def with_backward_list(tiles: Tiles, q: Array) -> Tiles:
    """The same with a `TileList` for whatever else names the backward's tiles, but for a number. Raises TypeError for
    what names none."""
    given = tiles.backward
    if given is None or isinstance(given, TileList):
        return tiles
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        if not 0 < given < 1:
            raise ValueError(f"tiles.backward: got {given}; want a share of the mass above 0 and below 1")
        if tiles.mass is not None or tiles.next is not None:
            raise NotImplementedError("tiles.backward: got a number beside mass or next; want neither of those")
        return tiles
    if hasattr(given, "tile_list"):
        listed = given.tile_list(q)
    elif "bool" in str(getattr(given, "dtype", "")):
        listed = TileList.from_mask(given, form="bitmask", block=tiles.block or (64, 64))
    elif "uint32" in str(getattr(given, "dtype", "")):
        listed = TileList(bits=given, form="bitmask", block=tiles.block or (64, 64))
    else:
        raise TypeError(
            f"tiles.backward: got {shown(given)}; want a TileList, a SkipState, a bool or uint32 array, or a number"
        )
    return tiles._replace(backward=listed)


# Keywords of before, and how it is said now.
_MOVED = {
    "offset": "seed=(seed, offset)",
    "v2": "k2=KeySource(k2, v2)",
    "bwd_tiles": "tiles=Tiles(backward=…)",
    "block": "tiles=Tiles(block=…)",
    "mass": "tiles=Tiles(mass=…)",
    "prior_lse": "tiles=Tiles(prior_lse=…)",
    "next_tiles": "tiles=Tiles(next=…)",
    "threshold": "tiles=Tiles(threshold=…)",
    "q_offset": "offsets=Offsets(q=…)",
    "k_offset": "offsets=Offsets(k=…)",
    "k_offset2": "offsets=Offsets(k2=…)",
    "batch_offset": "offsets=Offsets(batch=…)",
    "head_offset": "offsets=Offsets(head=…)",
    "cu_seqlens_k2": "k2=KeySource(k2, v2, cu_seqlens=…)",
    "max_seqlen_k2": "k2=KeySource(k2, v2, max_seqlen=…)",
    "seqused_k2": "k2=KeySource(k2, v2, seqused=…)",
    **{name: f"KeySource(k, v, {name}=…) for k and v" for name in KeySource._fields[5:]},
    **{f"{name}2": f"k2=KeySource(k2, v2, {name}=…)" for name in KeySource._fields[5:]},
}


def unexpected(function: str, names: dict[str, Any]) -> TypeError:
    """The error for keywords that `function` does not have."""
    name = next(iter(names))
    if name in _MOVED:
        return TypeError(f"{name}: got a keyword of its own; want {_MOVED[name]}")
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}")
