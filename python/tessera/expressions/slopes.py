# SPDX-License-Identifier: Apache-2.0
"""Scores that are linear in the distance of key and query, as ALiBi's is: kernels add such a term by parts."""

from __future__ import annotations

from typing import NamedTuple

from .graph import Node, ordered
from .windows import linear_of


class Slope(NamedTuple):
    """The score is its argument + sign · slope · (key − query); the slope reads none of the three."""

    slope: Node
    sign: int


def slope_of(score: Node) -> Slope | None:
    """None for a score that is not linear, or not written as a sum with a product of a slope and a distance."""
    if score.op not in ("add", "sub"):
        return None
    first, term = score.args
    sign = 1 if score.op == "add" else -1
    if score.op == "add" and term.op == "score":
        first, term = term, first
    if first.op != "score":
        return None
    while term.op == "neg":
        sign, term = -sign, term.args[0]
    if term.op != "mul" or term.type != "f":
        return None
    for slope, distance in (term.args, term.args[::-1]):
        direction = _direction(distance)
        if direction and not any([node.op in ("score", "query", "key") for node in ordered(slope)]):
            return Slope(slope, sign * direction)
    return None


def _direction(distance: Node) -> int:
    """1 for key − query as a float, −1 for query − key, 0 for anything else."""
    sign = 1
    while distance.op == "neg":
        sign, distance = -sign, distance.args[0]
    terms = linear_of(distance.args[0]) if distance.op == "float" and distance.args[0].type == "i" else None
    return {(-1, 1, 0): sign, (1, -1, 0): -sign}.get(terms, 0) if terms is not None else 0
