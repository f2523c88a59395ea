# SPDX-License-Identifier: Apache-2.0
"""Thresholds by layer, and by head, as JSON."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

_FORMAT = "tessera skip thresholds 1"
_OPTIONS = ("rule", "block", "steps", "warm_up", "growth")
_LAYER = ("ramp", "heads", "error", "active")


class LayerThresholds(NamedTuple):
    """One layer's: `ramp` and `heads` as `SkipState` takes them; the relative L2 error against dense attention and the
    share of tiles computed that the calibration found there. standard_error: of `error` and relative to it, from the
    differences between the runs; as many other runs are √2 of it away on the mean. None for one run."""

    ramp: tuple[float, float]
    heads: dict[int, tuple[float, float]]
    error: float
    active: float
    standard_error: float | None = None


class SkipThresholds:
    """What `Calibration.solve` found: `SkipState(…, **thresholds.options("blocks.0"))` uses it, and so does
    `tessera.torch.SkipAttention(**thresholds.options("blocks.0"))`.

    target: the relative L2 error that was wanted. options: rule, block, steps, warm_up and growth of the states.
    """

    def __init__(self, target: float, options: Mapping[str, Any], layers: Mapping[str, LayerThresholds]) -> None:
        self.target = target
        self.layers = dict(layers)
        self._options = {name: options[name] for name in _OPTIONS}

    def options(self, layer: str) -> dict[str, Any]:
        """Options of `SkipState` for a layer. Raises KeyError for one that was not calibrated."""
        if layer not in self.layers:
            raise KeyError(f"layer: got {layer!r}; want one of {', '.join(map(repr, self.layers))}")
        found = self.layers[layer]
        return {**self._options, "ramp": found.ramp, "heads": dict(found.heads), "layer": layer}

    def to_json(self) -> str:
        """Text that `from_json` reads."""
        layers = {
            name: {
                "ramp": list(each.ramp),
                "heads": {str(head): list(ends) for head, ends in each.heads.items()},
                "error": each.error,
                "active": each.active,
                "standard_error": each.standard_error,
            }
            for name, each in self.layers.items()
        }
        options = {**self._options, "block": list(self._options["block"])}
        return json.dumps({"format": _FORMAT, "target": self.target, **options, "layers": layers}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> SkipThresholds:
        """What `to_json` gave. Raises ValueError for another text, naming what is wrong; whether thresholds are in
        range is checked where a state is made of them.
        """
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"text: got no JSON ({error}); want what to_json gave") from None
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            got = found.get("format") if isinstance(found, dict) else type(found).__name__
            raise ValueError(f"format: got {got!r}; want {_FORMAT!r}")
        for name in ("target", *_OPTIONS, "layers"):
            if name not in found:
                raise ValueError(f"{name}: got none; want one beside 'format'")
        layers = {}
        for layer, each in found["layers"].items():
            missing = [name for name in _LAYER if name not in each]
            if missing:
                raise ValueError(f"{missing[0]}: got none; want one in layer {layer!r}")
            heads = {int(head): _ends(f"heads of {layer!r}", ends) for head, ends in each["heads"].items()}
            ramp = _ends(f"ramp of {layer!r}", each["ramp"])
            uncertain = each.get("standard_error")
            uncertain = None if uncertain is None else float(uncertain)
            layers[layer] = LayerThresholds(ramp, heads, float(each["error"]), float(each["active"]), uncertain)
        return cls(float(found["target"]), {**found, "block": tuple(found["block"])}, layers)

    def save(self, path: str | os.PathLike[str]) -> None:
        """`to_json` into a file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SkipThresholds:
        """`from_json` of a file."""
        with open(path, encoding="utf-8") as file:
            return cls.from_json(file.read())

    def __repr__(self) -> str:
        lines = [f"{name}: ramp {each.ramp}, error {each.error:.4f}" for name, each in self.layers.items()]
        return f"<SkipThresholds for {self.target}: {'; '.join(lines)}>"


def _ends(name: str, value: Any) -> tuple[float, float]:
    numbers = isinstance(value, list) and all(isinstance(x, (int, float)) and math.isfinite(x) for x in value)
    if not numbers or len(value) != 2:
        raise ValueError(f"{name}: got {value!r}; want [first, last]")
    return float(value[0]), float(value[1])
