# SPDX-License-Identifier: Apache-2.0
"""Tile maps and maps of probability mass, one per head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tessera.plot._figure import COLOURS, new_figure, refusal

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _tile_array(argument: str, source: Any, query_blocks: int | None, key_blocks: int | None) -> np.ndarray:
    """A source as numpy (batch, heads, query blocks, key blocks), bool or float32; leading axes may be missing."""
    import numpy as np

    if hasattr(source, "to_mask"):
        source = source.to_mask(query_blocks=query_blocks, key_blocks=key_blocks)
    if hasattr(source, "detach"):  # torch: out of the graph; a bf16 mass has no numpy type
        source = source.detach().cpu()
        source = source if str(source.dtype) == "torch.bool" else source.float()
    array = np.asarray(source)
    if array.dtype != bool:
        if array.dtype.kind not in "fiu":
            raise refusal(argument, f"dtype {array.dtype}", "a TileList, or an array of bool (tiles) or numbers (mass)")
        array = array.astype(np.float32)
        if not np.isfinite(array).all() or (array < 0).any():
            raise refusal(argument, "a mass that is negative, infinite or NaN", "finite masses of at least 0")
    if not 2 <= array.ndim <= 4 or 0 in array.shape:
        raise refusal(
            argument,
            f"shape {array.shape}",
            "(batch, heads, query blocks, key blocks), or the last two or three of them",
        )
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _kept_like(kept: Any, mass: np.ndarray, batch: int) -> np.ndarray:
    """The choice for one batch entry as bool (heads, query blocks, key blocks) of mass (batch, heads, ...).

    A list by key head, or one for all heads or for the whole batch, is spread over what it stands for.
    """
    choice = _tile_array("kept", kept, *mass.shape[2:])
    if choice.dtype != bool:
        raise refusal("kept", f"dtype {choice.dtype}", "a TileList or an array of bool")
    batches, heads = choice.shape[:2]
    if batches not in (1, mass.shape[0]) or mass.shape[1] % heads or choice.shape[2:] != mass.shape[2:]:
        want = f"{mass.shape}, where a batch of 1 and any heads that divide {mass.shape[1]} will do"
        raise refusal("kept", f"shape {choice.shape}", want)
    return choice[batch if batches > 1 else 0].repeat(mass.shape[1] // heads, axis=0)


def _heads_of(heads: Sequence[int] | None, names: Sequence[str] | None, count: int) -> dict[int, str]:
    """The heads to draw, in order, and their names."""
    chosen = list(range(count)) if heads is None else [int(head) for head in heads]
    for head in chosen:
        if not 0 <= head < count:
            raise refusal("heads", head, f"0 to {count - 1}")
    if not chosen or len(set(chosen)) < len(chosen):
        raise refusal("heads", chosen, "at least one head, none twice")
    if names is not None and len(names) != len(chosen):
        raise refusal("names", f"{len(names)} names", f"{len(chosen)}, one for each drawn head")
    return dict(zip(chosen, names or [f"head {head}" for head in chosen], strict=True))


def _fewest(mass: np.ndarray, share: float) -> float:
    """Share of the nonzero tiles that hold `share` of the mass of each query block, taken largest first."""
    import numpy as np

    falling = -np.sort(-mass, axis=1)
    running = np.cumsum(falling, axis=1, dtype=np.float64)
    before = np.concatenate((np.zeros_like(running[:, :1]), running[:, :-1]), axis=1)
    needed = (before < share * running[:, -1:]) & (falling > 0)
    return float(needed.sum() / max(1, np.count_nonzero(mass)))


def _describe(tile_map: np.ndarray, kept: np.ndarray | None) -> str:
    """One line under a head's name: how much is there, and how much of it is kept."""
    if tile_map.dtype == bool:
        return f"{tile_map.mean():.0%} of the tiles"
    if kept is None:
        return f"99% of the mass in {_fewest(tile_map, 0.99):.0%} of the tiles"
    visible = max(1, int((tile_map > 0).sum()))
    held = float(tile_map[kept].sum(dtype="float64") / max(float(tile_map.sum(dtype="float64")), 1e-30))
    return f"{held:.2%} of the mass in {(kept & (tile_map > 0)).sum() / visible:.0%} of the tiles"


def _draw_tiles(axes: Axes, tile_map: np.ndarray, kept: np.ndarray | None, norm: Any) -> Any:
    """One head: a map of mass, or of tiles that are there; what is not kept is hidden behind grey."""
    import numpy as np
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    axes.set_facecolor("#ffffff")
    if tile_map.dtype == bool:
        image = axes.imshow(
            tile_map, cmap=ListedColormap(["#ffffff", COLOURS[0]]), vmin=0, vmax=1, interpolation="nearest"
        )
    else:
        shown = np.ma.masked_less_equal(tile_map, 0)
        image = axes.imshow(shown, cmap="viridis", norm=norm, interpolation="nearest")
    if kept is not None:
        skipped = np.ma.masked_where(kept | (tile_map == 0), np.ones(tile_map.shape))
        axes.imshow(skipped, cmap=ListedColormap(["#d8d8d8"]), interpolation="nearest")
    axes.tick_params(labelsize=7)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True))
    return image


def _norm(maps: np.ndarray, log: bool) -> Any:
    """Colours shared by all heads. In a log scale the smallest mass shown is 1e-6 of the largest."""
    from matplotlib.colors import LogNorm, Normalize

    top = float(maps.max()) or 1.0
    if not log:
        return Normalize(0, top)
    return LogNorm(vmin=max(float(maps[maps > 0].min(initial=top)), top * 1e-6) * 0.999, vmax=top)


def tiles(
    source: Any,
    *,
    kept: Any = None,
    batch: int = 0,
    heads: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    query_blocks: int | None = None,
    key_blocks: int | None = None,
    log: bool = True,
    columns: int | None = None,
    title: str | None = None,
) -> Figure:
    """Draws tiles per head: query blocks downwards, key blocks to the right.

    Args:
        source: a `TileList`; an array of bool, True where a tile is computed; or the probability mass per tile as
            `attention(..., mass="mean")` gives it. Arrays (numpy, torch, ...) are (batch, heads, query blocks, key
            blocks), or the last two or three of these. A mass is drawn in colours that all heads share, a mass of 0
            (masked or not computed) in white.
        kept: with a mass, the tiles to be kept (`TileList` or bool array; heads may be key heads or 1): the others are
            greyed out, and each head says how much of its mass is kept.
        batch: the batch entry to draw.
        heads: the heads to draw, in this order; all by default.
        names: one name for each drawn head instead of "head N".
        query_blocks, key_blocks: size of the map where a TileList does not tell: a list of indices has no number
            of key blocks, a transposed one none of query blocks.
        log: logarithmic colours of a mass, from 1e-6 of the largest; False: linear from 0.
        columns: heads side by side; by default as square as can be.
        title: above everything.

    Returns:
        A matplotlib Figure with one Axes per head (and one colour bar for a mass).

    Raises:
        ValueError: an argument of a wrong shape, dtype or range, naming it. ImportError: no matplotlib.
    """
    whole = _tile_array("source", source, query_blocks, key_blocks)
    if not 0 <= batch < whole.shape[0]:
        raise refusal("batch", batch, f"0 to {whole.shape[0] - 1}")
    maps, is_mass = whole[batch], whole.dtype != bool
    if kept is not None and not is_mass:
        raise refusal("kept", "a choice of tiles beside a source that is one itself", "a mass as source, or no kept")
    choice = None if kept is None else _kept_like(kept, whole, batch)
    chosen = _heads_of(heads, names, maps.shape[0])
    if columns is not None and columns < 1:
        raise refusal("columns", columns, "at least 1")

    across = min(columns or math.ceil(math.sqrt(len(chosen))), len(chosen))
    down = math.ceil(len(chosen) / across)
    aspect = min(max(maps.shape[1] / maps.shape[2], 0.25), 2.0)
    figure = new_figure(2.6 * across + (0.9 if is_mass else 0.2), (2.3 * aspect + 0.6) * down + (0.4 if title else 0.1))
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).ravel()
    norm = _norm(maps[list(chosen)], log) if is_mass else None
    for place, (head, name) in enumerate(chosen.items()):
        part = None if choice is None else choice[head]
        image = _draw_tiles(grid[place], maps[head], part, norm)
        grid[place].set_title(f"{name}\n{_describe(maps[head], part)}", fontsize=8)
    for axes in grid[len(chosen) :]:
        axes.set_visible(False)
    figure.supxlabel("key block", fontsize=8)
    figure.supylabel("query block", fontsize=8)
    if is_mass:
        figure.colorbar(image, ax=grid.tolist(), label="probability mass in the tile", shrink=0.8)
    if title:
        figure.suptitle(title)
    return figure
