#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures context parallel attention on the GPUs of one machine beside the ideal: one GPU's time of the same work,
divided by the ranks.

usage: bench/context_parallel.py [--ranks N] [--seqlen N] [--heads HQ/HKV] [--dim D] [--methods all_gather,ring]
                                 [--inner N] [--balance zigzag] [--window N] [--nsa] [--passes forward,both]
                                 [--no-alone] [--repetitions N] [--device cuda|cpu] [--json FILE]
A process a rank: NCCL on GPUs in bf16, Gloo with --device cpu in fp32 (to try the script, with a small --seqlen).
Times are of the slowest rank, by CUDA events, median of the repetitions; a barrier stands in front of each. Forward and
forward + backward are timed apart. The share of the ideal is ideal / time. --nsa: native sparse attention, by
all_gather; with --no-alone for lengths that one GPU has no memory for, whose rows have no share.
--json adds its rows to those of the file. Needs the tessera package and torch, with as many GPUs as ranks.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tessera
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tessera.distributed import ContextParallel, Mask, context_parallel
from tessera.native_sparse import PRESETS, tile_of
from torch.distributed.device_mesh import init_device_mesh

Tensors = dict[str, torch.Tensor]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seqlen", type=int, default=131072)
    parser.add_argument("--heads", default="32/8")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--methods", default="all_gather,ring")
    parser.add_argument("--inner", type=int, default=2, help="ranks of an inner group of two_level")
    parser.add_argument("--balance", default="zigzag")
    parser.add_argument("--window", type=int, default=0, help="keys of a sliding window; 0: none")
    parser.add_argument("--nsa", action="store_true", help="native sparse attention, by all_gather")
    parser.add_argument("--passes", default="forward,both")
    parser.add_argument("--no-alone", dest="alone", action="store_false", help="leave out one GPU's time")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.device == "cuda" and torch.cuda.device_count() < given.ranks:
        parser.error(f"--ranks: got {given.ranks}; want at most the {torch.cuda.device_count()} GPUs here")
    if given.nsa and given.window:
        parser.error("--window: got one beside --nsa; want dense attention for it")
    if unknown := set(given.passes.split(",")) - {"forward", "both"}:
        parser.error(f"--passes: got {', '.join(sorted(unknown))}; want forward, both or both of them")
    return given


class Clock:
    """Milliseconds of a call on this rank: by events of the current stream, or by the host's clock."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu

    def __call__(self, call: Callable[[], Any]) -> float:
        dist.barrier()
        if not self.on_gpu:
            begin = time.perf_counter()
            call()
            return (time.perf_counter() - begin) * 1e3
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def drawn(given: argparse.Namespace, rows: int, seed: int) -> Tensors:
    heads_q, heads_kv = map(int, given.heads.split("/"))
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    torch.manual_seed(seed)
    shapes = {name: (1, rows, heads_q if name == "q" else heads_kv, given.dim) for name in "qkv"}
    made = {n: torch.randn(x, device=given.device, dtype=dtype).requires_grad_() for n, x in shapes.items()}
    return made | {"dout": torch.randn(shapes["q"], device=given.device, dtype=dtype)}


def calls(attend: Callable[..., torch.Tensor], tensors: Tensors, passes: str) -> dict[str, Callable[[], Any]]:
    leaves = [tensors[name] for name in "qkv"]

    def forward() -> None:
        with torch.no_grad():
            attend(*leaves)

    def both() -> None:
        torch.autograd.grad(attend(*leaves), leaves, tensors["dout"])

    found = {"forward": forward, "both": both}
    return {{"both": "forward + backward"}.get(name, name): found[name] for name in passes.split(",")}


def slowest(milliseconds: float, device: str) -> float:
    found = torch.tensor([milliseconds], device=device, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def measured(given: argparse.Namespace, timed: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median milliseconds of the slowest rank, call by call."""
    clock = Clock(given.device == "cuda")
    found = {}
    for name, call in timed.items():
        for _ in range(2):
            clock(call)
        times = [slowest(clock(call), given.device) for _ in range(given.repetitions)]
        found[name] = statistics.median(times)
    return found


def rank_of(rank: int, given: argparse.Namespace, store: str) -> None:
    if given.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        tessera.set_threads(1)
        torch.set_num_threads(1)
    backend = "nccl" if given.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=given.ranks)
    options = {"causal": True} | ({"window": (given.window - 1, 0)} if given.window else {})
    rows: dict[str, dict[str, float]] = {}
    if given.alone:
        # every rank alone, at the same time: they share power as they will later
        attend = tessera.nsa if given.nsa else lambda q, k, v: tessera.attention(q, k, v, **options)
        whole = drawn(given, given.seqlen, 0)
        rows["one GPU" if given.device == "cuda" else "one process"] = measured(
            given, calls(attend, whole, given.passes)
        )
        del whole
    told: dict[str, Any] = {}
    heads_q, heads_kv = map(int, given.heads.split("/"))
    multiple = tile_of(PRESETS["strict"], heads_q, heads_kv) if given.nsa else 1
    for method in ["all_gather"] if given.nsa else given.methods.split(","):
        grid = None
        if method == "two_level":
            grid = init_device_mesh(given.device, (given.ranks // given.inner, given.inner))
        cp = context_parallel(grid, seqlen=given.seqlen, balance=given.balance, method=method, multiple=multiple)
        tensors = drawn(given, cp.layout.rows(rank), 1 + rank)
        attend = cp.nsa if given.nsa else lambda q, k, v, cp=cp: cp.attention(q, k, v, **options)
        rows[method] = measured(given, calls(attend, tensors, given.passes))
        told[method] = {} if given.nsa else model_of(cp, tensors, given)
        del tensors
    if rank == 0:
        report(given, rows, told)
    dist.destroy_process_group()


def model_of(cp: ContextParallel, tensors: Tensors, given: argparse.Namespace) -> dict[str, Any]:
    """What docs/context-parallel.md's model says of the forward."""
    window = (given.window - 1, 0) if given.window else None
    found = cp.explain(*(tensors[name] for name in "qkv"), causal=True, window=window)
    method = cp.method_of(*(tensors[name] for name in "qkv"), Mask(given.window - 1 if given.window else None, 0))
    return found[method]._asdict() if method in found else {}


def report(given: argparse.Namespace, rows: dict[str, dict[str, float]], told: dict[str, Any]) -> None:
    alone = next(iter(rows.values())) if given.alone else {}
    device = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    mask = f"window of {given.window}" if given.window else "causal"
    if given.nsa:
        mask = "native sparse attention"
    print(f"{given.seqlen} tokens, {given.heads} heads of {given.dim}, {mask}, {given.ranks} ranks, {device}\n")
    passes = list(next(iter(rows.values())))
    print("| | " + " | ".join(f"{what}, ms | of ideal" for what in passes) + " |\n|" + "---|" * (1 + 2 * len(passes)))
    for name, times in rows.items():
        shares = ["" if times is alone or not alone else f"{alone[w] / given.ranks / times[w]:.3f}" for w in passes]
        cells = [f"{times[what]:.2f} | {share}" for what, share in zip(passes, shares, strict=True)]
        print(f"| {name} | {' | '.join(cells)} |")
    if given.json:
        write_json(given, rows, told, mask)


def write_json(given: argparse.Namespace, rows: dict[str, dict[str, float]], told: dict[str, Any], mask: str) -> None:
    """A row for each method, behind those that the file has."""
    device = f"{given.ranks} {torch.cuda.get_device_name()}" if given.device == "cuda" else "cpu"
    machine = {
        "device": device,
        "version": tessera.__version__,
        "peers": {"torch": f"torch {torch.__version__}"},
        "date": datetime.date.today().isoformat(),
    }
    found = json.loads(given.json.read_text()) if given.json.exists() else {"machine": machine, "rows": []}
    if found["machine"] != machine:
        raise ValueError(f"--json: got {given.json}, of {found['machine']}; want one of {machine}")
    words = {"seqlen": given.seqlen, "heads": given.heads, "dim": given.dim, "mask": mask, "ranks": given.ranks}
    alone = next(iter(rows.values())) if given.alone else {}
    for name, times in rows.items():
        row: dict[str, Any] = {**words, "method": name, "milliseconds": times}
        if alone and times is not alone:
            row["of_ideal"] = {what: alone[what] / given.ranks / times[what] for what in alone}
        if told.get(name):
            row["model"] = told[name]
        found["rows"].append(row)
    given.json.write_text(json.dumps(found, indent=1) + "\n")


def main() -> int:
    given = arguments()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_of, (given, str(Path(folder) / "store")), nprocs=given.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
