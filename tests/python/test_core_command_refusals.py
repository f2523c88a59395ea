# SPDX-License-Identifier: Apache-2.0
"""The C++ command and Python refuse with the same words."""

from __future__ import annotations

import numpy as np
import pytest
import tessera
from command_run import THREADS, normal


def refused(call) -> str:
    with pytest.raises((ValueError, NotImplementedError)) as raised:
        call()
    return str(raised.value)


class TestRefusals:
    """The same text from both, where both get as far as the library."""

    @pytest.mark.parametrize(
        ("words", "options", "arrays"),
        [
            ("scale=inf", {"scale": float("inf")}, {}),
            ("softcap=-2", {"softcap": -2.0}, {}),
            ("dropout=1.5", {"dropout": 1.5}, {}),
            ("compressed_causal=0:2", {"compressed_causal": (0, 2)}, {}),
            ("", {"sinks": "sink"}, {"sink": np.zeros(3, np.float32)}),
            ("", {"alibi_slopes": "alibi_slopes"}, {"alibi_slopes": np.zeros((1, 4, 1), np.float32)}),
            ("", {"seqused_k": "seqused_k"}, {"seqused_k": np.array([3, 11], np.int32)}),
            ("", {"seqused_k": "seqused_k"}, {"seqused_k": np.array([3, 1], np.int64)}),
            ("", {"offsets": lambda q: tessera.Offsets(q=q)}, {"q_offset": np.array([1 << 61, 0], np.int64)}),
            ("", {"offsets": lambda k2: tessera.Offsets(k2=k2)}, {"k_offset2": np.zeros(2, np.int64)}),
        ],
    )
    def test_options(self, command, rng, words, options, arrays):
        q, k, v = (normal(rng, 2, 7, 2, 16) for _ in "qkv")
        options = {name: arrays[value] if isinstance(value, str) else value for name, value in options.items()}
        options = {name: value(*arrays.values()) if callable(value) else value for name, value in options.items()}
        ours = refused(lambda: tessera.attention(q, k, v, **options))
        assert ours == command.refusal(words, q=q, k=k, v=v, **arrays)

    def test_shapes(self, command, rng):
        q, k, v = normal(rng, 2, 7, 2, 16), normal(rng, 2, 9, 2, 16), normal(rng, 2, 8, 2, 16)
        assert refused(lambda: tessera.attention(q, k, v)) == command.refusal("", q=q, k=k, v=v)
        k3 = normal(rng, 2, 7, 3, 16)
        assert refused(lambda: tessera.attention(q, k3, k3)) == command.refusal("", q=q, k=k3, v=k3)
        odd = normal(rng, 2, 7, 2, 12)
        assert refused(lambda: tessera.attention(odd, odd, odd)) == command.refusal("", q=odd, k=odd, v=odd)

    def test_unsorted_tiles(self, command, rng):
        q = normal(rng, 1, 32, 1, 16)
        counts, indices = np.full((1, 1, 2), 2, np.int32), np.array([[[[0, 1], [1, 0]]]], np.int32)
        tiles = tessera.TileList(counts=counts, indices=indices, block=(16, 16))
        ours = refused(lambda: tessera.attention(q, q, q, tiles=tiles))
        theirs = command.refusal("block=16x16 list=indices", q=q, k=q, v=q, tile_counts=counts, tile_indices=indices)
        assert ours == theirs and ours.startswith("tile_indices: got ")

    def test_what_nothing_computes(self, command, rng):
        q = normal(rng, 1, 8, 1, 16)
        ours = refused(lambda: tessera.attention(q, q, q, wishes="splits=2000", threads=THREADS))
        done = command.run("", "splits=2000", 0, {"q": q, "k": q, "v": q})
        assert done.returncode == 3
        # Both name the problem; they say its defaults differently.
        assert ours.split("; want ")[1] == done.stderr.strip().split("; want ")[1]
