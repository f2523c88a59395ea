#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small byte-level GPT on this repository's own text twice, with Tessera's attention and with torch's SDPA.

Same seed, same batches, same everything else: what the loss curves differ by is what the two attentions differ by.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import tessera
import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "gpt"))

from model import GPT, Attention, Config, initialise, rotary_tables, rotate, save  # noqa: E402

SUFFIXES = {".md", ".cpp", ".h", ".py"}


@dataclass
class Run:
    """One training: losses in nats per byte, one for each step; bits per byte of the held-out files at the end."""

    losses: list[float]
    held_out_bits_per_byte: float
    seconds_per_step: float  # the median


def corpus(root: Path) -> tuple[Tensor, Tensor, int]:
    """Text to train on and held-out text (every tenth file) as uint8, and the number of files.

    The text is that of the files under root, but for build folders and hidden ones.
    """
    files = [
        file
        for file in sorted(root.rglob("*"))
        if file.suffix in SUFFIXES
        and file.is_file()
        and not any(part.startswith(".") or part == "build" for part in file.relative_to(root).parts)
    ]
    texts = [file.read_bytes() for file in files]
    train = b"\n".join(text for place, text in enumerate(texts) if place % 10)
    held_out = b"\n".join(text for place, text in enumerate(texts) if not place % 10)
    return *(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out)), len(files)


def batches(text: Tensor, batch: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (batch, context) bytes and those that follow each, int64, from random places."""
    generator = torch.Generator().manual_seed(seed)
    within = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        window = text[starts + within].long()
        yield window[:, :-1], window[:, 1:]


def attentions(config: Config) -> dict[str, Attention]:
    """Causal attention over whole windows, without a cache."""
    tables = rotary_tables(config, config.trained_context)

    def rotated(*tensors: Tensor) -> list[Tensor]:
        return [rotate(x, tables[0][: x.shape[1]], tables[1][: x.shape[1]]) for x in tensors]

    def with_tessera(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = rotated(q, k)
        return tessera.attention(q, k, v, causal=True)

    def with_sdpa(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (*rotated(q, k), v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    return {"Tessera": with_tessera, "torch SDPA": with_sdpa}


def loss_of(model: GPT, attention: Attention, tokens: Tensor, following: Tensor) -> Tensor:
    """Mean nats per byte."""
    return F.cross_entropy(model(tokens, attention).flatten(0, 1).float(), following.flatten())


@torch.no_grad()
def held_out_bits(model: GPT, attention: Attention, text: Tensor, context: int) -> float:
    """Bits per byte of the first 64 windows of held-out text."""
    windows = text[: min(64, (len(text) - 1) // context) * context + 1].long()
    tokens, following = (part.view(-1, context) for part in (windows[:-1], windows[1:]))
    parts = [
        float(loss_of(model, attention, t, f)) * len(t)
        for t, f in zip(tokens.split(16), following.split(16), strict=True)
    ]
    return sum(parts) / len(tokens) / math.log(2)


class Training:
    """One model on its way: AdamW, a warm-up of a tenth of the steps, then a half cosine to a tenth of the rate."""

    def __init__(self, config: Config, attention: Attention, text: Tensor, given: argparse.Namespace) -> None:
        self.model, self.attention = initialise(GPT(config), given.seed), attention
        self.batches = batches(text, given.batch, given.context, given.seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
        self.rate, self.steps = given.rate, given.steps
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self) -> None:
        done, warm = len(self.losses), max(1, self.steps // 10)
        cooled = max(0.0, (done - warm) / max(1, self.steps - warm))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min((done + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * cooled))
        tokens, following = next(self.batches)
        begin = time.perf_counter()
        loss = loss_of(self.model, self.attention, tokens, following)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(float(loss.detach()))
        self.seconds.append(time.perf_counter() - begin)


def train(trainings: dict[str, Training]) -> None:
    """All steps of all trainings, a step of each in turn, so that whatever else the machine does meets them alike."""
    steps = next(iter(trainings.values())).steps
    for step in range(steps):
        for training in trainings.values():
            training.step()
        if sys.stderr.isatty():
            losses = ", ".join(f"{name} {training.losses[-1]:.3f}" for name, training in trainings.items())
            print(f"\rstep {step + 1} of {steps}, loss: {losses}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)


def table(runs: dict[str, Run]) -> str:
    """Markdown: losses at some steps, then what each run came to, and how far apart two runs are."""
    steps = len(next(iter(runs.values())).losses)
    shown = sorted({1, *(step for step in (10, 30, 100, 200, 300, 500, 1000, 2000) if step < steps), steps})
    rows = [(str(step), [run.losses[step - 1] for run in runs.values()], 5) for step in shown]
    rows.append(("held out, bits per byte", [run.held_out_bits_per_byte for run in runs.values()], 4))
    rows.append(("ms per step, median", [run.seconds_per_step * 1e3 for run in runs.values()], 0))
    lines = [f"| step | {' | '.join(runs)} | apart |", "|---" * (len(runs) + 2) + "|"]
    for name, values, digits in rows:
        apart = f"{max(values) - min(values):.1e}" if digits and len(values) > 1 else ""
        lines.append(f"| {name} | {' | '.join(f'{value:.{digits}f}' for value in values)} | {apart} |")
    return "\n".join(lines)


def picture(runs: dict[str, Run], path: Path, what: str) -> None:
    """Loss curves above, how far they are apart below; the format is that of the path's suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(next(iter(runs.values())).losses) + 1)
    for (name, run), width, colour in zip(runs.items(), (2.6, 0.9), ("#56b4e9", "#000000"), strict=False):
        label = f"{name}: {run.held_out_bits_per_byte:.3f} bits per byte of held-out text"
        above.plot(steps, run.losses, label=label, lw=width, color=colour)
    every = zip(*(run.losses for run in runs.values()), strict=True)
    apart = [max(max(losses) - min(losses), 1e-9) for losses in every]
    below.plot(steps, apart, lw=0.9, color="#d55e00")
    above.set_ylabel("loss, nats per byte")
    above.legend(frameon=False, fontsize=8)
    above.set_title(what, fontsize=9)
    below.set_yscale("log")
    below.set_ylabel("apart")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def arguments() -> argparse.Namespace:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    words = "folder of .md, .cpp, .h and .py files"
    parser.add_argument("--text", type=Path, default=ROOT, metavar="FOLDER", help=words)
    parser.add_argument("--steps", type=int, default=300, help="of training, for each of the two")
    parser.add_argument("--batch", type=int, default=16, help="windows in a step")
    parser.add_argument("--context", type=int, default=256, help="bytes in a window")
    parser.add_argument("--dim", type=int, default=192, help="width; a multiple of 32, the size of a head")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=3e-3, help="largest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--threads", type=int, default=0, help="of torch and Tessera; 0: their own choice")
    parser.add_argument("--alone", action="store_true", help="Tessera only, in half the time")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="loss curves, .png or .svg (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every loss of both runs")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write Tessera's model, for examples/gpt/run.py")
    given = parser.parse_args()
    for name, least in (("steps", 1), ("batch", 1), ("context", 2), ("layers", 1), ("threads", 0)):
        if getattr(given, name) < least:
            parser.error(f"--{name}: got {getattr(given, name)}; want {least} or more")
    if given.dim < 32 or given.dim % 32:
        parser.error(f"--dim: got {given.dim}; want a multiple of 32")
    return given


def main() -> int:
    given = arguments()
    if given.threads:
        torch.set_num_threads(given.threads)
        tessera.set_threads(given.threads)
    heads = given.dim // 32
    config = Config(
        dim=given.dim,
        layers=given.layers,
        heads_q=heads,
        heads_kv=max(n for n in (1, 2) if heads % n == 0),
        head_dim=32,
        ffn=given.dim * 8 // 3 // 32 * 32,
        trained_context=given.context,
    )
    text, held_out, files = corpus(given.text)
    if min(len(text), len(held_out)) <= given.context:
        want = f"less than the {len(held_out)} bytes of held-out text"
        print(f"train.py: --context: got {given.context}; want {want}", file=sys.stderr)
        return 2
    trainings = {
        name: Training(config, attention, text, given)
        for name, attention in attentions(config).items()
        if name == "Tessera" or not given.alone
    }
    train(trainings)
    runs = {
        name: Run(t.losses, held_out_bits(t.model, t.attention, held_out, given.context), median(t.seconds))
        for name, t in trainings.items()
    }
    model = trainings["Tessera"].model
    if given.save:
        save(model, given.save)
    weights = sum(w.numel() for w in model.parameters())
    what = (
        f"{weights / 1e6:.1f} M weights, {len(text) / 1e6:.2f} MB of {files} files, "
        f"{given.batch} windows of {given.context} bytes a step"
    )
    print(f"{what}\n\n{table(runs)}")
    if given.json:
        given.json.write_text(json.dumps({name: asdict(run) for name, run in runs.items()}) + "\n")
    if given.picture:
        picture(runs, given.picture, what)
    return 0


if __name__ == "__main__":
    sys.exit(main())
