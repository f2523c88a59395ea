# SPDX-License-Identifier: Apache-2.0
"""Attention problems by feature: random inputs, Tessera's call and the textbook's, of the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tessera
import torch
import torch_textbook as textbook
from torch import Tensor


class Problem(NamedTuple):
    """`call` and `plain` take the inputs and return (out, lse); `plain` also takes an order of keys."""

    inputs: tuple[Tensor, ...]
    call: Callable[..., tuple[Tensor, Tensor]]
    plain: Callable[..., tuple[Tensor, Tensor]]
    keys: int


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Sizes(NamedTuple):
    b: int = 2
    sq: int = 70
    sk: int = 70
    hq: int = 4
    hkv: int = 2
    d: int = 32
    dv: int = 32


def _inputs(s: Sizes, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q = normal(s.b, s.sq, s.hq, s.d, dtype=dtype, seed=1)
    k = normal(s.b, s.sk, s.hkv, s.d, dtype=dtype, seed=2)
    return q, k, normal(s.b, s.sk, s.hkv, s.dv, dtype=dtype, seed=3)


def _dense(s: Sizes, dtype: torch.dtype, options: dict, words: dict) -> Problem:
    """`options` for Tessera, `words` for the textbook."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return tessera.attention(q, k, v, return_lse=True, **options)

    def plain(q: Tensor, k: Tensor, v: Tensor, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return textbook.attend(q, k, v, order=order, **words)

    return Problem(_inputs(s, dtype), call, plain, s.sk)


def full(dtype: torch.dtype) -> Problem:
    return _dense(Sizes(), dtype, {}, {})


def causal(dtype: torch.dtype) -> Problem:
    s = Sizes()
    return _dense(s, dtype, {"causal": True}, {"visible": textbook.window(s.b, s.sq, s.sk, None, 0)})


def causal_empty_rows(dtype: torch.dtype) -> Problem:
    s = Sizes(sq=70, sk=33)
    return _dense(s, dtype, {"causal": True}, {"visible": textbook.window(s.b, s.sq, s.sk, None, 0)})


def window_mqa(dtype: torch.dtype) -> Problem:
    s = Sizes(sq=40, sk=90, hkv=1)
    return _dense(s, dtype, {"window": (11, 3)}, {"visible": textbook.window(s.b, s.sq, s.sk, 11, 3)})


def other_dim_of_v(dtype: torch.dtype) -> Problem:
    return _dense(Sizes(d=64, dv=24), dtype, {"scale": 0.2}, {"scale": 0.2})


def softcap(dtype: torch.dtype) -> Problem:
    return _dense(Sizes(), dtype, {"softcap": 3.0}, {"softcap": 3.0})


def alibi(dtype: torch.dtype) -> Problem:
    s = Sizes(sk=50)
    slopes = 2.0 ** -torch.arange(1, s.hq + 1)
    distance = (torch.arange(s.sq)[:, None] + s.sk - s.sq - torch.arange(s.sk)).abs()
    return _dense(s, dtype, {"alibi_slopes": slopes}, {"bias": -slopes[:, None, None] * distance})


def dropout(dtype: torch.dtype) -> Problem:
    s = Sizes()
    kept = torch.from_numpy(tessera.dropout_keep((s.b, s.hq, s.sq, s.sk), 0.25, 77))
    options = {"dropout": 0.25, "seed": 77}
    return _dense(s, dtype, options, {"keep": kept * (65536 / round(0.75 * 65536))})


def offsets(dtype: torch.dtype) -> Problem:
    s = Sizes()
    starts = torch.tensor([10, -7])
    shown = torch.cat([textbook.window(1, s.sq, s.sk, None, 0, int(start)) for start in starts])
    return _dense(s, dtype, {"causal": True, "offsets": tessera.Offsets(q=starts)}, {"visible": shown})


def used_lengths(dtype: torch.dtype) -> Problem:
    s = Sizes()
    rows, keys = torch.tensor([70, 31], dtype=torch.int32), torch.tensor([22, 64], dtype=torch.int32)
    shown = (torch.arange(s.sk) < keys[:, None, None]) & (torch.arange(s.sq)[:, None] < rows[:, None, None])
    return _dense(s, dtype, {"seqused_q": rows, "seqused_k": keys}, {"visible": shown[:, None]})


def tiles(dtype: torch.dtype) -> Problem:
    s = Sizes()
    kept = torch.rand(s.b, s.hq, 5, 9, generator=torch.Generator().manual_seed(4)) < 0.5
    options = {"tiles": tessera.TileList.from_mask(kept, block=(16, 8)), "causal": True}
    shown = kept.repeat_interleave(16, 2).repeat_interleave(8, 3)[:, :, : s.sq, : s.sk]
    return _dense(s, dtype, options, {"visible": shown & textbook.window(s.b, s.sq, s.sk, None, 0)})


def sinks(dtype: torch.dtype) -> Problem:
    s = Sizes(sq=90, sk=60)  # some rows are empty: their output is 0 and their sink gets nothing
    shown = textbook.window(s.b, s.sq, s.sk, None, 0)

    def call(q: Tensor, k: Tensor, v: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        return tessera.attention(q, k, v, causal=True, sinks=logits.float(), return_lse=True)

    def plain(q: Tensor, k: Tensor, v: Tensor, logits: Tensor, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return textbook.attend(q, k, v, visible=shown, sinks=logits, order=order)

    return Problem((*_inputs(s, dtype), normal(s.hq, dtype=dtype, seed=5)), call, plain, s.sk)


def second_source(dtype: torch.dtype) -> Problem:
    s = Sizes(sq=30, sk=50)
    k2, v2 = normal(s.b, 20, s.hkv, s.d, dtype=dtype, seed=6), normal(s.b, 20, s.hkv, s.dv, dtype=dtype, seed=7)
    shown = textbook.window(s.b, s.sq, 70, None, 0)

    def call(q: Tensor, k: Tensor, v: Tensor, k2: Tensor, v2: Tensor) -> tuple[Tensor, Tensor]:
        return tessera.attention(q, k, v, k2=tessera.KeySource(k2, v2), causal=True, return_lse=True)

    def plain(
        q: Tensor, k: Tensor, v: Tensor, k2: Tensor, v2: Tensor, order: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return textbook.attend(q, torch.cat((k, k2), 1), torch.cat((v, v2), 1), visible=shown, order=order)

    return Problem((*_inputs(s, dtype), k2, v2), call, plain, 70)


def varlen(dtype: torch.dtype) -> Problem:
    """Packed sequences of 13, 0 and 57 tokens; the textbook sees one sequence and a block-diagonal mask."""
    s = Sizes()
    ends = torch.tensor([0, 13, 13, 70], dtype=torch.int32)
    sequence = torch.bucketize(torch.arange(70), ends[1:-1].long(), right=True)
    shown = ((sequence[:, None] == sequence) & textbook.window(1, 70, 70, None, 0)[0, 0]).expand(1, 1, 70, 70)

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = tessera.attention(q, k, v, causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends, return_lse=True)
        return out[None], lse[None]

    def plain(q: Tensor, k: Tensor, v: Tensor, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return textbook.attend(q[None], k[None], v[None], visible=shown, order=order)

    return Problem(tuple(x[0] for x in _inputs(s, dtype)), call, plain, 70)


ALL: dict[str, Callable[[torch.dtype], Problem]] = {
    make.__name__: make
    for make in (
        full,
        causal,
        causal_empty_rows,
        window_mqa,
        other_dim_of_v,
        softcap,
        alibi,
        dropout,
        offsets,
        used_lengths,
        tiles,
        sinks,
        second_source,
        varlen,
    )
}
