# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache of versions 2 and 3 over flash-attn's own grids of parameters."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

import flash_grid  # noqa: E402
from flash_grid import BOOL, HEADS, Case, Grid, over, seed_of, window  # noqa: E402
from flash_textbook import (  # noqa: E402
    Lengths,
    Score,
    check_error,
    packed,
    padded,
    random_lengths,
    rotated,
    starts,
    textbook,
)
from tessera.compat import flash_attn_2, flash_attn_3  # noqa: E402

pytest_generate_tests = flash_grid.generate
threads = flash_grid.threads

PAIRS = [(1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000), (128, 128)]
LONG = [(1, 128 * 1024), (16, 128 * 1024)]
KV_HEADS = {"mha": 6, "mqa": 1, "gqa": 3}


class Cache(NamedTuple):
    """A cache as the call gets it, and the rows of it that the sequences use, (batch, capacity, heads, dim)."""

    keys: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor | None
    table: torch.Tensor | None

    def gathered(self, pool: torch.Tensor, capacity: int) -> torch.Tensor:
        if self.table is None:
            return pool[self.rows.long()] if self.rows is not None else pool
        table = self.table[self.rows.long()] if self.rows is not None else self.table
        return pool[table.long()].flatten(1, 2)[:, :capacity]


def make_cache(case: Case, batch: int, capacity: int, heads: int, dim_v: int) -> Cache:
    rows = batch * 2 if case.batch_idx else batch
    chosen = torch.randperm(rows)[:batch].to(torch.int32) if case.batch_idx else None
    if case.page is None:
        shapes = [(rows, capacity, heads, d) for d in (case.d, dim_v)]
        table = None
    else:
        columns = -(-capacity // case.page)
        pages = rows * columns * 3
        table = torch.randperm(pages)[: rows * columns].reshape(rows, columns).to(torch.int32)
        shapes = [(pages, case.page, heads, d) for d in (case.d, dim_v)]
    keys, values = (torch.randn(shape).to(case.dtype) for shape in shapes)
    return Cache(keys, values, chosen, table)


def lengths_before(case: Case, batch: int, queries: int, new: int, capacity: int, turning: bool) -> torch.Tensor:
    """Tokens in the cache: at least one without new ones, and room for the new ones and the rotation of q."""
    if not case.new_kv:
        return torch.randint(1, capacity + 1, (batch,), dtype=torch.int32)
    behind = queries if (case.causal or case.local) and turning else new
    return torch.randint(0, capacity - behind + 1, (batch,), dtype=torch.int32)


def padding_before(case: Case, lengths: torch.Tensor) -> torch.Tensor | None:
    if not case.leftpad:
        return None
    return torch.tensor([int(torch.randint(0, max(int(n), 1), (1,))) for n in lengths], dtype=torch.int32)


def run(case: Case, module, batch: int, heads: int, times: float, slopes, varlen: bool, **options) -> None:
    """One call against the textbook over a copy of the cache that is updated row by row."""
    queries, capacity = case.lengths
    kv = KV_HEADS[case.heads]
    rotary = int(case.rotary * case.d) // 16 * 16
    score = Score(case.causal, window(case.local, capacity), 0.0, slopes)
    q = torch.randn(batch, queries, heads, case.d).to(case.dtype)
    used_q = random_lengths(queries, batch) if varlen else torch.full((batch,), queries)
    new = queries if case.new_eq_q else int(torch.randint(1, queries + 1, (1,)))
    k, v = (torch.randn(batch, new, kv, case.d).to(case.dtype) for _ in range(2))
    used_new = random_lengths(new, batch) if varlen else torch.full((batch,), new)
    cache = make_cache(case, batch, capacity, kv, case.d)
    before = lengths_before(case, batch, queries, new, capacity, rotary > 1)
    leftpad = padding_before(case, before)

    expected_k, expected_v = (cache.gathered(pool, capacity).clone() for pool in (cache.keys, cache.values))
    turned_q, turned_k = q, k
    cos = sin = None
    if rotary:
        positions = cache.keys.shape[0] * cache.keys.shape[1] if cache.table is not None else capacity
        angle = torch.rand(positions, rotary // 2) * 2 * math.pi
        cos, sin = torch.cos(angle).to(case.dtype), torch.sin(angle).to(case.dtype)
        moving = case.causal or case.local
        at = before.long()[:, None]
        turned_q = rotated(q, cos, sin, at + torch.arange(queries) * int(moving), case.interleaved)
        turned_k = rotated(k, cos, sin, at + torch.arange(new), case.interleaved)
    total = before.long()
    if case.new_kv:
        for b in range(batch):
            span = slice(int(before[b]), int(before[b] + used_new[b]))
            expected_k[b, span] = turned_k[b, : used_new[b]]
            expected_v[b, span] = v[b, : used_new[b]]
        total = total + used_new
    first = torch.zeros(batch, dtype=torch.int64) if leftpad is None else leftpad.long()
    lengths = Lengths(used_q, total, first)

    if varlen:
        options |= {"cu_seqlens_q": starts(used_q), "max_seqlen_q": int(used_q.max())}
        if case.new_kv:
            options["cu_seqlens_k_new"] = starts(used_new)
    fold = packed if varlen else lambda x, _: x
    out = module.flash_attn_with_kvcache(
        fold(q, used_q),
        cache.keys,
        cache.values,
        fold(k, used_new) if case.new_kv else None,
        fold(v, used_new) if case.new_kv else None,
        rotary_cos=cos,
        rotary_sin=sin,
        cache_seqlens=before,
        cache_batch_idx=cache.rows,
        cache_leftpad=leftpad,
        causal=case.causal,
        window_size=score.window,
        rotary_interleaved=case.interleaved,
        **options,
        **{("block_table" if module is flash_attn_2 else "page_table"): cache.table},
    )
    if varlen:
        out = padded(out, used_q, queries)
    wide, _ = textbook(turned_q, expected_k, expected_v, score, lengths)
    same, _ = textbook(turned_q, expected_k, expected_v, score, lengths, wide=False)
    check_error("out", out, same, wide, times, 1e-5)
    assert torch.equal(cache.gathered(cache.values, capacity), expected_v), "values are copied exactly"
    ours = cache.gathered(cache.keys, capacity)
    if rotary and case.new_kv:
        torch.testing.assert_close(ours, expected_k, rtol=1e-3, atol=1e-3)
    else:
        assert torch.equal(ours, expected_k)


def price(case: Case) -> float:
    queries, keys = case.lengths
    return (queries + 8) * keys * (case.d + 64)


def valid_2(case: Case) -> bool:
    if case.new_kv and case.lengths[0] > case.lengths[1]:
        return False
    return (case.new_kv or case.rotary == 0) and not (case.leftpad and case.page) and not (case.batch_idx and case.page)


CACHE_2 = Grid(
    48, 1.5e7, price, valid_2, dtype=[torch.float16], num_splits=[1, 0], heads=HEADS, new_kv=BOOL, alibi=BOOL,
    local=BOOL, causal=BOOL, new_eq_q=BOOL, interleaved=BOOL, rotary=[0.0, 0.5, 1.0], page=[None, 256], leftpad=BOOL,
    batch_idx=BOOL, d=[32, 59, 64, 80, 128, 256], lengths=[*PAIRS, *LONG],
)  # fmt: skip


@over(CACHE_2)
def test_kvcache_2(case: Case) -> None:
    torch.manual_seed(seed_of(case))
    slopes = torch.rand(2, 6) * 0.3 if case.alibi else None
    run(
        case, flash_attn_2, 2, 6, 5 if case.alibi else 3, slopes, False, alibi_slopes=slopes, num_splits=case.num_splits
    )


def valid_3(case: Case) -> bool:
    if case.page is not None and case.lengths[1] % case.page:
        return False
    return valid_2(Case(**{**vars(case), "page": None}))


CACHE_3 = Grid(
    48, 1.5e7, price, valid_3, dtype=[torch.bfloat16], heads=HEADS, new_kv=BOOL,
    mask=[(False, False), (True, False), (False, True)], new_eq_q=BOOL, interleaved=BOOL, rotary=[0.0, 0.5, 1.0],
    page=[None, 1, 4, 128], leftpad=BOOL, batch_idx=BOOL, varlen_q=BOOL, d=[128], num_splits=[1, 3, 0],
    lengths=[*PAIRS, (256, 512), (2048, 3577)],
)  # fmt: skip


@over(CACHE_3)
def test_kvcache_3(case: Case) -> None:
    torch.manual_seed(seed_of(case))
    case.causal, case.local = case.mask
    run(case, flash_attn_3, 5, 6, 2, None, case.varlen_q, num_splits=case.num_splits)
