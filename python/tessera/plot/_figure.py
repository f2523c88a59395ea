# SPDX-License-Identifier: Apache-2.0
"""What both kinds of picture share: an empty figure, colours, the text of a refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that stay apart for colour-blind readers and in grey (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")


def refusal(argument: str, got: object, want: str) -> ValueError:
    """The error of a wrong argument, in the words of every other refusal of Tessera."""
    return ValueError(f"{argument}: got {got}; want {want}")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, sizes in inches. ImportError says how to get matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ImportError("tessera.plot: got no matplotlib; want it installed: pip install matplotlib") from missing
    return Figure(figsize=(width, height), layout="constrained")
