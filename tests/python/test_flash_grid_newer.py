# SPDX-License-Identifier: Apache-2.0
"""flash-attn 3's and 4's functions over their own grids, less what is refused: qv, fp8, attention_chunk."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import flash_grid  # noqa: E402
from flash_grid import BOOL, HALF, HEADS, Case, Grid, heads_kv, over, seed_of, window  # noqa: E402
from flash_textbook import Lengths, Score, check_error, packed, random_lengths, starts, textbook  # noqa: E402
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


def allowance(wide: torch.Tensor) -> float:
    """Twice what adding and subtracting 0.3 costs in fp32."""
    return 2 * ((wide + 0.3 - 0.3) - wide).abs().max().item() if wide.numel() else 0.0


def inputs_of(case: Case, batch: int, heads: int, kv: int, dim_v: int) -> list[torch.Tensor]:
    queries, keys = case.lengths
    q = torch.randn(batch, queries, heads, case.d) * (case.softcap / 4 or 1)
    k, v = torch.randn(batch, keys, kv, case.d), torch.randn(batch, keys, kv, dim_v)
    return [x.to(case.dtype).requires_grad_() for x in (q, k, v)]


def check_gradients(case: Case, ours, wide_out, same_out, inputs, grad, spread) -> None:
    """dq, dk, dv against the textbook; `spread` takes a padded gradient to the shape of ours."""
    times, more = (2, 0.0) if case.softcap == 0 else (3, 3e-4)
    wide = torch.autograd.grad(wide_out, inputs, grad.float())
    same = torch.autograd.grad(same_out, inputs, grad)
    for name, mine, b, c in zip(("dq", "dk", "dv"), ours, same, wide, strict=True):
        b, c = spread(name, b), spread(name, c)
        check_error(name, mine, b, c, times, allowance(c) + more + 1e-5)


def valid_3(case: Case) -> bool:
    return case.dim_v in dims_v(case.d)


DENSE = Grid(
    28, 2e7, price, valid_3, dtype=HALF, heads=HEADS, softcap=[0.0, 15.0], local=BOOL,
    causal=BOOL, d=[64, 96, 128, 192, 256], dim_v=[64, 96, 128, 192, 256, 512], pack_gqa=BOOL, num_splits=[1, 3],
    lengths=DENSE_PAIRS,
)  # fmt: skip


@over(DENSE)
def test_dense_3(case: Case) -> None:
    torch.manual_seed(seed_of(case))
    q, k, v = inputs_of(case, 2, 6, heads_kv(case.heads, 6, 3), case.dim_v)
    score = Score(case.causal, window(case.local, case.lengths[1]), case.softcap)
    out, lse = flash_attn_3.flash_attn_func(
        q,
        k,
        v,
        causal=case.causal,
        window_size=score.window,
        softcap=case.softcap,
        pack_gqa=case.pack_gqa,
        num_splits=case.num_splits,
        return_attn_probs=True,
    )
    assert lse.shape == (2, 6, case.lengths[0])
    wide, same = (textbook(q, k, v, score, wide=wide)[0] for wide in (True, False))
    check_error("out", out, same, wide, 2 if case.softcap == 0 else 3, allowance(wide) + 1e-5)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v), grad)
    check_gradients(case, ours, wide, same, (q, k, v), grad, lambda _, x: x)


VARLEN = Grid(
    24, 2e7, price, valid_3, dtype=HALF, heads=HEADS, softcap=[0.0, 15.0], local=BOOL,
    causal=BOOL, unused=BOOL, d=[64, 96, 128, 192, 256], dim_v=[64, 96, 128, 192, 256, 512], num_splits=[1, 3, 0],
    lengths=VARLEN_PAIRS,
)  # fmt: skip


@over(VARLEN)
def test_varlen_3(case: Case) -> None:
    """Packed sequences, some of no key; with `unused`, each has tokens behind the used ones."""
    torch.manual_seed(seed_of(case))
    batch, (queries, keys) = 3, case.lengths
    q, k, v = inputs_of(case, batch, 6, heads_kv(case.heads, 6, 3), case.dim_v)
    room_q, room_k = random_lengths(queries, batch), random_lengths(keys, batch, zero=True)
    used_q, used_k = (
        torch.minimum(room, torch.randint_like(room, 0, int(room.max()) + 1)) for room in (room_q, room_k)
    )
    if not case.unused:
        used_q, used_k = room_q, room_k
    tokens = [packed(x.detach(), n).requires_grad_() for x, n in zip((q, k, v), (room_q, room_k, room_k), strict=True)]
    score = Score(case.causal, window(case.local, keys), case.softcap)
    out, lse = flash_attn_3.flash_attn_varlen_func(
        *tokens,
        starts(room_q),
        starts(room_k),
        queries,
        keys,
        seqused_q=used_q.to(torch.int32) if case.unused else None,
        seqused_k=used_k.to(torch.int32) if case.unused else None,
        causal=case.causal,
        window_size=score.window,
        softcap=case.softcap,
        num_splits=case.num_splits,
        return_attn_probs=True,
    )
    assert lse.shape == (6, tokens[0].shape[0])
    lengths = Lengths(used_q, used_k, used_k * 0)
    wide, same = (textbook(q, k, v, score, lengths, wide=wide)[0] for wide in (True, False))
    at = packed(wide, room_q)
    check_error("out", out, packed(same, room_q), at, 2 if case.softcap == 0 else 3, allowance(at) + 1e-5)
    grad = torch.randn_like(q.detach()[..., :1]).expand_as(wide).to(case.dtype)
    ours = torch.autograd.grad(out, tokens, packed(grad, room_q))
    check_gradients(
        case, ours, wide, same, (q, k, v), grad, lambda name, x: packed(x, room_q if name == "dq" else room_k)
    )


COMBINE = Grid(
    20, 2e6, lambda case: case.seqlen * case.parts * case.d, dtype=[torch.float32, *HALF],
    d=[64, 96, 128, 192, 256, 512],
    seqlen=[1, 2, 3, 32, 64, 256, 113, 108, 640, 1024], parts=[1, 2, 3, 5, 17, 32, 55, 97, 133],
)  # fmt: skip


@over(COMBINE)
@pytest.mark.parametrize("version", [flash_attn_3, flash_attn_4], ids=["3", "4"])
def test_combine(case: Case, version) -> None:
    torch.manual_seed(seed_of(case))
    batch, heads = 3, 4
    parts = torch.randn(case.parts * 2, batch, heads, case.seqlen, case.d).transpose(2, 3)[: case.parts]
    lse_parts = torch.randn(case.parts, batch, heads * 2, case.seqlen).transpose(-1, -2)[..., :heads]
    lse_parts[case.parts // 2 :, : batch // 3] = -float("inf")
    out, lse = version.flash_attn_combine(parts, lse_parts, out_dtype=case.dtype)
    wide_lse = torch.logsumexp(lse_parts, 0)
    weights = torch.exp(lse_parts - wide_lse).nan_to_num(0.0)
    wide = (weights[..., None] * parts).sum(0)
    assert out.dtype == case.dtype and lse.shape == (batch, case.seqlen, heads)
    torch.testing.assert_close(lse, wide_lse, atol=1e-5, rtol=1e-5)
    check_error("out", out, wide.to(case.dtype), wide, 2, 1e-5)


def valid_4(case: Case) -> bool:
    return not (case.local and case.causal) and case.dim_v in {192: [128], 128: [64, 128]}.get(case.d, [case.d])


FOUR = Grid(
    24, 2e7, price, valid_4, dtype=[torch.bfloat16], heads=HEADS, sink=BOOL, deterministic=BOOL,
    softcap=[0.0, 15.0], local=[0, 1, 2, 3], causal=BOOL,
    d=[64, 96, 128, 192, 256], dim_v=[64, 96, 128, 256], lengths=FOUR_PAIRS,
)  # fmt: skip


@over(FOUR)
def test_dense_4(case: Case) -> None:
    """`local` 1: both ends of the window, 2: left only, 3: right only."""
    torch.manual_seed(seed_of(case))
    q, k, v = inputs_of(case, 2, 6, heads_kv(case.heads, 6, 2), case.dim_v)
    left, right = torch.randint(0, case.lengths[1], (2,)).tolist()
    ends = {0: (None, None), 1: (left, right), 2: (left, None), 3: (None, right)}[case.local]
    sink = torch.randn(6).to(case.dtype) if case.sink else None
    score = Score(case.causal, tuple(-1 if end is None else end for end in ends), case.softcap, sink=sink)
    out, lse = flash_attn_4.flash_attn_func(
        q,
        k,
        v,
        causal=case.causal,
        window_size=ends,
        learnable_sink=sink,
        softcap=case.softcap,
        deterministic=case.deterministic,
        return_lse=True,
    )
    assert lse.shape == (2, 6, case.lengths[0])
    wide, same = (textbook(q, k, v, score, wide=wide)[0] for wide in (True, False))
    check_error("out", out, same, wide, 2 if case.softcap == 0 else 3, allowance(wide) + 1e-5)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v), grad)
    check_gradients(case, ours, wide, same, (q, k, v), grad, lambda _, x: x)
