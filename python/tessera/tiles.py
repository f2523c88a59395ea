# SPDX-License-Identifier: Apache-2.0
"""Lists of tiles: which blocks of queries and keys a run computes (docs/semantics.md, section 5)."""

from __future__ import annotations

from typing import Any, Literal

from . import _core
from ._libraries import library_of_type

Array = Any
Form = Literal["indices", "bitmask", "transposed"]

_FORMS = ("indices", "bitmask", "transposed")


def as_numpy(array: Array) -> Any:
    """The array as numpy's: a view where the library shares memory (torch and jax on the CPU do), a copy from a GPU."""
    library = library_of_type(type(array))
    if library is None:  # a list
        import numpy

        return numpy.asarray(array)
    return library.to_numpy(array)


def in_library_of(like: Array, array: Any) -> Array:
    """A numpy array of int32, uint32 or bool in the library of `like`."""
    library = library_of_type(type(like))
    return array if library is None else library.from_numpy(array, like)


class TileList:
    """Which tiles of `block` = (query rows, keys) are computed; a tile on no list is skipped.

    Query block = row // block[0] and key block = key // block[1] count within a sequence; the key blocks of a second
    segment begin at ceil(seqlen_k / block[1]). H is 1, heads_kv or heads_q; B is 1 or the batch. Of the forms

    - `indices`: `counts` int32 (B, H, query blocks); `indices` int32 (B, H, query blocks, capacity): in each row the
      first count entries are sorted, unique key blocks,
    - `bitmask`: `bits` uint32 (B, H, query blocks, ceil(key blocks / 32)): key block j is bit j % 32 of word j // 32,
    - `transposed`: `counts` int32 (B, H, key blocks); `indices` int32 (B, H, key blocks, capacity): query blocks,

    one is given. The `full_` arrays have the same shapes and are disjoint from the others: tiles where the mask
    function is waived. Arrays are of any library and are kept, not copied. Raises ValueError for arrays that do not
    fit the form; shapes and entries are checked when a run uses the list.
    """

    __slots__ = ("_arrays", "bits", "block", "counts", "form", "full_bits", "full_counts", "full_indices", "indices")

    def __init__(
        self,
        *,
        counts: Array | None = None,
        indices: Array | None = None,
        bits: Array | None = None,
        full_counts: Array | None = None,
        full_indices: Array | None = None,
        full_bits: Array | None = None,
        form: Form | None = None,
        block: tuple[int, int] = (64, 64),
    ) -> None:
        if form is None:
            form = "indices" if bits is None else "bitmask"
        if form not in _FORMS:
            raise ValueError(f"form: got {form!r}; want one of {', '.join(map(repr, _FORMS))}")
        self.form: Form = form
        self.block = (int(block[0]), int(block[1]))
        self.counts, self.indices, self.bits = counts, indices, bits
        self.full_counts, self.full_indices, self.full_bits = full_counts, full_indices, full_bits
        names = ("tile_counts", "tile_indices", "full_counts", "full_indices", "tile_bits", "full_bits")
        given = (counts, indices, full_counts, full_indices, bits, full_bits)
        self._arrays = tuple((name, array) for name, array in zip(names, given, strict=True) if array is not None)
        wanted = {"tile_bits"} if form == "bitmask" else {"tile_counts", "tile_indices"}
        full = {"full_bits"} if form == "bitmask" else {"full_counts", "full_indices"}
        has = {name for name, _ in self._arrays}
        if has != wanted and has != wanted | full:
            raise ValueError(
                f"tiles: got {', '.join(sorted(has)) or 'no arrays'}; want {', '.join(sorted(wanted))} "
                f"and, for full tiles, {', '.join(sorted(full))} for the form {form!r}"
            )

    def arrays(self) -> tuple[tuple[str, Array], ...]:
        """(slot, array) of what the list binds in a run."""
        return self._arrays

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(array.shape)}" for name, array in self._arrays)
        return f"TileList(form={self.form!r}, block={self.block}, {shapes})"

    @classmethod
    def from_mask(
        cls,
        mask: Array,
        *,
        full: Array | None = None,
        form: Form = "indices",
        block: tuple[int, int] = (64, 64),
    ) -> TileList:
        """The tiles where `mask`, bool (B, H, query blocks, key blocks), is true; those of `full` become full tiles.

        The arrays are new, in the library of `mask`. Needs numpy. Raises ValueError for another rank.
        """
        import numpy

        kept = as_numpy(mask).astype(bool)
        if kept.ndim != 4:
            raise ValueError(f"mask: got {kept.ndim} dimensions; want (batch or 1, heads, query blocks, key blocks)")
        waived = numpy.zeros_like(kept) if full is None else as_numpy(full).astype(bool)
        if waived.shape != kept.shape:
            raise ValueError(f"full: got shape {waived.shape}; want that of mask, {kept.shape}")
        arrays = _packed(kept & ~waived, form, "")
        if full is not None:
            arrays |= _packed(waived, form, "full_")
        arrays = {name: in_library_of(mask, array) for name, array in arrays.items()}
        return cls(form=form, block=block, **arrays)

    @classmethod
    def from_function(
        cls,
        mask: Any,
        shape: tuple[int | None, int | None, int, int],
        *,
        q_offset: int | None = None,
        form: Form = "indices",
        block: tuple[int, int] = (64, 64),
    ) -> TileList:
        """The tiles in which `mask`, a function of Python as `attention` takes it, may show a key; where it shows all
        keys they are full tiles. For GPUs: the CPU needs no list to skip what a function hides.

        shape: (batch, heads, seqlen_q, seqlen_k), None for any number of sequences or query heads, where the mask does
        not read which; q_offset: position of the first query, by default seqlen_k − seqlen_q. Tiles are classified by
        interval arithmetic, so a tile on the list may be empty; none is missing. Tensors that the function reads are
        looked at now, on the host. The arrays are numpy's. Needs numpy. Raises TraceError for a function that cannot be
        traced, ValueError for a None that the mask reads.
        """
        import numpy

        from .expressions.register import mask_of

        batch, heads, queries, keys = shape
        traced = mask_of(mask, False)
        for name, number, many in (("batch", batch, "sequences"), ("head", heads, "query heads")):
            if number is None and name in traced.inputs:
                raise ValueError(f"shape: got {shape} for a mask that reads the {name}; want the number of {many}")
        blocks = -(-queries // block[0]), -(-keys // block[1])
        classes = numpy.full((batch or 1, heads or 1, *blocks), 2, numpy.uint8)
        if traced.name is not None:
            arrays = [array.cpu() if hasattr(array, "cpu") else array for array in traced.tensors]
            offset = keys - queries if q_offset is None else q_offset
            _core.classify_mask(traced.name, arrays, queries, keys, tuple(block), offset, classes)
        return cls.from_mask(classes > 0, full=classes == 2, form=form, block=block)

    @classmethod
    def from_mass(
        cls, mass: Array, share: float = 0.99, *, form: Form = "indices", block: tuple[int, int] = (64, 64)
    ) -> TileList:
        """For every query block the fewest tiles that hold `share` of its mass, heaviest first.

        `mass` is fp32 (batch, heads_q, query blocks, key blocks), as `attention(..., tiles=Tiles(mass="mean"))` returns
        it. Tiles without mass are never kept. Tiles whose mass is not finite are always kept, and the share is that of
        the others. Needs numpy. Raises ValueError for a share outside 0 to 1.
        """
        import numpy

        if not 0.0 <= share <= 1.0:
            raise ValueError(f"share: got {share}; want 0 to 1")
        weight = as_numpy(mass).astype(numpy.float64)
        unknown = ~numpy.isfinite(weight)
        weight[unknown] = 0
        order = numpy.argsort(-weight, axis=-1, kind="stable")
        heaviest = numpy.take_along_axis(weight, order, axis=-1)
        before = numpy.cumsum(heaviest, axis=-1) - heaviest  # mass of all heavier tiles
        wanted = heaviest > 0
        if share < 1.0:
            wanted &= before < share * weight.sum(axis=-1, keepdims=True)
        kept = numpy.zeros(weight.shape, bool)
        numpy.put_along_axis(kept, order, wanted, axis=-1)
        made = cls.from_mask(kept | unknown, form=form, block=block)
        arrays = {name.removeprefix("tile_"): in_library_of(mass, array) for name, array in made.arrays()}
        return cls(form=form, block=block, **arrays)

    def to_mask(self, *, key_blocks: int | None = None, query_blocks: int | None = None) -> Array:
        """bool (B, H, query blocks, key blocks): which tiles are listed, partial or full. Needs numpy.

        `key_blocks` is needed by the form `indices` (`bitmask`: default every bit), `query_blocks` by `transposed`.
        Raises ValueError where it is missing or an entry lies outside.
        """
        pairs = [(self.counts, self.indices, self.bits), (self.full_counts, self.full_indices, self.full_bits)]
        masks = [self._unpacked(*each, key_blocks, query_blocks) for each in pairs if any(a is not None for a in each)]
        union = masks[0] if len(masks) == 1 else masks[0] | masks[1]
        return in_library_of(self._arrays[0][1], union)

    def _unpacked(self, counts: Any, indices: Any, bits: Any, key_blocks: int | None, query_blocks: int | None) -> Any:
        import numpy

        if self.form == "bitmask":
            words = numpy.ascontiguousarray(as_numpy(bits)).astype("<u4")
            every = numpy.unpackbits(words.view(numpy.uint8), axis=-1, bitorder="little").astype(bool)
            return every if key_blocks is None else every[..., :key_blocks]
        name, size = ("key_blocks", key_blocks) if self.form == "indices" else ("query_blocks", query_blocks)
        if size is None:
            raise ValueError(f"{name}: got None; want the number of blocks, which the form {self.form!r} does not hold")
        count, entry = as_numpy(counts), as_numpy(indices)
        listed = numpy.arange(entry.shape[-1]) < count[..., None]
        if (listed & ((entry < 0) | (entry >= size))).any():
            raise ValueError(f"{name}: got {size}; want more than the list's largest entry, {entry[listed].max()}")
        mask = numpy.zeros((*count.shape, size + 1), bool)  # the last column takes what is not listed
        numpy.put_along_axis(mask, numpy.where(listed, entry, size), True, axis=-1)
        mask = mask[..., :size]
        return mask if self.form == "indices" else mask.swapaxes(-1, -2)


def _packed(mask: Any, form: Form, prefix: str) -> dict[str, Any]:
    """Arrays of one list, by TileList's argument names, from bool (B, H, query blocks, key blocks)."""
    import numpy

    if form not in _FORMS:
        raise ValueError(f"form: got {form!r}; want one of {', '.join(map(repr, _FORMS))}")
    if form == "bitmask":
        padded = numpy.zeros((*mask.shape[:-1], -(-mask.shape[-1] // 32) * 32), bool)
        padded[..., : mask.shape[-1]] = mask
        words = numpy.packbits(padded, axis=-1, bitorder="little").view("<u4").astype(numpy.uint32)
        return {prefix + "bits": words}
    if form == "transposed":
        mask = mask.swapaxes(-1, -2)
    counts = mask.sum(axis=-1, dtype=numpy.int32)
    capacity = max(int(counts.max(initial=0)), 1)
    # Stable, so that the kept blocks come first and in order.
    indices = numpy.argsort(~mask, axis=-1, kind="stable")[..., :capacity].astype(numpy.int32)
    indices = numpy.where(numpy.arange(indices.shape[-1]) < counts[..., None], indices, numpy.int32(-1))
    return {prefix + "counts": counts, prefix + "indices": indices}
