# SPDX-License-Identifier: Apache-2.0
"""A page about runs: HTML with SVG in it, of active shares by layer and step, times, errors and tile maps."""

import html

CELL = 14


def colour(share):
    """White for no tile, dark blue for all."""
    return f"rgb({int(235 - 205 * share)},{int(240 - 165 * share)},{int(250 - 110 * share)})"


def svg(width, height, parts):
    return f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">{"".join(parts)}</svg>'


def rectangle(x, y, width, height, share, title):
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour(share)}">'
        f"<title>{html.escape(title)}</title></rect>"
    )


def shares(calls):
    """A row a layer, a column a step. calls: dicts of layer, step, active."""
    layers, steps = (sorted({call[name] for call in calls}) for name in ("layer", "step"))
    parts = [f'<text x="0" y="{(at + 0.8) * CELL:g}">layer {layer}</text>' for at, layer in enumerate(layers)]
    for call in calls:
        x, y = 60 + CELL * steps.index(call["step"]), CELL * layers.index(call["layer"])
        title = f"layer {call['layer']}, step {call['step']}: {call['active']:.3f} active, {call['seconds']:.3f} s"
        parts.append(rectangle(x, y, CELL - 1, CELL - 1, call["active"], title))
    return svg(60 + CELL * len(steps), CELL * len(layers), parts)


def tile_map(mask, title):
    """mask: (query blocks, key blocks), shares of the heads that compute a tile."""
    size = 96 / max(len(mask), len(mask[0]))
    parts = [
        rectangle(x * size, y * size, size, size, share, f"query block {y}, key block {x}: {share:.2f} of the heads")
        for y, row in enumerate(mask)
        for x, share in enumerate(row)
    ]
    return f"<figure>{svg(96, 96, parts)}<figcaption>{html.escape(title)}</figcaption></figure>"


def page(runs):
    """runs: dicts of title, row (numbers by name), calls (of `shares`) and maps, (title, mask) of `tile_map`."""
    style = (
        "body{font:14px sans-serif;margin:2em}svg text{font-size:11px}figure{display:inline-block;margin:0 8px 8px 0}"
    )
    style += "figcaption{font-size:11px}td,th{padding:2px 12px 2px 0;text-align:right}"
    names = list(dict.fromkeys(name for run in runs for name in run["row"]))
    lines = ["<tr><th>run</th>" + "".join(f"<th>{html.escape(name)}</th>" for name in names) + "</tr>"]
    for run in runs:
        numbers = (f"<td>{run['row'][name]:.4g}</td>" if name in run["row"] else "<td></td>" for name in names)
        lines.append(f"<tr><th>{html.escape(run['title'])}</th>{''.join(numbers)}</tr>")
    body = [f"<h1>Skip states in a video model</h1><table>{''.join(lines)}</table>"]
    for run in runs:
        if run["maps"]:
            body.append(f"<h2>{html.escape(run['title'])}</h2><p>Share of tiles computed, by layer and step</p>")
            body.append(shares(run["calls"]) + "<p>Tiles of layer 0, by step</p>")
            body += [tile_map(mask, title) for title, mask in run["maps"]]
    head = f'<meta charset="utf-8"><title>Skip states in a video model</title><style>{style}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{''.join(body)}</body></html>\n"
