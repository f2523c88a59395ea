#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures errors of gradients against double, where the rounding of O shows and where it does not.

usage: bench/gradient_errors.py [--device cpu|cuda] [--json FILE] [--length N] [--long N] [--dims N ...] [--seed N]
Inputs: N(0, 1); rows dominated by one key (scores times 8); keys that repeat, eight of a kind, likewise; long causal
rows. The errors of dq, dk and dv are the largest and the root mean square, divided by the largest and the root mean
square of the gradient in double. Tessera is measured with the residual of O and without. Its peers are torch's unfused
path, each backend of scaled_dot_product_attention that takes the tensors, and on a GPU FlashAttention-4 where it is
installed. The yardstick is an unfused backward in fp32 that rounds P, dP and dS to the type. The table that is printed
last has the largest and root-mean-square errors of each, divided by the yardstick's; the worst of the three gradients
counts. Needs the tessera package and torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tessera
import torch
import torch.nn.functional as F
from clock import machine
from report_tables import gradient_rows
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Gradients = tuple[Tensor, Tensor, Tensor]
YARDSTICK = "unfused, rounds P, dP, dS"
NAMES = ("dq", "dk", "dv")


class Inputs(NamedTuple):
    """(batch, seqlen, heads, dim) each."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    causal: bool


def make(kind: str, length: int, dim: int, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(1, length, 2, dim, generator=generator) for _ in range(4))
    if kind in ("dominated", "repeated"):
        q = q * 8
    if kind == "repeated":
        k = k[:, torch.arange(length) // 8 * 8]
    return Inputs(*(x.to(device, dtype) for x in (q, k, v, dout)), kind == "long causal")


def unfused(inputs: Inputs, dtype: torch.dtype, rounded: Callable[[Tensor], Tensor]) -> Gradients:
    """A head at a time, in `dtype`; `rounded` is what happens to P, dP and dS."""
    found: tuple[list[Tensor], ...] = ([], [], [])
    scale = inputs.q.shape[-1] ** -0.5
    for head in range(inputs.q.shape[2]):
        q, k, v, dout = (x[0, :, head].to(dtype) for x in inputs[:4])
        scores = q @ k.T * scale
        if inputs.causal:
            scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), float("-inf"))
        p = rounded(scores.softmax(-1))
        dp = rounded(dout @ v.T)
        ds = rounded(p * (dp - (p * dp).sum(-1, keepdim=True)))
        for gradients, gradient in zip(found, (ds @ k * scale, ds.T @ q * scale, p.T @ dout), strict=True):
            gradients.append(gradient)
    return tuple(torch.stack(gradients, 1)[None] for gradients in found)  # type: ignore[return-value]


def by_autograd(inputs: Inputs, attention: Callable[..., Tensor]) -> Gradients:
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    return torch.autograd.grad(attention(*leaves), leaves, inputs.dout)  # type: ignore[return-value]


def sdpa(inputs: Inputs, backend: SDPBackend) -> Gradients:
    def attention(*leaves: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in leaves)
        return F.scaled_dot_product_attention(q, k, v, is_causal=inputs.causal).transpose(1, 2)

    with sdpa_kernel(backend):
        return by_autograd(inputs, attention)


def flash_attention_4() -> Callable[[Inputs], Gradients] | None:
    """None where it is not installed."""
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return None

    def gradients(inputs: Inputs) -> Gradients:
        def attention(*leaves: Tensor) -> Tensor:
            out = flash_attn_func(*leaves, causal=inputs.causal)
            return out[0] if isinstance(out, tuple) else out

        return by_autograd(inputs, attention)

    return gradients


def measured(device: str, dtype: torch.dtype) -> dict[str, Callable[[Inputs], Gradients]]:
    def ours(keep: bool) -> Callable[[Inputs], Gradients]:
        return lambda x: by_autograd(x, lambda *qkv: tessera.attention(*qkv, causal=x.causal, keep_residual=keep))

    backends = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "torch math": SDPBackend.MATH}
    if device != "cpu":
        backends |= {"SDPA cuDNN": SDPBackend.CUDNN_ATTENTION, "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION}
    peer = flash_attention_4() if device != "cpu" else None
    return {
        YARDSTICK: lambda x: unfused(x, torch.float32, lambda y: y.to(dtype).float()),
        "tessera": ours(True),
        "tessera, keep_residual=False": ours(False),
        **{name: lambda x, b=backend: sdpa(x, b) for name, backend in backends.items()},
        **({"FlashAttention-4": peer} if peer else {}),
    }


def errors(got: Gradients, want: Gradients, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    found = {}
    for name, ours, exact in zip(NAMES, got, want, strict=True):
        error = ours.to(dtype).double() - exact
        found[name] = {
            "largest": (error.abs().max() / exact.abs().max()).item(),
            "rms": (error.square().mean() / exact.square().mean()).sqrt().item(),
        }
    return found


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for dtype, word in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        for dim in options.dims:
            for kind in ("normal", "dominated", "repeated", "long causal"):
                length = options.long if kind == "long causal" else options.length
                inputs = make(kind, length, dim, dtype, options.device, options.seed)
                want = unfused(inputs, torch.float64, lambda x: x)
                for name, gradients in measured(options.device, dtype).items():
                    row = {"inputs": kind, "dtype": word, "d": dim, "length": length, "by": name}
                    try:
                        row["errors"] = errors(gradients(inputs), want, dtype)
                    except RuntimeError as error:  # a backend that does not take them, or without a kernel here
                        row["refused"] = str(error).splitlines()[0]
                    found.append(row)
                    print(row, file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--length", type=int, default=1024, help="queries and keys")
    parser.add_argument("--long", type=int, default=4096, help="those of long causal rows")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128], help="head dims")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = rows(options)
    if options.json:
        of = machine(options.device)
        options.json.write_text(json.dumps({"machine": of, "rows": found}, indent=1) + "\n")
    print(gradient_rows(found))


if __name__ == "__main__":
    main()
