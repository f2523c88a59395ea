# SPDX-License-Identifier: Apache-2.0
"""Which rows ranks hold, which they need of others, and what the cost model makes of it; one process."""

from __future__ import annotations

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("no torch.distributed", allow_module_level=True)

from tessera.distributed import Machine, Mask, layout_of  # noqa: E402
from tessera.distributed.cost import Shape, choose, estimate  # noqa: E402
from tessera.distributed.partial import residual_of  # noqa: E402
from tessera.distributed.reach import moved_rows, needs, pairs  # noqa: E402
from tessera.distributed.ulysses import head_ranges  # noqa: E402

ENDS = [0, 13, 13, 60, 61, 107]
KINDS = [
    {"seqlen": 101},
    {"seqlen": 3},
    {"cu_seqlens": ENDS},
    {"seqlen": 101, "multiple": 8},
    {"cu_seqlens": ENDS, "multiple": 4},
]


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", KINDS, ids=str)
def test_every_token_has_one_rank(sizes, ranks, balance):
    layout = layout_of(ranks, balance=balance, **sizes)
    held = torch.cat([layout.index(rank) for rank in range(ranks)])
    assert torch.equal(held.sort().values, torch.arange(layout.tokens))
    assert torch.equal(held[layout.inverse()], torch.arange(layout.tokens))
    assert [len(layout.index(rank)) for rank in range(ranks)] == [layout.rows(rank) for rank in range(ranks)]
    ends = sizes.get("cu_seqlens", [0, layout.tokens])
    whole = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])
    for rank in range(ranks):
        assert torch.equal(layout.positions(rank), whole[layout.index(rank)])


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
def test_pieces_begin_at_multiples(balance):
    for sizes in ({"seqlen": 101}, {"cu_seqlens": ENDS}, {"seqlen": 96}):
        layout = layout_of(3, balance=balance, multiple=8, **sizes)
        starts = [
            start
            for rank in range(3)
            for part in layout.parts(rank)
            for start, length in zip(*part, strict=True)
            if length
        ]
        assert all(start % 8 == 0 for start in starts)
    assert [layout.rows(rank) for rank in range(3)] == [32, 32, 32]


def test_ranks_of_two_levels_hold_the_rows_of_their_neighbours():
    for sizes in KINDS:
        for balance in ("zigzag", "contiguous"):
            whole, groups = (layout_of(ranks, balance=balance, **sizes) for ranks in (8, 2))
            for group in range(2):
                held = torch.cat([whole.index(4 * group + inner) for inner in range(4)])
                assert torch.equal(held.sort().values, groups.index(group).sort().values)


MASKS = [Mask(), Mask(None, 0), Mask(9, 4), Mask(30, -3), Mask(None, 0, 19), Mask(3, 3, 7)]


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("sizes", KINDS, ids=str)
def test_what_is_needed_is_what_a_query_sees(sizes, mask, balance):
    """Against visibility pair by pair; ranges may be wider where there is more than one sequence, not elsewhere."""
    layout = layout_of(3, balance=balance, **sizes)
    sequence = torch.repeat_interleave(torch.arange(len(layout.lengths)), torch.tensor(layout.lengths))
    position = torch.cat([torch.arange(length) for length in layout.lengths])
    apart = position[:, None] - position
    shown = sequence[:, None] == sequence
    shown &= apart <= (mask.left if mask.left is not None else 10**9)
    shown &= -apart <= (mask.right if mask.right is not None else 10**9)
    if mask.chunk:
        shown &= (position // mask.chunk)[:, None] == position // mask.chunk
    for reader in range(3):
        for owner in range(3):
            seen = shown[layout.index(reader)][:, layout.index(owner)].any(0)
            first, asked = 0, torch.zeros_like(seen)
            for i, part in enumerate(layout.parts(owner)):
                for rows in needs(mask, layout, reader, owner):
                    if rows.part == i:
                        asked[first + rows.begin : first + rows.end] = True
                        assert layout.packed or (seen[first + rows.begin] and seen[first + rows.end - 1])
                first += part.rows
            assert bool((asked | ~seen).all()), "a key that is seen is not asked for"


def test_ranks_that_a_window_keeps_apart_do_not_talk():
    layout = layout_of(8, seqlen=800, balance="contiguous")
    mask = Mask(99, 0)
    assert [bool(needs(mask, layout, 4, owner)) for owner in range(8)] == [False] * 3 + [True] * 2 + [False] * 3
    assert moved_rows(mask, layout) == (0, *[99] * 7)


def test_zigzag_balances_a_causal_mask():
    work = pairs(Mask(None, 0), layout_of(8, seqlen=8192))
    assert max(work) < 1.01 * min(work)
    work = pairs(Mask(None, 0), layout_of(8, seqlen=8192, balance="contiguous"))
    assert max(work) > 10 * min(work)


def test_heads_of_ranks():
    assert head_ranges(2, 8, 4) == [((0, 4), (0, 2)), ((4, 8), (2, 4))]
    assert head_ranges(4, 8, 2) == [((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 6), (1, 2)), ((6, 8), (1, 2))]
    with pytest.raises(ValueError, match="q: got 8 heads; want a multiple of the 3 ranks"):
        head_ranges(3, 8, 2)
    with pytest.raises(ValueError, match="k: got 4 heads for 12 of q, groups of 3"):
        head_ranges(6, 12, 4)


GQA, MHA = Shape(32, 8, 128, 128), Shape(32, 32, 128, 128)


def test_bytes_of_methods():
    """Ulysses moves fewer from P > hq / hkv + 1 on: 2 (P − 1) s hkv d e beside (P − 1) / P s (2 hq + 2 hkv) d e."""
    for shape, where in ((GQA, 5), (MHA, 2)):
        for ranks in (2, 4, 8, 16):
            layout = layout_of(ranks, seqlen=4096 * ranks)
            gathered = estimate("all_gather", Mask(), layout, shape, Machine()).bytes
            assert gathered == (ranks - 1) * 4096 * 2 * shape.heads_kv * 128 * 2
            if ranks <= shape.heads_kv:
                exchanged = estimate("ulysses", Mask(), layout, shape, Machine()).bytes
                assert exchanged == (ranks - 1) * 4096 * 2 * (32 + shape.heads_kv) * 128 * 2 // ranks
                assert (exchanged < gathered) == (ranks > where)


def test_choice():
    causal = Mask(None, 0)
    long, short = (layout_of(4, seqlen=n) for n in (131072, 2048))
    assert choose(causal, short, GQA, Machine())[0] == "all_gather"
    assert choose(causal, long, GQA, Machine(bandwidth=1e10))[0] == "ring"  # a slow link, under compute
    assert choose(causal, layout_of(8, seqlen=16384), MHA, Machine(bandwidth=2e11, memory=1e11))[0] == "ulysses"
    small = choose(causal, long, Shape(6, 2, 128, 128), Machine(), memory_limit=0)
    assert "ulysses" not in small[1] and small[0] == "ring"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_residual_of_merged_results_is_that_of_the_kernels(dtype):
    exact = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 2.0 ** torch.arange(-30, 34).repeat(64) / 4
    exact = torch.cat((exact.clamp(-6e4, 6e4), torch.zeros(1)))
    rounded = exact.to(dtype)
    bits, least = (10, -14) if dtype == torch.float16 else (7, -119)
    exponent = torch.where(rounded == 0, least, rounded.double().abs().log2().floor()).clamp(min=least)
    unit = 2.0 ** (exponent - bits)
    back = rounded.double() + residual_of(exact, rounded).double() * unit / 254
    assert ((back - exact).abs() <= unit / 508 * 1.0001).all()


def test_bad_layouts():
    with pytest.raises(ValueError, match="seqlen: got None and cu_seqlens None; want one of them"):
        layout_of(2)
    with pytest.raises(ValueError, match=r"cu_seqlens: got \[0, 5, 3\]; want b \+ 1 entries from 0, not decreasing"):
        layout_of(2, cu_seqlens=[0, 5, 3])
    with pytest.raises(ValueError, match="balance: got 'striped'; want 'contiguous' or 'zigzag'"):
        layout_of(2, seqlen=5, balance="striped")
    with pytest.raises(ValueError, match="multiple: got 0; want 1 or more"):
        layout_of(2, seqlen=5, multiple=0)
