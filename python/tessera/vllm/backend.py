# SPDX-License-Identifier: Apache-2.0
"""vLLM's three classes: what is supported, what a step carries, what a layer computes."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

import tessera


class TesseraAttentionBackend(AttentionBackend):
    """Prefill, chunked prefill and decode steps over vLLM's paged cache, of any page size and layout."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TesseraAttentionImpl]:
        return TesseraAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TesseraMetadataBuilder]:
        return TesseraMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 8 <= head_size <= 512 and head_size % 8 == 0

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability is None or capability.major >= 8

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, *others: Any, device_capability: Any = None, **more: Any
    ) -> str | None:
        capability = others[-1] if others else device_capability
        if capability is not None and dtype == torch.float32:
            return "fp32 is computed on CPUs only; GPUs take fp16 and bf16"
        return None


@dataclasses.dataclass
class TesseraMetadata(AttentionMetadata):
    """What a step's layers share.

    tokens: of the step, without padding. starts int32 (sequences + 1): where their queries begin. longest_query: most
    queries of one. lengths int32 (sequences): keys of each, the step's counted. table int32 (sequences, pages). slots
    int64 (tokens): where the step's keys go, page · page_size + row; negative: nowhere.
    """

    tokens: int
    starts: torch.Tensor
    longest_query: int
    lengths: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    causal: bool


class TesseraMetadataBuilder(AttentionMetadataBuilder[TesseraMetadata]):
    """Nothing is planned ahead: lengths and pages stay where they are, and plans are found by shapes.

    So a captured step may be replayed with any batch of its shape. Of what vLLM passes on the host only the longest
    query is used, and it captures with the longest that may come; the width of the page table, which never changes,
    bounds the keys. Requests that pad a batch have no queries.
    """

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TesseraMetadata:
        """Raises NotImplementedError for a batch whose requests are causal and not, each for itself."""
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise NotImplementedError("causal: got a tensor; want True or False for all requests of a batch")
        return TesseraMetadata(
            tokens=common.num_actual_tokens,
            starts=common.query_start_loc,
            longest_query=common.max_query_len,
            lengths=common.seq_lens,
            table=common.block_table_tensor,
            slots=common.slot_mapping,
            causal=common.causal,
        )

    def update_block_table(
        self, metadata: TesseraMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> TesseraMetadata:
        return dataclasses.replace(metadata, table=blk_table, slots=slot_mapping)


class TesseraAttentionImpl(AttentionImpl[TesseraMetadata]):
    """Attention of one layer.

    Raises:
        NotImplementedError: other kinds of attention than a decoder's, quantised caches.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type: got {attn_type}; want that of a decoder")
        if kv_cache_dtype not in TesseraAttentionBackend.supported_kv_cache_dtypes:
            raise NotImplementedError(f"kv_cache_dtype: got {kv_cache_dtype!r}; want 'auto', 'float16' or 'bfloat16'")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = sliding_window
        self.softcap = logits_soft_cap or 0.0
        self.sinks = sinks
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TesseraMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends to the pages, which `do_kv_cache_update` has written the step's keys and values to.

        query: (tokens, heads, head_size). key, value: not read. kv_cache: (pages, kv_heads, page_size, 2 · head_size),
        in any strides. output: (tokens, heads · head_size) or as query, written and returned; 0 in a profiling run.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: got one; want None: outputs are not quantised")
        if attn_metadata is None:
            return output.fill_(0)
        tokens = attn_metadata.tokens
        keys, values = self._pages(kv_cache)
        source = tessera.KeySource(keys, values, page_table=attn_metadata.table, seqused=attn_metadata.lengths)
        if self.slopes is not None and self.slopes.device != query.device:
            self.slopes = self.slopes.to(query.device)  # kept: a graph that is captured copies nothing from the host
        left = None if self.sliding_window is None else self.sliding_window - 1
        right = 0 if attn_metadata.causal else left
        tessera.attention(
            query[:tokens].view(tokens, self.num_heads, self.head_size),
            source,
            window=None if left is None and right is None else (left, right),
            scale=self.scale,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks.float(),
            alibi_slopes=self.slopes,
            cu_seqlens_q=attn_metadata.starts,
            max_seqlen_q=attn_metadata.longest_query,
            out=output[:tokens].view(tokens, self.num_heads, self.head_size),
        )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Writes keys and values (tokens, kv_heads, head_size) to their slots; those of negative ones to page 0, which
        vLLM keeps for nobody."""
        keys, values = self._pages(kv_cache)
        page_size = keys.shape[1]
        live = slot_mapping >= 0
        page = torch.where(live, slot_mapping // page_size, 0)
        row = torch.where(live, slot_mapping % page_size, 0)
        count = slot_mapping.shape[0]
        keys[page, row] = key[:count].to(keys.dtype)
        values[page, row] = value[:count].to(values.dtype)

    def _pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(pages, page_size, kv_heads, head_size) of keys and of values; views."""
        return kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
