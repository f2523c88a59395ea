#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times scores and masks written in Python on the CPU, beside torch's compiled flex_attention.

usage: bench/flex_attention.py [--length N] [--heads N] [--dim N] [--dtype float32] [--threads N] [--repeat N]
       [--rows NAME...]
Each call is timed N times, in turn with the others of its row, and the least time counts; compiling and torch's block
masks are not timed. torch's flex_attention has no backward on the CPU. Prints a Markdown table, times in ms. Needs the
tessera package, torch and a C++ compiler.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tessera
import torch
import torch.nn.attention.flex_attention as flex

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))
import expressions_zoo

ROWS = (
    *("causal", "window", "prefix", "document", "document causal", "neighbourhood", "dilated", "hash"),
    *("alibi", "relative bias", "softcap"),
)


def zoo(length: int, heads: int) -> dict[str, tuple[Any, Any]]:
    """Functions of the tests' zoo, whose scores are without masks here."""
    every = expressions_zoo.zoo(length=length, heads=heads, sizes=expressions_zoo.LARGE)
    alone = {name: (score, None if score else mask) for name, (score, mask) in every.items() if name in ROWS}
    return {"none": (None, None), **{name: alone[name] for name in ROWS}}


def least_times(calls: list[Callable[[], Any]], repeat: int) -> list[float]:
    """In ms."""
    least = [float("inf")] * len(calls)
    for call in calls:
        call()
    for _ in range(repeat):
        for i, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            least[i] = min(least[i], 1e3 * (time.perf_counter() - begin))
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("length", 2048), ("heads", 8), ("dim", 64), ("threads", 2), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", nargs="*", help="names of the table's rows; default all")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    tessera.set_threads(asked.threads)
    torch.manual_seed(0)
    shape = (1, asked.heads, asked.length, asked.dim)
    q, k, v = (torch.randn(shape, dtype=getattr(torch, asked.dtype)) for _ in range(3))
    print("| score or mask | forward | torch's flex_attention | torch / Tessera | backward |\n|---|---|---|---|---|")
    for name, (score, mask) in zoo(asked.length, asked.heads).items():
        if asked.rows and name not in asked.rows:
            continue
        lengths = (None, None, asked.length, asked.length)
        ours = None if mask is None else tessera.create_block_mask(mask, *lengths)
        theirs = None if mask is None else flex.create_block_mask(mask, *lengths, device="cpu")
        torch._dynamo.reset()
        compiled = torch.compile(flex.flex_attention)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = tessera.flex_attention(*leaves, score, ours)
        dout = torch.randn_like(out)

        def backward(out: Any = out, leaves: Any = leaves, dout: Any = dout) -> Any:
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)

        def forward(score: Any = score, ours: Any = ours) -> Any:
            return tessera.flex_attention(q, k, v, score, ours)

        def torchs(score: Any = score, theirs: Any = theirs, compiled: Any = compiled) -> Any:
            with torch.no_grad():
                return compiled(q, k, v, score, theirs)

        torch.testing.assert_close(forward(), torchs(), atol=2e-2, rtol=2e-2)
        mine, other, back = least_times([forward, torchs, backward], asked.repeat)
        print(f"| {name} | {mine:.1f} | {other:.1f} | {other / mine:.2f} | {back:.1f} |", flush=True)


if __name__ == "__main__":
    main()
