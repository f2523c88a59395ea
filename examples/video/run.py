# SPDX-License-Identifier: Apache-2.0
"""Denoises videos with every tile of the attention, and with skip states by both rules (docs/skip-state.md).

Prints a line for each run: the share of tiles that were computed, the time in attention, and how far the video is from
the one of all tiles (relative L2; PSNR of pixels clamped to −1 … 1).
"""

import argparse
import json
import time
from pathlib import Path

import calibrate
import model
import report
import tessera
import torch
from tessera.calibration import SkipThresholds

RULES = {
    "mass": {"rule": "mass", "ramp": (0.002, 0.012)},
    "mass-careful": {"rule": "mass", "ramp": (0.001, 0.006)},
    "threshold": {"rule": "threshold", "ramp": (-4.0, -4.0)},
    "threshold-careful": {"rule": "threshold", "ramp": (-5.0, -5.0)},
}


class Dense:
    """Attention over every tile, by Tessera."""

    def __init__(self):
        self.seconds, self.shares = 0.0, []
        self.calls, self.maps = [], []  # for the report

    def on_step(self, step):
        self.step = step

    def __call__(self, layer, q, k, v):
        begin = time.perf_counter()
        out = self.attend(layer, q, k, v)
        seconds = time.perf_counter() - begin
        self.seconds += seconds
        self.calls.append({"layer": layer, "step": self.step, "active": self.shares[-1], "seconds": seconds})
        return out

    def attend(self, layer, q, k, v):
        self.shares.append(1.0)
        return tessera.attention(q, k, v)


class Skipping(Dense):
    """A skip state a layer. There is one stream of calls: the model has no text and no guidance.

    options: those of every layer's state, or a function from a layer's name to them.
    """

    def __init__(self, options):
        super().__init__()
        self.options, self.states = options, {}

    def attend(self, layer, q, k, v):
        if layer not in self.states:
            _, tokens, heads, _ = q.shape
            shape = {"seqlen_q": tokens, "seqlen_k": tokens, "heads_q": heads}
            name = f"blocks.{layer}"
            options = self.options(name) if callable(self.options) else {**self.options, "layer": name}
            self.states[layer] = tessera.SkipState(**shape, **options)
        state = self.states[layer]
        self.shares.append(state.active if self.step else 1.0)
        if layer == 0 and self.step:
            mask = state.tile_list().to_mask(key_blocks=-(-q.shape[1] // state.block[1]))
            self.maps.append((f"step {self.step}", mask[0].mean(0).tolist()))
        return state(q, k, v, step=self.step)


def psnr(video, reference):
    """Of pixels between −1 and 1, in dB."""
    error = (video.clamp(-1, 1) - reference.clamp(-1, 1)).square().mean()
    return (10 * torch.log10(4 / error)).item()


def attention_of(rule, args):
    if rule == "dense":
        return Dense()
    if rule == "calibrated":
        return Skipping(SkipThresholds.load(args.thresholds).options)
    return Skipping({**RULES[rule], "steps": args.steps, "warm_up": min(2, args.steps)})


def run(args, network):
    """A row for each seed and rule, the videos by rule of the last seed, and what the report shows of each row."""
    rows, videos, shown = [], {}, []
    rules = ["dense", *args.rules]
    if args.thresholds is not None:
        rules.append("calibrated")
    for seed in args.seeds:
        reference = None
        for rule in rules:
            attention = attention_of(rule, args)
            begin = time.perf_counter()
            shape = {"frames": args.frames, "side": args.side, "steps": args.steps}
            video = network.sample(attention, **shape, seed=seed, on_step=attention.on_step)
            row = {
                "seed": seed,
                "rule": rule,
                "active": sum(attention.shares) / len(attention.shares),
                "attention_s": attention.seconds,
                "total_s": time.perf_counter() - begin,
            }
            if reference is None:
                reference = video
            else:
                row["relative_l2"] = ((video - reference).norm() / reference.norm()).item()
                row["psnr_db"] = psnr(video, reference)
            text = [f"{row['active']:6.3f} active", f"{row['attention_s']:8.1f} s attention"]
            if rule != "dense":
                text += [f"{row['relative_l2']:.4f} relative L2", f"{row['psnr_db']:5.1f} dB"]
            print(f"seed {seed} {rule:18}", *text, sep="  ", flush=True)
            rows.append(row)
            videos[rule] = video
            numbers = {name: value for name, value in row.items() if name not in ("seed", "rule")}
            shown.append(
                {"title": f"seed {seed}, {rule}", "row": numbers, "calls": attention.calls, "maps": attention.maps}
            )
    return rows, videos, shown


def draw(videos, path):
    """A contact sheet: a row of frames for each rule."""
    import matplotlib.pyplot as plt

    rows = []
    for video in videos.values():
        chosen = video[torch.linspace(0, len(video) - 1, min(8, len(video))).long()]
        rows.append(torch.cat(list(chosen), dim=2))
    plt.imsave(path, (torch.cat(rows, dim=1).permute(1, 2, 0).clamp(-1, 1) / 2 + 0.5).numpy())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="folder of weights_*.safetensors")
    parser.add_argument("--frames", type=int, default=4)
    parser.add_argument("--side", type=int, default=16, help="tokens a row and column of a frame")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[3])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rules", nargs="*", choices=list(RULES), default=list(RULES))
    parser.add_argument("--calibrate", type=float, metavar="ERROR", help="find thresholds of this relative L2 a layer")
    parser.add_argument("--calibration-seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--calibration-rule", choices=["mass", "threshold"], default="mass")
    parser.add_argument("--by-head", action="store_true", help="find thresholds of single heads")
    parser.add_argument("--thresholds", type=Path, help="JSON of thresholds: written by --calibrate, else read")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--report", type=Path, help="HTML of shares by layer and step, times, errors and tile maps")
    parser.add_argument("--sheet", type=Path, help="PNG of frames, a row for each rule; needs matplotlib")
    args = parser.parse_args()
    torch.set_num_threads(tessera.get_threads())
    network = model.load(args.weights, getattr(torch, args.dtype))
    if args.calibrate is not None:
        if args.thresholds is None:
            parser.error("--calibrate: got no --thresholds; want the file to write")
        calibrate.calibrate(network, args)
    rows, videos, shown = run(args, network)
    if args.report is not None:
        args.report.write_text(report.page(shown), encoding="utf-8")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.sheet is not None:
        draw(videos, args.sheet)


if __name__ == "__main__":
    main()
