# SPDX-License-Identifier: Apache-2.0
"""Generation under Tessera: eager attention's greedy text with every kind of cache and padding; no cache is copied."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from tessera.transformers import attention as attention_function  # noqa: E402
from test_transformers_models import Watch  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402
from transformers_models import CONFIGS, make, padding, prompt  # noqa: E402

LENGTH = 17
NEW = 16  # past the window and into further chunks


def generate(model, ids, mask, cache="dynamic", **options):
    if cache == "static":
        options["cache_implementation"] = "static"
    elif cache == "none":
        options["use_cache"] = False
    if mask is not None:
        options["attention_mask"] = mask
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, **options)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_text(kind, cache, side):
    ids = prompt(2, LENGTH)
    mask = padding(2, LENGTH, side, step=3)
    texts = [generate(make(kind, implementation), ids, mask, cache) for implementation in ("tessera", "eager")]
    assert texts[0].shape == (2, LENGTH + NEW)
    assert torch.equal(*texts)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prefill_chunk_size": 5}, {"cache": "none"}], ids=str)
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_oss"])
def test_other_ways_to_generate(kind, options):
    """Beams reorder the cache, a chunked prefill has many queries and a past, and without a cache all is a prefill."""
    ids, mask = prompt(2, LENGTH), padding(2, LENGTH, "left", step=4)
    texts = [generate(make(kind, implementation), ids, mask, **options) for implementation in ("tessera", "eager")]
    assert torch.equal(*texts)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_cache_continued(cache):
    """Several new tokens on a cache that holds some, padded on the left: their logits are those of one long prefill."""
    ids, mask = prompt(2, 24), padding(2, 24, "left", step=4)
    for kind in ("llama", "mistral", "gemma3"):
        model = make(kind)
        held = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=40)
        with torch.no_grad():
            whole = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            model(input_ids=ids[:, :15], attention_mask=mask[:, :15], past_key_values=held)
            rest = model(input_ids=ids[:, 15:], attention_mask=mask, past_key_values=held).logits
        torch.testing.assert_close(rest, whole[:, 15:], rtol=1e-4, atol=1e-4)


@pytest.fixture
def calls(monkeypatch):
    """The calls of `tessera.attention`: its keys and values, and the options."""
    module = __import__("sys").modules[attention_function.__module__]
    real, seen = module.tessera.attention, []

    def watched(q, k, v, **options):
        seen.append((q, k, v, options))
        return real(q, k, v, **options)

    monkeypatch.setattr(module.tessera, "attention", watched)
    return seen


def addresses(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_static_cache_is_read_in_place(side, calls):
    """Prefill and decode steps take the cache's own memory, whatever the padding."""
    model = make("llama")
    cache = StaticCache(model.config, max_cache_len=LENGTH + NEW)
    generate(model, prompt(3, LENGTH), padding(3, LENGTH, side, step=3), cache=None, past_key_values=cache)
    owned = {addresses(x) for layer in cache.layers for x in (layer.keys, layer.values)}
    assert len(calls) == 2 * NEW  # two layers, one prefill and all but the last new token's step
    for _, k, v, _ in calls:
        assert addresses(k) in owned and addresses(v) in owned


def test_forms_in_generate(calls):
    """Padding on the left: pieces in the prefill, a window in the steps. On the right: holes before new text, bits."""
    model = make("llama")
    generate(model, prompt(2, LENGTH), padding(2, LENGTH, "left", step=3))
    assert all(("cu_seqlens_k" in options) == (q.shape[0] != 2) for q, _, _, options in calls)
    assert "cu_seqlens_k" in calls[0][3] and all(options["window"] == (0, None) for _, _, _, options in calls[2:])
    calls.clear()
    generate(model, prompt(2, LENGTH), padding(2, LENGTH, "right", step=3))
    assert "tiles" not in calls[0][3] and all("tiles" in options for _, _, _, options in calls[2:])


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_no_dense_mask_in_prefill_and_steps(kind):
    """Sizes of the prefill, and of a step over a cache of 40: neither (sq, sk) appears."""
    model = make(kind)
    ids, mask = prompt(2, 19), padding(2, 19, "left", step=3)
    with Watch(19, 19):
        model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    with Watch(19, 43):
        model.generate(
            ids, attention_mask=mask, max_new_tokens=3, do_sample=False, past_key_values=StaticCache(model.config, 43)
        )
