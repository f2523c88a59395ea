# SPDX-License-Identifier: Apache-2.0
"""flash-attn 3's and 4's functions over their own grids, less what is refused: qv, fp8."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flash_grid  # noqa: E402
from flash_grid import (  # noqa: E402
    BOOL,
    HALF,
    HEADS,
    Case,
    Grid,
    batch_of,
    cheap,
    chunk,
    heads_of,
    noise,
    over,
    window,
)
from flash_reference import Known, Problem, check_error, shared  # noqa: E402
from flash_textbook import Lengths, Score, packed, random_lengths, starts, worst  # noqa: E402
from tessera.compat import flash_attn_3, flash_attn_4  # noqa: E402

pytest_generate_tests = flash_grid.generate
threads = flash_grid.threads

PAIRS = [
    (64, 128), (256, 256), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (640, 128), (512, 256),
    (1024, 1024), (1023, 1024), (1024, 1023), (4096, 4096),
]  # fmt: skip
DENSE_PAIRS = [*PAIRS, (1, 1), (128, 192), (239, 1), (799, 3), (113, 128), (384, 256), (4224, 4224)]
VARLEN_PAIRS = [*PAIRS, (1, 1), (1, 3), (2, 1), (511, 1), (3, 513), (128, 128), (307, 256), (2048, 2048)]
FOUR_PAIRS = [*DENSE_PAIRS, (3, 3), (64, 32), (64, 1), (128, 128), (255, 256), (2048, 2048)]


def price(case: Case) -> float:
    queries, keys = case.lengths
    return queries * keys * (case.d + 64)


def dims_v(d: int) -> list[int]:
    """Head dims of v that flash-attn 3 tries beside d."""
    return [128, d] if 128 < d <= 192 else [256, 512, d] if d <= 64 else [d]


def inputs_of(case: Case, batch: int, groups: int = 2) -> list[Any]:
    """q, k, v and the gradient of out, padded; `groups` as in :func:`heads_of`. None for a gradient where GPUs have no
    backward."""
    queries, keys = case.lengths
    heads, kv = heads_of(case, 6, groups)
    q = noise(case, batch, queries, heads, case.d, scale=case.softcap / 4 or 1)
    k, v = (noise(case, batch, keys, kv, d) for d in (case.d, case.dim_v))
    if case.dim_v > 256 and torch.get_default_device().type == "cuda":
        return [q, k, v, None]
    return [q, k, v, noise(case, batch, queries, heads, case.dim_v)]


def gradients(out: torch.Tensor, leaves: list[torch.Tensor], grad: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return () if grad is None else torch.autograd.grad(out, leaves, grad)


def check(
    case: Case, known: dict[str, Known], ours: tuple[torch.Tensor, ...], fold: Callable[[str, torch.Tensor], Any]
) -> None:
    """`ours` is (out, dq, dk, dv) or (out,); `fold` takes a padded tensor of that name to the shape of ours."""
    times, more = (2, 0.0) if case.softcap == 0 else (3, 3e-4)
    for name, mine in zip(("out", "dq", "dk", "dv"), ours, strict=False):
        at = known[name].folded(partial(fold, name))
        at_least = at.allowance + 1e-5 + (0.0 if name == "out" else more)
        at.check(name, mine, times, at_least)


def score_3(case: Case) -> Score:
    keys = case.lengths[1]
    return Score(case.causal, window(case.local, keys), case.softcap, chunk=chunk(case.chunked, keys))


def valid_3(case: Case) -> bool:
    return case.dim_v in dims_v(case.d)


DENSE = Grid(
    28, 2e7, price, valid_3, ignored=lambda _: ("pack_gqa", "num_splits"), inner=2, pack_gqa=BOOL, num_splits=[1, 3],
    dtype=HALF, heads=HEADS, softcap=[0.0, 15.0], chunked=BOOL, local=BOOL, causal=BOOL, d=[64, 96, 128, 192, 256],
    dim_v=[64, 96, 128, 192, 256, 512], lengths=DENSE_PAIRS,
)  # fmt: skip


@over(DENSE)
def test_dense_3(case: Case) -> None:
    def draw() -> Problem:
        *inputs, grad = inputs_of(case, batch_of(case, 9))
        return Problem(*inputs, score_3(case), grad)

    problem = shared(case, draw)
    leaves = problem.leaves()
    out, lse = flash_attn_3.flash_attn_func(
        *leaves,
        causal=case.causal,
        window_size=problem.score.window,
        attention_chunk=problem.score.chunk,
        softcap=case.softcap,
        pack_gqa=case.pack_gqa,
        num_splits=case.num_splits,
        return_attn_probs=True,
    )
    assert lse.shape == (out.shape[0], out.shape[2], case.lengths[0])
    check(case, problem.known(), (out, *gradients(out, leaves, problem.grad)), lambda _, x: x)


VARLEN = Grid(
    24, 2e7, price, valid_3, ignored=lambda _: ("num_splits",), inner=1, num_splits=[1, 3, 0], dtype=HALF,
    heads=HEADS, softcap=[0.0, 15.0], chunked=BOOL, local=BOOL, causal=BOOL, unused=BOOL, d=[64, 96, 128, 192, 256],
    dim_v=[64, 96, 128, 192, 256, 512], lengths=VARLEN_PAIRS,
)  # fmt: skip


@over(VARLEN)
def test_varlen_3(case: Case) -> None:
    """Packed sequences, some of no key; with `unused`, each has tokens behind the used ones."""
    queries, keys = case.lengths
    # Two sequences have no key. If the others were few, and used few tokens, the textbook's error would be that of few
    # numbers: where a case takes next to nothing there are as many as in flash-attn 4's test.
    batch, fewest = (49 if price(case) < 1e4 else 9, 1) if cheap(case) else (3, 20)

    def draw() -> tuple[torch.Tensor, torch.Tensor, Problem]:
        *inputs, grad = inputs_of(case, batch)
        score = score_3(case)
        room_q, room_k = random_lengths(queries, batch), random_lengths(keys, batch, zero=True)
        used_q, used_k = (
            torch.minimum(room, torch.randint_like(room, fewest, max(int(room.max()), fewest) + 1))
            if case.unused
            else room
            for room in (room_q, room_k)
        )
        if case.unused:
            used_q[0] = 0  # has no key either
        return room_q, room_k, Problem(*inputs, score, grad, Lengths(used_q, used_k, used_k * 0))

    room_q, room_k, problem = shared(case, draw)
    used_q, used_k, _ = problem.lengths
    rooms = (room_q, room_k, room_k)
    grad = None if problem.grad is None else packed(problem.grad, room_q)
    tokens = [packed(x, n) for x, n in zip((problem.q, problem.k, problem.v), rooms, strict=True)]
    tokens = [x.requires_grad_(grad is not None) for x in tokens]
    out, lse = flash_attn_3.flash_attn_varlen_func(
        *tokens,
        starts(room_q),
        starts(room_k),
        queries,
        keys,
        seqused_q=used_q.to(torch.int32) if case.unused else None,
        seqused_k=used_k.to(torch.int32) if case.unused else None,
        causal=case.causal,
        window_size=problem.score.window,
        attention_chunk=problem.score.chunk,
        softcap=case.softcap,
        num_splits=case.num_splits,
        return_attn_probs=True,
    )
    assert lse.shape == (out.shape[1], out.shape[0])
    ours = (out, *gradients(out, tokens, grad))
    check(case, problem.known(), ours, lambda name, x: packed(x, room_q if name in ("out", "dq") else room_k))


# One in 128 of the draws of 9 sequences of up to one key has no key at all; of this case all have none.
NO_KEY = VARLEN.at(0).values | {"heads": "mqa", "chunked": True, "local": True, "unused": True, "lengths": (511, 1)}


# The grid is a copy, so that no other case shares what is drawn here.
@pytest.mark.parametrize("case", [Case(copy.copy(VARLEN), NO_KEY)], ids=str)
def test_varlen_3_of_no_key(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    some = random_lengths
    monkeypatch.setitem(globals(), "random_lengths", lambda n, batch, zero=False: some(n, batch) * (not zero))
    test_varlen_3(case)
    assert shared(case, lambda: pytest.fail("drawn by the test"))[1].sum() == 0


COMBINE = Grid(
    20, 2e6, lambda case: case.seqlen * case.parts * case.d, dtype=[torch.float32, *HALF],
    d=[64, 96, 128, 192, 256, 512],
    seqlen=[1, 2, 3, 32, 64, 256, 113, 108, 640, 1024], parts=[1, 2, 3, 5, 17, 32, 55, 97, 133],
)  # fmt: skip


@over(COMBINE)
@pytest.mark.parametrize("version", [flash_attn_3, flash_attn_4], ids=["3", "4"])
def test_combine(case: Case, version) -> None:
    torch.manual_seed(case.seed)
    batch, heads = 2, 2
    parts = torch.randn(case.parts, batch, heads, case.seqlen, case.d).transpose(2, 3)
    lse_parts = torch.randn(case.parts, batch, heads * 2, case.seqlen).transpose(-1, -2)[..., :heads]
    lse_parts[case.parts // 2 :, : batch // 2] = -float("inf")
    out, lse = version.flash_attn_combine(parts, lse_parts, out_dtype=case.dtype)
    wide_lse = torch.logsumexp(lse_parts, 0)
    weights = torch.exp(lse_parts - wide_lse).nan_to_num(0.0)
    wide = torch.einsum("p...,p...d->...d", weights, parts)
    assert out.dtype == case.dtype and lse.shape == (batch, case.seqlen, heads)
    torch.testing.assert_close(lse, wide_lse, atol=1e-5, rtol=1e-5)
    check_error("out", out, wide, 2 * worst(wide.to(case.dtype), wide) + 1e-5)


def valid_4(case: Case) -> bool:
    return not (case.local and case.causal) and case.dim_v in {192: [128], 128: [64, 128]}.get(case.d, [case.d])


FOUR = Grid(
    24, 2e7, price, valid_4, ignored=lambda _: ("deterministic",), inner=1, deterministic=BOOL,
    dtype=[torch.bfloat16], heads=HEADS, sink=BOOL, softcap=[0.0, 15.0], local=[0, 1, 2, 3], causal=BOOL,
    d=[64, 96, 128, 192, 256], dim_v=[64, 96, 128, 256], lengths=FOUR_PAIRS,
)  # fmt: skip


@over(FOUR)
def test_dense_4(case: Case) -> None:
    """`local` 1: both ends of the window, 2: left only, 3: right only."""

    def draw() -> tuple[tuple[int | None, int | None], Problem]:
        *inputs, grad = inputs_of(case, batch_of(case, 9), 3)
        left, right = torch.randint(0, case.lengths[1], (2,)).tolist()
        ends = {0: (None, None), 1: (left, right), 2: (left, None), 3: (None, right)}[case.local]
        sink = torch.randn(inputs[0].shape[2]).to(case.dtype) if case.sink else None
        score = Score(case.causal, tuple(-1 if end is None else end for end in ends), case.softcap, sink=sink)
        return ends, Problem(*inputs, score, grad)

    ends, problem = shared(case, draw)
    leaves = problem.leaves()
    out, lse = flash_attn_4.flash_attn_func(
        *leaves,
        causal=case.causal,
        window_size=ends,
        learnable_sink=problem.score.sink,
        softcap=case.softcap,
        deterministic=case.deterministic,
        return_lse=True,
    )
    assert lse.shape == (out.shape[0], out.shape[2], case.lengths[0])
    check(case, problem.known(), (out, *gradients(out, leaves, problem.grad)), lambda _, x: x)
