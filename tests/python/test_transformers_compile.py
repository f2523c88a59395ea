# SPDX-License-Identifier: Apache-2.0
"""Models under torch.compile with no break in the graph: the mask is made inside it, in the same forms."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers_models import CONFIGS, make, packed_positions, padding, prompt  # noqa: E402

TOKENS = 19


class Traced:
    """A backend that runs the graph as it is and keeps the slots that each call of the operator binds."""

    def __init__(self):
        self.slots: list[str] = []
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        for node in graph.graph.nodes:
            if "tessera" in str(node.target):
                self.slots += [x for x in node.args if isinstance(x, str)][:1]
        return graph.forward


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model_of(kind: str):
    # Eager experts loop over those that were chosen, which no graph can hold.
    return make(kind, experts="grouped_mm" if kind == "gpt_oss" else "eager")


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_forward_and_backward(kind, side):
    ids, mask = prompt(2, TOKENS), padding(2, TOKENS, side)
    model = model_of(kind)
    backend = Traced()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    results = []
    for run in (model, compiled):
        logits = run(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logits = logits if mask is None else logits[mask.bool()]
        model.zero_grad()
        logits.square().sum().backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for got, want in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
    varlen = mask is not None or kind == "llama4"
    assert len(backend.slots) == 2
    assert ("cu_seqlens_k" in backend.slots[0]) == varlen
    assert "tile_bits" not in " ".join(backend.slots)


def test_inductor():
    ids, mask = prompt(2, TOKENS), padding(2, TOKENS, "left")
    model = make("qwen3")
    with torch.no_grad():
        want = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        got = torch.compile(model, fullgraph=True)(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-4)


def test_lengths_that_change():
    """One graph for every length."""
    model = make("mistral")
    backend = Traced()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    with torch.no_grad():
        for length in (19, 23, 41):
            ids, mask = prompt(2, length), padding(2, length, "left")
            want = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            got = compiled(input_ids=ids, attention_mask=mask, use_cache=False).logits
            torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-4)
    assert backend.graphs == 1


def test_packed_sequences_need_boundaries():
    """A graph cannot look at positions. It takes boundaries; without them it refuses, and gives no wrong result."""
    lengths = [4, 9, 6]
    ids, positions = prompt(1, TOKENS), packed_positions([lengths])
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    packing = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "max_length_q": 9, "max_length_k": 9}
    model = make("llama")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        want = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        got = compiled(input_ids=ids, position_ids=positions, use_cache=False, **packing).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        with pytest.raises(RuntimeError, match=r"position_ids: got packed sequences under torch.compile; want cu_seq"):
            compiled(input_ids=ids, position_ids=positions, use_cache=False)


def test_padding_between_tokens_is_refused_in_a_graph():
    ids, mask = prompt(2, TOKENS), torch.ones((2, TOKENS), dtype=torch.long)
    mask[0, 5:7] = 0
    compiled = torch.compile(make("llama"), fullgraph=True, backend="eager")
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"attention_mask: got padding between tokens"):
        compiled(input_ids=ids, attention_mask=mask, use_cache=False)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_compiled_generation_with_a_static_cache(kind, side):
    """The mask is made outside the compiled step and goes in as an argument."""
    ids, mask = prompt(2, 9), padding(2, 9, side)
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static", "attention_mask": mask}
    want = make(kind, "eager").generate(ids, **options)
    config = transformers.CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    got = make(kind).generate(ids, compile_config=config, **options)
    assert torch.equal(got, want)
