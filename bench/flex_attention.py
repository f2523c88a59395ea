#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times scores and masks written in Python beside torch's compiled flex_attention, on the CPU or a GPU.

usage: bench/flex_attention.py [--device cpu] [--lengths N...] [--heads N] [--dims N...] [--dtype NAME] [--threads N]
       [--repeat N] [--rows NAME...] [--json FILE]
On a CPU each call is timed N times, in turn with the others of its row, and the least time counts; on a GPU the
median of N rounds counts, each the median of 5 calls on cold caches. Compiling and block masks are not timed. torch's
flex_attention has no backward on the CPU, and neither pass where its compiler finds none. Beside masks that Tessera
has of its own ("causal", "window") the time of that one is told. Prints a Markdown table, times in ms. Needs the
tessera package, torch and a C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import tessera
import torch
import torch.nn.attention.flex_attention as flex

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests" / "python"), str(HERE / "peers")]
import expressions_zoo  # noqa: E402
import torch_cuda  # noqa: E402

ROWS = (
    *("causal", "window", "prefix", "document", "document causal", "neighbourhood", "dilated", "hash"),
    *("alibi", "relative bias", "softcap"),
)
# Of Tessera's own masks.
BUILT_IN = {
    "none": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (expressions_zoo.LARGE.window, 0)},
}
CALLS = 5
Call = Callable[[], Any]


def zoo(length: int, heads: int, device: str) -> dict[str, tuple[Any, Any]]:
    """Functions of the tests' zoo, whose scores are without masks here."""
    every = expressions_zoo.zoo(device, length, heads, expressions_zoo.LARGE)
    alone = {name: (score, None if score else mask) for name, (score, mask) in every.items() if name in ROWS}
    return {"none": (None, None), **{name: alone[name] for name in ROWS}}


def times(calls: dict[str, Call], repeat: int, device: str) -> dict[str, float]:
    """In ms, by name."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    flush = torch.empty(4 * torch_cuda.FLUSH_BYTES, dtype=torch.uint8, device=device) if device != "cpu" else None
    for repetition in range(repeat + 1):
        for name, call in calls.items():
            if flush is not None:
                taken = torch_cuda.timed(call, CALLS, flush) / 1e3
            else:
                begin = time.perf_counter()
                call()
                taken = 1e3 * (time.perf_counter() - begin)
            if repetition:  # the first warms up
                found[name].append(taken)
    return {name: min(each) if flush is None else statistics.median(each) for name, each in found.items()}


def calls_of(name: str, functions: tuple[Any, Any], length: int, dim: int, asked: Any) -> dict[str, Call]:
    """Tessera's, torch's and the built-in mask's forward, and gradients."""
    score, mask = functions
    shape = (1, asked.heads, length, dim)
    q, k, v = (torch.randn(shape, dtype=getattr(torch, asked.dtype), device=asked.device) for _ in range(3))
    lengths = (None, None, length, length)
    ours = None if mask is None else tessera.create_block_mask(mask, *lengths, device=asked.device)
    theirs = None if mask is None else flex.create_block_mask(mask, *lengths, device=asked.device)
    torch._dynamo.reset()
    compiled = torch.compile(flex.flex_attention)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dout = torch.randn_like(q)

    def forward() -> Any:
        with torch.no_grad():
            return tessera.flex_attention(q, k, v, score, ours)

    def torchs() -> Any:
        with torch.no_grad():
            return compiled(q, k, v, score, theirs)

    def gradients(out: Any) -> Call:
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def torch_lacks(what: str, error: RuntimeError) -> None:
        print(f"# {name}, {length}, {dim}: torch has no {what}: {str(error).splitlines()[0]}", file=sys.stderr)

    calls = {"forward": forward, "backward": gradients(tessera.flex_attention(*leaves, score, ours))}
    try:
        expected = torchs()
    except RuntimeError as error:
        torch_lacks("forward", error)
    else:
        torch.testing.assert_close(forward(), expected, atol=2e-2, rtol=2e-2)
        calls["torch"] = torchs
    if asked.device != "cpu":
        try:
            theirs_back = gradients(compiled(*leaves, score, theirs))
            theirs_back()
            calls["torch_backward"] = theirs_back
        except RuntimeError as error:
            torch_lacks("backward", error)
    if name in BUILT_IN:
        inner = [x.transpose(1, 2) for x in (q, k, v)]
        calls["built_in"] = lambda: tessera.attention(*inner, **BUILT_IN[name])
    return calls


def printed(row: dict[str, Any]) -> str:
    def cell(name: str) -> str:
        return f"{row[name]:.3g}" if name in row else ""

    def ratio(over: str, under: str) -> str:
        return f"{row[over] / row[under]:.2f}" if over in row else ""

    cells = [row["name"], str(row["length"]), str(row["dim"])]
    cells += [cell("forward"), cell("torch"), ratio("torch", "forward")]
    cells += [cell("backward"), cell("torch_backward"), ratio("torch_backward", "backward"), cell("built_in")]
    return f"| {' | '.join(cells)} |"


HEAD = ("score or mask", "length", "dim", "forward", "torch", "ratio", "backward", "torch", "ratio", "built in")


def machine_of(asked: Any) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if asked.device != "cpu" else "CPU",
        "date": date.today().isoformat(),
        "version": tessera.__version__,
        "peers": {"flex_attention": f"torch {torch.__version__}, {asked.dtype}"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("heads", 8), ("threads", 2), ("repeat", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048])
    parser.add_argument("--dims", type=int, nargs="+", default=[64])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", nargs="*", help="names of the table's rows; default all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    tessera.set_threads(asked.threads)
    torch.manual_seed(0)
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    rows = []
    for dim in asked.dims:
        for length in asked.lengths:
            for name, functions in zoo(length, asked.heads, asked.device).items():
                if asked.rows and name not in asked.rows:
                    continue
                found = times(calls_of(name, functions, length, dim, asked), asked.repeat, asked.device)
                found = {call: float(f"{ms:.4g}") for call, ms in found.items()}
                rows.append({"name": name, "length": length, "dim": dim, "heads": asked.heads, **found})
                print(printed(rows[-1]), flush=True)
                if asked.json:
                    asked.json.write_text(json.dumps({"machine": machine_of(asked), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
