#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the host time of a call on CUDA tensors: how long Python is busy until the call returns.

usage: bench/python_overhead_cuda.py [--json FILE] [--calls N] [--repetitions N] [--parts]
128 tokens, 4 heads of 64 in bf16: the GPU is done before the host is. Each repetition times the calls of one kind in a
row, then waits; the mean of a repetition is one number, their median is told. Peer: torch's
scaled_dot_product_attention, and flash-attn's function where it is installed. --parts times the steps of one call too.
Needs the tessera package and torch with a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tessera
import torch
import torch.nn.functional as F
from tessera import _gpu
from tessera._arguments import parse
from tessera._libraries import library_of
from tessera.compat.flash_attn_2 import flash_attn_func
from tessera.torch import autograd, operators

SHAPE = (1, 128, 4, 64)
Calls = dict[str, Callable[[], object]]


def tensors(requires_grad: bool) -> list[torch.Tensor]:
    return [torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16, requires_grad=requires_grad) for _ in range(3)]


def calls() -> Calls:
    """Names that begin with "forward" are to be called where nothing is recorded."""
    plain, leaves = tensors(False), tensors(True)
    dout = torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16)
    functions = {"tessera.attention": lambda q, k, v: tessera.attention(q, k, v), "flash_attn_func": flash_attn_func}
    try:
        from flash_attn import flash_attn_func as theirs

        functions["flash-attn"] = theirs
    except ImportError:
        pass
    found: Calls = {}
    for name, function in functions.items():
        found[f"forward, {name}"] = lambda f=function: f(*plain)
        found[f"forward and gradients, {name}"] = lambda f=function: torch.autograd.grad(f(*leaves), leaves, dout)
    outer = dout.transpose(1, 2)
    heads_first = [x.detach().transpose(1, 2) for x in plain]
    found["forward, torch SDPA"] = lambda: F.scaled_dot_product_attention(*heads_first)
    found["forward and gradients, torch SDPA"] = lambda: torch.autograd.grad(
        F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves)), leaves, outer
    )
    return found


def parts() -> Calls:
    """The steps of a forward, from the inside out."""
    q, k, v = tensors(False)
    call = parse(q, k, v)
    told = ([], "", call.features, call.sizes, call.scalars)
    route = operators.forward_route(q, k, v, [], "", call.features, call.sizes, False)
    out, lse, _ = operators.attention_on_device(q, k, v, *told)
    arrays, library = (q, k, v, out, lse), library_of(q, "q")
    stream = library.stream(0)
    backward = operators._backward_route(
        call.features, "", call.sizes, q.shape, k.shape, v.shape, (), (q.dtype,) * 4, False, False, 0, 0
    )
    workspace = torch.empty(backward.plan.workspace_bytes, dtype=torch.uint8, device="cuda")
    upstream = (q, k, v, out, lse, torch.randn_like(out), *(torch.empty_like(x) for x in (q, k, v)))
    return {
        "parse": lambda: parse(q, k, v),
        "is_plain": lambda: autograd.is_plain(q, k, v, ()),
        "autograd.attention": lambda: autograd.attention(True, q, k, v, *told),
        "attention_on_device": lambda: operators.attention_on_device(q, k, v, *told),
        "forward_route": lambda: operators.forward_route(q, k, v, [], "", call.features, call.sizes, False),
        "two outputs": lambda: [
            q.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in route.made
        ],
        "run_on_gpu": lambda: _gpu.run_on_gpu(library, route.plan, route.bound, arrays, q, (0, 0, 0, 0)),
        "current stream": lambda: library.stream(0),
        "plan.run": lambda: route.plan.run(route.bound, arrays, 0, 0, 0, 0, stream=stream),
        "plan.run of the backward": lambda: backward.plan.run(
            backward.bound, upstream, 0, 0, 0, 0, stream=stream, workspace=workspace
        ),
        "workspace": lambda: torch.empty((backward.plan.workspace_bytes,), dtype=torch.uint8, device=q.device),
        "dlpack capsule": lambda: q.__dlpack__(),
    }


def time_all(measured: Calls, count: int, repetitions: int) -> dict[str, float]:
    """Median over the repetitions of the mean µs of a call."""
    times: dict[str, list[float]] = {name: [] for name in measured}
    for repetition in range(repetitions + 1):
        for name, call in measured.items():
            with torch.set_grad_enabled("gradients" in name):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(count):
                    call()
                if repetition:  # the first warms up
                    times[name].append((time.perf_counter() - begin) * 1e6 / count)
    torch.cuda.synchronize()
    return {name: round(statistics.median(each), 2) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--calls", type=int, default=2000, help="in a row")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--parts", action="store_true", help="the steps of a call too")
    options = parser.parse_args()
    sys.setswitchinterval(1)
    measured = calls() | (parts() if options.parts else {})
    times = time_all(measured, options.calls, options.repetitions)
    for name, us in times.items():
        print(f"{name:46} {us:7.2f} µs")
    if options.json:
        versions = {"python": sys.version.split()[0], "torch": torch.__version__, "tessera": tessera.__version__}
        told = {"device": torch.cuda.get_device_name(), "shape": SHAPE, "calls": options.calls, **versions, "us": times}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
