# SPDX-License-Identifier: Apache-2.0
"""A graph as the C++ text that `register_score` and `register_mask` take: the body of a function, a line a node.

Integers that 32 bits hold where positions are small have the type `Position`, which is `int` in a kernel that has found
positions to be small and `long long` in others; the rest is `long long`. The functions that texts call are in
src/cuda/attention/scores/text_functions.cuh.
"""

from __future__ import annotations

import math

from .graph import Node, fp32, ordered
from .intervals import SMALL_FLOAT, Interval, intervals
from .slopes import slope_of

_INPUTS = {"score": "score", "batch": "at.batch", "head": "at.head", "query": "at.query", "key": "at.key"}
_WIDE, _NARROW = "long long", "Position"
_SIGNS = {"lt": "<", "le": "<=", "eq": "==", "ne": "!=", "div": "/", "add": "+", "sub": "-", "mul": "*"}
_TRUTHS = {"and": "&&", "or": "||", "xor": "!="}
_BITS = {"and": "&", "or": "|", "xor": "^"}
_INTEGERS = {"add": "plus", "sub": "minus", "mul": "times", "neg": "negated", "abs": "magnitude"}
_DIVISIONS = {"div": "quotient", "mod": "remainder"}
_FUNCTIONS = {
    "exp": "expf",
    "log": "logf",
    "sqrt": "sqrtf",
    "tanh": "tanh_of",
    "sin": "sinf",
    "cos": "cosf",
    "floor": "floorf",
    "ceil": "ceilf",
    "trunc": "truncf",
}


def extra_name(number: int) -> str:
    """The name that texts have for the captured tensor `number`."""
    return f"tensor{number}"


def cuda_text(result: Node, tensors: list[tuple[str, int]]) -> str:
    """Statements that end with `return`. Integers are of 64 bits and wrap, but for those that 32 bits hold; NaN passes
    through min and max. tensors: the captured ones, as Graph has them."""
    return _Writer(result, tensors).text()


class _Writer:
    def __init__(self, result: Node, tensors: list[tuple[str, int]]) -> None:
        self._result, self._nodes = result, ordered(result)
        self._names: dict[int, str] = {}
        # Of batch, head and captured tensors alone little is computed for each element.
        moves = any([node.op in ("query", "key") for node in self._nodes])
        self._intervals: dict[int, Interval] = intervals(result, tensors) if moves else {}
        ratios = [node.args[0] for node in self._nodes if self._is_of_ratio(node)]
        read = {arg.index for node in self._nodes if not self._is_of_ratio(node) for arg in node.args}
        self._unread = {node.index for node in ratios} - read - {result.index}

    def text(self) -> str:
        linear = slope_of(self._result)
        if linear is None:
            return "\n".join([*self._lines(self._nodes), f"return {self._operand(self._result)};"])
        lines = self._lines(ordered(linear.slope))
        slope = self._operand(linear.slope) if linear.sign == 1 else f"-{self._operand(linear.slope)}"
        distance = "minus(Position(at.key), Position(at.query))"
        return "\n".join([*lines, f"return linear_score(score, {slope}, {distance});"])

    def _lines(self, nodes: list[Node]) -> list[str]:
        """A definition for each node that is read."""
        lines: list[str] = []
        for node in nodes:
            if node.is_constant or node.index in self._unread:
                continue
            name, type_ = f"v{len(lines)}", self._type(node)
            lines.append(f"const {type_} {name} = {self._value(node, type_)};")
            self._names[node.index] = name
        return lines

    def _is_narrow(self, node: Node) -> bool:
        return node.type == "i" and node.index in self._intervals and self._intervals[node.index].is_narrow

    def _type(self, node: Node) -> str:
        return {"f": "float", "b": "bool"}.get(node.type) or (_NARROW if self._is_narrow(node) else _WIDE)

    def _operand(self, node: Node, type_: str | None = None) -> str:
        """The node's name or its number, of `type_` where it is an integer; by default of its own."""
        own = self._type(node)
        type_ = own if type_ is None or node.type != "i" else type_
        if node.is_constant:
            return _constant(node, type_)
        name = self._names[node.index]
        return name if type_ == own else f"({type_}){name}"

    def _value(self, node: Node, type_: str) -> str:
        """An operation computes in 32 bits where its integers, result and operands, are narrow."""
        if node.op in _INPUTS:
            return f"Position({_INPUTS[node.op]})" if type_ == _NARROW else _INPUTS[node.op]
        if node.op == "load":
            text = f"{extra_name(node.data)}({', '.join(map(self._operand, node.args))})"
            return f"Position({text})" if type_ == _NARROW else text
        if self._is_of_ratio(node):
            return self._of_ratio(*node.args[0].args)
        integers = [arg for arg in node.args if arg.type == "i"]
        whole = (node, *integers) if node.type == "i" else integers
        common = _NARROW if all(map(self._is_narrow, whole)) and self._fits(node) else _WIDE
        text = self._operation(node, [self._operand(arg, common) for arg in node.args], common)
        return f"Position({text})" if (type_, common) == (_NARROW, _WIDE) else text

    def _fits(self, node: Node) -> bool:
        """Whether 32 bits know the operation: they are shifted by constants, and by less than 32."""
        if node.op not in ("shl", "shr"):
            return True
        by = self._intervals[node.args[1].index]
        return by.low == by.high and by.low & 63 < 32

    def _operation(self, node: Node, operands: list[str], integer: str) -> str:
        """`integer`: the type of its integers."""
        op, type_ = node.op, node.args[0].type
        a, b, c = (*operands, "", "", "")[:3]
        if op == "select":
            return f"{a} ? {b} : {c}"
        if op == "int" and type_ == "f":  # cvt to 64 bits gives the least of NaN
            return f"{a} != {a} ? 0LL : (long long){a}"
        if op == "int":
            return f"({integer}){a}"
        if op == "float":
            return f"float_of_small({a})" if self._is_small(node.args[0]) else f"(float){a}"
        if op in ("lt", "le", "eq", "ne"):
            return f"{a} {_SIGNS[op]} {b}"
        if type_ == "b":
            return f"!{a}" if op == "not" else f"{a} {_TRUTHS[op]} {b}"
        if type_ == "f":
            return _of_floats(op, a, b)
        return self._of_integers(node, a, b, integer)

    def _is_small(self, node: Node) -> bool:
        return self._is_narrow(node) and self._intervals[node.index].farthest <= SMALL_FLOAT

    @staticmethod
    def _is_of_ratio(node: Node) -> bool:
        """Whether the node is tanh(x / constant)."""
        if node.op != "tanh" or node.args[0].op != "div":
            return False
        divisor = node.args[0].args[1]
        return divisor.is_constant and 2.0**-100 < abs(divisor.data) < 2.0**100

    def _of_ratio(self, x: Node, divisor: Node) -> str:
        """By the reciprocal: tanh is asked of a number that is a unit in the last place off, no more."""
        return f"tanh_of({self._operand(x)} * {_float(1 / divisor.data)})"

    def _of_integers(self, node: Node, a: str, b: str, integer: str) -> str:
        op = node.op
        if op in _INTEGERS:
            return f"{_INTEGERS[op]}({a}, {b})" if b else f"{_INTEGERS[op]}({a})"
        if op == "not":
            return f"~{a}"
        if op in ("min", "max"):
            return f"{a} {'<' if op == 'min' else '>'} {b} ? {a} : {b}"
        if op in _BITS:
            return f"{a} {_BITS[op]} {b}"
        if op in ("shl", "shr"):
            by = node.args[1]
            bits = _integer(by.data & 63, integer) if by.is_constant else f"({b} & 63)"
            return f"shifted_left({a}, {bits})" if op == "shl" else f"{a} >> {bits}"
        return self._division(node, a, b, integer)

    def _division(self, node: Node, a: str, b: str, integer: str) -> str:
        """Rounded to −∞; by a variable 0 the quotient and the remainder are 0, as on the CPU."""
        op, (dividend, divisor) = node.op, node.args
        if divisor.is_constant and divisor.data > 0:
            number = divisor.data
            if number & (number - 1) == 0:
                by = _integer(number.bit_length() - 1 if op == "div" else number - 1, integer)
                return f"{a} >> {by}" if op == "div" else f"{a} & {by}"
            if integer == _NARROW:
                low, high = self._intervals[dividend.index]
                multiple = max(-(low // number), 0)
                if high + multiple * number < 2**32 and multiple < 2**31:
                    return f"{_DIVISIONS[op]}_of_raised<{multiple}>({a}, {b})"
        return f"{_DIVISIONS[op]}_down({a}, {b})"


def _integer(value: int, type_: str) -> str:
    if type_ == _NARROW:
        return f"Position({value})" if value > -(2**31) else "Position(-2147483647 - 1)"
    return f"({value}LL)" if value > -(2**63) else "(-9223372036854775807LL - 1)"


def _float(value: float) -> str:
    if math.isnan(value):
        return "__int_as_float(0x7FC00000)"
    if math.isinf(value):
        return f"__int_as_float({'0x7F800000' if value > 0 else '(int)0xFF800000U'})"
    return f"({fp32(value).hex()}F)"


def _constant(node: Node, type_: str) -> str:
    if node.type == "b":
        return "true" if node.data else "false"
    return _integer(node.data, type_) if node.type == "i" else _float(node.data)


def _of_floats(op: str, a: str, b: str) -> str:
    if op in _FUNCTIONS:
        return f"{_FUNCTIONS[op]}({a})"
    if op == "neg":
        return f"-{a}"
    if op == "abs":
        return f"fabsf({a})"
    if op in ("min", "max"):
        return f"{a} != {a} || {a} {'<' if op == 'min' else '>'} {b} ? {a} : {b}"
    if op == "mod":  # the remainder of fmodf is exact; a sign that is not the divisor's is mended by one addition
        rest = f"fmodf({a}, {b})"
        return f"{rest} != 0.0F && (({rest} < 0.0F) != ({b} < 0.0F)) ? {rest} + {b} : {rest}"
    if op == "pow":
        return f"powf({a}, {b})"
    return f"{a} {_SIGNS[op]} {b}"
