# SPDX-License-Identifier: Apache-2.0
"""The C++ text of traced functions, compiled for this machine with the headers that kernels include: random integer
graphs in both types of positions beside Python's integers, bit for bit, and what stays in 64 bits."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest
from tessera.expressions.cuda_text import cuda_text
from tessera.expressions.graph import Graph, ordered
from tessera.expressions.intervals import SMALL, intervals

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("g++")
# An overflow of an int, or a shift that a type does not know, ends the process.
FLAGS = [
    "-std=c++20",
    "-O1",
    "-w",
    "-D__CUDA_ARCH__=900",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fsanitize=signed-integer-overflow,shift,integer-divide-by-zero",
    "-fsanitize-undefined-trap-on-error",
]

INPUTS = ("batch", "head", "query", "key")
TENSORS = [("int32", 1), ("int64", 2), ("uint8", 1), ("fp32", 2)]
SIZES = [(40,), (5, 7), (3,), (4, 30)]
TYPES = {"int32": "int", "int64": "long long", "uint8": "unsigned char", "fp32": "float"}
DATA = [
    [(i * 37 % 101 - 50) * (2**25 if i % 5 == 0 else 1) for i in range(40)],
    [(i * 5 % 11 - 4) * (2**40 if i % 7 == 0 else 1) for i in range(35)],
    [0, 255, 7],
    [(i % 17 - 8) / 4 for i in range(120)],
]


def wrapped(x):
    return (x + 2**63) % 2**64 - 2**63


def element(tensor, indices):
    """Of DATA, an index outside moved to the nearest inside."""
    at = 0
    for index, size in zip(indices, SIZES[tensor], strict=True):
        at = at * size + min(max(index, 0), size - 1)
    return DATA[tensor][at]


_OPERATIONS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "min": min,
    "max": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "shl": lambda a, b: a << (b & 63),
    "shr": lambda a, b: a >> (b & 63),
    "div": lambda a, b: a // b if b else 0,
    "mod": lambda a, b: a % b if b else 0,
    "neg": lambda a: -a,
    "abs": abs,
    "select": lambda a, b, c: b if a else c,
    "int": int,
    "float": float,
}


def values_of(result, point):
    """Of each node by its index: integers that wrap at 64 bits, floats rounded to fp32 where they are made."""
    found = {}
    for node in ordered(result):
        args = [found[arg.index] for arg in node.args]
        if node.is_constant:
            value = node.data
        elif node.op in point:
            value = point[node.op]
        elif node.op == "load":
            value = element(node.data, args)
        elif node.op == "not":
            value = (not args[0]) if node.type == "b" else ~args[0]
        else:
            value = _OPERATIONS[node.op](*args)
        found[node.index] = wrapped(value) if node.type == "i" else value
    return found


class RandomGraph:
    """Integers and truths of each other; the result is a truth."""

    def __init__(self, seed, steps):
        self.random, self.graph = random.Random(seed), Graph()
        self.graph.tensors = TENSORS
        self.integers = [self.graph.input(name) for name in INPUTS]
        self.truths = []
        for _ in range(steps):
            if self.random.randrange(4):
                self.integers.append(self.integer())
            else:
                self.truths.append(self.truth())
        self.result = self.truth()
        for node in self.integers[-4:]:  # so that the last ones count
            parity = self.graph.compare("eq", self.graph.binary("and", node, self.constant(1)), self.constant(0))
            self.result = self.graph.binary("xor", self.result, parity)

    def constant(self, value):
        return self.graph.constant(value)

    def any(self):
        return self.random.choice(self.integers[-6:] if self.random.randrange(2) else self.integers)

    def integer(self):
        graph, pick = self.graph, self.random.randrange
        kind = pick(9)
        if kind == 0:
            return self.constant(self.random.choice((pick(-9, 40), pick(2**20), 2654435761, -(2**31), 2**62 - 1)))
        if kind == 1:
            number = self.random.choice((0, 2))
            return graph.load(number, (self.any(),))
        if kind == 2:
            return graph.load(1, (self.any(), self.any()))
        if kind == 3:
            return graph.unary(self.random.choice(("neg", "abs", "not")), self.any())
        if kind == 4 and self.truths:
            return graph.select(self.random.choice(self.truths), self.any(), self.any())
        if kind == 5:
            divisor = self.constant(self.random.choice((2, 3, 7, 8, 40, 300, 4096, -1, -5, -8, 2**33, 99999)))
            return graph.binary(self.random.choice(("div", "mod")), self.any(), divisor)
        if kind == 6:
            bits = self.constant(pick(1, 40))
            return graph.binary(self.random.choice(("shl", "shr")), self.any(), bits)
        if kind == 7 and self.truths:
            return graph.cast(self.random.choice(self.truths), "i")
        op = self.random.choice(
            ["add", "sub", "mul", "div", "mod", "min", "max", "and", "or", "xor", "shl", "shr", "add", "sub", "mul"]
        )
        b = self.any()
        return self.any() if op in ("div", "mod") and b.is_constant and b.data == 0 else graph.binary(op, self.any(), b)

    def truth(self):
        graph = self.graph
        if self.truths and self.random.randrange(3) == 0:
            op = self.random.choice(("and", "or", "xor"))
            return graph.binary(op, self.random.choice(self.truths), self.random.choice(self.truths))
        a, b = self.any(), self.any()
        if self.random.randrange(2):
            a = graph.binary("and", a, self.constant(7))
            b = self.constant(self.random.randrange(8))
        return graph.compare(self.random.choice(("lt", "le", "eq", "ne")), a, b)


def points(seed, small, count=40):
    """Many at both ends of what is small, or far beyond it."""
    random_ = random.Random(seed)

    def one(name):
        most = SMALL[name] if small else 2**60
        near, edge = random_.randrange(-90, 90), random_.choice((-1, 1)) * (most - random_.randrange(3))
        return random_.choice((near, near, edge, random_.randrange(-most, most)))

    return [{name: one(name) for name in INPUTS} for _ in range(count)]


SOURCE = """
#include "cuda/attention/scores/callables.cuh"
extern "C" int printf(const char*, ...);
using namespace tessera::cuda;
namespace emulator {{
void fail(const char*) {{ __builtin_trap(); }}
}}
{data}
const ExtraParams extras[4] = {{{extras}}};
{structs}
int main() {{
{calls}
  return 0;
}}
"""


def struct_of(name, text, result="bool"):
    readers = "".join(
        f"    const ExtraTensor<ExtraType::{dtype}, {rank}> tensor{i}{{extras[{i}]}};\n"
        for i, (dtype, rank) in enumerate(TENSORS)
    )
    return (
        f"struct {name} {{\n  template <class Position>\n  static {result} of(float score, const ScorePoint& at) {{\n"
        f"{readers}{text}\n  }}\n}};\n"
    )


def run(tmp_path, structs, calls):
    """The words that the calls print."""
    if COMPILER is None:
        pytest.skip("no g++")
    data, extras = [], []
    for i, ((dtype, rank), sizes) in enumerate(zip(TENSORS, SIZES, strict=True)):
        data.append(f"{TYPES[dtype]} data{i}[] = {{{', '.join(map(str, DATA[i]))}}};")
        strides = ", ".join([str(sizes[-1])] * (rank - 1) + ["1"])
        extras.append(f"{{.data = data{i}, .sizes = {{{', '.join(map(str, sizes))}}}, .strides = {{{strides}}}}}")
    source = tmp_path / "text.cpp"
    source.write_text(
        SOURCE.format(
            data="\n".join(data), extras=", ".join(extras), structs="\n".join(structs), calls="\n".join(calls)
        )
    )
    kernel = ROOT / "tests" / "emulator" / "kernel"
    includes = ["-include", str(kernel / "cuda.h"), f"-I{kernel}", f"-I{ROOT / 'src'}"]
    program = tmp_path / "text"
    built = subprocess.run(
        [COMPILER, *FLAGS, *includes, str(source), "-o", str(program)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr[:4000]
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"exit status {ran.returncode}"
    return ran.stdout.split()


def call_of(struct, position, point, score="0", show="%d"):
    at = ", ".join(f"{value}LL" for value in point.values())
    return f'  printf("{show}\\n", {struct}::of<{position}>({score}, ScorePoint{{{at}}}));'


def check(tmp_path, graphs):
    structs, calls, wants = [], [], []
    for number, (graph, result) in enumerate(graphs):
        structs.append(struct_of(f"Text{number}", cuda_text(result, graph.tensors)))
        for small in (True, False):
            for point in points(number, small):
                want = values_of(result, point)[result.index]
                for position in ("int", "i64") if small else ("i64",):
                    calls.append(call_of(f"Text{number}", position, point))
                    wants.append((number, position, point, str(int(want))))
    got = run(tmp_path, structs, calls)
    assert len(got) == len(wants)
    for answer, (number, position, point, want) in zip(got, wants, strict=True):
        assert answer == want, f"{position} at {point}:\n{structs[number]}"


@pytest.mark.parametrize("part", range(3))
def test_random_integers_are_pythons(tmp_path, part):
    check(tmp_path, [(made.graph, made.result) for made in (RandomGraph(50 * part + i, 4 + i) for i in range(36))])


@pytest.mark.parametrize("part", range(4))
def test_intervals_hold_the_values_of_small_points(part):
    narrow = 0
    for seed in range(200):
        made = RandomGraph(1000 * part + seed, 25)
        found = intervals(made.result, TENSORS)
        for point in points(seed, True, 20):
            for index, value in values_of(made.result, point).items():
                if index in found:
                    assert found[index].low <= value <= found[index].high
                    narrow += found[index].is_narrow
    assert narrow > 10_000


def test_divisions_by_constants(tmp_path):
    """Every sign of both, by numbers around powers of two, of one step and of all."""
    graphs = []
    for divisor in (1, 2, 3, 7, 8, 12, 40, 300, 2**21 - 1, 2**21, 2**21 + 1, 2**31 - 1, -1, -2, -3, -300, -(2**31)):
        for op in ("div", "mod"):
            graph = Graph()
            graph.tensors = TENSORS
            query, key = graph.input("query"), graph.input("key")
            number = graph.constant(divisor)
            one = graph.binary(op, graph.binary("sub", query, key), number)
            graphs.append((graph, graph.compare("eq", one, graph.binary(op, key, number))))
            bits = graph.binary("and", one, graph.constant(5))
            graphs.append((graph, graph.compare("eq", bits, graph.constant(1))))
    check(tmp_path, graphs)


def floats(tmp_path, made, cases):
    """What texts of floats say, by cases of (graph number, position, score, point)."""
    structs = [struct_of(f"Text{i}", cuda_text(node, graph.tensors), "float") for i, (graph, node) in enumerate(made)]
    calls = [call_of(f"Text{i}", position, at, f"{score!r}F", "%.9g") for i, position, score, at in cases]
    return [float(word) for word in run(tmp_path, structs, calls)]


def test_small_integers_are_floats_exactly(tmp_path):
    graph = Graph()
    graph.tensors = TENSORS
    distance = graph.cast(graph.binary("sub", graph.input("key"), graph.input("query")), "f")
    assert "float_of_small" in cuda_text(distance, TENSORS)
    ends = (-(2**21), -(2**21) + 1, -3, 0, 1, 77, 2**21 - 1, 2**21)
    cases = [(0, p, 0.0, dict(batch=0, head=0, query=q, key=k)) for p in ("int", "i64") for q in ends for k in ends]
    assert floats(tmp_path, [(graph, distance)], cases) == [at["key"] - at["query"] for *_, at in cases]


def linear_scores():
    """Graphs of scores that are linear in key − query, and what each adds to the score a unit of it."""
    made = []
    for form in range(6):
        graph = Graph()
        graph.tensors = TENSORS
        score, query, key = (graph.input(name) for name in ("score", "query", "key"))
        slope = graph.constant(0.375)
        ahead = graph.cast(graph.binary("sub", key, query), "f")
        behind = graph.cast(graph.binary("sub", query, key), "f")
        by = (
            slope,
            slope,
            graph.unary("neg", slope),
            slope,
            slope,
            graph.load(3, (graph.input("head"), graph.constant(3))),
        )
        distance = (ahead, behind, behind, graph.unary("neg", behind), ahead, ahead)[form]
        term = graph.binary("mul", by[form], distance)
        if form == 4:
            term = graph.unary("neg", term)
        op = "sub" if form in (1, 3) else "add"
        made.append((graph, graph.binary(op, score, term)))
    return made, (0.375, 0.375, 0.375, -0.375, -0.375)


def test_linear_scores(tmp_path):
    made, slopes = linear_scores()
    for graph, score in made:
        text = cuda_text(score, graph.tensors)
        assert text.splitlines()[-1].startswith("return linear_score(score, "), text
    at = dict(batch=0, head=0, query=5, key=21)
    got = floats(tmp_path, made[:5], [(i, p, 0.5, at) for i in range(5) for p in ("int", "i64")])
    assert got == [0.5 + slope * 16 for slope in slopes for _ in range(2)]


def test_scores_that_are_not_linear():
    graph = Graph()
    graph.tensors = TENSORS
    score, query, key = (graph.input(name) for name in ("score", "query", "key"))
    half, distance = graph.constant(0.5), graph.binary("sub", key, query)
    ahead = graph.cast(distance, "f")
    terms = [
        graph.binary("mul", half, graph.unary("abs", ahead)),
        graph.binary("mul", half, graph.cast(graph.binary("add", distance, graph.constant(3)), "f")),
        graph.binary("mul", graph.cast(key, "f"), ahead),
        graph.binary("mul", score, ahead),
        graph.binary("mul", half, graph.cast(graph.binary("add", key, query), "f")),
        graph.binary("mul", half, graph.cast(graph.binary("mul", distance, graph.constant(2)), "f")),
    ]
    made = [graph.binary("add", score, term) for term in terms]
    made.append(graph.binary("sub", graph.binary("mul", half, ahead), score))
    made.append(graph.binary("add", graph.binary("mul", half, score), graph.binary("mul", half, ahead)))
    for node in made:
        assert "linear_score" not in cuda_text(node, TENSORS)


def test_tanh(tmp_path):
    """Within 9 units in the last place, of ratios too; ±1 for what is large, NaN for NaN."""
    import math

    graph = Graph()
    graph.tensors = TENSORS
    score = graph.input("score")
    plain = graph.unary("tanh", score)
    cap = graph.constant(20.0)
    ratio = graph.binary("div", score, cap)
    capped = graph.binary("mul", cap, graph.unary("tanh", ratio))
    both = graph.binary("add", capped, ratio)  # the ratio is read elsewhere too
    scores = [sign * x * 1.1**i for i in range(60) for sign in (-1, 1) for x in (0.01,)] + [0.0, 1e-30, 3e38]
    here = dict.fromkeys(INPUTS, 0)
    wants = (math.tanh, lambda x: 20 * math.tanh(x / 20), lambda x: 20 * math.tanh(x / 20) + x / 20)
    cases = [(i, "i64", x, here) for i in range(3) for x in scores]
    got = floats(tmp_path, [(graph, plain), (graph, capped), (graph, both)], cases)
    for (i, _, x, _), answer in zip(cases, got, strict=True):
        assert answer == pytest.approx(wants[i](x), rel=9 * 2**-23, abs=1e-44)


def test_what_does_not_fit_stays_in_64_bits():
    graph = Graph()
    query, key = graph.input("query"), graph.input("key")
    product = graph.binary("mul", query, graph.constant(2654435761))
    assert "times((long long)v0, (2654435761LL))" in cuda_text(graph.compare("eq", product, key), [])
    squares = graph.binary("mul", query, key)
    assert "times((long long)v0, (long long)v1)" in cuda_text(graph.compare("eq", squares, key), [])


def test_texts_that_know_no_position_have_one_type():
    graph = Graph()
    graph.tensors = TENSORS
    bias = graph.load(3, (graph.input("head"), graph.constant(3)))
    assert "Position" not in cuda_text(graph.binary("add", graph.input("score"), bias), TENSORS)
