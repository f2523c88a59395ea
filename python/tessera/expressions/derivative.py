# SPDX-License-Identifier: Apache-2.0
"""The derivative of a graph by the score or by an element of a captured tensor, a graph of the same nodes."""

from __future__ import annotations

from .graph import Graph, Node, ordered


def derivative(graph: Graph, result: Node, by: Node | None = None) -> Node:
    """d result / d by, in forward mode; by: a node of type f without operands of type f, default the score. Where there
    are two one-sided ones: of abs 0, of min and max of equal operands their mean, as torch has them; floor, comparisons
    and integers have 0. Raises GraphError where the graph becomes too large."""
    variable = graph.input("score") if by is None else by
    by_node: dict[int, Node | None] = {}
    for node in ordered(result):
        by_node[node.index] = _Rules(graph, by_node, variable).of(node) if node.type == "f" else None
    found = by_node[result.index]
    return graph.constant(0.0) if found is None else found


class _Rules:
    """The rules of differentiation. None stands for 0, so that no product with 0 is ever written down."""

    def __init__(self, graph: Graph, known: dict[int, Node | None], variable: Node) -> None:
        self.graph, self.known, self.variable = graph, known, variable

    def of(self, node: Node) -> Node | None:
        if node is self.variable:
            return self.graph.constant(1.0)
        inner = [self.known[arg.index] for arg in node.args]
        if all([each is None for each in inner]):
            return None
        return getattr(self, "_" + node.op, self._zero)(node, *inner)

    def _zero(self, node: Node, *inner: Node | None) -> None:
        return None

    def _times(self, factor: Node, x: Node | None) -> Node | None:
        return None if x is None else self.graph.binary("mul", factor, x)

    def _sum(self, a: Node | None, b: Node | None, op: str = "add") -> Node | None:
        if b is None:
            return a
        if a is None:
            return b if op == "add" else self.graph.unary("neg", b)
        return self.graph.binary(op, a, b)

    def _square(self, x: Node) -> Node:
        return self.graph.binary("mul", x, x)

    def _or_zero(self, x: Node | None) -> Node:
        return self.graph.constant(0.0) if x is None else x

    def _neg(self, node: Node, x: Node) -> Node | None:
        return self.graph.unary("neg", x)

    def _add(self, node: Node, a: Node | None, b: Node | None) -> Node | None:
        return self._sum(a, b)

    def _sub(self, node: Node, a: Node | None, b: Node | None) -> Node | None:
        return self._sum(a, b, "sub")

    def _mul(self, node: Node, a: Node | None, b: Node | None) -> Node | None:
        x, y = node.args
        return self._sum(self._times(y, a), self._times(x, b))

    def _div(self, node: Node, a: Node | None, b: Node | None) -> Node | None:
        # (a − quotient · b) / y
        over = self._sum(a, self._times(node, b), "sub")
        return None if over is None else self.graph.binary("div", over, node.args[1])

    def _mod(self, node: Node, a: Node | None, b: Node | None) -> Node | None:
        quotient = self.graph.unary("floor", self.graph.binary("div", *node.args))
        return self._sum(a, self._times(quotient, b), "sub")

    def _abs(self, node: Node, x: Node) -> Node:
        graph, zero = self.graph, self.graph.constant(0.0)
        inner = node.args[0]
        below = graph.select(graph.compare("lt", inner, zero), graph.unary("neg", x), zero)
        return graph.select(graph.compare("lt", zero, inner), x, below)

    def _min(self, node: Node, a: Node | None, b: Node | None) -> Node:
        return self._smaller(*node.args, self._or_zero(a), self._or_zero(b))

    def _max(self, node: Node, a: Node | None, b: Node | None) -> Node:
        x, y = node.args
        return self._smaller(y, x, self._or_zero(a), self._or_zero(b))

    def _smaller(self, x: Node, y: Node, of_x: Node, of_y: Node) -> Node:
        graph = self.graph
        mean = graph.binary("mul", graph.binary("add", of_x, of_y), graph.constant(0.5))
        return graph.select(graph.compare("lt", x, y), of_x, graph.select(graph.compare("lt", y, x), of_y, mean))

    def _select(self, node: Node, condition: None, a: Node | None, b: Node | None) -> Node:
        return self.graph.select(node.args[0], self._or_zero(a), self._or_zero(b))

    def _exp(self, node: Node, x: Node) -> Node | None:
        return self._times(node, x)

    def _log(self, node: Node, x: Node) -> Node:
        return self.graph.binary("div", x, node.args[0])

    def _sqrt(self, node: Node, x: Node) -> Node:
        return self.graph.binary("div", self.graph.binary("mul", x, self.graph.constant(0.5)), node)

    def _tanh(self, node: Node, x: Node) -> Node | None:
        one = self.graph.constant(1.0)
        return self._times(self.graph.binary("sub", one, self._square(node)), x)

    def _sin(self, node: Node, x: Node) -> Node | None:
        return self._times(self.graph.unary("cos", node.args[0]), x)

    def _cos(self, node: Node, x: Node) -> Node | None:
        return self._times(self.graph.unary("neg", self.graph.unary("sin", node.args[0])), x)

    def _pow(self, node: Node, a: Node | None, b: Node | None) -> Node | None:
        graph, (x, y) = self.graph, node.args
        less = graph.binary("pow", x, graph.binary("sub", y, graph.constant(1.0)))
        by_base = self._times(graph.binary("mul", y, less), a)
        return self._sum(
            by_base, None if b is None else self._times(graph.binary("mul", node, graph.unary("log", x)), b)
        )
