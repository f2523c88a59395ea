# SPDX-License-Identifier: Apache-2.0
"""flash-attn 4's lists of blocks, and the tile lists that they are."""

from __future__ import annotations

from typing import Any, NamedTuple

from tessera import TileList
from tessera.tiles import Form

from .arguments import Array, refuse


class BlockSparseTensorsTorch(NamedTuple):
    """Blocks to compute, for each block of queries those of the keys; B and H may be 1.

    `mask_block_cnt` int32 (B, H, M) and `mask_block_idx` int32 (B, H, M, N), sorted up to the count; `full_block_*`
    the same for blocks where the mask is waived; `block_size` (queries, keys), default (128, 128). The others order a
    GPU's work.
    """

    mask_block_cnt: Array
    mask_block_idx: Array
    full_block_cnt: Array | None = None
    full_block_idx: Array | None = None
    cu_total_m_blocks: Array | None = None
    cu_block_idx_offsets: Array | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Array | None = None
    dq_write_order_full: Array | None = None
    spt: bool | None = None


def tile_list(argument: str, tensors: Any, form: Form) -> TileList | None:
    """A tile list over the tensors of `tensors`; none is copied."""
    if tensors is None:
        return None
    if not hasattr(tensors, "mask_block_cnt"):
        refuse(argument, tensors, "a BlockSparseTensorsTorch", TypeError)
    if getattr(tensors, "cu_total_m_blocks", None) is not None:
        refuse(
            argument,
            "cu_total_m_blocks",
            "blocks of sequences of one length: lists of packed sequences are not there yet",
        )
    return TileList(
        counts=tensors.mask_block_cnt,
        indices=tensors.mask_block_idx,
        full_counts=getattr(tensors, "full_block_cnt", None),
        full_indices=getattr(tensors, "full_block_idx", None),
        form=form,
        block=tuple(getattr(tensors, "block_size", None) or (128, 128)),
    )
