# SPDX-License-Identifier: Apache-2.0
"""Runs skip states of several thresholds beside dense attention, and finds the thresholds of a wanted error."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .._checks import real, whole
from ..attention import attention
from ..skip import Rule, SkipState
from ..tiles import as_numpy
from .thresholds import LayerThresholds, SkipThresholds

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._arguments import AttentionOptions

Array = Any

# Positions of the first step's threshold; the last step's is `spread` above. For `mass` a position is log2 of a mass.
_GRID = {
    "mass": [math.log2(0.0002) + step * math.log2(2.5) for step in range(8)],
    "threshold": [-12.0, -9.0, -7.0, -5.0, -4.0, -3.0, -2.0, -1.0],
}
_LEAST, _MOST = {"mass": -30.5, "threshold": -100.0}, {"mass": 1.9, "threshold": 0.0}
_SPREAD = {"mass": math.log2(6), "threshold": 0.0}


class Calibration:
    """Finds for each layer, and for each head if wanted, the largest threshold of a wanted error against dense.

        calibration = tessera.calibration.Calibration(target=0.03, steps=50)
        for seed in (0, 1):
            for step in range(50):
                ...
                out = calibration(q, k, v, layer="blocks.0", step=step)  # dense, which the model goes on with
        calibration.solve().save("thresholds.json")

    A call computes dense attention, returns it, and moves states of a grid of thresholds on by the same q, k, v. So a
    run's inputs are those of the dense model, and errors are measured against dense attention, never against an output
    that is already sparse. A layer's error is √(Σ ‖o − dense‖² / Σ ‖dense‖²) over rows, heads, steps, streams and runs;
    a head's is that over its own rows. A run begins with step 0.

    Runs differ: `solve` says by how much their mean does (`LayerThresholds.standard_error`), and so whether the target
    can be met on runs that were not measured.

    target: the relative L2 error wanted, above 0 and below 1. by_head: every head gets a threshold of its own, and each
    has the target as its error. spread: how far the last step's threshold is above the first one's: a factor for
    `mass`, default 6, or powers of two for `threshold`, default 0. block, steps, warm_up and growth: as `SkipState` has
    them. Needs numpy. A call takes some nine times the time of dense attention. Raises ValueError for options out of
    range.
    """

    def __init__(
        self,
        target: float,
        *,
        rule: Rule = "mass",
        by_head: bool = False,
        spread: float | None = None,
        block: tuple[int, int] = (128, 128),
        steps: int = 50,
        warm_up: int = 2,
        growth: int = 1,
    ) -> None:
        self.target = real("target", target)
        if not 0 < self.target < 1:
            raise ValueError(f"target: got {target}; want an error above 0 and below 1")
        self._options = {"rule": rule, "block": block, "steps": steps, "warm_up": warm_up, "growth": growth}
        SkipState(seqlen_q=1, seqlen_k=1, heads_q=1, **self._options)  # raises for bad options
        self._rule: Rule = rule
        self.by_head = bool(by_head)
        if spread is None:
            self._spread = _SPREAD[rule]
        else:
            self._spread = real("spread", spread)
            if rule == "mass":
                if not self._spread > 0:
                    raise ValueError(f"spread: got {spread}; want a factor above 0")
                self._spread = math.log2(self._spread)
        self._layers: dict[str, _Layer] = {}

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        layer: str,
        step: int,
        stream: str = "",
        **options: Unpack[AttentionOptions],
    ) -> Array:
        """`attention(q, k, v, **options)` over all tiles, q and k of four dimensions; what states of this layer and
        stream make of it is counted. Raises ValueError as `SkipState` does, and for return_lse and the like.
        """
        for name in ("return_lse", "return_residual", "tiles", "cu_seqlens_q", "cu_seqlens_k"):
            if options.get(name):
                raise ValueError(
                    f"{name}: got {options[name]!r}; want a call of dense rows that returns its output alone"
                )
        dense = attention(q, k, v, **options)
        heads = int(q.shape[2])
        if layer not in self._layers:
            self._layers[layer] = _Layer(heads, [list(_GRID[self._rule]) for _ in range(heads)])
        found = self._layers[layer]
        if found.heads != heads:
            raise ValueError(f"q: got {heads} heads; want {found.heads}, as layer {layer!r} has")
        shape = (int(q.shape[0]), int(q.shape[1]), int(k.shape[1]))
        if (stream, shape) not in found.states:
            found.states[stream, shape] = [self._state(found, shape, at, q) for at in range(len(found.grid[0]))]
            found.runs[stream, shape] = []
        runs = found.runs[stream, shape]
        begins = step == 0 or not runs
        run = _Run(len(found.grid[0])) if begins else runs[-1]
        counted = whole("step", step) >= int(self._options["warm_up"])  # before, all tiles are computed: no error
        for at, state in enumerate(found.states[stream, shape]):
            share = _share_by_head(state) if counted else 1.0
            out = state(q, k, v, step=step, **options)
            found.active[at] = found.active[at] + share
            run.errors[at] = run.errors[at] + _squares(out, dense)
        run.norms = run.norms + _squares(dense, None)
        if begins:
            runs.append(run)
        found.calls += 1
        return dense

    def _ends(self, position: float) -> tuple[float, float]:
        first = min(max(position, _LEAST[self._rule]), _MOST[self._rule])
        last = min(max(position + self._spread, _LEAST[self._rule]), _MOST[self._rule])
        return (2.0**first, 2.0**last) if self._rule == "mass" else (first, last)

    def _state(self, found: _Layer, shape: tuple[int, int, int], at: int, like: Array) -> SkipState:
        batch, seqlen_q, seqlen_k = shape
        each = {head: self._ends(grid[at]) for head, grid in enumerate(found.grid)}
        sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": found.heads}
        return SkipState(**sizes, heads=each, like=like, **self._options)

    def curves(self, layer: str) -> dict[str, Any]:
        """What was measured: NumPy arrays `first` (candidates, heads), the first step's thresholds; `error`, `active`
        (candidates, heads + 1), whose last column is the layer. Raises KeyError for a layer that was not called."""
        import numpy

        found = self._layers[layer]
        by_run, norms_by_run = found.sums()
        errors, norms = by_run.sum(0), norms_by_run.sum(0)  # (candidates, heads), (heads)
        with numpy.errstate(divide="ignore", invalid="ignore"):
            by_head = numpy.nan_to_num(errors / norms)
            whole_layer = numpy.nan_to_num(errors.sum(1) / norms.sum())
        active = numpy.stack([numpy.broadcast_to(each / found.calls, found.heads) for each in found.active])
        return {
            "first": numpy.asarray([[self._ends(x)[0] for x in grid] for grid in found.grid]).T,
            "error": numpy.sqrt(numpy.column_stack((by_head, whole_layer))),
            "active": numpy.column_stack((active, active.mean(1))),
        }

    def solve(self) -> SkipThresholds:
        """The thresholds of the target, interpolated between those that were measured.

        A layer whose every candidate stays below the target gets the largest one; `error` says what that reaches. One
        whose every candidate is above it gets a threshold that keeps all tiles. Raises ValueError before a run.
        """
        if not self._layers:
            raise ValueError("calibration: got no call; want runs of the model before")
        layers = {}
        for name, found in self._layers.items():
            positions = self._positions(name)
            curves = self.curves(name)
            columns = range(found.heads) if self.by_head else [found.heads]
            grid = [found.grid[head if self.by_head else 0] for head in range(found.heads)]
            at = dict(zip(columns, positions, strict=True))
            error = {c: _read_error(grid[min(c, found.heads - 1)], curves["error"][:, c], at[c]) for c in columns}
            share = {c: _read(grid[min(c, found.heads - 1)], curves["active"][:, c], at[c]) for c in columns}
            ends = {c: self._ends(at[c]) for c in columns}
            heads = {int(c): ends[c] for c in columns} if self.by_head else {}
            by_run, norms_by_run = found.sums()
            norms = norms_by_run.sum(0).tolist()
            if self.by_head:
                total = sum(norms) or 1.0
                whole_error = math.sqrt(sum(norms[c] * error[c] ** 2 for c in columns) / total)
                ramp = self._ends(sorted(positions)[len(positions) // 2])
            else:
                whole_error, ramp = error[found.heads], ends[found.heads]
            at_heads = positions if self.by_head else positions * found.heads
            squares = [
                sum(_read(found.grid[h], run[:, h], x) for h, x in enumerate(at_heads)) for run in by_run
            ]  # of each run
            uncertain = _standard_error(squares, norms_by_run.sum(1).tolist())
            layers[name] = LayerThresholds(ramp, heads, whole_error, sum(share.values()) / len(share), uncertain)
        return SkipThresholds(self.target, self._options, layers)

    def narrow(self, width: float = 1.0) -> None:
        """Forgets the runs so far, and measures the next ones at five thresholds around what they gave: within `width`
        powers of two of it on either side. Raises ValueError before a run.
        """
        if not self._layers:
            raise ValueError("calibration: got no call; want runs of the model before")
        narrowed = {}
        for name, found in self._layers.items():
            positions = self._positions(name)
            if not self.by_head:
                positions = positions * found.heads
            grids = [[x + width * part for part in (-1.0, -0.5, 0.0, 0.5, 1.0)] for x in positions]
            narrowed[name] = _Layer(found.heads, grids)
        self._layers = narrowed

    def _positions(self, layer: str) -> list[float]:
        found, error = self._layers[layer], self.curves(layer)["error"]
        if self.by_head:
            return [self._position(found.grid[head], error[:, head]) for head in range(found.heads)]
        return [self._position(found.grid[0], error[:, found.heads])]

    def _position(self, grid: list[float], errors: Any) -> float:
        """Where the curve crosses the target, from the largest threshold down: log error over log threshold."""
        at = len(grid) - 1
        while at >= 0 and errors[at] > self.target:
            at -= 1
        if at < 0:
            return _LEAST[self._rule] - abs(self._spread)
        if at == len(grid) - 1:
            return grid[at]
        low, high = max(float(errors[at]), self.target / 64), float(errors[at + 1])
        return grid[at] + (grid[at + 1] - grid[at]) * math.log(self.target / low) / math.log(high / low)


class _Layer:
    def __init__(self, heads: int, grid: list[list[float]]) -> None:
        self.heads, self.grid = heads, grid  # grid: of each head, ascending
        self.states: dict[Any, list[SkipState]] = {}
        self.runs: dict[Any, list[_Run]] = {}
        self.calls = 0
        self.active: list[Any] = [0.0 for _ in grid[0]]

    def sums(self) -> tuple[Any, Any]:
        """Of each run: NumPy arrays of squared errors (runs, candidates, heads) and squared norms (runs, heads)."""
        import numpy

        runs = [run for of_stream in self.runs.values() for run in of_stream]
        errors = numpy.stack([numpy.stack([as_numpy(each) for each in run.errors]) for run in runs])
        return errors, numpy.stack([as_numpy(run.norms) for run in runs])


class _Run:
    """Sums over the calls of one run of a stream."""

    def __init__(self, candidates: int) -> None:
        self.errors: list[Any] = [0.0] * candidates  # (heads) each
        self.norms: Any = 0.0


def _share_by_head(state: SkipState) -> Any:
    """Share of the tiles that the next step computes, (heads)."""
    mask = state.tile_list().to_mask(key_blocks=state._blocks[1])
    return mask.mean((0, 2, 3))


def _squares(x: Array, other: Array | None) -> Array:
    """Σ (x − other)² by head, in fp64: in the memory of a torch tensor, so that a GPU is not waited for."""
    if type(x).__module__.partition(".")[0] == "torch":
        x = x.detach().double()
        return (x if other is None else x - other.detach().double()).square().sum((0, 1, 3))
    import numpy

    x = as_numpy(x).astype(numpy.float64)
    return numpy.square(x if other is None else x - as_numpy(other).astype(numpy.float64)).sum((0, 1, 3))


def _standard_error(squares: list[float], norms: list[float]) -> float | None:
    """Of √(Σ squares / Σ norms), relative to it, from how far single runs are from the ratio; None for one run."""
    runs, ratio = len(squares), sum(squares) / (sum(norms) or 1.0)
    if runs < 2 or ratio == 0:
        return None
    apart = sum((square - ratio * norm) ** 2 for square, norm in zip(squares, norms, strict=True))
    return 0.5 * math.sqrt(apart * runs / (runs - 1)) / (ratio * sum(norms))


def _read_error(grid: list[float], errors: Any, position: float) -> float:
    """As `_read`, of the logarithm, as the position was found."""
    import numpy

    if position < grid[0]:
        return 0.0
    return float(numpy.exp(_read(grid, numpy.log(numpy.maximum(errors, 1e-30)), position)))


def _read(grid: list[float], values: Any, position: float) -> float:
    """The curve's value at a position; below the grid all tiles are kept, and there is no error."""
    import numpy

    if position < grid[0]:
        return 0.0 if values[0] <= values[-1] else 1.0
    return float(numpy.interp(position, grid, values))
