# SPDX-License-Identifier: Apache-2.0
"""The part of a mask that is a window: bounds on the query's position minus the key's, joined by "and"."""

from __future__ import annotations

from .graph import Graph, Node

Window = tuple["int | None", "int | None"]

# Bounds beyond these are left to the mask: sums of them and of positions have to fit in 64 bits.
_FARTHEST = 2**60


def without_window(graph: Graph, mask: Node) -> tuple[Window, Node]:
    """The window (left, right) that is a part of `mask`, and the rest of it: both hold together where `mask` does.

    left: how far the key may be before the query, right: how far behind it; None: without an end.
    """
    left: int | None = None
    right: int | None = None
    rest = graph.constant(True)
    for part in _parts(mask):
        bounds = _bounds(part)
        if bounds is None:
            rest = graph.binary("and", rest, part)
            continue
        lowest, highest = bounds  # of query − key
        if highest is not None:
            left = highest if left is None else min(left, highest)
        if lowest is not None:
            right = -lowest if right is None else min(right, -lowest)
    if left is not None and right is not None and left + right < 0:  # nothing is visible
        return (None, None), mask
    return (left, right), rest


def _parts(mask: Node) -> list[Node]:
    """What `mask` joins by "and"."""
    found, waiting = [], [mask]
    while waiting:
        node = waiting.pop()
        if node.op == "and" and node.type == "b":
            waiting += reversed(node.args)
        else:
            found.append(node)
    return found


def _bounds(node: Node) -> tuple[int | None, int | None] | None:
    """(lowest, highest) of query − key where `node` says no more than that; None for anything else."""
    if node.op == "not":
        inner = node.args[0]
        if inner.op not in ("lt", "le") or inner.args[0].type != "i":
            return None
        op, (b, a) = ("le" if inner.op == "lt" else "lt"), inner.args
    elif node.op in ("lt", "le", "eq"):
        op, (a, b) = node.op, node.args
    else:
        return None
    if a.type != "i":
        return None
    if op != "eq":
        around = _absolute(a, b, op)
        if around is not None:
            return around
    x, y = linear_of(a), linear_of(b)
    if x is None or y is None:
        return None
    query, key, least = x[0] - y[0], x[1] - y[1], y[2] - x[2]
    if (query, key) not in ((1, -1), (-1, 1)) or abs(least) >= _FARTHEST:
        return None
    # query · (position of query − position of key) < least, ≤ or =
    if op == "eq":
        return query * least, query * least
    most = least - (op == "lt")
    return (None, most) if query == 1 else (-most, None)


def _absolute(a: Node, b: Node, op: str) -> tuple[int | None, int | None] | None:
    """|query − key| < or ≤ a constant."""
    if a.op != "abs" or not b.is_constant or abs(b.data) >= _FARTHEST:
        return None
    inner = linear_of(a.args[0])
    if inner is None or inner[:2] not in ((1, -1), (-1, 1)) or abs(inner[2]) >= _FARTHEST:
        return None
    most = b.data - (op == "lt")
    shift = inner[0] * inner[2]  # |±(q − k) + c| = |q − k ± c|
    return -most - shift, most - shift


def linear_of(node: Node) -> tuple[int, int, int] | None:
    """(a, b, c) of a · query + b · key + c."""
    if node.op == "query":
        return 1, 0, 0
    if node.op == "key":
        return 0, 1, 0
    if node.is_constant:
        return 0, 0, node.data
    if node.op == "neg":
        x = linear_of(node.args[0])
        return None if x is None else (-x[0], -x[1], -x[2])
    if node.op not in ("add", "sub"):
        return None
    x, y = linear_of(node.args[0]), linear_of(node.args[1])
    if x is None or y is None or max(abs(x[2]), abs(y[2])) >= _FARTHEST:
        return None
    sign = 1 if node.op == "add" else -1
    query, key, constant = (a + sign * b for a, b in zip(x, y, strict=True))
    return None if max(abs(query), abs(key)) > 1 else (query, key, constant)  # larger ones might wrap
