# SPDX-License-Identifier: Apache-2.0
"""Tables of skip states from step to step, and of training steps with backward lists."""

from report_text import table, time_of, wrapped

# LiteAttention 0.4 on an H200, 2026-11-20: the same workload, 8 steps, threshold −5. Its own dense time, settled time,
# relative L2.
LITE = {
    (4096, 16): (197.0, 45.5, 0.186),
    (8192, 16): (745.0, 78.5, 0.311),
    (32760, 12): (9740.0, 250.0, 0.768),
}


def _costs(rows):
    found = {}
    for row in rows:
        found.setdefault((row["tokens"], row["heads"]), {})[row["call"]] = row
    head = ["length", "heads", "dense", "listed"]
    for rule in ("mass", "threshold"):
        head += [f"`{rule}`", "over dense", "its first step", "over dense"]
    body = []
    for (tokens, heads), calls in found.items():
        cells = [str(tokens), str(heads), f"{calls['dense']['us']:.1f} µs", f"{calls['listed']['us']:.1f} µs"]
        for rule in ("mass", "threshold"):
            for call in (calls[rule], calls[f"{rule}, first step"]):
                cells += [f"{call['us']:.1f} µs", f"{(call['over_dense'] - 1) * 100:+.1f} %"]
        body.append(cells)
    return "Nothing skipped:\n\n" + table(head, body)


def _workload(rows):
    head = ["length", "heads", "rule", "threshold", "first step", "settled", "behind", "dense over it"]
    head += ["tiles computed", "relative L2", "cosine"]
    body, shapes = [], []
    for row in rows:
        shape, last = (row["tokens"], row["heads"]), {name: values[-1] for name, values in row["by_step"].items()}
        if shape not in shapes:
            shapes.append(shape)
            if shape in LITE:
                dense, settled, error = LITE[shape]
                cells = [*map(str, shape), "LiteAttention's own", "-5", "", time_of(settled), ""]
                body.append([*cells, f"{dense / settled:.2f}", "", f"{error:.3f}", ""])
        cells = [*map(str, shape), f"`{row['rule']}`", f"{row['threshold']:g}", time_of(row["by_step"]["us"][0])]
        cells += [f"{row['settled_us']:.1f} µs", f"{row['steps_to_settle']} steps"]
        cells += [f"{row['dense_us'] / row['settled_us']:.2f}", f"{last['active'] * 100:.1f} %"]
        body.append([*cells, f"{last['relative_l2']:.3f}", f"{last['cosine']:.4f}"])
    note = "K = Q + 0.1 noise, 2% of fresh noise a step; tiles, relative L2 and cosine of the last step, against dense."
    if any(shape in LITE for shape in shapes):
        note += " LiteAttention's rows: version 0.4 on another machine, an H200, 8 steps."
    return wrapped(note) + "\n\n" + table(head, body)


def skip_steps_rows(rows):
    """Steps of skip states: nothing skipped, and a workload that settles."""
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in ("cost", "workload")}
    parts = [(_costs, by_kind["cost"]), (_workload, by_kind["workload"])]
    return "\n".join(make(found) for make, found in parts if found)


def training_step_rows(rows):
    """Steps with a list in the backward alone beside the dense step of the same shape."""
    dense = {}
    phases = list(rows[0]["us"])
    head = ["batch", "heads", "length", "mask", "tiles left out", *phases, "step"]
    head += ["backward: dense over it", "forward and backward", "step: dense over it", "gradients' relative L2"]
    body = []
    for row in rows:
        key = row["batch"], row["heads"], row["tokens"], "causal" if row["causal"] else "full"
        if row["left_out"] is None:
            dense[key] = row
        of = dense[key]
        cells = [*map(str, key), "no list" if row["left_out"] is None else f"{row['left_out'] * 100:g} %"]
        cells += [f"{row['us'][phase]:.0f} µs" for phase in phases] + [f"{row['step_us']:.0f} µs"]
        both, ours = (each["us"]["forward"] + each["us"]["backward"] for each in (of, row))
        ratios = of["us"]["backward"] / row["us"]["backward"], both / ours, of["step_us"] / row["step_us"]
        body.append([*cells, *(f"{ratio:.2f}" for ratio in ratios), f"{row['relative_l2']:.3f}"])
    return table(head, body)
