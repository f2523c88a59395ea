# SPDX-License-Identifier: Apache-2.0
"""SGLang's backend class: what a step carries, what a layer computes, what a captured decode step reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

import tessera

from .refusals import refuse_batch, refuse_layer, refuse_runner


@dataclasses.dataclass
class TesseraMetadata:
    """What a step's layers share.

    lengths int32 (requests): keys of each, the step's counted. table int32 (requests, pages). window_table: the same of
    the pool of the sliding layers, and window_slots int64 (tokens): where their keys go; None without such a pool.
    starts int32 (requests + 1): where the queries of each begin, tokens: how many there are, longest_query: most
    queries of one; all None in a decode step, where each request has one query.
    """

    lengths: torch.Tensor
    table: torch.Tensor
    window_table: torch.Tensor | None = None
    window_slots: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    tokens: int | None = None
    longest_query: int | None = None


class TesseraAttnBackend(AttentionBackend):
    """Prefill, chunked prefill, mixed and decode steps over SGLang's token pools, of any page size.

    Raises:
        NotImplementedError: models, caches and settings that it does not serve (`refusals`).
    """

    needs_cpu_seq_lens = True  # the longest request says how many columns of a table are filled

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        refuse_runner(model_runner)
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.page_size = model_runner.page_size or 1
        self.attention_chunk_size = model_runner.attention_chunk_size
        self.two_pools = isinstance(self.token_to_kv_pool, SWAKVPool)
        self.most_pages = -(-self.req_to_token_pool.req_to_token.shape[1] // self.page_size)
        self.forward_metadata: TesseraMetadata | None = None
        self.buffers: TesseraMetadata | None = None

    # Metadata of steps that run at once, those of prefills that SGLang captures around the attention included.

    def init_forward_metadata(self, forward_batch: Any) -> None:
        refuse_batch(forward_batch)
        idle = forward_batch.forward_mode == ForwardMode.IDLE
        self.forward_metadata = None if idle else self._metadata(forward_batch)

    def _metadata(self, batch: Any) -> TesseraMetadata:
        pages = self._first_slots(batch, self._columns(batch))
        made = TesseraMetadata(batch.seq_lens.to(torch.int32), self._numbers(pages))
        if self.two_pools:
            made.window_table = self._numbers(self._in_window_pool(pages))
            made.window_slots = self._in_window_pool(batch.out_cache_loc)
        if not batch.forward_mode.is_decode():
            counts = batch.extend_seq_lens
            made.starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
            torch.cumsum(counts, 0, dtype=torch.int32, out=made.starts[1:])
            made.tokens = batch.extend_num_tokens
            made.longest_query = max(batch.extend_seq_lens_cpu)
        return made

    def _columns(self, batch: Any) -> int:
        """Columns of a table that hold the longest request, a power of 2: few widths, and a plan is made for each."""
        if batch.seq_lens_cpu is None or not len(batch.seq_lens_cpu):
            return self.most_pages
        needed = -(-int(batch.seq_lens_cpu.max()) // self.page_size)
        return min(self.most_pages, 1 << max(needed - 1, 0).bit_length())

    def _first_slots(self, batch: Any, columns: int) -> torch.Tensor:
        """int32 (requests, columns): the slot of each page's first token. What stands behind a request is not read."""
        every = self.req_to_token_pool.req_to_token[:, : columns * self.page_size : self.page_size]
        return every.index_select(0, batch.req_pool_indices)

    def _in_window_pool(self, slots: torch.Tensor) -> torch.Tensor:
        return self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)

    def _numbers(self, slots: torch.Tensor) -> torch.Tensor:
        """int32: the pages of slots."""
        return slots.to(torch.int32) if self.page_size == 1 else (slots // self.page_size).to(torch.int32)

    # Metadata of captured decode steps: tensors of the captured size, at the same place in every replay.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        device = self.req_to_token_pool.req_to_token.device
        table = torch.zeros(max_bs, self.most_pages, dtype=torch.int32, device=device)
        self.buffers = TesseraMetadata(torch.ones(max_bs, dtype=torch.int32, device=device), table)
        if self.two_pools:
            self.buffers.window_table = torch.zeros_like(table)
            self.buffers.window_slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Copies a decode step's lengths and pages to the buffers that captured calls read.

        Raises:
            NotImplementedError: prefill steps that are captured whole.
        """
        refuse_batch(forward_batch)
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise NotImplementedError(
                "cuda graph of a prefill: got attention inside the graph; want "
                "--cuda-graph-backend-prefill=breakable, which leaves attention outside, or disabled"
            )
        if self.buffers is None:
            raise RuntimeError("init_forward_metadata_out_graph: got no buffers; want init_cuda_graph_state before it")
        buffers, requests = self.buffers, forward_batch.batch_size
        columns = self._columns(forward_batch)
        pages = self._first_slots(forward_batch, columns)
        buffers.lengths[:requests].copy_(forward_batch.seq_lens)
        buffers.table[:requests, :columns].copy_(self._numbers(pages))
        current = TesseraMetadata(buffers.lengths[:requests], buffers.table[:requests])
        if buffers.window_table is not None and buffers.window_slots is not None:
            buffers.window_table[:requests, :columns].copy_(self._numbers(self._in_window_pool(pages)))
            slots = self._in_window_pool(forward_batch.out_cache_loc)
            buffers.window_slots[: len(slots)].copy_(slots)
            buffers.window_slots[len(slots) :].zero_()  # slot 0 is nobody's
            current.window_table = buffers.window_table[:requests]
            current.window_slots = buffers.window_slots[:requests]
        self.forward_metadata = current

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    # A layer.

    def forward_decode(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """One query of each request: q (requests, heads · head_dim), k and v (requests, kv_heads, head_dim); the result
        (requests, heads · v_head_dim)."""
        refuse_layer(layer, kwargs)
        self._save(k, v, layer, forward_batch, save_kv_cache)
        q = q.reshape(-1, 1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(len(q), layer.tp_q_head_num * layer.v_head_dim)
        self._attend(q, out.view(-1, 1, layer.tp_q_head_num, layer.v_head_dim), layer, kwargs.get("sinks"))
        return out

    def forward_extend(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """The queries of all requests behind each other, as `forward_decode` otherwise. Rows that pad them are 0."""
        refuse_layer(layer, kwargs)
        self._save(k, v, layer, forward_batch, save_kv_cache)
        metadata = self.forward_metadata
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(len(q), layer.tp_q_head_num * layer.v_head_dim)
        tokens = len(q) if metadata.tokens is None else metadata.tokens
        self._attend(
            q[:tokens],
            out[:tokens].view(-1, layer.tp_q_head_num, layer.v_head_dim),
            layer,
            kwargs.get("sinks"),
            cu_seqlens_q=metadata.starts,
            max_seqlen_q=metadata.longest_query,
        )
        out[tokens:].zero_()
        return out

    def _save(self, k: Any, v: Any, layer: Any, batch: Any, wanted: bool) -> None:
        if wanted and k is not None and v is not None:
            slots = KVWriteLoc.for_layer(batch, layer, swa_loc=self.forward_metadata.window_slots)
            self.token_to_kv_pool.set_kv_buffer(layer, slots, k, v)

    def _attend(self, q: torch.Tensor, out: torch.Tensor, layer: Any, sinks: torch.Tensor | None, **rows: Any) -> None:
        metadata = self.forward_metadata
        in_window_pool = self.two_pools and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        windowed = causal and layer.sliding_window_size is not None and layer.sliding_window_size >= 0
        tessera.attention(
            q,
            tessera.KeySource(
                self._pages(self.token_to_kv_pool.get_key_buffer(layer.layer_id)),
                self._pages(self.token_to_kv_pool.get_value_buffer(layer.layer_id)),
                page_table=metadata.window_table if in_window_pool else metadata.table,
                seqused=metadata.lengths,
            ),
            causal=causal and not windowed,
            window=(layer.sliding_window_size, 0) if windowed else None,  # SGLang's size leaves the query's own key out
            attention_chunk=self.attention_chunk_size or 0 if layer.use_irope else 0,
            scale=layer.scaling,
            softcap=layer.logit_cap or 0.0,
            sinks=None if sinks is None else sinks.float(),
            out=out,
            **rows,
        )

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        """(pages, page_size, heads, dim) of (slots, heads, dim); a view. Slots that fill no page are left out."""
        pages = len(slots) // self.page_size
        return slots[: pages * self.page_size].view(pages, self.page_size, *slots.shape[1:])
