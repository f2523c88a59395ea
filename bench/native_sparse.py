#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times native sparse attention beside dense causal attention: forward, forward and backward, and memory.

usage: bench/native_sparse.py [--device cpu|cuda] [--tokens N...] [--heads QxKV] [--dim N] [--calls NAME...]
       [--dense-up-to N] [--fla] [--recompute yes|no] [--repeat N] [--json FILE]
One sequence, N(0, 1), bf16 (fp32 on a CPU), preset "strict". Calls: "all" (all compressed keys), "top16"
(compressed_top=16), "top16 of 32" (compressed_block=32 too), "recent" (without a window to speak of: one key, gates of
1/2 for the other branches). --fla: beside them parallel_nsa of flash-linear-attention, 16 blocks of 64 and no window,
which wants 16 query heads or more for a key head; compare it with "recent". --recompute: that of tessera.nsa, which
decides by itself without it. --dense-up-to: the longest sequence of dense attention; its time beyond it is the last
one's times the square of the lengths' ratio, and marked. The least of N times counts, of dense attention beyond 524288
tokens one. Prints a table, last. Needs the tessera package and torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tessera
import torch
from clock import Clock, machine
from report_native_sparse import native_sparse_rows
from torch import Tensor

CALLS: dict[str, dict[str, Any]] = {
    "all": {},
    "top16": {"compressed_top": 16},
    "top16 of 32": {"compressed_top": 16, "compressed_block": 32},
    "recent": {"window": 1},
}
PASSES = ("forward", "both")
WARM_UP = 4096  # tokens: the kernels of a long sequence are those of a short one
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def heads_of(word: str) -> tuple[int, int]:
    heads, kv_heads = map(int, word.split("x"))
    return heads, kv_heads


def tensors(tokens: int, a: argparse.Namespace) -> list[Tensor]:
    """q, k, v and the gradient of the result."""
    torch.manual_seed(0)
    shapes = [(1, tokens, heads, a.dim) for heads in (a.heads[0], a.heads[1], a.heads[1], a.heads[0])]
    dtype = torch.float32 if a.device == "cpu" else torch.bfloat16
    return [torch.randn(shape, device=a.device, dtype=dtype) for shape in shapes]


def attention_of(name: str, a: argparse.Namespace) -> Attention:
    if name == "dense":
        return lambda q, k, v: tessera.attention(q, k, v, causal=True)
    if name == "fla":
        from fla.ops.nsa import parallel_nsa

        def peer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            half = q.new_full(q.shape[:3], 0.5)
            return parallel_nsa(q, k, v, half, half, None, block_counts=16, block_size=64, window_size=0)

        return peer
    options = CALLS[name] | {"recompute": a.recompute and a.recompute == "yes"}
    if name != "recent":
        return lambda q, k, v: tessera.nsa(q, k, v, **options)

    def recent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gates = torch.tensor([0.5, 0.5, 0.0], device=q.device).expand(*q.shape[:3], 3).contiguous()
        return tessera.nsa(q, k, v, gates=gates, **options)

    return recent


def step(attention: Attention, inputs: list[Tensor], which: str) -> Callable[[], Any]:
    *leaves, gradient = inputs

    def forward() -> None:
        with torch.no_grad():
            attention(*leaves)

    def both() -> None:
        for leaf in leaves:
            leaf.grad = None
        attention(*leaves).backward(gradient)

    if which == "both":
        for leaf in leaves:
            leaf.requires_grad_()
    return forward if which == "forward" else both


def row_of(name: str, tokens: int, which: str, clock: Clock, a: argparse.Namespace) -> dict[str, Any]:
    attention = attention_of(name, a)
    step(attention, tensors(min(tokens, WARM_UP), a), which)()  # compiles
    call = step(attention, tensors(tokens, a), which)
    if clock.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    once = name == "dense" and tokens > 1 << 19
    times = [clock.microseconds(call) for _ in range(1 if once else a.repeat)]
    row: dict[str, Any] = {"tokens": tokens, "pass": which, "call": name, "heads": list(a.heads), "d": a.dim}
    row["us"] = min(times)
    if clock.on_gpu:
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    print(row, file=sys.stderr, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 65536, 262144, 1048576])
    parser.add_argument("--heads", type=heads_of, default=(32, 8))
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=["all", "top16", "top16 of 32"])
    parser.add_argument("--dense-up-to", type=int, default=262144)
    parser.add_argument("--fla", action="store_true")
    parser.add_argument("--recompute", choices=("yes", "no"))
    parser.add_argument("--repeat", type=int, default=3)
    a = parser.parse_args()
    if a.fla and importlib.util.find_spec("fla") is None:
        parser.error("--fla: got no package fla; want flash-linear-attention (pip install flash-linear-attention)")
    clock = Clock(a.device)
    rows = []
    for which in PASSES:
        measured: dict[str, Any] | None = None
        for tokens in sorted(a.tokens):
            if tokens <= a.dense_up_to:
                measured = row_of("dense", tokens, which, clock, a)
                rows.append(measured)
            elif measured is not None:
                us = measured["us"] * (tokens / measured["tokens"]) ** 2
                rows.append({**measured, "tokens": tokens, "us": us, "from_tokens": measured["tokens"]})
            for name in [*a.calls, *(["fla"] if a.fla else [])]:
                rows.append(row_of(name, tokens, which, clock, a))
    if a.json:
        a.json.write_text(json.dumps({"machine": machine(a.device), "rows": rows}, indent=1) + "\n")
    print(native_sparse_rows(rows))


if __name__ == "__main__":
    main()
