# SPDX-License-Identifier: Apache-2.0
"""Functions that were traced before are traced again when, and only when, something that they read may have changed."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

import expressions_zoo  # noqa: E402
import tessera  # noqa: E402
from tessera.compat.flex_attention import and_masks, flex_attention  # noqa: E402
from tessera.expressions import register  # noqa: E402
from tessera.expressions.register import mask_of, score_of  # noqa: E402
from tessera.expressions.unchanged import unchanged  # noqa: E402

WIDTH = 7
SETTINGS = {"width": 5}


class Sizes(NamedTuple):
    width: int = 9


@pytest.fixture
def traces(monkeypatch):
    """How often functions were traced."""
    counted = []
    trace = register.trace

    def counting(function, kind):
        counted.append(function)
        return trace(function, kind)

    monkeypatch.setattr(register, "trace", counting)
    return counted


def test_the_zoo_is_traced_once(traces):
    zoo = expressions_zoo.zoo().values()
    functions = {(score, score_of) for score, _ in zoo if score} | {(mask, mask_of) for _, mask in zoo if mask}
    for function, of in functions:
        first = of(function)
        assert of(function) is first
    assert len(traces) == len(functions)


def closure(values):
    width, ids = values["width"], values["ids"]

    def mask(b, h, q, k):
        return (ids[q] == ids[k]) & (q - k < width)

    def change(new_width):
        nonlocal width
        width = new_width

    return mask, change


def test_what_a_closure_reads_is_noticed(traces):
    ids = torch.arange(20) // 6
    mask, change = closure(dict(width=4, ids=ids))
    first = mask_of(mask)
    assert first.window == (3, None)
    assert mask_of(mask) is first
    change(5)
    assert mask_of(mask).window == (4, None)
    ids += 1  # in place
    before = len(traces)
    mask_of(mask)
    assert len(traces) == before + 1
    ids.resize_(10)
    mask_of(mask)
    assert len(traces) == before + 2
    ids.set_(torch.zeros(10, dtype=torch.int64))
    mask_of(mask)
    assert len(traces) == before + 3
    mask_of(mask)
    assert len(traces) == before + 3


def test_another_tensor_of_the_same_variable_is_noticed():
    table = torch.zeros(8)

    def score(s, b, h, q, k):
        return s + table[q]

    first = score_of(score)
    assert first.tensors[0] is table
    table = torch.ones(8)
    assert score_of(score).tensors[0] is table


def test_values_that_tracing_reads_are_noticed():
    width = torch.tensor(3)

    def mask(b, h, q, k):
        return q - k < width.item()

    assert mask_of(mask).window == (2, None)
    width.fill_(6)
    assert mask_of(mask).window == (5, None)


def test_globals_defaults_and_code_are_noticed(monkeypatch):
    def by_global(b, h, q, k):
        return q - k < WIDTH

    def by_default(b, h, q, k, width=3):
        return q - k < width

    def other(b, h, q, k):
        return q - k < 2

    assert mask_of(by_global).window == (6, None)
    monkeypatch.setitem(globals(), "WIDTH", 9)
    assert mask_of(by_global).window == (8, None)
    assert mask_of(by_default).window == (2, None)
    by_default.__defaults__ = (5,)
    assert mask_of(by_default).window == (4, None)
    by_global.__code__ = other.__code__
    assert mask_of(by_global).window == (1, None)


def test_inner_functions_are_noticed():
    width = 3

    def near(q, k):
        return q - k < width

    def mask(b, h, q, k):
        return near(q, k)

    both = and_masks(mask, lambda b, h, q, k: q >= k)
    assert mask_of(both).window == (2, 0)
    width = 4
    assert mask_of(both).window == (3, 0)


def test_what_may_change_unseen_is_traced_each_time(traces):
    class Holder:
        width = 4

    holder, listed = Holder(), [4]
    get = SETTINGS.get
    count = 0

    def by_object(b, h, q, k):
        return q - k < holder.width

    def by_list(b, h, q, k):
        return q - k < listed[0]

    def by_global(b, h, q, k):
        return q - k < SETTINGS["width"]

    def by_bound_method(b, h, q, k):
        return q - k < get("width")

    def by_import(b, h, q, k):
        import sys

        return q - k < len(sys.path)

    def by_builtin(b, h, q, k):
        return q - k < globals()["WIDTH"]

    def counts(b, h, q, k):
        nonlocal count
        count += 1
        return q - k < 4

    class Called:
        def __call__(self, b, h, q, k):
            return q - k < 4

    for function in (by_object, by_list, by_global, by_bound_method, by_import, by_builtin, counts, Called()):
        assert unchanged(function) is None
        mask_of(function)
        before = len(traces)
        mask_of(function)
        assert len(traces) == before + 1, function
    holder.width = 6
    assert mask_of(by_object).window == (5, None)


def test_numbers_of_named_tuples_and_of_math_are_known():
    sizes = Sizes()

    def mask(b, h, q, k):
        return q - k < sizes.width * math.floor(math.pi)

    assert unchanged(mask) is not None
    assert mask_of(mask).window == (26, None)


def test_a_tensor_that_requires_grad_is_refused_in_each_call():
    table = torch.zeros(8, requires_grad=True)

    def mask(b, h, q, k):
        return table[q] > 0

    with torch.no_grad():
        mask_of(mask)
    with pytest.raises(ValueError, match="requires grad"):
        mask_of(mask)


def test_functions_are_not_kept_alive():
    def made() -> Any:
        ids = torch.arange(20)

        def mask(b, h, q, k):
            return ids[q] == ids[k]

        return mask

    mask = made()
    mask_of(mask)
    gone = weakref.ref(mask)
    del mask
    gc.collect()
    assert gone() is None


def test_results_follow_the_closure():
    q, k, v = (torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    ids, slope = torch.arange(40) // 9, 0.5

    def score(s, b, h, q_idx, kv_idx):
        return s + slope * (kv_idx - q_idx)

    def mask(b, h, q_idx, kv_idx):
        return ids[q_idx] == ids[kv_idx]

    block_mask = tessera.create_block_mask(mask, None, None, 40, 40)

    def expected():
        at = torch.arange(40)
        scores = q @ k.transpose(-1, -2) / 4 + slope * (at[None] - at[:, None])
        return scores.masked_fill(ids[:, None] != ids[None], -math.inf).softmax(-1) @ v

    for change in (lambda: None, lambda: ids.copy_(torch.arange(40) // 5), lambda: None):
        change()
        torch.testing.assert_close(flex_attention(q, k, v, score, block_mask), expected(), atol=1e-5, rtol=1e-5)
    slope = -0.25
    torch.testing.assert_close(flex_attention(q, k, v, score, block_mask), expected(), atol=1e-5, rtol=1e-5)
    ids = torch.arange(40) // 3
    torch.testing.assert_close(flex_attention(q, k, v, score, block_mask), expected(), atol=1e-5, rtol=1e-5)


@pytest.fixture
def attentions(monkeypatch):
    """How often flex_attention came to `tessera.attention`."""
    from tessera.compat import flex_attention as module

    counted = []
    attention = module.attention

    def counting(*arrays, **options):
        counted.append(options)
        return attention(*arrays, **options)

    monkeypatch.setattr(module, "attention", counting)
    return counted


def flex_inputs(length=24, heads=2):
    return [torch.randn(1, heads, length, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def test_calls_are_found_again(attentions):
    ids = torch.arange(24) // 5

    def mask(b, h, q, k):
        return ids[q] == ids[k]

    def half(s, b, h, q, k):
        return s / 2

    def double(s, b, h, q, k):
        return s * 2

    block_mask = tessera.create_block_mask(mask, None, None, 24, 24)
    q, k, v = flex_inputs()
    wants = {score: flex_attention(q, k, v, score, block_mask) for score in (None, half, double)}
    for score in (None, half, double) * 2:
        flex_attention(q, k, v, score, block_mask)
    before = len(attentions)
    for score, want in wants.items():
        assert torch.equal(flex_attention(q, k, v, score, block_mask), want)
        out, lse = flex_attention(q, k, v, score, block_mask, return_lse=True)
        assert torch.equal(out, want)
        assert lse.shape == (1, 2, 24)
        assert torch.equal(flex_attention(q, k, v, score, block_mask, return_lse=True)[1], lse)
    assert len(attentions) == before + 3  # for their LSE
    assert not torch.equal(flex_attention(q, k, v, half, block_mask, scale=0.7), wants[half])
    assert torch.equal(flex_attention(q, k, v, half), flex_attention(q, k, v, half))
    with pytest.raises(ValueError, match="block_mask"):
        flex_attention(*flex_inputs(20), half, block_mask)
    with pytest.raises(ValueError, match="enable_gqa"):
        flex_attention(q, k[:, :1], v[:, :1], half, block_mask)


def test_gradients_of_calls_that_are_found_again(attentions):
    def score(s, b, h, q, k):
        return s + 0.1 * (k - q)

    q, k, v = flex_inputs()
    plain = flex_attention(q, k, v, score)
    for _ in range(3):
        flex_attention(q, k, v, score)
    grads = []
    for _ in range(3):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flex_attention(*leaves, score)
        assert torch.equal(out, plain)
        out.square().sum().backward()
        grads.append([x.grad for x in leaves])
    for one, other in zip(grads[0], grads[2], strict=True):
        torch.testing.assert_close(one, other)
    before = len(attentions)
    flex_attention(q, k, v, score)
    assert len(attentions) == before


def test_block_masks_and_scores_are_not_kept_alive():
    def made() -> Any:
        ids = torch.arange(24) // 5
        return (lambda s, b, h, q, k: s + ids[q]), (lambda b, h, q, k: ids[q] == ids[k])

    score, mask = made()
    block_mask = tessera.create_block_mask(mask, None, None, 24, 24)
    for _ in range(3):
        flex_attention(*flex_inputs(), score, block_mask)
        flex_attention(*flex_inputs(), score)
    gone = [weakref.ref(x) for x in (score, mask, block_mask)]
    del score, mask, block_mask
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
