# SPDX-License-Identifier: Apache-2.0
"""flash_attn.bert_padding's functions: results by hand, gradients, and the way through the varlen call."""

from __future__ import annotations

import inspect

import pytest

torch = pytest.importorskip("torch")

from tessera.compat import bert_padding, flash_attn_2  # noqa: E402
from tessera.compat.bert_padding import index_first_axis, index_put_first_axis, pad_input, unpad_input  # noqa: E402

MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]])
INDICES = [0, 1, 4, 5, 6, 7, 13, 15]


def states(*dims: int) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(*MASK.shape, *dims, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("dims", [(3,), (2, 5)])
def test_unpad_input(dtype: torch.dtype, dims: tuple[int, ...]) -> None:
    x = states(*dims)
    tokens, indices, cu_seqlens, longest, used = unpad_input(x, MASK.to(dtype))
    assert indices.tolist() == INDICES and indices.dtype == torch.int64
    assert cu_seqlens.tolist() == [0, 2, 6, 6, 8] and cu_seqlens.dtype == torch.int32
    assert used.tolist() == [2, 4, 0, 2] and used.dtype == torch.int32
    assert longest == 4 and isinstance(longest, int)
    assert torch.equal(tokens, torch.stack([x[i // 4, i % 4] for i in INDICES]))
    again = pad_input(tokens, indices, *MASK.shape)
    assert torch.equal(again, x * MASK.reshape(*MASK.shape, *(1 for _ in dims)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_unused_tokens_are_kept_and_do_not_count(dtype: torch.dtype) -> None:
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]])
    x = states(3)
    tokens, indices, cu_seqlens, longest, used = unpad_input(x, MASK.to(dtype), unused.to(dtype))
    assert indices.tolist() == sorted([*INDICES, 2, 8, 12])
    assert cu_seqlens.tolist() == [0, 3, 7, 8, 11] and longest == 4
    assert used.tolist() == [2, 4, 0, 2]
    assert torch.equal(tokens, x.flatten(0, 1)[indices])


def test_no_sequences() -> None:
    tokens, indices, cu_seqlens, longest, used = unpad_input(torch.zeros(0, 4, 3), torch.zeros(0, 4, dtype=torch.bool))
    assert tokens.shape == (0, 3) and indices.shape == (0,) and cu_seqlens.tolist() == [0]
    assert longest == 0 and used.shape == (0,)


def test_gradients() -> None:
    indices = torch.tensor([5, 0, 3])
    rows = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    values = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: index_first_axis(x, indices), rows)
    assert torch.autograd.gradcheck(lambda x: index_put_first_axis(x, indices, 6), values)
    x = states(3)
    assert torch.autograd.gradcheck(lambda x: pad_input(unpad_input(x, MASK)[0], torch.tensor(INDICES), 4, 4), x)


def test_views_are_not_copied_whole() -> None:
    """A slice of a packed projection, whose rows are apart."""
    qkv = torch.arange(2 * 3 * 2 * 4.0).reshape(2, 3, 2, 4)
    tokens, *_ = unpad_input(qkv[:, :, 1], torch.tensor([[1, 0, 1], [0, 1, 0]]))
    assert torch.equal(tokens, torch.stack([qkv[0, 0, 1], qkv[0, 2, 1], qkv[1, 1, 1]]))


def test_through_the_varlen_call() -> None:
    """Each sequence sees its own tokens, as in the padded call over their rows alone; padding comes back as 0."""
    torch.manual_seed(3)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    padded = [torch.randn(2, 5, 2, 16) for _ in "qkv"]
    (q, indices, cu_seqlens, longest, _), (k, *_), (v, *_) = (unpad_input(x, mask) for x in padded)
    out = flash_attn_2.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)
    out = pad_input(out, indices, 2, 5)
    for b, length in enumerate(mask.sum(1).tolist()):
        alone = flash_attn_2.flash_attn_func(*(x[b : b + 1, :length] for x in padded), causal=True)
        torch.testing.assert_close(out[b : b + 1, :length], alone)
        assert not out[b, length:].any()


def test_refusals() -> None:
    x = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"^hidden_states: got .*; want "):
        unpad_input(x[0], MASK)
    with pytest.raises(ValueError, match=r"^attention_mask: got .*; want "):
        unpad_input(x, torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"^unused_mask: got .*; want "):
        unpad_input(x, torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"^indices: got .*; want "):
        index_first_axis(x, MASK)
    with pytest.raises(ValueError, match=r"^input: got .*; want "):
        index_first_axis(x[0, 0], MASK[0])
    with pytest.raises(ValueError, match=r"^values: got .*; want "):
        index_put_first_axis(x[0, 0], MASK[0], 9)


SIGNATURES = {
    "index_first_axis": "input, indices",
    "index_put_first_axis": "values, indices, first_axis_dim",
    "unpad_input": "hidden_states, attention_mask, unused_mask=None",
    "pad_input": "hidden_states, indices, batch, seqlen",
}


def test_signatures() -> None:
    assert set(bert_padding.__all__) == set(SIGNATURES)
    for name, signature in SIGNATURES.items():
        parameters = inspect.signature(getattr(bert_padding, name)).parameters.values()
        plain = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
        assert ", ".join(plain) == signature
