# SPDX-License-Identifier: Apache-2.0
"""A small video diffusion transformer with a pluggable attention call.

Frames of 64 × 64 pixels are cut into patches of 4 × 4, tokens in the order (frame, row, column); every token sees every
other one. Weights are safetensors files `weights_*.safetensors` of one folder. Their metadata has `config`, JSON of
dim, heads, layers, ffn and patch; tensors are named as the module's, and a matrix in int8 has fp32 factors of its rows
in `NAME.scale`.
"""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn


def rotate(x, angles):
    """Rotary embedding of the two halves of the last dimension; angles: (cos, sin) of (1, tokens, 1, dim / 2)."""
    cos, sin = angles
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, dim, heads, ffn):
        super().__init__()
        head_dim = dim // heads
        self.qkv, self.o = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w2 = nn.Linear(dim, ffn), nn.Linear(ffn, dim)
        self.mod = nn.Parameter(torch.zeros(6, dim))
        self.qn, self.kn = nn.Parameter(torch.ones(head_dim)), nn.Parameter(torch.ones(head_dim))

    def forward(self, x, time, angles, attend):
        shift, scale, gate, shift2, scale2, gate2 = (time + self.mod[None]).unsqueeze(2).unbind(1)
        dim, head_dim = x.shape[-1], self.qn.shape[0]
        h = F.layer_norm(x, (dim,)) * (1 + shift) + scale
        q, k, v = self.qkv(h).unflatten(-1, (3, dim // head_dim, head_dim)).unbind(2)
        q = rotate(F.rms_norm(q, (head_dim,), self.qn), angles)
        k = rotate(F.rms_norm(k, (head_dim,), self.kn), angles)
        x = x + gate * self.o(attend(q, k, v).flatten(2))
        h = F.layer_norm(x, (dim,)) * (1 + shift2) + scale2
        return x + gate2 * self.w2(F.gelu(self.w1(h), approximate="tanh"))


class VideoModel(nn.Module):
    """Predicts noise − x at x_s = (1 − s) x + s · noise (flow matching)."""

    def __init__(self, dim, heads, layers, ffn, patch):
        super().__init__()
        pixels = 3 * patch**2
        self.dim, self.patch = dim, patch
        self.inp, self.out = nn.Linear(pixels, dim), nn.Linear(dim, pixels)
        self.t1, self.t2, self.t3 = nn.Linear(256, dim), nn.Linear(dim, dim), nn.Linear(dim, 6 * dim)
        self.fin = nn.Linear(dim, 2 * dim)
        self.blocks = nn.ModuleList(Block(dim, heads, ffn) for _ in range(layers))

    @staticmethod
    def angles(frames, side, device="cpu"):
        """Of a head dimension of 128: 44 for the frame, 42 for the row and for the column."""
        grid = torch.meshgrid(*(torch.arange(size) for size in (frames, side, side)), indexing="ij")
        parts = []
        for where, dim in zip(grid, (44, 42, 42), strict=True):
            parts.append(where.flatten().float()[:, None] * 1e3 ** (-torch.arange(0, dim, 2).float() / dim))
        angles = torch.cat(parts, -1).to(device)
        return angles.cos()[None, :, None], angles.sin()[None, :, None]

    def forward(self, x, s, angles, attention):
        a = s * 1000 * torch.exp(-math.log(1e4) * torch.arange(128, device=x.device) / 128)
        time = self.t2(F.silu(self.t1(torch.cat((a.cos(), a.sin()))[None].to(x.dtype))))
        per_block, x = self.t3(F.silu(time)).view(1, 6, self.dim), self.inp(x)
        for layer, block in enumerate(self.blocks):
            x = block(x, per_block, angles, lambda q, k, v, layer=layer: attention(layer, q, k, v))
        scale, shift = self.fin(F.silu(time))[:, None].chunk(2, -1)
        return self.out(F.layer_norm(x, (self.dim,)) * (1 + scale) + shift)

    @torch.no_grad()
    def sample(self, attention, frames, side, steps, seed, on_step=None):
        """Euler steps from noise to a video, fp32 (frames, 3, pixels, pixels), about −1 to 1. A seed gives one noise on
        all devices.

        attention(layer, q, k, v) of (1, tokens, heads, 128); on_step(step) comes before each step.
        """
        device, dtype, p = self.inp.weight.device, self.inp.weight.dtype, self.patch
        angles = self.angles(frames, side, device)
        noise = torch.randn(1, frames * side * side, 3 * p * p, generator=torch.Generator().manual_seed(seed))
        x = noise.to(device)
        u = torch.linspace(1, 0, steps + 1, device=device)
        s = 3 * u / (1 + 2 * u)
        for step in range(steps):
            if on_step is not None:
                on_step(step)
            x = x + (s[step + 1] - s[step]) * self(x.to(dtype), s[step], angles, attention).float()
        x = x.view(frames, side, side, 3, p, p)
        return x.permute(0, 3, 1, 4, 2, 5).reshape(frames, 3, side * p, side * p)


def load(folder, dtype, device="cpu"):
    """The model of a folder. Raises FileNotFoundError where it has no weights."""
    files = sorted(Path(folder).glob("weights_*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no weights_*.safetensors")
    tensors, config = {}, None
    for each in files:
        with safe_open(each, "pt") as file:
            config = config or json.loads(file.metadata()["config"])
        tensors.update(load_file(each))
    weights = {}
    for name, tensor in tensors.items():
        if name.endswith(".scale"):
            continue
        scale = tensors.get(f"{name}.scale")
        weights[name] = tensor if scale is None else (tensor.float() * scale[:, None]).bfloat16()
    sizes = {name: config[name] for name in ("dim", "heads", "layers", "ffn", "patch")}
    model = VideoModel(**sizes)
    model.load_state_dict(weights)
    return model.to(device, dtype).eval()
