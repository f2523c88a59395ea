# SPDX-License-Identifier: Apache-2.0
"""torch's scaled_dot_product_attention and transformers' models on a GPU, computed by Tessera where it can."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import torch.nn.functional as F  # noqa: E402
from cuda_torch import CUDA, half, on_gpu  # noqa: E402
from tessera.torch import sdpa_replacement  # noqa: E402


def heads_first(dtype=torch.float16, b=2, h=4, sq=40, sk=70, d=64):
    shapes = ((b, h, sq, d), (b, h, sk, d), (b, h, sk, d))
    return [on_gpu(half(*shape, seed=s, dtype=dtype)) for s, shape in enumerate(shapes)]


def padding(*lengths, sk=70):
    return (torch.arange(sk) < torch.tensor(lengths)[:, None])[:, None, None].to(CUDA)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": "padding"}, {"attn_mask": "causal and padding"}],
    ids=str,
)
def test_sdpa(options, dtype):
    q, k, v = heads_first(dtype)
    mask = options.get("attn_mask")
    if mask is not None:
        seen = padding(33, 70).expand(2, 1, 40, 70)
        seen = seen & torch.ones(40, 70, dtype=torch.bool, device=CUDA).tril(30) if mask != "padding" else seen
        options = {"attn_mask": seen}
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)
    theirs = F.scaled_dot_product_attention(q, k, v, **options)
    with sdpa_replacement(strict=True) as report:
        ours = F.scaled_dot_product_attention(q, k, v, **options)
    assert report.replaced == 1
    error, their_error = ((x.double() - want).abs().max().item() for x in (ours, theirs))
    assert error <= 2 * their_error + torch.finfo(dtype).eps * want.abs().max().item()


def test_gradients_of_sdpa():
    grads = []
    for replaced in (False, True):
        leaves = [x.clone().requires_grad_() for x in heads_first()]
        with sdpa_replacement(strict=True) if replaced else nullcontext() as report:
            F.scaled_dot_product_attention(*leaves, is_causal=True).sum().backward()
        assert not replaced or report.replaced == 1
        grads.append([x.grad.float() for x in leaves])
    for name, theirs, ours in zip("qkv", *grads, strict=True):
        bound = 8 * torch.finfo(torch.float16).eps * (1 + theirs.abs().max().item())
        assert (ours - theirs).abs().max().item() <= bound, f"d{name}"


def test_what_stays_with_torch():
    q, k, v = heads_first()
    with sdpa_replacement() as report:
        F.scaled_dot_product_attention(q.float(), k.float(), v.float())
        F.scaled_dot_product_attention(q, k, v, attn_mask=torch.randn(40, 70, device=CUDA).half())
    assert report.replaced == 0
    reasons = list(report.fallbacks)
    assert any("wants q, k and v of one type" in reason for reason in reasons)
    assert any(reason.startswith("a float mask") for reason in reasons)


def test_transformers_generate():
    transformers = pytest.importorskip("transformers")
    import tessera.transformers

    tessera.transformers.register()
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).eval().to(CUDA, torch.bfloat16)
    prompt = torch.randint(1, 64, (2, 20), device=CUDA)
    seen = torch.ones_like(prompt)
    seen[1, :7] = 0  # padding on the left
    logits = {}
    with torch.no_grad():
        for implementation in ("eager", "tessera"):
            model.set_attn_implementation(implementation)
            logits[implementation] = model(prompt, attention_mask=seen).logits.float()
            model.generate(prompt, attention_mask=seen, max_new_tokens=5, do_sample=False, pad_token_id=0)
        model.set_attn_implementation("eager")
        wide = model.float()(prompt, attention_mask=seen).logits
    real = seen.bool()
    ours, theirs = ((logits[name] - wide)[real].abs().max().item() for name in ("tessera", "eager"))
    assert ours <= 2 * theirs + 1e-3
