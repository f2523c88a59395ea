#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what a call from Python costs beyond the C++ call: NumPy arrays, torch tensors, forward, backward.

usage: bench/python_overhead.py [--save | --json FILE] [--repetitions N]
The problem is so small that the library takes a microsecond or two, so that nearly all of a call is what Python adds. A
repetition times each call a hundred times in a row, one kind after the other, so that a drift of the machine meets all
alike. The C++ time is that of the same problem by `tessera bench` (build/release), before and after.
Needs the tessera package, numpy and torch. Writes bench/results/<machine>/python_overhead.json with --save.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tessera
import tessera.torch
import torch

ROOT = Path(__file__).resolve().parent.parent
COMMAND = ROOT / "build" / "release" / "tessera"
FORWARD = "attention sq=1 sk=8 hq=1 d=16"
BACKWARD = "attention pass=backward sq=1 sk=8 hq=1 d=16"
CALLS = 100  # in a row


def arrays():
    random = np.random.default_rng(0)
    return [random.standard_normal((1, length, 1, 16), dtype=np.float32) for length in (1, 8, 8)]


def calls():
    """By name: the call, whether a backward is part of it, and the overhead in µs that it may have (None: not said)."""
    q, k, v = arrays()
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    leaves = [x.clone().requires_grad_() for x in tensors]
    dout = torch.ones(1, 1, 1, 16)
    plan = tessera.plan(q, k, v)
    into = np.empty_like(q)
    operator = torch.ops.tessera.attention.default
    told = ([], "", "", (0, 0, 0), (0, 0, 0, 0))  # tensors, slots, features, sizes, scalars of a plain problem

    def operator_both():
        torch.autograd.grad(operator(*leaves, *told)[0], leaves, dout)

    def flash_attn_both():
        torch.autograd.grad(tessera.flash_attn_func(*leaves), leaves, dout)

    return {
        "plan(q, k, v, out=), NumPy": (lambda: plan(q, k, v, out=into), False, None),
        "flash_attn_func, NumPy": (lambda: tessera.flash_attn_func(q, k, v), False, 15),
        "torch operator": (lambda: operator(*tensors, *told), False, 35),
        "torch operator, recorded for autograd": (lambda: operator(*leaves, *told), False, 35),
        "torch operator and its gradient": (operator_both, True, 80),
        "flash_attn_func, torch": (lambda: tessera.flash_attn_func(*tensors), False, None),
        "flash_attn_func, torch, recorded for autograd": (lambda: tessera.flash_attn_func(*leaves), False, None),
        "flash_attn_func, torch, and its gradient": (flash_attn_both, True, None),
    }


def in_cpp():
    """What `tessera bench --save` writes for both passes on one thread, and the name of the machine's folder."""
    with tempfile.TemporaryDirectory() as folder:
        suite = Path(folder) / "suites" / "python_overhead.txt"
        suite.parent.mkdir()
        suite.write_text(f"{FORWARD}\n{BACKWARD}\n")
        words = [str(suite), "--threads", "1", "--save"]
        subprocess.run([str(COMMAND), "bench", *words], check=True, stdout=subprocess.DEVNULL)
        (file,) = Path(folder).glob("results/*/*.json")
        return json.loads(file.read_text()), file.parent.name


def time_all(measured, repetitions):
    """µs of one call, by name, a list of one for each repetition."""
    times = {name: [] for name in measured}
    for repetition in range(repetitions + 1):
        for name, (call, _, _) in measured.items():
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            if repetition:  # the first warms up
                times[name].append((time.perf_counter() - begin) * 1e6 / CALLS)
    return times


def measure(repetitions):
    tessera.set_threads(1)
    torch.set_num_threads(1)
    measured = calls()
    before, folder = in_cpp()
    times = time_all(measured, repetitions)
    after, _ = in_cpp()
    cpp = {
        row["pass"]: statistics.median((row["us"], again["us"]))
        for row, again in zip(before["rows"], after["rows"], strict=True)
    }
    rows = []
    for name, (_, backward, most) in measured.items():
        deciles = statistics.quantiles(times[name], n=10)
        us, alone = statistics.median(times[name]), cpp["forward"] + (cpp["backward"] if backward else 0)
        rows.append(
            {
                "problem": FORWARD,
                "call": name,
                "pass": "both" if backward else "forward",
                "us": round(us, 3),
                "spread": {"p10": round(deciles[0], 3), "p90": round(deciles[-1], 3)},
                "cpp_us": round(alone, 3),
                "overhead_us": round(us - alone, 3),
                "most_us": most,
                "repetitions": repetitions,
                "calls": CALLS,
                "isa": before["rows"][0]["isa"],
                "threads": 1,
            }
        )
    machine = after["machine"]
    machine["peers"] = {"python": f"Python {sys.version.split()[0]}, NumPy {np.__version__}, torch {torch.__version__}"}
    return {"machine": machine, "rows": rows}, folder


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--save", action="store_true", help="write bench/results/<machine>/python_overhead.json")
    parser.add_argument("--repetitions", type=int, default=201)
    options = parser.parse_args()
    results, folder = measure(options.repetitions)
    for row in results["rows"]:
        print(
            f"{row['call']:46} {row['us']:7.1f} µs ({row['spread']['p10']:.1f} to {row['spread']['p90']:.1f}), "
            f"in C++ {row['cpp_us']:.1f} µs: overhead {row['overhead_us']:.1f} µs"
            + (f", wanted {row['most_us']} at most" if row["most_us"] else "")
        )
    file = ROOT / "bench" / "results" / folder / "python_overhead.json" if options.save else options.json
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
