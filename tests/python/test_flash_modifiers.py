# SPDX-License-Identifier: Apache-2.0
"""flash-attn 4's score_mod, mask_mod, aux_tensors and aux_scalars, on NumPy alone, beside a textbook."""

from __future__ import annotations

import numpy as np
import pytest
import tessera
from tessera import expressions as ex
from tessera.compat import flash_attn_4

SQ, SK = 40, 70
DRAW = np.random.default_rng(8)
Q, K, V = (DRAW.standard_normal((2, n, h, 16)).astype(np.float32) for n, h in ((SQ, 4), (SK, 2), (SK, 2)))
BIAS = DRAW.standard_normal((4, 100)).astype(np.float32)
ORDER = DRAW.integers(0, 5, 400).astype(np.int32)


def textbook(q, k, v, score=None, visible=None, offset_q=0, offset_k=0, batch=0):
    """One sequence, (s, h, d): score(s, b, h, i, j) and visible(b, h, i, j) of indices from 0."""
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    i, j = np.arange(q.shape[0])[:, None], np.arange(k.shape[0])[None, :]
    for h in range(q.shape[1]):
        g = h // (q.shape[1] // k.shape[1])
        s = q[:, h].astype(float) @ k[:, g].T.astype(float) / np.sqrt(q.shape[-1])
        s = s if score is None else score(s, batch, h, i, j)
        s = s if visible is None else np.where(visible(batch, h, i, j), s, -np.inf)
        p = np.exp(s - np.maximum(s.max(-1, keepdims=True), -1e30))
        out[:, h] = p / np.maximum(p.sum(-1, keepdims=True), 1e-30) @ v[:, g]
    return out


def textbooks(score=None, visible=None, lengths=None):
    lengths = lengths or [(SQ, SK)] * 2
    return [
        textbook(Q[b, :m], K[b, :n], V[b, :n], score, visible and visible(m, n), batch=b)
        for b, (m, n) in enumerate(lengths)
    ]


def score_mod(score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    return score + aux_tensors[0][h_idx, q_idx] * kv_idx / 64


def named(options):
    """Without the addresses of functions, which differ from process to process."""
    return " ".join(options) or "plain" if isinstance(options, dict) else None


def mask_mod(b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    return kv_idx <= q_idx + seqlen_info.seqlen_k - seqlen_info.seqlen_q


def biased(s, b, h, i, j):
    return s + BIAS[h, i] * j / 64


def last_at_last(m, n):
    return lambda b, h, i, j: j <= i + n - m


def close(got, want):
    np.testing.assert_allclose(got, np.stack(want), atol=3e-6)


@pytest.mark.parametrize(
    ("options", "visible"),
    [
        ({"mask_mod": mask_mod}, last_at_last),
        ({"mask_mod": mask_mod, "window_size": (1, 1)}, last_at_last),  # which it takes the place of
        ({"causal": True}, last_at_last),
        ({"window_size": (9, 5)}, lambda m, n: lambda b, h, i, j: (i + n - m - j <= 9) & (j - i - n + m <= 5)),
        ({"window_size": (None, -3)}, lambda m, n: lambda b, h, i, j: j <= i + n - m - 3),
        ({}, None),
    ],
    ids=named,
)
def test_indices_count_from_0_and_windows_from_the_last_key(options, visible):
    out, _ = flash_attn_4.flash_attn_func(Q, K, V, score_mod=score_mod, aux_tensors=[BIAS], **options)
    close(out, textbooks(biased, visible))


@pytest.mark.parametrize("options", [{"mask_mod": mask_mod}, {"causal": True}], ids=named)
def test_lengths_in_use(options):
    used = np.array([60, 33], np.int32)
    used_q = np.array([17, 40], np.int32)
    out, _ = flash_attn_4.flash_attn_varlen_func(
        Q, K, V, seqused_q=used_q, seqused_k=used, score_mod=score_mod, aux_tensors=[BIAS], **options
    )
    lengths = list(zip(used_q.tolist(), used.tolist(), strict=True))
    for b, want in enumerate(textbooks(biased, last_at_last, lengths)):
        np.testing.assert_allclose(out[b, : len(want)], want, atol=3e-6)


@pytest.mark.parametrize(
    ("options", "equal"),
    [({}, False), ({"causal": True}, False), ({}, True), ({"causal": True}, True), ({"mask_mod": mask_mod}, True)],
    ids=named,
)
def test_packed_sequences_know_where_they_begin(options, equal):
    cu_q = np.array([0, 10, 40], np.int32)
    cu_k = cu_q if equal else np.array([0, 30, 70], np.int32)
    q, k, v = Q[0], K[0, : cu_k[-1]], V[0, : cu_k[-1]]

    def by_token(score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        here, there = aux_tensors[0][q_idx + seqlen_info.offset_q], aux_tensors[0][kv_idx + seqlen_info.offset_k + 100]
        return score + (here - there) / 4 + ex.real(q_idx) / 32

    out, _ = flash_attn_4.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, score_mod=by_token, aux_tensors=[ORDER], **options
    )
    for b in range(2):
        rows, keys = slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])

        def score(s, b_, h, i, j, rows=rows, keys=keys):
            return s + (ORDER[i + rows.start] - ORDER[j + keys.start + 100]) / 4 + i / 32

        m, n = rows.stop - rows.start, keys.stop - keys.start
        want = textbook(q[rows], k[keys], v[keys], score, last_at_last(m, n) if options else None)
        np.testing.assert_allclose(out[rows], want, atol=3e-6)


def test_pages():
    table = np.array([[3, 0, 1], [5, 2, 4]], np.int32)
    pages_k, pages_v = (DRAW.standard_normal((6, 16, 2, 16)).astype(np.float32) for _ in range(2))
    used = np.array([40, 19], np.int32)
    out, _ = flash_attn_4.flash_attn_func(
        Q, pages_k, pages_v, page_table=table, seqused_k=used, causal=True, score_mod=score_mod, aux_tensors=[BIAS]
    )
    for b, n in enumerate(used):
        k, v = (x[table[b]].reshape(-1, 2, 16)[:n] for x in (pages_k, pages_v))
        np.testing.assert_allclose(out[b], textbook(Q[b], k, v, biased, last_at_last(SQ, n)), atol=3e-6)


def test_scalars_are_no_constants_of_the_expression():
    def scaled(score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
        assert len(aux_scalars) == 2
        return score * aux_scalars[0] + aux_scalars[1] * kv_idx / 64

    def near(b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
        assert aux_tensors is None
        (reach,) = aux_scalars[1:2]
        return abs(q_idx - kv_idx) <= reach

    from tessera.expressions import register

    for factor, reach in ((0.5, 7), (1.25, 30)):
        out, _ = flash_attn_4.flash_attn_func(Q, K, V, score_mod=scaled, mask_mod=near, aux_scalars=(factor, reach))
        close(
            out,
            textbooks(
                lambda s, b, h, i, j, f=factor, r=reach: s * f + r * j / 64,
                lambda m, n, r=reach: lambda b, h, i, j: abs(i - j) <= r,
            ),
        )
        known = len(register._traced) if factor == 0.5 else known  # noqa: F821
    assert len(register._traced) == known


def test_full_blocks_waive_the_mask():
    counts, indices = np.array([[[1, 1]]], np.int32), np.array([[[[0], [1]]]], np.int32)
    lists = flash_attn_4.BlockSparseTensorsTorch(counts, indices, counts, 1 - indices, block_size=(32, 32))
    out, _ = flash_attn_4.flash_attn_func(Q, K, V, mask_mod=mask_mod, block_sparse_tensors=lists)

    def visible(b, h, i, j):
        return (j < 64) & ((i // 32 != j // 32) | (j <= i + SK - SQ))

    close(out, textbooks(None, lambda m, n: visible))


def test_the_derivative_is_the_functions_own():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in (Q, K, V))
    bias = torch.from_numpy(BIAS).requires_grad_()

    def squared(score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        return score * score / 8 + aux_tensors[0][h_idx, q_idx] * kv_idx / 64

    def unused(grad, score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        raise AssertionError("score_mod_bwd was called")

    out, lse = flash_attn_4.flash_attn_func(
        q, k, v, score_mod=squared, score_mod_bwd=unused, aux_tensors=[bias], causal=True
    )
    got = torch.autograd.grad(out.sum() + lse.sum(), [q, k, v, bias])
    offsets = tessera.Offsets(q=torch.zeros(2, dtype=torch.int64))
    same, other = tessera.attention(
        q,
        k,
        v,
        score=lambda s, b, h, i, j: s * s / 8 + bias[h, i] * j / 64,
        window=(None, SK - SQ),
        offsets=offsets,
        return_lse=True,
    )
    for ours, want in zip(got, torch.autograd.grad(same.sum() + other.sum(), [q, k, v, bias]), strict=True):
        torch.testing.assert_close(ours, want, atol=2e-5, rtol=2e-5)


def needs_a_truth(score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    return score if q_idx > kv_idx else -score


REFUSED = [
    ({"score_mod": 3}, TypeError, r"^score_mod: got 3; want a function \(score, b_idx"),
    ({"mask_mod": "causal"}, TypeError, "^mask_mod: got 'causal'; want a function"),
    ({"score_mod": lambda s, b, h, i, j: s}, TypeError, r"^score_mod: got .*\(s, b, h, i, j\).*; want a function"),
    ({"mask_mod": lambda b, h, i, j: i >= j}, TypeError, r"^mask_mod: got .*; want .*aux_tensors\)"),
    ({"score_mod": score_mod, "aux_tensors": [BIAS], "aux_scalars": (2,)}, TypeError, "aux_scalars"),
    ({"score_mod": score_mod, "aux_tensors": [BIAS], "softcap": 5.0}, ValueError, "^softcap: got 5.0"),
    ({"score_mod": score_mod, "aux_tensors": [BIAS], "score_mod_bwd": 1}, TypeError, "^score_mod_bwd: got 1"),
    ({"aux_tensors": [BIAS]}, ValueError, "(?s)^aux_tensors: got .*; want None without a score"),
    ({"aux_scalars": (1,)}, ValueError, "^aux_scalars"),
    ({"score_mod_bwd": score_mod}, ValueError, "^score_mod_bwd"),
    ({"score_mod": score_mod, "aux_tensors": [BIAS], "aux_scalars": ("a",)}, TypeError, "^aux_scalars: got 'a'"),
    ({"score_mod": needs_a_truth}, ValueError, r"test_flash_modifiers.py:\d+: got the truth of a symbol"),
    ({"mask_mod": lambda b, h, i, j, info, aux: i + j}, ValueError, "^mask_mod: got an integer from"),
]


@pytest.mark.parametrize(("options", "error", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_refusals(options, error, words):
    for function in (flash_attn_4.flash_attn_func, flash_attn_4.flash_attn_varlen_func):
        with pytest.raises(error, match=words):
            function(Q, K, V, **options)
    assert flash_attn_4.flash_attn_func(Q, K, V, aux_tensors=[], aux_scalars=())[1] is None
