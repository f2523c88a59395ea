# SPDX-License-Identifier: Apache-2.0
"""Makes a transformers checkpoint of a model of examples/gpt: it is a Llama by other names, whose tokens are bytes.

python examples/serve/convert.py --weights my-gpt --to my-gpt-llama
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpt"))
from model import GPT, load

_NAMES = {
    "emb.": "model.embed_tokens.",
    "norm.": "model.norm.",
    "head.": "lm_head.",
    "n1.": "input_layernorm.",
    "n2.": "post_attention_layernorm.",
    "wq.": "self_attn.q_proj.",
    "wk.": "self_attn.k_proj.",
    "wv.": "self_attn.v_proj.",
    "wo.": "self_attn.o_proj.",
    "w1.": "mlp.gate_proj.",
    "w3.": "mlp.up_proj.",
    "w2.": "mlp.down_proj.",
}


def llama_of(gpt: GPT) -> transformers.LlamaForCausalLM:
    """The same function of the same weights, in their dtype."""
    sizes = gpt.config
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=sizes.dim,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads_q,
        num_key_value_heads=sizes.heads_kv,
        head_dim=sizes.head_dim,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_base},
        max_position_embeddings=max(4096, sizes.trained_context),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        architectures=["LlamaForCausalLM"],
    )
    model = transformers.LlamaForCausalLM(config).to(gpt.head.weight.dtype).eval()
    weights = {}
    for name, tensor in gpt.state_dict().items():
        layer = ""
        if name.startswith("blocks."):
            _, number, name = name.split(".", 2)
            layer = f"model.layers.{number}."
        part = name.partition(".")[0] + "."
        weights[layer + _NAMES[part] + name.removeprefix(part)] = tensor
    model.load_state_dict(weights)
    return model


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Text to its UTF-8 bytes and back: token n is byte n. Byte-level BPE without merges, whose letters for bytes are
    those of its alphabet: printable bytes stand for themselves, the others for the characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    for number, byte in enumerate(sorted(set(range(256)) - set(printable))):
        letters[byte] = chr(256 + number)
    tokenizer = Tokenizer(BPE({letter: byte for byte, letter in letters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--weights", required=True, help="folder of a model of examples/gpt")
    parser.add_argument("--to", required=True, help="folder to make")
    given = parser.parse_args()
    model = llama_of(load(given.weights, torch.float32))
    model.save_pretrained(given.to)
    byte_tokenizer().save_pretrained(given.to)
    print(f"{given.to}: a LlamaForCausalLM of {sum(x.numel() for x in model.parameters()) / 1e6:.1f} M weights, fp32")


if __name__ == "__main__":
    main()
