# SPDX-License-Identifier: Apache-2.0
"""What the CPU computes of an expression by vectors: divisions by a constant, and neighbours in a captured tensor."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tessera
from tessera import expressions as ex

ORACLE = "implementation=cpu.reference"
KEYS = 150


@pytest.fixture
def qkv():
    generator = np.random.default_rng(3)
    lengths_and_heads = (70, 2), (KEYS, 2), (KEYS, 2)
    return [generator.standard_normal((1, length, heads, 16)).astype(np.float32) for length, heads in lengths_and_heads]


@pytest.mark.parametrize("most", [2**20, 2**51 - 1, 2**51, 2**63 - 1])
@pytest.mark.parametrize("by", [1, 3, 7, 1_000_003, 2**40 + 1, 2**51 - 1, 2**51 + 1, 2**62 + 1, -7])
def test_divisions(qkv, by, most):
    """Of numbers near multiples of the divisor, and of the largest there are."""
    draw = random.Random(by * 100 + most)
    numbers = [-most, most, most - 1, 1 - most]
    while len(numbers) < KEYS:
        number = draw.randint(-most, most) // by * by + draw.choice((-1, 0, 1))
        numbers.append(min(max(number, -most), most))
    x = ex.captured(np.array(numbers))
    quotients = ex.captured(np.array([number // by for number in numbers]))
    remainders = ex.captured(np.array([number % by for number in numbers]))

    def of_keys(b, h, q, k):
        return (x[k] // by == quotients[k]) & (x[k] % by == remainders[k])

    def of_both(b, h, q, k):
        at = (q + k) % KEYS
        return (x[at] // by == quotients[at]) & (x[at] % by == remainders[at])

    everything = tessera.attention(*qkv)
    for mask in (of_keys, of_both):
        np.testing.assert_allclose(tessera.attention(*qkv, mask=mask), everything, atol=3e-6)


PLACES = {
    "forwards": lambda q, k: k,
    "backwards": lambda q, k: 149 - k,
    "queries and keys": lambda q, k: q + k,
    "differences": lambda q, k: q - k + 149,
    "ends": lambda q, k: q - k + 20,
    "other steps": lambda q, k: 2 * k - q,
    "one place": lambda q, k: q,
    "a turn": lambda q, k: abs(k - 75),
    "a jump": lambda q, k: (k + 20) % 150,
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("places", PLACES)
def test_captured_neighbours(qkv, places, dtype):
    place, many = PLACES[places], 220
    table = ex.captured(np.random.default_rng(5).integers(0, 100, many).astype(dtype))
    got = tessera.attention(*qkv, score=lambda s, b, h, q, k: s + table[place(q, k)] * 0.125)
    want = tessera.attention(
        *qkv,
        score=lambda s, b, h, q, k: s + float(table.array[min(max(place(q, k), 0), many - 1)]) * 0.125,
        wishes=ORACLE,
    )
    np.testing.assert_allclose(got, want, atol=3e-6)
