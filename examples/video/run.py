# SPDX-License-Identifier: Apache-2.0
"""Denoises videos with every tile of the attention, and with skip states by both rules (docs/skip-state.md).

Prints a line for each run: the share of tiles that were computed, the time in attention, and how far the video is from
the one of all tiles (relative L2; PSNR of pixels clamped to −1 … 1). Closes with the means over the seeds. On a GPU the
time in attention is that of the run's calls, replayed as CUDA graphs, and the whole time that of a second run, which
reads no shares.
"""

import argparse
import json
import time
from pathlib import Path

import calibrate
import clock
import model
import report
import tessera
import torch
from tessera.calibration import SkipThresholds

RULES = {
    "mass": {"rule": "mass", "ramp": (0.002, 0.012)},
    "mass-careful": {"rule": "mass", "ramp": (0.001, 0.006)},
    "threshold": {"rule": "threshold", "ramp": (-5.0, -5.0)},
    "threshold-careful": {"rule": "threshold", "ramp": (-6.0, -6.0)},
}


class Dense:
    """Attention over every tile, by Tessera."""

    def __init__(self):
        self.calls, self.maps = [], []  # of a run that is watched
        self.inputs = []  # on a GPU: layer, step, q, k, v of its calls
        self.watched = True

    def on_step(self, step):
        self.step = step

    def __call__(self, layer, q, k, v):
        if not self.watched:
            return self.attend(layer, q, k, v)
        active = self.share(layer, q)
        begin = time.perf_counter()
        out = self.attend(layer, q, k, v)
        self.calls.append({"layer": layer, "step": self.step, "active": active, "seconds": time.perf_counter() - begin})
        if q.is_cuda:
            self.inputs.append((layer, self.step, q, k, v))
        return out

    def share(self, layer, q):
        """Of the tiles that the next call of the layer computes."""
        return 1.0

    def attend(self, layer, q, k, v):
        return tessera.attention(q, k, v)

    def time_again(self):
        """On a GPU: times of the calls of the watched run, which waited for shares."""

        def run(call):
            layer, self.step, q, k, v = call
            self.attend(layer, q, k, v)

        for call, us in zip(self.calls, clock.time_calls(self.inputs, run), strict=True):
            call["seconds"] = us / 1e6
        self.inputs = []


class Skipping(Dense):
    """A skip state a layer. There is one stream of calls: the model has no text and no guidance.

    options: those of every layer's state, or a function from a layer's name to them.
    """

    def __init__(self, options):
        super().__init__()
        self.options, self.states = options, {}

    def share(self, layer, q):
        if not self.step:
            return 1.0
        state = self.states[layer]
        if layer == 0:
            mask = state.tile_list().to_mask(key_blocks=-(-q.shape[1] // state.block[1]))
            self.maps.append((f"step {self.step}", mask[0].mean(0).tolist()))
        return state.active

    def attend(self, layer, q, k, v):
        if layer not in self.states:
            _, tokens, heads, _ = q.shape
            shape = {"seqlen_q": tokens, "seqlen_k": tokens, "heads_q": heads}
            name = f"blocks.{layer}"
            options = self.options(name) if callable(self.options) else {**self.options, "layer": name}
            self.states[layer] = tessera.SkipState(**shape, **options, like=q)
        return self.states[layer](q, k, v, step=self.step)


def psnr(video, reference):
    """Of pixels between −1 and 1, in dB."""
    error = (video.clamp(-1, 1) - reference.clamp(-1, 1)).square().mean()
    return (10 * torch.log10(4 / error)).item()


def attention_of(rule, args):
    if rule == "dense":
        return Dense()
    if rule == "calibrated":
        return Skipping(SkipThresholds.load(args.thresholds).options)
    return Skipping({**RULES[rule], "steps": args.steps, "warm_up": min(args.warm_up, args.steps)})


def sample(network, attention, args, seed):
    """The video, and the seconds that it took."""
    begin = time.perf_counter()
    shape = {"frames": args.frames, "side": args.side, "steps": args.steps}
    video = network.sample(attention, **shape, seed=seed, on_step=attention.on_step).cpu()
    return video, time.perf_counter() - begin


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
            video, seconds = sample(network, attention, args, seed)
            if attention.inputs:
                attention.time_again()
                attention.watched = False
                _, seconds = sample(network, attention, args, seed)
            shares, times = ([call[name] for call in attention.calls] for name in ("active", "seconds"))
            row = {
                "seed": seed,
                "rule": rule,
                "active": sum(shares) / len(shares),
                "attention_s": sum(times),
                "total_s": seconds,
            }
            if reference is None:
                reference = video
            else:
                row["relative_l2"] = ((video - reference).norm() / reference.norm()).item()
                row["psnr_db"] = psnr(video, reference)
            text = [f"{row['active']:6.3f} active", f"{row['attention_s']:8.3f} s attention"]
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


def means(rows):
    """Lines of a table: each rule's means over the seeds."""
    lines = [f"{'mean':18}  active  attention ms  dense over it  whole s  relative L2   PSNR dB"]
    dense = None
    for rule in dict.fromkeys(row["rule"] for row in rows):
        found = [row for row in rows if row["rule"] == rule]
        mean = {name: sum(row[name] for row in found) / len(found) for name in found[0] if name not in ("seed", "rule")}
        dense = dense or mean["attention_s"]
        line = f"{rule:18}  {mean['active']:6.3f}  {mean['attention_s'] * 1e3:12.2f}"
        line += f"  {dense / mean['attention_s']:13.2f}  {mean['total_s']:7.2f}"
        if rule != "dense":
            line += f"  {mean['relative_l2']:11.4f}  {mean['psnr_db']:8.2f}"
        lines.append(line)
    return lines


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
    parser.add_argument("--warm-up", type=int, default=2, help="first steps whose lists keep every tile")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
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
    network = model.load(args.weights, getattr(torch, args.dtype), args.device)
    if args.calibrate is not None:
        if args.thresholds is None:
            parser.error("--calibrate: got no --thresholds; want the file to write")
        calibrate.calibrate(network, args)
    rows, videos, shown = run(args, network)
    print("", *means(rows), sep="\n")
    if args.report is not None:
        args.report.write_text(report.page(shown), encoding="utf-8")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.sheet is not None:
        draw(videos, args.sheet)


if __name__ == "__main__":
    main()
