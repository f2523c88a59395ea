#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Estimates context parallel attention on more GPUs than can be had, by the model of docs/context-parallel.md.

usage: bench/context_parallel_model.py [--gpus 4,8,…] [--tokens 131072,…] [--heads HQ/HKV] [--dim D] [--window N]
                                       [--flops F] [--inside B] [--across B] [--node N] [--picture FILE] [--json FILE]
A causal forward in bf16, batch 1, zigzag shards. Bandwidths in bytes a second and GPU, one way: inside a node and
across nodes. all_gather, ring and ulysses over more GPUs than a node has are taken to go across at the lower one;
two_level has ulysses inside nodes. Each number is the estimated share of the ideal: time of computing / (that +
waiting). Nothing here is measured but what the arguments say. A dash: the heads do not split, or it is not a grid.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tessera.distributed import Machine, Mask, layout_of
from tessera.distributed.cost import Shape, estimate
from tessera.distributed.reach import pairs

METHODS = ("all_gather", "ring", "ulysses", "two_level")


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=numbers, default=[4, 8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--tokens", type=numbers, default=[131072, 1048576, 10485760])
    parser.add_argument("--heads", default="32/8")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--window", type=int, default=0, help="keys of a sliding window; 0: none")
    parser.add_argument("--flops", type=float, default=600e12, help="of the kernel alone")
    parser.add_argument("--inside", type=float, default=300e9)
    parser.add_argument("--across", type=float, default=45e9)
    parser.add_argument("--node", type=int, default=8)
    parser.add_argument("--picture", type=Path, help=".png or .svg (needs matplotlib)")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def shares(given: argparse.Namespace, gpus: int, tokens: int) -> tuple[float, dict[str, float]]:
    """(ms of computing on the rank with most, by method the share of the ideal)."""
    heads_q, heads_kv = map(int, given.heads.split("/"))
    shape = Shape(heads_q, heads_kv, given.dim, given.dim)
    mask = Mask(given.window - 1 if given.window else None, 0)
    layout = layout_of(gpus, seqlen=tokens)
    most = max(pairs(mask, layout))
    computing = most * heads_q * 4 * given.dim / given.flops
    ideal = computing * sum(pairs(mask, layout)) / (most * len(pairs(mask, layout)))
    found = {}
    for method in METHODS:
        within = gpus <= given.node
        machine = Machine(given.inside if within else given.across, flops=given.flops)
        inner = 1
        if method == "two_level":
            if within:
                continue
            inner, machine = given.node, Machine(given.inside, flops=given.flops, outer_bandwidth=given.across)
        try:
            found[method] = ideal / (computing + estimate(method, mask, layout, shape, machine, inner).seconds)
        except ValueError:
            continue
    return computing * 1e3, found


def main() -> None:
    given = arguments()
    rows = []
    print(f"| tokens | GPUs | computing, ms | {' | '.join(METHODS)} |")
    print("|---" * (3 + len(METHODS)) + "|")
    for tokens in given.tokens:
        for gpus in given.gpus:
            computing, found = shares(given, gpus, tokens)
            cells = [f"{found[method]:.3f}" if method in found else "–" for method in METHODS]
            print(f"| {tokens} | {gpus} | {computing:.3g} | {' | '.join(cells)} |", flush=True)
            rows.append({"tokens": tokens, "gpus": gpus, "computing_ms": computing, "of_ideal": found})
    if given.json:
        words = {name: x for name, x in vars(given).items() if not isinstance(x, Path)}
        given.json.write_text(json.dumps({"arguments": words, "estimated": rows}, indent=1) + "\n")
    if given.picture:
        draw(given, rows)


def draw(given: argparse.Namespace, rows: list[dict]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(given.tokens), figsize=(4 * len(given.tokens), 3), sharey=True, squeeze=False)
    for axis, tokens in zip(axes[0], given.tokens, strict=True):
        for method in METHODS:
            points = [
                (r["gpus"], r["of_ideal"][method]) for r in rows if r["tokens"] == tokens and method in r["of_ideal"]
            ]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=method)
        axis.set(xscale="log", xlabel="GPUs", title=f"{tokens} tokens, estimated", ylim=(0, 1.02))
    axes[0][0].set_ylabel("share of the ideal")
    axes[0][-1].legend()
    figure.tight_layout()
    figure.savefig(given.picture, dpi=100)


if __name__ == "__main__":
    main()
