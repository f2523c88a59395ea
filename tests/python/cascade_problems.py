# SPDX-License-Identifier: Apache-2.0
"""Steps over shared prefixes for the tests of torch: a cache, queries, bits of a tree, and the textbook's results."""

from __future__ import annotations

from typing import NamedTuple

import tessera
import torch
import torch_textbook as textbook
from torch import Tensor

PAGE = 16
GROUPS = {"all": [(256, 0, 6)], "a tree": [(64, 0, 6), (256, 0, 3), (128, 4, 6)]}
LENGTHS = [300, 290, 411, 270, 333, 262]
TREE = [0b00001, 0b00011, 0b00101, 0b01011, 0b10101]  # two branches of two tokens behind the first


class Step(NamedTuple):
    q: Tensor
    source: tessera.KeySource
    bits: Tensor

    def at_once(self, prefixes: tessera.SharedPrefixes, tree: bool) -> tuple[Tensor, Tensor]:
        options = {"tree": self.bits} if tree else {"causal": True}
        return tessera.cascade_attention(self.q, self.source, prefixes, return_lse=True, **options)


def step(groups: list[tuple[int, int, int]], dtype: torch.dtype, tokens: int, seed: int = 1, lengths=LENGTHS) -> Step:
    """Pages in random order, of which those that no sequence uses and the ends of others are NaN."""
    generator = torch.Generator().manual_seed(seed)
    batch, columns = len(lengths), -(-max(lengths) // PAGE) + 1
    table = torch.randperm(batch * columns, generator=generator).reshape(batch, columns).to(torch.int32)
    for length, first, stop in sorted(groups, reverse=True):  # the outer ones last
        table[first:stop, : length // PAGE] = table[first, : length // PAGE]
    k, v = (torch.randn(batch * columns, PAGE, 2, 64, generator=generator).to(dtype) for _ in "kv")
    unused = torch.ones(batch * columns, PAGE, dtype=torch.bool)
    for row, length in zip(table, lengths, strict=True):
        used = torch.arange(columns * PAGE).reshape(columns, PAGE) < length
        unused[row.long()] &= ~used
    k[unused], v[unused] = torch.nan, torch.nan
    q = torch.randn(batch, tokens, 8, 64, generator=generator).to(dtype)
    bits = torch.tensor([TREE[:tokens]] * batch, dtype=torch.int32)
    return Step(q, tessera.KeySource(k, v, page_table=table, seqused=torch.tensor(lengths, dtype=torch.int32)), bits)


def judge(got: tuple[Tensor, Tensor], wanted: Step, tree: bool) -> None:
    """By the rule of docs/testing.md, each sequence's output and LSE against the textbook over its own dense keys."""
    tokens, source = wanted.q.shape[1], wanted.source
    shown = torch.tensor([[row >> i & 1 for i in range(tokens)] for row in TREE[:tokens]]).bool()
    for i, length in enumerate(source.seqused.tolist()):
        k, v = (pool[source.page_table[i].long()].flatten(0, 1)[None, :length] for pool in (source.k, source.v))
        q = wanted.q[i : i + 1]
        visible = textbook.window(1, tokens, length, None, 0).clone()
        if tree:
            visible[..., length - tokens :] = shown
        oracle = textbook.attend(q.double(), k.double(), v.double(), visible=visible)
        order = textbook.orders(length)
        for part, name in enumerate(("out", "lse")):

            def plain(run: int, part: int = part) -> Tensor:
                return textbook.attend(q, k, v, visible=visible, order=order(run))[part]  # noqa: B023

            textbook.judge(f"{name} of sequence {i}", got[part][i : i + 1], oracle[part], plain)
