#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times training steps of one attention call whose backward has a list of tiles, under a dense forward.

usage: bench/training_step.py [--device cpu|cuda] [--json FILE] [--shapes BxSxH ...] [--dim N] [--left-out P ...]
       [--repeat N] [--causal]
bf16, blocks of 128 × 128, tiles of every head and query block drawn at random among those that the mask shows. The
step: clone (q, k and v as new leaves), forward, loss (the sum of the output times a given tensor), backward, readout
(the sums of the three gradients). Steps with lists and the dense one take turns; medians count. On a GPU the calls of a
step are queued behind writes of 256 MB, so that no phase waits for the host. Says too how far the gradients are from
the dense ones (relative L2). Without tiles left out, the list has all of them.
Prints a table, last. Needs the tessera package and torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import tessera
import torch
from clock import Clock, machine
from report_skip import training_step_rows
from torch import Tensor

BLOCK = 128
PHASES = ("clone", "forward", "loss", "backward", "readout")


def shape_of(word: str) -> tuple[int, int, int]:
    batch, tokens, heads = map(int, word.split("x"))
    return batch, tokens, heads


def listed(batch: int, heads: int, tokens: int, left_out: float, causal: bool, like: Tensor) -> tessera.TileList:
    """In every query block that share of the visible tiles is left out, at least one is kept."""
    blocks = -(-tokens // BLOCK)
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(batch, heads, blocks, blocks, generator=generator)
    visible = torch.arange(blocks)[None, :] <= (torch.arange(blocks)[:, None] if causal else blocks)
    order = order.masked_fill(~visible, 2.0)
    kept = ((1 - left_out) * visible.sum(-1)).round().clamp(min=1)
    rank = order.argsort(-1).argsort(-1)
    mask = (rank < kept[None, None, :, None]) & visible
    return tessera.TileList.from_mask(mask.to(like.device), form="bitmask", block=(BLOCK, BLOCK))


class Step:
    """One step by phases."""

    def __init__(self, inputs: list[Tensor], weight: Tensor, options: dict[str, Any]) -> None:
        self.inputs, self.weight, self.options = inputs, weight, options
        self.parts = [getattr(self, name) for name in PHASES]

    def clone(self) -> None:
        self.leaves = [x.clone().requires_grad_() for x in self.inputs]

    def forward(self) -> None:
        self.out = tessera.attention(*self.leaves, **self.options)

    def loss(self) -> None:
        self.value = (self.out * self.weight).sum()

    def backward(self) -> None:
        self.value.backward()

    def readout(self) -> None:
        self.sums = torch.stack([x.grad.sum(dtype=torch.float32) for x in self.leaves])

    def gradients(self) -> Tensor:
        for part in self.parts:
            part()
        return torch.cat([x.grad.double().flatten() for x in self.leaves])


def rows_of(shape: tuple[int, int, int], clock: Clock, a: argparse.Namespace) -> list[dict[str, Any]]:
    batch, tokens, heads = shape
    generator = torch.Generator().manual_seed(1)
    made = (torch.randn(batch, tokens, heads, a.dim, generator=generator) for _ in range(4))
    q, k, v, weight = (x.bfloat16().to(a.device) for x in made)
    steps = {}
    for left_out in [None, *a.left_out]:
        options: dict[str, Any] = {"causal": a.causal}
        if left_out is not None:
            options["tiles"] = tessera.Tiles(backward=listed(batch, heads, tokens, left_out, a.causal, q))
        steps[left_out] = Step([q, k, v], weight, options)
    dense = steps[None].gradients()
    distance = {name: ((step.gradients() - dense).norm() / dense.norm()).item() for name, step in steps.items()}
    times: dict[Any, list[list[float]]] = {name: [] for name in steps}
    for _ in range(a.repeat):
        for name, step in steps.items():
            times[name].append(clock.of_parts(step.parts, writes=20))
    rows = []
    for name, found in times.items():
        phases = dict(zip(PHASES, map(statistics.median, zip(*found, strict=True)), strict=True))
        row = {"batch": batch, "tokens": tokens, "heads": heads, "d": a.dim, "causal": a.causal, "left_out": name}
        row |= {"us": phases, "step_us": statistics.median(map(sum, found)), "relative_l2": distance[name]}
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[(1, 4096, 16), (2, 4096, 32)])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--left-out", nargs="+", type=float, default=[0.0, 0.25, 0.75, 0.875, 0.95])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--causal", action="store_true")
    a = parser.parse_args()
    clock = Clock(a.device)
    rows = [row for shape in a.shapes for row in rows_of(shape, clock, a)]
    if a.json:
        a.json.write_text(json.dumps({"machine": machine(a.device), "rows": rows}, indent=1) + "\n")
    print(training_step_rows(rows))


if __name__ == "__main__":
    main()
