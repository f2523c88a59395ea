# SPDX-License-Identifier: Apache-2.0
"""``flash_attn.bert_padding``: between padded batches and packed tokens, beside :mod:`.flash_attn_2`'s varlen calls.

Names, arguments and results are those of Dao-AILab/flash-attention, tag v2.8.3, ``flash_attn/bert_padding.py``. torch
only, on any device; differentiable in what holds the tokens, twice too.
"""

from __future__ import annotations

import torch

from .arguments import refuse

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` (n,) int64 of `input` (rows, …): (n, …)."""
    if input.ndim < 2:
        refuse("input", input, "two dimensions or more, (rows, ...)", ValueError)
    return input.index_select(0, _as_indices(indices))


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """(first_axis_dim, …) with `values` (n, …) in the rows `indices` (n,) int64, each named once, and 0 elsewhere."""
    if values.ndim < 2:
        refuse("values", values, "two dimensions or more, (rows, ...)", ValueError)
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_put((_as_indices(indices),), values)


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The tokens of a padded batch, packed.

    `hidden_states` (batch, seqlen, …); `attention_mask` (batch, seqlen), bool or int: 1 where a token counts;
    `unused_mask`, likewise: 1 where one is kept that does not count, apart from the former.

    Returns (tokens (total, …), indices int64 (total,) into batch · seqlen, cu_seqlens int32 (batch + 1,) of the kept
    tokens, the longest sequence of them, seqused int32 (batch,): how many count). The longest is read from the device.
    """
    if hidden_states.ndim < 3:
        refuse("hidden_states", hidden_states, "three dimensions or more, (batch, seqlen, ...)", ValueError)
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            refuse(name, mask, f"the batch and seqlen of hidden_states, {tuple(hidden_states.shape[:2])}", ValueError)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    longest = int(lengths.max()) if lengths.numel() else 0
    return tokens, indices, cu_seqlens, longest, attention_mask.sum(dim=-1, dtype=torch.int32)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """(batch, seqlen, …): `hidden_states` (total, …) at the places `indices` of :func:`unpad_input`, 0 elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _as_indices(indices: torch.Tensor) -> torch.Tensor:
    if indices.ndim != 1:
        refuse("indices", indices, "one dimension, (rows,)", ValueError)
    return indices
