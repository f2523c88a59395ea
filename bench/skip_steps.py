#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the steps of skip states: what they cost while nothing is skipped, and a workload that settles.

usage: bench/skip_steps.py [--only cost|workload] [--device cpu|cuda] [--json FILE] [--cost SxH ...]
       [--workload SxH ...] [--steps N] [--repeat N] [--thresholds T ...] [--masses M ...]
bf16, head dim 128, blocks of 128 × 128, one sequence of S tokens and H heads.
cost: dense attention, the full list as it is, and both rules with thresholds that keep every tile: step 0, which begins
anew, and a later step. They take turns; the median of the ratios of a turn counts.
workload: K = Q + 0.1 noise, all of Q and V gets 2% of fresh noise a step. One threshold of all steps, no warm-up. On a
GPU each step is a CUDA graph. The run is repeated, and the median of a step counts. Settled is the median of the last
half of the steps; steps to settle are those before the first one that takes at most 1.1 of that.
Prints two tables, last. Needs the tessera package and torch.
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
from clock import Call, Clock, machine
from report_skip import skip_steps_rows
from torch import Tensor

DIM, BLOCK = 128, (128, 128)
KEEPING = {"mass": (1e-9, 1e-9), "threshold": (-100.0, -100.0)}  # masses that a state stores are above the first
Row = dict[str, Any]


def shape_of(word: str) -> tuple[int, int]:
    tokens, _, heads = word.partition("x")
    return int(tokens), int(heads)


def state_of(q: Tensor, rule: str, ramp: tuple[float, float], steps: int) -> tessera.SkipState:
    shape = {"seqlen_q": q.shape[1], "seqlen_k": q.shape[1], "heads_q": q.shape[2]}
    return tessera.SkipState(**shape, rule=rule, ramp=ramp, steps=steps, warm_up=0, block=BLOCK, like=q)


def costs(tokens: int, heads: int, clock: Clock, a: argparse.Namespace) -> list[Row]:
    """Rows of one shape while every tile is computed."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, DIM, generator=generator).bfloat16().to(a.device) for _ in "qkv")
    states = {rule: state_of(q, rule, ramp, 2) for rule, ramp in KEEPING.items()}
    listed = states["mass"].tile_list(q)
    calls: dict[str, Call] = {
        "dense": clock.prepared(lambda: tessera.attention(q, k, v)),
        "listed": clock.prepared(lambda: tessera.attention(q, k, v, tiles=listed)),
    }
    for rule, state in states.items():
        state(q, k, v, step=0)  # compiles
        calls[f"{rule}, first step"] = clock.prepared(lambda s=state: s(q, k, v, step=0), False)
        calls[rule] = clock.prepared(lambda s=state: s(q, k, v, step=s.next_step), False)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(a.repeat):
        for name, call in calls.items():
            times[name].append(clock.microseconds(call))
    for state in states.values():
        if state.active != 1:
            raise RuntimeError(f"active: got {state.active} of the tiles; want all of them, or the times are of less")
    rows = []
    for name, found in times.items():
        ratios = [own / dense for own, dense in zip(found, times["dense"], strict=True)]
        row = {"kind": "cost", "tokens": tokens, "heads": heads, "call": name, "us": statistics.median(found)}
        rows.append({**row, "over_dense": statistics.median(ratios)})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def near(tokens: int, heads: int, a: argparse.Namespace) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v of each step."""
    generator = torch.Generator().manual_seed(0)

    def noise() -> Tensor:
        return torch.randn(1, tokens, heads, DIM, generator=generator)

    q, apart, v = noise(), 0.1 * noise(), noise()
    steps = []
    for _ in range(a.steps):
        steps.append(tuple(x.bfloat16().to(a.device) for x in (q, q + apart, v)))
        q, v = q + 0.02 * noise(), v + 0.02 * noise()
    return steps  # type: ignore[return-value]


def distances(out: Tensor, dense: Tensor) -> tuple[float, float]:
    """Relative L2 and cosine."""
    x, y = out.double().flatten(), dense.double().flatten()
    return ((x - y).norm() / y.norm()).item(), (x @ y / (x.norm() * y.norm())).item()


def settle(times: list[float]) -> tuple[float, int]:
    settled = statistics.median(times[len(times) // 2 :])
    return settled, next(step for step, us in enumerate(times) if us <= 1.1 * settled)


def workload(tokens: int, heads: int, clock: Clock, a: argparse.Namespace) -> list[Row]:
    """Rows of one shape, a rule and threshold each."""
    inputs = near(tokens, heads, a)
    dense = [clock.prepared(lambda x=each: tessera.attention(*x), not n) for n, each in enumerate(inputs)]
    dense_us = statistics.median(clock.microseconds(call) for _ in range(a.repeat) for call in dense)
    del dense
    settings = [("threshold", t) for t in a.thresholds] + [("mass", m) for m in a.masses]
    rows = []
    for rule, threshold in settings:
        state = state_of(inputs[0][0], rule, (threshold, threshold), a.steps)
        found: Row = {"active": [], "relative_l2": [], "cosine": [], "us": []}
        for step, each in enumerate(inputs):
            found["active"].append(state.active if step else 1.0)
            error, cosine = distances(state(*each, step=step), tessera.attention(*each))
            found["relative_l2"].append(error)
            found["cosine"].append(cosine)
        calls = [clock.prepared(lambda s=state, n=n, x=x: s(*x, step=n), False) for n, x in enumerate(inputs)]
        times = [[clock.microseconds(call) for call in calls] for _ in range(a.repeat)]
        found["us"] = [statistics.median(of_step) for of_step in zip(*times, strict=True)]
        settled, steps = settle(found["us"])
        row = {"kind": "workload", "tokens": tokens, "heads": heads, "rule": rule, "threshold": threshold}
        row |= {"dense_us": dense_us, "settled_us": settled, "steps_to_settle": steps, "by_step": found}
        rows.append(row)
        shown = {name: value for name, value in row.items() if name != "by_step"}
        print(shown, {name: values[-1] for name, values in found.items()}, file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["cost", "workload"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    every = ["1024x16", "2048x16", "4096x16", "8192x16", "32768x4"]
    parser.add_argument("--cost", nargs="+", type=shape_of, default=list(map(shape_of, every)))
    parser.add_argument("--workload", nargs="+", type=shape_of, default=[(4096, 16)])
    parser.add_argument("--steps", type=int, default=20, help="of the workload")
    parser.add_argument("--repeat", type=int, default=11)
    parser.add_argument("--thresholds", nargs="*", type=float, default=[-0.5, -1.0, -2.0, -3.0, -5.0, -7.0, -10.0])
    parser.add_argument("--masses", nargs="*", type=float, default=[0.003, 0.006, 0.012, 0.025, 0.05, 0.1])
    a = parser.parse_args()
    clock, rows = Clock(a.device), []
    for shape in a.cost if a.only != "workload" else []:
        rows += costs(*shape, clock, a)
    for shape in a.workload if a.only != "cost" else []:
        rows += workload(*shape, clock, a)
    if a.json:
        a.json.write_text(json.dumps({"machine": machine(a.device), "rows": rows}, indent=1) + "\n")
    print(skip_steps_rows(rows))


if __name__ == "__main__":
    main()
