#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small byte-level GPT on this repository's own text, with Tessera's attention and with torch's SDPA.

Same seed, same batches, same everything else: what the loss curves differ by is what the attentions differ by. On the
CPU all is fp32; with --device cuda weights are fp32 and products are bf16, by torch.autocast.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median

import tessera
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "examples" / "gpt"), str(HERE)]

from context_parallel import Spread, in_processes  # noqa: E402
from model import GPT, Attention, Config, initialise, rotary_tables, rotate, save  # noqa: E402
from report import Run, Runs, merge_json, picture, table, write_json  # noqa: E402

SUFFIXES = {".md", ".cpp", ".h", ".py"}


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


def batches(text: Tensor, batch: int, context: int, seed: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (batch, context) bytes and those that follow each, int64, from random places."""
    generator = torch.Generator().manual_seed(seed)
    within = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        window = text[starts + within].to(device).long()
        yield window[:, :-1], window[:, 1:]


def attentions(config: Config, device: torch.device) -> dict[str, Attention]:
    """Causal attention over whole windows, without a cache."""
    tables = [table.to(device) for table in rotary_tables(config, config.trained_context)]

    def rotated(*tensors: Tensor) -> list[Tensor]:
        return [rotate(x, tables[0][: x.shape[1]], tables[1][: x.shape[1]]) for x in tensors]

    def with_tessera(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = rotated(q, k)
        return tessera.attention(q, k, v, causal=True)

    def with_sdpa(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (*rotated(q, k), v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def in_fp32(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(device.type, enabled=False), sdpa_kernel(SDPBackend.MATH):
            return with_sdpa(layer, q.float(), k.float(), v.float()).to(v.dtype)

    return {"Tessera": with_tessera, "torch SDPA": with_sdpa, "math in fp32": in_fp32}


def loss_of(model: GPT, attention: Attention, tokens: Tensor, following: Tensor) -> Tensor:
    """Mean nats per byte."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        logits = model(tokens, attention)
    return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


@torch.no_grad()
def held_out_bits(model: GPT, attention: Attention, text: Tensor, context: int, most: int = 64) -> float:
    """Bits per byte of the first windows of held-out text, `most` at most."""
    windows = text[: min(most, (len(text) - 1) // context) * context + 1].to(model.head.weight.device).long()
    tokens, following = (part.view(-1, context) for part in (windows[:-1], windows[1:]))
    parts = [
        float(loss_of(model, attention, t, f)) * len(t)
        for t, f in zip(tokens.split(16), following.split(16), strict=True)
    ]
    return sum(parts) / len(tokens) / math.log(2)


class Training:
    """One model on its way: AdamW, a warm-up of a tenth of the steps, then a half cosine to a tenth of the rate."""

    def __init__(
        self,
        config: Config,
        attention: Attention,
        text: Tensor,
        seed: int,
        given: argparse.Namespace,
        spread: Spread | None = None,
        model: GPT | None = None,
    ) -> None:
        self.seed, self.attention, self.spread = seed, attention, spread
        self.model = initialise(model or GPT(config), seed).to(given.device)
        self.batches = batches(text, given.batch, given.context, seed, given.device)
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
        if self.spread is None:
            loss = loss_of(self.model, self.attention, tokens, following)
        else:
            loss = self.spread.loss_of(self.model, self.spread.attention, tokens, following)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.spread is not None:
            loss = self.spread.add_up(self.model, loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(float(loss.detach()))  # waits for a GPU
        self.seconds.append(time.perf_counter() - begin)

    def run(self, held_out: Tensor, context: int, most: int = 64) -> Run:
        bits = held_out_bits(self.model, self.attention, held_out, context, most)
        return Run(self.seed, self.losses, bits, median(self.seconds))


def train(trainings: dict[str, list[Training]]) -> None:
    """All steps of all trainings, a step of each in turn, so that whatever else the machine does meets them alike."""
    each = [training for of_seeds in trainings.values() for training in of_seeds]
    steps = each[0].steps
    for step in range(steps):
        for training in each:
            training.step()
        if sys.stderr.isatty():
            losses = ", ".join(f"{name} {of_seeds[0].losses[-1]:.3f}" for name, of_seeds in trainings.items())
            print(f"\rstep {step + 1} of {steps}, loss: {losses}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)


def train_spread(given: argparse.Namespace, text: Tensor, held_out: Tensor) -> dict[str, object]:
    """A training in each of the processes of a group, whose ranks have some bytes of every window."""
    config = config_of(given)
    tables = [table.to(given.device) for table in rotary_tables(config, given.context)]
    spread = Spread(given.context, given.device, lambda x, rows: rotate(x, tables[0][rows], tables[1][rows]))
    attention = attentions(config, given.device)["Tessera"]
    training = Training(config, attention, text, given.seed, given, spread)
    for _ in range(given.steps):
        training.step()
    return asdict(training.run(held_out, given.context))


def config_of(given: argparse.Namespace) -> Config:
    heads = given.dim // given.head_dim
    return Config(
        dim=given.dim,
        layers=given.layers,
        heads_q=heads,
        heads_kv=max(n for n in (1, 2) if heads % n == 0),
        head_dim=given.head_dim,
        ffn=given.dim * 8 // 3 // 32 * 32,
        trained_context=given.context,
    )


def arguments() -> argparse.Namespace:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    words = "folder of .md, .cpp, .h and .py files, of which every tenth is held out"
    parser.add_argument("--text", type=Path, default=ROOT, metavar="FOLDER", help=words)
    parser.add_argument("--steps", type=int, default=300, help="of training, for each attention and seed")
    parser.add_argument("--batch", type=int, default=16, help="windows in a step")
    parser.add_argument("--context", type=int, default=256, help="bytes in a window")
    parser.add_argument("--dim", type=int, default=192, help="width; a multiple of --head-dim")
    parser.add_argument("--head-dim", type=int, default=32, help="a multiple of 8")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=3e-3, help="largest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--seeds", type=int, default=1, help="so many from --seed on: what chance does to the curves")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu, cuda or cuda:1")
    parser.add_argument("--threads", type=int, default=0, help="of torch and Tessera; 0: their own choice")
    parser.add_argument("--alone", action="store_true", help="Tessera only, in half the time")
    parser.add_argument("--judge", action="store_true", help="a third training, with attention by SDPA's math in fp32")
    words = "Tessera alone, and again with each window spread over N processes"
    parser.add_argument("--context-parallel", type=int, default=0, metavar="N", help=words)
    words = "train nothing: tell of the runs of these, of one training with other seeds"
    parser.add_argument("--merge", type=Path, nargs="+", metavar="JSON", help=words)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="loss curves, .png or .svg (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every loss of every run")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write Tessera's model, for examples/gpt/run.py")
    given = parser.parse_args()
    for name, least in (("steps", 1), ("batch", 1), ("context", 2), ("layers", 1), ("threads", 0), ("seeds", 1)):
        if getattr(given, name) < least:
            parser.error(f"--{name}: got {getattr(given, name)}; want {least} or more")
    if given.head_dim < 8 or given.head_dim % 8:
        parser.error(f"--head-dim: got {given.head_dim}; want a multiple of 8")
    if given.dim < given.head_dim or given.dim % given.head_dim:
        parser.error(f"--dim: got {given.dim}; want a multiple of {given.head_dim}")
    if given.context_parallel and (given.seeds > 1 or given.judge):
        parser.error("--context-parallel: got it with --seeds or --judge; want one seed and no judge")
    if given.alone and given.judge:
        parser.error("--judge: got it with --alone; want one of them")
    if given.device.type == "cuda" and given.context_parallel > torch.cuda.device_count():
        parser.error(f"--context-parallel: got {given.context_parallel}; want at most the GPUs here")
    known = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(given.device.type, 0)
    if (given.device.index or 0) >= known:
        parser.error(f"--device: got {given.device}; want cpu, or a cuda device that torch finds")
    return given


def main() -> int:
    given = arguments()
    if given.merge:
        try:
            runs, what, words = merge_json(given.merge)
        except (OSError, ValueError) as error:
            print(f"train.py: {error}", file=sys.stderr)
            return 2
        tell(given, runs, what, words)
        return 0
    if given.threads:
        torch.set_num_threads(given.threads)
        tessera.set_threads(given.threads)
    config = config_of(given)
    text, held_out, files = corpus(given.text)
    if min(len(text), len(held_out)) <= given.context:
        want = f"less than the {len(held_out)} bytes of held-out text"
        print(f"train.py: --context: got {given.context}; want {want}", file=sys.stderr)
        return 2
    wanted = [
        "Tessera",
        *([] if given.alone or given.context_parallel else ["torch SDPA"]),
        *(["math in fp32"] if given.judge else []),
    ]
    known = attentions(config, given.device)
    seeds = range(given.seed, given.seed + given.seeds)
    trainings = {name: [Training(config, known[name], text, seed, given) for seed in seeds] for name in wanted}
    train(trainings)
    runs = {name: [t.run(held_out, given.context) for t in of_seeds] for name, of_seeds in trainings.items()}
    if given.context_parallel:
        found = in_processes(given.context_parallel, given.device, train_spread, given, text, held_out)
        runs[f"Tessera, {given.context_parallel} ranks"] = [Run(**found)]
    model = trainings["Tessera"][0].model
    if given.save:
        save(model, given.save)
    weights = sum(w.numel() for w in model.parameters())
    what = (
        f"{weights / 1e6:.1f} M weights, {len(text) / 1e6:.2f} MB of {files} files, "
        f"{given.batch} windows of {given.context} bytes a step, {given.device.type}"
    )
    words = {name: x for name, x in vars(given).items() if isinstance(x, int | float)}
    machine = torch.cuda.get_device_name(given.device) if given.device.type == "cuda" else "cpu"
    tell(given, runs, what, {**words, "device": machine, "torch": torch.__version__})
    return 0


def tell(given: argparse.Namespace, runs: Runs, what: str, words: dict[str, object]) -> None:
    print(f"{what}\n\n{table(runs)}")
    if given.json:
        write_json(runs, given.json, what, words)
    if given.picture:
        picture(runs, given.picture, what)


if __name__ == "__main__":
    sys.exit(main())
