# SPDX-License-Identifier: Apache-2.0
"""Masks of speculative steps: which new tokens of a tree see which, given as bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._checks import shown, whole
from .._libraries import CPU, dtype_name, library_of
from ..expressions.captured import Captured

Array = Any

_WORDS = {"uint32": 32, "int32": 32, "uint64": 64, "int64": 64}


def tree_mask(bits: Array, seqused_k: Any) -> Callable[..., Any]:
    """A mask for `attention(..., mask=)`: new tokens see all keys before them, and of each other what `bits` says.

    bits: uint32, uint64, int32 or int64 (b, tokens), or (b, tokens, words) for more tokens than a word has bits; bit j
    of row i, which is bit j % 32 of word j // 32 (or 64), says that new token i sees new token j. seqused_k: int32 (b),
    keys of each sequence with the new tokens, which are its last ones; or one number for all sequences. Queries are
    dense, (b, tokens, heads, dim), at their own positions: without `causal` and `Offsets`.

    Bits on the host are checked as by `check_tree`. Those on a GPU are not read here, so that a CUDA graph may be
    captured with them; whatever they are, they hide or show keys of their own sequence's new tokens and nothing else.
    """
    width = _word_bits(bits)
    if library_of(bits, "bits").device(bits) == CPU:
        check_tree(bits)
    tokens, ranked = bits.shape[1], len(bits.shape) == 3
    words = Captured(bits.view(_signed(bits, width)))
    if getattr(seqused_k, "shape", None) is None:
        # An array, since a number would be a part of the expression: another one at each step.
        seqused_k = _lengths(whole("seqused_k", seqused_k, "int32 (b) or a number"), bits)
    elif tuple(seqused_k.shape) != (bits.shape[0],):
        raise ValueError(f"seqused_k: got {shown(seqused_k)}; want int32 ({bits.shape[0]},), as bits has sequences")
    used: Any = Captured(seqused_k)

    def tree(batch: Any, head: Any, query: Any, key: Any) -> Any:
        first = used[batch] - tokens  # position of the first new token
        row, column = query - first, key - first
        word = words[batch, row, column // width] if ranked else words[batch, row]
        return (column < 0) | (((word >> (column % width)) & 1) == 1)

    return tree


def _lengths(number: int, like: Array) -> Array:
    """int32 (b) where `like`, (b, ...), is, without a copy from the host."""
    if hasattr(like, "new_full"):
        import torch

        return like.new_full(like.shape[:1], number, dtype=torch.int32)
    import numpy

    return numpy.full_like(like, number, dtype=numpy.int32, shape=like.shape[:1])


def check_tree(bits: Array) -> None:
    """ValueError, with the sequence and the tokens, unless `bits` (as in `tree_mask`) are those of a tree.

    A token sees itself; no token behind the last; with a token all that this one sees, its ancestors; and of any two
    tokens that it sees one sees the other and not the other way round. Reads the array; of a GPU's it waits for a copy.
    """
    import numpy

    width = _word_bits(bits)
    words = library_of(bits, "bits").to_numpy(bits)
    batch, tokens = words.shape[:2]
    words = words.reshape(batch, tokens, -1).astype(numpy.uint64)
    shifts = numpy.arange(width, dtype=numpy.uint64)
    all_bits = (words[..., None] >> shifts & numpy.uint64(1)).astype(bool).reshape(batch, tokens, -1)
    for sequence, row, column in zip(*all_bits[..., tokens:].nonzero(), strict=True):
        raise _no_tree(sequence, f"token {row} that sees token {tokens + column} of {tokens}", "no such bit")
    sees = all_bits[..., :tokens]
    for sequence, row in zip(*(~sees.diagonal(axis1=1, axis2=2)).nonzero(), strict=True):
        raise _no_tree(sequence, f"token {row} that does not see itself", f"bit {row} in its row")
    for sequence, seen in enumerate(sees):
        for row, column in zip(*numpy.triu(seen & seen.T, 1).nonzero(), strict=True):
            raise _no_tree(sequence, f"tokens {row} and {column} that see each other", "one of them before the other")
        for row in range(tokens):
            _check_path(sequence, row, seen)


def _check_path(sequence: int, row: int, seen: Any) -> None:
    """ValueError unless what token `row` sees is a path: all that each of its tokens sees, and no branches."""
    ancestors = seen[row].nonzero()[0].tolist()
    for ancestor in ancestors:
        for missing in (seen[ancestor] & ~seen[row]).nonzero()[0]:
            raise _no_tree(
                sequence,
                f"token {row} that sees token {ancestor} and not token {missing}, which that one sees",
                "all ancestors of a token that it sees",
            )
        for other in ancestors:
            if not seen[ancestor, other] and not seen[other, ancestor]:
                raise _no_tree(
                    sequence,
                    f"token {row} that sees tokens {ancestor} and {other}, of which neither sees the other",
                    "one path to the root",
                )


def _no_tree(sequence: int, got: str, want: str) -> ValueError:
    return ValueError(f"bits: got, in sequence {sequence}, {got}; want {want}, as in a tree")


def _word_bits(bits: Array) -> int:
    """32 or 64, of the words of a mask of the right shape."""
    library_of(bits, "bits")
    width = _WORDS.get(dtype_name(bits.dtype, "bits"))
    if width is None or len(bits.shape) not in (2, 3):
        raise ValueError(
            f"bits: got {shown(bits)}; want (b, tokens) or (b, tokens, words) in uint32, uint64, int32 or int64"
        )
    capacity = width * (bits.shape[2] if len(bits.shape) == 3 else 1)
    if not 0 < whole("bits", bits.shape[1]) <= capacity:
        raise ValueError(
            f"bits: got {bits.shape[1]} tokens with {capacity} bits each; want 1 to {capacity} tokens, or more words"
        )
    return width


def _signed(bits: Array, width: int) -> Any:
    """The signed integers of as many bits, in the library of `bits`."""
    name = f"int{width}"
    if library_of(bits, "bits").name == "torch":
        import torch

        return getattr(torch, name)
    return name
