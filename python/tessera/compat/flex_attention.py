# SPDX-License-Identifier: Apache-2.0
"""The calls of `torch.nn.attention.flex_attention`, by the names and defaults that they have there.

Score and mask functions are traced (`tessera.expressions`), so nothing is compiled on the CPU and no block mask has to
be made: masks say themselves which tiles they hide. A `BlockMask` of torch's is taken as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .._checks import shown
from .._libraries import library_of
from ..attention import attention
from ..expressions.register import Options, mask_of, with_traced
from ..tiles import TileList
from ..values import Offsets
from .flex_calls import FlexCalls, flex_calls

Array = Any
ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]
MaskMod = Callable[[Any, Any, Any, Any], Any]


class BlockMask:
    """A mask and the lengths that it is for.

    shape: (B, H, Q_LEN, KV_LEN), 1 for a B or H of None. tiles: for a GPU, the blocks that the mask may show, as they
    were when this was made; the CPU finds them in every run. Source: torch.nn.attention.flex_attention.BlockMask.
    """

    def __init__(
        self,
        mask_mod: MaskMod,
        shape: tuple[int, int, int, int],
        BLOCK_SIZE: tuple[int, int] = (128, 128),
        tiles: TileList | None = None,
    ) -> None:
        self.mask_mod, self.shape, self.BLOCK_SIZE, self.tiles = mask_mod, shape, BLOCK_SIZE, tiles

    @property
    def seq_lengths(self) -> tuple[int, int]:
        return self.shape[2:]

    def to(self, device: Any) -> BlockMask:
        """With the list on `device`; captured tensors are the function's own and stay where they are."""
        return BlockMask(self.mask_mod, self.shape, self.BLOCK_SIZE, _moved(self.tiles, device))

    def __repr__(self) -> str:
        return f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, mask_mod={self.mask_mod})"


def _moved(tiles: TileList | None, device: Any) -> TileList | None:
    if tiles is None:
        return None
    import torch

    arrays = {name.removeprefix("tile_"): torch.as_tensor(array).to(device) for name, array in tiles.arrays()}
    return TileList(form=tiles.form, block=tiles.block, **arrays)


def noop_mask(batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
    """Hides nothing."""
    return True


def _check_masks(mask_mods: tuple[Any, ...]) -> None:
    for mask_mod in mask_mods:
        if not callable(mask_mod):
            raise RuntimeError(f"mask_mods: got {shown(mask_mod)}; want functions (batch, head, q_idx, kv_idx)")


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """Shows what all of them show. Raises RuntimeError for what is no function, as torch's does."""
    _check_masks(mask_mods)

    def both(batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
        shown_by_all: Any = True
        for mask_mod in mask_mods:
            shown_by_all = shown_by_all & mask_mod(batch, head, token_q, token_kv)
        return shown_by_all

    return both


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """Shows what one of them shows. Raises RuntimeError for what is no function, as torch's does."""
    _check_masks(mask_mods)

    def either(batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
        shown_by_one: Any = False
        for mask_mod in mask_mods:
            shown_by_one = shown_by_one | mask_mod(batch, head, token_q, token_kv)
        return shown_by_one

    return either


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """The mask for these lengths. For the CPU it computes nothing; a `device` that is a GPU gets a list of blocks, by
    intervals of the mask's expression, unless the mask is a window.

    mask_mod(batch, head, q_idx, kv_idx) -> truth; B, H: for how many sequences and heads, None: any. What comes behind
    BLOCK_SIZE changes nothing here. Raises TypeError for a mask_mod that is no function, ValueError for a list whose B
    or H is None and whose mask reads which.
    """
    if not callable(mask_mod):
        raise TypeError(f"mask_mod: got {shown(mask_mod)}; want a function (batch, head, q_idx, kv_idx)")
    block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else (BLOCK_SIZE[0], BLOCK_SIZE[1])
    shape = (B or 1, H or 1, Q_LEN, KV_LEN)
    tiles = None
    if str(device).startswith("cuda") and mask_of(mask_mod).name is not None:
        made = TileList.from_function(mask_mod, (B, H, Q_LEN, KV_LEN), q_offset=0, block=block)
        tiles = _moved(made, device)
    return BlockMask(mask_mod, shape, block, tiles)


def flex_attention(
    query: Array,
    key: Array,
    value: Array,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Attention of query (B, Hq, L, E), key (B, Hkv, S, E) and value (B, Hkv, S, Ev); the result is (B, Hq, L, Ev).

    score_mod(score, batch, head, q_idx, kv_idx) -> float; block_mask: of `create_block_mask`, or torch's; indices count
    from 0, and one outside a captured tensor is moved to the nearest inside, also a negative one, which torch counts
    from the end. scale: default E ** −0.5. enable_gqa: Hq may be a multiple of Hkv. return_lse: (out, LSE), the LSE
    fp32 (B, Hq, L), natural. kernel_options are Triton's and change nothing here. return_aux: torch's AuxRequest; the
    largest scores are NotImplementedError. A function is traced again when something that it reads may have changed, of
    which `tessera.expressions.score_of` says what is looked at in each call. Dtypes and gradients are those of
    `tessera.attention`.

    Raises ValueError for shapes that do not fit, TraceError (a ValueError) for functions that cannot be traced.

    Source: Dong et al. 2024, Flex Attention (arXiv:2412.05496).
    """
    _check_shapes(query, key, value, enable_gqa)
    wants_lse = return_lse or bool(getattr(return_aux, "lse", False))
    if return_lse and return_aux is not None:
        raise ValueError("return_lse: got True beside return_aux; want one of them")
    if getattr(return_aux, "max_scores", False):
        raise NotImplementedError("return_aux: got max_scores; want lse alone")
    calls = _calls_of(score_mod, block_mask)
    options = (scale, enable_gqa, wants_lse, getattr(block_mask, "shape", None))
    found = None if calls is None else calls.call(query, key, value, options)
    if found is not None:
        out, lse = found
    else:
        given = {"scale": scale, **options_of(query, key, score_mod, block_mask), "return_lse": wants_lse}
        results = attention(*(x.swapaxes(1, 2) for x in (query, key, value)), **given)
        out, lse = results if wants_lse else (results, None)
        out = out.swapaxes(1, 2)
        if calls is not None:
            calls.keep((query, key, value), options, given)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse)
    return (out, lse) if return_lse else out


def _calls_of(score_mod: ScoreMod | None, block_mask: Any) -> FlexCalls | None:
    """Calls that may be found again; None for others, such as those with a BlockMask of torch's."""
    if type(block_mask) is BlockMask:
        return flex_calls(block_mask, score_mod, block_mask.mask_mod, block_mask.tiles)
    if block_mask is None and score_mod is not None:
        return flex_calls(score_mod, score_mod, None, None)
    return None


def options_of(query: Array, key: Array, score_mod: ScoreMod | None, block_mask: Any) -> dict[str, Any]:
    """`causal`, `window`, `score`, `mask`, `extras`, `tiles` and `offsets` of :func:`tessera.attention` for query
    (B, Hq, L, E) and key (B, Hkv, S, E), whose indices count from 0.

    Raises TypeError for what is no BlockMask, ValueError for one of other lengths, TraceError.
    """
    (batch, heads, length), keys = query.shape[:3], key.shape[2]
    mask, tiles = _mask_of(block_mask, (batch, heads, length, keys))
    # Blocks that a list of ours calls full show all keys, so that the window of a mask holds there too.
    lists = None if isinstance(block_mask, BlockMask) else tiles
    traced = with_traced(Options(False, None, score_mod, mask, ()), lists, "")
    offsets = None if length == keys else Offsets(q=_zeros(query, batch))
    return {**traced._asdict(), "tiles": tiles, "offsets": offsets}


def _check_shapes(query: Array, key: Array, value: Array, enable_gqa: bool) -> None:
    for name, array in (("query", query), ("key", key), ("value", value)):
        if len(array.shape) != 4:
            raise ValueError(f"{name}: got shape {tuple(array.shape)}; want (batch, heads, seqlen, dim)")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"enable_gqa: got False for {query.shape[1]} query heads and {key.shape[1]} key heads; want True, or equal "
            "numbers"
        )


def _zeros(like: Array, count: int) -> Array:
    library = library_of(like, "query")
    if hasattr(like, "__array_namespace__"):
        space = like.__array_namespace__()
        return space.zeros((count,), dtype=space.int32, device=like.device)
    zeros = library.empty((count,), "int64", like)
    zeros[:] = 0
    return zeros


def _mask_of(block_mask: Any, shape: tuple[int, int, int, int]) -> tuple[Any, TileList | None]:
    """(mask function, tile list) of a BlockMask of ours or torch's."""
    if block_mask is None:
        return None, None
    if not hasattr(block_mask, "mask_mod") or not hasattr(block_mask, "seq_lengths"):
        raise TypeError(f"block_mask: got {shown(block_mask)}; want a BlockMask")
    if tuple(block_mask.seq_lengths) != shape[2:]:
        raise ValueError(
            f"block_mask: got one of (Q_LEN, KV_LEN) = {tuple(block_mask.seq_lengths)} for {shape[2]} queries and "
            f"{shape[3]} keys; want one of these lengths"
        )
    for name, got, want in zip(("B", "H"), block_mask.shape[:2], shape[:2], strict=True):
        if got not in (1, want):
            raise ValueError(f"block_mask: got one of {name} = {got}; want 1 or {want}")
    if isinstance(block_mask, BlockMask):
        return block_mask.mask_mod, block_mask.tiles
    full = block_mask.full_kv_num_blocks
    tiles = TileList(
        counts=block_mask.kv_num_blocks,
        indices=block_mask.kv_indices,
        full_counts=full,
        full_indices=None if full is None else block_mask.full_kv_indices,
        block=tuple(block_mask.BLOCK_SIZE),
    )
    torch_noop = getattr(sys.modules.get("torch.nn.attention.flex_attention"), "noop_mask", None)
    hides_nothing = block_mask.mask_mod in (None, torch_noop, noop_mask)
    return None if hides_nothing else block_mask.mask_mod, tiles
