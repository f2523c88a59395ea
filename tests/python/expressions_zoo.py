# SPDX-License-Identifier: Apache-2.0
"""The zoo of scores and masks that people write, as functions of symbols and of torch tensors alike, and attention by
torch's operations without a fused kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LENGTH = 150


def zoo(device: Any = "cpu", length: int = LENGTH, heads: int = 4) -> dict[str, tuple[Any, Any]]:
    """(score, mask) by name; None for neither. Captured tensors are on `device`."""
    generator = torch.Generator().manual_seed(4)
    documents = (torch.arange(length) // 37).to(torch.int32).to(device)
    bias = torch.randn(heads, 2 * length, generator=generator).to(device)
    half_bias = bias.to(torch.bfloat16)
    slopes = torch.exp2(-torch.arange(1, heads + 1) * 2.0).to(device)
    seen = (torch.arange(length) % 7 != 3).to(device)
    cap = torch.tensor(9.0, device=device)

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    return {
        "causal": (None, causal),
        "window": (None, lambda b, h, q, k: (q >= k) & (q - k <= 20)),
        "prefix": (None, lambda b, h, q, k: torch.logical_or(k < 31, q >= k)),
        "document": (None, lambda b, h, q, k: documents[q] == documents[k]),
        "document causal": (None, lambda b, h, q, k: (documents[q] == documents[k]) & causal(b, h, q, k)),
        "alibi": (lambda s, b, h, q, k: s + slopes[h] * (k - q), None),
        "relative bias": (lambda s, b, h, q, k: s + bias[h, q - k + length], None),
        "relative bias in bf16": (lambda s, b, h, q, k: s + half_bias[h, q - k + length].float(), causal),
        "softcap": (lambda s, b, h, q, k: 5 * torch.tanh(s / 5), causal),
        "captured cap": (lambda s, b, h, q, k: cap * torch.tanh(s / cap), None),
        "dilated": (None, lambda b, h, q, k: ((q - k) % 3 == 0) & (q >= k)),
        "neighbourhood": (None, lambda b, h, q, k: (abs(q // 12 - k // 12) <= 2) & ((q % 12 - k % 12).abs() <= 2)),
        "global": (None, lambda b, h, q, k: (k < 8) | (abs(q - k) <= 16)),
        "hash": (None, lambda b, h, q, k: ((q * 2654435761 + k * 40503) >> 7) & 3 != 0),
        "heads": (None, lambda b, h, q, k: q - k <= (h + 1) * 16),
        "padding": (None, lambda b, h, q, k: seen[k] & (q >= k)),
        "score hides": (lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")), None),
        "smooth": (
            lambda s, b, h, q, k: torch.sigmoid(s) * s + torch.log(s * s + 1) - torch.clamp(s, -1, 1) + s.abs() ** 1.5,
            causal,
        ),
    }


def attention(q: Tensor, k: Tensor, v: Tensor, score: Any = None, mask: Any = None, shift: int = 0) -> Tensor:
    """(b, s, h, d) tensors; query i stands at position i + shift."""
    group = q.shape[2] // k.shape[2]
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    s = queries @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])
    at = [torch.arange(n, device=q.device).view([-1 if d == i else 1 for d in range(4)]) for i, n in enumerate(s.shape)]
    at[2] = at[2] + shift
    if score is not None:
        s = score(s, *at)
    if mask is not None:
        s = torch.where(mask(*at), s, -float("inf"))
    return (torch.softmax(s, -1).nan_to_num(0).to(values.dtype) @ values).transpose(1, 2)
