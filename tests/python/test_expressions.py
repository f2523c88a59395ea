# SPDX-License-Identifier: Apache-2.0
"""Scores and masks traced from Python functions, with NumPy alone: graphs, derivatives, windows, the CPU's runs."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import tessera
from tessera import expressions as ex
from tessera.expressions.derivative import derivative
from tessera.expressions.graph import Graph, program
from tessera.expressions.trace import MASK, SCORE, trace
from tessera.expressions.windows import without_window

ORACLE = "implementation=cpu.reference"


@pytest.fixture
def qkv():
    generator = np.random.default_rng(3)
    return [generator.standard_normal((2, 70, heads, 16)).astype(np.float32) for heads in (4, 2, 2)]


def same_as_oracle(qkv, atol=3e-6, derivative=None, **functions):
    """A call of traced functions beside the oracle, which calls the functions themselves with numbers."""
    if derivative is not None:
        functions["score"].derivative = derivative
    by_oracle = tessera.attention(*qkv, **functions, wishes=ORACLE)
    np.testing.assert_allclose(tessera.attention(*qkv, **functions), by_oracle, atol=atol)


# Evaluation of graphs, by itself: every operation in Python's words.

_BINARY = {
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
    "shr": lambda a, b: a >> b,
    "shl": lambda a, b: a << b,
    "mod": lambda a, b: a % b,
    "pow": lambda a, b: a**b,
}


def value_of(text, result, **inputs):
    """What a program's text says for numbers, its floats in double."""
    values = []
    for step in text.split(";"):
        op, *words = step.split()
        if op in ("value", "derivative"):
            if op == result:
                return values[int(words[0])]
            continue
        if op.startswith("const"):
            read = {"f": float.fromhex, "i": int, "b": "1".__eq__}[op[-1]]
            values.append(read(words[0]))
            continue
        if op in inputs:
            values.append(inputs[op])
            continue
        args = [values[int(word)] for word in words]
        if op in _BINARY:
            values.append(_BINARY[op](*args))
        elif op == "div":
            values.append(args[0] // args[1] if isinstance(args[0], int) else args[0] / args[1])
        elif op == "select":
            values.append(args[1] if args[0] else args[2])
        elif op == "not":
            values.append((not args[0]) if isinstance(args[0], bool) else ~args[0])
        elif op in ("neg", "abs", "float", "int"):
            values.append({"neg": lambda x: -x, "abs": abs, "float": float, "int": int}[op](args[0]))
        else:
            values.append(float(getattr(math, op)(args[0])))
    return None


class RandomFunction:
    """A random function of a score and positions, which runs on symbols and on numbers alike."""

    def __init__(self, seed, steps):
        random_ = random.Random(seed)
        self.plan = [
            (random_.randrange(14), random_.random(), random_.random(), random_.randint(1, 9)) for _ in range(steps)
        ]

    def __call__(self, score, batch, head, query, key):
        smooth = isinstance(score, ex.Symbol)
        tanh, exp, where = (
            (ex.tanh, ex.exp, ex.where) if smooth else (math.tanh, math.exp, lambda c, a, b: a if c else b)
        )
        reals, integers = [score, score * 0.5], [query, key, head + 1, batch]
        for kind, first, second, number in self.plan:
            a, b = reals[int(first * len(reals))], reals[int(second * len(reals))]
            i, j = integers[int(first * len(integers))], integers[int(second * len(integers))]
            if kind == 0:
                integers.append(i // number - j % (number + 2))
            elif kind == 1:
                integers.append((i - j * number) & 255)
            elif kind == 2:
                integers.append(abs(i - j) >> 1)
            elif kind == 3:
                reals.append(where((i < j) | (i % number == 0), a, b * 0.75))
            elif kind == 4:
                reals.append(where((i <= number) & ~(j == 3) if smooth else i <= number and j != 3, a - 0.25, b))
            elif kind == 5:
                reals.append(tanh(a) * b)
            elif kind == 6:
                reals.append(exp(tanh(a)) - number / 8)
            elif kind == 7:
                reals.append(a / (b * b + 1.5))
            elif kind == 8:
                reals.append(tanh(a + b) ** 3)
            elif kind == 9:
                reals.append(a + (i - j) * 0.0078125)
            elif kind == 10:
                reals.append(abs(a) - b)
            elif kind == 12:
                reals.append((ex.maximum if smooth else max)(a, tanh(b)))
            elif kind == 13:
                reals.append((ex.minimum if smooth else min)(b * 0.5, a))
            else:
                reals.append((tanh(a) ** 2 + 1.0) ** 0.5)
        return reals[-1]


@pytest.mark.parametrize("part", range(10))
def test_random_graphs_are_their_functions_and_derivatives_their_differences(part):
    checked = 0
    for trial in range(1000):
        function = RandomFunction(1000 * part + trial, 2 + trial % 14)
        traced = trace(function, SCORE)
        text = program(traced.result, derivative(traced.graph, traced.result))
        random_ = random.Random(trial)
        at = dict(
            batch=random_.randrange(3),
            head=random_.randrange(5),
            query=random_.randrange(-9, 99),
            key=random_.randrange(99),
        )
        score = random_.uniform(-3, 3)
        want = function(score, *at.values())
        # constants are rounded to fp32
        assert value_of(text, "value", score=score, **at) == pytest.approx(want, rel=2e-6, abs=2e-6)
        step = 1e-6
        left, right = (function(score + by, *at.values()) for by in (-step, step))
        slopes = (want - left) / step, (right - want) / step
        if abs(slopes[0] - slopes[1]) > 1e-3 * max(1, abs(slopes[0])):
            continue  # a corner
        checked += 1
        slope = (right - left) / (2 * step)
        assert value_of(text, "derivative", score=score, **at) == pytest.approx(slope, rel=1e-4, abs=1e-4)
    assert checked > 900


@pytest.mark.parametrize("seed", range(40))
def test_random_functions_on_the_cpu_are_what_the_oracle_calls(qkv, seed):
    function = RandomFunction(seed, 12)
    same_as_oracle([x[:, :30] for x in qkv], score=function, atol=2e-5)


DOCUMENTS = np.arange(90, dtype=np.int32) // 13
SEES = np.arange(4, dtype=np.int64) * 9 + 4
MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k <= 20),
    "prefix": lambda b, h, q, k: (k < 11) | (k <= q),
    "documents": lambda b, h, q, k: q // 13 == k // 13,
    "dilated": lambda b, h, q, k: ((q - k) % 3 == 0) & (q >= k),
    "neighbourhood": lambda b, h, q, k: (abs(q // 8 - k // 8) <= 1) & (abs(q % 8 - k % 8) <= 2),
    "global": lambda b, h, q, k: (k < 3) | (abs(q - k) <= 9),
    "hash": lambda b, h, q, k: ((q * 2654435761 + k * 40503) >> 7) & 3 != 0,
    "heads": lambda b, h, q, k: q - k <= (h + 1) * 8 + b,
    "nothing": lambda b, h, q, k: q < -5,
    "everything": lambda b, h, q, k: True,
    "key alone": lambda b, h, q, k: k % 5 != 2,
    "empty window": lambda b, h, q, k: (q - k > 9) & (q - k < 3),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_the_zoo(qkv, name):
    same_as_oracle(qkv, mask=MASKS[name])
    same_as_oracle([qkv[0][:, :23], *qkv[1:]], mask=MASKS[name])  # the last query stands at the last key
    same_as_oracle(qkv, mask=MASKS[name], causal=True, window=(30, 5))


def test_captured_arrays(qkv):
    documents, table = (
        ex.captured(DOCUMENTS),
        ex.captured(np.linspace(-2, 2, 4 * 150).astype(np.float32).reshape(4, 150)),
    )
    far = ex.captured(SEES[::-1])  # not contiguous: copied
    flags = ex.captured(np.arange(90) % 7 != 3)
    got = tessera.attention(*qkv, mask=lambda b, h, q, k: (documents[q] == documents[k]) & flags[k] | (q - k == far[h]))
    kept = np.arange(90) % 7 != 3
    want = tessera.attention(
        *qkv,
        mask=lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k] and kept[k]) or q - k == SEES[::-1][h],
        wishes=ORACLE,
    )
    np.testing.assert_allclose(got, want, atol=3e-6)
    got = tessera.attention(*qkv, score=lambda s, b, h, q, k: s + table[h][q - k + 70], mask="prefix")
    want = tessera.attention(
        *qkv, score=lambda s, b, h, q, k: s + float(table.array[h, q - k + 70]), mask="prefix", wishes=ORACLE
    )
    np.testing.assert_allclose(got, want, atol=3e-6)


def test_score_and_mask_together_bind_the_scores_arrays_first(qkv):
    slopes, documents = ex.captured(np.array([0.5, 0.25, 0.125, 0.0625], np.float32)), ex.captured(DOCUMENTS)
    got = tessera.attention(
        *qkv,
        score=lambda s, b, h, q, k: s - slopes[h] * abs(q - k),
        mask=lambda b, h, q, k: documents[q] == documents[k],
    )
    want = tessera.attention(*qkv, alibi_slopes=slopes.array, mask=lambda b, h, q, k: q // 13 == k // 13)
    np.testing.assert_allclose(got, want, atol=3e-6)


def test_a_function_sees_what_its_closure_holds_now(qkv):
    """No call is kept by the function's identity."""
    reach = 5
    mask = lambda b, h, q, k: (q >= k) & (q - k <= reach)  # noqa: E731
    first = tessera.attention(*qkv, mask=mask)
    reach = 50
    second = tessera.attention(*qkv, mask=mask)
    np.testing.assert_array_equal(first, tessera.attention(*qkv, window=(5, 0)))
    np.testing.assert_array_equal(second, tessera.attention(*qkv, window=(50, 0)))


def test_gradients_by_the_traced_derivative(qkv):
    def score(s, b, h, q, k):
        return 3.0 * ex.tanh(s / 3.0) + s * s * 0.1

    q, k, v = qkv
    out, lse = tessera.attention(q, k, v, score=score, causal=True, return_lse=True)
    dout = np.random.default_rng(5).standard_normal(out.shape).astype(np.float32)
    got = tessera.attention_backward(dout, q, k, v, out, lse, score=score, causal=True)
    plain = lambda s, *at: 3.0 * math.tanh(s / 3.0) + s * s * 0.1  # noqa: E731
    plain.derivative = lambda s, *at: 1.0 - math.tanh(s / 3.0) ** 2 + 0.2 * s
    want = tessera.attention_backward(dout, q, k, v, out, lse, score=plain, causal=True, wishes=ORACLE)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def window_of(mask):
    traced = trace(mask, MASK)
    window, rest = without_window(traced.graph, traced.result)
    return window, program(rest)


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (lambda b, h, q, k: q >= k, (None, 0)),
        (lambda b, h, q, k: k < q, (None, -1)),
        (lambda b, h, q, k: ~(q < k), (None, 0)),
        (lambda b, h, q, k: q - k <= 7, (7, None)),
        (lambda b, h, q, k: q < k + 7, (6, None)),
        (lambda b, h, q, k: (q - k < 7) & (k - q <= 2), (6, 2)),
        (lambda b, h, q, k: abs(q - k) <= 4, (4, 4)),
        (lambda b, h, q, k: abs(k - q + 1) < 4, (4, 2)),
        (lambda b, h, q, k: q == k, (0, 0)),
        (lambda b, h, q, k: (q >= k) & (k + 3 >= q) & (q >= k - 9), (3, 0)),
    ],
)
def test_windows_are_recognised(mask, window):
    found, rest = window_of(mask)
    assert found == window and rest == "const.b 1;value 0"
    traced = trace(mask, MASK)
    for query in range(-12, 12):
        for key in range(-12, 12):
            inside = (window[0] is None or key >= query - window[0]) and (window[1] is None or key <= query + window[1])
            assert value_of(program(traced.result), "value", query=query, key=key) == inside


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: (q >= k) | (k < 3),
        lambda b, h, q, k: q + k >= 3,
        lambda b, h, q, k: 2 * q >= 2 * k,
        lambda b, h, q, k: q // 2 >= k // 2,
        lambda b, h, q, k: q >= h,
        lambda b, h, q, k: (q - k) % 3 == 0,
        lambda b, h, q, k: (q - k <= -3) & (k - q < 2),
        lambda b, h, q, k: q - k != 0,
    ],
)
def test_what_is_no_window_is_left(mask):
    assert window_of(mask)[0] == (None, None)


def test_what_remains_of_a_mask_beside_its_window(qkv):
    plan = tessera.plan(*qkv, mask=lambda b, h, q, k: (q >= k) & (k % 5 != 2))
    assert " causal " in f" {plan.problem} " and "mask=traced." in plan.problem
    assert "mask=" not in tessera.plan(*qkv, mask=MASKS["window"]).problem
    assert "window" not in tessera.plan(*qkv, mask=MASKS["global"]).problem


REFUSED = [
    (lambda b, h, q, k: q >= k and q < 9, "truth of a symbol"),
    (lambda b, h, q, k: 3 <= q <= 9, "truth of a symbol"),
    (lambda b, h, q, k: max(q, k) > 3, "truth of a symbol"),
    (lambda b, h, q, k: math.exp(q) > 3, "float() of a symbol"),
    (lambda b, h, q, k: int(q) > 3, "int() of a symbol"),
    (lambda b, h, q, k: [True, False][q], "symbol as a Python integer"),
    (lambda b, h, q, k: DOCUMENTS[q] == 1, "captured(array)"),
    (lambda b, h, q, k: ex.captured(DOCUMENTS)[q, k] == 1, "2 indices"),
    (lambda b, h, q, k: ex.captured(DOCUMENTS)[q > k] == 1, "index that is a float or a truth"),
    (lambda b, h, q, k: ex.captured(DOCUMENTS.astype(np.float64))[q] == 1, "fp64"),
    (lambda b, h, q, k: np.fft.fft(q) == 1, "fft"),
    (lambda b, h, q, k: np.arctan(q) > 1, "function arctan"),
    (lambda b, h, q, k: q.frobnicate(), "attribute frobnicate"),
    (lambda b, h, q, k: (q > k) + (k > q), "add of two truths"),
    (lambda b, h, q, k: q // 0 == 1, "division by 0"),
    (lambda b, h, q, k: q**k > 1, "power of integers"),
    (lambda b, h, q, k: q == 2**70, "64 bits"),
    (lambda b, h, q, k: q == "1", "operand of type str"),
    (lambda b, h, q, k: (q * 0.5) & 1 == 0, "bitwise and of floats"),
    (lambda b, h, q, k: q - k, "got an integer from"),
    (lambda b, h, q, k: None, "got NoneType from"),
    (lambda b, h, q, k: q > random.randrange(1 << 60), "second call"),
]


@pytest.mark.parametrize(("mask", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_be_traced_names_its_line(qkv, mask, words):
    with pytest.raises(ex.TraceError) as found:
        tessera.attention(*qkv, mask=mask)
    assert words in str(found.value) and f"test_expressions.py:{mask.__code__.co_firstlineno}" in str(found.value)


def test_a_score_is_a_float_and_extras_are_the_functions_own(qkv):
    with pytest.raises(ex.TraceError, match=r"score: got a truth from .*test_expressions.py:\d+\); want a float"):
        tessera.attention(*qkv, score=lambda s, b, h, q, k: s > 0)
    with pytest.raises(ValueError, match="extras: got 1 arrays beside functions of Python"):
        tessera.attention(*qkv, mask=MASKS["prefix"], extras=(DOCUMENTS,))
    with pytest.raises(ex.TraceError, match=r"more than|at most 256"):
        tessera.attention(*qkv, score=lambda s, *at: sum((ex.tanh(s * i) for i in range(300)), s))


def test_five_arrays_are_too_many(qkv):
    arrays = [ex.captured(np.full(3, i, np.int32)) for i in range(5)]
    with pytest.raises(ValueError, match="extras: got 5 tensors; want at most 4"):
        tessera.attention(*qkv, mask=lambda b, h, q, k: sum(array[k] for array in arrays) == q)


class TestGraph:
    def test_equal_expressions_are_one_node(self):
        graph = Graph()
        a, b = graph.input("query"), graph.input("key")
        assert graph.binary("add", a, b) is graph.binary("add", b, a)
        assert graph.binary("sub", a, b) is not graph.binary("sub", b, a)
        assert graph.constant(0.0) is not graph.constant(-0.0)
        assert graph.constant(1) is not graph.constant(1.0) and graph.constant(True) is not graph.constant(1)

    def test_folding_is_exact(self):
        graph = Graph()
        third = graph.binary("div", graph.constant(1.0), graph.constant(3.0))
        assert third.data == np.float32(1) / np.float32(3)
        assert graph.binary("div", graph.constant(-7), graph.constant(2)).data == -4
        assert graph.binary("mod", graph.constant(-7), graph.constant(3)).data == 2
        assert not graph.binary("mul", graph.constant(2**62), graph.constant(4)).is_constant  # it would wrap
        assert not graph.unary("exp", graph.constant(1.0)).is_constant
        score = graph.input("score")
        assert not graph.binary("mul", score, graph.constant(0.0)).is_constant  # NaN and infinity stay
        assert graph.binary("add", score, graph.constant(0.0)) is not score  # −0 + 0 is 0
        assert graph.binary("mul", score, graph.constant(1.0)) is score

    def test_powers_are_products(self):
        text = program(trace(lambda s, *at: s**4 + s**0.5, SCORE).result)
        assert "pow" not in text and text.count("mul") == 2 and "sqrt" in text


def test_numpys_functions_are_those_of_the_module():
    ours = lambda s, b, h, q, k: ex.where(q > k, ex.tanh(s), ex.minimum(s, 2.0)) + ex.real(q)  # noqa: E731
    theirs = lambda s, b, h, q, k: np.where(q > k, np.tanh(s), np.minimum(s, np.float32(2))) + np.float32(1) * q  # noqa: E731
    assert program(trace(ours, SCORE).result) == program(trace(theirs, SCORE).result)


@pytest.mark.parametrize("form", ["indices", "bitmask", "transposed"])
@pytest.mark.parametrize("name", MASKS)
def test_tile_lists_of_functions(qkv, name, form):
    q, k, v = qkv[0][:, :50], *qkv[1:]
    mask, block = MASKS[name], (8, 16)
    tiles = tessera.TileList.from_function(mask, (2, 4, 50, 70), block=block, form=form)
    sees = np.array(
        [[[[mask(b, h, i + 20, j) for j in range(70)] for i in range(50)] for h in range(4)] for b in range(2)]
    )
    sees = np.pad(sees, ((0, 0), (0, 0), (0, 6), (0, 10))).reshape(2, 4, 7, 8, 5, 16)
    any_seen = sees.any((3, 5))
    listed = np.zeros_like(any_seen)
    out = tessera.attention(q, k, v, mask=mask, tiles=tiles)
    np.testing.assert_allclose(out, tessera.attention(q, k, v, mask=mask), atol=3e-6)
    if form == "indices":
        for counts, indices in ((tiles.counts, tiles.indices), (tiles.full_counts, tiles.full_indices)):
            for at in np.ndindex(*counts.shape):
                listed[(*at, indices[at][: counts[at]])] = True
        assert not (any_seen & ~listed).any()
        if name in ("causal", "prefix", "documents", "global", "nothing", "everything", "heads"):
            assert (any_seen == listed).all()


def test_what_was_traced_is_kept_up_to_a_number(qkv, monkeypatch):
    from tessera.expressions import register

    monkeypatch.setattr(register, "_MOST", 4)
    monkeypatch.setattr(register, "_made", 0)
    monkeypatch.setattr(register, "_traced", register.OrderedDict())
    names = [ex.score_of(lambda s, b, h, q, k, i=i: s * (i + 0.125)).name for i in range(3)]
    with pytest.warns(RuntimeWarning, match="got 4 different expressions in this process; want numbers"):
        ex.mask_of(lambda b, h, q, k: k % 3 != 1)
    assert register.traced_by_name(names[0]) is not None  # and is now the last to go
    ex.score_of(lambda s, b, h, q, k: s * 4.125)
    assert names[0] in register._traced and names[1] not in register._traced
    with pytest.warns(RuntimeWarning, match="got 8 different expressions"):
        for i in range(5, 8):
            ex.score_of(lambda s, b, h, q, k, i=i: s * (i + 0.125))
    assert len(register._traced) == 4
    out = tessera.attention(*qkv, score=names[1])  # the library knows it for good
    np.testing.assert_array_equal(out, tessera.attention(*qkv, score=lambda s, b, h, q, k: s * 1.125))


def test_explain_says_where_a_function_is_called_for_each_element(qkv):
    def wide(batch, head, query, key):
        return sum((query * (2 * number + 1)) ^ (key + number) for number in range(40)) % 3 != 0

    words = "mask: element by element, not by vectors: of its"
    assert words in tessera.explain(*qkv, mask=wide)
    assert words not in tessera.explain(*qkv, mask=wide, wishes=ORACLE)
    assert "element by element" not in tessera.explain(*qkv, mask=lambda b, h, q, k: (q ^ k) % 3 != 0)
    same_as_oracle(qkv, mask=wide)
