#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times decoding of sequences that share leading pages: `cascade_attention` beside the plain call.

usage: bench/shared_prefix.py [--prefix N] [--own N] [--sequences N] [--tokens N] [--page N] [--heads HQ/HKV] [--dim N]
       [--groups N] [--capacity N] [--tree] [--device cuda] [--repeat N]
--groups: in how many groups of equal size the sequences share a prefix; --capacity: tokens that a row of the page table
has room for, by default what is used; --tree: the new tokens are a tree, given as bits, instead of causal. On a GPU
each call is a CUDA graph that is replayed, in turn with the other one, with the L2 cache overwritten in between; the
median counts. Also tells the largest difference of the two results. Needs the tessera package and torch.
"""

from __future__ import annotations

import argparse
import statistics

import tessera
import torch
from clock import Call, Clock


def problem(a: argparse.Namespace) -> tuple[torch.Tensor, tessera.KeySource, tessera.SharedPrefixes, torch.Tensor]:
    heads_q, heads_kv = map(int, a.heads.split("/"))
    keys = a.prefix + a.own
    columns = -(-max(a.capacity, keys) // a.page)
    each, shared, needed = a.sequences // a.groups, a.prefix // a.page, -(-keys // a.page)
    own = needed - shared
    pages = torch.randperm(a.groups * shared + a.sequences * own).to(torch.int32)
    table = torch.zeros(a.sequences, columns, dtype=torch.int32)
    for i in range(a.sequences):
        table[i, :shared] = pages[(i // each) * shared :][:shared]
        table[i, shared:needed] = pages[a.groups * shared + i * own :][:own]
    cache = [torch.randn(len(pages), a.page, heads_kv, a.dim, device=a.device).bfloat16() for _ in "kv"]
    used = torch.full((a.sequences,), keys, dtype=torch.int32, device=a.device)
    q = torch.randn(a.sequences, a.tokens, heads_q, a.dim, device=a.device).bfloat16()
    row = [1 << i | (1 if i else 0) for i in range(a.tokens)]  # all others behind the first token
    bits = torch.tensor([row] * a.sequences, dtype=torch.int64, device=a.device)
    groups = [(a.prefix, i * each, (i + 1) * each) for i in range(a.groups)]
    prefixes = tessera.SharedPrefixes(groups, batch=a.sequences, page_size=a.page)
    return q, tessera.KeySource(*cache, page_table=table.to(a.device), seqused=used), prefixes, bits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"prefix": 8192, "own": 256, "sequences": 64, "tokens": 1, "page": 16, "dim": 128, "groups": 1}
    for name, default in {**numbers, "capacity": 0, "repeat": 50}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--heads", default="32/8")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tree", action="store_true")
    a = parser.parse_args()
    if a.sequences % a.groups or a.prefix % a.page:
        parser.error("want groups of equal size and a prefix of whole pages")
    torch.manual_seed(0)
    q, cache, prefixes, bits = problem(a)
    options = {"tree": bits} if a.tree else {"causal": True}
    plain_options = {"mask": tessera.tree_mask(bits, cache.seqused)} if a.tree else {"causal": True}
    calls: dict[str, Call] = {
        "plain": lambda: tessera.attention(q, cache, **plain_options),
        "cascade": lambda: tessera.cascade_attention(q, cache, prefixes, **options),
    }
    results = [call().float() for call in calls.values()]
    difference, largest = (x.abs().max().item() for x in (results[0] - results[1], results[0]))
    print(f"largest difference {difference:.2g}, largest output {largest:.2g}")
    clock = Clock(a.device)
    calls = {name: clock.prepared(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(a.repeat):
        for name, call in calls.items():
            times[name].append(clock.microseconds(call))
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, found in medians.items():
        print(f"{name}: {found:.1f} µs")
    print(f"cascade is {medians['plain'] / medians['cascade']:.2f} times as fast")


if __name__ == "__main__":
    main()
