# SPDX-License-Identifier: Apache-2.0
"""What the backend does not do: runners are refused when it is made, batches and layers when they are met."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

MODES = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE, ForwardMode.IDLE)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def refuse_runner(runner: Any) -> None:
    """Raises NotImplementedError for a model runner whose steps would need more than there is."""
    if runner.use_mla_backend:
        raise NotImplementedError("model: got multi-head latent attention; want keys and values of each head")
    if runner.model_config.is_encoder_decoder:
        raise NotImplementedError("model: got an encoder and a decoder; want one of them: there is no cross attention")
    if not runner.spec_algorithm.is_none():
        raise NotImplementedError(f"speculative_algorithm: got {runner.spec_algorithm.name}; want none")
    parallel = get_parallel()
    for name in ("attn_dcp_size", "attn_cp_size"):
        if getattr(parallel, name) > 1:
            raise NotImplementedError(f"{name}: got {getattr(parallel, name)}; want 1: there is no context parallelism")
    if runner.kv_index_translator.reads_are_translated:
        raise NotImplementedError("enable_unified_memory: got True; want False: req_to_token has to hold slots")
    pool = runner.token_to_kv_pool
    for each in (pool.full_kv_pool, pool.swa_kv_pool) if isinstance(pool, SWAKVPool) else (pool,):
        _refuse_pool(each)


def _refuse_pool(pool: Any) -> None:
    if type(pool) is not MHATokenToKVPool:
        raise NotImplementedError(f"token_to_kv_pool: got a {type(pool).__name__}; want MHATokenToKVPool or SWAKVPool")
    if pool.kv_cache_layout != "nhd":
        raise NotImplementedError(f"kv_cache_layout: got {pool.kv_cache_layout!r}; want 'nhd'")
    if pool.is_quantized_kv_cache or pool.dtype not in DTYPES:
        raise NotImplementedError(f"kv_cache_dtype: got {pool.dtype}, stored as {pool.store_dtype}; want fp16 or bf16")


def refuse_batch(batch: Any) -> None:
    """Raises NotImplementedError for a step of another kind than a prefill's and a decode's."""
    if batch.forward_mode not in MODES:
        raise NotImplementedError(
            f"forward_mode: got {batch.forward_mode.name}; want {', '.join(mode.name for mode in MODES)}"
        )
    if batch.spec_info is not None:
        raise NotImplementedError(f"spec_info: got a {type(batch.spec_info).__name__}; want None")
    if getattr(batch, "multi_item_delimiter_indices", None) is not None:
        raise NotImplementedError("multi_item_delimiter_indices: got some; want None: items would see each other")


def refuse_layer(layer: Any, extra: dict[str, Any]) -> None:
    """Raises NotImplementedError for a layer of another kind, and for arguments besides `sinks` that ask more."""
    if layer.is_cross_attention:
        raise NotImplementedError("is_cross_attention: got True; want False")
    if layer.attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
        raise NotImplementedError(f"attn_type: got {layer.attn_type}; want DECODER or ENCODER_ONLY")
    if layer.attn_type == AttentionType.ENCODER_ONLY and layer.sliding_window_size >= 0:
        raise NotImplementedError(
            f"sliding_window_size: got {layer.sliding_window_size} in an encoder's layer; want -1 there"
        )
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise NotImplementedError(f"logit_capping_method: got {layer.logit_capping_method!r}; want 'tanh'")
    if layer.pos_encoding_mode != "NONE":
        raise NotImplementedError(f"pos_encoding_mode: got {layer.pos_encoding_mode!r}; want 'NONE'")
    if layer.xai_temperature_len > 0:
        raise NotImplementedError(f"xai_temperature_len: got {layer.xai_temperature_len}; want -1")
    for name, value in extra.items():
        if name != "sinks" and value is not None and value is not False:
            raise NotImplementedError(f"{name}: got a {type(value).__name__}; want None")
