# SPDX-License-Identifier: Apache-2.0
"""`tessera.TileList`: its forms, what they are made from and turned back into."""

from __future__ import annotations

import numpy as np
import pytest
from tessera import TileList

FORMS = ["indices", "bitmask", "transposed"]


@pytest.fixture
def mask():
    return np.random.default_rng(3).random((2, 3, 5, 70)) < 0.3


@pytest.mark.parametrize("form", FORMS)
def test_masks_come_back(mask, form):
    tiles = TileList.from_mask(mask, form=form, block=(16, 32))
    assert tiles.form == form and tiles.block == (16, 32)
    np.testing.assert_array_equal(tiles.to_mask(key_blocks=70, query_blocks=5), mask)


def test_arrays_of_the_forms(mask):
    indices, bits, columns = (dict(TileList.from_mask(mask, form=form).arrays()) for form in FORMS)
    assert indices["tile_counts"].dtype == indices["tile_indices"].dtype == np.int32
    np.testing.assert_array_equal(indices["tile_counts"], mask.sum(-1))
    for row, count, entries in zip(
        mask.reshape(-1, 70), indices["tile_counts"].ravel(), indices["tile_indices"].reshape(30, -1), strict=True
    ):
        np.testing.assert_array_equal(entries[:count], np.flatnonzero(row))
        assert (entries[count:] == -1).all()
    assert bits["tile_bits"].dtype == np.uint32 and bits["tile_bits"].shape == (2, 3, 5, 3)
    key = np.arange(70)
    np.testing.assert_array_equal(bits["tile_bits"][..., key // 32] >> (key % 32).astype(np.uint32) & 1, mask)
    np.testing.assert_array_equal(columns["tile_counts"], mask.sum(-2))


@pytest.mark.parametrize("form", FORMS)
def test_full_tiles_are_disjoint_and_listed(mask, form):
    full = np.random.default_rng(4).random(mask.shape) < 0.2
    tiles = TileList.from_mask(mask, full=full, form=form)
    np.testing.assert_array_equal(tiles.to_mask(key_blocks=70, query_blocks=5), mask | full)
    arrays = dict(tiles.arrays())
    if form == "bitmask":
        assert not (arrays["tile_bits"] & arrays["full_bits"]).any()
    else:
        axis = -1 if form == "indices" else -2
        np.testing.assert_array_equal(arrays["full_counts"], full.sum(axis))
        np.testing.assert_array_equal(arrays["tile_counts"], (mask & ~full).sum(axis))


@pytest.mark.parametrize("form", FORMS)
def test_no_tile_at_all(form):
    tiles = TileList.from_mask(np.zeros((1, 1, 2, 3), bool), form=form)
    assert not tiles.to_mask(key_blocks=3, query_blocks=2).any()


def test_mass_keeps_the_fewest_tiles():
    mass = np.array([[[[0.5, 0.25, 0.1875, 0.0625], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 0.0, 0.0]]]], np.float32)
    for share, want in (
        (0.5, [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]),
        (0.75, [[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]),
        (0.9, [[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]),
        (0.0, [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]),
        (1.0, [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]),
    ):
        np.testing.assert_array_equal(TileList.from_mass(mass, share).to_mask(key_blocks=4)[0, 0], want)


@pytest.mark.parametrize("non_finite", [np.nan, np.inf, -np.inf])
def test_mass_that_is_not_finite_is_kept_and_the_rest_go_on(non_finite):
    mass = np.array([[[[0.5, non_finite, 0.25, 0.125], [0.5, 0.25, 0.125, 0.125]]]], np.float32)
    kept = TileList.from_mass(mass, 0.8).to_mask(key_blocks=4)[0, 0]
    np.testing.assert_array_equal(kept, [[1, 1, 1, 0], [1, 1, 1, 0]])


def test_mass_of_any_share_is_reached_and_minimal():
    mass = np.random.default_rng(8).dirichlet(np.ones(40), (2, 3, 7)).astype(np.float32)
    kept = TileList.from_mass(mass, 0.9).to_mask(key_blocks=40)
    held = np.where(kept, mass, 0).sum(-1, dtype=np.float64)
    total = mass.sum(-1, dtype=np.float64)
    lightest = np.where(kept, mass, np.inf).min(-1)
    assert (held >= 0.9 * total).all() and (held - lightest < 0.9 * total).all()


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({}, "tiles: got no arrays; want tile_counts, tile_indices"),
            ({"form": "rows", "counts": 1, "indices": 1}, "form: got 'rows'; want one of 'indices'"),
            ({"counts": 1}, "tiles: got tile_counts; want tile_counts, tile_indices"),
            ({"bits": 1, "counts": 1}, "tiles: got tile_bits, tile_counts; want tile_bits"),
            ({"counts": 1, "indices": 1, "full_counts": 1}, "full_counts, full_indices"),
            ({"counts": 1, "indices": 1, "form": "bitmask"}, "want tile_bits"),
        ],
    )
    def test_arrays_that_do_not_fit_the_form(self, arguments, text):
        with pytest.raises(ValueError) as raised:
            TileList(**{name: np.zeros(1) if value == 1 else value for name, value in arguments.items()})
        assert text in str(raised.value)

    def test_masks_of_another_rank_or_shape(self, mask):
        with pytest.raises(ValueError, match="mask: got 3 dimensions; want"):
            TileList.from_mask(mask[0])
        with pytest.raises(ValueError, match="full: got shape"):
            TileList.from_mask(mask, full=mask[:1])

    def test_sizes_that_a_list_does_not_hold(self, mask):
        with pytest.raises(ValueError, match="key_blocks: got None; want"):
            TileList.from_mask(mask).to_mask()
        with pytest.raises(ValueError, match="query_blocks: got None; want"):
            TileList.from_mask(mask, form="transposed").to_mask(key_blocks=70)
        with pytest.raises(ValueError, match="key_blocks: got 20; want more than the list's largest entry"):
            TileList.from_mask(mask).to_mask(key_blocks=20)

    def test_share(self):
        with pytest.raises(ValueError, match=r"share: got 1\.5; want 0 to 1"):
            TileList.from_mass(np.ones((1, 1, 1, 1)), 1.5)


def test_torch_stays_torch(mask):
    torch = pytest.importorskip("torch")
    tiles = TileList.from_mask(torch.from_numpy(mask), form="bitmask")
    assert isinstance(tiles.bits, torch.Tensor) and tiles.bits.dtype == torch.uint32
    back = tiles.to_mask(key_blocks=70)
    assert isinstance(back, torch.Tensor) and torch.equal(back, torch.from_numpy(mask))
    by_mass = TileList.from_mass(torch.rand(1, 1, 2, 3, requires_grad=True), 0.5)
    assert isinstance(by_mass.counts, torch.Tensor) and not by_mass.counts.requires_grad


def test_jax_stays_jax(mask):
    jax = pytest.importorskip("jax")
    tiles = TileList.from_mask(jax.numpy.asarray(mask))
    assert isinstance(tiles.counts, jax.Array)
    np.testing.assert_array_equal(np.asarray(tiles.to_mask(key_blocks=70)), mask)
