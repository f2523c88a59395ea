# SPDX-License-Identifier: Apache-2.0
"""`python -m tessera.plot`: the pictures from a shell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tessera.plot._bench import KINDS, METRICS, bench
from tessera.plot._tiles import tiles


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tessera.plot", description="Pictures of tiles and of measurements."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    speed = verbs.add_parser("bench", help="results of `tessera bench`")
    speed.add_argument("file", help="JSON that `tessera bench --json` or `--save` wrote")
    speed.add_argument("--kind", default="auto", choices=KINDS)
    speed.add_argument("--metric", default="tflops", choices=sorted(METRICS), help="of --kind bars and length")
    speed.add_argument("--peer", help="which peer, where there are several")
    maps = verbs.add_parser("tiles", help="mass per tile, or tiles that are computed")
    maps.add_argument(
        "file", help=".npy of (batch, heads, query blocks, key blocks); `tessera run -- mass=mean` writes one"
    )
    maps.add_argument("--batch", type=int, default=0)
    maps.add_argument("--head", type=int, action="append", dest="heads", help="may be repeated; default: all")
    maps.add_argument("--linear", action="store_true", help="linear colours instead of logarithmic ones")
    for verb in (speed, maps):
        verb.add_argument("-o", "--out", required=True, help="picture to write: .svg, .png or .pdf")
        verb.add_argument("--title")
    given = parser.parse_args(words)
    try:
        if given.verb == "bench":
            figure = bench(given.file, kind=given.kind, metric=given.metric, peer=given.peer, title=given.title)
        else:
            import numpy as np

            array = np.load(given.file, allow_pickle=False)
            figure = tiles(array, batch=given.batch, heads=given.heads, log=not given.linear, title=given.title)
        figure.savefig(given.out)
    except (ValueError, OSError, ImportError) as problem:
        print(f"tessera.plot: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
