# SPDX-License-Identifier: Apache-2.0
"""The C++ command and Python give the same bits on the same arrays: attention."""

from __future__ import annotations

import numpy as np
import pytest
import tessera
from command_run import DTYPES, THREADS, identical, normal

# (Python's options, words of the line); sizes and dtypes come from the arrays on both sides.
OPTIONS = {
    "plain": ({}, ""),
    "causal": ({"causal": True}, "causal"),
    "window": ({"window": (9, 3)}, "window=9:3"),
    "compressed_causal": ({"compressed_causal": (4, 2)}, "compressed_causal=4:2"),
    "chunks": ({"causal": True, "attention_chunk": 20}, "causal chunk=20"),
    "scores": ({"scale": 0.2, "softcap": 3.5}, "scale=0.2 softcap=3.5"),
    "built-ins": ({"score": "relative", "mask": "prefix"}, "score=relative mask=prefix"),
    "dropout": ({"dropout": 0.3, "seed": 8}, "dropout=0.3"),
    "invariant": ({"causal": True, "batch_invariant": True}, "causal batch_invariant"),
    "wish": ({"wishes": "splits=3 tile_kv=16"}, ""),
    "oracle": ({"causal": True, "wishes": "implementation=cpu.reference"}, "causal"),
}


class TestForward:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("name", OPTIONS)
    def test_options(self, command, rng, name, dtype):
        options, words = OPTIONS[name]
        q, k, v = (normal(rng, *shape, dtype=dtype) for shape in ((2, 33, 4, 32), (2, 70, 2, 32), (2, 70, 2, 16)))
        out, lse = tessera.attention(q, k, v, return_lse=True, threads=THREADS, **options)
        theirs = command(f"{words} lse", options.get("wishes", ""), options.get("seed", 0), q=q, k=k, v=v)
        identical(out, theirs["o"])
        identical(lse, theirs["lse"])

    def test_decode_with_splits(self, command, rng):
        q, k, v = normal(rng, 1, 1, 8, 64, dtype="bf16"), *(normal(rng, 1, 3000, 2, 64, dtype="bf16") for _ in "kv")
        identical(tessera.attention(q, k, v, threads=THREADS), command("", q=q, k=k, v=v)["o"])

    def test_dtypes_of_their_own(self, command, rng):
        q, k, v = (
            normal(rng, 1, 9, 2, 16),
            normal(rng, 1, 9, 2, 16, dtype="fp16"),
            normal(rng, 1, 9, 2, 16, dtype="bf16"),
        )
        out = tessera.attention(q, k, v, out_dtype="bf16", threads=THREADS)
        identical(out, command("dtype=fp32:fp16:bf16:bf16", q=q, k=k, v=v)["o"])

    def test_sinks_slopes_offsets(self, command, rng):
        q, k, v = normal(rng, 2, 20, 4, 16), normal(rng, 2, 30, 4, 16), normal(rng, 2, 30, 4, 16)
        sink, slopes = normal(rng, 4), rng.random(4).astype(np.float32)
        shift = np.array([3, -5], np.int64)
        options = {"sinks": sink, "alibi_slopes": slopes, "offsets": tessera.Offsets(q=shift)}
        out = tessera.attention(q, k, v, causal=True, threads=THREADS, **options)
        theirs = command("causal", q=q, k=k, v=v, sink=sink, alibi_slopes=slopes, q_offset=shift)
        identical(out, theirs["o"])

    def test_packed_sequences(self, command, rng):
        q, k, v = normal(rng, 50, 4, 16), normal(rng, 60, 2, 16), normal(rng, 60, 2, 16)
        cu = {"cu_seqlens_q": np.array([0, 31, 31, 48], np.int32), "cu_seqlens_k": np.array([0, 20, 35, 60], np.int32)}
        used = {"seqused_k": np.array([20, 9, 25], np.int32)}
        out, lse = tessera.attention(q, k, v, causal=True, return_lse=True, threads=THREADS, **cu, **used)
        theirs = command("causal lse seqused_k", q=q, k=k, v=v, **cu, **used)
        # What lies behind the last sequence is nobody's: neither side writes it.
        identical(out[:48], theirs["o"][:48])
        identical(lse[:, :48], theirs["lse"][:, :48])

    @pytest.mark.parametrize("form", ["table", "csr"])
    def test_pages(self, command, rng, form):
        q = normal(rng, 2, 3, 4, 16)
        k, v = normal(rng, 9, 8, 2, 16), normal(rng, 9, 8, 2, 16)
        if form == "table":
            pages = {
                "page_table": rng.permutation(9)[:8].astype(np.int32).reshape(2, 4),
                "seqused_k": np.array([31, 12], np.int32),
            }
        else:
            pages = {
                "page_indptr": np.array([0, 3, 5], np.int32),
                "page_indices": np.array([4, 1, 8, 0, 2], np.int32),
                "last_page_len": np.array([8, 1], np.int32),
            }
        # The longest sequence in use, which is what the command plans for.
        longest = {"max_seqlen": 31} if form == "table" else {}
        fields = {"seqused" if name == "seqused_k" else name: array for name, array in pages.items()}
        out = tessera.attention(q, tessera.KeySource(k, v, **fields, **longest), causal=True, threads=THREADS)
        identical(out, command("causal", q=q, k=k, v=v, **pages)["o"])

    def test_two_segments(self, command, rng):
        q, k, v, k2, v2 = (normal(rng, 1, n, 2, 16) for n in (17, 40, 40, 17, 17))
        out = tessera.attention(q, k, v, k2=tessera.KeySource(k2, v2), causal=True, threads=THREADS)
        identical(out, command("causal", q=q, k=k, v=v, k2=k2, v2=v2)["o"])

    @pytest.mark.parametrize("form", ["indices", "bitmask", "transposed"])
    def test_tile_lists(self, command, rng, form):
        q, k, v = (normal(rng, 1, 100, 4, 16) for _ in "qkv")
        tiles = tessera.TileList.from_mask(rng.random((1, 2, 7, 13)) < 0.5, form=form, block=(16, 8))
        q4, k2, v2 = q, k[:, :, :2].copy(), v[:, :, :2].copy()
        out = tessera.attention(q4, k2, v2, tiles=tiles, threads=THREADS)
        theirs = command(f"block=16x8 list={form}:kv", q=q4, k=k2, v=v2, **dict(tiles.arrays()))
        identical(out, theirs["o"])

    def test_mass_and_next_list(self, command, rng):
        q, k, v = (normal(rng, 1, 40, 2, 16) for _ in "qkv")
        out, mass, tiles = tessera.attention(
            q, k, v, tiles=tessera.Tiles(mass="rms", next="indices", threshold=0.3, block=(8, 8)), threads=THREADS
        )
        theirs = command("mass=rms next=indices threshold=0.3 block=8x8", q=q, k=k, v=v)
        identical(out, theirs["o"])
        identical(mass, theirs["tile_mass"])
        identical(tiles.counts, theirs["next_counts"])
        identical(tiles.indices, theirs["next_indices"])


class TestBackward:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_after_either_forward(self, command, rng, dtype):
        q, k, v, dout = (normal(rng, 2, 40, 4, 16, dtype=dtype) for _ in range(4))
        sinks = normal(rng, 4)
        out, lse = tessera.attention(q, k, v, causal=True, sinks=sinks, return_lse=True, threads=THREADS)
        options = {"causal": True, "sinks": sinks, "deterministic": True, "threads": THREADS}
        ours = tessera.attention_backward(dout, q, k, v, out, lse, **options)
        given = {"q": q, "k": k, "v": v, "dout": dout, "sink": sinks}
        after_ours = command("pass=backward causal deterministic", o=out, lse=lse, **given)
        after_theirs = command("pass=backward causal deterministic", **given)
        for slot, gradient in zip(("dq", "dk", "dv", "dsink"), ours, strict=True):
            identical(gradient, after_ours[slot])
            identical(gradient, after_theirs[slot])
        theirs = command("causal lse", q=q, k=k, v=v, sink=sinks)
        for got, want in zip(
            tessera.attention_backward(dout, q, k, v, theirs["o"], theirs["lse"], **options), ours, strict=True
        ):
            identical(got, want)

    @pytest.mark.parametrize("name", [name for name in OPTIONS if name != "wish"])
    def test_options(self, command, rng, name):
        options, words = OPTIONS[name]
        q, dout = normal(rng, 2, 33, 4, 32), normal(rng, 2, 33, 4, 16)
        k, v = normal(rng, 2, 70, 2, 32), normal(rng, 2, 70, 2, 16)
        out, lse = tessera.attention(q, k, v, return_lse=True, threads=THREADS, **options)
        ours = tessera.attention_backward(
            dout, q, k, v, out, lse, **{**options, "deterministic": True, "threads": THREADS}
        )
        words = f"pass=backward deterministic {words}"
        arrays = {"q": q, "k": k, "v": v, "dout": dout, "o": out, "lse": lse}
        theirs = command(words, options.get("wishes", ""), options.get("seed", 0), **arrays)
        for slot, gradient in zip(("dq", "dk", "dv"), ours, strict=True):
            identical(gradient, theirs[slot])

    def test_packed_sequences(self, command, rng):
        q, dout = normal(rng, 50, 4, 16), normal(rng, 50, 4, 16)
        k, v = normal(rng, 60, 2, 16), normal(rng, 60, 2, 16)
        cu = {"cu_seqlens_q": np.array([0, 31, 31, 50], np.int32), "cu_seqlens_k": np.array([0, 20, 35, 60], np.int32)}
        options = {"causal": True, "deterministic": True, "threads": THREADS, **cu}
        out, lse = tessera.attention(q, k, v, return_lse=True, **options)
        ours = tessera.attention_backward(dout, q, k, v, out, lse, **options)
        theirs = command("pass=backward causal deterministic", q=q, k=k, v=v, dout=dout, o=out, lse=lse, **cu)
        for slot, gradient in zip(("dq", "dk", "dv"), ours, strict=True):
            identical(gradient, theirs[slot])

    def test_two_segments(self, command, rng):
        q, k, v, k2, v2, dout = (normal(rng, 1, n, 2, 16) for n in (17, 40, 40, 17, 17, 17))
        options = {"k2": tessera.KeySource(k2, v2), "causal": True, "deterministic": True, "threads": THREADS}
        out, lse = tessera.attention(q, k, v, return_lse=True, **options)
        ours = tessera.attention_backward(dout, q, k, v, out, lse, **options)
        arrays = {"q": q, "k": k, "v": v, "k2": k2, "v2": v2, "dout": dout, "o": out, "lse": lse}
        theirs = command("pass=backward causal deterministic", **arrays)
        for slot, gradient in zip(("dq", "dk", "dv", "dk2", "dv2"), ours, strict=True):
            identical(gradient, theirs[slot])

    @pytest.mark.parametrize("form", ["indices", "bitmask", "transposed"])
    def test_tile_lists_of_either_pass(self, command, rng, form):
        q, k, v, dout = (normal(rng, 1, 100, 2, 16, dtype="bf16") for _ in range(4))
        kept = rng.random((1, 2, 7, 13)) < 0.5
        tiles = tessera.TileList.from_mask(kept, form=form, block=(16, 8))
        fewer = tessera.TileList.from_mask(kept & (rng.random(kept.shape) < 0.7), form=form, block=(16, 8))
        options = {"tiles": tessera.Tiles(tiles, fewer), "deterministic": True, "threads": THREADS}
        out, lse = tessera.attention(q, k, v, return_lse=True, **options)
        ours = tessera.attention_backward(dout, q, k, v, out, lse, **options)
        arrays = {"q": q, "k": k, "v": v, "dout": dout, "o": out, "lse": lse}
        arrays |= dict(tiles.arrays()) | {f"bwd_{name}": array for name, array in fewer.arrays()}
        theirs = command(f"pass=backward deterministic block=16x8 list={form}:kv bwd_list={form}:kv", **arrays)
        for slot, gradient in zip(("dq", "dk", "dv"), ours, strict=True):
            identical(gradient, theirs[slot])

    def test_fp32_gradients_and_dlse(self, command, rng):
        q, k, v, dout = (normal(rng, 1, 20, 2, 16, dtype="bf16") for _ in range(4))
        dlse = normal(rng, 1, 2, 20)
        out, lse = tessera.attention(q, k, v, return_lse=True, threads=THREADS)
        ours = tessera.attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, grad_dtype="fp32", deterministic=True, threads=THREADS
        )
        theirs = command("pass=backward grad=fp32 deterministic", q=q, k=k, v=v, dout=dout, dlse=dlse, o=out, lse=lse)
        for slot, gradient in zip(("dq", "dk", "dv"), ours, strict=True):
            identical(gradient, theirs[slot])
