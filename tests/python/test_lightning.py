# SPDX-License-Identifier: Apache-2.0
"""The calls of vLLM, SGLang and cuLA for lightning attention, against the recurrence in float64."""

from __future__ import annotations

import inspect

import pytest

torch = pytest.importorskip("torch")

from tessera.compat import lightning  # noqa: E402

HEADS, DIM, SLOTS = 3, 16, 6
SLOPES = torch.tensor([0.05, 0.4, 1.5])
PLACES = torch.tensor([4, 0, -1, 2], dtype=torch.int32)

SIGNATURES = {
    "lightning_attention": "q, k, v, ed, block_size=256, kv_history=None",
    "linear_decode_forward_triton": "q, k, v, kv_caches, slope_rate, slot_idx, BLOCK_SIZE=32",
    "seg_la_fwd": (
        "q, k, v, s, decay_scales, meta, caches=None, cache_indices=None, softmax_scale=None, decouple=False, "
        "track_lens=None, track_state_indices=None"
    ),
    "lightning_attn_fwd": ("Q, K, V, decay, scale=1.0, initial_state=None, output_final_state=False, chunk_size=64"),
    "lightning_attn_fwd_varlen": (
        "Q, K, V, decay, cu_seqlens, scale=1.0, state_pool=None, initial_state_indices=None, chunk_size=64, "
        "persistent=True"
    ),
    "linear_attention_decode": (
        "q, k, v, s, out, softmax_scale, stride_q, stride_k, stride_v, stride_s, stride_o, s_offsets, decay_scales, "
        "HEAD_DIM, K_SPLIT_DIM, V_SPLIT_DIM"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = inspect.signature(getattr(lightning, name)).parameters.values()
    words = (x.name if x.default is x.empty else f"{x.name}={x.default!r}" for x in parameters)
    assert ", ".join(words) == SIGNATURES[name]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def recurrence(q, k, v, state, scale):
    """Of one sequence: q, k, v (t, h, d), state (h, d, dv); out (t, h, dv) and the last state, in float64."""
    q, k, v, state = (x.double() for x in (q, k, v, state))
    out = torch.empty_like(v)
    for t in range(q.shape[0]):
        state = torch.exp(-SLOPES.double())[:, None, None] * state + k[t, :, :, None] * v[t, :, None, :]
        out[t] = torch.einsum("hd,hde->he", scale * q[t], state)
    return out, state


def close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def step_rows(dtype=torch.float32):
    return [normal(4, HEADS, DIM, seed=seed, dtype=dtype) for seed in range(3)]


def after_a_step(rows, pool, scale):
    """Results (b, h, dv) and the pool (slots, h, d, dv), of a decode step at PLACES."""
    out, pool = torch.zeros(4, HEADS, DIM, dtype=torch.float64), pool.double()
    for b, place in enumerate(PLACES.tolist()):
        if place >= 0:
            one, pool[place] = recurrence(*(x[b : b + 1] for x in rows), pool[place], scale)
            out[b] = one[0]
    return out, pool


@pytest.mark.parametrize("shape", [(HEADS,), (HEADS, 1, 1)], ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_vllm_decode(shape, index):
    rows, pool = step_rows(), normal(SLOTS, HEADS, DIM, DIM)
    want, states = after_a_step(rows, pool, 1.0)
    places = PLACES.to(index)
    out = lightning.linear_decode_forward_triton(*(x[:, :, None] for x in rows), pool, SLOPES.view(shape), places)
    assert out.shape == (4, HEADS * DIM)
    close(out.view(4, HEADS, DIM), want)
    close(pool, states)


def test_a_pool_between_other_states_of_its_slots():
    """vLLM's blocks hold more than a layer's states, and those in the model's dtype."""
    block = torch.full((SLOTS, HEADS * DIM * DIM + 40), 7.0, dtype=torch.bfloat16)
    pool = block[:, 8 : 8 + HEADS * DIM * DIM].view(SLOTS, HEADS, DIM, DIM)
    pool.copy_(normal(SLOTS, HEADS, DIM, DIM))
    rows = step_rows(torch.bfloat16)
    want, states = after_a_step(rows, pool, 1.0)
    out = lightning.linear_decode_forward_triton(*(x[:, :, None] for x in rows), pool, SLOPES, PLACES)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.view(4, HEADS, DIM).double(), want, rtol=0.01, atol=0.01)
    torch.testing.assert_close(pool.double(), states, rtol=0.01, atol=0.01)
    assert (block[:, :8] == 7).all() and (block[:, -32:] == 7).all()


@pytest.mark.parametrize("first", [False, True])
def test_vllm_prefill(first):
    q, k, v = (normal(2, HEADS, 300, DIM, seed=seed) for seed in range(3))
    history = normal(2, HEADS, DIM, DIM) if first else None
    before = None if history is None else history.clone()
    out, kv = lightning.lightning_attention(q, k, v, SLOPES.view(1, HEADS, 1, 1), kv_history=history)
    assert out.shape == (2, HEADS, 300, DIM) and kv.dtype == torch.float32
    for b in range(2):
        start = torch.zeros(HEADS, DIM, DIM) if before is None else before[b]
        want, last = recurrence(*(x[b].transpose(0, 1) for x in (q, k, v)), start, 1.0)
        close(out[b].transpose(0, 1), want)
        close(kv[b, :, -1], last)
    assert history is None or torch.equal(history, before)


def test_vllm_prefill_has_gradients():
    rows = [normal(1, HEADS, 40, DIM, seed=seed).requires_grad_() for seed in range(3)]
    wide = [x.detach().double().requires_grad_() for x in rows]
    out, _ = lightning.lightning_attention(*rows, SLOPES)
    state, want = torch.zeros(HEADS, DIM, DIM, dtype=torch.float64), []
    for t in range(40):
        q, k, v = (x[0, :, t] for x in wide)
        state = torch.exp(-SLOPES.double())[:, None, None] * state + k[:, :, None] * v[:, None, :]
        want.append(torch.einsum("hd,hde->he", q, state))
    weight = normal(*out.shape, seed=9)
    got = torch.autograd.grad((out * weight).sum(), rows)
    theirs = torch.autograd.grad((torch.stack(want, 1)[None] * weight.double()).sum(), wide)
    for ours, other in zip(got, theirs, strict=True):
        torch.testing.assert_close(ours.double(), other, rtol=1e-3, atol=1e-3)


def meta(offsets, places, scales):
    starts = torch.tensor(offsets, dtype=torch.int32)
    return lightning.SegLaMeta(
        batch_size=len(places),
        max_q_length=None,
        q_offsets=starts,
        s_offsets=torch.tensor(places, dtype=torch.int32),
        q_lengths=starts.diff(),
        s_scales=torch.tensor(scales),
    )


@pytest.mark.parametrize("scale", [None, 0.3])
def test_sglang_decode(scale):
    rows, pool = step_rows(), normal(SLOTS, HEADS, DIM, DIM)
    want, states = after_a_step(rows, pool, DIM**-0.5 if scale is None else scale)
    where = meta([0, 1, 2, 3, 4], PLACES.tolist(), [1, 1, 1, 1])
    out = lightning.seg_la_fwd(*rows, pool, SLOPES.view(HEADS, 1, 1), where, softmax_scale=scale, decouple=True)
    close(out, want)
    close(pool, states)


@pytest.mark.parametrize("kind", [bool, int])
def test_sglang_prefill(kind):
    """The first sequence goes on from its state, the second begins; the third is padding, the fourth has one token."""
    rows, pool = [normal(90, HEADS, DIM, seed=seed) for seed in range(3)], normal(SLOTS, HEADS, DIM, DIM)
    ends, places, scales = [0, 33, 70, 89, 90], [4, 0, -1, 2], [1, 0, 1, 1]
    states = pool.double()
    out = lightning.seg_la_fwd(*rows, pool, SLOPES, meta(ends, places, [kind(x) for x in scales]))
    for b, place in enumerate(places):
        if place < 0:
            continue
        start = states[place] if scales[b] else torch.zeros(HEADS, DIM, DIM)
        part = slice(ends[b], ends[b + 1])
        want, states[place] = recurrence(*(x[part] for x in rows), start, DIM**-0.5)
        close(out[part], want)
    close(pool, states)


def test_sglang_draft_tokens_are_refused():
    rows, pool, where = step_rows(), normal(SLOTS, HEADS, DIM, DIM), meta([0, 2, 4], [0, 1], [1, 1])
    with pytest.raises(NotImplementedError, match=r"caches: got an array .* with a ring"):
        lightning.seg_la_fwd(*rows, pool, SLOPES, where, caches=pool)
    where.mask = torch.ones(2, 2)
    with pytest.raises(NotImplementedError, match=r"meta\.mask: got"):
        lightning.seg_la_fwd(*rows, pool, SLOPES, where)


@pytest.mark.parametrize("shapes", ["rows", "tokens", "parts"])
@pytest.mark.parametrize("flat", [False, True])
def test_cula_decode(flat, shapes):
    rows, pool = step_rows(), normal(SLOTS, HEADS, DIM, DIM)
    want, states = after_a_step(rows, pool.mT, 0.25)
    out = torch.full_like(rows[2], 5)
    given = [x[:, None] for x in rows] if shapes == "tokens" else rows
    memory = out[:, None] if shapes == "tokens" else out[None] if shapes == "parts" else out
    state = pool.view(SLOTS * HEADS, DIM, DIM) if flat else pool
    strides = [x.stride(0) for x in (*given, state, memory)]
    lightning.linear_attention_decode(*given, state, memory, 0.25, *strides, PLACES, SLOPES, DIM, DIM, DIM)
    close(out, want)
    close(pool.mT, states)


def test_cula_prefill():
    q, k, v = (normal(2, 70, HEADS, DIM, seed=seed) for seed in range(3))
    first = normal(2, HEADS, DIM, DIM)
    out, final = lightning.lightning_attn_fwd(q, k, v, SLOPES, 0.5, first, True)
    for b in range(2):
        want, last = recurrence(q[b], k[b], v[b], first[b].mT, 0.5)
        close(out[b], want)
        close(final[b].mT, last)
    assert lightning.lightning_attn_fwd(q, k, v, SLOPES)[1] is None
    with pytest.raises(NotImplementedError, match=r"V: got an array .*; want as many heads as Q, 1"):
        lightning.lightning_attn_fwd(q[:, :, :1], k[:, :, :1], v, SLOPES)


@pytest.mark.parametrize("pooled", [False, True])
def test_cula_packed_prefill(pooled):
    q, k, v = (normal(1, 90, HEADS, DIM, seed=seed) for seed in range(3))
    ends, places = [0, 33, 33, 90], [4, 1, 2] if pooled else [0, 1, 2]
    pool = normal(SLOTS, HEADS, DIM, DIM) if pooled else None
    states = pool.mT.double() if pooled else torch.zeros(3, HEADS, DIM, DIM, dtype=torch.float64)
    options = {"state_pool": pool, "initial_state_indices": torch.tensor(places, dtype=torch.int32)} if pooled else {}
    starts = torch.tensor(ends, dtype=torch.int32)
    out, left = lightning.lightning_attn_fwd_varlen(q, k, v, SLOPES, starts, 0.5, **options)
    assert out.shape == v.shape and (not pooled or left is pool)
    for b, place in enumerate(places):
        part = slice(ends[b], ends[b + 1])
        want, states[place] = recurrence(q[0, part], k[0, part], v[0, part], states[place], 0.5)
        close(out[0, part], want)
    close(left.mT, states)
