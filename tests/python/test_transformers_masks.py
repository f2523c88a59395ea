# SPDX-License-Identifier: Apache-2.0
"""What the mask function makes of transformers' masks: results against a dense mask, and which form is chosen."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

import tessera.transformers  # noqa: E402
from tessera.transformers import VisibleKeys, attention, visible_keys  # noqa: E402
from tessera.transformers.forms import Pieces, Tiles, Window, pack_bits  # noqa: E402
from tessera.transformers.mask_functions import read  # noqa: E402
from transformers import masking_utils as masks  # noqa: E402
from transformers_models import packed_positions  # noqa: E402

HEADS, KEY_HEADS, DIM = 4, 2, 16
LAYER = torch.nn.Module()

# (queries, keys, index of the first query, index of the first key)
SIZES = {
    "prefill": (23, 23, 0, 0),
    "step": (1, 23, 22, 0),
    "several on a past": (6, 23, 17, 0),
    "static prefill": (23, 40, 0, 0),
    "static step": (1, 40, 22, 0),
    "sliding cache": (4, 16, 19, 7),
}
PADDING = ["none", "whole", "left", "right", "both", "holes"]
KINDS = ["causal", "window", "chunk", "bidirectional", "bidirectional window"]


def tensors(b: int, sq: int, sk: int, layout: str) -> list[torch.Tensor]:
    """q, k, v as models hand them on: heads before tokens in shape, and in memory as `layout` says."""
    g = torch.Generator().manual_seed(b + sq + sk)
    q = torch.randn((b, sq, HEADS, DIM), generator=g).transpose(1, 2)
    if layout == "tokens outside":  # straight from a projection
        return [q, *(torch.randn((b, sk, KEY_HEADS, DIM), generator=g).transpose(1, 2) for _ in range(2))]
    spare = 5 if layout == "part of a cache" else 0
    return [q, *(torch.randn((b, KEY_HEADS, sk + spare, DIM), generator=g)[:, :, :sk] for _ in range(2))]


def padding_of(kind: str, b: int, length: int) -> torch.Tensor | None:
    if kind == "none":
        return None
    real = torch.ones((b, length), dtype=torch.bool)
    for row in range(b):
        n = 3 * row
        if kind in ("left", "both"):
            real[row, :n] = False
        if kind in ("right", "both"):
            real[row, length - n // 2 - row :] = False
        if kind == "holes":
            real[row, row + 2 :: 3] = False
    return real


def predicate(kind: str, real: torch.Tensor | None, b: int):
    if kind == "causal":
        return masks.causal_mask_function
    if kind == "window":
        return masks.sliding_window_causal_mask_function(5)
    if kind == "bidirectional":
        return masks.bidirectional_mask_function
    if kind == "bidirectional window":
        return masks.sliding_window_bidirectional_mask_function(4)
    left = torch.zeros(b, dtype=torch.int64) if real is None else (real.cumsum(-1) == 0).sum(-1)
    return masks.chunked_causal_mask_function(6, left)


def check(b, sizes, function, real, layout="part of a cache", mask=None) -> VisibleKeys:
    """The attention function under the mask function's result, against torch's under a dense mask."""
    sq, sk, first_query, first_key = sizes
    q, k, v = tensors(b, sq, sk, layout)
    arguments = (b, sq, sk, first_query, first_key, function, real)
    dense = masks.sdpa_mask(*arguments, allow_is_causal_skip=False)
    visible = visible_keys(*arguments) if mask is None else mask(dense)
    out, weights = attention(LAYER, q, k, v, visible)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True).transpose(1, 2)
    seen = dense.any(-1).transpose(1, 2)[..., None].expand(b, sq, 1, 1)  # a query that sees nothing gets 0
    torch.testing.assert_close(out, torch.where(seen, want, 0), rtol=1e-4, atol=1e-5)
    assert weights is None
    return visible


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_results(sizes, kind, padding):
    b = 3
    sq, sk, first_query, first_key = SIZES[sizes]
    # A static cache is longer than the mask, whose end is the last token so far.
    real = padding_of(padding, b, first_query + sq if sizes.startswith("static") else first_key + sk)
    visible = check(b, SIZES[sizes], predicate(kind, real, b), real)
    by_shape = isinstance(visible.form, Window | Pieces)
    assert by_shape == (padding != "holes") or (kind == "chunk" and padding == "both")


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("layout", ["tokens outside", "heads outside", "part of a cache"])
def test_layouts_of_pieces(layout, gradient):
    """Varlen over any memory that models and caches have; a gradient may take a copy, the result is the same."""
    real = padding_of("left", 3, 23)
    q, k, v = tensors(3, 23, 23, layout)
    visible = visible_keys(3, 23, 23, attention_mask=real)
    assert isinstance(visible.form, Pieces)
    want, _ = attention(LAYER, q, k.contiguous(), v.contiguous(), visible)
    out, _ = attention(LAYER, q, k.requires_grad_(gradient), v.requires_grad_(gradient), visible)
    assert torch.equal(out, want)
    if gradient:
        out.sum().backward()
        hidden = ~real[:, None, :, None].expand_as(k)
        assert k.grad[hidden].abs().max() == 0 and k.grad[~hidden].abs().min() > 0


def within_documents(function, positions, documents):
    """`function` by the tokens' positions, and only within a document, as transformers' models compose it."""
    by_position = masks.remap_positions_for_packed_sequence(function, positions)
    return masks.and_masks(by_position, masks.packed_sequence_mask_function(documents))


@pytest.mark.parametrize("inner", ["causal", "window", "chunk"])
def test_packed(inner):
    positions = packed_positions([[9, 11, 3], [23], [2, 2, 19]])
    documents = masks.find_packed_sequence_indices(positions)
    function = within_documents(predicate(inner, None, 3), positions, documents)
    for layout in ("tokens outside", "heads outside"):
        assert isinstance(check(3, SIZES["prefill"], function, None, layout).form, Pieces)


def test_a_union_is_bits():
    """Image tokens that see each other, as of Gemma 3: no window says it, a bit for a pair does."""
    groups = torch.tensor([[-1] * 4 + [0] * 6 + [-1] * 3 + [1] * 8 + [-1] * 2] * 2)
    function = masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(groups))
    visible = check(2, SIZES["prefill"], function, padding_of("left", 2, 23))
    assert isinstance(visible.form, Tiles) and visible.form.block_q == 1
    assert visible.form.bits.shape == (2, 1, 23, 1)


def test_a_predicate_of_ones_own():
    """Understood if it consists of windows; evaluated if not."""
    function = masks.and_masks(masks.causal_mask_function, lambda b, h, q, k: (k < q + 1) & (k >= q - 3))
    assert read(function) is not None and read(function).left == 3
    assert isinstance(check(2, SIZES["prefill"], function, None).form, Window)

    def odd(b, h, q, k):
        return (k <= q) & ((q - k) % 2 == 0)

    assert read(odd) is None
    assert isinstance(check(2, SIZES["prefill"], odd, None).form, Tiles)


@pytest.mark.parametrize("documents", [[0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1]])
def test_documents_that_are_no_runs(documents):
    """A document that comes back, or positions that jump within one: pairs, not pieces."""
    documents = torch.tensor([documents])
    positions = torch.tensor([[0, 1, 5, 0, 1, 2, 3, 4]])
    function = within_documents(masks.sliding_window_causal_mask_function(3), positions, documents)
    assert isinstance(check(1, (8, 8, 0, 0), function, None).form, Tiles)


@pytest.mark.parametrize("kind", ["bool", "float", "per head"])
def test_dense_mask_of_the_caller(kind):
    def mask(dense):
        if kind == "bool":
            return dense
        if kind == "per head":
            return dense.expand(-1, HEADS, -1, -1)
        return torch.zeros(dense.shape).masked_fill(~dense, torch.finfo(torch.float32).min)

    check(2, SIZES["prefill"], masks.causal_mask_function, padding_of("holes", 2, 23), mask=mask)


def test_without_a_mask_the_layer_says():
    q, k, v = tensors(2, 9, 9, "tokens outside")
    layer = torch.nn.Module()
    layer.is_causal = False
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for options, causal in (({}, False), ({"is_causal": True}, True)):
        want = sdpa(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(attention(layer, q, k, v, None, **options)[0], want, rtol=1e-4, atol=1e-5)
    dense = masks.sdpa_mask(2, 9, 9, 0, 0, masks.sliding_window_causal_mask_function(3), allow_is_causal_skip=False)
    want = sdpa(q, k, v, attn_mask=dense, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(attention(LAYER, q, k, v, None, sliding_window=3)[0], want, rtol=1e-4, atol=1e-5)


def test_dropout_keeps_the_mean():
    """Over 600 draws the mean is within 5 standard errors of the result without dropout, and single draws are not."""
    q, k, v = tensors(1, 5, 9, "tokens outside")
    visible = visible_keys(1, 5, 9, 4)
    plain = attention(LAYER, q, k, v, visible)[0]
    torch.manual_seed(3)
    draws = torch.stack([attention(LAYER, q, k, v, visible, dropout=0.5)[0] for _ in range(600)])
    error = draws.std(0) / 600**0.5
    assert ((draws.mean(0) - plain).abs() <= 5 * error + 1e-6).all()
    assert (draws.std(0) > 0.01).float().mean() > 0.9


def test_bits():
    visible = torch.rand((2, 1, 5, 70), generator=torch.Generator().manual_seed(0)) > 0.5
    bits = pack_bits(visible)
    assert bits.shape == (2, 1, 5, 3) and bits.dtype == torch.int32
    for key in range(70):
        assert torch.equal(bits[..., key // 32] >> (key % 32) & 1, visible[..., key].to(torch.int32))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("position_bias", torch.zeros(1, HEADS, 9, 9)),
        ("output_attentions", True),
        ("head_mask", torch.ones(HEADS)),
        ("attention_mask", torch.full((2, 1, 9, 9), 0.5)),
        ("attention_mask", torch.tensor([0, -1.0, -torch.inf] * 54).reshape(2, 1, 9, 9)),
        ("attention_mask", torch.tensor([0, 0, 1e-3] * 54).reshape(2, 1, 9, 9)),
    ],
)
def test_what_has_no_form_is_refused(argument, value):
    q, k, v = tensors(2, 9, 9, "tokens outside")
    arguments = {"attention_mask": None, argument: value}
    with pytest.raises(NotImplementedError, match=rf"^{argument}: got .*; want"):
        attention(LAYER, q, k, v, **arguments)


def test_a_refused_list_is_the_mask_that_it_came_from(monkeypatch):
    """As on a GPU, whose backward has no lists."""

    def refused(*arguments, **options):
        raise NotImplementedError("tiles: got attention pass=backward list=bitmask; want what is there")

    q, k, v = tensors(1, 23, 23, "tokens outside")
    monkeypatch.setattr(tessera, "attention", refused)
    with pytest.raises(NotImplementedError, match=r"^attention_mask: got attention pass=backward list=bitmask"):
        attention(LAYER, q, k, v, torch.rand(1, 1, 23, 23) < 0.5)


def test_wrong_masks_are_refused():
    q, k, v = tensors(2, 9, 9, "tokens outside")
    for mask in (visible_keys(2, 9, 12), visible_keys(3, 9, 9), torch.ones((2, 1, 8, 9), dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"^attention_mask: got shape .*; want \(2, 1 or 4, 9, 9\)"):
            attention(LAYER, q, k, v, mask)
    with pytest.raises(ValueError, match=r"^attention_mask: got 2 dimensions; want"):
        attention(LAYER, q, k, v, torch.ones((2, 9), dtype=torch.bool))
    with pytest.raises(ValueError, match=r"^attention_mask: got 3 dimensions; want"):
        visible_keys(2, 9, 9, attention_mask=torch.ones((2, 9, 9), dtype=torch.bool))
    with pytest.raises(NotImplementedError, match=r"^attention_mask: got an index"):
        visible_keys(2, 9, 9)[:, :, :, :4]


@pytest.mark.parametrize("name", ["", "eager", "flash_tessera", "a|b", "some/kernel"])
def test_names_that_transformers_reads_otherwise(name):
    with pytest.raises(ValueError, match=r"^name: got"):
        tessera.transformers.register(name)


def test_register_under_another_name():
    from transformers import AttentionInterface, AttentionMaskInterface

    tessera.transformers.register("another")
    try:
        assert AttentionInterface()["another"] is attention
        assert AttentionMaskInterface()["another"] is visible_keys
    finally:
        del AttentionInterface._global_mapping["another"], AttentionMaskInterface._global_mapping["another"]


@pytest.mark.parametrize("size", ["prefill", "several on a past", "static step", "sliding cache"])
@pytest.mark.parametrize("padding", ["none", "left", "holes"])
@pytest.mark.parametrize("kind", KINDS)
def test_block_masks_of_its_flex_attention(kind, padding, size):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    b, (sq, sk, first_query, first_key) = 3, SIZES[size]
    real = padding_of(padding, b, first_key + sk)
    function = predicate(kind, real, b)
    if real is not None:
        function = masks.and_masks(function, masks.padding_mask_function(real))
    function = masks.add_offsets_to_mask_function(function, first_query, first_key)
    dense = torch.stack([flex.create_mask(function, b, None, sq, sk, device="cpu")[row] for row in range(b)])
    q, k, v = (x.requires_grad_() for x in tensors(b, sq, sk, "tokens outside"))
    options = {"scaling": 0.3, "softcap": 9.0, "s_aux": torch.linspace(-1, 1, HEADS)}

    def of(mask):
        out = attention(LAYER, q, k, v, mask, **options)[0]
        return out, *torch.autograd.grad((out * torch.arange(DIM)).sum(), (q, k, v))

    wants = of(dense)
    for made in (
        flex.create_block_mask(function, b, None, sq, sk, device="cpu", BLOCK_SIZE=16),
        tessera.create_block_mask(function, b, None, sq, sk),
    ):
        for got, want in zip(of(made), wants, strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_block_masks_of_other_lengths_are_refused():
    q, k, v = tensors(2, 8, 9, "tokens outside")
    block_mask = tessera.create_block_mask(tessera.noop_mask, None, None, 8, 8)
    with pytest.raises(ValueError, match=r"^block_mask: got one of \(Q_LEN, KV_LEN\) = \(8, 8\)"):
        attention(LAYER, q, k, v, block_mask)
