# SPDX-License-Identifier: Apache-2.0
"""The attention function: transformers' (batch, heads, tokens, dim) tensors to `tessera.attention`, without copies."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar
from torch.nn.attention.flex_attention import BlockMask

import tessera
from tessera.compat.arguments import rename
from tessera.compat.flex_attention import options_of
from tessera.transformers.blocks import decode_pages
from tessera.transformers.forms import Pieces, Tiles, VisibleKeys, Window, pack_bits

# What a model may pass on that changes the result and that this attention has no form for.
_REFUSED = {
    "position_bias": "no bias by position; a learned bias needs attn_implementation='sdpa' or 'eager'",
    "indices": "no keys chosen per query; want attn_implementation='eager'",
    "block_indices": "no blocks chosen per query; want attn_implementation='eager'",
    "sinks": "sinks of one number a head (s_aux)",
    "head_mask": "no mask of heads",
}


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: VisibleKeys | BlockMask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **context: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that `register` enters into transformers' ``AttentionInterface``.

    Args:
        module: the attention layer; its `is_causal` counts where there is neither mask nor argument.
        query: (b, hq, sq, d). key: (b, hkv, sk, d). value: (b, hkv, sk, dv). fp32, fp16 or bf16; d and dv are multiples
            of 8.
        attention_mask: what the mask function made; or a dense mask of one's own, (b or 1, 1 or hq, sq, sk) bool, True
            for visible, or floating, 0 for visible and -inf or the lowest number of its type for hidden; or a BlockMask
            of torch's or `tessera.create_block_mask`, whose function is traced (`tessera.expressions`); or None.
        dropout: probability; drawn from torch's default generator.
        scaling: factor on query·key; default 1 / sqrt(d).
        sliding_window: keys a query sees, itself included; read only without a mask, which knows it otherwise.
        softcap: c·tanh(x / c) on the scores.
        s_aux: (hq), a logit a head in the softmax's denominator. Differentiable.
        context: of packed sequences, `cu_seq_lens_q`, `cu_seq_lens_k` (sequences + 1), `max_length_q`, `max_length_k`.
            Of a decode step of continuous batching `block_table` (sequences, blocks), `k_cache` and `v_cache` (pages,
            page_size, hkv, d) too: key and value are the new tokens, which are written there.

    Returns:
        Output (b, sq, hq, dv), and None for the weights, which are never made.

    Raises:
        ValueError: a mask of another shape than query and key; a BlockMask's function that cannot be traced.
        NotImplementedError: what changes the result and has no form here, such as a bias by position.
    """
    for name, want in _REFUSED.items():
        if context.get(name) is not None:
            raise NotImplementedError(f"{name}: got one; want {want}")
    if context.get("output_attentions"):
        raise NotImplementedError(
            "output_attentions: got True; want False, or attn_implementation='eager': no weights are made"
        )
    options: dict[str, Any] = {"scale": _fixed(scaling), "softcap": _fixed(softcap) or 0.0, "dropout": _fixed(dropout)}
    if s_aux is not None:
        options["sinks"] = s_aux.to(torch.float32)
    if context.get("block_table") is not None:
        return decode_pages(query, key, value, sliding_window, context, options), None
    if context.get("cu_seq_lens_q") is not None:
        if hasattr(attention_mask, "mask_mod"):
            raise NotImplementedError(
                "attention_mask: got a BlockMask beside cu_seq_lens_q; want one of them: a mask of packed sequences"
            )
        return _packed(module, query, key, value, attention_mask, sliding_window, is_causal, context, options), None
    if isinstance(attention_mask, VisibleKeys):
        _check_shape(attention_mask.shape, query, key)
        if attention_mask.one_document is not None:
            torch._assert_async(
                attention_mask.one_document,
                "position_ids: got packed sequences under torch.compile; want cu_seq_lens_q, cu_seq_lens_k, "
                "max_length_q and max_length_k beside them",
            )
        form = attention_mask.form
    elif hasattr(attention_mask, "mask_mod"):
        options |= options_of(query, key, None, attention_mask)
        return tessera.attention(*(x.transpose(1, 2) for x in (query, key, value)), **options), None
    elif attention_mask is not None:
        form = _dense_mask(attention_mask, query, key)
    else:
        left, right = _window_of(module, query, None, sliding_window, is_causal)
        form = Window(left, right)
    if isinstance(form, Pieces):
        return _pieces(query, key, value, form, options), None
    return _dense(query, key, value, form, options), None


def _fixed(number: float | None) -> float | None:
    """The number itself also where torch.compile(dynamic=True) has a symbol for it: a plan is made for one scale."""
    return guard_scalar(number) if number is not None and torch.compiler.is_compiling() else number


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: Window | Tiles, options: dict[str, Any]
) -> torch.Tensor:
    if isinstance(form, Tiles):
        options["tiles"] = tessera.TileList(bits=form.bits.view(torch.uint32), form="bitmask", block=(form.block_q, 1))
    window = form.window if isinstance(form, Tiles) else form
    if window.left is not None or window.right is not None:
        options["window"] = (window.left, window.right)
        if window.q_offset is not None:
            options["offsets"] = tessera.Offsets(q=window.q_offset)
    if window.used is not None:
        options["seqused_k"] = window.used
    try:
        return tessera.attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **options)
    except NotImplementedError as error:
        rename(error, {"tiles": "attention_mask"})  # the mask's bits are a list of tiles
        raise


def _pieces(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: Pieces, options: dict[str, Any]
) -> torch.Tensor:
    batch, _, queries, _ = query.shape
    keys, stride = _tokens(key)
    values, stride_v = _tokens(value)
    if stride != stride_v:
        keys, stride = _flat(key)
        values, stride = _flat(value)
    cu_q, cu_k, used, q_offset = form.boundaries(stride, keys.shape[0], queries)
    if not torch.compiler.is_compiling():  # in a graph they would be constants; the tensors' lengths bound them there
        # From one first key to the next there is at most a row, and the padding of another.
        options |= {"max_seqlen_q": form.longest_q, "max_seqlen_k": stride + key.shape[2]}
    out = tessera.attention(
        query.transpose(1, 2).flatten(0, 1),
        keys,
        values,
        window=(form.left, form.right),
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        seqused_k=used,
        offsets=tessera.Offsets(q=q_offset),
        **options,
    )
    return out.unflatten(0, (batch, queries))


def _flat(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(b, h, s, d) as (b·s, h, d), and s. A copy unless tokens lie outside heads, as they do outside of caches."""
    return x.transpose(1, 2).flatten(0, 1), x.shape[2]


def _tokens(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(b, h, s, d) as (tokens, h, d), and the tokens from one batch row to the next.

    A cache holds heads outside tokens, (b, h, s, d) in memory. Token t of row b is then b·h·s + t tokens away from the
    first: the rows are runs of a longer axis, with gaps between them that hold other heads' tokens. Nothing is copied.
    Where a gradient is wanted, `_flat` serves, because the gradient of the longer axis would be h times as large.
    """
    batch, heads, length, dim = x.shape
    row, head, token, last = x.stride()
    wants_gradient = x.requires_grad and torch.is_grad_enabled()
    if wants_gradient or batch == 1 or last != 1 or token == 0 or row % token != 0 or row // token < length:
        return _flat(x)
    stride = row // token
    return x.as_strided(((batch - 1) * stride + length, heads, dim), (token, head, 1)), stride


def _packed(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    sliding_window: int | None,
    is_causal: bool | None,
    context: dict[str, Any],
    options: dict[str, Any],
) -> torch.Tensor:
    """Sequences that the caller has laid end to end and says so."""
    left, right = _window_of(module, query, mask, sliding_window, is_causal)
    out = tessera.attention(
        _flat(query)[0],
        _flat(key)[0],
        _flat(value)[0],
        window=(left, right),
        cu_seqlens_q=context["cu_seq_lens_q"].to(torch.int32),
        cu_seqlens_k=context["cu_seq_lens_k"].to(torch.int32),
        max_seqlen_q=int(context["max_length_q"]),
        max_seqlen_k=int(context["max_length_k"]),
        **options,
    )
    return out.unflatten(0, (query.shape[0], query.shape[2]))


def _window_of(
    module: torch.nn.Module, query: torch.Tensor, mask: Any, sliding_window: int | None, is_causal: bool | None
) -> tuple[int | None, int | None]:
    if isinstance(mask, VisibleKeys) and not isinstance(mask.form, Tiles):
        return mask.left, mask.right
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    left = None if sliding_window is None else sliding_window - 1
    return left, 0 if causal else left


def _dense_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Tiles:
    """A dense mask that the caller made, as bits."""
    if mask.ndim != 4:
        raise ValueError(f"attention_mask: got {mask.ndim} dimensions; want four, or None")
    mask = mask[..., : key.shape[2]]
    _check_shape(tuple(mask.shape), query, key)
    if mask.dtype != torch.bool:
        if not mask.dtype.is_floating_point:
            raise ValueError(f"attention_mask: got {mask.dtype}; want bool or a floating type")
        visible = mask == 0
        hidden = mask <= torch.finfo(mask.dtype).min
        if not torch.compiler.is_compiling() and not bool((visible | hidden).all()):
            raise NotImplementedError(
                "attention_mask: got a bias; want 0 for visible and -inf or the lowest number for hidden"
            )
        mask = visible
    return Tiles(Window(None, None), pack_bits(mask), 1)


def _check_shape(got: tuple[int, ...], query: torch.Tensor, key: torch.Tensor) -> None:
    batch, heads, queries = query.shape[:3]
    keys = key.shape[2]
    if got[0] not in (1, batch) or got[1] not in (1, heads) or got[2] != queries or got[3] != keys:
        raise ValueError(f"attention_mask: got shape {tuple(got)}; want ({batch}, 1 or {heads}, {queries}, {keys})")
