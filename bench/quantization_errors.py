#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures how far attention of quantised q, k and v is from double precision, beside bf16.

usage: bench/quantization_errors.py [--json FILE] [--lengths N ...] [--dim N] [--activations FILE] [--seed N]
Inputs: N(0, 1); the same with one element of 1000 ten times as large; the first set of a file of activations (tensors
q, k, v of (tokens, heads, dim), as tessera bench takes them), for each of its layers. Of the last 128 query rows over
all keys the relative L2 distance of out, and the largest distance of the LSE, from attention in double of the inputs
before they are quantised. Also, for N(0, 1), a needle: one key of 8 queries' own direction at depths of 0, 1/3 and 2/3,
and whether most of the weight that double gives it is there. Runs on the CPU, which computes in fp32 what 8 bits
stand for; needs the tessera package, torch and safetensors.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tessera
import torch
from torch import Tensor

ROWS = 128  # queries
NEEDLES = 8


class Inputs(NamedTuple):
    """(1, rows or keys, heads, dim), fp32."""

    q: Tensor
    k: Tensor
    v: Tensor


class Way(NamedTuple):
    """How operands are quantised; None for `kind`: bf16."""

    name: str
    kind: str | None
    descale: Any = "head"
    smooth: bool = False
    hadamard: bool = False


WAYS = (
    Way("bf16", None),
    Way("fp8, by head", "e4m3"),
    Way("fp8, by head, rotated", "e4m3", "head", False, True),
    Way("fp8, blocks of 64", "e4m3", 64),
    Way("fp8, by token", "e4m3", "token"),
    Way("int8, by head", "int8"),
    Way("int8, blocks of 64", "int8", 64),
    Way("int8, blocks of 64, smooth", "int8", 64, True),
    Way("int8, blocks of 64, smooth, rotated", "int8", 64, True, True),
    Way("int8, by token, smooth", "int8", "token", True),
)


def normal(length: int, dim: int, seed: int, outliers: bool) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for rows in (ROWS, length, length):
        x = torch.randn(1, rows, 2, dim, generator=generator)
        if outliers:
            x = torch.where(torch.rand(x.shape, generator=generator) < 0.001, 10 * x, x)
        made.append(x)
    return Inputs(*made)


def activations(file: str) -> dict[str, Inputs]:
    from safetensors.torch import load_file

    stored = load_file(file)
    names = sorted({name.rpartition(".")[0] for name in stored if name.endswith(("q", "k", "v"))})
    found = {}
    for name in names:
        q, k, v = (stored[f"{name}.{x}" if name else x].float()[None] for x in "qkv")
        found[name or "activations"] = Inputs(q[:, -ROWS:], k, v)
    return found


def exact(inputs: Inputs, causal: bool) -> tuple[Tensor, Tensor]:
    """out and LSE in double, a head at a time."""
    outs, lses = [], []
    group = inputs.q.shape[2] // inputs.k.shape[2]
    rows, keys = inputs.q.shape[1], inputs.k.shape[1]
    hidden = torch.arange(keys) > torch.arange(rows)[:, None] + keys - rows
    for head in range(inputs.q.shape[2]):
        q, k, v = inputs.q[0, :, head].double(), *(x[0, :, head // group].double() for x in inputs[1:])
        scores = q @ k.T * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(hidden, -torch.inf)
        lses.append(scores.logsumexp(-1))
        outs.append(scores.softmax(-1) @ v)
    return torch.stack(outs, 1)[None], torch.stack(lses)[None]


def attended(inputs: Inputs, way: Way, causal: bool) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"causal": causal, "return_lse": True, "out_dtype": torch.float32}
    if way.kind is None:
        return tessera.attention(*(x.bfloat16() for x in inputs), **options)
    shared = {"to": way.kind, "descale": way.descale, "hadamard": way.hadamard, "seed": 1}
    q = tessera.quantize(inputs.q, heads_kv=inputs.k.shape[2], **shared)
    k = tessera.quantize(inputs.k, smooth=way.smooth, **shared)
    options |= {"q_descale": q.descale, "k_descale": k.descale, "k_mean": k.mean, "descale": way.descale}
    v = inputs.v.bfloat16()
    if way.kind == "e4m3":
        v, options["v_descale"], *_ = tessera.quantize(inputs.v, descale=way.descale)
    return tessera.attention(q.values, k.values, v, **options)


def row(kind: str, inputs: Inputs, way: Way, want: tuple[Tensor, Tensor], causal: bool) -> dict[str, Any]:
    out, lse = (x.double() for x in attended(inputs, way, causal))
    return {
        "inputs": kind,
        "keys": inputs.k.shape[1],
        "dim": inputs.q.shape[-1],
        "by": way.name,
        "out_error": float((out - want[0]).norm() / want[0].norm()),
        "lse_error": float((lse - want[1]).abs().max()),
    }


def needles(length: int, dim: int, seed: int) -> list[dict[str, Any]]:
    """Query i looks for key i of eight that point its way, spread over a third of the keys behind each depth."""
    rows = []
    for third in range(3):
        inputs = normal(length, dim, seed + 1 + third, False)
        at = length * third // 3 + torch.arange(NEEDLES) * (length // (3 * NEEDLES))
        inputs.k[0, at] = 1.1 * inputs.q[0, :NEEDLES]
        inputs.v[0, :, :] *= 0.1
        inputs.v[0, at] = torch.eye(dim)[:NEEDLES, None]
        want, _ = exact(inputs, False)
        for way in WAYS:
            out, _ = attended(inputs, way, False)
            picked = [x[0, :NEEDLES, :, :NEEDLES].diagonal(dim1=0, dim2=2) for x in (out.double(), want)]
            share = float((picked[0] / picked[1]).min())
            rows.append({"inputs": f"needle at {third}/3", "keys": length, "dim": dim, "by": way.name, "share": share})
    return rows


def measured(arguments: argparse.Namespace, told: Callable[[dict[str, Any]], None]) -> None:
    sets: list[tuple[str, Inputs, bool]] = []
    for length in arguments.lengths:
        sets.append(("N(0, 1)", normal(length, arguments.dim, arguments.seed, False), False))
        sets.append(("outliers", normal(length, arguments.dim, arguments.seed, True), False))
    if arguments.activations:
        sets += [(name, inputs, True) for name, inputs in activations(arguments.activations).items()]
    for kind, inputs, causal in sets:
        want = exact(inputs, causal)
        for way in WAYS:
            told(row(kind, inputs, way, want, causal))
    for each in needles(max(arguments.lengths), arguments.dim, arguments.seed):
        told(each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 16384, 131072])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--activations", default="")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def told(each: dict[str, Any]) -> None:
        rows.append(each)
        print(*(f"{name}={value}" for name, value in each.items()), flush=True)

    measured(arguments, told)
    if arguments.json:
        machine = {
            "device": f"CPU {platform.machine()}",
            "version": tessera.__version__,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "peers": {"torch": torch.__version__},
        }
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
