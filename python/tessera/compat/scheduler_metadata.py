# SPDX-License-Identifier: Apache-2.0
"""flash-attn 4's metadata of its schedulers: there to be called and passed on, with nothing in it."""

from __future__ import annotations

from typing import NamedTuple

from .arguments import Array, empty, refuse


class SchedulerMetadataTensorsTorch(NamedTuple):
    """What :func:`get_scheduler_metadata` returns: int32 arrays or None."""

    num_m_blocks_ptr: Array | None
    num_splits_dynamic_ptr: Array | None
    virtual_batch_idx_ptr: Array | None
    num_nheads_in_l2_ptr: Array | None
    tile_count_semaphore: Array | None
    cu_total_m_blocks: Array | None = None
    cu_total_splits_m_blocks: Array | None = None
    blocks_to_batch_idx: Array | None = None


def get_scheduler_metadata(
    max_seqlen_q: int,
    max_seqlen_k: int,
    nheads: int,
    nheads_kv: int,
    headdim: int,
    num_splits: int,
    headdim_v: int | None = None,
    pack_gqa: int | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqlen_k_new: int = 0,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    cu_seqlens_k_new: Array | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    leftpad_k: Array | None = None,
    seqlen_k_per_split: int | None = None,
    _arch: int | None = None,
) -> SchedulerMetadataTensorsTorch:
    """Metadata for `scheduler_metadata`: arrays of shape (0,), because plans order their work themselves.

    None and not None as in flash-attn 4: counters where the keys are in parts or the mask is causal, else the sums of
    blocks. One of the four lengths has to be given.
    """
    given = (x for x in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k) if x is not None)
    like = next(given, None)
    if like is None:
        refuse("cu_seqlens_q", None, "one of cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k", ValueError)
    counters = empty(like) if causal or num_splits != 1 else None
    return SchedulerMetadataTensorsTorch(
        num_m_blocks_ptr=counters,
        num_splits_dynamic_ptr=counters,
        virtual_batch_idx_ptr=None,
        num_nheads_in_l2_ptr=counters if causal else None,
        tile_count_semaphore=counters,
        cu_total_m_blocks=empty(like) if counters is None else None,
    )
