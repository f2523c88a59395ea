# SPDX-License-Identifier: Apache-2.0
"""Continuous batching of transformers under Tessera: greedy tokens of its own attention, pages read in place."""

from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")

import tessera  # noqa: E402
import transformers  # noqa: E402
from tessera.transformers import use_continuous_batching  # noqa: E402
from tessera.transformers.blocks import decode_pages  # noqa: E402
from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402
from transformers_models import make, prompt  # noqa: E402

PROMPTS = [prompt(1, n, seed=n)[0].tolist() for n in (5, 17, 40, 3, 26)]  # some longer than a window, and than a batch
NEW = 20
KINDS = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt_oss"]  # llama4's chunks have no cache there


@pytest.fixture(autouse=True)
def quiet():
    """It warns that psutil is not there."""
    logger = logging.getLogger("ContinuousBatchingLogger")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.fixture
def calls(monkeypatch):
    """Whether each call of `tessera.attention` had pages."""
    real, seen = tessera.attention, []

    def watched(q, k, *rest, **options):
        seen.append(isinstance(k, tessera.KeySource))
        return real(q, k, *rest, **options)

    monkeypatch.setattr(tessera, "attention", watched)
    return seen


def settings(**changes):
    sizes = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 32, "auto_switch_to_flash": False}
    return ContinuousBatchingConfig(**(sizes | changes))


def tokens(model, prompts=PROMPTS, config=None, **generation):
    """The new tokens of each prompt."""
    generation = {"do_sample": False} | generation
    generation = GenerationConfig(max_new_tokens=NEW, eos_token_id=-1, pad_token_id=0, **generation)
    config = config or settings()
    made = model.generate_batch(prompts, generation, continuous_batching_config=config, warmup=False)
    assert all(each.error is None for each in made.values())
    by_number = sorted(made.items(), key=lambda item: [int(n) for n in item[0].replace("req_", "").split("__child#")])
    return [each.generated_tokens for _, each in by_number]


def one_by_one(model):
    made = [model.generate(torch.tensor([each]), max_new_tokens=NEW, do_sample=False)[0] for each in PROMPTS]
    return [each[len(given) :].tolist() for each, given in zip(made, PROMPTS, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens(kind, calls):
    """Prompts are prefilled in chunks beside requests that decode; the model has its own attention afterwards."""
    model = use_continuous_batching(make(kind, "eager"))
    got = tokens(model)
    assert model.config._attn_implementation == "eager"
    read_in_place = sum(calls)
    if kind == "llama":
        assert read_in_place > len(calls) / 2  # all steps without a prefill
    else:
        assert read_in_place == 0 and calls  # sliding layers have no block tables there
    assert got == one_by_one(make(kind, "eager"))
    assert all(len(set(each)) > 3 for each in got)  # a text that repeats a token says nothing of attention
    if kind != "gemma2":  # whose softcap `paged|eager` leaves out
        assert got == tokens(make(kind, "eager"))


def test_softcap():
    """Scores that a small cap changes: the tokens are those of the eager model, which are others than without a cap."""
    changes = {"attn_logit_softcapping": 0.5}
    got = tokens(use_continuous_batching(make("gemma2", "eager", **changes)))
    assert got == one_by_one(make("gemma2", "eager", **changes))
    assert got != one_by_one(make("gemma2", "eager", attn_logit_softcapping=None))


@pytest.mark.parametrize("pages", [0, 4])
def test_few_pages(pages, calls):
    """Requests with more pages than a table has, or no tables: what transformers gathers is read instead."""
    model, prompts = use_continuous_batching(make("llama", "eager")), [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    got = tokens(model, prompts, settings(max_blocks_per_request=pages))
    assert got == tokens(make("llama", "eager"), prompts)
    assert any(calls) == (pages > 0) and not all(calls)


def test_shared_pages(calls):
    """Prompts that begin alike share pages, and copies of a request go on from the same ones."""
    shared = prompt(1, 24, seed=9)[0].tolist()
    prompts = [[*shared, n] for n in range(3, 9)]
    want = tokens(make("llama", "eager"), prompts)
    assert tokens(use_continuous_batching(make("llama", "eager")), prompts) == want
    copies = tokens(
        use_continuous_batching(make("llama", "eager")), prompts[:2], num_return_sequences=3, do_sample=True, top_k=1
    )
    assert copies == [want[0]] * 3 + [want[1]] * 3
    assert any(calls)


def test_a_class(calls):
    """All models of a class, as a server loads them; other classes keep transformers' own."""

    class Served(transformers.LlamaForCausalLM):
        pass

    use_continuous_batching(Served)
    model = make("llama", "eager")
    want = tokens(model)
    assert not calls
    model.__class__ = Served
    assert tokens(model) == want and any(calls)


def test_half_types():
    """bf16: the texts go the same way as far as rounding lets them, which is the first token of each at least."""
    got = tokens(use_continuous_batching(make("llama", "eager", torch.bfloat16)))
    want = tokens(make("llama", "eager", torch.bfloat16))
    assert [each[0] for each in got] == [each[0] for each in want]
    assert all(len(each) == NEW for each in got)


def test_manager_with_requests_that_come_and_go():
    """Requests join a running manager, as a server's do; the persistent one is used again."""
    model = use_continuous_batching(make("llama", "eager"))
    want = tokens(make("llama", "eager"))
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    for _ in range(2):
        with model.continuous_batching_context_manager(
            generation, continuous_batching_config=settings(), persistent_manager=True, warmup=False
        ) as manager:
            assert model.config._attn_implementation == "tessera"
            names = [manager.add_request(each, max_new_tokens=NEW) for each in PROMPTS[:3]]
            done = {}
            while len(done) < len(PROMPTS):
                made = manager.get_result(timeout=60)
                if made is not None and made.is_finished():
                    done[made.request_id] = made.generated_tokens
                    if len(names) < len(PROMPTS):
                        names.append(manager.add_request(PROMPTS[len(names)], max_new_tokens=NEW))
        assert [done[name] for name in names] == want
    model.destroy_cached_continuous_batching_manager()


def test_padded_batch():
    """Sequences without tokens, which fill a batch up to a captured size: zeros, and nothing of the cache changes but
    the first page, whose zeros stay zeros. NaN where nothing may be read."""
    g = torch.Generator().manual_seed(3)
    pool = torch.full((2, 6, 4, 2, 16), torch.nan)
    pool[:, 0] = 0
    table = torch.tensor([[3, 5], [2, 1], [-1, -1]], dtype=torch.int32)
    used = torch.tensor([6, 1])
    for row, page, tokens_there in ((0, 3, 4), (0, 5, 1), (1, 2, 0)):
        assert row in (0, 1)
        pool[:, page, :tokens_there] = torch.randn((2, tokens_there, 2, 16), generator=g)
    q, k, v = (torch.randn((1, heads, 3, 16), generator=g) for heads in (4, 2, 2))
    before = pool.clone()
    context = {
        "k_cache": pool[0],
        "v_cache": pool[1],
        "block_table": table,
        "cu_seq_lens_k": torch.tensor([0, 6, 7, 7]),
    }
    out = decode_pages(q, k, v, None, context, {})
    assert out.shape == (1, 3, 4, 16) and not out[0, 2].any()
    assert torch.equal(pool[0, 5, 1], k[0, :, 0]) and torch.equal(pool[1, 2, 0], v[0, :, 1])
    changed = (pool != before) & ~(pool.isnan() & before.isnan())
    assert changed.nonzero()[:, 1:3].unique(dim=0).tolist() == [[2, 0], [5, 1]]
    for row, pages in enumerate(([3, 5], [2])):
        keys, values = (torch.cat([x[p] for p in pages])[: used[row]].transpose(0, 1) for x in pool)
        want = torch.nn.functional.scaled_dot_product_attention(q[0, :, row, None], keys, values, enable_gqa=True)
        torch.testing.assert_close(out[0, row], want[:, 0], rtol=1e-5, atol=1e-5)


def test_refusals():
    with pytest.raises(ValueError, match=r"name: got 'no such'; want one that tessera\.transformers\.register"):
        use_continuous_batching(make("llama", "eager"), "no such")
