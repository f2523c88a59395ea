# SPDX-License-Identifier: Apache-2.0
"""Two attentions with a KV cache for model.py: Tessera over pages, and torch's SDPA over one contiguous tensor.

Both are called as `attention(layer, q, k, v)` for s new tokens of some sequences of the cache and do the same: rotate q
and k to the tokens' positions, put k and v into the cache, attend causally to everything in it. `select` says which
sequences the next calls are about, `advance` that their tokens have gone through every layer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from model import Config, rotary_tables, rotate
from tessera.compat.flash_attn_2 import flash_attn_with_kvcache
from torch import Tensor


class PagedAttention:
    """A pool of pages that sequences take from as they grow, read by `flash_attn_with_kvcache` through a page table.

    Memory follows the tokens that are there: a sequence of n tokens holds ceil(n / page_size) pages, wherever they lie.
    """

    def __init__(self, config: Config, sequences: int, capacity: int, dtype: torch.dtype, page_size: int = 16) -> None:
        """`capacity`: tokens that one sequence may reach; the pool has the pages that all of them together need."""
        columns = -(-capacity // page_size)
        pool = (config.layers, sequences * columns, page_size, config.heads_kv, config.head_dim)
        self.page_size = page_size
        self.k_pages = torch.empty(pool, dtype=dtype)
        self.v_pages = torch.empty(pool, dtype=dtype)
        self.free = torch.randperm(
            pool[1], generator=torch.Generator().manual_seed(0)
        ).tolist()  # order does not matter
        self.table = torch.zeros(sequences, columns, dtype=torch.int32)
        self.lengths = torch.zeros(sequences, dtype=torch.int32)
        self.cos, self.sin = rotary_tables(config, columns * page_size)
        self.seconds = 0.0  # in attention, over all calls
        self.select(range(sequences))

    def select(self, sequences: Sequence[int]) -> None:
        """The next calls bring tokens of these sequences, in this order."""
        self.rows = torch.tensor(list(sequences))
        self._gather()

    def advance(self, tokens: int) -> None:
        """`tokens` new tokens of every selected sequence are in the cache now."""
        self.lengths[self.rows] += tokens
        self._gather()

    def release(self, sequence: int) -> None:
        """Gives a finished sequence's pages back."""
        used = -(-int(self.lengths[sequence]) // self.page_size)
        self.free.extend(self.table[sequence, :used].tolist())
        self.lengths[sequence] = 0
        self._gather()

    def _gather(self) -> None:
        self.selected_lengths = self.lengths[self.rows]
        self.selected_table = self.table[self.rows]

    def reserve(self, tokens: int) -> None:
        """Takes pages from the pool until every selected sequence has room for `tokens` more."""
        for row in self.rows.tolist():
            length = int(self.lengths[row])
            first, last = -(-length // self.page_size), -(-(length + tokens) // self.page_size)
            if last > self.table.shape[1]:
                want = self.table.shape[1] * self.page_size
                raise ValueError(f"capacity: got {length + tokens} tokens in sequence {row}; want at most {want}")
            for column in range(first, last):
                self.table[row, column] = self.free.pop()
        self._gather()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        begin = time.perf_counter()
        if layer == 0:
            self.reserve(q.shape[1])
        out = flash_attn_with_kvcache(
            q,
            self.k_pages[layer],
            self.v_pages[layer],
            k=k,
            v=v,
            rotary_cos=self.cos,
            rotary_sin=self.sin,
            cache_seqlens=self.selected_lengths,
            block_table=self.selected_table,
            causal=True,
            rotary_interleaved=False,
        )
        self.seconds += time.perf_counter() - begin
        return out


class TorchAttention:
    """The same over one contiguous (sequences, capacity) cache and `scaled_dot_product_attention`."""

    def __init__(self, config: Config, sequences: int, capacity: int, dtype: torch.dtype) -> None:
        cache = (config.layers, sequences, capacity, config.heads_kv, config.head_dim)
        self.k_cache = torch.zeros(cache, dtype=dtype)
        self.v_cache = torch.zeros(cache, dtype=dtype)
        self.lengths = torch.zeros(sequences, dtype=torch.int64)
        self.cos, self.sin = rotary_tables(config, capacity)
        self.seconds = 0.0
        self.select(range(sequences))

    def select(self, sequences: Sequence[int]) -> None:
        self.rows = torch.tensor(list(sequences))

    def advance(self, tokens: int) -> None:
        self.lengths[self.rows] += tokens

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        begin = time.perf_counter()
        lengths, fresh = self.lengths[self.rows], q.shape[1]
        positions = lengths[:, None] + torch.arange(fresh)
        q, k = (rotate(x, self.cos[positions], self.sin[positions]) for x in (q, k))
        self.k_cache[layer, self.rows[:, None], positions] = k
        self.v_cache[layer, self.rows[:, None], positions] = v
        longest = int(lengths.max()) + fresh
        keys, values = (cache[layer, self.rows, :longest].transpose(1, 2) for cache in (self.k_cache, self.v_cache))
        # is_causal counts from the first key, so it serves a whole prompt. Tokens behind a prompt need a mask, unless
        # there is one for each sequence and all are equally long.
        from_start = longest == fresh
        sees_all = fresh == 1 and int(lengths.min()) == longest - 1
        mask = None if from_start or sees_all else torch.arange(longest) <= positions[:, None, :, None]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=mask, is_causal=from_start, enable_gqa=True
        )
        self.seconds += time.perf_counter() - begin
        return out.transpose(1, 2)
