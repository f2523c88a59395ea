# SPDX-License-Identifier: Apache-2.0
"""What trains through other interfaces on CUDA: flash-attn's functions, torch's SDPA, transformers' models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import tessera  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from cuda_torch import CUDA, half, on_gpu  # noqa: E402
from flash_textbook import Score, product, starts, textbook, worst  # noqa: E402
from tessera.compat import flash_attn_2, flash_attn_3, flash_attn_4  # noqa: E402
from tessera.torch import sdpa_replacement  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float16, torch.bfloat16)
BOTH = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def leaf(*shape, seed, dtype):
    return on_gpu(half(*shape, seed=seed, dtype=dtype)).requires_grad_()


def judge(leaves, ours, plain, dout=None):
    """The rule of flash-attn's tests: at most twice the error of the textbook in the same dtype against fp32, plus
    what 2 roundings of the largest value are, for out and the gradients of all leaves.

    `ours` gives out of the leaves, `plain(wide)` the textbook's out of them in fp32 (wide) or their own dtype.
    """
    out = ours()
    dout = torch.randn_like(out) if dout is None else dout
    results = [(out.detach(), *torch.autograd.grad(out, leaves, dout))]
    for wide in (True, False):
        each = plain(wide)
        results.append((each.detach(), *torch.autograd.grad(each, leaves, dout.to(each.dtype))))
    for i, (got, exact, rounded) in enumerate(zip(*results, strict=True)):
        name = f"d{i}" if i else "out"
        assert got.dtype == (leaves[i - 1] if i else out).dtype and got.isfinite().all(), name
        bound = 2 * worst(rounded, exact) + 2 * torch.finfo(out.dtype).eps * exact.abs().max().item()
        assert worst(got, exact) <= bound, f"{name}: error {worst(got, exact):.3g}; want at most {bound:.3g}"


FLASH_2 = {
    "causal": (64, {"causal": True}, {}),
    "window": (128, {"window_size": (60, 10)}, {}),
    "softcap": (128, {"causal": True, "softcap": 20.0}, {"softcap": 20.0}),
    "alibi": (64, {"causal": True}, {"slopes": True}),
    "padded head dim": (72 - 13, {"causal": True}, {}),
    "deterministic": (256, {"causal": True, "deterministic": True}, {}),
}


@BOTH
@pytest.mark.parametrize("name", FLASH_2)
def test_flash_attn_func(name, dtype):
    d, options, more = FLASH_2[name]
    q, k, v = leaf(2, 130, 4, d, seed=1, dtype=dtype), *(leaf(2, 200, 2, d, seed=s, dtype=dtype) for s in (2, 3))
    slopes = torch.rand(2, 4, device=CUDA) * 0.3 if more.get("slopes") else None
    score = Score(options.get("causal", False), options.get("window_size", (-1, -1)), more.get("softcap", 0.0), slopes)
    judge(
        (q, k, v),
        lambda: flash_attn_2.flash_attn_func(q, k, v, alibi_slopes=slopes, **options),
        lambda wide: textbook(q, k, v, score, wide=wide)[0],
    )


@BOTH
def test_packed_forms_give_one_gradient(dtype):
    qkv = leaf(2, 130, 3, 4, 64, seed=1, dtype=dtype)
    score = Score(causal=True)
    judge(
        (qkv,),
        lambda: flash_attn_2.flash_attn_qkvpacked_func(qkv, causal=True),
        lambda wide: textbook(*qkv.unbind(2), score, wide=wide)[0],
    )
    q, kv = leaf(2, 90, 4, 128, seed=2, dtype=dtype), leaf(2, 130, 2, 2, 128, seed=3, dtype=dtype)
    judge(
        (q, kv),
        lambda: flash_attn_2.flash_attn_kvpacked_func(q, kv, causal=True),
        lambda wide: textbook(q, *kv.unbind(2), score, wide=wide)[0],
    )
    heads = leaf(2, 130, 8, 64, seed=4, dtype=dtype)
    judge(
        (heads,),
        lambda: flash_attn_3.flash_attn_qkvpacked_func(heads, causal=True, num_heads_q=4),
        lambda wide: textbook(*heads.split([4, 2, 2], 2), score, wide=wide)[0],
    )


LENGTHS = torch.tensor([7, 0, 120, 33])


def by_sequence(q, k, v, score, wide):
    """The textbook of each packed sequence, end to end."""
    parts = zip(*(x.split(LENGTHS.tolist()) for x in (q, k, v)), strict=True)
    return torch.cat([textbook(*(x[None] for x in part), score, wide=wide)[0][0] for part in parts if len(part[0])])


@BOTH
@pytest.mark.parametrize("version", [2, 3, 4])
def test_packed_sequences(version, dtype):
    ends, total = on_gpu(starts(LENGTHS)), int(LENGTHS.sum())
    q, k, v = leaf(total, 4, 128, seed=1, dtype=dtype), *(leaf(total, 2, 128, seed=s, dtype=dtype) for s in (2, 3))
    sizes = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 120, "max_seqlen_k": 120, "causal": True}
    call = {2: flash_attn_2, 3: flash_attn_3, 4: flash_attn_4}[version].flash_attn_varlen_func

    def ours():
        out = call(q, k, v, **sizes)
        return out[0] if isinstance(out, tuple) else out

    judge((q, k, v), ours, lambda wide: by_sequence(q, k, v, Score(causal=True), wide))


@BOTH
def test_packed_sequences_of_packed_tensors(dtype):
    ends, total = on_gpu(starts(LENGTHS)), int(LENGTHS.sum())
    qkv = leaf(total, 3, 4, 64, seed=1, dtype=dtype)
    judge(
        (qkv,),
        lambda: flash_attn_2.flash_attn_varlen_qkvpacked_func(qkv, ends, 120),
        lambda wide: by_sequence(*qkv.unbind(1), Score(), wide),
    )
    q, kv = leaf(total, 4, 64, seed=2, dtype=dtype), leaf(total, 2, 2, 64, seed=3, dtype=dtype)
    judge(
        (q, kv),
        lambda: flash_attn_2.flash_attn_varlen_kvpacked_func(q, kv, ends, ends, 120, 120, causal=True),
        lambda wide: by_sequence(q, *kv.unbind(1), Score(causal=True), wide),
    )


@BOTH
def test_dropout_of_flash_attn(dtype):
    q, k, v = leaf(2, 130, 4, 64, seed=1, dtype=dtype), *(leaf(2, 200, 2, 64, seed=s, dtype=dtype) for s in (2, 3))
    out, _, signed = flash_attn_2.flash_attn_func(q, k, v, 0.17, causal=True, return_attn_probs=True)
    keep = torch.ones(2, 4, 130, 200, dtype=torch.bool, device=CUDA)
    keep[:, :, : signed.shape[2], : signed.shape[3]] = ~torch.signbit(signed)
    judge((q, k, v), lambda: out, lambda wide: textbook(q, k, v, Score(causal=True), None, keep, 0.17, wide)[0])


@BOTH
def test_newer_versions(dtype):
    """Chunks and another head dim of v in version 3, sinks and the gradient of the LSE in version 4."""
    q, k = leaf(2, 130, 4, 192, seed=1, dtype=dtype), leaf(2, 130, 2, 192, seed=2, dtype=dtype)
    v = leaf(2, 130, 2, 128, seed=3, dtype=dtype)
    judge(
        (q, k, v),
        lambda: flash_attn_3.flash_attn_func(q, k, v, causal=True, attention_chunk=40),
        lambda wide: textbook(q, k, v, Score(causal=True, chunk=40), wide=wide)[0],
    )
    q, k, v = (leaf(2, 130, h, 128, seed=h + 4, dtype=dtype) for h in (4, 2, 2))
    sink = leaf(4, seed=9, dtype=torch.float32)
    judge(
        (q, k, v, sink),
        lambda: flash_attn_4.flash_attn_func(q, k, v, causal=True, learnable_sink=sink)[0],
        lambda wide: textbook(q, k, v, Score(causal=True, sink=sink), wide=wide)[0],
    )

    def lse(wide):
        a, b = (q.float(), k.float()) if wide else (q, k)
        scores = product("bqhd,bkhd->bhqk", a, b.repeat_interleave(2, 2)) * 128**-0.5
        return torch.logsumexp(torch.cat([scores.float(), sink[None, :, None, None].expand(2, 4, 130, 1)], -1), -1)

    judge((q, k, sink), lambda: flash_attn_4.flash_attn_func(q, k, v, learnable_sink=sink)[1], lse)


def test_blocks_of_version_4():
    q, k, v = (leaf(1, 256, 2, 64, seed=s, dtype=torch.float16) for s in (1, 2, 3))
    kept = tessera.TileList.from_mask(torch.ones(1, 2, 2, 2, dtype=torch.bool, device=CUDA), block=(128, 128))
    blocks = flash_attn_4.BlockSparseTensorsTorch(kept.counts, kept.indices)
    dout = leaf(1, 256, 2, 64, seed=4, dtype=torch.float16).detach()
    grads = [
        torch.autograd.grad(flash_attn_4.flash_attn_func(q, k, v, **words)[0], (q, k, v), dout)
        for words in ({"block_sparse_tensors": blocks}, {})
    ]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=2e-3)


def test_cache_has_no_gradient():
    q, k, v = (
        leaf(2, 1, 4, 64, seed=1, dtype=torch.float16),
        *(leaf(2, 90, 2, 64, seed=s, dtype=torch.float16) for s in (2, 3)),
    )
    out = flash_attn_2.flash_attn_with_kvcache(q, k.detach(), v.detach(), cache_seqlens=40)
    with pytest.raises(NotImplementedError, match=r"flash_attn_with_kvcache: got a backward; want torch.no_grad"):
        out.sum().backward()


@BOTH
def test_linear_attention(dtype):
    """Beside the CPU's, which rounds less: through the outputs and the last state, from an expanded gradient too."""
    slopes = tessera.decay_slopes(4, layer=3, layers=24)
    grads = []
    for device in (torch.device("cpu"), CUDA):
        leaves = [half(2, 150, 4, 64, seed=s, dtype=dtype).to(device).requires_grad_() for s in (1, 2, 3)]
        state = half(2, 4, 64, 64, seed=4).float().to(device).requires_grad_()
        out, last = tessera.linear_attention(
            *leaves, torch.as_tensor(slopes).to(device), initial_state=state, output_final_state=True
        )
        (out.float().sum() + last.square().sum()).backward()
        grads.append([x.grad.float().cpu() for x in (*leaves, state)])
    for name, cpu, gpu in zip(("dq", "dk", "dv", "dstate"), *grads, strict=True):
        assert (gpu - cpu).abs().max() <= 8 * torch.finfo(dtype).eps * cpu.abs().max(), name


SDPA = {
    "full": {},
    "causal": {"is_causal": True},
    "scale": {"is_causal": True, "scale": 0.3},
    "padding": {"attn_mask": (torch.arange(70) < torch.tensor([33, 70])[:, None])[:, None, None].expand(2, 1, 70, 70)},
    "groups": {"is_causal": True, "enable_gqa": True},
}


@BOTH
@pytest.mark.parametrize("name", SDPA)
def test_sdpa(name, dtype):
    options = {key: on_gpu(x) for key, x in SDPA[name].items()}
    hkv = 2 if options.get("enable_gqa") else 4
    q, k, v = leaf(2, 4, 70, 64, seed=1, dtype=dtype), *(leaf(2, hkv, 70, 64, seed=s, dtype=dtype) for s in (2, 3))

    def plain(wide):
        inputs = [x.float() if wide else x for x in (q, k, v)]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(*inputs, **options)

    def ours():
        with sdpa_replacement(strict=True) as report:
            out = F.scaled_dot_product_attention(q, k, v, **options)
        assert report.replaced == 1
        return out

    judge((q, k, v), ours, plain)


def test_an_encoder_layer_trains():
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(256, nhead=4, batch_first=True, dropout=0.0).to(CUDA, torch.bfloat16)
    x = leaf(2, 90, 256, seed=1, dtype=torch.bfloat16)
    weights = [x, *layer.parameters()]
    dout = torch.randn_like(x)

    def ours():
        with sdpa_replacement(strict=True) as report:
            out = layer(x)
        assert report.replaced == 1
        return out

    got = torch.autograd.grad(ours(), weights, dout)
    theirs = torch.autograd.grad(layer(x), weights, dout)
    wide = torch.autograd.grad(layer.float()(x.float()), weights, dout.float())
    for mine, its, exact in zip(got, theirs, wide, strict=True):
        error, allowed = ((each.float() - exact).norm().item() for each in (mine, its))
        assert error <= 2 * allowed + 2**-8 * exact.norm().item()


def test_what_sdpa_leaves_to_torch():
    wide = [leaf(1, 2, 40, 320, seed=s, dtype=torch.bfloat16) for s in (1, 2, 3)]
    with sdpa_replacement() as report:
        F.scaled_dot_product_attention(*wide).sum().backward()
        with torch.no_grad():
            F.scaled_dot_product_attention(*wide)
    assert report.replaced == 1 and list(report.fallbacks) == ["gradients on cuda of head dims above 256"]


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss", "llama4"])
def test_models_of_transformers(kind, side):
    """The rule of test_transformers_models: root mean squares, at most twice eager's error against float64."""
    pytest.importorskip("transformers", minversion="5.0")
    from test_transformers_models import check, outputs_and_gradients
    from transformers_models import make, padding, prompt

    ids, mask = prompt(3, 37), padding(3, 37, side, step=5)
    real = on_gpu(torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool())
    results, names = {}, []
    for name, dtype in (("tessera", torch.bfloat16), ("eager", torch.bfloat16), ("exact", torch.float64)):
        model = make(kind, name, dtype, rounded=torch.bfloat16).to(CUDA)
        inputs = {"attention_mask": None if mask is None else on_gpu(mask)}
        results[name], names = outputs_and_gradients(model, on_gpu(ids), real, **inputs)
    check(results, names)


def test_a_mask_of_bits():
    """It is a list of tiles."""
    pytest.importorskip("transformers", minversion="5.0")
    from tessera.transformers import attention

    q, k, v = (leaf(1, 4, 40, 64, seed=s, dtype=torch.bfloat16) for s in (1, 2, 3))
    seen = on_gpu(torch.rand(1, 1, 40, 40, generator=torch.Generator().manual_seed(4)) < 0.5)
    out = attention(torch.nn.Module(), q, k, v, seen)[0]
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=seen)
    torch.testing.assert_close(out.double(), exact.transpose(1, 2), rtol=2e-2, atol=2e-2)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    grads = [torch.autograd.grad(x, (q, k, v), y) for x, y in ((out, dout), (exact, dout.double().transpose(1, 2)))]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)


def test_example_trains_as_torch_does(tmp_path):
    pytest.importorskip("safetensors")
    out = tmp_path / "losses.json"
    words = [
        "--steps",
        30,
        "--batch",
        4,
        "--context",
        128,
        "--dim",
        128,
        "--layers",
        2,
        "--device",
        "cuda",
        "--json",
        out,
    ]
    command = [sys.executable, str(ROOT / "examples" / "train" / "train.py"), *map(str, words)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    runs = json.loads(out.read_text())["runs"]
    ours, theirs = (runs[name][0]["losses"] for name in ("Tessera", "torch SDPA"))
    assert ours[-1] < ours[0] - 1 and ours != theirs
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.05
