# SPDX-License-Identifier: Apache-2.0
"""A byte-level GPT whose attention is a parameter.

Pre-norm blocks with RMSNorm, rotary embedding (half form: pairs are elements j and j + head_dim / 2), grouped-query
attention and a SwiGLU feed-forward; 256 byte values in and out, no tokenizer. A model folder holds `*.safetensors`; the
`config` entry of their metadata is the JSON of `Config`, and the tensors are named

    emb.weight (256, dim)    norm.weight (dim,)    head.weight (256, dim)
    blocks.N.n1.weight (dim,)                       norm before attention
    blocks.N.wq.weight (heads_q * head_dim, dim)    wk, wv: (heads_kv * head_dim, dim)
    blocks.N.wo.weight (dim, heads_q * head_dim)
    blocks.N.n2.weight (dim,)                       norm before the feed-forward
    blocks.N.w1.weight, w3 (ffn, dim)    w2 (dim, ffn)    w2(silu(w1 x) * w3 x)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

# (layer, q (b, s, heads_q, head_dim), k (b, s, heads_kv, head_dim), v) -> o (b, s, heads_q, head_dim). q and k are not
# rotated yet: whoever keeps the cache knows at which positions the s tokens stand.
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Config:
    """Sizes of a model; the defaults train in minutes on a laptop."""

    dim: int = 192
    layers: int = 4
    heads_q: int = 6
    heads_kv: int = 2
    head_dim: int = 32
    ffn: int = 512
    rope_base: float = 1e4
    trained_context: int = 256

    @staticmethod
    def from_json(text: str) -> Config:
        """Reads the JSON of a model file; fields that describe and do not size (such as "norm") are passed over."""
        values = json.loads(text)
        return Config(**{field.name: values[field.name] for field in fields(Config) if field.name in values})


def rotary_tables(config: Config, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin of position * rope_base^(-2j / head_dim), fp32 (positions, head_dim / 2)."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    frequencies = config.rope_base ** (-pairs / config.head_dim)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x (b, s, heads, head_dim) by cos, sin ((b,) s, head_dim / 2); computes in fp32, gives x's dtype."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    """x + attention(norm x), then x + feed-forward(norm x)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.heads_q * config.head_dim, config.heads_kv * config.head_dim
        self.n1 = nn.RMSNorm(config.dim, eps=1e-6)
        self.wq = nn.Linear(config.dim, queries, bias=False)
        self.wk = nn.Linear(config.dim, keys, bias=False)
        self.wv = nn.Linear(config.dim, keys, bias=False)
        self.wo = nn.Linear(queries, config.dim, bias=False)
        self.n2 = nn.RMSNorm(config.dim, eps=1e-6)
        self.w1 = nn.Linear(config.dim, config.ffn, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: Tensor, layer: int, attention: Attention) -> Tensor:
        h = self.n1(x)
        q, k, v = (project(h).unflatten(-1, (-1, self.head_dim)) for project in (self.wq, self.wk, self.wv))
        x = x + self.wo(attention(layer, q, k, v).flatten(2))
        h = self.n2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class GPT(nn.Module):
    """Bytes to logits of the next byte. The attention given to `forward` is all that sees other tokens."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.emb = nn.Embedding(256, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, 256, bias=False)

    def forward(self, tokens: Tensor, attention: Attention) -> Tensor:
        """tokens (b, s) int64, 0 to 255 -> logits (b, s, 256) in the weights' dtype."""
        x = self.emb(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, attention)
        return self.head(self.norm(x))


def initialise(model: GPT, seed: int) -> GPT:
    """Weights from N(0, 0.02), those that write to the residual stream scaled by 1 / sqrt(2 * layers); norms are 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            writes_residual = name.endswith(("wo.weight", "w2.weight"))
            scale = 0.02 / (2 * model.config.layers) ** 0.5 if writes_residual else 0.02
            with torch.no_grad():
                weight.normal_(0.0, scale, generator=generator)
    return model


def load(folder: str | Path, dtype: torch.dtype) -> GPT:
    """The model of a folder, for evaluation. FileNotFoundError: no safetensors; ValueError: not those of this model."""
    files = sorted(Path(folder).glob("*.safetensors"))
    weights: dict[str, Tensor] = {}
    config = None
    for file in files:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
        if "config" in metadata:  # other files of the folder, such as activations, are left alone
            config = Config.from_json(metadata["config"])
            weights.update(load_file(file))
    if config is None:
        want = "a folder of .safetensors files with 'config' in their metadata"
        raise FileNotFoundError(f"weights: got {folder}; want {want}")
    model = GPT(config)
    try:
        model.load_state_dict(weights)
    except RuntimeError as mismatch:
        told = " ".join(str(mismatch).split())
        raise ValueError(f"weights: got {folder}; want tensors named and sized as model.py says: {told}") from None
    return model.to(dtype).eval()


def save(model: GPT, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Writes `weights.safetensors`, which `load` reads, into a folder that is made if need be; returns the file."""
    path = Path(folder) / "weights.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to(dtype).contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, path, {"config": json.dumps(asdict(model.config))})
    return path
