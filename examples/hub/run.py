# SPDX-License-Identifier: Apache-2.0
"""Four calls of Tessera as a kernel of Hugging Face's `kernels`, each checked against the same in fp32.

    python examples/hub/run.py --repository build/hf-kernels/tessera

needs `kernels` and torch, and neither Tessera nor NumPy; the folder is made by scripts/hf-kernels. `get_kernel` takes
it from there in place of the Hub's repository, because the variable LOCAL_KERNELS says so.

An example's error is the relative L2 error of its results, in bf16, against results computed by plain torch in fp32
from the same inputs; one above `WANTED` fails.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

WANTED = 0.01  # bf16 has 8 bits: a rounded result is off by up to 0.4%, 0.17% in the mean square
REPOSITORY = "tessera/tessera"


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.float() - want).norm() / want.norm()).item()


def normal(*shape: int, device: str, seed: int) -> Tensor:
    """The same bf16 numbers on every device."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device, torch.bfloat16)


def exact_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Attention in fp32 of (batch, tokens, heads, dim); `visible` is broadcast to (batch, heads, rows, keys). A row
    that sees no key gives 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.float(), k.float().repeat_interleave(group, 2), v.float().repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[3])
    weights = torch.softmax(scores.masked_fill(~visible, -math.inf), -1).nan_to_num(0)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def causal_mask(rows: int, device: str) -> Tensor:
    return torch.ones(rows, rows, dtype=torch.bool, device=device).tril()


def flash_attention(tessera: ModuleType, device: str) -> dict[str, float]:
    """FlashAttention's calls, by the names of its versions 2, 3 and 4: grouped heads, causal, with gradients; and
    packed sequences."""
    tokens, errors = 384, {}
    q, k, v = (normal(2, tokens, heads, 64, device=device, seed=heads) for heads in (8, 2, 1))
    v = v.expand(2, tokens, 2, 64).contiguous()
    dout = normal(2, tokens, 8, 64, device=device, seed=3)
    wide = [x.float().requires_grad_() for x in (q, k, v)]
    want = exact_attention(*wide, causal_mask(tokens, device))
    wanted = torch.autograd.grad(want, wide, dout.float())
    for version in (2, 3, 4):
        call = getattr(tessera.compat, f"flash_attn_{version}").flash_attn_func
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        out = call(*given, causal=True)
        out = out[0] if isinstance(out, tuple) else out
        errors[f"flash_attn_{version}"] = relative_error(out, want)
        for name, got, exact in zip("qkv", torch.autograd.grad(out, given, dout), wanted, strict=True):
            errors[f"flash_attn_{version} d{name}"] = relative_error(got, exact)
    ends = torch.tensor([0, 100, 101, 384], dtype=torch.int32, device=device)
    packed = tessera.compat.flash_attn_2.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 283, 283, causal=True)
    sequence = torch.bucketize(torch.arange(tokens, device=device), ends[1:], right=True)
    visible = causal_mask(tokens, device) & (sequence[:, None] == sequence)
    errors["packed"] = relative_error(packed, exact_attention(q[:1], k[:1], v[:1], visible)[0])
    return errors


def native_sparse_attention(tessera: ModuleType, device: str) -> dict[str, float]:
    """Compressed, selected and window branches, gated. The reference takes the blocks that the call chose, and
    `other blocks` is the share of them that fp32 scores would not have chosen."""
    tokens, heads, group, dim, block, top, window = 2048, 8, 4, 64, 64, 8, 128
    tile, blocks = 128 // group, tokens // block
    q, k, v = (normal(1, tokens, n, dim, device=device, seed=seed) for seed, n in enumerate((heads, 2, 2)))
    weight = normal(heads, 3, dim, device=device, seed=7) / math.sqrt(dim)
    out, tiles = tessera.nsa(q, k, v, gate_weight=weight, top=top, window=window, return_tiles=True)

    mean_k, mean_v = (x.float().unflatten(1, (blocks, block)).mean(2) for x in (k, v))
    row, key = torch.arange(tokens, device=device)[:, None], torch.arange(tokens, device=device)
    begin = torch.arange(blocks, device=device) * block
    compressed = exact_attention(q, mean_k, mean_v, begin + block <= row + 1)
    listed = torch.arange(top, device=device) < tiles.counts[..., None]
    chosen = torch.zeros(*tiles.counts.shape, blocks + 1, dtype=torch.bool, device=device)  # the last for no block
    chosen = chosen.scatter(-1, torch.where(listed, tiles.indices, blocks).long(), True)[..., :blocks]
    spread = chosen.repeat_interleave(group, 1).repeat_interleave(tile, 2).repeat_interleave(block, 3)
    selected = exact_attention(q, k, v, spread & (key <= row))
    near = exact_attention(q, k, v, (key <= row) & (key > row - window))
    gates = torch.sigmoid(torch.einsum("bihd,hxd->bihx", q.float(), weight.float()))
    want = sum(gates[..., n, None] * part for n, part in enumerate((compressed, selected, near)))

    # A tile's first row scores; the first block and the last two are always there.
    first = torch.arange(0, tokens, tile, device=device)
    scores = torch.einsum("bthgd,bjhd->bhtj", q[:, first].float().unflatten(2, (2, group)), mean_k)
    scores = scores.masked_fill(begin + block > first[:, None] + 1, -math.inf)
    newest = (begin // block >= first[:, None] // block - 1) & (begin <= first[:, None] + tile - 1)
    scores = scores.masked_fill((begin == 0) | newest, math.inf)
    best = torch.topk(scores, top, -1)
    exact = torch.zeros_like(chosen).scatter(-1, best.indices, best.values > -math.inf)
    return {"nsa": relative_error(out, want), "other blocks": ((chosen & ~exact).sum() / chosen.sum()).item()}


def skip_state(tessera: ModuleType, device: str) -> dict[str, float]:
    """Eight steps of a diffusion run: each computes the tiles that the steps before it left on the list, and leaves the
    next one's. The reference is attention over the listed tiles; the list has to become shorter."""
    tokens, heads, steps = 1024, 4, 8
    q, k, v = (normal(1, tokens, heads, 64, device=device, seed=seed) for seed in range(3))
    place = torch.arange(tokens, device=device)[:, None] / 64
    peaked = torch.cat([torch.cos(place * f) for f in range(1, 33)] + [torch.sin(place * f) for f in range(1, 33)], 1)
    q, k = (x + 1.5 * peaked.to(torch.bfloat16)[:, None] for x in (q, k))  # rows prefer keys of places like theirs
    state = tessera.SkipState(
        seqlen_q=tokens, seqlen_k=tokens, heads_q=heads, block=(128, 128), steps=steps, ramp=(0.01, 0.02), like=q
    )
    errors = {}
    for step in range(steps):
        words = state.tile_list(like=q).bits.view(torch.int32)
        bits = (words[..., None] >> torch.arange(32, device=device)) & 1
        visible = bits.flatten(-2)[..., : tokens // 128].bool().repeat_interleave(128, 2).repeat_interleave(128, 3)
        out = state(q, k, v, step=step)
        errors[f"step {step}, {visible.float().mean().item():.0%} of the tiles"] = relative_error(
            out, exact_attention(q, k, v, visible)
        )
        q, k, v = (x + 0.05 * normal(1, tokens, heads, 64, device=device, seed=9 + step) for x in (q, k, v))
    if not 0 < state.active < 0.9:
        errors[f"{state.active:.0%} of the tiles at the end"] = math.inf
    return errors


def lightning_attention(tessera: ModuleType, device: str) -> dict[str, float]:
    """Linear attention with a decay for each head: a prefill, then steps of one token on its states, as an engine calls
    them. The reference is the recurrence, token by token."""
    batch, prefill, new, heads, dim = 2, 200, 16, 8, 64
    tokens, scale = prefill + new, dim**-0.5
    q, k, v = (normal(batch, tokens, heads, dim, device=device, seed=seed) for seed in range(3))
    # tessera.decay_slopes(heads), which needs NumPy.
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)], device=device)
    before = [x[:, :prefill] for x in (q, k, v)]
    begin, states = tessera.linear_attention(*before, slopes, scale=scale, output_final_state=True, layout="vk")
    outs, slots = [begin], torch.arange(batch, dtype=torch.int32, device=device)
    for t in range(prefill, tokens):
        now = [x[:, t].contiguous() for x in (q, k, v)]
        out = torch.empty_like(now[0])
        tessera.compat.lightning.linear_attention_decode(
            *now, states, out, scale, 0, 0, 0, 0, 0, slots, slopes, dim, dim, dim
        )
        outs.append(out[:, None])
    state, want = torch.zeros(batch, heads, dim, dim, device=device), []
    for t in range(tokens):
        now_q, now_k, now_v = (x[:, t].float() for x in (q, k, v))
        state = torch.exp(-slopes)[:, None, None] * state + now_k[..., None] * now_v[..., None, :]
        want.append(torch.einsum("bhk,bhkv->bhv", scale * now_q, state))
    got, wanted = torch.cat(outs, 1), torch.stack(want, 1)
    return {
        "prefill": relative_error(got[:, :prefill], wanted[:, :prefill]),
        "decode": relative_error(got[:, prefill:], wanted[:, prefill:]),
        "states": relative_error(states.transpose(2, 3), state),
    }


EXAMPLES = (flash_attention, native_sparse_attention, skip_state, lightning_attention)


def load(repository: str) -> Any:
    """The kernel, by `get_kernel`, of a folder."""
    os.environ["LOCAL_KERNELS"] = f"{REPOSITORY}={os.path.abspath(repository)}"
    from kernels import get_kernel

    return get_kernel(REPOSITORY, version=0, trust_remote_code=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", default="build/hf-kernels/tessera", help="the folder")
    parser.add_argument("--installed", action="store_true", help="an installed tessera instead, without `kernels`")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if options.installed:
        import tessera
        import tessera.compat.flash_attn_2
        import tessera.compat.flash_attn_3
        import tessera.compat.flash_attn_4
        import tessera.compat.lightning
    else:
        tessera = load(options.repository)
        print(f"{tessera.__name__} of {os.path.dirname(tessera.__file__)}")
    failed = 0
    for example in EXAMPLES:
        print(example.__name__)
        for name, error in example(tessera, options.device).items():
            wrong = not error <= WANTED
            failed += wrong
            print(f"  {'FAILED' if wrong else 'ok':<7}{name:<30}{error:.4f}")
    print(f"{len(EXAMPLES)} examples, {failed} errors above {WANTED}")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
