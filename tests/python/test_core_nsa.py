# SPDX-License-Identifier: Apache-2.0
"""`tessera.nsa` on numpy arrays: against masks over all pairs, what rows depend on, packed sequences, bad input."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import tessera
from nsa_textbook import nsa, sigmoid_gates

SMALL = {"length": 8, "stride": 8, "block": 8, "top": 5, "window": 20}
PRESETS = {
    "strict": {**SMALL, "tile": 16},
    "paper": {**SMALL, "stride": 4},
    "reference": {**SMALL, "tile": 32},
}


COMPRESSED = {"compressed_top": 4, "compressed_block": 2}  # lists of compressed keys too


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def inputs(rng, *leading, heads_q=4, heads_kv=2, dim=16, dim_v=24):
    return (
        normal(rng, *leading, heads_q, dim),
        normal(rng, *leading, heads_kv, dim),
        normal(rng, *leading, heads_kv, dim_v),
    )


def textbook(preset, causal=True):
    o = PRESETS[preset]
    return {
        "length": o["length"],
        "stride": o["stride"],
        "seen_from": 1 if preset == "reference" else o["length"],
        "window": o["window"],
        "causal": causal,
    }


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("preset", PRESETS)
def test_equals_masks_over_all_pairs(rng, preset, causal):
    q, k, v = inputs(rng, 2, 131)
    weight = normal(rng, 4, 3, 16)
    projections = normal(rng, 2, 16, 16), normal(rng, 2, 24, 24)
    out, tiles = tessera.nsa(
        q,
        k,
        v,
        preset=preset,
        causal=causal,
        gate_weight=weight,
        k_projection=projections[0],
        v_projection=projections[1],
        return_tiles=True,
        **PRESETS[preset],
    )
    assert out.shape == (2, 131, 4, 24) and tiles.block == (PRESETS[preset].get("tile", 1), 8)
    for b in range(2):
        want = nsa(
            q[b],
            k[b],
            v[b],
            tiles,
            sequence=b,
            gates=sigmoid_gates(q[b], weight),
            projections=projections,
            **textbook(preset, causal),
        )
        np.testing.assert_allclose(out[b], want, rtol=2e-5, atol=2e-5)


def test_given_gates_given_tiles_and_no_gates(rng):
    q, k, v = inputs(rng, 1, 90)
    plain, tiles = tessera.nsa(q, k, v, return_tiles=True, **PRESETS["strict"])
    thirds = np.full((90, 4, 3), 1 / 3)
    np.testing.assert_allclose(
        plain[0], nsa(q[0], k[0], v[0], tiles, gates=thirds, **textbook("strict")), rtol=1e-5, atol=1e-5
    )
    gates = normal(rng, 1, 90, 4, 3)
    out = tessera.nsa(q, k, v, gates=gates, tiles=tiles, **PRESETS["strict"])
    want = nsa(q[0], k[0], v[0], tiles, gates=gates[0], **textbook("strict"))
    np.testing.assert_allclose(out[0], want, rtol=2e-5, atol=2e-5)


def rows_that_change(rng, preset, row, **more):
    """Rows up to `row` whose bits change when q, k and v change at random places behind it."""
    q, k, v = inputs(rng, 1, 160)
    weight = normal(rng, 4, 3, 16)
    options = {"preset": preset, "gate_weight": weight, **PRESETS[preset], **more}
    before = tessera.nsa(q, k, v, **options)
    for x in (q, k, v):
        for i in np.concatenate(([row + 1], rng.integers(row + 1, 160, 12))):
            x[0, i] = 5 * normal(rng, *x.shape[2:])
    after = tessera.nsa(q, k, v, **options)
    assert (before[0, row + 1 :] != after[0, row + 1 :]).any()
    return np.flatnonzero((before[0, : row + 1].view(np.int32) != after[0, : row + 1].view(np.int32)).any((1, 2)))


@pytest.mark.parametrize("compressed", [{}, COMPRESSED])
@pytest.mark.parametrize("preset", ["strict", "paper"])
def test_no_row_depends_on_what_is_behind_it(rng, preset, compressed):
    for row in [0, 6, 7, 8, 15, 16, 40, 63, 64, 100, 150, *rng.integers(0, 159, 12)]:
        assert rows_that_change(rng, preset, int(row), **compressed).size == 0, row


def test_reference_leaks_as_its_name_says(rng):
    # Row 40 sees the compressed key of tokens 40 … 47 from its first token on.
    assert rows_that_change(rng, "reference", 40).size > 0


def test_values_that_are_not_finite_behind_a_row_do_not_reach_it(rng):
    q, k, v = inputs(rng, 1, 100)
    before = tessera.nsa(q, k, v, **PRESETS["strict"])
    k[0, 60:], v[0, 60:], q[0, 60:] = np.nan, np.inf, np.nan
    after = tessera.nsa(q, k, v, **PRESETS["strict"])
    np.testing.assert_array_equal(before[0, :60], after[0, :60])


@pytest.mark.parametrize("preset", ["strict", "paper"])
def test_a_prefix_has_the_rows_of_the_whole(rng, preset):
    q, k, v = inputs(rng, 1, 150)
    whole, all_tiles = tessera.nsa(q, k, v, preset=preset, return_tiles=True, **PRESETS[preset])
    for length in (1, 7, 8, 33, 64, 100):
        part, tiles = tessera.nsa(
            q[:, :length], k[:, :length], v[:, :length], preset=preset, return_tiles=True, **PRESETS[preset]
        )
        np.testing.assert_allclose(part, whole[:, :length], rtol=1e-5, atol=1e-5)
        there = -(-length // 8)  # blocks that have begun
        longer = all_tiles.indices[:, :, : tiles.indices.shape[2]]
        longer = np.where(longer < there, longer, -1)
        np.testing.assert_array_equal(np.sort(tiles.indices), np.sort(longer))


@pytest.mark.parametrize("preset", PRESETS)
def test_packed_sequences_are_single_ones(rng, preset):
    lengths = [70, 0, 5, 8, 131]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    q, k, v = inputs(rng, starts[-1] + 3)
    weight = normal(rng, 4, 3, 16)
    options = {"preset": preset, "gate_weight": weight, **PRESETS[preset]}
    packed, tiles = tessera.nsa(q, k, v, cu_seqlens=starts, return_tiles=True, **options)
    for b, (begin, end) in enumerate(pairwise(starts)):
        single, own = tessera.nsa(*(x[None, begin:end] for x in (q, k, v)), return_tiles=True, **options)
        np.testing.assert_array_equal(packed[begin:end], single[0])
        np.testing.assert_array_equal(tiles.indices[b, :, : own.indices.shape[2]], own.indices[0])
        assert (tiles.counts[b, :, own.counts.shape[2] :] == 0).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_batch_and_heads_may_be_permuted(rng, preset):
    q, k, v = inputs(rng, 3, 77, heads_q=6, heads_kv=3)
    weight = normal(rng, 6, 3, 16)
    options = {"preset": preset, **PRESETS[preset]}
    out = tessera.nsa(q, k, v, gate_weight=weight, **options)
    batch, heads = [2, 0, 1], [1, 2, 0]
    of_q = [2 * h + g for h in heads for g in range(2)]
    permuted = tessera.nsa(
        *(np.ascontiguousarray(x[batch][:, :, of]) for x, of in ((q, of_q), (k, heads), (v, heads))),
        gate_weight=weight[of_q],
        **options,
    )
    np.testing.assert_array_equal(permuted, out[batch][:, :, of_q])


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9])
def test_sequences_shorter_than_a_block(rng, tokens):
    q, k, v = inputs(rng, 2, tokens)
    for preset, options in PRESETS.items():
        out, tiles = tessera.nsa(q, k, v, preset=preset, return_tiles=True, **options)
        assert np.isfinite(out).all()
        for b in range(2):
            gates = np.full((tokens, 4, 3), 1 / 3)
            want = nsa(q[b], k[b], v[b], tiles, sequence=b, gates=gates, **textbook(preset))
            np.testing.assert_allclose(out[b], want, rtol=1e-5, atol=1e-5)


def test_more_blocks_than_there_are_is_all_of_them(rng):
    q, k, v = inputs(rng, 1, 100)
    gates = np.zeros((1, 100, 4, 3), np.float32)
    gates[..., 1] = 1
    out, tiles = tessera.nsa(q, k, v, gates=gates, return_tiles=True, **{**PRESETS["strict"], "top": 99})
    np.testing.assert_array_equal(tiles.counts[0, 0], [2, 4, 6, 8, 10, 12, 13])
    np.testing.assert_array_equal(out, tessera.attention(q, k, v, causal=True))


def test_a_window_has_exactly_its_keys(rng):
    q, k, v = inputs(rng, 1, 50)
    gates = np.zeros((1, 50, 4, 3), np.float32)
    gates[..., 2] = 1
    one = tessera.nsa(q, k, v, gates=gates, **{**PRESETS["strict"], "window": 1})
    np.testing.assert_allclose(one, np.repeat(v, 2, 2), rtol=1e-6)


def test_a_block_that_is_not_listed_is_not_read(rng):
    q, k, v = inputs(rng, 1, 128)
    gates = np.zeros((1, 128, 4, 3), np.float32)
    gates[..., 1] = 1
    out, tiles = tessera.nsa(q, k, v, gates=gates, return_tiles=True, **PRESETS["strict"])
    missing = sorted(set(range(14)) - set(tiles.indices[0, 0, 7, : tiles.counts[0, 0, 7]].tolist()))
    assert missing
    for block in missing:
        k[0, 8 * block : 8 * block + 8, 0] = np.nan
        v[0, 8 * block : 8 * block + 8, 0] = np.nan
    again = tessera.nsa(q, k, v, gates=gates, tiles=tiles, **PRESETS["strict"])
    np.testing.assert_array_equal(out[0, 112:, :2], again[0, 112:, :2])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("preset", PRESETS)
def test_lists_of_compressed_keys_are_masks(rng, preset, causal):
    lengths = [131, 0, 5, 90]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    q, k, v = inputs(rng, starts[-1])
    top = 6 if preset == "reference" else 4  # a tile of 32 rows begins 4 compressed keys
    options = {**PRESETS[preset], **COMPRESSED, "compressed_top": top}
    gates = normal(rng, starts[-1], 4, 3)
    call = {"preset": preset, "causal": causal, "gates": gates, "cu_seqlens": starts, **options}
    out, tiles, compressed = tessera.nsa(q, k, v, return_tiles=True, **call)
    assert compressed.block == (tiles.block[0], 2) and compressed.indices.shape[-1] == top
    for b, (begin, end) in enumerate(pairwise(starts)):
        part = (x[begin:end] for x in (q, k, v))
        words = {"sequence": b, "gates": gates[begin:end], "compressed_tiles": compressed}
        want = nsa(*part, tiles, **words, **textbook(preset, causal))
        np.testing.assert_allclose(out[begin:end], want, rtol=3e-5, atol=3e-5)
    again, *_ = tessera.nsa(q, k, v, tiles=tiles, compressed_tiles=compressed, return_tiles=True, **call)
    np.testing.assert_array_equal(out, again)
    everything = {name: value for name, value in call.items() if name not in COMPRESSED}
    np.testing.assert_array_equal(out, tessera.nsa(q, k, v, compressed_tiles=compressed, **everything))
    assert (out != tessera.nsa(q, k, v, **everything)).any()


@pytest.mark.parametrize("preset", ["strict", "paper"])
def test_lists_of_all_compressed_keys_are_no_lists(rng, preset):
    q, k, v = inputs(rng, 2, 150)
    for options in ({"compressed_top": 40, "compressed_block": 1}, {"compressed_top": 3, "compressed_block": 20}):
        out = tessera.nsa(q, k, v, preset=preset, **PRESETS[preset], **options)
        np.testing.assert_array_equal(out, tessera.nsa(q, k, v, preset=preset, **PRESETS[preset]))


def test_compressed_keys_that_are_not_listed_are_not_read(rng):
    q, k, v = inputs(rng, 1, 160)
    cache = tessera.nsa_pool(k, v, length=8)
    options = {"length": 8, "tile": 16, "top": 5, "causal": True, **COMPRESSED}
    _, tiles = tessera.nsa_select(q, cache[0], **options)
    out = tessera.attention(q, *cache, compressed_causal=(8, 8), tiles=tiles)
    missing = sorted(set(range(9)) - set(tiles.indices[0, 0, 9].tolist()))
    assert len(missing) == 6
    for block in missing:
        cache[0][0, 2 * block : 2 * block + 2, 0] = cache[1][0, 2 * block : 2 * block + 2, 0] = np.nan
    again = tessera.attention(q, *cache, compressed_causal=(8, 8), tiles=tiles)
    np.testing.assert_array_equal(out[0, 144:, :2], again[0, 144:, :2])


def test_pool_backward_is_the_transpose_of_pool(rng):
    _, k, v = inputs(rng, 2, 60)
    dk_pooled, dv_pooled = (normal(rng, *x.shape) for x in tessera.nsa_pool(k, v, length=16, stride=4))
    dk, dv = tessera.nsa_pool_backward(dk_pooled, dv_pooled, k, v, length=16, stride=4)
    k_pooled, v_pooled = tessera.nsa_pool(k, v, length=16, stride=4)
    np.testing.assert_allclose((dk * k).sum(), (dk_pooled * k_pooled).sum(), rtol=1e-4)
    np.testing.assert_allclose((dv * v).sum(), (dv_pooled * v_pooled).sum(), rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "kind", "name"),
    [
        ({"preset": "loose"}, ValueError, "preset"),
        ({"window": 0}, ValueError, "window"),
        ({"window": 2.5}, ValueError, "window"),
        ({"widow": 4}, TypeError, "widow"),
        ({"stride": 0}, ValueError, "stride"),
        ({"stride": 16}, ValueError, "stride"),
        ({"length": 16}, ValueError, "score"),
        ({"score": "softmax", "stride": 3}, ValueError, "stride"),
        ({"score": "cosine"}, ValueError, "score"),
        ({"reduce": "sum"}, ValueError, "reduce"),
        ({"visible": "never"}, ValueError, "visible"),
        ({"top": 2}, ValueError, "top"),
        ({"tile": 0}, ValueError, "tile"),
        ({"compressed_top": 1, "compressed_block": 2}, ValueError, "compressed_top"),
        ({"compressed_top": -1}, ValueError, "compressed_top"),
        ({"compressed_top": 2.5}, ValueError, "compressed_top"),
        ({"compressed_block": 2}, ValueError, "compressed_block"),
        ({"compressed_top": 4, "compressed_block": 0}, ValueError, "compressed_block"),
        ({"heads": "all"}, ValueError, "heads"),
        ({"gates": np.zeros((1, 40, 4, 2), np.float32)}, ValueError, "gates"),
        ({"gate_weight": np.zeros((4, 2, 16), np.float32)}, ValueError, "gate_weight"),
        ({"k_projection": np.zeros((2, 16, 16), np.float32)}, ValueError, "v_projection"),
        ({"cu_seqlens": np.array([0, 40], np.int32)}, ValueError, "q"),
        ({"k": np.zeros((1, 39, 2, 16), np.float32)}, ValueError, "k"),
        ({"k": np.zeros((1, 40, 3, 16), np.float32)}, ValueError, "k"),
    ],
)
def test_bad_input_names_the_argument(rng, change, kind, name):
    q, k, v = inputs(rng, 1, 40)
    call = {"k": k, **PRESETS["strict"], **change}
    with pytest.raises(kind, match=rf"\b{name}\b"):
        tessera.nsa(q, call.pop("k"), v, **call)


def test_lists_that_are_wrong_are_refused(rng):
    q, k, v = inputs(rng, 1, 40)
    _, tiles = tessera.nsa(q, k, v, return_tiles=True, **PRESETS["strict"])
    for entry, value in ((0, 99), (1, 0), (1, -1), (1, 4)):
        indices = tiles.indices.copy()
        indices[0, 0, 2, entry] = value
        with pytest.raises(ValueError, match="tile_indices"):
            wrong = tessera.TileList(counts=tiles.counts, indices=indices, block=tiles.block)
            tessera.nsa(q, k, v, tiles=wrong, **PRESETS["strict"])


@pytest.mark.parametrize("preset", ["strict", "paper"])
def test_a_decode_finds_the_tiles_of_the_prefill(rng, preset):
    options = {**tessera.native_sparse.PRESETS[preset]._asdict(), **PRESETS[preset], **COMPRESSED}
    del options["window"]
    tile = options["tile"] = options["tile"] or 1
    q, k, v = inputs(rng, 1, 131)
    cache, _ = tessera.nsa_pool(k, v, length=options["length"], stride=options["stride"])
    whole = tessera.nsa_select(q, cache, causal=True, **options)
    for row in range(0, 131, tile):
        known = cache.copy()
        known[:, max(0, row + 1 - options["length"]) // options["stride"] + 1 :] = np.nan  # not complete yet
        position = np.array([row], np.int64)
        step = tessera.nsa_select(q[:, row : row + 1], known, causal=True, seqlen_k=131, q_offset=position, **options)
        for of_step, of_whole in zip(step, whole, strict=True):
            np.testing.assert_array_equal(of_step.counts[..., 0], of_whole.counts[..., row // tile])
            np.testing.assert_array_equal(of_step.indices[..., 0, :], of_whole.indices[..., row // tile, :])


def test_positions_that_no_tile_begins_at_are_refused(rng):
    q, k, v = inputs(rng, 1, 40)
    cache, _ = tessera.nsa_pool(k, v, length=8)
    with pytest.raises(ValueError, match=r"q_offset: got \[0\] = 12; want 0 or more, a multiple of nsa.tile, 16"):
        tessera.nsa_select(
            q[:, :8], cache, length=8, top=9, tile=16, causal=True, seqlen_k=40, q_offset=np.array([12], np.int64)
        )
