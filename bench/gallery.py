#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/gallery.md: each score and mask of the tests' zoo, and a picture of the tiles of each mask.

usage: bench/gallery.py [--check]
--check changes nothing and exits 1 when the page or a picture is not what the functions give. Needs the tessera package
and torch.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import tessera
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "python"))
import expressions_zoo  # noqa: E402

PAGE, PICTURES = ROOT / "docs" / "gallery.md", ROOT / "docs" / "images" / "gallery"
LENGTH, HEADS, BLOCK = 2048, 4, 64
COLOURS = {1: "#9ecae1", 2: "#08519c"}  # partial, full
CAPTURED = {
    "documents": f"int32 (seqlen), token // {expressions_zoo.LARGE.document}",
    "seen": "bool (seqlen), token % 7 != 3",
    "slopes": "fp32 (heads), 2 ** (-2 * (head + 1))",
    "bias": "fp32 (heads, 2 * seqlen)",
    "half_bias": "bf16 (heads, 2 * seqlen)",
    "cap": "fp32 (), 9",
}

HEAD = f"""<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by bench/gallery.py from tests/python/expressions_zoo.py. -->
# Scores and masks: a gallery

What people write, as functions of Python ([python.md](python.md), section 13). `s` is the score, `b`, `h`, `q` and `k`
the sequence, the head and the positions. Each picture has the tiles of {BLOCK} × {BLOCK} of {LENGTH} queries,
downwards, and {LENGTH} keys, of head 0: white tiles hide all keys and are not computed, dark ones show all and need no
test of elements, light ones are tested. The classes are those that interval arithmetic on the expression finds without
looking at elements; the last column counts the tiles that are light although every key in them is hidden, or shown.
Times beside torch's flex_attention: [experiments/expressions.md](experiments/expressions.md), and
`bench/flex_attention.py` on your machine.

| mask | none | partial | full | could be none or full |
|---|---|---|---|---|
"""


def classes_of(mask: Any) -> np.ndarray:
    """uint8 (heads, query blocks, key blocks): 0 none, 1 partial, 2 full, by intervals."""
    tiles = tessera.TileList.from_function(mask, (1, HEADS, LENGTH, LENGTH), block=(BLOCK, BLOCK), form="bitmask")
    listed = tiles.to_mask(key_blocks=LENGTH // BLOCK)[0]
    full = tessera.TileList(bits=tiles.full_bits, form="bitmask").to_mask(key_blocks=LENGTH // BLOCK)[0]
    return listed.astype(np.uint8) + full


def exact_classes(mask: Any) -> np.ndarray:
    """The same by every element."""
    sizes = (1, HEADS, LENGTH, LENGTH)
    at = [torch.arange(n).view([-1 if d == i else 1 for d in range(4)]) for i, n in enumerate(sizes)]
    shown = torch.as_tensor(mask(*at)).expand(sizes)[0]
    tiles = shown.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    return (tiles.any(4).any(2).byte() + tiles.all(4).all(2).byte()).numpy()


def picture(classes: np.ndarray) -> str:
    """SVG of (query blocks, key blocks): a path for each class, a rectangle for each run of tiles of a row."""
    rows, columns = classes.shape
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{5 * columns}" height="{5 * rows}" '
        f'viewBox="0 0 {columns} {rows}" shape-rendering="crispEdges">',
        f'<path fill="#fff" stroke="#888" stroke-width=".2" d="M0 0h{columns}v{rows}H0z"/>',
    ]
    for class_, colour in COLOURS.items():
        runs = []
        for y, row in enumerate(classes == class_):
            edges = np.flatnonzero(np.diff(np.concatenate(([0], row.astype(np.int8), [0]))))
            runs += [f"M{begin} {y}h{end - begin}v1H{begin}z" for begin, end in edges.reshape(-1, 2)]
        if runs:
            lines.append(f'<path fill="{colour}" d="{"".join(runs)}"/>')
    return "\n".join([*lines, "</svg>\n"])


def source(function: Any) -> str:
    """The function's text, with the numbers of its sizes."""
    text = textwrap.dedent(inspect.getsource(function)).replace(": Any", "").replace(" -> Any", "")
    text = re.sub(r"sizes\.(\w+)", lambda found: str(getattr(expressions_zoo.LARGE, found[1])), text)
    return text.replace("+ length]", f"+ {LENGTH}]")


def reads(function: Any) -> str:
    return "; ".join(f"`{name}`: {CAPTURED[name]}" for name in function.__code__.co_freevars if name in CAPTURED)


def pages() -> dict[Path, str]:
    """The text of each file."""
    zoo = expressions_zoo.zoo(length=LENGTH, heads=HEADS, sizes=expressions_zoo.LARGE)
    files: dict[Path, str] = {}
    table, sections = [], []
    for name, (score, mask) in zoo.items():
        function = score or mask
        lines = [f"## {name}", "", "```python", source(function).rstrip(), "```", ""]
        if reads(function):
            lines += [reads(function) + ".", ""]
        if score is not None:
            lines += ["A score: every tile that a mask beside it shows is computed.", ""]
        else:
            found, exact = classes_of(mask), exact_classes(mask)
            if ((found != 1) & (found != exact)).any():
                raise SystemExit(f"{name}: a tile of another class than its elements say")
            counts = [int((found == class_).sum()) for class_ in (0, 1, 2)]
            table.append(f"| {name} | {counts[0]} | {counts[1]} | {counts[2]} | {int((found != exact).sum())} |")
            path = PICTURES / f"{name.replace(' ', '_')}.svg"
            files[path] = picture(found[0])
            lines += [f"![Tiles of the mask {name}](images/gallery/{path.name})", ""]
        sections.append("\n".join(lines))
    counted = f"\nTiles of all {HEADS} heads, {found.size} in all.\n\n"
    files[PAGE] = HEAD + "\n".join(table) + "\n" + counted + "\n".join(sections)
    return files


def main() -> int:
    if sys.argv[1:] not in ([], ["--check"]):
        print(f"bench/gallery.py: got {sys.argv[1:]}, want --check or nothing", file=sys.stderr)
        return 2
    files = pages()
    if sys.argv[1:]:
        stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
        for path in stale:
            print(f"{path.relative_to(ROOT)}: not what bench/gallery.py writes", file=sys.stderr)
        return int(bool(stale))
    PICTURES.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
