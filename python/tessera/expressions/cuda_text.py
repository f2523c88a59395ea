# SPDX-License-Identifier: Apache-2.0
"""A graph as the C++ text that `register_score` and `register_mask` take: the body of a function, a line a node."""

from __future__ import annotations

import math

from .graph import Node, ordered

_TYPES = {"f": "float", "i": "long long", "b": "bool"}
_INPUTS = {"score": "score", "batch": "at.batch", "head": "at.head", "query": "at.query", "key": "at.key"}
_SIGNS = {"lt": "<", "le": "<=", "eq": "==", "ne": "!=", "div": "/", "add": "+", "sub": "-", "mul": "*"}
_TRUTHS = {"and": "&&", "or": "||", "xor": "!="}
_BITS = {"and": "&", "or": "|", "xor": "^"}
_FUNCTIONS = {
    "exp": "expf",
    "log": "logf",
    "sqrt": "sqrtf",
    "tanh": "tanhf",
    "sin": "sinf",
    "cos": "cosf",
    "floor": "floorf",
    "ceil": "ceilf",
    "trunc": "truncf",
}


def extra_name(number: int) -> str:
    """The name that texts have for the captured tensor `number`."""
    return f"tensor{number}"


def cuda_text(result: Node) -> str:
    """Statements that end with `return`. Integers are of 64 bits and wrap; NaN passes through min and max."""
    names: dict[int, str] = {}
    lines = []
    for node in ordered(result):
        operands = [names[arg.index] for arg in node.args]
        text = _constant(node) if node.is_constant else _INPUTS.get(node.op) or _operation(node, operands)
        if node.is_constant:
            names[node.index] = text
            continue
        name = names[node.index] = f"v{len(lines)}"
        lines.append(f"const {_TYPES[node.type]} {name} = {text};")
    lines.append(f"return {names[result.index]};")
    return "\n".join(lines)


def _constant(node: Node) -> str:
    value = node.data
    if node.type == "b":
        return "true" if value else "false"
    if node.type == "i":
        return f"({value}LL)" if value > -(2**63) else "(-9223372036854775807LL - 1)"
    if math.isnan(value):
        return "__int_as_float(0x7FC00000)"
    if math.isinf(value):
        return f"__int_as_float({'0x7F800000' if value > 0 else '(int)0xFF800000U'})"
    return f"({value.hex()}F)"  # exact, as it is an fp32 number


def _operation(node: Node, operands: list[str]) -> str:
    op, type_ = node.op, node.args[0].type if node.args else ""
    a, b, c = (*operands, "", "", "")[:3]
    if op == "load":
        return f"{extra_name(node.data)}({', '.join(operands)})"
    if op == "select":
        return f"{a} ? {b} : {c}"
    if op == "int" and type_ == "f":  # cvt to 64 bits gives the least of NaN
        return f"{a} != {a} ? 0LL : (long long){a}"
    if op in ("float", "int"):
        return f"({_TYPES[node.type]}){a}"
    if op in ("lt", "le", "eq", "ne"):
        return f"{a} {_SIGNS[op]} {b}"
    if type_ == "b":
        return f"!{a}" if op == "not" else f"{a} {_TRUTHS[op]} {b}"
    return _of_floats(op, a, b) if type_ == "f" else _of_integers(node, a, b)


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


def _of_integers(node: Node, a: str, b: str) -> str:
    op = node.op
    if op in ("neg", "abs"):
        negative = f"(long long)(0ULL - (unsigned long long){a})"
        return negative if op == "neg" else f"{a} < 0 ? {negative} : {a}"
    if op == "not":
        return f"~{a}"
    if op in ("min", "max"):
        return f"{a} {'<' if op == 'min' else '>'} {b} ? {a} : {b}"
    if op in _BITS:
        return f"{a} {_BITS[op]} {b}"
    if op == "shl":
        return f"(long long)((unsigned long long){a} << ({b} & 63))"
    if op == "shr":
        return f"{a} >> ({b} & 63)"
    if op in ("div", "mod"):
        return _division(op, a, b, node.args[1])
    return f"(long long)((unsigned long long){a} {_SIGNS[op]} (unsigned long long){b})"


def _division(op: str, a: str, b: str, divisor: Node) -> str:
    """Rounded to −∞; by a variable 0 the quotient and the remainder are 0, as on the CPU."""
    quotient = f"{a} / {b} - ({a} % {b} != 0 && ({a} < 0) != ({b} < 0) ? 1 : 0)"
    rest = f"{a} % {b} + ({a} % {b} != 0 && ({a} < 0) != ({b} < 0) ? {b} : 0)"
    if divisor.is_constant:
        number = divisor.data
        if number > 0 and number & (number - 1) == 0:
            return f"{a} >> {number.bit_length() - 1}" if op == "div" else f"{a} & ({number - 1}LL)"
        if number == -1:
            return f"(long long)(0ULL - (unsigned long long){a})" if op == "div" else "0LL"
        return quotient if op == "div" else rest
    # −1 apart: the smallest integer by it does not fit
    if op == "div":
        return f"{b} == 0 ? 0LL : {b} == -1 ? (long long)(0ULL - (unsigned long long){a}) : {quotient}"
    return f"{b} == 0 || {b} == -1 ? 0LL : {rest}"
