# SPDX-License-Identifier: Apache-2.0
"""The decay slopes that models with linear attention use."""

from __future__ import annotations

import math
from typing import Any, Literal

Array = Any


def decay_slopes(
    heads: int, *, layer: int | None = None, layers: int | None = None, rule: Literal["alibi", "linear"] = "alibi"
) -> Array:
    """Slopes of the decay of each head, numpy fp32 (heads), for `linear_decode` and its relatives.

    rule="alibi": those of ALiBi, 2^(−8 (i + 1) / heads) for a power of two, else those of the next smaller one followed
    by every other one of twice as many heads; with layer and layers multiplied by 1 − layer / (layers − 1) + 1e-5, as
    MiniMax-Text-01 and Ling's linear models do. rule="linear": (8 / heads) · (1 − layer / layers) · i, what the
    Flash Linear Attention library takes: head 0 never forgets, the last ones at once. A rank of tensor parallelism
    takes its heads' part of the array.

    Needs numpy. Raises ValueError for fewer than one head, a layer outside 0 to below layers, one of layer and layers
    without the other, an unknown rule, and for rule="linear" without a layer.

    Source: ALiBi: Press, Smith and Lewis 2022 (arXiv:2108.12409); by layers: MiniMax 2025 (arXiv:2501.08313).
    """
    import numpy

    if heads < 1:
        raise ValueError(f"heads: got {heads}; want 1 or more")
    if (layer is None) != (layers is None):
        raise ValueError(f"layers: got layer={layer} with layers={layers}; want both or neither")
    if layer is not None and layers is not None and not 0 <= layer < layers:
        raise ValueError(f"layer: got {layer}; want 0 to below {layers}")
    if rule == "alibi":
        factor = 1.0 if layer is None or layers is None else 1 - layer / max(layers - 1, 1) + 1e-5
        return numpy.array([slope * factor for slope in _alibi(heads)], numpy.float32)
    if rule != "linear":
        raise ValueError(f'rule: got {rule!r}; want "alibi" or "linear"')
    if layer is None or layers is None:
        raise ValueError('layer: got none; want layer and layers for rule="linear"')
    return numpy.array([8 / heads * (1 - layer / layers) * head for head in range(heads)], numpy.float32)


def _alibi(heads: int) -> list[float]:
    whole = 1 << int(math.log2(heads))  # the largest power of two
    slopes = [2.0 ** (-8 * (head + 1) / whole) for head in range(whole)]
    if whole < heads:
        slopes += _alibi(2 * whole)[0::2][: heads - whole]
    return slopes
