# SPDX-License-Identifier: Apache-2.0
"""Results of `tessera bench`: speed-up beside a peer, lines over the length, times, the roofline."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera.plot._figure import COLOURS, new_figure, refusal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PEERS = {"torch_cpu": "PyTorch", "torch_flash": "FlashAttention-2", "torch_cudnn": "cuDNN"}
PEERS |= {"flash_attn_4": "FlashAttention-4", "fla_chunk": "Flash Linear Attention"}
PEERS |= {"fla_decode": "Flash Linear Attention", "cula_decode": "cuLA"}
MASKS = ("causal", "window", "compressed_causal", "mask", "list")
PEER_STYLES = ("--", ":", "-.")
KINDS = ("auto", "speedup", "bars", "length", "time", "roofline")
METRICS = {
    "ms": ("milliseconds", lambda row, us: us / 1e3),
    "tflops": ("TFLOP/s", lambda row, us: row["gflop"] / us * 1e3),
    "gbytes_s": ("GB/s", lambda row, us: row["gbyte"] / us * 1e6),
}


def _load(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """The machine and the rows of a bench result, checked as far as the pictures need it."""
    want = 'what `tessera bench --json` writes, {"machine": {...}, "rows": [{"problem": ..., "us": ...}, ...]}'
    if isinstance(source, Mapping):
        name, data = "a dict", source
    else:
        name = str(source)
        try:
            data = json.loads(Path(source).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as malformed:
            raise refusal("source", f"{name}, not JSON ({malformed})", want) from None
    rows = data.get("rows") if isinstance(data, Mapping) else None
    if not isinstance(rows, list) or not rows:
        raise refusal("source", f"{name} without rows", want)
    for number, row in enumerate(rows):
        times = [row.get("us"), *row.get("peers", {}).values()] if isinstance(row, Mapping) else [None]
        if not all(isinstance(us, (int, float)) and us > 0 for us in times) or not isinstance(row.get("problem"), str):
            raise refusal("source", f"{name} with row {number} that lacks 'problem' or a positive 'us'", want)
    return data.get("machine", {}), rows


def _words(row: Mapping[str, Any]) -> dict[str, str]:
    """Words of a row's problem line and wishes by their key: {"pass": "forward", "sq": "sq=512", "causal": "causal"}.

    Defaults that say something in a picture are filled in; the operation and the words of `pass=` are not repeated.
    """
    words = {word.partition("=")[0]: word for word in (*row["problem"].split()[1:], *row.get("wishes", "").split())}
    return {"dtype": "dtype=fp32", "d": "d=64"} | words | {"pass": row.get("pass", "forward")}


def _labels(rows: Sequence[Mapping[str, Any]], without: Sequence[str] = ()) -> list[str]:
    """What tells the rows apart: the words that not all of them share, less those of `without`."""
    words = [_words(row) for row in rows]
    keys = sorted(dict.fromkeys(key for row in words for key in row), key=lambda key: key != "pass")
    differing = [key for key in keys if len({row.get(key) for row in words}) > 1 and key not in without]
    return [" ".join(row[key] for key in differing if key in row) or "all" for row in words]


def _peers(rows: Sequence[Mapping[str, Any]], peer: str | None) -> list[str]:
    known = sorted({name for row in rows for name in row.get("peers", {})})
    if peer is None:
        return known
    if peer not in known:
        raise refusal(
            "peer", repr(peer), f"one of {', '.join(known)}" if known else "none: no row was measured beside a peer"
        )
    return [peer]


def _bars(
    rows: Sequence[Mapping[str, Any]], values: list[float], spreads: list[tuple[float, float]] | None
) -> tuple[Figure, Axes]:
    """Horizontal bars, the first row on top, coloured by pass; spreads are (p10, p90)."""
    passes = list(dict.fromkeys(row.get("pass", "forward") for row in rows))
    figure = new_figure(8.0, 0.9 + 0.22 * len(rows))
    axes = figure.subplots()
    places = range(len(rows))
    colours = [COLOURS[passes.index(row.get("pass", "forward")) % len(COLOURS)] for row in rows]
    errors = None
    if spreads is not None:
        sides = zip(values, spreads, strict=True)
        errors = list(zip(*((max(0.0, v - low), max(0.0, high - v)) for v, (low, high) in sides), strict=True))
    axes.barh(places, values, xerr=errors, color=colours, height=0.72, error_kw={"lw": 0.8, "ecolor": "#404040"})
    axes.set_yticks(places, _labels(rows), fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.1)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _draw_speedup(rows: list[Mapping[str, Any]], peer: str | None) -> tuple[Figure, str]:
    peers = _peers(rows, peer)
    if len(peers) != 1:
        raise refusal(
            "peer", "none given", f"one of {', '.join(peers)}" if peers else "results measured beside a peer (--peer)"
        )
    name = PEERS.get(peers[0], peers[0])
    rows = [row for row in rows if peers[0] in row.get("ratios", {})]
    if not rows:
        raise refusal("source", f"no ratio to {peers[0]}", "rows with 'ratios', as `tessera bench --peer` writes them")
    ratios = [row["ratios"][peers[0]] for row in rows]
    spreads = [row.get("ratio_spread", {}).get(peers[0]) for row in rows]
    whole = None if None in spreads else [(spread["p10"], spread["p90"]) for spread in spreads]
    figure, axes = _bars(rows, ratios, whole)
    axes.axvline(1.0, color="#404040", lw=1, ls="--")
    for place, ratio in enumerate(ratios):
        axes.annotate(
            f"{ratio:.2f}",
            (0, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color="white",
        )
    axes.set_xlabel(f"time of {name} / time of Tessera; whiskers: 10th to 90th percentile")
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return figure, f"{mean:.2f} times {name}'s speed, geometric mean of {len(ratios)} rows"


def _length_key(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """sq or sk, whichever takes more values; None when neither takes two."""
    values = {key: {_words(row).get(key) for row in rows} - {None} for key in ("sq", "sk")}
    key = max(values, key=lambda k: len(values[k]))
    return key if len(values[key]) > 1 else None


def _draw_lines(
    axes: Axes, rows: list[Mapping[str, Any]], settings: list[str], key: str, peers: list[str], metric: str
) -> None:
    """One pass: a line for each setting (`settings` has one for each row); solid ours, dashed and so on the peers'."""
    value = METRICS[metric][1]
    for place, setting in enumerate(dict.fromkeys(settings)):
        mine = {
            int(_words(row)[key][len(key) + 1 :]): row for row, s in zip(rows, settings, strict=True) if s == setting
        }
        for side, style in (("Tessera", "-"), *zip(peers, PEER_STYLES, strict=False)):
            times = {
                length: row["us"] if side == "Tessera" else row.get("peers", {}).get(side)
                for length, row in mine.items()
            }
            points = [(length, value(mine[length], us)) for length, us in sorted(times.items()) if us is not None]
            if points:
                label = setting if side == "Tessera" else None
                x, y = zip(*points, strict=True)
                axes.plot(x, y, style, color=COLOURS[place % len(COLOURS)], marker=".", lw=1.3, label=label)


def _draw_length(rows: list[Mapping[str, Any]], peer: str | None, metric: str) -> tuple[Figure, str]:
    key = _length_key(rows)
    if key is None:
        raise refusal("source", "rows of one length", "rows that differ in sq or sk; or kind='time'")
    rows = [row for row in rows if key in _words(row)]
    peers = _peers(rows, peer)
    settings = _labels(rows, without=(key, "pass"))
    passes = list(dict.fromkeys(_words(row)["pass"] for row in rows))
    figure = new_figure(4.4 * len(passes) + 1.8, 4.0)
    for axes, name in zip(figure.subplots(1, len(passes), squeeze=False)[0], passes, strict=True):
        chosen = [place for place, row in enumerate(rows) if _words(row)["pass"] == name]
        _draw_lines(axes, [rows[i] for i in chosen], [settings[i] for i in chosen], key, peers, metric)
        axes.set_xscale("log", base=2)
        lengths = sorted({int(_words(row)[key][len(key) + 1 :]) for row in rows})
        axes.set_xticks(lengths, [str(length) for length in lengths], minor=False)
        if metric == "ms":
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(f"{key}, tokens")
        axes.set_ylabel(METRICS[metric][0])
        axes.set_title(name, fontsize=9)
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    styles = ("dashed", "dotted", "dash-dotted")
    told = [f"{style}: {PEERS.get(name, name)}" for name, style in zip(peers, styles, strict=False)]
    return figure, "; ".join(["Tessera", *told])


def _panels(rows: list[Mapping[str, Any]], key: str) -> tuple[list[str], list[str]]:
    """Of each row the row of panels (head dim and whatever else differs) and the column (the mask) that it is in.

    Batch and heads usually change with the length, so that the work stays the same; they make panels only where there
    would be two bars of one length.
    """
    masks = [" ".join(word for name, word in _words(row).items() if name in MASKS) or "full" for row in rows]
    for without in (("b", "hq", "hkv"), ()):
        settings = _labels(rows, without=(key, *MASKS, *without))
        if len({(s, m, _words(row)[key]) for s, m, row in zip(settings, masks, rows, strict=True)}) == len(rows):
            return settings, masks
    raise refusal("source", "several rows of one problem", "one of each; or kind='time'")


def _draw_panel(axes: Axes, rows: list[Mapping[str, Any]], key: str, sides: list[str], metric: str) -> None:
    """A group of bars for each length, one bar for each of the sides that has a time; the first side is Tessera."""
    value = METRICS[metric][1]
    rows = sorted(rows, key=lambda row: int(_words(row)[key][len(key) + 1 :]))
    width = 0.84 / len(sides)
    for place, side in enumerate(sides):
        times = [row["us"] if place == 0 else row.get("peers", {}).get(side) for row in rows]
        known = [(x, value(row, us)) for x, (row, us) in enumerate(zip(rows, times, strict=True)) if us is not None]
        at = [x + (place - (len(sides) - 1) / 2) * width for x, _ in known]
        colour = COLOURS[place % len(COLOURS)]
        axes.bar(at, [height for _, height in known], width, color=colour, label=PEERS.get(side, side))
    axes.set_xticks(range(len(rows)), [_words(row)[key][len(key) + 1 :] for row in rows], fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _draw_bars(rows: list[Mapping[str, Any]], peer: str | None, metric: str) -> tuple[Figure, str]:
    key = _length_key(rows)
    if key is None:
        raise refusal("source", "rows of one length", "rows that differ in sq or sk; or kind='time'")
    rows = [row for row in rows if key in _words(row)]
    settings, masks = _panels(rows, key)
    lines, columns = list(dict.fromkeys(settings)), list(dict.fromkeys(masks))
    peers = _peers(rows, peer)
    figure = new_figure(1.2 + 3.6 * len(columns), 1.0 + 1.9 * len(lines))
    panels = figure.subplots(len(lines), len(columns), squeeze=False, sharey="row")
    for line, setting in enumerate(lines):
        for column, mask in enumerate(columns):
            axes = panels[line][column]
            here = [row for row, s, m in zip(rows, settings, masks, strict=True) if (s, m) == (setting, mask)]
            _draw_panel(axes, here, key, ["Tessera", *peers], metric)
            axes.set_title(mask if setting == "all" else f"{setting}, {mask}", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel(f"{key}, tokens", fontsize=8)
    for axes in panels[:, 0]:
        axes.set_ylabel(METRICS[metric][0], fontsize=8)
    panels[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    beside = ", ".join(PEERS.get(name, name) for name in peers)
    return figure, f"Tessera beside {beside}" if beside else "Tessera"


def _draw_roofline(machine: Mapping[str, Any], rows: list[Mapping[str, Any]], peer: str | None) -> tuple[Figure, str]:
    """Operations a second over operations a byte (Williams, Waterman and Patterson 2009, doi 10.1145/1498765.1498785).

    The limits are those measured in the same run, on a GPU by the instruction that they name; another product unit may
    pass them.
    """
    limits = machine.get("roofline", {})
    if not all(isinstance(limits.get(key), (int, float)) and limits[key] > 0 for key in ("gflops", "gbytes_s")):
        raise refusal("source", "a machine without limits", "'roofline' with 'gflops' and 'gbytes_s' under 'machine'")
    rows = [row for row in rows if row.get("gbyte", 0) > 0 and row.get("gflop", 0) > 0]
    if not rows:
        raise refusal("source", "no row with operations and bytes", "rows with 'gflop' and 'gbyte'")
    peers = _peers(rows, peer)
    settings = _labels(rows, without=("sq", "sk", "b"))
    figure = new_figure(8.0, 4.8)
    axes = figure.subplots()
    for place, setting in enumerate(dict.fromkeys(settings)):
        mine = [row for row, s in zip(rows, settings, strict=True) if s == setting]
        colour = COLOURS[place % len(COLOURS)]
        intensity = [row["gflop"] / row["gbyte"] for row in mine]
        axes.plot(intensity, [row["gflop"] / row["us"] * 1e3 for row in mine], "o", color=colour, ms=4, label=setting)
        for name, marker in zip(peers, ("x", "+", "1"), strict=False):
            beside = [(x, row) for x, row in zip(intensity, mine, strict=True) if name in row.get("peers", {})]
            times = [row["gflop"] / row["peers"][name] * 1e3 for _, row in beside]
            axes.plot([x for x, _ in beside], times, marker, color=colour, ms=4, mew=0.8)
    reach = [row["gflop"] / row["gbyte"] for row in rows]
    slope, flat = limits["gbytes_s"] / 1e3, limits["gflops"] / 1e3
    edge = sorted({min(reach) / 1.5, flat / slope, max(reach) * 1.5})
    # Results that do not say it are older than the measurement by other instructions.
    by = f", {limits.get('products', 'mma.sync')}" if str(machine.get("target", "")).startswith("cuda") else ""
    axes.plot(edge, [min(flat, slope * x) for x in edge], color="#404040", lw=1, label=f"limits measured beside{by}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which("{x:g}")
    axes.tick_params(axis="y", which="both", labelsize=7)
    axes.set_xlabel("operations a byte")
    axes.set_ylabel("TFLOP/s")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    told = [f"{mark}: {PEERS.get(name, name)}" for name, mark in zip(peers, ("x", "+", "1"), strict=False)]
    return figure, "; ".join(["dots: Tessera", *told])


def bench(
    source: str | Path | Mapping[str, Any],
    *,
    kind: str = "auto",
    peer: str | None = None,
    metric: str = "tflops",
    title: str | None = None,
) -> Figure:
    """Draws results of `tessera bench`.

    Args:
        source: path of a JSON file that `tessera bench --json` or `--save` wrote, or its contents as a dict.
        kind: "speedup": a bar a row, time of a peer over time of Tessera, with the 10th to 90th percentile of
            neighbouring runs. "bars": by length (sq or sk, whichever varies), Tessera beside each peer, one panel a
            head dim and mask. "length": lines over the sequence length (sq or sk, whichever varies), one for each
            setting, peers dashed. "time": a bar a row, milliseconds. "roofline": operations a second over operations a
            byte, beside the limits measured in the same run. "auto": "speedup" if there are peers, else "length" if
            lengths vary, else "time".
        peer: which peer, where rows were measured beside several.
        metric: of "bars" and "length": "ms", "tflops" or "gbytes_s".
        title: instead of one that says what the picture shows.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: not a bench result, an unknown kind, metric or peer. OSError: a file that cannot be read.
        ImportError: no matplotlib.
    """
    machine, rows = _load(source)
    if kind not in KINDS:
        raise refusal("kind", repr(kind), f"one of {', '.join(KINDS)}")
    if metric not in METRICS:
        raise refusal("metric", repr(metric), f"one of {', '.join(METRICS)}")
    if kind == "auto":
        kind = "speedup" if _peers(rows, peer) else "length" if _length_key(rows) else "time"
    if kind == "speedup":
        figure, told = _draw_speedup(rows, peer)
    elif kind == "bars":
        figure, told = _draw_bars(rows, peer, metric)
    elif kind == "length":
        figure, told = _draw_length(rows, peer, metric)
    elif kind == "roofline":
        figure, told = _draw_roofline(machine, rows, peer)
    else:
        spreads = [(row["spread"]["p10"] / 1e3, row["spread"]["p90"] / 1e3) for row in rows if "spread" in row]
        figure, axes = _bars(rows, [row["us"] / 1e3 for row in rows], spreads if len(spreads) == len(rows) else None)
        axes.set_xlabel("milliseconds; whiskers: 10th to 90th percentile")
        told = "Tessera"
    gpus = [gpu["name"] for gpu in machine.get("gpus", []) if str(machine.get("target", "")).startswith("cuda")]
    where = ", ".join(str(word) for word in (*(gpus[:1] or [machine.get("cpu")]), machine.get("date")) if word)
    threads = rows[0].get("threads")
    where += f", {threads} threads" if threads else ""
    figure.suptitle(title if title is not None else f"{told}\n{where}", fontsize=9)
    return figure
