# SPDX-License-Identifier: Apache-2.0
"""Masks of which a part is a window, and the rest hides whole runs of keys beside its border."""

from __future__ import annotations

import locale
import math

import pytest

np = pytest.importorskip("numpy")

import tessera  # noqa: E402
from tessera import expressions as ex  # noqa: E402


def inputs(length=150, heads=1):
    random = np.random.default_rng(3)
    return (random.standard_normal((1, length, heads, 32), dtype=np.float32) for _ in range(3))


@pytest.mark.parametrize("size", [8, 12, 16, 64, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_documents_beside_the_diagonal(size, causal):
    q, k, v = inputs()

    def own(batch, head, query, key):
        same = query // size == key // size
        return (query >= key) & same if causal else same & (query - key < 3) & (key - query < 3)

    got = tessera.attention(q, k, v, mask=own)
    want = tessera.attention(q, k, v, mask=own, wishes="implementation=cpu.reference")
    np.testing.assert_allclose(got, want, atol=1e-5)
    later = k.copy()
    later[0, 140:] += 1
    if causal:
        np.testing.assert_array_equal(tessera.attention(q, later, v, mask=own)[0, :140], got[0, :140])


@pytest.mark.parametrize("window", [(0, 0), (3, 3), (20, 0)])
def test_a_window_beside_keys_that_a_mask_hides(window):
    q, k, v = inputs()
    mask = lambda batch, head, query, key: key // 64 >= 1  # noqa: E731
    got = tessera.attention(q, k, v, window=window, mask=mask)
    want = tessera.attention(q, k, v, window=window, mask=mask, wishes="implementation=cpu.reference")
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_list_for_any_number_of_heads_is_of_a_mask_that_reads_none():
    with pytest.raises(ValueError, match=r"shape: got .* a mask that reads the head; want the number of query heads"):
        tessera.TileList.from_function(lambda b, h, i, j: j // 64 == h, (None, None, 256, 256))
    made = tessera.TileList.from_function(lambda b, h, i, j: j // 64 == h, (None, 4, 256, 256))
    assert made.full_counts.shape[:2] == (1, 4) and (made.full_counts == 1).all() and not made.counts.any()


def test_numbers_are_read_in_no_locale():
    q, k, v = inputs(20)
    before = locale.setlocale(locale.LC_ALL)
    try:
        for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "es_ES.UTF-8", "ru_RU.UTF-8"):
            try:
                locale.setlocale(locale.LC_ALL, name)
                break
            except locale.Error:
                continue
        else:
            pytest.skip("no locale with a decimal comma is installed")
        tessera.attention(q, k, v, score=lambda s, *_: s * 0.37)
    finally:
        locale.setlocale(locale.LC_ALL, before)


@pytest.mark.parametrize("number", [1e-45, 1e-38, -0.1, 3.4e38, math.inf, -math.inf])
def test_constants_are_the_nearest_fp32(number):
    q, k, v = inputs(20)
    got = tessera.attention(q, k, v, score=lambda s, *_: ex.where(s < number, s, s * 0.5))
    scores = np.einsum("bihd,bjhd->bhij", q, k) / 32**0.5
    scores = np.where(scores < np.float32(number), scores, scores * 0.5)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_numpys_numbers_on_the_left():
    q, k, v = inputs(20)
    got = tessera.attention(q, k, v, mask=lambda b, h, i, j: (np.int64(8) < j) | (np.int64(3) != i))
    want = tessera.attention(q, k, v, mask=lambda b, h, i, j: (j > 8) | (i != 3))
    np.testing.assert_array_equal(got, want)


def test_errors_of_long_expressions_and_odd_operands_are_trace_errors():
    def long(score, batch, head, query, key):
        for step in range(300):
            score = score * (1 + step / 1000) + query
        return score

    with pytest.raises(ex.TraceError, match=r"score: got an expression of .* steps; want at most 256"):
        ex.score_of(long)
    with pytest.raises(ex.TraceError, match="a cast of int; want a symbol"):
        ex.score_of(lambda s, *_: s * ex.real(2))
    ex.score_of(lambda s, *_: ex.minimum(s ** float("inf"), 1.0))
