# SPDX-License-Identifier: Apache-2.0
"""Masks read as windows and lengths: whatever is recognised rebuilds the mask exactly."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from tessera.torch.mask_patterns import MaskPattern, Unrecognised, recognise  # noqa: E402


def rebuilt(pattern: MaskPattern, b: int, sq: int, sk: int) -> torch.Tensor:
    i = torch.arange(sq)[:, None] + (0 if pattern.starts is None else pattern.starts[:, None, None])
    j = torch.arange(sk)
    shown = torch.ones(b, sq, sk, dtype=torch.bool)
    if pattern.left is not None:
        shown &= j >= i - pattern.left
    if pattern.right is not None:
        shown &= j <= i + pattern.right
    if pattern.keys is not None:
        shown &= j < pattern.keys[:, None, None]
    if pattern.rows is not None:
        shown &= torch.arange(sq)[:, None] < pattern.rows[:, None, None]
    return shown


def lengths(draw: random.Random, b: int, most: int) -> torch.Tensor | None:
    return None if draw.random() < 0.5 else torch.tensor([draw.randint(0, most) for _ in range(b)], dtype=torch.int32)


def test_random_patterns_are_recognised():
    draw = random.Random(1)
    missed = 0
    for _ in range(1500):
        b, sq, sk = draw.randint(1, 3), draw.randint(1, 9), draw.randint(1, 9)
        left, right = (draw.choice([None, draw.randint(-3, 8)]) for _ in range(2))
        mask = rebuilt(MaskPattern(left, right, lengths(draw, b, sk), lengths(draw, b, sq)), b, sq, sk)
        found = recognise(mask[:, None], b, sq, sk)
        if isinstance(found, Unrecognised):
            missed += 1
        else:
            assert torch.equal(rebuilt(found, b, sq, sk), mask)
    # Windows that start below the diagonal and lengths that cut them to nothing leave too little to read them off.
    assert missed <= 15


def test_random_masks_are_recognised_only_exactly():
    generator = torch.Generator().manual_seed(2)
    recognised = 0
    for _ in range(1500):
        mask = torch.rand(2, 3, 4, generator=generator) < 0.8
        found = recognise(mask[:, None], 2, 3, 4)
        if not isinstance(found, Unrecognised):
            recognised += 1
            assert torch.equal(rebuilt(found, 2, 3, 4), mask)
    assert recognised > 0


@pytest.mark.parametrize(
    ("mask", "pattern"),
    [
        (torch.ones(5, 5, dtype=torch.bool), MaskPattern()),
        (torch.ones(5, 5, dtype=torch.bool).tril(), MaskPattern(right=0)),
        (torch.ones(5, 5, dtype=torch.bool).tril().triu(-2), MaskPattern(left=2, right=0)),
        (torch.ones(5, 5, dtype=torch.bool).tril(-1), MaskPattern(right=-1)),
        (torch.ones(5, 5, dtype=torch.bool).triu(1), MaskPattern(left=-1)),
    ],
)
def test_windows_in_numbers(mask, pattern):
    assert recognise(mask, 2, 5, 5) == pattern


def test_lengths_in_numbers():
    found = recognise((torch.arange(6) < torch.tensor([[2], [6]]))[:, None, None], 2, 4, 6)
    assert found[:2] == (None, None) and found.rows is None and found.starts is None
    assert found.keys.tolist() == [2, 6] and found.keys.dtype == torch.int32


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (torch.ones(5, dtype=torch.bool), "dimensions"),
        (torch.ones(3, 5, dtype=torch.bool), "shape"),
        (torch.ones(5, 5, dtype=torch.int32), "int32"),
        (torch.full((5, 5), -1.0), "values other than"),
        (torch.full((5, 5), torch.nan), "values other than"),
        (torch.ones(1, 2, 5, 5, dtype=torch.bool), "heads"),
    ],
)
def test_refused_with_a_reason(mask, reason):
    found = recognise(mask, 2, 5, 5)
    assert isinstance(found, Unrecognised) and reason in found.reason


@pytest.mark.parametrize("seqlen_q", [2, 3, 5])
def test_leading_keys_hidden_from_every_row(seqlen_q):
    mask = torch.ones(seqlen_q, 5, dtype=torch.bool)
    mask[:, 0] = False
    assert isinstance(recognise(mask, 2, seqlen_q, 5), Unrecognised)
    found = recognise(mask[:1], 2, seqlen_q, 5)
    assert isinstance(found, Unrecognised) and "leading keys" in found.reason


@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_no_elements(shape):
    b, sq, sk = shape
    assert recognise(torch.ones(b, 1, sq, sk, dtype=torch.bool), b, sq, sk) == MaskPattern()
