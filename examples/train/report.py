# SPDX-License-Identifier: Apache-2.0
"""What train.py tells of its runs: a table, JSON, a picture of the loss curves.

Runs of one seed differ by their attention alone, runs of one attention by their seed. So the distance between
attentions has a measure: that between seeds, which is what chance does to a training.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

Runs = dict[str, list["Run"]]  # by attention, one for each seed


@dataclass
class Run:
    """One training: losses in nats per byte, one for each step; bits per byte of the held-out files at the end."""

    seed: int
    losses: list[float]
    held_out_bits_per_byte: float
    seconds_per_step: float  # the median


def smooth(losses: list[float], width: int) -> list[float]:
    """Means over the last `width` steps, fewer at the start: the noise of single batches is in every curve."""
    sums = [0.0]
    for loss in losses:
        sums.append(sums[-1] + loss)
    return [(sums[i] - sums[max(0, i - width)]) / min(i, width) for i in range(1, len(sums))]


def width_of(steps: int) -> int:
    return max(1, steps // 20)


def apart(curves: list[list[float]]) -> list[float]:
    """At each step the largest distance between two curves."""
    return [max(values) - min(values) for values in zip(*curves, strict=True)]


def attentions_apart(runs: Runs) -> list[float]:
    """At each step the largest distance between smoothed curves of one seed, over all seeds."""
    width = width_of(len(next(iter(runs.values()))[0].losses))
    by_seed = [apart([smooth(run.losses, width) for run in of_seed]) for of_seed in zip(*runs.values(), strict=True)]
    return [max(values) for values in zip(*by_seed, strict=True)]


def seeds_apart(runs: Runs) -> list[float]:
    """The same between seeds of one attention, of the one whose seeds differ least."""
    width = width_of(len(next(iter(runs.values()))[0].losses))
    each = [apart([smooth(run.losses, width) for run in of_attention]) for of_attention in runs.values()]
    return [min(values) for values in zip(*each, strict=True)]


def table(runs: Runs) -> str:
    """Markdown: losses of the first seed at some steps, then what each run came to, and how far apart two runs are."""
    first = {name: of_seeds[0] for name, of_seeds in runs.items()}
    steps = len(next(iter(first.values())).losses)
    shown = sorted({1, *(step for step in (10, 30, 100, 200, 300, 500, 1000, 2000) if step < steps), steps})
    rows = [(str(step), [run.losses[step - 1] for run in first.values()], 5) for step in shown]
    rows.append(("held out, bits per byte", [run.held_out_bits_per_byte for run in first.values()], 4))
    rows.append(("ms per step, median", [run.seconds_per_step * 1e3 for run in first.values()], 0))
    lines = [f"| step | {' | '.join(first)} | apart |", "|---" * (len(first) + 2) + "|"]
    for name, values, digits in rows:
        distance = f"{max(values) - min(values):.1e}" if digits and len(values) > 1 else ""
        lines.append(f"| {name} | {' | '.join(f'{value:.{digits}f}' for value in values)} | {distance} |")
    return "\n".join([*lines, *_verdict(runs)])


def _verdict(runs: Runs) -> list[str]:
    seeds = len(next(iter(runs.values())))
    if seeds < 2 or len(runs) < 2:
        return []
    ours, chance = attentions_apart(runs), seeds_apart(runs)
    width = width_of(len(ours))
    beyond = sum(a > b for a, b in zip(ours, chance, strict=True))
    return [
        "",
        f"Means over {width} steps, at the end: attentions {ours[-1]:.1e} apart, {seeds} seeds {chance[-1]:.1e}; "
        f"attentions are further apart than seeds at {beyond} of {len(ours)} steps.",
    ]


def write_json(runs: Runs, path: Path, what: str, words: dict[str, object]) -> None:
    """`what` was trained, by which arguments (`words`), and every loss."""
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {name: [asdict(run) for run in of_seeds] for name, of_seeds in runs.items()}
    path.write_text(json.dumps({"what": what, "arguments": words, "runs": told}) + "\n")


def merge_json(paths: list[Path]) -> tuple[Runs, str, dict[str, object]]:
    """What `write_json` wrote of one training each, as one with all of their seeds.

    Raises ValueError where they differ in more than seed and machine.
    """
    runs: Runs = {}
    files = [json.loads(path.read_text()) for path in paths]
    first = files[0]
    for path, told in zip(paths, files, strict=True):
        arguments = first["arguments"].keys() & told["arguments"].keys() - {"seed", "seeds", "threads", "device"}
        same = all(first["arguments"][name] == told["arguments"][name] for name in arguments)
        if not same or (told["what"], [*told["runs"]]) != (first["what"], [*first["runs"]]):
            raise ValueError(f"--merge: got {path}, of another training than {paths[0]}; want other seeds of one")
        for name, of_seeds in told["runs"].items():
            runs.setdefault(name, []).extend(Run(**run) for run in of_seeds)
    seeds = [run.seed for run in next(iter(runs.values()))]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--merge: got seeds {seeds}; want each once")
    devices = ", ".join(sorted({str(told["arguments"]["device"]) for told in files}))
    return runs, first["what"], {**first["arguments"], "seed": min(seeds), "seeds": len(seeds), "device": devices}


def picture(runs: Runs, path: Path, what: str) -> None:
    """Loss curves above, how far they are apart below; the format is that of the path's suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(next(iter(runs.values()))[0].losses) + 1)
    seeds = len(next(iter(runs.values())))
    width = width_of(len(steps)) if seeds > 1 else 1
    for (name, of_seeds), line, colour in zip(
        runs.items(), (3.4, 1.8, 0.8), ("#56b4e9", "#e69f00", "#000000"), strict=False
    ):
        bits = " ".join(f"{run.held_out_bits_per_byte:.3f}" for run in of_seeds)
        for number, run in enumerate(of_seeds):
            label = f"{name}: {bits} bits per byte of held-out text" if number == 0 else None
            above.plot(steps, smooth(run.losses, width), label=label, lw=line, color=colour)
    if seeds > 1:
        below.plot(steps, [max(x, 1e-9) for x in seeds_apart(runs)], lw=0.9, color="#009e73", label=f"{seeds} seeds")
        below.plot(steps, [max(x, 1e-9) for x in attentions_apart(runs)], lw=0.9, color="#d55e00", label="attentions")
        below.legend(frameon=False, fontsize=8)
    else:
        distance = apart([of_seeds[0].losses for of_seeds in runs.values()])
        below.plot(steps, [max(x, 1e-9) for x in distance], lw=0.9, color="#d55e00")
    above.set_ylabel("loss, nats per byte" + (f", means of {width}" if width > 1 else ""))
    above.legend(frameon=False, fontsize=8)
    above.set_title(what, fontsize=9)
    below.set_yscale("log")
    below.set_ylabel("apart")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
