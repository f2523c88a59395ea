# SPDX-License-Identifier: Apache-2.0
"""Checks of test_cuda_distributed, each run by a rank a GPU."""

from __future__ import annotations

import tessera
import torch
from tessera.distributed import context_parallel


def _qkv(tokens: int, heads: int = 8, keys: int = 2, dim: int = 128) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"q": (1, tokens, heads, dim), "k": (1, tokens, keys, dim), "v": (1, tokens, keys, dim)}
    return {n: torch.randn(x, generator=generator).to("cuda", torch.bfloat16) for n, x in shapes.items()}


def _gradients(cp, given, **options):
    leaves = {name: cp.shard(x).requires_grad_() for name, x in given.items()}
    out = cp.attention(**leaves, causal=True, **options)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), tuple(leaves.values()))]


def repeats(rank: int, size: int) -> None:
    given = _qkv(4096)
    for method in ("all_gather", "ring"):
        cp = context_parallel(seqlen=4096, method=method, collectives=False)
        first = _gradients(cp, given, deterministic=True)
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(first, _gradients(cp, given, deterministic=True), strict=True))


def long_sequences(rank: int) -> None:
    """Several tiles of every kind of part, 8 192 tokens and a few; against one GPU."""
    given = _qkv(8198)
    alone = {name: x.clone().requires_grad_() for name, x in given.items()}
    out = tessera.attention(**alone, causal=True)
    wanted = [out.detach(), *torch.autograd.grad(out.float().square().sum(), tuple(alone.values()))]
    for method in ("all_gather", "ring", "ulysses"):
        cp = context_parallel(seqlen=8198, method=method)
        for got, want in zip(_gradients(cp, given), wanted, strict=True):
            most = want.abs().max().item()
            torch.testing.assert_close(got, cp.shard(want), rtol=2**-6, atol=2**-7 * most)


def native_sparse(rank: int) -> None:
    """Lists of 16 of 128 blocks; the backend's collectives, and sends and receives."""
    given = _qkv(8192)
    alone = {name: x.clone().requires_grad_() for name, x in given.items()}
    out = tessera.nsa(**alone)
    wanted = [out.detach(), *torch.autograd.grad(out.float().square().sum(), tuple(alone.values()))]
    for collectives in (True, False):
        cp = context_parallel(seqlen=8192, multiple=32, collectives=collectives)
        leaves = {name: cp.shard(x).requires_grad_() for name, x in given.items()}
        mine = cp.nsa(**leaves)
        grads = torch.autograd.grad(mine.float().square().sum(), tuple(leaves.values()))
        for got, want in zip((mine.detach(), *grads), wanted, strict=True):
            most = want.abs().max().item()
            torch.testing.assert_close(got, cp.shard(want), rtol=2**-6, atol=2**-7 * most)


def decoding(rank: int) -> None:
    cp = context_parallel(seqlen=4096, balance="contiguous")
    given = _qkv(4096)
    q = given["q"][:, -1:]
    first = int(cp.positions()[0])
    place = tessera.Offsets(q=torch.tensor([4095], device="cuda"), k=torch.tensor([first], device="cuda"))
    out = cp.decode(q, cp.shard(given["k"]), cp.shard(given["v"]), window=(3000, 0), offsets=place)
    want = tessera.attention(q, given["k"], given["v"], window=(3000, 0))
    torch.testing.assert_close(out, want, rtol=2**-7, atol=2**-8)


def other_streams(rank: int) -> None:
    """A call on a stream of its own sees what that stream wrote, and nothing of what comes behind it."""
    cp = context_parallel(seqlen=4096, method="ring")
    given = {name: cp.shard(x) for name, x in _qkv(4096).items()}
    want = cp.attention(**given, causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            doubled = {name: x + x for name, x in given.items()}
            halved = {name: x / 2 for name, x in doubled.items()}
            del doubled
            out = cp.attention(**halved, causal=True)
            for x in halved.values():
                x.zero_()
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, want)


ALL = {f.__name__: f for f in (long_sequences, native_sparse, decoding, other_streams)}


def check(rank: int, size: int, name: str) -> None:
    ALL[name](rank)


def disagree(rank: int, size: int) -> None:
    cp = context_parallel(seqlen=256)
    given = {name: cp.shard(x) for name, x in _qkv(256).items()}
    cp.attention(**given, softcap=2.0 if rank == size - 1 else 0.0)
