# SPDX-License-Identifier: Apache-2.0
"""`merge_states`, `combine`, `kv_append`, `dropout_keep` on numpy arrays."""

from __future__ import annotations

import numpy as np
import pytest
import tessera


@pytest.fixture
def rng():
    return np.random.default_rng(21)


def normal(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def close(got, want, tolerance=2e-6):
    np.testing.assert_allclose(
        np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=tolerance, atol=tolerance
    )


@pytest.fixture
def parts(rng):
    """(q, k, v) and what attention says of the keys 0–8, 8–15 and 15–20, with LSE."""
    q, k, v = normal(rng, 2, 6, 4, 16), normal(rng, 2, 20, 2, 16), normal(rng, 2, 20, 2, 16)
    pieces = [slice(0, 8), slice(8, 15), slice(15, 20)]
    return (q, k, v), [tessera.attention(q, k[:, s], v[:, s], return_lse=True) for s in pieces]


class TestMerging:
    def test_two_states(self, parts):
        (q, k, v), results = parts
        out, lse = tessera.merge_states(*results[0], *results[1])
        want = tessera.attention(q, k[:, :15], v[:, :15], return_lse=True)
        close(out, want[0])
        close(lse, want[1])

    def test_states_lie_where_they_are(self, parts):
        """Two results are one strided tensor, whatever their order in memory; a stack of copies gives the same bits."""
        _, results = parts
        (a, lse_a), (b, lse_b) = results[:2]
        stacked = tessera.combine(np.stack([a, b]), np.stack([lse_a, lse_b]))
        for got, want in zip(tessera.merge_states(a, lse_a, b, lse_b), stacked, strict=True):
            np.testing.assert_array_equal(got, want)
        turned = tessera.combine(np.stack([b, a]), np.stack([lse_b, lse_a]))
        for got, want in zip(tessera.merge_states(b, lse_b, a, lse_a), turned, strict=True):
            np.testing.assert_array_equal(got, want)

    def test_other_strides_are_copied(self, parts):
        _, results = parts
        (a, lse_a), (b, lse_b) = results[:2]
        turned = np.ascontiguousarray(b.swapaxes(1, 2)).swapaxes(1, 2)
        assert turned.strides != b.strides
        np.testing.assert_array_equal(
            tessera.merge_states(a, lse_a, turned, lse_b)[0], tessera.merge_states(a, lse_a, b, lse_b)[0]
        )

    def test_three_parts_and_sinks(self, parts, rng):
        (q, k, v), results = parts
        sinks = normal(rng, 4)
        outs, lses = zip(*results, strict=True)
        out, lse = tessera.combine(outs, lses, sinks=sinks)
        want = tessera.attention(q, k, v, sinks=sinks, return_lse=True)
        close(out, want[0])
        close(lse, want[1])
        alone = tessera.combine(outs, lses, sinks=sinks, return_lse=False)
        np.testing.assert_array_equal(alone, out)

    def test_packed_rows(self, parts):
        _, results = parts
        outs = [out.reshape(-1, 4, 16) for out, _ in results]
        lses = [np.ascontiguousarray(lse.swapaxes(0, 1).reshape(4, -1)) for _, lse in results]
        out, lse = tessera.combine(outs, lses)
        want, its = tessera.combine(*zip(*results, strict=True))
        np.testing.assert_array_equal(out.reshape(want.shape), want)
        np.testing.assert_array_equal(lse, its.swapaxes(0, 1).reshape(4, -1))

    def test_rows_that_no_part_sees(self):
        out, lse = np.zeros((1, 2, 1, 8), np.float32), np.full((1, 1, 2), -np.inf, np.float32)
        merged, its = tessera.merge_states(out, lse, out.copy(), lse.copy())
        assert not merged.any() and np.isneginf(its).all()

    def test_dtype_of_the_result(self, parts):
        _, results = parts
        outs, lses = zip(*results, strict=True)
        assert tessera.combine(outs, lses, out_dtype="float16")[0].dtype == np.float16
        memory = np.empty(outs[0].shape, np.float16)
        assert tessera.combine(outs, lses, out=memory)[0] is memory

    def test_result_over_the_first_part(self, parts):
        _, results = parts
        want = tessera.combine(*zip(*results, strict=True))[0]
        whole, lses = np.stack([out for out, _ in results]), np.stack([lse for _, lse in results])
        merged, _ = tessera.combine(whole, lses, out=whole[0])
        np.testing.assert_array_equal(merged, want)

    def test_refusals(self, parts):
        _, results = parts
        (a, lse_a), (b, lse_b) = results[:2]
        with pytest.raises(ValueError, match=r"o_parts\[1\]: got fp16"):
            tessera.merge_states(a, lse_a, b.astype(np.float16), lse_b)
        with pytest.raises(ValueError, match="out_parts: got no parts"):
            tessera.combine((), ())
        with pytest.raises(ValueError, match="out_parts: got 2 dimensions"):
            tessera.combine(np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32))
        with pytest.raises(ValueError, match="o: got memory shared with o_parts"):
            whole, lses = np.stack([a, b]), np.stack([lse_a, lse_b])
            tessera.combine(whole, lses, out=whole[1])


class TestAppending:
    def test_dense(self, rng):
        k, v = np.zeros((2, 10, 2, 8), np.float32), np.zeros((2, 10, 2, 12), np.float32)
        k_new, v_new = normal(rng, 2, 3, 2, 8), normal(rng, 2, 3, 2, 12)
        assert tessera.kv_append(k, v, k_new, v_new, seqused_k=np.array([0, 7], np.int32)) is None
        np.testing.assert_array_equal(k[0, :3], k_new[0])
        np.testing.assert_array_equal(v[1, 7:], v_new[1])
        assert not k[0, 3:].any() and not v[1, :7].any()

    def test_pages(self, rng):
        k_new, v_new = normal(rng, 5, 2, 8), normal(rng, 5, 2, 8)
        cu, used = np.array([0, 2, 5], np.int32), np.array([3, 0], np.int32)
        table = np.array([[4, 1], [0, 3]], np.int32)
        by_table, by_csr = (np.zeros((5, 4, 2, 8), np.float32) for _ in range(2))
        tessera.kv_append(by_table, by_table.copy(), k_new, v_new, seqused_k=used, page_table=table, cu_seqlens_q=cu)
        np.testing.assert_array_equal(by_table[4, 3], k_new[0])
        np.testing.assert_array_equal(by_table[1, 0], k_new[1])
        np.testing.assert_array_equal(by_table[0, :3], k_new[2:])
        assert np.count_nonzero(by_table) == k_new.size
        csr = {"page_indptr": np.array([0, 2, 3], np.int32), "page_indices": np.array([4, 1, 0], np.int32)}
        tessera.kv_append(by_csr, by_csr.copy(), k_new, v_new, seqused_k=used, cu_seqlens_q=cu, **csr)
        np.testing.assert_array_equal(by_csr, by_table)

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_rotary(self, rng, interleaved):
        k, v = np.zeros((1, 9, 2, 8), np.float32), np.zeros((1, 9, 2, 8), np.float32)
        k_new, v_new, q = normal(rng, 1, 3, 2, 8), normal(rng, 1, 3, 2, 8), normal(rng, 1, 3, 4, 8)
        angle = np.arange(9)[:, None] / 10.0 ** np.arange(2)  # rotary_dim 4
        turned = tessera.kv_append(
            k,
            v,
            k_new,
            v_new,
            seqused_k=np.array([5], np.int32),
            rotary_cos=np.cos(angle).astype(np.float32),
            rotary_sin=np.sin(angle).astype(np.float32),
            rotary_interleaved=interleaved,
            q=q,
        )

        def rotated(x):
            first, second = ([0, 2], [1, 3]) if interleaved else ([0, 1], [2, 3])
            out = x.astype(np.float64)
            cos, sin = np.cos(angle[5:8])[:, None], np.sin(angle[5:8])[:, None]
            out[0][..., first] = x[0][..., first] * cos - x[0][..., second] * sin
            out[0][..., second] = x[0][..., second] * cos + x[0][..., first] * sin
            return out

        close(k[:, 5:8], rotated(k_new))
        close(turned, rotated(q))
        np.testing.assert_array_equal(v[:, 5:8], v_new)

    def test_refusals(self, rng):
        k, v, new = np.zeros((1, 4, 2, 8), np.float32), np.zeros((1, 4, 2, 8), np.float32), normal(rng, 1, 3, 2, 8)
        used = np.array([2], np.int32)
        with pytest.raises(ValueError, match=r"seqused_k: got \[0\] = 2; want room for 3 new tokens in a cache of 4"):
            tessera.kv_append(k, v, new, new, seqused_k=used)
        assert not k.any()
        with pytest.raises(ValueError, match="rotary_sin: got one table of two"):
            tessera.kv_append(k, v, new, new, seqused_k=used, rotary_cos=np.ones((9, 2), np.float32))
        frozen = k.copy()
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match=r"k: got numpy\.ndarray that is read-only; want a writable array"):
            tessera.kv_append(frozen, v, new[:, :1], new[:, :1], seqused_k=used)
        with pytest.raises(TypeError, match=r"v_new: got builtins\.list; want an array"):
            tessera.kv_append(k, v, new, [1.0], seqused_k=used)
        with pytest.raises(ValueError, match="k_new: got 3 dimensions"):
            tessera.kv_append(k, v, new[0], new[0], seqused_k=used)


class TestDropoutKeep:
    def test_bits_by_position(self):
        whole = tessera.dropout_keep((3, 4, 40, 50), 0.25, 7)
        part = tessera.dropout_keep((3, 4, 20, 30), 0.25, 7, q_offset=10 + 20, k_offset=20)
        np.testing.assert_array_equal(part, whole[:, :, 20:, 20:])
        assert abs(whole.mean() - 0.75) < 0.02

    def test_every_part_of_the_seed_matters(self):
        base = tessera.dropout_keep((1, 2, 32, 32), 0.5, 1)
        for change in (
            {"seed": 2},
            {"seed": 1 + (1 << 40)},
            {"seed": 1, "offset": 1},
            {"seed": 1, "offset": 1 << 40},
            {"seed": 1, "batch_offset": 1},
            {"seed": 1, "head_offset": 1},
        ):
            assert (tessera.dropout_keep((1, 2, 32, 32), 0.5, **change) != base).any(), change

    def test_refusals(self):
        with pytest.raises(ValueError, match=r"dropout: got 1\.0+; want 0 to below 1"):
            tessera.dropout_keep((1, 1, 2, 2), 1.0, 0)
        with pytest.raises(ValueError, match="out: got fp32"):
            tessera._core.dropout_keep(np.zeros((1, 2, 2), np.float32), 0.5, 0)
