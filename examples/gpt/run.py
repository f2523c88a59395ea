#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a byte-level GPT over a paged KV cache with Tessera: bits per byte of a text, greedy continuation of prompts."""

from __future__ import annotations

import argparse
import json
import math
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import tessera
import torch
from attention import PagedAttention, TorchAttention
from model import GPT, load
from torch import Tensor

PROMPTS = ["import ", "def quicksort(items):\n    if len(items) <= 1:\n", "    for i in range("]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# (sequences, capacity in tokens) -> an attention with an empty cache
MakeAttention = Callable[[int, int], PagedAttention | TorchAttention]


@dataclass
class Results:
    """What one attention gave; rates in bytes per second (of decode by the median step), shares of time from 0 to 1."""

    bits_per_byte: float = math.nan
    prefill_rate: float = math.nan
    prefill_attention_share: float = math.nan
    decode_rate: float = math.nan
    decode_attention_share: float = math.nan
    texts: list[str] = field(default_factory=list)


def as_tokens(data: bytes) -> Tensor:
    """(1, bytes) int64"""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()[None]


def feed(model: GPT, attention: PagedAttention | TorchAttention, tokens: Tensor, chunk: int) -> Tensor:
    """Puts tokens (b, s) of the selected sequences through the model, `chunk` at a time; fp32 logits (b, s, 256)."""
    logits = []
    for piece in tokens.split(chunk, dim=1):
        logits.append(model(piece, attention).float())
        attention.advance(piece.shape[1])
    return torch.cat(logits, dim=1)


def score(model: GPT, make: MakeAttention, text: bytes, chunk: int, results: Results) -> None:
    """Bits per byte of text, all but the first of each window of the trained context; and the speed of prefill."""
    window, nats, predicted = model.config.trained_context, 0.0, 0
    seconds = attention_seconds = 0.0
    for start in range(0, len(text), window):
        tokens = as_tokens(text[start : start + window])
        if tokens.shape[1] < 2:
            continue
        attention = make(1, window)
        begin = time.perf_counter()
        logits = feed(model, attention, tokens, chunk)
        seconds += time.perf_counter() - begin
        attention_seconds += attention.seconds
        nats += float(torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum"))
        predicted += tokens.shape[1] - 1
    results.bits_per_byte = nats / predicted / math.log(2)
    results.prefill_rate = len(text) / seconds
    results.prefill_attention_share = attention_seconds / seconds


def generate(model: GPT, make: MakeAttention, prompts: list[bytes], count: int, chunk: int, results: Results) -> None:
    """The likeliest `count` bytes after each prompt: prompts one by one, then all sequences together, byte by byte."""
    attention = make(len(prompts), max(map(len, prompts)) + count)
    latest = []
    for row, prompt in enumerate(prompts):
        attention.select([row])
        latest.append(feed(model, attention, as_tokens(prompt), chunk)[:, -1].argmax(-1))
    attention.select(range(len(prompts)))
    written = [torch.stack(latest)]  # (b, 1)
    steps, attention_steps = [], []
    for _ in range(count - 1):
        attention.seconds = 0.0
        begin = time.perf_counter()
        written.append(feed(model, attention, written[-1], chunk).argmax(-1))
        steps.append(time.perf_counter() - begin)
        attention_steps.append(attention.seconds)
    results.texts = [bytes(row).decode("utf-8", "replace") for row in torch.cat(written, dim=1).tolist()]
    if count > 1:
        results.decode_rate = len(prompts) / median(steps)
        results.decode_attention_share = median(attention_steps) / median(steps)


def table(results: dict[str, Results]) -> str:
    lines = [f"{'':22}{'bits/byte':>10}{'prefill':>13}{'attention':>11}{'decode':>13}{'attention':>11}"]
    for name, r in results.items():
        lines.append(
            f"{name:22}{r.bits_per_byte:10.5f}{r.prefill_rate:9.0f} B/s{r.prefill_attention_share:11.0%}"
            f"{r.decode_rate:9.0f} B/s{r.decode_attention_share:11.0%}"
        )
    return "\n".join(lines)


def comparison(ours: Results, theirs: Results) -> bool:
    """Prints how far the two are apart. True if they agree: bits per byte to 4 digits after the point, text exactly."""
    apart = abs(ours.bits_per_byte - theirs.bits_per_byte)
    print(f"\nbits per byte: {apart:.1e} apart")
    agree = apart < 5e-5
    for mine, other in zip(ours.texts, theirs.texts, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)
        if mine != other:
            print(f"text: differs from byte {same} on: {mine[same:][:40]!r} and {other[same:][:40]!r}")
            agree = False
    if ours.texts == theirs.texts:
        print(f"greedy text: the same ({len(ours.texts)} prompts)")
    return agree


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--weights", required=True, metavar="FOLDER", help="folder of .safetensors as model.py names them"
    )
    parser.add_argument("--text", default=textwrap.__file__, metavar="FILE", help="text to score")
    parser.add_argument("--bytes", type=int, default=4096, help="how much of the text to score; 0: all")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="prompt to continue; may be repeated")
    parser.add_argument("--generate", type=int, default=200, metavar="N", help="bytes to write after each prompt")
    parser.add_argument(
        "--chunk", type=int, default=1024, help="most tokens of a prompt that go through the model at once"
    )
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a page of the cache")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights, activations and cache")
    parser.add_argument("--threads", type=int, default=0, help="of torch and of Tessera; 0: their own choice")
    parser.add_argument(
        "--compare", action="store_true", help="run torch SDPA too; exit code 1 if the two do not agree"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    given = parser.parse_args()
    for name, least in (("bytes", 0), ("generate", 1), ("chunk", 1), ("page_size", 1), ("threads", 0)):
        if getattr(given, name) < least:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(given, name)}; want {least} or more")
    if "" in (given.prompt or []):
        parser.error("--prompt: got an empty one; want at least one byte")
    return given


@torch.inference_mode()
def main() -> int:
    given = arguments()
    if given.threads:
        torch.set_num_threads(given.threads)
        tessera.set_threads(given.threads)
    dtype = DTYPES[given.dtype]
    try:
        model = load(given.weights, dtype)
        text = Path(given.text).read_bytes()[: given.bytes or None]
    except (OSError, ValueError) as problem:
        print(f"run.py: {problem}", file=sys.stderr)
        return 2
    if len(text) < 2:
        print(f"run.py: --text: got {len(text)} bytes; want at least 2", file=sys.stderr)
        return 2
    prompts = [prompt.encode() for prompt in given.prompt or PROMPTS]
    config = model.config
    print(
        f"{config.layers} layers of {config.dim}, {config.heads_q} query and {config.heads_kv} key heads of "
        f"{config.head_dim}, {sum(w.numel() for w in model.parameters()) / 1e6:.1f} M weights, {given.dtype}, "
        f"{torch.get_num_threads()} threads; {len(text)} bytes of {Path(given.text).name}\n"
    )
    makers: dict[str, MakeAttention] = {
        "Tessera, paged": lambda n, capacity: PagedAttention(config, n, capacity, dtype, given.page_size)
    }
    if given.compare:
        makers["torch SDPA"] = lambda n, capacity: TorchAttention(config, n, capacity, dtype)
    results = {name: Results() for name in makers}
    for name, make in makers.items():
        feed(model, make(1, 64), as_tokens(bytes(64)), 64)  # the first call plans and starts threads
        score(model, make, text, given.chunk, results[name])
        generate(model, make, prompts, given.generate, given.chunk, results[name])
    print(table(results))
    for prompt, answer in zip(prompts, next(iter(results.values())).texts, strict=True):
        print(f"\n--- {prompt.decode()!r}\n{prompt.decode()}{answer}")
    if given.json:
        Path(given.json).write_text(json.dumps({name: asdict(r) for name, r in results.items()}, indent=1) + "\n")
    return 0 if not given.compare or comparison(*results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
