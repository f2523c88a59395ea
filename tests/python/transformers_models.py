# SPDX-License-Identifier: Apache-2.0
"""Small transformers models with random weights: the kinds of attention that the integration has to serve."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
transformers.logging.set_verbosity_error()  # right padding with generate is warned of at every call

import tessera.transformers  # noqa: E402  (only where transformers is there)

tessera.transformers.register()


def _exact(module, query, key, value, attention_mask, dropout=0.0, scaling=None, softcap=None, s_aux=None, **_):
    """Eager attention without its float32 softmax and lowest-number masks: in float64, the value that both aim at."""
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~attention_mask, -torch.inf)
    sink = (
        torch.full_like(scores[..., :1], -torch.inf)
        if s_aux is None
        else s_aux[:, None, None].expand_as(scores[..., :1])
    )
    norm = torch.logsumexp(torch.cat([scores, sink], -1), -1, keepdim=True)
    weights = torch.exp(scores - norm.masked_fill(norm == -torch.inf, 0))
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None


def _exact_mask(*args, **kwargs):
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return transformers.masking_utils.sdpa_mask(*args, **kwargs)


transformers.AttentionInterface.register("exact", _exact)
transformers.AttentionMaskInterface.register("exact", _exact_mask)

PAD, BOS = 0, 1
VOCABULARY = 96
WINDOW = 7
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": None,
    "initializer_range": 0.2,  # of 0.02, the default, all attention is flat and any mask looks right
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,  # or the large embeddings of Gemma give every token back, whatever attention does
}
_ALTERNATING = ["sliding_attention", "full_attention"]


def _llama():
    return transformers.LlamaConfig(**_SIZES)


def _mistral():
    return transformers.MistralConfig(**_SIZES, sliding_window=WINDOW)


def _qwen3():
    return transformers.Qwen3Config(**_SIZES, use_sliding_window=True, sliding_window=WINDOW, layer_types=_ALTERNATING)


def _gemma2():
    return transformers.Gemma2Config(
        **_SIZES, sliding_window=WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=5.0
    )


def _gemma3():
    return transformers.Gemma3TextConfig(
        **_SIZES, sliding_window=WINDOW, query_pre_attn_scalar=16, layer_types=_ALTERNATING
    )


def _gpt_oss():
    # Every token takes every expert: a choice among them would turn rounding into another result.
    return transformers.GptOssConfig(
        **_SIZES, sliding_window=WINDOW, layer_types=_ALTERNATING, num_local_experts=2, num_experts_per_tok=2
    )


def _llama4():
    return transformers.Llama4TextConfig(
        **_SIZES,
        intermediate_size_mlp=96,
        attention_chunk_size=6,
        num_local_experts=1,
        num_experts_per_tok=1,
        layer_types=["chunked_attention", "full_attention"],
        attn_temperature_tuning=False,
    )


CONFIGS = {
    "llama": _llama,  # grouped heads
    "mistral": _mistral,  # a window in every layer
    "qwen3": _qwen3,  # a window in every second layer
    "gemma2": _gemma2,  # softcap, windows, a scale of its own
    "gemma3": _gemma3,  # windows, two rotary bases
    "gpt_oss": _gpt_oss,  # sinks
    "llama4": _llama4,  # chunks
}


def make(kind: str, implementation: str = "tessera", dtype: torch.dtype = torch.float32, **changes):
    """A model of the kind in evaluation mode, with the same weights for every implementation. A wider `dtype` than bf16
    holds the fp32 weights; pass ``rounded=torch.bfloat16`` to hold what bf16 makes of them."""
    rounded = changes.pop("rounded", dtype)
    experts = changes.pop("experts", "eager")
    config = CONFIGS[kind]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(1234)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation=experts, dtype=torch.float32
    )
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    model.set_attn_implementation(implementation)
    return model.to(rounded).to(dtype).eval()


def prompt(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids (batch, length), none of them padding."""
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(batch: int, length: int, side: str, step: int = 3) -> torch.Tensor | None:
    """An attention mask (batch, length), 1 for real: row r has r · step tokens of padding. None for side "none"."""
    if side == "none":
        return None
    mask = torch.ones((batch, length), dtype=torch.long)
    for row in range(batch):
        absent = slice(0, row * step) if side == "left" else slice(length - row * step, length)
        mask[row, absent] = 0
    return mask


def packed_positions(lengths: list[list[int]]) -> torch.Tensor:
    """position_ids (rows, tokens) of rows into which sequences of these lengths are packed."""
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
