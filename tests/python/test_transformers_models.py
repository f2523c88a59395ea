# SPDX-License-Identifier: Apache-2.0
"""Models under Tessera against their own eager attention: outputs and the gradients of all parameters.

The rule for all of it: the error against the model with textbook attention in float64 is at most twice that of eager
attention in the same dtype, as root mean squares over a tensor, plus 1e-6 of the tensor's own. Which of two roundings
of a few numbers lies nearer is chance, so small tensors (sinks, biases of routers) are judged together, each error in
units of its tensor's own root mean square.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from tessera.transformers.forms import Pieces, VisibleKeys, Window  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers_models import CONFIGS, make, packed_positions, padding, prompt  # noqa: E402

TOKENS = 37  # equals no size of the models: a (…, 37, 37) tensor is a mask or a matrix of scores
SETTLED = 1e-6
FEW = 16  # numbers of a small tensor, at most


def root_mean_square(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def check(results: dict[str, list], names: list[str]) -> None:
    """The rule, tensor by tensor. `results`: of "tessera", "eager" and "exact"."""
    small = []  # relative errors of Tessera and of eager attention
    for name, got, eager, exact in zip(names, results["tessera"], results["eager"], results["exact"], strict=True):
        if exact is None:
            assert got is None and eager is None, name
            continue
        spread = root_mean_square(eager.double() - exact)
        # A reference that meant something else would allow anything. In bf16 eager attention itself may be far off.
        assert eager.dtype != torch.float32 or spread <= 1e-4 * root_mean_square(exact), name
        error, own = root_mean_square(got.double() - exact), root_mean_square(exact)
        if exact.numel() <= FEW and own > 0:
            small.append((error / own, spread / own))
            continue
        allowed = 2 * spread + SETTLED * own
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
    if small:
        error, spread = (root_mean_square(torch.tensor(errors)) for errors in zip(*small, strict=True))
        assert error <= 2 * spread + SETTLED, f"small tensors: error {error:.3g}, eager's {spread:.3g}"


def outputs_and_gradients(model, ids: torch.Tensor, real: torch.Tensor, **inputs) -> tuple[list, list[str]]:
    """Logits at real tokens, and the gradient of a fixed random functional of them for every parameter."""
    logits = model(input_ids=ids, use_cache=False, **inputs).logits[real]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(7)).to(logits)
    (logits * weights).sum().backward()
    parameters = dict(model.named_parameters())
    return [logits.detach(), *(p.grad for p in parameters.values())], ["logits", *parameters]


def compare(kind: str, dtype: torch.dtype, ids: torch.Tensor, real: torch.Tensor, **inputs) -> None:
    results, names = {}, []
    for name, implementation, wide in (
        ("tessera", "tessera", dtype),
        ("eager", "eager", dtype),
        ("exact", "exact", torch.float64),
    ):
        model = make(kind, implementation, wide, rounded=dtype)
        results[name], names = outputs_and_gradients(model, ids, real, **inputs)
    check(results, names)


class Watch(TorchDispatchMode):
    """Fails on any tensor whose last two dimensions are (queries, keys): a dense mask, or a matrix of scores."""

    def __init__(self, queries: int, keys: int):
        super().__init__()
        self.forbidden = (queries, keys)
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                assert tuple(x.shape[-2:]) != self.forbidden, f"{func}: {tuple(x.shape)}"
        self.operations += 1
        return out


@pytest.fixture
def masks(monkeypatch):
    """The masks that reach the attention function, in order."""
    from transformers import AttentionInterface

    seen = []
    function = AttentionInterface._global_mapping["tessera"]

    def watched(module, query, key, value, attention_mask, **kwargs):
        seen.append(attention_mask)
        return function(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "tessera", watched)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_forward_and_backward(kind, side, dtype):
    ids = prompt(3, TOKENS)
    mask = padding(3, TOKENS, side, step=5)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    compare(kind, dtype, ids, real, attention_mask=mask)


@pytest.mark.parametrize("rows", [[[9, 21, 7]], [[9, 21, 7], [30, 1, 6], [2, 2, 33]]], ids=["one row", "three rows"])
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "gpt_oss"])  # it does not look at positions
def test_packed_sequences_by_positions(kind, rows):
    positions = packed_positions(rows)
    ids = prompt(len(rows), TOKENS)
    compare(kind, torch.float32, ids, torch.ones_like(ids, dtype=torch.bool), position_ids=positions)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_oss"])
def test_packed_sequences_by_boundaries(kind):
    """What a flattening collator gives: boundaries in the forward's arguments. As if each sequence came alone."""
    lengths = [9, 21, 7]
    ids = prompt(1, TOKENS)
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    model = make(kind)
    with torch.no_grad():
        packed = model(
            input_ids=ids,
            position_ids=packed_positions([lengths]),
            use_cache=False,
            cu_seq_lens_q=boundaries,
            cu_seq_lens_k=boundaries,
            max_length_q=21,
            max_length_k=21,
        ).logits
        alone = [model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["none", "left", "right", "packed"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_no_dense_mask(kind, side, masks):
    """Neither a mask nor scores of (sq, sk) exist at any moment of a forward and a backward."""
    ids = prompt(2, TOKENS)
    inputs = {}
    if side == "packed":
        if kind == "gpt_oss":
            pytest.skip("the model gives its mask functions no positions")
        inputs["position_ids"] = packed_positions([[9, 21, 7], [30, 1, 6]])
    else:
        inputs["attention_mask"] = padding(2, TOKENS, side, step=5)
    model = make(kind)
    with Watch(TOKENS, TOKENS) as watch:
        model(input_ids=ids, use_cache=False, **inputs).logits.sum().backward()
    assert watch.operations > 100
    assert len(masks) == 2  # layers
    chunked = kind == "llama4"
    for mask in masks:
        assert isinstance(mask, VisibleKeys)
        wants = (Window, Pieces) if chunked else Pieces if side in ("left", "packed") else Window
        assert isinstance(mask.form, wants)


def test_watch_sees_a_dense_mask():
    """The test above can fail: eager attention makes both."""
    with pytest.raises(AssertionError, match=r"37, 37"), Watch(TOKENS, TOKENS):
        make("llama", "eager")(input_ids=prompt(2, TOKENS), use_cache=False)


def test_dropout_in_training():
    """Drawn from torch's generator: the same seed gives the same loss, another seed another one; none in evaluation."""
    ids = prompt(2, TOKENS)

    def run(seed: int, training: bool = True) -> list[torch.Tensor]:
        model = make("llama", attention_dropout=0.4).train(training)
        torch.manual_seed(seed)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return [loss.detach(), model.model.layers[0].self_attn.q_proj.weight.grad]

    first, again, other, plain = run(1), run(1), run(2), run(1, training=False)
    assert torch.equal(first[0], again[0])
    torch.testing.assert_close(first[1], again[1], rtol=1e-4, atol=1e-6)
    assert not torch.equal(first[0], other[0]) and not torch.equal(first[0], plain[0])


def test_gradient_checkpointing():
    """Masks travel through torch.utils.checkpoint, which runs the layers twice."""
    ids, mask = prompt(2, TOKENS), padding(2, TOKENS, "left", step=5)
    gradients = []
    for checkpointed in (False, True):
        model = make("mistral").train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()].sum().backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["bert", "modernbert", "causal model made bidirectional"])
def test_bidirectional(kind, side):
    import transformers

    common = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
    common |= {"intermediate_size": 96, "initializer_range": 0.2}
    if kind == "bert":
        config = transformers.BertConfig(**common, max_position_embeddings=64)
    elif kind == "modernbert":
        config = transformers.ModernBertConfig(
            **common, local_attention=8, global_attn_every_n_layers=2, bos_token_id=1, eos_token_id=2, cls_token_id=1,
            sep_token_id=2, reference_compile=False,
        )  # fmt: skip
    else:
        config = CONFIGS["mistral"]()
        config.is_causal = False
    ids, mask = prompt(3, TOKENS), padding(3, TOKENS, side, step=5)
    results = {}
    for name, implementation, dtype in (
        ("tessera", "tessera", torch.float32),
        ("eager", "eager", torch.float32),
        ("exact", "exact", torch.float64),
    ):
        torch.manual_seed(1234)
        model = transformers.AutoModel.from_config(config, attn_implementation=implementation).eval().to(dtype)
        with torch.no_grad():
            results[name] = [model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]]
    check(results, ["hidden states"])


def test_a_block_mask_of_ones_own():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    ids = prompt(2, TOKENS)
    kinds = (ids % 3 != 0).int()

    def own(b, h, i, j):
        return (i >= j) & ((kinds[b, j] == kinds[b, i]) | (i - j < 5))

    block_mask = flex.create_block_mask(own, 2, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=16)
    dense = flex.create_mask(own, 2, None, TOKENS, TOKENS, device="cpu")
    bias = torch.zeros(dense.shape).masked_fill(~dense, torch.finfo(torch.float32).min)
    with torch.no_grad():
        want = make("llama", "eager")(input_ids=ids, attention_mask=bias, use_cache=False).logits
        got = make("llama")(input_ids=ids, attention_mask=block_mask, use_cache=False).logits
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
