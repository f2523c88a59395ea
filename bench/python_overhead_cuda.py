#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the host time of a call on CUDA tensors: how long Python is busy until the call returns.

usage: bench/python_overhead_cuda.py [--json FILE] [--calls N] [--repetitions N] [--parts]
128 tokens, 4 heads of 64 in bf16: the GPU is done before the host is. Each repetition times the calls of one kind in a
row, then waits; the mean of a repetition is one number, their median is told. Peers: torch's
scaled_dot_product_attention, by torch's choice and by its flash-attention and cuDNN backends, and flash-attn's function
where it is installed. --parts times the steps of one call too, and an autograd function that computes nothing: less
than that takes no call of torch with gradients.
Needs the tessera package and torch with a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tessera
import torch
import torch.nn.functional as F
from tessera import _core
from tessera._arguments import parse
from tessera._execute import forward_route
from tessera.compat.flash_attn_2 import flash_attn_func
from tessera.torch import autograd, operators
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPE = (1, 128, 4, 64)
BACKENDS = {"torch SDPA, flash": SDPBackend.FLASH_ATTENTION, "torch SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION}
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
    for name in ("torch SDPA", *BACKENDS):
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


def parts() -> Calls:
    """The steps of a call, from the outside in."""
    q, k, v = tensors(False)
    leaves = tensors(True)
    dout = torch.randn_like(q)
    call = parse(q, k, v)
    signature = operators.signature_of(q, k, v, (), "", call.features, call.sizes)
    forward = operators.forward_run(signature, 0, False)
    out, lse = operators.forward_run(signature, 0, True)(q, k, v)
    backward = operators.backward_run(signature, q.dtype, False, False, 0)
    plan = _plan(signature)
    stream = torch.cuda.current_stream().cuda_stream
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda") if plan.workspace_bytes else None
    return {
        "a function that computes nothing, with gradients": lambda: torch.autograd.grad(
            _Nothing.apply(*leaves), leaves, dout
        ),
        "parse": lambda: parse(q, k, v),
        "is_plain": lambda: autograd.is_plain(q, k, v, ()),
        "forward: run that makes its output": lambda: forward(q, k, v),
        "forward: plan.run": lambda: plan.run(("q", "k", "v", "o"), (q, k, v, out), stream=stream, workspace=workspace),
        "backward: run that makes its outputs": lambda: backward(q, k, v, out, lse, dout),
        "one output": lambda: torch.empty_like(q),
        "current stream": lambda: torch._C._cuda_getCurrentRawStream(0),
    }


def _plan(signature: operators.Signature) -> _core.Plan:
    """The plan of a forward without an LSE."""
    shapes = (signature.q, signature.k, signature.v, ())
    features, sizes, dtypes = signature.features, signature.sizes, signature.dtypes
    return forward_route(features, (), sizes, *shapes, dtypes, None, 0, signature.device).plan


def time_all(measured: Calls, count: int, repetitions: int) -> dict[str, float]:
    """Median over the repetitions of the mean µs of a call."""
    times: dict[str, list[float]] = {name: [] for name in measured}
    for repetition in range(repetitions + 1):
        for name, call in measured.items():
            backend = next((BACKENDS[peer] for peer in BACKENDS if name.endswith(peer)), None)
            chosen = contextlib.nullcontext() if backend is None else sdpa_kernel(backend)
            with chosen, torch.set_grad_enabled("gradients" in name):
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
        print(f"{name:48} {us:7.2f} µs")
    if options.json:
        versions = {"python": sys.version.split()[0], "torch": torch.__version__, "tessera": tessera.__version__}
        told = {"device": torch.cuda.get_device_name(), "shape": SHAPE, "calls": options.calls, **versions, "us": times}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
