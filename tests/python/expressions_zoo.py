# SPDX-License-Identifier: Apache-2.0
"""The zoo of scores and masks that people write, as functions of symbols and of torch tensors alike, and attention by
torch's operations without a fused kernel. `bench/flex_attention.py` times it, `bench/gallery.py` draws it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

LENGTH = 150


class Sizes(NamedTuple):
    """Of the zoo's patterns: tokens of a document, keys of a window and of a prefix, tokens of a row of a picture, and
    the cap of scores."""

    document: int = 37
    window: int = 20
    prefix: int = 31
    row: int = 12
    cap: float = 5.0


LARGE = Sizes(document=300, window=256, prefix=500, row=64, cap=20.0)


def zoo(
    device: Any = "cpu", length: int = LENGTH, heads: int = 4, sizes: Sizes | None = None
) -> dict[str, tuple[Any, Any]]:
    """(score, mask) by name; None for neither. Captured tensors are on `device`."""
    sizes = sizes or Sizes()
    generator = torch.Generator().manual_seed(4)
    documents = (torch.arange(length) // sizes.document).to(torch.int32).to(device)
    bias = torch.randn(heads, 2 * length, generator=generator).to(device)
    half_bias = bias.to(torch.bfloat16)
    slopes = torch.exp2(-torch.arange(1, heads + 1) * 2.0).to(device)
    seen = (torch.arange(length) % 7 != 3).to(device)
    cap = torch.tensor(9.0, device=device)

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k <= sizes.window)

    def prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.logical_or(k < sizes.prefix, q >= k)

    def document(b: Any, h: Any, q: Any, k: Any) -> Any:
        return documents[q] == documents[k]

    def document_causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (documents[q] == documents[k]) & (q >= k)

    def dilated(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q - k) % 3 == 0) & (q >= k)

    def neighbourhood(b: Any, h: Any, q: Any, k: Any) -> Any:
        rows, columns = q // sizes.row - k // sizes.row, q % sizes.row - k % sizes.row
        return (abs(rows) <= 2) & (columns.abs() <= 2)

    def global_(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < 8) | (abs(q - k) <= 16)

    def hash_(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q * 2654435761 + k * 40503) >> 7) & 3 != 0

    def reach_of_heads(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k <= (h + 1) * 16

    def padding(b: Any, h: Any, q: Any, k: Any) -> Any:
        return seen[k] & (q >= k)

    def alibi(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + slopes[h] * (k - q)

    def relative_bias(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + bias[h, q - k + length]

    def half_relative_bias(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + half_bias[h, q - k + length].float()

    def softcap(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return sizes.cap * torch.tanh(s / sizes.cap)

    def captured_cap(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return cap * torch.tanh(s / cap)

    def hides(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where(q >= k, s, -float("inf"))

    def smooth(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.sigmoid(s) * s + torch.log(s * s + 1) - torch.clamp(s, -1, 1) + s.abs() ** 1.5

    return {
        "causal": (None, causal),
        "window": (None, window),
        "prefix": (None, prefix),
        "document": (None, document),
        "document causal": (None, document_causal),
        "alibi": (alibi, None),
        "relative bias": (relative_bias, None),
        "relative bias in bf16": (half_relative_bias, causal),
        "softcap": (softcap, causal),
        "captured cap": (captured_cap, None),
        "dilated": (None, dilated),
        "neighbourhood": (None, neighbourhood),
        "global": (None, global_),
        "hash": (None, hash_),
        "heads": (None, reach_of_heads),
        "padding": (None, padding),
        "score hides": (hides, None),
        "smooth": (smooth, causal),
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
