# SPDX-License-Identifier: Apache-2.0
"""Measured rows of one JSON file as a Markdown table, a function for each kind of measurement; see report.py."""

from report_text import PEERS, item, mean, size_of, table, time_of, tokens, wrapped


def peers_of(rows):
    return sorted({peer for row in rows for peer in row.get("ratios", ())})


def ratios_to_peers(rows):
    """(whose time, function from a row's ratios to the one of it or None): each peer, and the fastest in each row."""
    peers = peers_of(rows)
    kinds = [(f"time of {PEERS.get(peer, peer)}", lambda ratios, peer=peer: ratios.get(peer)) for peer in peers]
    if len(peers) > 1:
        kinds.append(("time of the fastest of them in each row", lambda ratios: min(ratios.values(), default=None)))
    return kinds


def ratio_summary(rows):
    """Geometric means and least ratios of each pass, beside each peer and beside the fastest of them in each row."""
    lines = []
    for time, ratio_of in ratios_to_peers(rows):
        for name in ("forward", "backward"):
            by_type = {"fp32": [], "bf16": []}
            for row in rows:
                ratio = ratio_of(row["ratios"])
                if row["pass"] == name and ratio is not None:
                    by_type.setdefault(tokens(row["problem"]).get("dtype", "fp32"), []).append(ratio)
            found = [
                f"{dtype} {mean(ratios):.2f}, least {min(ratios):.2f}" for dtype, ratios in by_type.items() if ratios
            ]
            ratios = [ratio for part in by_type.values() for ratio in part]
            if ratios:
                means = f"geometric mean **{mean(ratios):.2f}** of {len(ratios)} rows ({'; '.join(found)})"
                lines.append(item(f"{name}, {time} / time of Tessera: {means}"))
    return "\n".join(lines) + "\n"


def peer_cells(row, peer, digits):
    """A peer's time, its ratio and the ratio's spread, or nothing where it was not measured."""
    if peer not in row["ratios"]:
        return ["", "", ""]
    spread = row["ratio_spread"][peer]
    ratio, p10, p90 = (f"{x:.{digits}f}" for x in (row["ratios"][peer], spread["p10"], spread["p90"]))
    return [time_of(row["peers"][peer]), ratio, f"{p10}–{p90}"]


def percent_of_roofline(row):
    """Nothing where the limit was measured by slower instructions than the kernel's: see without_a_limit."""
    return "" if row["roofline_percent"] is None else f"{row['roofline_percent']:.0f}"


def dense_rows(rows):
    peers = peers_of(rows)
    head = ["pass", "dtype", "dim", "length", "mask", "Tessera", "GFLOP/s", "% of roofline"]
    for peer in peers:
        head += [PEERS.get(peer, peer), "ratio", "p10–p90"]
    head += ["workspace", "RSS growth"]
    body = []
    for row in rows:
        t = tokens(row["problem"])
        cells = [
            row["pass"],
            t.get("dtype", "fp32"),
            t.get("d", "64"),
            t["sq"],
            "causal" if "causal" in t else "full",
            time_of(row["us"]),
            f"{row['tflops'] * 1e3:.0f}",
            percent_of_roofline(row),
        ]
        for peer in peers:
            cells += peer_cells(row, peer, 2)
        body.append([*cells, size_of(row["workspace_bytes"]), size_of(row["rss_growth_bytes"])])
    return ratio_summary(rows) + "\n" + table(head, body)


def list_rows(rows):
    """Rows with a list beside the row without one of the same problem."""

    def shape_of(row):
        t = tokens(row["problem"])
        return t.get("b", "1"), t.get("hq", "1")

    shaped = len({shape_of(row) for row in rows}) > 1

    def key_of(row):
        t = tokens(row["problem"])
        mask = "causal" if "causal" in t else f"window {t['window']}" if "window" in t else "full"
        order = "fixed" if "deterministic" in t else "any"
        shape = shape_of(row) if shaped else ()
        return row["pass"], t.get("dtype", "fp32"), t.get("d", "64"), *shape, t["sq"], mask, order

    ordered = any("deterministic" in row["problem"] for row in rows)
    dense = {key_of(row): row["us"] for row in rows if "list=" not in row["problem"]}
    peers = peers_of(rows)
    head = ["pass", "dtype", "dim", *["batch", "heads"] * shaped, "length", "mask"]
    head += [*["order of sums"] * ordered, "tile", "tiles kept"]
    head += ["dense", "listed", "of the dense time", *["dense over it"] * shaped]
    for peer in peers:
        head += [f"{PEERS.get(peer, peer)}, listed", "ratio", "p10–p90"]
    body = []
    for row in rows:
        t = tokens(row["problem"])
        key = key_of(row)
        if "list" not in t or key not in dense:
            continue
        cells = [
            *(key if ordered else key[:-1]),
            t.get("block", "64x64").replace("x", " × "),
            f"{float(t.get('density', 1)) * 100:g} %",
            time_of(dense[key]),
            time_of(row["us"]),
            f"{row['us'] / dense[key] * 100:.1f} %",
            *[f"{dense[key] / row['us']:.2f}"] * shaped,
        ]
        for peer in peers:
            cells += peer_cells(row, peer, 3)
        body.append(cells)
    return table(head, body)


def skip_rows(rows):
    """Forwards that move a skip state on, beside the same list as it is and dense attention."""

    def key_of(row):
        t = tokens(row["problem"])
        return t.get("dtype", "fp32"), t.get("d", "64"), t["hq"], t["sq"]

    def kind_of(row):
        t = tokens(row["problem"])
        return t.get("skip", "listed" if "list" in t else "dense").split(":")[0], float(t.get("density", 1))

    times = {(key_of(row), kind_of(row)): row["us"] for row in rows}
    head = ["dtype", "dim", "heads", "length", "tiles kept", "dense", "listed", "of the dense time"]
    for rule in ("mass", "threshold"):
        head += [f"by `{rule}`", "over listed", "over share × dense + 10 µs"]
    body = []
    for (key, (kind, density)), listed in times.items():
        if kind != "listed":
            continue
        dense = times.get((key, ("dense", 1.0)))
        cells = [*key, f"{density * 100:g} %", time_of(dense) if dense else "", time_of(listed)]
        cells.append(f"{listed / dense * 100:.1f} %" if dense else "")
        for rule in ("mass", "threshold"):
            us = times.get((key, (rule, density)))
            cells += [time_of(us), f"{(us / listed - 1) * 100:+.1f} %"] if us else ["", ""]
            cells.append(f"{(us / (density * dense + 10) - 1) * 100:+.1f} %" if us and dense else "")
        body.append(cells)
    return table(head, body)


def plain_rows(rows):
    peers = peers_of(rows)
    head = ["problem", "pass", "time", "GFLOP/s", "GB/s", "% of roofline"]
    for peer in peers:
        head += [PEERS.get(peer, peer), "ratio"]
    body = []
    for row in rows:
        problem = row["problem"] + (f" [{row['wishes']}]" if row["wishes"] else "")
        cells = [
            f"`{problem}`",
            row["pass"],
            time_of(row["us"]),
            f"{row['tflops'] * 1e3:.1f}",
            f"{row['gbytes_s']:.1f}",
            percent_of_roofline(row),
        ]
        for peer in peers:
            known = peer in row["ratios"]
            cells += [time_of(row["peers"][peer]), f"{row['ratios'][peer]:.2f}"] if known else ["", ""]
        body.append(cells)
    return table(head, body)


def loader_rows(rows):
    """A problem's times by each loader wished for, relative to that by cp.async."""
    times = {}
    for row in rows:
        times.setdefault(row["problem"], {})[tokens(f"- {row['wishes']}").get("loader", "the plan's own")] = row["us"]
    loaders = list(dict.fromkeys(loader for by_loader in times.values() for loader in by_loader))
    others = [loader for loader in loaders if loader != "cp_async"]
    head = ["problem", *(f"`{x}`" for x in loaders), *(f"`cp_async` / `{x}`" for x in others)]
    body = []
    for problem, by_loader in times.items():
        base = by_loader.get("cp_async")
        cells = [time_of(by_loader[x]) if x in by_loader else "" for x in loaders]
        cells += [f"{base / by_loader[x]:.3f}" if base and x in by_loader else "" for x in others]
        body.append([f"`{problem}`", *cells])
    return table(head, body)


def peer_means(rows):
    lines = []
    for time, ratio_of in ratios_to_peers(rows):
        ratios = [ratio for ratio in (ratio_of(row["ratios"]) for row in rows) if ratio is not None]
        means = f"geometric mean **{mean(ratios):.3f}** of {len(ratios)} rows, least {min(ratios):.3f}"
        lines.append(item(f"{time} / time of Tessera: {means}"))
    return "\n".join(lines) + "\n"


def kind_of(row):
    """How q and k of a row are drawn."""
    return tokens(row["problem"]).get("inputs", "normal")


def input_rows(rows):
    """Of a problem the time by normal inputs, and how many times that long the others take, with the peers' means."""
    times = {}
    for row in rows:
        problem = " ".join(word for word in row["problem"].split() if not word.startswith("inputs="))
        times.setdefault(problem, {})[kind_of(row)] = row["us"]
    kinds = list(dict.fromkeys(map(kind_of, rows)))
    others = [kind for kind in kinds if kind != "normal"]
    body = []
    for problem, by_kind in times.items():
        base = by_kind.get("normal")
        cells = [f"{by_kind[kind] / base:.3f}" if base and kind in by_kind else "" for kind in others]
        body.append([f"`{problem}`", time_of(base) if base else "", *cells])
    means = "".join(f"`{kind}`:\n\n{peer_means([r for r in rows if kind_of(r) == kind])}\n" for kind in kinds)
    return (means if peers_of(rows) else "") + table(["problem", "`normal`", *(f"`{kind}`" for kind in others)], body)


def accuracy_rows(rows):
    """Relative L2 errors of O, beside the peers'."""
    peers = sorted({peer for row in rows for peer in row.get("peer_errors", ())})
    body = []
    for row in rows:
        errors = [row.get("error"), *(row.get("peer_errors", {}).get(peer) for peer in peers)]
        body.append([f"`{row['problem']}`", *("" if error is None else f"{error:.2e}" for error in errors)])
    return table(["problem", "Tessera", *(PEERS.get(peer, peer) for peer in peers)], body)


def gradient_rows(rows):
    """Errors of gradients against double over those of a yardstick, the row that comes first of its kind."""
    inputs = list(dict.fromkeys(row["inputs"] for row in rows))
    found = {(row["dtype"], row["d"], row["by"], row["inputs"]): row.get("errors") for row in rows}
    yardstick = rows[0]["by"]
    body = []
    for dtype, dim, by in dict.fromkeys((row["dtype"], row["d"], row["by"]) for row in rows):
        if by == yardstick:
            continue
        cells = [dtype, str(dim), by]
        for kind in inputs:
            errors, bar = (found.get((dtype, dim, name, kind)) for name in (by, yardstick))
            ratios = [max(errors[n][of] / bar[n][of] for n in bar) for of in ("largest", "rms")] if errors else []
            cells.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
        body.append(cells)
    note = f"Of dq, dk and dv the worst: largest error, root mean square, over those of the yardstick ({yardstick})."
    return wrapped(note) + "\n\n" + table(["type", "dim", "gradients by", *inputs], body)


def residual_rows(rows):
    """Both passes of a training step without the residual of O and with it."""
    found = {}
    for row in rows:
        words = tokens(row["problem"])
        sizes = {"b": 1, "d": 64} | words
        shape = " ".join(f"{key}={sizes[key]}" for key in ("b", "sq", "hq", "d"))
        mask = " causal" if "causal" in words else ""
        found.setdefault(shape + mask, {})[row["pass"], "residual" in words] = row["us"]
    passes = ("forward", "backward")
    body, both = [], []
    for shape, times in found.items():
        cells = [f"`{shape}`"]
        for kind in passes:
            cells += [time_of(times[kind, False]), f"{times[kind, True] / times[kind, False]:.3f}"]
        both.append(sum(times[kind, True] for kind in passes) / sum(times[kind, False] for kind in passes))
        body.append([*cells, f"{both[-1]:.3f}"])
    of_all = f"Geometric mean of both passes: **{mean(both):.3f}**."
    about = f"`with it`: the time with the residual over that without. {of_all}"
    return (
        wrapped(about) + "\n\n" + table(["problem", "forward", "with it", "backward", "with it", "both, with it"], body)
    )


def gpu_rows(rows):
    """Rows on a GPU, with the peers' time, rate and ratio."""
    peers = peers_of(rows)
    drawn = any(kind_of(row) != "normal" for row in rows)
    fixed = any("deterministic" in tokens(row["problem"]) for row in rows)
    head = ["dim", "heads", "batch", "length", "mask", *["sums"] * fixed, *["inputs"] * drawn]
    head += ["Tessera", "TFLOP/s", "GB/s"]
    for peer in peers:
        head += [PEERS.get(peer, peer), "TFLOP/s", "ratio", "p10–p90"]
    body = []
    for row in rows:
        t = tokens(row["problem"])
        heads = t.get("hq", "1") + (f" / {t['hkv']}" if "hkv" in t else "")
        mask = "causal" if "causal" in t else "full"
        order = "deterministic" if "deterministic" in t else "in any order"
        cells = [t.get("d", "64"), heads, t.get("b", "1"), t["sq"], mask, *[order] * fixed, *[kind_of(row)] * drawn]
        cells += [time_of(row["us"]), f"{row['tflops']:.0f}", f"{row['gbytes_s']:.0f}"]
        for peer in peers:
            time, *ratio = peer_cells(row, peer, 3)
            rate = f"{row['gflop'] / row['peers'][peer] * 1e3:.0f}" if time else ""
            cells += [time, rate, *ratio]
        body.append(cells)
    means = f"{peer_means(rows)}\n" if peers else ""
    return means + table(head, body)


def linear_rows(rows):
    """Decode steps on a GPU, beside a pass in place over as many bytes as their states have, and beside peers."""
    peers = peers_of(rows)
    wished = any(row["wishes"] for row in rows)
    head = ["batch", "tokens", "heads", "dim", "state", "rows of", "slots", "ring"]
    head += ["block"] * wished
    head += ["Tessera", "GB/s", "pass in place", "share"]
    for peer in peers:
        head += [PEERS.get(peer, peer), "ratio"]
    body = []
    for row in rows:
        t = tokens(row["problem"])
        ceiling = row["in_place_us"]
        cells = [t.get("b", "1"), t.get("t", "1"), t.get("h", "1"), t.get("d", "64")]
        cells += [t.get("state", "fp32") + (", stochastic" if t.get("rounding") == "stochastic" else "")]
        cells += ["K" if t.get("layout") == "kv" else "V"]
        cells += ["in order" if t.get("state_slots") == "in_order" else "anywhere", t.get("ring", "–")]
        cells += [f"`{row['wishes']}`"] * wished
        cells += [f"{row['us']:.2f} µs", f"{row['gbytes_s']:.0f}", f"{ceiling:.2f} µs", f"{ceiling / row['us']:.3f}"]
        for peer in peers:
            known = peer in row["ratios"]
            cells += [f"{row['peers'][peer]:.2f} µs", f"{row['ratios'][peer]:.3f}"] if known else ["", ""]
        body.append(cells)
    return table(head, body)


def chunk_rows(rows):
    """Whole sequences of linear attention, forward and backward, beside peers."""
    peers = peers_of(rows)
    head = ["pass", "batch", "tokens", "heads", "dim", "pool of states", "Tessera", "TFLOP/s", "GB/s"]
    for peer in peers:
        head += [PEERS.get(peer, peer), "ratio", "p10–p90"]
    body = []
    for row in rows:
        t = tokens(row["problem"])
        cells = [
            row["pass"],
            t.get("b", "1"),
            t["t"],
            t.get("h", "1"),
            t.get("d", "64"),
            "yes" if "slots" in t else "no",
        ]
        cells += [time_of(row["us"]), f"{row['tflops']:.0f}", f"{row['gbytes_s']:.0f}"]
        for peer in peers:
            cells += peer_cells(row, peer, 3)
        body.append(cells)
    means = f"{peer_means(rows)}\n" if peers else ""
    return means + table(head, body)


def profile_rows(rows):
    """What a profiler saw of decode steps of linear attention."""
    head = ["batch", "state", "ring", "caches", "time", "memory moved", "of its peak", "found in L2", "warps resident"]
    body = []
    for row in rows:
        t = tokens(row["problem"])
        cells = [t.get("b", "1"), t.get("state", "fp32"), t.get("ring", "–"), row["caches"], f"{row['us']:.1f} µs"]
        cells += [f"{row['gbytes_s']:.0f} GB/s", f"{row['dram_percent']:.0f} %", f"{row['l2_hit_percent']:.0f} %"]
        stall = f"{row['stall'].replace('_', ' ')} ({row['stall_part'] * 100:.0f} %)"
        body.append([*cells, f"{row['occupancy_percent']:.0f} %", stall])
    return table([*head, "warps wait mostly for"], body)


def sweep_rows(rows):
    """Of each problem the fastest wishes, beside the plan's own choice."""
    body = []
    for problem in dict.fromkeys(row["problem"] for row in rows):
        tried = [row for row in rows if row["problem"] == problem]
        own = next((row for row in tried if not row["wishes"]), None)
        best = min(tried, key=lambda row: row["us"])
        body.append(
            [
                f"`{problem}`",
                str(len(tried)),
                time_of(own["us"]) if own else "",
                f"`{best['wishes']}`" if best["wishes"] else "its own choice",
                time_of(best["us"]),
                f"{best['tflops']:.0f}",
                f"{own['us'] / best['us']:.3f}" if own else "",
            ]
        )
    head = ["problem", "tried", "plan's own choice", "fastest", "time", "TFLOP/s", "own / fastest"]
    return table(head, body)


def overhead_rows(rows):
    head = ["call", "time", "p10–p90", "in C++", "overhead", "wanted at most"]
    body = []
    for row in rows:
        spread = row["spread"]
        body.append(
            [
                row["call"],
                f"{row['us']:.1f} µs",
                f"{spread['p10']:.1f}–{spread['p90']:.1f} µs",
                f"{row['cpp_us']:.1f} µs",
                f"**{row['overhead_us']:.1f} µs**",
                f"{row['most_us']} µs" if row["most_us"] else "",
            ]
        )
    return f"`{rows[0]['problem']}`, medians.\n\n{table(head, body)}"


def host_time_rows(rows):
    """Calls of Python on a GPU's tensors: how long the host is busy."""
    head = ["call", "host time", "least–most"]
    body = [[r["call"], f"**{r['us']:.1f} µs**", f"{r['least_us']:.1f}–{r['most_us']:.1f} µs"] for r in rows]
    return table(head, body)
