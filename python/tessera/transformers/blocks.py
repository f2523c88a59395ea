# SPDX-License-Identifier: Apache-2.0
"""Decode steps over the block tables of transformers' continuous batching."""

from __future__ import annotations

from typing import Any

import torch

import tessera


def decode_pages(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sliding_window: int | None,
    context: dict[str, Any],
    options: dict[str, Any],
) -> torch.Tensor:
    """One new token for each sequence: writes its key and value into its page, then attends to its pages in place.

    query, key, value: (1, heads, sequences, dim). In the context `block_table` int32 (sequences, blocks), `k_cache` and
    `v_cache` (pages, page_size, hkv, dim), and `cu_seq_lens_k` (sequences + 1), the new tokens counted; a sequence of
    none, which pads the batch, writes zeros to the first page, which transformers keeps for that, and gets zeros.

    Returns (1, sequences, hq, dv).
    """
    keys, values, table = context["k_cache"], context["v_cache"], context["block_table"]
    sequences = query.shape[2]
    boundaries = context["cu_seq_lens_k"].to(torch.int32)[: sequences + 1]
    lengths = boundaries.diff()
    live = lengths > 0
    position = (lengths - 1).clamp(min=0).long()
    page_size = keys.shape[1]
    page = table.gather(1, (position // page_size)[:, None]).squeeze(1).long()
    page = torch.where(live, page, 0)
    for cache, new in ((keys, key), (values, value)):
        rows = new[0].transpose(0, 1)
        cache[page, position % page_size] = torch.where(live[:, None, None], rows, 0).to(cache.dtype)
    source = tessera.KeySource(keys, values, page_table=table, seqused=lengths)
    left = None if sliding_window is None else sliding_window - 1
    out = tessera.attention(query[0].transpose(0, 1)[:, None], source, window=(left, 0), **options)
    return out.transpose(0, 1)
