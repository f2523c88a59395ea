# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache of versions 2 and 3 over flash-attn's own grids of parameters."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

import flash_grid  # noqa: E402
from flash_grid import BOOL, HEAD_COUNTS, HEADS, Case, Grid, chunk, noise, over, window  # noqa: E402
from flash_reference import Problem, shared  # noqa: E402
from flash_textbook import Lengths, Score, packed, padded, random_lengths, rotated, starts  # noqa: E402
from tessera.compat import flash_attn_2, flash_attn_3  # noqa: E402

pytest_generate_tests = flash_grid.generate
threads = flash_grid.threads

PAIRS = [(1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000), (128, 128)]
LONG = [(1, 128 * 1024), (16, 128 * 1024)]


class Cache(NamedTuple):
    """A cache as the call gets it; `where` are the places of its rows or pages that the sequences use, in order."""

    keys: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor | None
    table: torch.Tensor | None
    where: torch.Tensor | None

    @staticmethod
    def of(case: Case, keys: torch.Tensor, values: torch.Tensor) -> Cache:
        """Lays out keys and values (batch, capacity, heads, dim); what no sequence uses is NaN."""
        batch, capacity = keys.shape[:2]
        if case.page is None and not case.batch_idx:
            return Cache(keys.clone(), values.clone(), None, None, None)
        page, columns = (capacity, 1) if case.page is None else (case.page, -(-capacity // case.page))
        rows = batch * 2 if case.batch_idx else batch
        spare = rows if case.page is None else rows * columns + 3
        pages = torch.randperm(spare)[: rows * columns]
        table = pages.reshape(rows, columns)
        chosen = torch.randperm(rows)[:batch]
        where = table[chosen].flatten() if case.batch_idx else pages
        pools = []
        for x in (keys, values):
            room = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, columns * page - capacity)).unflatten(1, (columns, page))
            pool = torch.full((spare, page, *x.shape[2:]), float("nan"), dtype=x.dtype)
            pool[where] = room.flatten(0, 1)
            pools.append(pool)
        if case.page is None:
            return Cache(*pools, where.to(torch.int32), None, where)
        return Cache(*pools, chosen.to(torch.int32) if case.batch_idx else None, table.to(torch.int32), where)

    def gathered(self, pool: torch.Tensor, batch: int, capacity: int) -> torch.Tensor:
        """(batch, capacity, heads, dim)."""
        return pool if self.where is None else pool[self.where].reshape(batch, -1, *pool.shape[2:])[:, :capacity]


def lengths_before(case: Case, batch: int, behind: int, capacity: int) -> torch.Tensor:
    """Tokens in the cache: at least one without new ones, and room for those `behind`, new or of rotated queries."""
    if not case.new_kv:
        return torch.randint(1, capacity + 1, (batch,), dtype=torch.int32)
    return torch.randint(0, capacity - behind + 1, (batch,), dtype=torch.int32)


def padding_before(case: Case, lengths: torch.Tensor) -> torch.Tensor | None:
    if not case.leftpad:
        return None
    return torch.tensor([int(torch.randint(0, max(int(n), 1), (1,))) for n in lengths], dtype=torch.int32)


class Step(NamedTuple):
    """A call's inputs but for the layout of the cache, and `problem`, whose keys and values are those after it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    used_q: torch.Tensor
    used_new: torch.Tensor
    before: torch.Tensor
    leftpad: torch.Tensor | None
    tables: tuple[torch.Tensor | None, torch.Tensor | None]
    problem: Problem


def draw(case: Case, batch: int, alibi: bool = False, varlen: bool = False, chunked: bool = False) -> Step:
    """The cache that the textbook sees is updated row by row."""
    queries, capacity = case.lengths
    heads, kv = HEAD_COUNTS[case.heads]
    rotary = int(case.rotary * case.d) // 16 * 16
    slopes = torch.rand(batch, heads) * 0.3 if alibi else None
    score = Score(case.causal, window(case.local, capacity), 0.0, slopes, chunk=chunk(chunked, capacity))
    q = noise(case, batch, queries, heads, case.d)
    used_q = random_lengths(queries, batch) if varlen else torch.full((batch,), queries)
    new = queries if case.new_eq_q else int(torch.randint(1, queries + 1, (1,)))
    k, v = (noise(case, batch, new, kv, case.d) for _ in range(2))
    used_new = random_lengths(new, batch) if varlen else torch.full((batch,), new)
    keys, values = (noise(case, batch, capacity, kv, case.d) for _ in range(2))
    moving = case.causal or case.local or chunked
    before = lengths_before(case, batch, queries if moving and rotary > 1 else new, capacity)
    leftpad = padding_before(case, before)

    expected_k, expected_v = (keys.clone(), values.clone()) if case.new_kv else (keys, values)
    turned_q, turned_k = q, k
    cos = sin = None
    if rotary:
        positions = -(-capacity // 256) * 256  # as many as pages of up to 256 have places
        angle = torch.rand(positions, rotary // 2) * 2 * math.pi
        cos, sin = torch.cos(angle).to(case.dtype), torch.sin(angle).to(case.dtype)
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
    problem = Problem(turned_q, expected_k, expected_v, score, lengths=Lengths(used_q, total, first))
    return Step(q, k, v, keys, values, used_q, used_new, before, leftpad, (cos, sin), problem)


def call(case: Case, module: Any, step: Step, cache: Cache, varlen: bool, **options: Any) -> torch.Tensor:
    """out, padded."""
    if varlen:
        options |= {"cu_seqlens_q": starts(step.used_q), "max_seqlen_q": int(step.used_q.max())}
        if case.new_kv:
            options["cu_seqlens_k_new"] = starts(step.used_new)
    fold = packed if varlen else lambda x, _: x
    out = module.flash_attn_with_kvcache(
        fold(step.q, step.used_q),
        cache.keys,
        cache.values,
        fold(step.k, step.used_new) if case.new_kv else None,
        fold(step.v, step.used_new) if case.new_kv else None,
        rotary_cos=step.tables[0],
        rotary_sin=step.tables[1],
        cache_seqlens=step.before,
        cache_batch_idx=cache.rows,
        cache_leftpad=step.leftpad,
        causal=case.causal,
        window_size=step.problem.score.window,
        rotary_interleaved=case.interleaved,
        num_splits=case.num_splits,
        **options,
        **{("block_table" if module is flash_attn_2 else "page_table"): cache.table},
    )
    return padded(out, step.used_q, case.lengths[0]) if varlen else out


def check(case: Case, step: Step, cache: Cache, out: torch.Tensor, times: float) -> None:
    step.problem.known()["out"].check("out", out, times, 1e-5)
    batch, capacity = step.keys.shape[:2]
    ours = cache.gathered(cache.values, batch, capacity)
    assert torch.equal(ours, step.problem.v), "values are copied exactly"
    ours, expected = cache.gathered(cache.keys, batch, capacity), step.problem.k
    if step.tables[0] is not None and case.new_kv:
        for b in range(batch):
            span = slice(int(step.before[b]), int(step.before[b] + step.used_new[b]))
            torch.testing.assert_close(ours[b, span], expected[b, span], rtol=1e-3, atol=1e-3)
            ours[b, span] = expected[b, span]
    assert torch.equal(ours, expected), "keys are copied exactly, old ones untouched"


def ignored(case: Case) -> set[str]:
    """What neither the inputs nor the textbook know of."""
    names = {"num_splits", "page", "batch_idx"}
    if case.rotary == 0:
        names.add("interleaved")
    if not case.new_kv:
        names.add("new_eq_q")
    return names


def price(case: Case) -> float:
    queries, keys = case.lengths
    return (queries + 8) * keys * (case.d + 64)


def valid_2(case: Case) -> bool:
    if case.page is not None and (case.leftpad or case.batch_idx):
        return False
    return valid_lengths(case)


def valid_lengths(case: Case) -> bool:
    if case.new_kv and case.lengths[0] > case.lengths[1]:
        return False
    return case.new_kv or case.rotary == 0


CACHE_2 = Grid(
    48, 1.5e7, price, valid_2, ignored, 5, num_splits=[1, 0], page=[None, 256], batch_idx=BOOL, interleaved=BOOL,
    new_eq_q=BOOL, dtype=[torch.float16], heads=HEADS, new_kv=BOOL, alibi=BOOL, local=BOOL, causal=BOOL,
    rotary=[0.0, 0.5, 1.0], leftpad=BOOL, d=[32, 59, 64, 80, 128, 256], lengths=[*PAIRS, *LONG],
)  # fmt: skip


@over(CACHE_2)
def test_kvcache_2(case: Case) -> None:
    batch = 2 if case.lengths not in LONG else 1
    step = shared(case, lambda: draw(case, batch, alibi=case.alibi))
    cache = Cache.of(case, step.keys, step.values)
    out = call(case, flash_attn_2, step, cache, False, alibi_slopes=step.problem.score.slopes)
    check(case, step, cache, out, 5 if case.alibi else 3)


def valid_3(case: Case) -> bool:
    if case.page is not None and case.lengths[1] % case.page:
        return False
    return valid_lengths(case)


CACHE_3 = Grid(
    48, 1.5e7, price, valid_3, ignored, 5, num_splits=[1, 3, 0], page=[None, 1, 4, 128], batch_idx=BOOL,
    interleaved=BOOL, new_eq_q=BOOL, dtype=[torch.bfloat16], heads=HEADS, new_kv=BOOL,
    chunked=BOOL, mask=[(False, False), (True, False), (False, True)], rotary=[0.0, 0.5, 1.0], leftpad=BOOL,
    varlen_q=BOOL, d=[128], lengths=[*PAIRS, (256, 512), (2048, 3577)],
)  # fmt: skip


@over(CACHE_3)
def test_kvcache_3(case: Case) -> None:
    case.causal, case.local = case.mask
    batch = 3 if case.varlen_q else 2
    step = shared(case, lambda: draw(case, batch, varlen=case.varlen_q, chunked=case.chunked))
    cache = Cache.of(case, step.keys, step.values)
    out = call(case, flash_attn_3, step, cache, case.varlen_q, attention_chunk=step.problem.score.chunk)
    check(case, step, cache, out, 2)
