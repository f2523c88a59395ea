# SPDX-License-Identifier: Apache-2.0
"""Names, order and defaults of the compat functions' arguments, against those of flash-attn 2.8, 3 and 4."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("tessera")

from tessera.compat import flash_attn_2, flash_attn_3, flash_attn_4

WINDOW = "window_size=(-1, -1)"
TAIL_2 = (
    f"dropout_p=0.0, softmax_scale=None, causal=False, {WINDOW}, softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
DESCALES = "q_descale=None, k_descale=None, v_descale=None"
TAIL_3 = (
    f"{WINDOW}, attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0, return_attn_probs=False"
)
PLACES = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
TAIL_4 = (
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, "
    "num_splits=1, pack_gqa=None, "
    "deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None"
)
# What SM120 builds of flash-attn 4 take besides, behind upstream's arguments.
DROPOUT_4 = "dropout_p=0.0, dropout_seed=None"

SIGNATURES = {
    (flash_attn_2, "flash_attn_func"): f"q, k, v, {TAIL_2}",
    (flash_attn_2, "flash_attn_kvpacked_func"): f"q, kv, {TAIL_2}",
    (flash_attn_2, "flash_attn_qkvpacked_func"): f"qkv, {TAIL_2}",
    (flash_attn_2, "flash_attn_varlen_func"): f"q, k, v, {PLACES}, {TAIL_2}, block_table=None",
    (flash_attn_2, "flash_attn_varlen_kvpacked_func"): f"q, kv, {PLACES}, {TAIL_2}",
    (flash_attn_2, "flash_attn_varlen_qkvpacked_func"): f"qkv, cu_seqlens, max_seqlen, {TAIL_2}",
    (flash_attn_2, "flash_attn_with_kvcache"): (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, "
        f"cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, {WINDOW}, softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
    (flash_attn_3, "flash_attn_func"): f"q, k, v, softmax_scale=None, causal=False, qv=None, {DESCALES}, {TAIL_3}",
    (flash_attn_3, "flash_attn_qkvpacked_func"): (
        f"qkv, softmax_scale=None, causal=False, {DESCALES}, {WINDOW}, attention_chunk=0, softcap=0.0, "
        "deterministic=False, "
        "num_heads_q=None, sm_margin=0, return_attn_probs=False"
    ),
    (flash_attn_3, "flash_attn_varlen_func"): (
        f"q, k, v, {PLACES}, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None, "
        f"{DESCALES}, {TAIL_3}"
    ),
    (flash_attn_3, "flash_attn_combine"): "out_partial, lse_partial, out=None, out_dtype=None",
    (flash_attn_3, "flash_attn_with_kvcache"): (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        f"max_seqlen_q=None, rotary_seqlens=None, {DESCALES}, softmax_scale=None, causal=False, {WINDOW}, "
        "attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, "
        "pack_gqa=None, "
        "sm_margin=0, return_softmax_lse=False"
    ),
    (flash_attn_4, "flash_attn_func"): (
        f"q, k, v, qv=None, gather_kv_indices=None, {TAIL_4}, aux_tensors=None, aux_scalars=None, "
        "block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False, "
        f"page_table=None, seqused_k=None, max_seqlen_k=None, {DROPOUT_4}"
    ),
    (flash_attn_4, "flash_attn_varlen_func"): (
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        "min_seqlen_k=None, "
        f"seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, {TAIL_4}, "
        "block_sparse_tensors=None, "
        "aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, "
        f"disable_scheduler_metadata=False, {DROPOUT_4}"
    ),
    (flash_attn_4, "get_scheduler_metadata"): (
        "max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, pack_gqa=None, "
        "causal=False, window_size_left=None, window_size_right=None, seqlen_k_new=0, cu_seqlens_q=None, "
        "cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, leftpad_k=None, "
        "seqlen_k_per_split=None, _arch=None"
    ),
    (flash_attn_4, "flash_attn_combine"): (
        "out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, virtual_batch_idx=None, "
        "return_lse=True"
    ),
}


@pytest.mark.parametrize(
    ("module", "name"), SIGNATURES, ids=lambda x: x if isinstance(x, str) else x.__name__.rpartition(".")[2]
)
def test_signature(module, name: str) -> None:
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    plain = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert ", ".join(plain) == SIGNATURES[module, name]


@pytest.mark.parametrize("module", [flash_attn_2, flash_attn_3, flash_attn_4])
def test_no_other_function(module) -> None:
    """What a module offers is what is compared above, and two that have no part in the computation."""
    names = {name for owner, name in SIGNATURES if owner is module}
    assert set(module.__all__) - names <= {
        "BlockSparseTensorsTorch",
        "SchedulerMetadataTensorsTorch",
        "get_scheduler_metadata",
    }


def test_block_sparse_tensors_has_flash_attns_fields() -> None:
    assert flash_attn_4.BlockSparseTensorsTorch._fields == (
        "mask_block_cnt",
        "mask_block_idx",
        "full_block_cnt",
        "full_block_idx",
        "cu_total_m_blocks",
        "cu_block_idx_offsets",
        "block_size",
        "dq_write_order",
        "dq_write_order_full",
        "spt",
    )


def test_scheduler_metadata_has_flash_attns_fields() -> None:
    assert flash_attn_4.SchedulerMetadataTensorsTorch._fields == (
        "num_m_blocks_ptr",
        "num_splits_dynamic_ptr",
        "virtual_batch_idx_ptr",
        "num_nheads_in_l2_ptr",
        "tile_count_semaphore",
        "cu_total_m_blocks",
        "cu_total_splits_m_blocks",
        "blocks_to_batch_idx",
    )


def test_top_level_has_the_functions_of_flash_attn_2() -> None:
    import tessera

    for name in flash_attn_2.__all__:
        assert getattr(tessera, name) is getattr(flash_attn_2, name)
