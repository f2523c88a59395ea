#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small byte-level GPT on long windows twice: with dense attention and with native sparse attention.

Same seed, same weights at the start, same batches. Each training has a process of its own, one after the other, so that
its peak memory is its own. On the CPU all is fp32; with --device cuda weights are fp32 and products are bf16.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import tessera
import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "examples" / folder) for folder in ("gpt", "train")]

from model import GPT, Config, rotary_tables, rotate  # noqa: E402
from report import Run, table  # noqa: E402
from train import Training, attentions, corpus  # noqa: E402

DENSE, SPARSE = "dense", "NSA"


class SparseGPT(GPT):
    """The GPT with a weight of gates for each layer, whose attention is `tessera.nsa`. Gates begin at 1/2."""

    def __init__(self, config: Config, device: torch.device, options: dict[str, Any]) -> None:
        super().__init__(config)
        self.gates = nn.ParameterList(
            nn.Parameter(torch.zeros(config.heads_q, 3, config.head_dim)) for _ in range(config.layers)
        )
        self.options = options
        self.tables = [table.to(device) for table in rotary_tables(config, config.trained_context)]
        self.chosen: dict[int, tessera.TileList] | None = None  # by layer, while `choices` is at work

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (rotate(x, self.tables[0][: x.shape[1]], self.tables[1][: x.shape[1]]) for x in (q, k))
        gates = self.gates[layer].to(q.dtype)
        if self.chosen is None:
            return tessera.nsa(q, k, v, gate_weight=gates, **self.options)
        out, self.chosen[layer] = tessera.nsa(q, k, v, gate_weight=gates, return_tiles=True, **self.options)
        return out

    @contextmanager
    def choices(self) -> Iterator[dict[int, tessera.TileList]]:
        """Keeps the blocks that each layer's selection chooses in a forward."""
        self.chosen = {}
        try:
            yield self.chosen
        finally:
            self.chosen = None


@dataclass
class Trained:
    """What one training came to. Memory in MiB: the peak, and what there was before the first step."""

    run: Run
    peak_memory: float
    memory_before: float
    chosen: list[numpy.ndarray]  # of NSA, by layer: bool (key heads, tiles of queries, blocks of keys)


def peak_memory(device: torch.device) -> float:
    """MiB: tensors' on a GPU, the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # KiB on Linux


def trained(name: str, given: argparse.Namespace) -> Trained:
    """One training from beginning to end, in the process that calls it."""
    if given.threads:
        torch.set_num_threads(given.threads)
        tessera.set_threads(given.threads)
    config = config_of(given)
    text, held_out, _ = corpus(given.text)
    if name == DENSE:
        model, attention = GPT(config), attentions(config, given.device)["Tessera"]
    else:
        model = SparseGPT(config, given.device, options_of(given))
        attention = model.attention
    training = Training(config, attention, text, given.seed, given, model=model)
    before = peak_memory(given.device)
    for step in range(given.steps):
        training.step()
        if sys.stderr.isatty():
            loss = training.losses[-1]
            print(f"\r{name}: step {step + 1} of {given.steps}, loss {loss:.3f}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    peak = peak_memory(given.device)
    run = training.run(held_out, given.context, given.held_out)
    return Trained(run, peak, before, choices(model, held_out, given) if name == SPARSE else [])


@torch.no_grad()
def choices(model: SparseGPT, text: Tensor, given: argparse.Namespace) -> list[numpy.ndarray]:
    """Which blocks each layer's key heads chose in the first window of a text."""
    tokens = text[: given.context].to(given.device).long()[None]
    with model.choices() as chosen, torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        model(tokens, model.attention)
    lists = [chosen[layer] for layer in sorted(chosen)]
    return [tiles.to_mask(key_blocks=-(-given.context // tiles.block[1]))[0].cpu().numpy() for tiles in lists]


def picture(chosen: list[numpy.ndarray], path: Path, title: str) -> None:
    """A map for each key head of each layer; the format is that of the path's suffix."""
    from tessera import plot

    names = [f"layer {layer}, key head {head}" for layer, heads in enumerate(chosen) for head in range(len(heads))]
    figure = plot.tiles(numpy.concatenate(chosen), names=names, title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def costs(results: dict[str, Trained], tokens: int) -> str:
    """Markdown: tokens a second and memory of each training, and how far the last tenth's losses are apart."""
    both = list(results.values())
    rows = [
        ("tokens a second, median step", [tokens / one.run.seconds_per_step for one in both]),
        ("peak memory, MiB", [one.peak_memory for one in both]),
        ("of it before the first step", [one.memory_before for one in both]),
    ]
    lines = [f"| | {' | '.join(results)} | {SPARSE} / {DENSE} |", "|---" * (len(both) + 2) + "|"]
    for name, values in rows:
        lines.append(f"| {name} | {' | '.join(f'{x:.0f}' for x in values)} | {values[1] / values[0]:.2f} |")
    last = max(1, len(both[0].run.losses) // 10)
    means = [sum(one.run.losses[-last:]) / last for one in both]
    apart = means[1] / means[0] - 1
    blocks = numpy.concatenate(results[SPARSE].chosen)
    share = f"{blocks.sum(-1).mean():.1f} of {blocks.shape[-1]} blocks, the mean over tiles of queries and heads"
    lines += ["", f"{SPARSE} selects {share}."]
    lines.append(f"Mean loss of the last {last} steps: {means[0]:.4f} and {means[1]:.4f} nats a byte, {apart:+.2%}.")
    return "\n".join(lines)


def config_of(given: argparse.Namespace) -> Config:
    """Up to four query heads share a key head."""
    heads = given.dim // given.head_dim
    return Config(
        dim=given.dim,
        layers=given.layers,
        heads_q=heads,
        heads_kv=heads // max(group for group in (1, 2, 4) if heads % group == 0),
        head_dim=given.head_dim,
        ffn=given.dim * 8 // 3 // 32 * 32,
        trained_context=given.context,
    )


def options_of(given: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `tessera.nsa`: those that were given, the preset's otherwise."""
    named = {"top": given.top, "window": given.window}
    return {"preset": given.preset, **{name: value for name, value in named.items() if value is not None}}


def arguments() -> argparse.Namespace:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    words = "folder of .md, .cpp, .h and .py files, of which every tenth is held out"
    parser.add_argument("--text", type=Path, default=ROOT, metavar="FOLDER", help=words)
    parser.add_argument("--steps", type=int, default=100, help="of each training")
    parser.add_argument("--batch", type=int, default=1, help="windows in a step")
    parser.add_argument("--context", type=int, default=16384, help="bytes in a window")
    parser.add_argument("--dim", type=int, default=256, help="width; a multiple of --head-dim")
    parser.add_argument("--head-dim", type=int, default=64, help="a multiple of 8")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=3e-3, help="largest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    words = "docs/nsa.md says what they are; reference leaks later tokens, so that its loss says little"
    parser.add_argument("--preset", default="strict", choices=("strict", "paper", "reference"), help=words)
    parser.add_argument("--top", type=int, metavar="K", help="selected blocks; the preset's if it is not given")
    parser.add_argument("--window", type=int, metavar="KEYS", help="of the window branch; the preset's likewise")
    parser.add_argument("--held-out", type=int, default=4, metavar="N", help="windows of held-out text at the end")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu, cuda or cuda:1")
    parser.add_argument("--threads", type=int, default=0, help="of torch and Tessera; 0: their own choice")
    words = "blocks that were chosen in a window of held-out text, .png or .svg (needs matplotlib)"
    parser.add_argument("--picture", type=Path, metavar="FILE", help=words)
    parser.add_argument("--json", type=Path, metavar="FILE", help="losses, times and memory")
    given = parser.parse_args()
    for name, least in (("steps", 1), ("batch", 1), ("context", 2), ("layers", 1), ("threads", 0), ("held_out", 1)):
        if getattr(given, name) < least:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(given, name)}; want {least} or more")
    if given.head_dim < 8 or given.head_dim % 8:
        parser.error(f"--head-dim: got {given.head_dim}; want a multiple of 8")
    if given.dim < given.head_dim or given.dim % given.head_dim:
        parser.error(f"--dim: got {given.dim}; want a multiple of {given.head_dim}")
    known = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(given.device.type, 0)
    if (given.device.index or 0) >= known:
        parser.error(f"--device: got {given.device}; want cpu, or a cuda device that torch finds")
    return given


def main() -> int:
    given = arguments()
    text, held_out, files = (len(x) if isinstance(x, Tensor) else x for x in corpus(given.text))
    if min(text, held_out) <= given.context:
        print(f"run.py: --context: got {given.context}; want less than {min(text, held_out)} bytes", file=sys.stderr)
        return 2
    results = {}
    for name in (DENSE, SPARSE):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            try:
                results[name] = process.submit(trained, name, given).result()
            except ValueError as error:  # of an option that Tessera refuses
                print(f"run.py: {error}", file=sys.stderr)
                return 2
    machine = torch.cuda.get_device_name(given.device) if given.device.type == "cuda" else "cpu"
    what = (
        f"{given.layers} layers of width {given.dim}, {text / 1e6:.2f} MB of {files} files, "
        f"{given.batch} windows of {given.context} bytes a step, {machine}"
    )
    print(what, table({name: [one.run] for name, one in results.items()}), sep="\n\n")
    print(f"\n{costs(results, given.batch * given.context)}")
    if given.json:
        told = {name: {k: v for k, v in asdict(one).items() if k != "chosen"} for name, one in results.items()}
        words = {name: x for name, x in vars(given).items() if isinstance(x, int | float)}
        words |= {"preset": given.preset, "device": machine, "torch": torch.__version__}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"what": what, "arguments": words, "runs": told}) + "\n")
    if given.picture:
        picture(results[SPARSE].chosen, given.picture, f"Selected blocks, {given.preset}, {given.context} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
