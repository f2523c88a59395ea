# SPDX-License-Identifier: Apache-2.0
"""What the compat functions return, refuse and promise beyond numbers: on numpy arrays, without torch."""

from __future__ import annotations

import numpy as np
import pytest
import tessera
from tessera.compat import flash_attn_2, flash_attn_3, flash_attn_4

random = np.random.default_rng(4)


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def textbook(q, k, v, causal=False, window=(None, None), keys=None):
    """fp64 (b, sq, h, d) of dense arrays; `keys` (b,) used."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b in range(q.shape[0]):
        used = k.shape[1] if keys is None else int(keys[b])
        s = np.einsum("qhd,khd->hqk", q[b], k[b, :used]) / q.shape[-1] ** 0.5
        distance = np.arange(used) - (np.arange(q.shape[1])[:, None] + used - q.shape[1])
        left, right = window[0], 0 if causal else window[1]
        seen = np.ones(distance.shape, bool)
        if left is not None:
            seen &= distance >= -left
        if right is not None:
            seen &= distance <= right
        e = np.where(seen, np.exp(s - s.max(initial=0.0)), 0.0)
        total = e.sum(-1, keepdims=True)
        out[b] = np.einsum("hqk,khd->qhd", e / np.where(total == 0, 1, total), v[b, :used])
    return out


def close(a, b) -> None:
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


class TestReturnShapes:
    def test_2_returns_the_tensor_alone(self) -> None:
        q, k, v = arrays((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
        out = flash_attn_2.flash_attn_func(q, k, v)
        assert isinstance(out, np.ndarray) and out.shape == q.shape and out.dtype == q.dtype
        close(out, textbook(q, k, v))

    def test_2_returns_three_on_request(self) -> None:
        q, k, v = arrays((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
        _, lse, probabilities = flash_attn_2.flash_attn_func(q, k, v, return_attn_probs=True)
        assert lse.shape == (2, 4, 5) and lse.dtype == np.float32
        assert probabilities.shape == (0,)
        _, lse, probabilities = flash_attn_2.flash_attn_func(q, k, v, 0.3, return_attn_probs=True)
        assert probabilities.shape == (2, 4, 5, 9) and probabilities.dtype == q.dtype
        np.testing.assert_allclose(np.abs(probabilities).sum(-1), 1, rtol=1e-5)

    def test_signs_of_the_probabilities_are_the_dropout(self) -> None:
        q, k, v = arrays((2, 37, 4, 16), (2, 50, 2, 16), (2, 50, 2, 16))
        for options in ({}, {"causal": True, "softcap": 2.0}, {"window_size": (9, 4)}):
            out, _, signed = flash_attn_2.flash_attn_func(q, k, v, 0.25, **options, return_attn_probs=True)
            kept = np.where(np.signbit(signed), 0, signed) * (65536 / round(0.75 * 65536))
            close(out, np.einsum("bhqk,bkhd->bqhd", kept, np.repeat(v, 2, 2)))

    def test_signs_of_packed_sequences(self) -> None:
        q, k, v = arrays((12, 4, 16), (17, 2, 16), (17, 2, 16))
        starts_q, starts_k = np.array([0, 5, 12], np.int32), np.array([0, 9, 17], np.int32)
        slopes = random.random((2, 4)).astype(np.float32)
        out, lse, signed = flash_attn_2.flash_attn_varlen_func(
            q, k, v, starts_q, starts_k, 7, 9, 0.25, causal=True, alibi_slopes=slopes, return_attn_probs=True
        )
        assert signed.shape == (2, 4, 7, 9) and lse.shape == (4, 12)
        kept = np.where(np.signbit(signed), 0, signed) * (65536 / round(0.75 * 65536))
        for b in range(2):
            rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
            count = (rows.stop - rows.start, keys.stop - keys.start)
            p = kept[b, :, : count[0], : count[1]]
            close(out[rows], np.einsum("hqk,khd->qhd", p, np.repeat(v[keys], 2, 1)))
            assert not kept[b, :, count[0] :].any() and not kept[b, :, :, count[1] :].any()

    def test_3_returns_a_pair_on_request(self) -> None:
        q, k, v = arrays((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 24))
        out = flash_attn_3.flash_attn_func(q, k, v)
        assert out.shape == (2, 5, 4, 24)
        again, lse = flash_attn_3.flash_attn_func(q, k, v, return_attn_probs=True)
        assert np.array_equal(again, out) and lse.shape == (2, 4, 5)

    def test_3_cache_returns_four_on_request(self) -> None:
        q, k, v = arrays((2, 1, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
        out, lse, out_parts, lse_parts = flash_attn_3.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=7, return_softmax_lse=True
        )
        assert lse.shape == (2, 4, 1) and out_parts.shape == lse_parts.shape == (0,)
        close(out, textbook(q, k, v, keys=[7, 7]))

    def test_4_always_returns_a_pair(self) -> None:
        q, k, v = arrays((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 24))
        out, nothing = flash_attn_4.flash_attn_func(q, k, v)
        assert nothing is None and out.shape == (2, 5, 4, 24)
        again, lse = flash_attn_4.flash_attn_func(q, k, v, return_lse=True)
        assert np.array_equal(again, out) and lse.shape == (2, 4, 5)


class TestConventions:
    def test_lse_of_an_empty_row(self) -> None:
        """−inf in every version; the row itself is zero."""
        q, k, v = arrays((1, 5, 2, 16), (1, 2, 2, 16), (1, 2, 2, 16))
        results = (
            flash_attn_2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[:2],
            flash_attn_3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True),
            flash_attn_4.flash_attn_func(q, k, v, causal=True, return_lse=True),
        )
        for out, lse in results:
            assert np.isneginf(lse[0, :, :3]).all() and np.isfinite(lse[0, :, 3:]).all()
            assert not out[0, :3].any()

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("window", [(-1, -1), (3, -1), (-1, 2), (3, 2), (0, 0), (100, 100)])
    def test_windows_of_2_and_3(self, window: tuple[int, int], causal: bool) -> None:
        q, k, v = arrays((1, 7, 2, 16), (1, 11, 2, 16), (1, 11, 2, 16))
        expected = textbook(q, k, v, causal, tuple(None if end < 0 else end for end in window))
        for version in (flash_attn_2, flash_attn_3):
            close(version.flash_attn_func(q, k, v, causal=causal, window_size=window), expected)

    @pytest.mark.parametrize(
        ("window", "causal", "seen"),
        [
            ((None, None), False, (None, None)),
            ((None, None), True, (None, 0)),
            ((3, None), False, (3, None)),
            ((None, 2), False, (None, 2)),
            ((None, 0), False, (None, 0)),
            ((3, 2), True, (3, 0)),
            ((-1, 4), False, (-1, 4)),
            ((4, -1), False, (4, -1)),
            ((-1, -1), False, (None, None)),
            ((-1, -1), True, (None, 0)),
        ],
    )
    def test_windows_of_4(self, window, causal: bool, seen) -> None:
        q, k, v = arrays((1, 7, 2, 16), (1, 11, 2, 16), (1, 11, 2, 16))
        close(
            flash_attn_4.flash_attn_func(q, k, v, causal=causal, window_size=window)[0], textbook(q, k, v, window=seen)
        )

    def test_lse_of_4_includes_the_sink(self) -> None:
        q, k, v, sink = arrays((1, 5, 2, 16), (1, 2, 2, 16), (1, 2, 2, 16), (2,))
        out, lse = flash_attn_4.flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True)
        plain, without = flash_attn_4.flash_attn_func(q, k, v, causal=True, return_lse=True)
        close(lse, np.logaddexp(without, sink[None, :, None]))
        close(out, plain * np.exp(without - lse).transpose(0, 2, 1)[..., None])
        close(lse[0, :, 0], sink)

    def test_packed_tensors_are_views(self) -> None:
        (qkv,) = arrays((2, 9, 3, 4, 16))
        plain = flash_attn_2.flash_attn_func(*(np.ascontiguousarray(qkv[:, :, i]) for i in range(3)))
        assert np.array_equal(flash_attn_2.flash_attn_qkvpacked_func(qkv), plain)
        assert np.array_equal(flash_attn_2.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:]), plain)
        assert np.array_equal(flash_attn_3.flash_attn_qkvpacked_func(qkv), plain)
        heads = qkv.reshape(2, 9, 12, 16)
        assert np.array_equal(flash_attn_3.flash_attn_qkvpacked_func(heads, num_heads_q=4), plain)

    def test_packed_groups_of_3(self) -> None:
        (qkv,) = arrays((2, 9, 8, 16))
        out = flash_attn_3.flash_attn_qkvpacked_func(qkv, num_heads_q=4)
        close(out, textbook(qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:]))

    def test_odd_head_dims_are_padded_in_2(self) -> None:
        q, k, v = arrays((2, 5, 4, 13), (2, 9, 2, 13), (2, 9, 2, 13))
        out, lse, _ = flash_attn_2.flash_attn_func(q, k, v, return_attn_probs=True)
        assert out.shape == q.shape and lse.shape == (2, 4, 5)
        close(out, textbook(q, k, v))
        close(flash_attn_2.flash_attn_with_kvcache(q, k, v), out)
        with pytest.raises((ValueError, NotImplementedError), match=r"^head_dim of q: "):
            flash_attn_3.flash_attn_func(q, k, v)

    def test_head_dims_of_values_may_differ_in_a_cache_of_3(self) -> None:
        q, k, v = arrays((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 24))
        close(flash_attn_3.flash_attn_with_kvcache(q, k, v), textbook(q, k, v))

    def test_number_of_splits_is_a_wish(self) -> None:
        q, k, v = arrays((1, 3, 2, 16), (1, 300, 2, 16), (1, 300, 2, 16))
        for splits in (0, 1, 4):
            close(flash_attn_3.flash_attn_func(q, k, v, num_splits=splits), textbook(q, k, v))
            close(flash_attn_2.flash_attn_with_kvcache(q, k, v, num_splits=splits), textbook(q, k, v))

    def test_packed_lengths_used(self) -> None:
        q, k, v = arrays((12, 4, 16), (17, 2, 16), (17, 2, 16))
        starts_q, starts_k = np.array([0, 5, 12], np.int32), np.array([0, 9, 17], np.int32)
        used_q, used_k = np.array([4, 7], np.int32), np.array([6, 8], np.int32)
        out, lse = flash_attn_3.flash_attn_varlen_func(
            q, k, v, starts_q, starts_k, 7, 9, used_q, used_k, causal=True, return_attn_probs=True
        )
        close(out[:4], textbook(q[None, :4], k[None, :6], v[None, :6], True)[0])
        close(out[5:], textbook(q[None, 5:], k[None, 9:], v[None, 9:], True)[0])
        assert not out[4].any() and np.isneginf(lse[:, 4]).all()
        four, _ = flash_attn_4.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=starts_q,
            cu_seqlens_k=starts_k,
            max_seqlen_q=7,
            max_seqlen_k=9,
            seqused_q=used_q,
            seqused_k=used_k,
            causal=True,
        )
        assert np.array_equal(four, out)


class TestPagesOf4:
    def test_table_and_lengths(self) -> None:
        q, pages_k, pages_v = arrays((3, 4, 4, 16), (20, 8, 2, 16), (20, 8, 2, 16))
        table = random.permutation(20)[:9].reshape(3, 3).astype(np.int32)
        k, v = (pool[table].reshape(3, 24, 2, 16) for pool in (pages_k, pages_v))
        used = np.array([24, 5, 17], np.int32)
        out, lse = flash_attn_4.flash_attn_varlen_func(
            q, pages_k, pages_v, seqused_k=used, page_table=table, causal=True, return_lse=True
        )
        close(out, textbook(q, k, v, True, keys=used))
        assert lse.shape == (3, 4, 4)
        whole, _ = flash_attn_4.flash_attn_varlen_func(q, pages_k, pages_v, page_table=table)
        close(whole, textbook(q, k, v))
        dense, _ = flash_attn_4.flash_attn_func(
            q, pages_k, pages_v, page_table=table, seqused_k=used, max_seqlen_k=24, causal=True
        )
        assert np.array_equal(dense, out)

    def test_lengths_as_boundaries(self) -> None:
        q, pages_k, pages_v = arrays((7, 4, 16), (20, 8, 2, 16), (20, 8, 2, 16))
        table = random.permutation(20)[:9].reshape(3, 3).astype(np.int32)
        starts_q, starts_k = np.array([0, 2, 3, 7], np.int32), np.array([0, 24, 29, 46], np.int32)
        places = {"cu_seqlens_q": starts_q, "max_seqlen_q": 4, "page_table": table, "causal": True}
        call = flash_attn_4.flash_attn_varlen_func
        out, _ = call(q, pages_k, pages_v, cu_seqlens_k=starts_k, max_seqlen_k=24, **places)
        used = np.diff(starts_k)
        assert np.array_equal(out, call(q, pages_k, pages_v, seqused_k=used, **places)[0])
        for b, rows in enumerate((slice(0, 2), slice(2, 3), slice(3, 7))):
            k, v = (pool[table[b]].reshape(1, 24, 2, 16)[:, : used[b]] for pool in (pages_k, pages_v))
            close(out[rows], textbook(q[None, rows], k, v, True)[0])


class TestSm120Calls:
    """What builds of flash-attn 4 for SM120 take beside upstream: their examples, on small arrays."""

    def test_dropout(self) -> None:
        q, k, v = arrays((2, 40, 4, 16), (2, 50, 2, 16), (2, 50, 2, 16))
        out, _ = flash_attn_4.flash_attn_func(q, k, v, causal=True, dropout_p=0.3, dropout_seed=42)
        assert np.array_equal(out, tessera.attention(q, k, v, causal=True, dropout=0.3, seed=42))
        other, _ = flash_attn_4.flash_attn_func(q, k, v, causal=True, dropout_p=0.3, dropout_seed=43)
        assert not np.array_equal(out, other)
        drawn = [flash_attn_4.flash_attn_func(q, k, v, dropout_p=0.3)[0] for _ in range(2)]
        assert not np.array_equal(*drawn), "a seed of its own for each call"
        starts_q, starts_k = np.array([0, 40, 80], np.int32), np.array([0, 50, 100], np.int32)
        rows, keys, values = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        packed, _ = flash_attn_4.flash_attn_varlen_func(
            rows,
            keys,
            values,
            cu_seqlens_q=starts_q,
            cu_seqlens_k=starts_k,
            causal=True,
            dropout_p=0.3,
            dropout_seed=42,
        )
        close(packed, out.reshape(packed.shape))

    def test_splits(self) -> None:
        q, k, v = arrays((2, 1, 4, 16), (2, 300, 2, 16), (2, 300, 2, 16))
        out, _ = flash_attn_4.flash_attn_func(q, k, v, causal=True, num_splits=4)
        close(out, textbook(q, k, v, True))

    def test_lengths_without_pages(self) -> None:
        q, k, v = arrays((2, 3, 4, 16), (2, 30, 2, 16), (2, 30, 2, 16))
        used = np.array([30, 11], np.int32)
        out, _ = flash_attn_4.flash_attn_func(q, k, v, causal=True, seqused_k=used)
        close(out, textbook(q, k, v, True, keys=used))

    def test_parts_of_a_fixed_length_are_refused(self) -> None:
        with pytest.raises(NotImplementedError, match=r"^seqlen_k_per_split: got 128; want "):
            flash_attn_4.flash_attn_varlen_func(QUERIES, KEYS, VALUES, seqlen_k_per_split=128)

    @pytest.mark.parametrize("error", [AssertionError, ValueError])
    @pytest.mark.parametrize("dim", [4, 148, 520])
    def test_head_dims(self, dim: int, error: type[Exception]) -> None:
        q, k, v = arrays((1, 5, 4, dim), (1, 5, 2, dim), (1, 5, 2, dim))
        want = rf"^head_dim: got {dim}: \(head_dim, head_dim_v\)=\({dim}, {dim}\) is not supported on SM.*; want "
        with pytest.raises(error, match=want):
            flash_attn_4.flash_attn_func(q, k, v)

    def test_scheduler_metadata(self) -> None:
        q, k, v = arrays((9, 4, 16), (9, 2, 16), (9, 2, 16))
        starts = np.array([0, 4, 9], np.int32)
        places = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 5, "max_seqlen_k": 5}
        plain, _ = flash_attn_4.flash_attn_varlen_func(q, k, v, **places)
        sizes = {"nheads": 4, "nheads_kv": 2, "headdim": 16}
        for splits, causal in ((1, False), (1, True), (3, False)):
            metadata = flash_attn_4.get_scheduler_metadata(num_splits=splits, causal=causal, **places, **sizes)
            assert (metadata.tile_count_semaphore is None) == (metadata.num_m_blocks_ptr is None)
            assert (metadata.cu_total_m_blocks is None) == (causal or splits > 1)
            out, _ = flash_attn_4.flash_attn_varlen_func(q, k, v, **places, scheduler_metadata=metadata)
            assert np.array_equal(out, plain)
        with pytest.raises(ValueError, match=r"^cu_seqlens_q: got None; want "):
            flash_attn_4.get_scheduler_metadata(5, 5, 4, 2, 16, 1)


class TestBlockSparsity:
    def lists(self):
        """Two query blocks of 64, three key blocks of 32; block 1 of row 0 is full."""
        return flash_attn_4.BlockSparseTensorsTorch(
            mask_block_cnt=np.array([[[1, 2]]], np.int32),
            mask_block_idx=np.array([[[[0, 0, 0], [0, 2, 0]]]], np.int32),
            full_block_cnt=np.array([[[1, 0]]], np.int32),
            full_block_idx=np.array([[[[1, 0, 0], [0, 0, 0]]]], np.int32),
            block_size=(64, 32),
        )

    def test_only_listed_blocks_are_seen(self) -> None:
        q, k, v = arrays((2, 100, 4, 16), (2, 90, 2, 16), (2, 90, 2, 16))
        out, _ = flash_attn_4.flash_attn_func(q, k, v, block_sparse_tensors=self.lists())
        close(out[:, :64], textbook(q[:, :64], k[:, :64], v[:, :64]))
        kept = np.r_[0:32, 64:90]
        close(out[:, 64:], textbook(q[:, 64:], k[:, kept], v[:, kept]))

    def test_blocks_are_128_unless_said(self) -> None:
        q, k, v = arrays((1, 200, 2, 16), (1, 200, 2, 16), (1, 200, 2, 16))
        lists = flash_attn_4.BlockSparseTensorsTorch(np.array([[[1, 1]]], np.int32), np.array([[[[0], [1]]]], np.int32))
        out, _ = flash_attn_4.flash_attn_func(q, k, v, block_sparse_tensors=lists)
        close(out[:, :128], textbook(q[:, :128], k[:, :128], v[:, :128]))
        close(out[:, 128:], textbook(q[:, 128:], k[:, 128:], v[:, 128:]))

    def test_blocks_of_packed_sequences_are_refused(self) -> None:
        q, k, v = arrays((1, 100, 4, 16), (1, 90, 2, 16), (1, 90, 2, 16))
        lists = self.lists()._replace(cu_total_m_blocks=np.zeros(2, np.int32))
        with pytest.raises(NotImplementedError, match="block_sparse_tensors"):
            flash_attn_4.flash_attn_func(q, k, v, block_sparse_tensors=lists)

    def test_backward_blocks_of_another_size_are_refused(self) -> None:
        q, k, v = arrays((1, 100, 4, 16), (1, 90, 2, 16), (1, 90, 2, 16))
        other = self.lists()._replace(block_size=(32, 32))
        with pytest.raises(ValueError, match="block_sparse_tensors_bwd"):
            flash_attn_4.flash_attn_func(q, k, v, block_sparse_tensors=self.lists(), block_sparse_tensors_bwd=other)


QUERIES, KEYS, VALUES = arrays((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
REFUSED_4 = ["qv", "gather_kv_indices"]


class TestRefusals:
    def test_3(self) -> None:
        for function in (flash_attn_3.flash_attn_func, flash_attn_3.flash_attn_with_kvcache):
            with pytest.raises(NotImplementedError, match=r"^qv: got .*; want "):
                function(QUERIES, KEYS, VALUES, qv=QUERIES)

    @pytest.mark.parametrize("chunk", [-1, 2.5])
    def test_chunks(self, chunk: float) -> None:
        for function in (flash_attn_3.flash_attn_func, flash_attn_3.flash_attn_with_kvcache):
            with pytest.raises(ValueError, match=r"^attention_chunk: got .*; want "):
                function(QUERIES, KEYS, VALUES, attention_chunk=chunk)

    @pytest.mark.parametrize("name", REFUSED_4)
    def test_4(self, name: str) -> None:
        for function in (flash_attn_4.flash_attn_func, flash_attn_4.flash_attn_varlen_func):
            with pytest.raises(NotImplementedError, match=rf"^{name}: got .*; want "):
                function(QUERIES, KEYS, VALUES, **{name: [lambda score: score]})

    def test_rows_spared_by_combine_of_4(self) -> None:
        parts, lse = arrays((2, 1, 3, 2, 16), (2, 1, 3, 2))
        with pytest.raises(NotImplementedError, match="seqused"):
            flash_attn_4.flash_attn_combine(parts, lse, seqused=np.array([2], np.int32))

    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({"k": KEYS}, "v"),
            ({"v": KEYS}, "k"),
            ({"k": KEYS, "v": VALUES}, "cache_seqlens"),
            ({"rotary_cos": KEYS, "rotary_sin": KEYS, "cache_seqlens": 1}, "rotary_cos"),
            ({"k": KEYS, "v": VALUES, "cache_seqlens": 0, "rotary_cos": KEYS}, "rotary_sin"),
        ],
    )
    def test_cache_arguments_that_need_each_other(self, options, name: str) -> None:
        for version in (flash_attn_2, flash_attn_3):
            with pytest.raises(ValueError, match=rf"^{name}: got "):
                version.flash_attn_with_kvcache(QUERIES, KEYS.copy(), VALUES.copy(), **options)

    def test_cache_too_small_for_the_new_keys(self) -> None:
        for options in ({}, {"block_table": np.array([[0], [1]], np.int32)}):
            k, v = KEYS.copy(), VALUES.copy()
            with pytest.raises(ValueError, match=r"^cache_seqlens: |^block_table: "):
                flash_attn_2.flash_attn_with_kvcache(
                    QUERIES, k, v, KEYS[:, :3], VALUES[:, :3], cache_seqlens=7, **options
                )
            assert np.array_equal(k, KEYS) and np.array_equal(v, VALUES)

    def test_heads_that_do_not_divide(self) -> None:
        with pytest.raises(ValueError, match=r"^heads of k: "):
            flash_attn_2.flash_attn_func(QUERIES[:, :, :3], KEYS, VALUES)

    def test_padding_of_a_cache_whose_rows_lie_apart(self) -> None:
        k, v = (np.repeat(x, 2, 0)[::2] for x in (KEYS, VALUES))
        with pytest.raises(ValueError, match="k_cache"):
            flash_attn_2.flash_attn_with_kvcache(
                QUERIES, k, v, cache_seqlens=9, cache_leftpad=np.array([1, 2], np.int32)
            )

    def test_packed_heads_of_3(self) -> None:
        for heads in (None, 0, 8, 3):
            with pytest.raises(ValueError, match="num_heads_q"):
                flash_attn_3.flash_attn_qkvpacked_func(np.zeros((1, 4, 8, 16), np.float32), num_heads_q=heads)


class TestHints:
    def test_they_change_nothing(self) -> None:
        plain = flash_attn_3.flash_attn_func(QUERIES, KEYS, VALUES)
        for options in ({"pack_gqa": True}, {"pack_gqa": False}, {"sm_margin": 8}, {"deterministic": True}):
            assert np.array_equal(flash_attn_3.flash_attn_func(QUERIES, KEYS, VALUES, **options), plain)
        metadata = flash_attn_3.get_scheduler_metadata(2, 5, 9, 4, 2, 16, np.array([9, 9], np.int32))
        assert metadata.shape == (0,) and metadata.dtype == np.int32
        out = flash_attn_3.flash_attn_with_kvcache(QUERIES, KEYS, VALUES, scheduler_metadata=metadata)
        assert np.array_equal(out, plain)


class TestCombine:
    @pytest.mark.parametrize("version", [flash_attn_3, flash_attn_4])
    def test_halves_of_the_keys(self, version) -> None:
        halves = [
            flash_attn_3.flash_attn_func(QUERIES, KEYS[:, part], VALUES[:, part], return_attn_probs=True)
            for part in (slice(0, 4), slice(4, 9))
        ]
        parts = np.stack([out for out, _ in halves])
        lse_parts = np.stack([lse for _, lse in halves]).swapaxes(-1, -2)
        whole, lse = flash_attn_3.flash_attn_func(QUERIES, KEYS, VALUES, return_attn_probs=True)
        out, merged = version.flash_attn_combine(parts, lse_parts)
        close(out, whole)
        close(merged, lse.swapaxes(-1, -2))
        copied, _ = version.flash_attn_combine(parts, np.ascontiguousarray(lse_parts))
        assert np.array_equal(copied, out)
        given = np.empty_like(out)
        same, _ = version.flash_attn_combine(parts, lse_parts, given)
        assert same is given and np.array_equal(given, out)
        packed, packed_lse = version.flash_attn_combine(parts.reshape(2, 10, 4, 16), lse_parts.reshape(2, 10, 4))
        assert np.array_equal(packed.reshape(out.shape), out) and packed_lse.shape == (10, 4)

    def test_4_without_lse(self) -> None:
        parts, lse = arrays((2, 1, 3, 2, 16), (2, 1, 3, 2))
        out, nothing = flash_attn_4.flash_attn_combine(parts, lse, return_lse=False)
        assert nothing is None
        assert np.array_equal(out, flash_attn_4.flash_attn_combine(parts, lse)[0])

    def test_shapes_that_do_not_fit(self) -> None:
        parts, lse = arrays((2, 1, 3, 2, 16), (2, 1, 2, 3))
        with pytest.raises(ValueError, match="lse_partial"):
            flash_attn_3.flash_attn_combine(parts, lse)
        with pytest.raises(ValueError, match="out_partial"):
            flash_attn_3.flash_attn_combine(parts[0, 0], lse)


def test_top_level_call_is_that_of_2() -> None:
    assert np.array_equal(
        tessera.flash_attn_func(QUERIES, KEYS, VALUES), flash_attn_2.flash_attn_func(QUERIES, KEYS, VALUES)
    )


def test_rotary_moves_with_the_queries_under_any_window() -> None:
    def step(window):
        q, k_cache, v_cache, k, v = (x.copy() for x in inputs)
        return flash_attn_2.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, *tables, cache_seqlens=6, window_size=window, causal=False
        )

    inputs = arrays((1, 4, 2, 16), (1, 12, 2, 16), (1, 12, 2, 16), (1, 4, 2, 16), (1, 4, 2, 16))
    angle = np.arange(12)[:, None] * 0.1 * (1 + np.arange(8))
    tables = (np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
    # Windows wider than the cache hide nothing; without one all queries are turned as the first is.
    right, left, both = step((-1, 100)), step((100, -1)), step((100, 100))
    assert np.array_equal(right, both) and np.array_equal(left, both)
    still = step((-1, -1))
    close(still[:, 0], both[:, 0])
    assert np.abs(still[:, 1:] - both[:, 1:]).max() > 0.01


@pytest.mark.parametrize("head_dim", [4, 12, 30, 59])
def test_head_dims_between_multiples_of_8(head_dim: int) -> None:
    q, k, v = arrays((1, 5, 4, head_dim), (1, 9, 2, head_dim), (1, 9, 2, head_dim))
    out = flash_attn_2.flash_attn_func(q, k, v, causal=True)
    assert out.shape == q.shape
    close(out, textbook(q, k, v, causal=True))


def test_negative_softcap_is_none() -> None:
    starts = np.array([0, 5, 10], np.int32)
    q, k = QUERIES.reshape(-1, *QUERIES.shape[2:])[:10], KEYS.reshape(-1, *KEYS.shape[2:])[:10]
    for more in ({}, {"return_attn_probs": True}):
        for function, inputs in (
            (flash_attn_2.flash_attn_func, (QUERIES, KEYS, VALUES)),
            (flash_attn_2.flash_attn_varlen_func, (q, k, k, starts, starts, 5, 5)),
        ):
            plain, negative = function(*inputs, **more), function(*inputs, softcap=-2.0, **more)
            assert np.array_equal(plain[0] if more else plain, negative[0] if more else negative)


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_rotary_positions_of_a_gpu_are_those_of_the_cpu(packed, moving):
    """There no length is read; both ways are computed here on numpy arrays."""
    from tessera.compat import rotary

    base = np.array([7, 0, 30], np.int32)
    starts = np.array([0, 4, 4, 9], np.int32) if packed else None
    x = np.zeros((9, 2, 8) if packed else (3, 5, 2, 8), np.float32)
    seen = rotary._positions(x, base, moving, starts)
    unseen = rotary._positions_unseen(x, base, moving, starts, 40)
    assert np.array_equal(seen, unseen) and unseen.dtype == np.int64
    assert rotary._positions_unseen(x, base, moving, starts, 31).max() == 30  # beyond the tables the last row stands


def test_rotary_positions_behind_the_last_sequence():
    from tessera.compat import rotary

    starts = np.array([0, 2, 5], np.int32)
    x = np.zeros((8, 1, 8), np.float32)
    positions = rotary._positions_unseen(x, np.array([3, 10], np.int32), True, starts, 12)
    assert positions[:5].tolist() == [3, 4, 10, 11, 11] and (positions[5:] < 12).all()
