# SPDX-License-Identifier: Apache-2.0
"""Requests over vLLM's own specs and batches, for the tests of `tessera.vllm`, and what fp64 says of them.

pip install --no-deps vllm==0.33.0   # and the few packages that its registry imports
"""

from __future__ import annotations

import types
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import tessera.vllm  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402

tessera.vllm.register()
BACKEND = AttentionBackendEnum.CUSTOM.get_class()
HEADS, KEY_HEADS, DIM, PAGE, PAGES, COLUMNS = 4, 2, 32, 16, 24, 7
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 12},
    "softcap": {"logits_soft_cap": 1.5},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 3.0, 0.5])},
    "slopes": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
}
# Tokens of each request and rows that pad them: a prefill, a chunk beside decodes, decodes, a speculative step.
STEPS = [([40, 7, 23], 0), ([33, 1, 1], 5), ([1, 1, 1], 0), ([1, 1, 1], 13), ([4, 4, 4], 0)]
# Shapes of captured steps (requests, tokens, most tokens of one) and the tokens of each request in steps that replay
# them; requests of none are not in the batch. vLLM captures with the longest query that a shape can meet.
CAPTURED = {
    "decode": ((4, 4, 1), [[1, 1, 1], [1, 0, 1], [0, 1, 0], [1, 1, 1]]),
    "speculative": ((4, 16, 4), [[4, 4, 4], [4, 0, 4], [2, 4, 1], [0, 3, 0]]),
    "mixed": ((5, 64, 64), [[30, 10, 24], [1, 29, 1], [0, 64, 0], [1, 0, 1], [20, 1, 30]]),
}


class Step(NamedTuple):
    """A batch on the host: q (tokens, heads, dim), k and v (tokens, kv_heads, dim), padded behind; the rest of it is of
    requests alone, `rows` naming those that have tokens, `counts` how many."""

    rows: list[int]
    counts: list[int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor


class Requests:
    """Three requests over a cache that is NaN where nobody wrote, whose layout in memory is heads or tokens outside."""

    def __init__(self, heads_outside=True, dtype=torch.float32, device="cpu", **options):
        self.g = torch.Generator().manual_seed(4)
        self.dtype, self.device, self.options = dtype, torch.device(device), options
        shape = (PAGES, KEY_HEADS, PAGE, 2 * DIM) if heads_outside else (PAGES, PAGE, KEY_HEADS, 2 * DIM)
        cache = torch.full(shape, torch.nan, dtype=dtype, device=device)
        self.cache = cache if heads_outside else cache.transpose(1, 2)
        there = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        self.impl = BACKEND.get_impl_cls()(HEADS, DIM, DIM**-0.5, KEY_HEADS, **there)
        spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=KEY_HEADS, head_size=DIM, dtype=dtype)
        self.builder = BACKEND.get_builder_cls()(spec, ["layer"], types.SimpleNamespace(), self.device)
        pages = torch.randperm(PAGES - 1, generator=self.g)[: 3 * COLUMNS] + 1  # 0 is nobody's
        self.table = pages.reshape(3, COLUMNS).int()
        self.keys, self.values = [torch.empty(0, KEY_HEADS, DIM)] * 3, [torch.empty(0, KEY_HEADS, DIM)] * 3

    def tokens(self, counts, padding=0) -> Step:
        """So many new tokens of each request, which it has from then on."""
        q, k, v = (
            torch.randn((sum(counts) + padding, n, DIM), generator=self.g).to(self.dtype)
            for n in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        rows = [row for row, count in enumerate(counts) if count]
        slots, starts = [], [0]
        for row in rows:
            before, new = len(self.keys[row]), slice(starts[-1], starts[-1] + counts[row])
            places = range(before, before + counts[row])
            slots += [int(self.table[row, at // PAGE]) * PAGE + at % PAGE for at in places]
            self.keys[row] = torch.cat([self.keys[row], k[new]])
            self.values[row] = torch.cat([self.values[row], v[new]])
            starts.append(new.stop)
        lengths = torch.tensor([len(self.keys[row]) for row in rows], dtype=torch.int32)
        numbers = torch.tensor(starts, dtype=torch.int32)
        return Step(
            rows, [counts[row] for row in rows], q, k, v, torch.tensor(slots), numbers, lengths, self.table[rows]
        )

    def run(self, step: Step, causal=True):
        """The output of a step that runs at once."""
        q, k, v, starts, lengths, table = (
            x.to(self.device) for x in (step.q, step.k, step.v, step.starts, step.lengths, step.table)
        )
        padding = len(q) - len(step.slots)
        slots = torch.nn.functional.pad(step.slots, (0, padding), value=-1).to(self.device)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=step.starts,
            seq_lens=lengths,
            num_reqs=len(step.rows),
            num_actual_tokens=len(step.slots),
            max_query_len=max(step.counts),
            max_seq_len=int(step.lengths.max()) + 9,  # may be an upper bound
            block_table_tensor=table,
            slot_mapping=slots,
            causal=causal,
        )
        metadata = self.builder.build(0, common)
        self.impl.do_kv_cache_update(None, k, v, self.cache, slots)
        output = torch.full((len(q), HEADS * DIM), torch.nan, dtype=self.dtype, device=self.device)
        assert self.impl.forward(None, q, k, v, self.cache, metadata, output) is output
        return output[: len(step.slots)].unflatten(1, (HEADS, DIM))

    def step(self, counts, padding=0, causal=True):
        """(output, what fp64 says) of so many tokens of each request."""
        step = self.tokens(counts, padding)
        return self.run(step, causal), self.textbook(step, causal)

    def textbook(self, step: Step, causal=True):
        parts = step.q[: len(step.slots)].split(step.counts)
        made = [self.textbook_of(q, row, causal) for q, row in zip(parts, step.rows, strict=True)]
        return torch.cat(made).to(self.dtype)

    def textbook_of(self, q, row, causal):
        k, v = (x[row].double().repeat_interleave(HEADS // KEY_HEADS, 1) for x in (self.keys, self.values))
        scores = torch.einsum("ihd,jhd->hij", q.double(), k) * DIM**-0.5
        if cap := self.options.get("logits_soft_cap"):
            scores = cap * torch.tanh(scores / cap)
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        if (slopes := self.options.get("alibi_slopes")) is not None:
            scores = scores - torch.tensor(slopes).double()[:, None, None] * distance.abs()
        window = self.options.get("sliding_window") or len(k)
        visible = (distance < window) & (distance >= 0 if causal else distance > -window)
        scores = scores.masked_fill(~visible, -torch.inf)
        norm = scores.logsumexp(-1, keepdim=True)
        if (sinks := self.options.get("sinks")) is not None:
            norm = torch.logaddexp(norm, sinks.double()[:, None, None])
        return torch.einsum("hij,jhd->ihd", (scores - norm).exp(), v)


class Captured:
    """Steps of one shape whose arrays stay where they lie, as vLLM's runners capture and replay them.

    Captured is a dummy batch: its tokens are dealt to all rows, nothing is before them, no page or slot is anybody's.
    Replayed are steps of as many requests and tokens at most; rows behind them have no queries and no keys.
    """

    def __init__(self, requests: Requests, rows: int, tokens: int, longest: int):
        self.requests = requests
        where = {"device": requests.device}
        self.q, self.k, self.v = (
            torch.zeros(tokens, heads, DIM, dtype=requests.dtype, **where) for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        self.output = torch.zeros(tokens, HEADS * DIM, dtype=requests.dtype, **where)
        self.starts = (torch.arange(rows + 1, **where) * tokens // rows).int()
        self.lengths = self.starts.diff()
        self.table = torch.zeros(rows, COLUMNS, dtype=torch.int32, **where)
        self.slots = torch.full((tokens,), -1, **where)
        self.metadata = requests.builder.build_for_cudagraph_capture(
            CommonAttentionMetadata(
                query_start_loc=self.starts,
                query_start_loc_cpu=self.starts.cpu(),  # replays do not change it
                seq_lens=self.lengths,
                num_reqs=rows,
                num_actual_tokens=tokens,
                max_query_len=longest,
                max_seq_len=COLUMNS * PAGE,
                block_table_tensor=self.table,
                slot_mapping=self.slots,
            )
        )

    def run(self):
        """What is captured."""
        r = self.requests
        r.impl.do_kv_cache_update(None, self.k, self.v, r.cache, self.slots)
        r.impl.forward(None, self.q, self.k, self.v, r.cache, self.metadata, self.output)

    def fill(self, step: Step):
        tokens, live = len(step.slots), len(step.rows)
        for mine, its in ((self.q, step.q), (self.k, step.k), (self.v, step.v), (self.slots, step.slots)):
            mine[:tokens].copy_(its)
        self.slots[tokens:].fill_(-1)
        self.starts[: live + 1].copy_(step.starts)
        self.starts[live + 1 :].fill_(tokens)
        for mine, its in ((self.lengths, step.lengths), (self.table, step.table)):
            mine[:live].copy_(its)
            mine[live:].zero_()
        self.output.fill_(torch.nan)


def check_captured_steps(requests: Requests, kind: str, capture):
    """Steps of a shape are right that replay what `capture` makes of a function: they are those that run at once."""
    shape, steps = CAPTURED[kind]
    captured = Captured(requests, *shape)
    replay = capture(captured.run)
    for counts in steps:
        step = requests.tokens(counts)
        captured.fill(step)
        replay()
        got = captured.output[: len(step.slots)].unflatten(1, (HEADS, DIM))
        close(got, requests.textbook(step))
        close(requests.run(step), got.cpu())


def close(got, want):
    tolerance = {torch.float32: (1e-4, 1e-5), torch.float16: (4e-3, 4e-3), torch.bfloat16: (2e-2, 2e-2)}[want.dtype]
    torch.testing.assert_close(got.cpu(), want, rtol=tolerance[0], atol=tolerance[1])
