# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes and trees of speculative tokens on numpy arrays: results, what is found, what is refused."""

from __future__ import annotations

import core_textbook as textbook
import numpy as np
import pytest
import tessera
from tessera.cascade.layout import level_source, rest_source

PAGE, USED = 16, np.array([70, 90, 80, 100, 65], np.int32)
GROUPS = {
    "no group": [],
    "all": [(32, 0, 5)],
    "two": [(32, 0, 2), (48, 3, 5)],
    "the middle": [(32, 1, 3)],
    "a tree": [(16, 0, 5), (64, 1, 3), (48, 3, 5)],
    "three levels": [(16, 0, 5), (32, 0, 4), (64, 1, 3)],
}


def paged(groups, used=USED, seed=3):
    """A cache whose sequences share the groups' pages, and is NaN where no sequence is; and the dense keys of it."""
    rng = np.random.default_rng(seed)
    columns = -(-int(used.max()) // PAGE)
    table = rng.permutation(len(used) * columns).reshape(-1, columns).astype(np.int32)
    for tokens, first, stop in sorted(groups, reverse=True):  # the outer ones last
        table[first:stop, : tokens // PAGE] = table[first, : tokens // PAGE]
    pools = [np.full((len(used) * columns, PAGE, 2, 32), np.nan, np.float32) for _ in "kv"]
    for pool in pools:
        for row, length in zip(table, used, strict=True):
            for position in range(length):
                pool[row[position // PAGE], position % PAGE] = rng.standard_normal((2, 32))
    dense = [[pool[row].reshape(-1, 2, 32)[None, :n] for row, n in zip(table, used, strict=True)] for pool in pools]
    return tessera.KeySource(*pools, page_table=table, seqused=used), dense


def queries(tokens, seed=5):
    return np.random.default_rng(seed).standard_normal((len(USED), tokens, 4, 32)).astype(np.float32)


def expected(q, dense, visible=None, **options):
    """(out, lse) by the textbook, sequence by sequence; visible(rows, keys) is a mask."""
    found = [
        textbook.attention(rows[None], k, v, visible=visible and visible(len(rows), k.shape[1]), **options)
        for rows, k, v in zip(q, *dense, strict=True)
    ]
    return np.concatenate([each.out for each in found]), np.concatenate([each.lse for each in found])


def close(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=3e-6, atol=3e-6)


def causal_rows(rows, keys):
    return textbook.window(rows, keys, right=0)


class TestResults:
    @pytest.mark.parametrize("tokens", [1, 4])
    @pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
    def test_are_those_of_the_textbook(self, groups, tokens):
        source, dense = paged(groups)
        q, prefixes = queries(tokens), tessera.SharedPrefixes(groups, batch=5, page_size=PAGE)
        prefixes.check(source.page_table, source.seqused, tokens=tokens)
        close(tessera.cascade_attention(q, source, prefixes, return_lse=True), expected(q, dense))
        got = tessera.cascade_attention(q, source, prefixes, causal=True, return_lse=True)
        close(got, expected(q, dense, causal_rows))

    @pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
    def test_a_source_with_max_seqlen(self, groups):
        source, dense = paged(groups)
        prefixes = tessera.SharedPrefixes(groups, batch=5, page_size=PAGE)
        got = tessera.cascade_attention(queries(2), source._replace(max_seqlen=100), prefixes, return_lse=True)
        close(got, expected(queries(2), dense))

    def test_options(self):
        source, dense = paged(GROUPS["a tree"])
        q, sinks = queries(2), np.float32([1, -2, 3, 0.5])
        prefixes = tessera.SharedPrefixes(GROUPS["a tree"], batch=5, page_size=PAGE)
        options = {"scale": 0.4, "softcap": 2.0, "sinks": sinks}
        got = tessera.cascade_attention(q, source, prefixes, causal=True, return_lse=True, **options)
        close(got, expected(q, dense, causal_rows, **options))

    def test_packed_queries(self):
        source, dense = paged(GROUPS["two"])
        q, counts = queries(4), [4, 1, 0, 3, 2]
        rows = np.concatenate([each[:n] for each, n in zip(q, counts, strict=True)])
        starts = np.cumsum([0, *counts]).astype(np.int32)
        prefixes = tessera.SharedPrefixes(GROUPS["two"], batch=5, page_size=PAGE)
        for most in (None, 4):
            out, lse = tessera.cascade_attention(
                rows, source, prefixes, causal=True, cu_seqlens_q=starts, max_seqlen_q=most, return_lse=True
            )
            for i, n in enumerate(counts):
                pair = [[each[i]] for each in dense]
                want = expected([q[i, :n]], pair, causal_rows) if n else (np.empty((1, 0, 4, 32)), np.empty((1, 4, 0)))
                mine = slice(starts[i], starts[i + 1])
                close((out[None, mine], lse[None, :, mine]), want)

    def test_memory_of_the_caller(self):
        source, _ = paged(GROUPS["all"])
        q, prefixes = queries(3), tessera.SharedPrefixes(32, batch=5, page_size=PAGE)
        assert prefixes.groups == ((32, 0, 5),)
        want = tessera.cascade_attention(q, source, prefixes)
        out = np.full((5, 3, 6, 32), np.nan, np.float32)[:, :, 1:5]
        assert tessera.cascade_attention(q, source, prefixes, out=out) is out
        np.testing.assert_array_equal(out, want)
        small = tessera.cascade_attention(q, source, prefixes, out_dtype="float16")
        np.testing.assert_array_equal(small, want.astype(np.float16))
        with pytest.raises(ValueError, match="out: got strides"):
            tessera.cascade_attention(q, source, prefixes, out=np.empty((5, 4, 4, 32), np.float32)[:, :3])
        with pytest.raises(ValueError, match="out: got an array of shape"):
            tessera.cascade_attention(q, source, prefixes, out=out[:4])

    def test_pages_of_a_group_are_read_once(self):
        """The problems of a call: their pages and lengths, of which the sequences' own ones are without the prefix."""
        source, _ = paged(GROUPS["a tree"])
        prefixes = tessera.SharedPrefixes(GROUPS["a tree"], batch=5, page_size=PAGE)
        levels = [level_source(source, prefixes, i, level) for i, level in enumerate(prefixes.levels)]
        assert [level.seqused.tolist() for level in levels] == [[16], [0, 48, 32]]  # of the first sequence, no more
        np.testing.assert_array_equal(levels[0].page_table, source.page_table[:1, :1])
        np.testing.assert_array_equal(levels[1].page_table[1], source.page_table[1, 1:4])
        np.testing.assert_array_equal(levels[1].page_table[2, :2], source.page_table[3, 1:3])
        rest = rest_source(source, prefixes)
        assert rest.seqused.tolist() == [54, 26, 16, 52, 17]
        np.testing.assert_array_equal(rest.page_table[3, :4], source.page_table[3, 3:])

    def test_an_empty_batch(self):
        source = tessera.KeySource(
            *np.zeros((2, 3, PAGE, 2, 32), np.float32),
            page_table=np.zeros((0, 4), np.int32),
            seqused=np.zeros(0, np.int32),
        )
        prefixes = tessera.find_shared_prefixes(source.page_table, source.seqused, PAGE)
        out = tessera.cascade_attention(np.zeros((0, 1, 4, 32), np.float32), source, prefixes)
        assert out.shape == (0, 1, 4, 32)


class TestFinding:
    def test_finds_the_tree(self):
        groups = GROUPS["a tree"]
        table = paged(groups)[0].page_table
        assert tessera.find_shared_prefixes(table, USED, PAGE, levels=2).groups == tuple(groups)
        saved_most = ((64, 1, 3), (48, 3, 5))  # 3 + 4 + 3 pages instead of 4
        assert tessera.find_shared_prefixes(table, USED, PAGE).groups == saved_most
        assert tessera.find_shared_prefixes(table, USED, PAGE, min_tokens=49).groups == saved_most[:1]

    def test_takes_the_outer_group_where_that_saves_more(self):
        table = paged([(48, 0, 5), (64, 1, 3)])[0].page_table
        assert tessera.find_shared_prefixes(table, USED, PAGE).groups == ((48, 0, 5),)

    def test_new_tokens_are_never_shared(self):
        table = np.zeros((3, 4), np.int32) + np.arange(4, dtype=np.int32)
        used = np.array([33, 64, 64], np.int32)
        assert tessera.find_shared_prefixes(table, used, PAGE).groups == ((32, 0, 3),)
        assert tessera.find_shared_prefixes(table, used, PAGE, tokens=2).groups == ((48, 1, 3),)

    @pytest.mark.parametrize("levels", [1, 2, 3])
    def test_what_is_found_is_true(self, levels):
        rng = np.random.default_rng(levels)
        for _ in range(50):
            table = rng.integers(0, 2, (12, 6)).astype(np.int32)
            used = rng.integers(1, 97, 12).astype(np.int32)
            found = tessera.find_shared_prefixes(table, used, PAGE, levels=levels)
            found.check(table, used, tokens=1)
            assert len(found.levels) <= levels

    def test_a_long_chain(self):
        """Each sequence leaves the one before it a page later: a tree as deep as the batch."""
        rows, columns = np.indices((1200, 1200), np.int32)
        table = np.where(columns < rows, columns, 2000 + rows)
        found = tessera.find_shared_prefixes(table, np.full(1200, 1200 * PAGE, np.int32), PAGE)
        assert found.groups == ((599 * PAGE, 599, 1200),)  # 600 · 599 pages less

    def test_refusals(self):
        table = np.zeros((3, 4), np.int32)
        with pytest.raises(ValueError, match=r"page_table: got shape \(3, 4\) with seqused of shape \(2,\)"):
            tessera.find_shared_prefixes(table, USED[:2], PAGE)
        with pytest.raises(ValueError, match="levels: got 0"):
            tessera.find_shared_prefixes(table, USED[:3], PAGE, levels=0)
        with pytest.raises(ValueError, match="page_size: got 0"):
            tessera.find_shared_prefixes(table, USED[:3], 0)


class TestRefusals:
    @pytest.mark.parametrize(
        ("groups", "error"),
        [
            ([(32, 0, 2), (40, 3, 5)], r"groups\[1\].tokens: got 40; want a multiple of the 16"),
            ([(0, 0, 2)], r"groups\[0\].tokens: got 0"),
            ([(16, 3, 6)], r"groups\[0\]: got sequences 3 to below 6; want one or more of the 5"),
            ([(16, 2, 2)], r"groups\[0\]: got sequences 2 to below 2"),
            ([(16, 0, 3), (32, 2, 5)], r"groups: got \(32, 2, 5\) beside \(16, 0, 3\)"),
            ([(32, 0, 5), (16, 1, 3)], r"groups: got \(16, 1, 3\) beside \(32, 0, 5\)"),
            ([(16, 0, 3), (16, 0, 3)], "groups: got"),
            ([(16, 3)], r"groups\[0\]: got \(16, 3\); want SharedPrefix"),
            (17, r"groups\[0\].tokens: got 17"),
        ],
    )
    def test_groups(self, groups, error):
        with pytest.raises(ValueError, match=error):
            tessera.SharedPrefixes(groups, batch=5, page_size=PAGE)

    def test_sizes_of_the_batch(self):
        for name, sizes in (("batch", (-1, PAGE)), ("page_size", (5, 0))):
            with pytest.raises(ValueError, match=f"{name}: got {min(sizes)}"):
                tessera.SharedPrefixes((), batch=sizes[0], page_size=sizes[1])

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            (
                {"groups": [(32, 0, 5)]},
                r"page_table: got page \d+ in column 0 of sequence 2, and page \d+ of sequence 0",
            ),
            ({"seqused": np.int32([70, 90, 80, 100, 50])}, "seqused: got 50 keys of sequence 4, 3 of them its own"),
            ({"page_table": None}, "source: got a KeySource without page_table"),
            ({"page_table": np.zeros((5, 2), np.int32)}, r"page_table: got shape \(5, 2\); want \(5, columns\)"),
            ({"seqused": USED[:4]}, r"seqused: got shape \(4,\)"),
            ({"page_size": 8}, "k: got an array of shape .*; want pages of 8 tokens"),
            ({"q": queries(3)[:4]}, r"q: got an array of shape \(4, 3, 4, 32\).*; want \(5, tokens, hq, d\)"),
            ({"cu_seqlens_q": USED}, r"q: got .*; want \(tokens, hq, d\) with cu_seqlens_q of 6"),
            ({"tree": np.ones((5, 3), np.uint32)}, "tree: got .* causal=True"),
        ],
        ids=str,
    )
    def test_calls(self, change, error):
        source, _ = paged(GROUPS["two"])
        fields = {name: value for name, value in change.items() if name in source._fields}
        options = {name: change[name] for name in ("cu_seqlens_q", "tree") if name in change}
        groups, page = change.get("groups", GROUPS["two"]), change.get("page_size", PAGE)
        prefixes = tessera.SharedPrefixes(groups, batch=5, page_size=page)
        with pytest.raises(ValueError, match=error):
            tessera.cascade_attention(
                change.get("q", queries(3)), source._replace(**fields), prefixes, causal=True, **options
            )

    def test_what_is_no_source_and_no_groups(self):
        source, _ = paged(GROUPS["two"])
        prefixes = tessera.SharedPrefixes(GROUPS["two"], batch=5, page_size=PAGE)
        with pytest.raises(TypeError, match="source: got an array"):
            tessera.cascade_attention(queries(1), source.k, prefixes)
        with pytest.raises(TypeError, match="prefixes: got 32; want SharedPrefixes"):
            tessera.cascade_attention(queries(1), source, 32)


def random_tree(rng, tokens):
    """bool (tokens, tokens): row i sees token i and its ancestors, whose numbers are in no order."""
    sees = np.eye(tokens, dtype=bool)
    for i in range(1, tokens):
        sees[i] |= sees[rng.integers(i)]
    order = rng.permutation(tokens)
    return sees[np.ix_(order, order)]


def as_words(sees, dtype):
    """bool (b, tokens, tokens) as words, (b, tokens, words)."""
    width = np.iinfo(dtype).bits
    padded = np.zeros((*sees.shape[:2], -(-sees.shape[2] // width) * width), bool)
    padded[..., : sees.shape[2]] = sees
    return np.packbits(padded, axis=-1, bitorder="little").view(dtype)


class TestTrees:
    @pytest.mark.parametrize(
        ("dtype", "tokens"),
        [
            (np.uint32, 1),
            (np.uint32, 32),
            (np.int32, 7),
            (np.uint64, 64),
            (np.int64, 33),
            (np.uint32, 40),
            (np.uint64, 65),
        ],
    )
    def test_results_are_those_of_the_textbook(self, dtype, tokens, rng):
        used = USED + tokens
        source, dense = paged(GROUPS["a tree"], used)
        sees = np.stack([random_tree(rng, tokens) for _ in used])
        words = as_words(sees, dtype)
        words = words[..., 0] if words.shape[-1] == 1 else words
        q = queries(tokens)
        masks = [
            np.concatenate([np.ones((tokens, n - tokens), bool), tree], 1) for tree, n in zip(sees, used, strict=True)
        ]
        order = iter(masks)
        want = expected(q, dense, lambda rows, keys: next(order))
        mask = tessera.tree_mask(words, source.seqused)
        close(tessera.attention(q, source, mask=mask, return_lse=True), want)
        prefixes = tessera.SharedPrefixes(GROUPS["a tree"], batch=5, page_size=PAGE)
        close(tessera.cascade_attention(q, source, prefixes, tree=words, return_lse=True), want)

    def test_one_length_for_all(self, rng):
        q, k, v = (rng.standard_normal((2, n, 2, 16)).astype(np.float32) for n in (3, 20, 20))
        words = np.uint32([[1, 3, 5], [1, 3, 7]])
        got = tessera.attention(q, k, v, mask=tessera.tree_mask(words, 20))
        sees = np.concatenate([np.ones((2, 3, 17), bool), words[..., None] >> np.arange(3) & 1 == 1], -1)
        np.testing.assert_allclose(got, textbook.attention(q, k, v, visible=sees[:, None]).out, rtol=3e-6, atol=3e-6)

    def test_lengths_of_other_steps_are_no_other_masks(self, rng):
        words = np.uint32([[1, 3, 5], [1, 3, 7]])
        lines = set()
        for length in (20, 21, 22):
            q, k, v = (rng.standard_normal((2, n, 2, 16)).astype(np.float32) for n in (3, 24, 24))
            lines.add(tessera.plan(q, k, v, mask=tessera.tree_mask(words, length)).problem)
        assert len(lines) == 1

    @pytest.mark.parametrize(
        ("row", "error"),
        [
            ([1, 1, 7], "token 1 that does not see itself; want bit 1 in its row"),
            ([1, 3, 15], "token 2 that sees token 3 of 3; want no such bit"),
            ([3, 3, 4], "tokens 0 and 1 that see each other; want one of them before the other"),
            ([1, 3, 6], "token 2 that sees token 1 and not token 0, which that one sees"),
            ([1, 2, 7], "token 2 that sees tokens 0 and 1, of which neither sees the other; want one path"),
        ],
    )
    def test_no_tree(self, row, error):
        words = np.array([[1, 3, 5], row], np.uint64)
        with pytest.raises(ValueError, match=f"bits: got, in sequence 1, {error}"):
            tessera.check_tree(words)
        with pytest.raises(ValueError, match="bits: got, in sequence 1"):
            tessera.tree_mask(words, 9)

    def test_other_refusals(self):
        for bits, error in (
            (np.ones((2, 3), np.uint8), r"bits: got an array of shape \(2, 3\) and dtype uint8; want"),
            (np.ones(3, np.uint32), "bits: got an array of shape"),
            (np.ones((1, 33), np.uint32), "bits: got 33 tokens with 32 bits each"),
            (np.ones((1, 0), np.uint32), "bits: got 0 tokens"),
        ):
            with pytest.raises(ValueError, match=error):
                tessera.tree_mask(bits, 40)
        with pytest.raises(ValueError, match=r"seqused_k: got an array of shape \(3,\)"):
            tessera.tree_mask(np.ones((2, 1), np.uint32), USED[:3])
