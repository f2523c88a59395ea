#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the host time of a call on CUDA tensors: how long Python is busy until the call returns.

usage: bench/python_overhead_cuda.py [--json FILE] [--calls N] [--repetitions N] [--parts] [--device cuda|cpu]
128 tokens, 4 heads of 64 in bf16: the GPU is done before the host is. Each repetition times the calls of one kind in a
row, then waits. The result is the median over the repetitions of the mean of a call, with the least and the most.
Peers: torch's scaled_dot_product_attention, by torch's choice and by its flash-attention and cuDNN backends, and
flash-attn's function where it is installed. --parts also times the steps of one call, and an autograd function that
computes nothing, which is what a call of torch with gradients takes at least.
Needs the tessera package and torch with a GPU; --device cpu is there to try the program, and times computing too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tessera
import torch
import torch.nn.functional as F
from clock import machine
from tessera._arguments import parse
from tessera._execute import forward_route, get_threads, shapes_of
from tessera.compat.flash_attn_2 import flash_attn_func
from tessera.torch import autograd, operators
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPE = (1, 128, 4, 64)
BACKENDS = {"torch SDPA, flash": SDPBackend.FLASH_ATTENTION, "torch SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION}
Calls = dict[str, Callable[[], object]]


def tensors(device: str, requires_grad: bool) -> list[torch.Tensor]:
    return [torch.randn(SHAPE, device=device, dtype=torch.bfloat16, requires_grad=requires_grad) for _ in range(3)]


def calls(device: str) -> Calls:
    """Names that begin with "forward" are to be called where nothing is recorded."""
    plain, leaves = tensors(device, False), tensors(device, True)
    dout = torch.randn(SHAPE, device=device, dtype=torch.bfloat16)
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
    for name in ("torch SDPA", *(BACKENDS if device == "cuda" else ())):
        found[f"forward, {name}"] = lambda: F.scaled_dot_product_attention(*heads_first)
        found[f"forward and gradients, {name}"] = lambda: torch.autograd.grad(
            F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves)), leaves, outer
        )
    return found


class _Nothing(torch.autograd.Function):
    """As many tensors made and saved as by a call of ours."""

    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = torch.empty_like(q), torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx, dout):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def parts(device: str) -> Calls:
    """The steps of a call, from the outside in."""
    q, k, v = tensors(device, False)
    leaves = tensors(device, True)
    dout = torch.randn_like(q)
    call = parse(q, k, v)
    signature = operators.signature_of(q, k, v, (), "", call.features, call.sizes)
    threads = get_threads() if device == "cpu" else 0
    forward = operators.forward_run(signature, threads, False)
    out, lse = operators.forward_run(signature, threads, True)(q, k, v)
    backward = operators.backward_run(signature, q.dtype, False, False, threads)
    shapes = shapes_of(call, q, k, v)
    plan = forward_route(call.features, shapes, signature.dtypes, None, threads, signature.device).plan
    found: Calls = {
        "a function that computes nothing, with gradients": lambda: torch.autograd.grad(
            _Nothing.apply(*leaves), leaves, dout
        ),
        "parse": lambda: parse(q, k, v),
        "is_plain": lambda: autograd.is_plain(q, k, v, ()),
        "forward: run that makes its output": lambda: forward(q, k, v),
        "backward: run that makes its outputs": lambda: backward(q, k, v, out, lse, dout),
        "one output": lambda: torch.empty_like(q),
    }
    bound = ("q", "k", "v", "o"), (q, k, v, out)
    if device == "cpu":
        return found | {"forward: plan.run": lambda: plan.run(*bound)}
    stream = torch.cuda.current_stream().cuda_stream
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda") if plan.workspace_bytes else None
    return found | {
        "forward: plan.run": lambda: plan.run(*bound, stream=stream, workspace=workspace),
        "current stream": lambda: torch._C._cuda_getCurrentRawStream(0),
    }


def time_all(measured: Calls, count: int, repetitions: int, wait: Callable[[], object]) -> list[dict[str, Any]]:
    """A row for each call, of the mean µs in each repetition: their median, and the least and the most."""
    times: dict[str, list[float]] = {name: [] for name in measured}
    for repetition in range(repetitions + 1):
        for name, call in measured.items():
            backend = next((BACKENDS[peer] for peer in BACKENDS if name.endswith(peer)), None)
            chosen = contextlib.nullcontext() if backend is None else sdpa_kernel(backend)
            with chosen, torch.set_grad_enabled("gradients" in name):
                wait()
                begin = time.perf_counter()
                for _ in range(count):
                    call()
                if repetition:  # the first warms up
                    times[name].append((time.perf_counter() - begin) * 1e6 / count)
    wait()
    return [
        {"call": name, "us": statistics.median(each), "least_us": min(each), "most_us": max(each)}
        for name, each in times.items()
    ]


def host() -> dict[str, Any]:
    """The processor that runs Python, and its version."""
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {"host": names[0] if names else "", "python": sys.version.split()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--calls", type=int, default=2000, help="in a row")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--parts", action="store_true", help="the steps of a call too")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    sys.setswitchinterval(1)
    device = options.device
    measured = calls(device) | (parts(device) if options.parts else {})
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    rows = time_all(measured, options.calls, options.repetitions, wait)
    for row in rows:
        print(f"{row['call']:48} {row['us']:7.2f} µs")
    if options.json:
        of = machine(device) | host() | {"shape": SHAPE, "calls": options.calls}
        options.json.write_text(json.dumps({"machine": of, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
