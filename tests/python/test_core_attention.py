# SPDX-License-Identifier: Apache-2.0
"""`tessera.attention` and its backward on numpy arrays: every argument, against fp64 or another way to say it."""

from __future__ import annotations

import core_textbook as textbook
import numpy as np
import pytest
import tessera

ORACLE = "implementation=cpu.reference"


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@pytest.fixture
def qkv(rng):
    """b 2, sq 13, sk 21, hq 4, hkv 2, d 16, dv 24."""
    return normal(rng, 2, 13, 4, 16), normal(rng, 2, 21, 2, 16), normal(rng, 2, 21, 2, 24)


def normal(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def close(got, want, tolerance=3e-6):
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance)


def same(got, want):
    np.testing.assert_array_equal(got, want)


class TestResults:
    def test_out_alone_or_a_tuple_in_fixed_order(self, qkv):
        q, k, v = qkv
        out = tessera.attention(q, k, v)
        assert isinstance(out, np.ndarray) and out.shape == (2, 13, 4, 24) and out.dtype == np.float32
        asked = tessera.attention(
            q, k, v, return_lse=True, tiles=tessera.Tiles(next="bitmask", mass="mean", block=(4, 8))
        )
        same(asked[0], out)
        assert asked[1].shape == (2, 4, 13)
        assert asked[2].shape == (2, 4, 4, 3)
        assert isinstance(asked[3], tessera.TileList) and asked[3].bits.shape == (2, 4, 4, 1)
        assert asked[3].block == (4, 8)

    def test_out_is_written_and_returned(self, qkv):
        q, k, v = qkv
        memory = np.empty((2, 13, 4, 24), np.float16)
        out = tessera.attention(q, k, v, out=memory)
        assert out is memory
        same(out, tessera.attention(q, k, v, out_dtype="fp16"))
        close(out, textbook.attention(q, k, v).out, 1e-3)

    @pytest.mark.parametrize("dtype", [np.float16, "float16", np.dtype("float16"), "fp16"])
    def test_out_dtype_by_any_name(self, qkv, dtype):
        assert tessera.attention(*qkv, out_dtype=dtype).dtype == np.float16

    def test_strided_views_are_read_in_place(self, rng):
        packed = normal(rng, 2, 9, 3, 2, 16)
        q, k, v = (packed[:, :, i] for i in range(3))
        same(tessera.attention(q, k, v), tessera.attention(*(x.copy() for x in (q, k, v))))
        flipped = packed[::-1, ::-1, 0]  # negative strides, the last dimension contiguous
        same(tessera.attention(flipped, k, v), tessera.attention(flipped.copy(), k, v))

    def test_zero_sizes(self, rng):
        empty = np.zeros((0, 5, 2, 8), np.float32)
        assert tessera.attention(empty, empty, empty).shape == (0, 5, 2, 8)
        out, lse = tessera.attention(
            normal(rng, 1, 3, 2, 8), empty.reshape(1, 0, 2, 8), empty.reshape(1, 0, 2, 8), return_lse=True
        )
        same(out, np.zeros((1, 3, 2, 8)))
        assert np.isneginf(lse).all()


class TestScoresAndMasks:
    @pytest.mark.parametrize(
        ("options", "left", "right"),
        [
            ({"causal": True}, None, 0),
            ({"window": (3, None)}, 3, None),
            ({"window": (3, 2)}, 3, 2),
            ({"window": (None, -1)}, None, -1),
            ({"window": (5, 4), "causal": True}, 5, 0),
            ({"window": (5, -2), "causal": True}, 5, -2),
        ],
    )
    def test_window(self, qkv, options, left, right):
        out, lse = tessera.attention(*qkv, return_lse=True, **options)
        want = textbook.attention(*qkv, visible=textbook.window(13, 21, left, right))
        close(out, want.out)
        close(lse, want.lse)

    def test_scale_softcap_slopes_sinks(self, qkv, rng):
        slopes, sinks = rng.random(4).astype(np.float32), normal(rng, 4)
        out, lse = tessera.attention(
            *qkv, scale=0.3, softcap=1.5, alibi_slopes=slopes, sinks=sinks, causal=True, return_lse=True
        )
        want = textbook.attention(
            *qkv, scale=0.3, softcap=1.5, slopes=slopes, sinks=sinks, visible=textbook.window(13, 21, None, 0)
        )
        close(out, want.out)
        close(lse, want.lse)

    def test_slopes_by_batch(self, qkv, rng):
        slopes = rng.random((2, 4)).astype(np.float32)
        close(tessera.attention(*qkv, alibi_slopes=slopes), textbook.attention(*qkv, slopes=slopes).out)

    def test_compressed_causal(self, qkv):
        q, k, v = qkv
        row, key = np.arange(13)[:, None], np.arange(21)
        want = textbook.attention(q, k, v, visible=key * 2 + 3 <= row + 1)
        close(tessera.attention(q, k, v, compressed_causal=(3, 2)), want.out)

    def test_chunks(self, qkv):
        q, k, v = qkv
        row, key = np.arange(13)[:, None], np.arange(21)
        want = textbook.attention(q, k, v, visible=key // 6 == (row + 21 - 13) // 6)
        close(tessera.attention(q, k, v, attention_chunk=6), want.out)

    def test_offsets(self, qkv):
        q, k, v = qkv
        shift = np.array([4, 30], np.int64)
        keys = np.array([0, 11], np.int64)
        out = tessera.attention(q, k, v, causal=True, offsets=tessera.Offsets(q=shift, k=keys))
        want = np.concatenate(
            [
                textbook.attention(
                    q[i : i + 1],
                    k[i : i + 1],
                    v[i : i + 1],
                    visible=textbook.window(13, 21, None, 0, shift[i] - keys[i]),
                ).out
                for i in range(2)
            ]
        )
        close(out, want)

    @pytest.mark.parametrize("name", ["document", "checkerboard", "prefix"])
    def test_python_mask_is_the_built_in(self, qkv, name):
        masks = {
            "document": lambda b, h, i, j: i // 40 == j // 40,
            "checkerboard": lambda b, h, i, j: (i // 8 + j // 8) % 2 == 0,
            "prefix": lambda b, h, i, j: j < 24 or j <= i,
        }
        same(
            tessera.attention(*qkv, mask=masks[name], wishes=ORACLE), tessera.attention(*qkv, mask=name, wishes=ORACLE)
        )

    def test_python_score_is_the_built_in(self, qkv):
        def score(score, batch, head, query, key):
            return score - 0.02 * abs(query - key)

        same(
            tessera.attention(*qkv, score=score, wishes=ORACLE),
            tessera.attention(*qkv, score="relative", wishes=ORACLE),
        )

    def test_positions_of_functions(self, qkv):
        seen = []
        tessera.attention(
            *(x[:1, :2] for x in qkv),
            mask=lambda *at: seen.append(at) or True,
            offsets=tessera.Offsets(batch=7, head=10),
            wishes=ORACLE,
        )
        assert set(seen) == {(7, 10 + h, i, j) for h in range(4) for i in range(2) for j in range(2)}

    def test_python_functions_are_traced_but_for_the_oracle(self, qkv):
        seen = []

        def score(score, *at):
            seen.append(type(score))
            return score * 2.0

        close(tessera.attention(*qkv, score=score), tessera.attention(*qkv, score=score, wishes=ORACLE))
        assert set(seen) == {tessera.expressions.Symbol, float} and seen.count(tessera.expressions.Symbol) == 2

    def test_a_score_that_is_no_number(self, qkv):
        for answer, got in ((None, "None"), ("1", "'1'")):
            with pytest.raises(TypeError, match=f"score: got {got} from the function; want a number"):
                tessera.attention(*qkv, score=lambda *at, answer=answer: answer, wishes=ORACLE)
        same(
            tessera.attention(*qkv, score=lambda *at: np.int32(3), wishes=ORACLE),
            tessera.attention(*qkv, score=lambda *at: 3.0, wishes=ORACLE),
        )

    def test_an_exception_of_a_function_passes(self, qkv):
        with pytest.raises(ZeroDivisionError):
            tessera.attention(*qkv, mask=lambda *at: 1 // 0, wishes=ORACLE)


class TestDropout:
    def test_bits_are_those_of_dropout_keep(self, qkv):
        keep = tessera.dropout_keep((2, 4, 13, 21), 0.3, 99, offset=1 << 33)
        want = textbook.attention(*qkv, keep=keep, kept_scale=65536 / round(0.7 * 65536))
        close(tessera.attention(*qkv, dropout=0.3, seed=(99, 1 << 33)), want.out, 1e-5)
        assert 0.6 < keep.mean() < 0.8

    def test_seed_as_array(self, qkv):
        want = tessera.attention(*qkv, dropout=0.5, seed=((1 << 63) + 5, 3))
        seed, offset = np.array([(1 << 63) + 5], np.uint64), np.array([3], np.uint64)
        same(tessera.attention(*qkv, dropout=0.5, seed=(seed, offset)), want)

    def test_a_seed_is_drawn_from_random(self, qkv):
        import random

        random.seed(5)
        first = tessera.attention(*qkv, dropout=0.5)
        assert (first != tessera.attention(*qkv, dropout=0.5)).any()
        random.seed(5)
        same(tessera.attention(*qkv, dropout=0.5), first)

    def test_offsets_of_batch_and_head(self, qkv):
        q, k, v = qkv
        whole = tessera.attention(q, k, v, dropout=0.4, seed=1)
        part = tessera.attention(q[1:], k[1:], v[1:], dropout=0.4, seed=1, offsets=tessera.Offsets(batch=1))
        same(part, whole[1:])


class TestLengths:
    def test_varlen(self, rng):
        cu_q, cu_k = np.array([0, 5, 5, 12], np.int32), np.array([0, 7, 11, 20], np.int32)
        q, k, v = normal(rng, 12, 4, 16), normal(rng, 20, 2, 16), normal(rng, 20, 2, 16)
        out, lse = tessera.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, return_lse=True)
        assert out.shape == (12, 4, 16) and lse.shape == (4, 12)
        for i in range(3):
            a, b, c, d = *cu_q[i : i + 2], *cu_k[i : i + 2]
            one, its = tessera.attention(q[None, a:b], k[None, c:d], v[None, c:d], causal=True, return_lse=True)
            same(out[a:b], one[0])
            same(lse[:, a:b], its[0])

    def test_longest_sequences_are_read_where_not_given(self, rng):
        cu = np.array([0, 5, 12], np.int32)
        q = normal(rng, 12, 2, 16)
        given = tessera.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=7, max_seqlen_k=7)
        same(tessera.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu), given)
        assert "sq=7 sk=7" in tessera.plan(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu).problem.replace(
            "sq=7 ", "sq=7 sk=7 "
        )

    def test_seqused(self, qkv):
        q, k, v = qkv
        used_q, used_k = np.array([13, 6], np.int32), np.array([4, 21], np.int32)
        out = tessera.attention(q, k, v, seqused_q=used_q, seqused_k=used_k)
        same(out[0], tessera.attention(q[:1], k[:1, :4], v[:1, :4])[0])
        same(out[1, :6], tessera.attention(q[1:, :6], k[1:], v[1:])[0])
        same(out[1, 6:], np.zeros((7, 4, 24)))

    def test_pages_by_table_and_by_csr(self, qkv, rng):
        q, k, v = qkv
        page, lengths = 4, np.array([21, 10], np.int32)
        table = rng.permutation(14)[:12].astype(np.int32).reshape(2, 6)
        k_pages, v_pages = (np.full((14, page, 2, x.shape[-1]), np.nan, np.float32) for x in (k, v))
        for b in range(2):
            for i in range(21 if b == 0 else 10):
                k_pages[table[b, i // page], i % page] = k[b, i]
                v_pages[table[b, i // page], i % page] = v[b, i]
        want = tessera.attention(q, k, v, seqused_k=lengths, causal=True)
        pages = tessera.KeySource(k_pages, v_pages, page_table=table, seqused=lengths)
        same(tessera.attention(q, pages, causal=True), want)
        csr = {
            "page_indptr": np.array([0, 6, 9], np.int32),
            "page_indices": np.concatenate([table[0], table[1, :3]]),
            "last_page_len": np.array([1, 2], np.int32),
        }
        same(tessera.attention(q, tessera.KeySource(k_pages, v_pages, **csr), causal=True), want)

    def test_two_segments_are_one_sequence(self, qkv):
        q, k, v = qkv
        whole = tessera.attention(q, k, v, causal=True)
        second = tessera.KeySource(k[:, 8:], v[:, 8:])
        parts = tessera.attention(q, k[:, :8], v[:, :8], k2=second, causal=True)
        close(parts, whole, 1e-6)

    def test_second_segment_by_pages(self, qkv, rng):
        q, k, v = qkv
        pages = [x[:, 8:20].reshape(6, 4, 2, -1).copy() for x in (k, v)]
        table, used = np.arange(6, dtype=np.int32).reshape(2, 3), np.array([12, 12], np.int32)
        second = tessera.KeySource(*pages, page_table=table, seqused=used)
        paged = tessera.attention(q, k[:, :8], v[:, :8], k2=second, causal=True)
        second = tessera.KeySource(k[:, 8:20], v[:, 8:20])
        dense = tessera.attention(q, tessera.KeySource(k[:, :8], v[:, :8]), k2=second, causal=True)
        same(paged, dense)


class TestTiles:
    def test_mass_sums_to_one_and_makes_the_next_list(self, qkv):
        _, lse, mass, tiles = tessera.attention(
            *qkv, tiles=tessera.Tiles(mass="mean", next="indices", threshold=0.2, block=(4, 6)), return_lse=True
        )
        np.testing.assert_allclose(mass.sum(-1), 1.0, rtol=1e-5)
        same(tiles.to_mask(key_blocks=4), mass > np.float32(0.2))
        listed = tessera.attention(*qkv, tiles=tiles)
        dense_mask = tiles.to_mask(key_blocks=4).repeat(4, 2).repeat(6, 3)[:, :, :13, :21]
        close(listed, textbook.attention(*qkv, visible=dense_mask).out)
        asked = tessera.Tiles(mass="mean", prior_lse=lse + np.float32(np.log(2)), block=(4, 6))
        prior = tessera.attention(*qkv, tiles=asked)[1]
        np.testing.assert_allclose(prior, mass / 2, rtol=1e-5)

    def test_rms(self, qkv):
        mean, rms = (
            tessera.attention(*qkv, tiles=tessera.Tiles(mass=kind, block=(4, 6)))[1] for kind in ("mean", "rms")
        )
        assert (rms >= mean * (1 - 1e-6)).all() and (rms > mean * 1.01).any()

    @pytest.mark.parametrize("heads", [1, 2, 4])
    @pytest.mark.parametrize("batch", [1, 2])
    def test_heads_and_batch_of_a_list(self, qkv, rng, heads, batch):
        mask = rng.random((batch, heads, 4, 4)) < 0.6
        tiles = tessera.TileList.from_mask(mask, block=(4, 6))
        full = np.broadcast_to(mask.repeat(4 // heads, 1), (2, 4, 4, 4)).repeat(4, 2).repeat(6, 3)[:, :, :13, :21]
        close(tessera.attention(*qkv, tiles=tiles), textbook.attention(*qkv, visible=full).out)

    def test_full_tiles_waive_the_mask(self, qkv):
        every = np.ones((1, 1, 4, 4), bool)
        waived = tessera.TileList.from_mask(every, full=every, block=(4, 6))
        same(tessera.attention(*qkv, tiles=waived, mask="checkerboard"), tessera.attention(*qkv, tiles=waived))
        kept = tessera.TileList.from_mask(every, block=(4, 6))
        assert (tessera.attention(*qkv, tiles=kept, mask="checkerboard") != tessera.attention(*qkv, tiles=kept)).any()


class TestBackward:
    def test_gradients(self, qkv, rng):
        q, k, v = qkv
        sinks, dlse = normal(rng, 4), normal(rng, 2, 4, 13)
        dout = normal(rng, 2, 13, 4, 24)
        out, lse = tessera.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
        dq, dk, dv, dsinks = tessera.attention_backward(dout, q, k, v, out, lse, dlse=dlse, causal=True, sinks=sinks)
        want = textbook.gradients(q, k, v, dout, visible=textbook.window(13, 21, None, 0), sinks=sinks, dlse=dlse)
        for got, its in zip((dq, dk, dv, dsinks), want, strict=True):
            close(got, its, 1e-5)

    def test_second_segment_and_order(self, qkv, rng):
        q, k, v = qkv
        dout = normal(rng, 2, 13, 4, 24)
        sinks = normal(rng, 4)
        second = {"k2": tessera.KeySource(k[:, 8:], v[:, 8:])}
        out, lse = tessera.attention(q, k[:, :8], v[:, :8], sinks=sinks, return_lse=True, **second)
        dq, dk, dv, dsinks, dk2, dv2 = tessera.attention_backward(
            dout, q, k[:, :8], v[:, :8], out, lse, sinks=sinks, **second
        )
        want = tessera.attention_backward(dout, q, k, v, out, lse, sinks=sinks)
        got = (dq, np.concatenate([dk, dk2], 1), np.concatenate([dv, dv2], 1), dsinks)
        for one, its in zip(got, want, strict=True):
            close(one, its, 1e-5)

    def test_fp32_gradients_and_accumulation(self, rng):
        q, k, v, dout = (normal(rng, 1, 9, 2, 16, dtype=np.float16) for _ in range(4))
        out, lse = tessera.attention(q, k, v, return_lse=True)
        grads = tessera.attention_backward(dout, q, k, v, out, lse, grad_dtype="fp32")
        assert all(each.dtype == np.float32 for each in grads)
        half = tessera.attention_backward(dout, q, k, v, out, lse)
        assert all(each.dtype == np.float16 for each in half)
        sums = tuple(each.copy() for each in grads)
        returned = tessera.attention_backward(dout, q, k, v, out, lse, grads=sums, accumulate=True)
        assert all(a is b for a, b in zip(returned, sums, strict=True))
        for total, each in zip(sums, grads, strict=True):
            close(total, 2 * each.astype(np.float64), 1e-5)

    def test_backward_list_is_truncated(self, qkv, rng):
        q, k, v = qkv
        dout = normal(rng, 2, 13, 4, 24)
        out, lse = tessera.attention(q, k, v, return_lse=True)
        none = tessera.TileList.from_mask(np.zeros((1, 1, 4, 4), bool), block=(4, 6))
        for each in tessera.attention_backward(dout, q, k, v, out, lse, tiles=tessera.Tiles(backward=none)):
            same(each, np.zeros_like(each))
        every = tessera.TileList.from_mask(np.ones((1, 1, 4, 4), bool), block=(4, 6))
        whole = tessera.attention_backward(dout, q, k, v, out, lse)
        of_all = tessera.attention_backward(dout, q, k, v, out, lse, tiles=tessera.Tiles(backward=every))
        for got, want in zip(of_all, whole, strict=True):
            close(got, want, 1e-5)

    def test_dropout_needs_the_seed(self, qkv, rng):
        q, k, v = qkv
        out, lse = tessera.attention(q, k, v, dropout=0.2, seed=1, return_lse=True)
        with pytest.raises(ValueError, match="seed: got None; want the forward's seed"):
            tessera.attention_backward(out, q, k, v, out, lse, dropout=0.2)
        one = tessera.attention_backward(out, q, k, v, out, lse, dropout=0.2, seed=1)
        other = tessera.attention_backward(out, q, k, v, out, lse, dropout=0.2, seed=2)
        assert (one[2] != other[2]).any()

    def test_pages_have_no_gradient(self, qkv):
        q, k, v = qkv
        table, used = np.zeros((2, 1), np.int32), np.array([21, 21], np.int32)
        pages = tessera.KeySource(k, v, page_table=table, seqused=used)
        out, lse = tessera.attention(q, pages, return_lse=True)
        with pytest.raises(NotImplementedError, match="a page may belong to several sequences"):
            tessera.attention_backward(out, q, pages, None, out, lse)


def test_status_needs_a_report():
    q = np.ones((1, 4, 2, 8), np.float32)
    status = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match=r"^status: got an array; want metadata='report'"):
        tessera.attention(q, q, q, status=status)
    out = tessera.attention(q, q, q, metadata="report", status=status)
    assert np.array_equal(out, q) and status[0] == 0  # on the CPU what is wrong is refused
    with pytest.raises(ValueError, match=r"^metadata: got 'ignore'"):
        tessera.attention(q, q, q, metadata="ignore")
