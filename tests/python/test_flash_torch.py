# SPDX-License-Identifier: Apache-2.0
"""The compat functions on torch tensors: gradients, seeds, what they share with numpy, what has no gradient."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flash_textbook import Score, textbook  # noqa: E402
from tessera.compat import flash_attn_2, flash_attn_3, flash_attn_4  # noqa: E402


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(4)


class TestSameAsNumpy:
    def test_bits_of_fp32(self) -> None:
        q, k, v = tensors((2, 50, 4, 16), (2, 70, 2, 16), (2, 70, 2, 16))
        options = {"causal": True, "softcap": 3.0, "window_size": (40, -1), "return_attn_probs": True}
        ours = flash_attn_2.flash_attn_func(q, k, v, **options)
        theirs = flash_attn_2.flash_attn_func(*(x.detach().numpy() for x in (q, k, v)), **options)
        for a, b in zip(ours, theirs, strict=True):
            assert np.array_equal(a.detach().numpy(), b)

    def test_bits_of_bf16(self) -> None:
        bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
        q, k, v = (x.detach() for x in tensors((2, 50, 4, 16), (2, 70, 2, 16), (2, 70, 2, 16), dtype=torch.bfloat16))
        ours = flash_attn_2.flash_attn_func(q, k, v, causal=True)
        theirs = flash_attn_2.flash_attn_func(
            *(x.view(torch.int16).numpy().view(bfloat16) for x in (q, k, v)), causal=True
        )
        assert theirs.dtype == bfloat16
        assert np.array_equal(ours.view(torch.int16).numpy(), theirs.view(np.int16))

    def test_probabilities_of_bf16(self) -> None:
        q, k, v = (x.detach() for x in tensors((1, 20, 2, 16), (1, 30, 2, 16), (1, 30, 2, 16), dtype=torch.bfloat16))
        _, _, signed = flash_attn_2.flash_attn_func(q, k, v, 0.2, return_attn_probs=True)
        assert signed.dtype == torch.bfloat16 and not signed.requires_grad


class TestGradients:
    def check(self, out, expected, inputs) -> None:
        grad = torch.randn_like(out)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        ours = torch.autograd.grad(out, inputs, grad)
        for a, b in zip(ours, torch.autograd.grad(expected, inputs, grad, retain_graph=True), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("d", [16, 13])
    def test_packed(self, d: int) -> None:
        (qkv,) = tensors((2, 20, 3, 4, d))
        expected, _ = textbook(*qkv.unbind(2), Score(causal=True))
        self.check(flash_attn_2.flash_attn_qkvpacked_func(qkv, causal=True), expected, [qkv])
        q, kv = tensors((2, 20, 4, d), (2, 30, 2, 2, d))
        expected, _ = textbook(q, *kv.unbind(2), Score())
        self.check(flash_attn_2.flash_attn_kvpacked_func(q, kv), expected, [q, kv])

    def test_packed_gradient_is_stacked_once(self) -> None:
        (qkv,) = tensors((2, 20, 3, 4, 16))
        out = flash_attn_2.flash_attn_qkvpacked_func(qkv)
        names = set()
        nodes = [out.grad_fn]
        while nodes:
            node = nodes.pop()
            names.add(type(node).__name__)
            nodes += [parent for parent, _ in node.next_functions if parent is not None]
        assert "UnbindBackward0" in names
        assert not names & {"SelectBackward0", "CopySlices", "CloneBackward0"}

    def test_packed_heads_of_3(self) -> None:
        (qkv,) = tensors((2, 20, 8, 16))
        expected, _ = textbook(*qkv.split([4, 2, 2], 2), Score(causal=True))
        self.check(flash_attn_3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4), expected, [qkv])

    def test_sink_of_4(self) -> None:
        q, k, v, sink = tensors((2, 20, 4, 16), (2, 30, 2, 16), (2, 30, 2, 16), (4,))
        expected, _ = textbook(q, k, v, Score(causal=True, sink=sink))
        out, lse = flash_attn_4.flash_attn_func(q, k, v, causal=True, learnable_sink=sink)
        self.check(out, expected, [q, k, v, sink])
        assert lse is not None, "inputs that require a gradient bring the LSE along"

    def test_half_sink_of_4(self) -> None:
        q, k, v, sink = tensors((1, 20, 2, 16), (1, 20, 2, 16), (1, 20, 2, 16), (2,), dtype=torch.bfloat16)
        flash_attn_4.flash_attn_func(q, k, v, learnable_sink=sink)[0].sum().backward()
        assert sink.grad.dtype == torch.bfloat16 and sink.grad.abs().max() > 0

    def test_lse_of_4_with_sink(self) -> None:
        q, k, v, sink = tensors((1, 9, 2, 16), (1, 12, 2, 16), (1, 12, 2, 16), (2,))
        _, lse = flash_attn_4.flash_attn_func(q, k, v, learnable_sink=sink, return_lse=True)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
        expected = torch.logsumexp(torch.cat([scores, sink[None, :, None, None].expand(1, 2, 9, 1)], -1), -1)
        self.check(lse, expected, [q, k, sink])

    def test_blocks_of_4(self) -> None:
        """With the forward's list, and with the same list given key-major: the gradient of the masked problem."""
        q, k, v = tensors((1, 60, 2, 16), (1, 64, 2, 16), (1, 64, 2, 16))
        listed = torch.tensor([[True, False], [True, True]])
        forward = flash_attn_4.BlockSparseTensorsTorch(
            torch.tensor([[[1, 2]]], dtype=torch.int32),
            torch.tensor([[[[0, 0], [0, 1]]]], dtype=torch.int32),
            block_size=(32, 32),
        )
        backward = flash_attn_4.BlockSparseTensorsTorch(
            torch.tensor([[[2, 1]]], dtype=torch.int32),
            torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32),
            block_size=(32, 32),
        )
        seen = listed.repeat_interleave(32, 0).repeat_interleave(32, 1)[:60]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
        expected = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores.masked_fill(~seen, -torch.inf), -1), v)
        for lists in ({}, {"block_sparse_tensors_bwd": backward}):
            out, _ = flash_attn_4.flash_attn_func(q, k, v, block_sparse_tensors=forward, **lists)
            self.check(out, expected, [q, k, v])


class TestDropout:
    def test_manual_seed_repeats_it(self) -> None:
        q, k, v = tensors((2, 20, 4, 16), (2, 30, 2, 16), (2, 30, 2, 16))
        results = []
        for with_probabilities in (False, True, False):
            torch.manual_seed(7)
            out = flash_attn_2.flash_attn_func(q, k, v, 0.3, return_attn_probs=with_probabilities)
            results.append(out[0] if with_probabilities else out)
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
        assert not torch.equal(results[0], flash_attn_2.flash_attn_func(q, k, v, 0.3))

    def test_gradient_uses_the_same_mask(self) -> None:
        q, k, v = tensors((1, 20, 2, 16), (1, 30, 2, 16), (1, 30, 2, 16))
        out, _, signed = flash_attn_2.flash_attn_func(q, k, v, 0.25, return_attn_probs=True)
        expected, _ = textbook(q, k, v, Score(), None, ~torch.signbit(signed), 0.25)
        TestGradients().check(out, expected, [q, k, v])


class TestWithoutGradient:
    def test_cache(self) -> None:
        """The forward runs, as code without torch.no_grad() expects; the backward refuses instead of being zero."""
        q, k, v = tensors((2, 1, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
        new = torch.randn(2, 1, 2, 16)
        for version in (flash_attn_2, flash_attn_3):
            keys, values = k.detach().clone(), v.detach().clone()
            with torch.no_grad():
                plain = version.flash_attn_with_kvcache(
                    q, k.detach().clone(), v.detach().clone(), new, new, cache_seqlens=5
                )
            out, lse, *_ = version.flash_attn_with_kvcache(
                q, keys, values, new, new, cache_seqlens=5, return_softmax_lse=True
            )
            assert torch.equal(out, plain) and torch.equal(keys[:, 5:6], new)
            for result in (out, lse):
                with pytest.raises(NotImplementedError, match=r"flash_attn_with_kvcache: got .*; want torch.no_grad"):
                    result.sum().backward()

    def test_pages(self) -> None:
        q, k, v = tensors((3, 4, 16), (4, 8, 2, 16), (4, 8, 2, 16))
        table = torch.tensor([[2, 1]], dtype=torch.int32)
        starts_q, starts_k = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 11], dtype=torch.int32)
        out = flash_attn_2.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 3, 11, block_table=table)
        keys, values = (x.detach()[[2, 1]].reshape(1, 16, 2, 16)[:, :11] for x in (k, v))
        torch.testing.assert_close(out[None], textbook(q[None], keys, values, Score())[0], rtol=1e-5, atol=1e-5)
        with pytest.raises(NotImplementedError):
            out.sum().backward()


class TestArguments:
    def test_windows_of_tensors(self) -> None:
        q, k, v = tensors((2, 20, 4, 16), (2, 30, 2, 16), (2, 30, 2, 16))
        expected = flash_attn_2.flash_attn_func(q, k, v, window_size=(3, 4))
        assert torch.equal(flash_attn_2.flash_attn_func(q, k, v, window_size=torch.tensor([3, 4])), expected)
        assert torch.equal(flash_attn_2.flash_attn_func(q, k, v, window_size=tuple(torch.tensor([3, 4]))), expected)

    def test_lengths_of_a_cache_as_an_integer(self) -> None:
        q, k, v = (x.detach() for x in tensors((2, 1, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16)))
        lengths = torch.full((2,), 6, dtype=torch.int32)
        one = flash_attn_2.flash_attn_with_kvcache(q, k, v, cache_seqlens=6)
        assert torch.equal(one, flash_attn_2.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths))

    def test_a_cache_longer_than_the_batch(self) -> None:
        q, k, v = (x.detach() for x in tensors((2, 1, 4, 16), (5, 9, 2, 16), (5, 9, 2, 16)))
        expected = flash_attn_2.flash_attn_with_kvcache(q, k[:2], v[:2])
        assert torch.equal(flash_attn_2.flash_attn_with_kvcache(q, k, v), expected)

    def test_positions_of_the_rotation(self) -> None:
        """rotary_seqlens turns keys and queries as if the cache held that many tokens, and writes at cache_seqlens."""
        q, new, k, v = (x.detach() for x in tensors((2, 3, 4, 16), (2, 3, 2, 16), (2, 20, 2, 16), (2, 20, 2, 16)))
        angle = torch.rand(40, 8)
        tables = {"rotary_cos": torch.cos(angle), "rotary_sin": torch.sin(angle), "causal": True}
        lengths, shifted = torch.tensor([4, 9], dtype=torch.int32), torch.tensor([14, 19], dtype=torch.int32)
        keys = k.clone()
        out = flash_attn_3.flash_attn_with_kvcache(
            q, keys, v.clone(), new, new, cache_seqlens=lengths, rotary_seqlens=shifted, **tables
        )
        moved = {"rotary_cos": tables["rotary_cos"][10:], "rotary_sin": tables["rotary_sin"][10:], "causal": True}
        expected_keys = k.clone()
        expected = flash_attn_3.flash_attn_with_kvcache(
            q, expected_keys, v.clone(), new, new, cache_seqlens=lengths, **moved
        )
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(keys, expected_keys, rtol=1e-6, atol=1e-6)
        with pytest.raises(ValueError, match="rotary_cos"):
            flash_attn_3.flash_attn_with_kvcache(
                q, keys, v, new, new, cache_seqlens=lengths, rotary_seqlens=shifted + 20, **tables
            )

    def test_padding_in_pages(self) -> None:
        """cache_leftpad with a page table and with chosen rows: the same as a cache without the padding."""
        q, pool_k, pool_v = (x.detach() for x in tensors((2, 3, 4, 16), (12, 5, 2, 16), (12, 5, 2, 16)))
        table = torch.randperm(12)[:9].reshape(3, 3).to(torch.int32)
        rows, lengths, padding = (torch.tensor(x, dtype=torch.int32) for x in ([2, 0], [13, 11], [4, 6]))
        out = flash_attn_3.flash_attn_with_kvcache(
            q,
            pool_k,
            pool_v,
            cache_seqlens=lengths,
            cache_batch_idx=rows,
            cache_leftpad=padding,
            page_table=table,
            causal=True,
        )
        for b in range(2):
            keys, values = (x[table[rows[b]].long()].reshape(1, 15, 2, 16) for x in (pool_k, pool_v))
            part = slice(int(padding[b]), int(lengths[b]))
            expected, _ = textbook(q[b : b + 1], keys[:, part], values[:, part], Score(causal=True))
            torch.testing.assert_close(out[b : b + 1], expected, rtol=1e-5, atol=1e-5)


def test_compiles_whole() -> None:
    q, k, v = tensors((2, 20, 4, 16), (2, 30, 2, 16), (2, 30, 2, 16))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q, k, v):
        return flash_attn_2.flash_attn_func(q, k, v, causal=True) * 2

    torch.testing.assert_close(layer(q, k, v), flash_attn_2.flash_attn_func(q, k, v, causal=True) * 2)
    layer(q, k, v).sum().backward()
    assert all(x.grad is not None for x in (q, k, v))
