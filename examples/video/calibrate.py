# SPDX-License-Identifier: Apache-2.0
"""Finds the thresholds of a wanted error a layer, and measures on other seeds what they reach."""

import tessera
from tessera.calibration import Calibration, SkipThresholds


class Listener:
    """An attention call of the model that goes on with dense attention: receive(layer, step, q, k, v) returns that."""

    def __init__(self, receive):
        self.receive, self.step = receive, 0

    def on_step(self, step):
        self.step = step

    def __call__(self, layer, q, k, v):
        return self.receive(layer, self.step, q, k, v)


def sample(network, args, seed, receive):
    listener = Listener(receive)
    shape = {"frames": args.frames, "side": args.side, "steps": args.steps}
    network.sample(listener, **shape, seed=seed, on_step=listener.on_step)


class Judge:
    """Relative L2 of each layer's states against dense attention of the same inputs."""

    def __init__(self, thresholds):
        self.thresholds, self.states, self.wrong, self.norm = thresholds, {}, {}, {}

    def receive(self, layer, step, q, k, v):
        if layer not in self.states:
            _, tokens, heads, _ = q.shape
            shape = {"seqlen_q": tokens, "seqlen_k": tokens, "heads_q": heads}
            self.states[layer] = tessera.SkipState(**shape, **self.thresholds.options(f"blocks.{layer}"), like=q)
            self.wrong[layer] = self.norm[layer] = 0.0
        dense, out = tessera.attention(q, k, v), self.states[layer](q, k, v, step=step)
        self.wrong[layer] += (out.double() - dense.double()).square().sum().item()
        self.norm[layer] += dense.double().square().sum().item()
        return dense


def error(judges, layer):
    """Over the seeds that the judges have seen."""
    return (sum(judge.wrong[layer] for judge in judges) / sum(judge.norm[layer] for judge in judges)) ** 0.5


def calibrate(network, args):
    """Writes args.thresholds, and prints what they reach on the calibration's seeds and on args.seeds."""
    shared = {"rule": args.calibration_rule, "by_head": args.by_head}
    calibration = Calibration(args.calibrate, **shared, steps=args.steps, warm_up=min(2, args.steps))
    for width in (None, 1.0, 0.25):  # powers of two; masses are stored to an eighth
        if width is not None:
            calibration.narrow(width)
        for seed in args.calibration_seeds:
            sample(network, args, seed, lambda n, step, *qkv: calibration(*qkv, layer=f"blocks.{n}", step=step))
    calibration.solve().save(args.thresholds)
    thresholds = SkipThresholds.load(args.thresholds)
    judges = [Judge(thresholds) for _ in args.seeds]
    for seed, judge in zip(args.seeds, judges, strict=True):
        sample(network, args, seed, judge.receive)
    for layer in judges[0].states:
        found = thresholds.layers[f"blocks.{layer}"]
        each = [error([judge], layer) for judge in judges]
        whole, doubt = error(judges, layer), found.standard_error
        seen = f"{whole:.4f} on {args.seeds} ({min(each):.4f} to {max(each):.4f})"
        of_seeds = "" if doubt is None else f" ± {doubt * found.error:.4f}"
        ramp = "by head" if args.by_head else "ramp " + " ".join(f"{end:.5f}" for end in found.ramp)
        print(
            f"layer {layer}  {ramp}  {found.active:.3f} active",
            f"error {found.error:.4f}{of_seeds} on calibration seeds",
            f"{seen}: {whole / args.calibrate:.3f} of {args.calibrate}",
            sep="  ",
            flush=True,
        )
