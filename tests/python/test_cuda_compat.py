# SPDX-License-Identifier: Apache-2.0
"""flash-attn's calls with CUDA tensors: lengths and tables stay on the GPU, caches are written there, graphs replay."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import tessera  # noqa: E402
from cuda_torch import CUDA, close, half, nobody_waits, on_gpu  # noqa: E402
from tessera.compat import flash_attn_2, flash_attn_3, flash_attn_4  # noqa: E402

BATCH, CAPACITY, PAGE, HEADS, KV, DIM = 3, 96, 16, 4, 2, 64


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def same_on_both(call, *arguments, **options):
    """`call` on the CPU and, waiting for nothing, on the GPU; then all results, and what was written in place."""
    there, there_options = [on_gpu(x) for x in arguments], {key: on_gpu(x) for key, x in options.items()}
    call(*(on_gpu(x) for x in arguments), **{key: on_gpu(x) for key, x in options.items()})  # loads the kernels
    with nobody_waits():
        gpu = call(*there, **there_options)
    cpu = call(*arguments, **options)
    for i, (ours, theirs) in enumerate(zip(*((x if isinstance(x, tuple) else (x,)) for x in (gpu, cpu)), strict=True)):
        if theirs is not None and theirs.numel():
            close(f"result {i}", ours, theirs)
    for i, (ours, theirs) in enumerate(zip(there, arguments, strict=True)):
        if isinstance(theirs, torch.Tensor) and theirs.is_floating_point():
            assert torch.allclose(ours.cpu(), theirs, rtol=2**-9, atol=2**-10), f"argument {i} after the call"


def test_dense():
    q, k, v = half(2, 70, HEADS, DIM, seed=1), half(2, 90, KV, DIM, seed=2), half(2, 90, KV, DIM, seed=3)
    slopes = torch.rand(2, HEADS, generator=torch.Generator().manual_seed(4))
    same_on_both(flash_attn_2.flash_attn_func, q, k, v, causal=True, window_size=(40, -1), alibi_slopes=slopes)
    same_on_both(flash_attn_2.flash_attn_func, q, k, v, softcap=20.0, return_attn_probs=True)
    same_on_both(flash_attn_3.flash_attn_func, q, k, v, causal=True, num_splits=3, return_attn_probs=True)
    odd = [half(2, 40, 3, 44, seed=s) for s in (5, 6, 7)]  # is padded
    same_on_both(flash_attn_2.flash_attn_func, *odd)


def test_dropout_probabilities():
    q, k, v = (on_gpu(half(1, 40, 2, DIM, seed=s)) for s in (1, 2, 3))
    torch.manual_seed(3)
    out, lse, signed = flash_attn_2.flash_attn_func(q, k, v, dropout_p=0.2, return_attn_probs=True)
    torch.manual_seed(3)
    here = flash_attn_2.flash_attn_func(q.cpu(), k.cpu(), v.cpu(), dropout_p=0.2, return_attn_probs=True)
    close("out", out, here[0])
    close("lse", lse, here[1])
    close("S_dmask", signed, here[2])
    assert torch.equal(signed.cpu().signbit(), here[2].signbit())


def test_packed():
    starts = ints(0, 5, 5, 125, 156)
    q, k, v = half(156, HEADS, DIM, seed=1), half(156, KV, DIM, seed=2), half(156, KV, DIM, seed=3)
    same_on_both(flash_attn_2.flash_attn_varlen_func, q, k, v, starts, starts, 120, 120, causal=True)
    used = ints(5, 0, 60, 31)
    call = flash_attn_3.flash_attn_varlen_func
    same_on_both(call, q, k, v, starts, starts, 120, 120, seqused_q=used, seqused_k=used, return_attn_probs=True)
    call = flash_attn_4.flash_attn_varlen_func
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "return_lse": True}
    same_on_both(call, q, k, v, causal=True, learnable_sink=half(HEADS, seed=5).float(), **lengths)


def test_packed_over_pages():
    table = torch.randperm(30, generator=torch.Generator().manual_seed(1))[: 4 * 6].view(4, 6).to(torch.int32)
    pool_k, pool_v = half(30, PAGE, KV, DIM, seed=2), half(30, PAGE, KV, DIM, seed=3)
    starts, ends = ints(0, 5, 5, 40, 71), ints(0, 50, 50, 146, 190)
    q = half(71, HEADS, DIM, seed=1)
    call = flash_attn_2.flash_attn_varlen_func
    same_on_both(call, q, pool_k, pool_v, starts, ends, 35, 96, causal=True, block_table=table)
    call = flash_attn_4.flash_attn_varlen_func
    same_on_both(call, q, pool_k, pool_v, cu_seqlens_q=starts, page_table=table, seqused_k=ints(50, 0, 96, 44))


def rotary(dim: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(CAPACITY + 8)[:, None] * 0.7 ** torch.arange(dim // 2)
    return angle.cos().half(), angle.sin().half()


def cache(paged: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys, values and the table of a cache with room for CAPACITY tokens of each sequence."""
    if not paged:
        return half(BATCH, CAPACITY, KV, DIM, seed=8), half(BATCH, CAPACITY, KV, DIM, seed=9), None
    columns = CAPACITY // PAGE
    pages = BATCH * columns + 3
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(1))[: BATCH * columns]
    shape = (pages, PAGE, KV, DIM)
    return half(*shape, seed=8), half(*shape, seed=9), table.view(BATCH, columns).to(torch.int32)


@pytest.mark.parametrize("turns", ["no rotary", "rotary", "rotary, queries of another length"])
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_cache_is_appended_in_place(paged, turns):
    keys, values, table = cache(paged)
    new = 4
    q = half(BATCH, 2 if "another" in turns else new, HEADS, DIM, seed=1)
    k, v = half(BATCH, new, KV, DIM, seed=2), half(BATCH, new, KV, DIM, seed=3)
    cos, sin = rotary() if "rotary" in turns[:6] else (None, None)
    options = {"cache_seqlens": ints(0, 50, CAPACITY - new), "causal": True, "return_softmax_lse": True}
    arguments = (q, keys, values, k, v, cos, sin)
    same_on_both(flash_attn_2.flash_attn_with_kvcache, *arguments, block_table=table, **options)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("new", [1, 3])
def test_cache_whose_head_dim_is_no_multiple_of_8(new, interleaved):
    """flash-attn's own test has one of 59: rows begin anywhere."""
    keys, values = (half(BATCH, CAPACITY, KV, 59, seed=seed) for seed in (8, 9))
    q, k, v = half(BATCH, new, HEADS, 59, seed=1), half(BATCH, new, KV, 59, seed=2), half(BATCH, new, KV, 59, seed=3)
    options = {"cache_seqlens": ints(0, 50, CAPACITY - new), "causal": True, "rotary_interleaved": interleaved}
    same_on_both(flash_attn_2.flash_attn_with_kvcache, q, keys, values, k, v, *rotary(16), **options)
    same_on_both(flash_attn_2.flash_attn_with_kvcache, q, keys, values, k, v, **options)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("padded", [False, True], ids=["from the start", "after padding"])
def test_cache_rows_by_index(paged, padded):
    keys, values, table = cache(paged)
    q = half(2, 1, HEADS, DIM, seed=1)
    options = {"cache_seqlens": ints(70, 33), "cache_batch_idx": ints(2, 0), "num_splits": 2}
    if padded:
        options["cache_leftpad"] = ints(3, 20)
    same_on_both(flash_attn_2.flash_attn_with_kvcache, q, keys, values, block_table=table, **options)
    same_on_both(flash_attn_2.flash_attn_with_kvcache, q, keys[:2], values[:2], cache_seqlens=40) if not paged else None


def test_cache_of_packed_tokens():
    keys, values, table = cache(True)
    starts = ints(0, 4, 5, 12)
    q, k, v = half(12, HEADS, DIM, seed=1), half(12, KV, DIM, seed=2), half(12, KV, DIM, seed=3)
    cos, sin = rotary()
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k_new": starts.clone(), "max_seqlen_q": 7}
    options = {
        "cache_seqlens": ints(10, 60, 0),
        "page_table": table,
        "causal": True,
        "rotary_cos": cos,
        "rotary_sin": sin,
    }
    same_on_both(flash_attn_3.flash_attn_with_kvcache, q, keys, values, k, v, **lengths, **options)


def test_blocks_of_version_4():
    q, k, v = (half(2, 256, 2, DIM, seed=s) for s in (1, 2, 3))
    kept = torch.rand(2, 2, 2, 2, generator=torch.Generator().manual_seed(4)) < 0.7
    listed = tessera.TileList.from_mask(kept, block=(128, 128))

    def call(q, k, v, counts, indices):
        blocks = flash_attn_4.BlockSparseTensorsTorch(counts, indices)
        return flash_attn_4.flash_attn_func(q, k, v, block_sparse_tensors=blocks, return_lse=True)

    same_on_both(call, q, k, v, listed.counts, listed.indices)


def test_a_graph_is_replayed_with_other_lengths():
    """Captured once after a warm-up: tokens, lengths, tables and tile lists may be others in each replay."""
    keys, values, table = cache(True)
    q, k, v = half(BATCH, 1, HEADS, DIM, seed=1), half(BATCH, 1, KV, DIM, seed=2), half(BATCH, 1, KV, DIM, seed=3)
    first = (q, keys, values, k, v, ints(3, 40, 90), table)
    second = (
        half(BATCH, 1, HEADS, DIM, seed=11),
        *(half(*keys.shape, seed=s) for s in (12, 13)),
        half(BATCH, 1, KV, DIM, seed=14),
        half(BATCH, 1, KV, DIM, seed=15),
        ints(80, 0, 17),
        table.flip(0),
    )

    def step(q, keys, values, k, v, lengths, table):
        return flash_attn_2.flash_attn_with_kvcache(
            q, keys, values, k, v, cache_seqlens=lengths, block_table=table, causal=True, num_splits=3
        )

    static = [on_gpu(x) for x in first]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*static)
    for inputs in (second, first):
        for memory, x in zip(static, inputs, strict=True):
            memory.copy_(x)
        graph.replay()
        here = [x.clone() for x in inputs]
        close("out", out, step(*here))
        assert torch.equal(static[1].cpu(), here[1]), "the new keys"


def test_a_graph_of_packed_sequences_and_lists():
    q, k, v = half(256, HEADS, DIM, seed=1), half(256, KV, DIM, seed=2), half(256, KV, DIM, seed=3)
    generator = torch.Generator().manual_seed(4)
    masks = [torch.rand(3, HEADS, 4, 4, generator=generator) < 0.6 for _ in range(2)]
    lists = [tessera.TileList.from_mask(mask, form="bitmask") for mask in masks]
    lengths = [ints(0, 100, 156, 256), ints(0, 256, 256, 256)]

    def step(starts, bits):
        tiles = tessera.TileList(bits=bits, form="bitmask")
        sizes = {"max_seqlen_q": 256, "max_seqlen_k": 256}
        x = (q, k, v) if not starts.is_cuda else there
        return tessera.attention(*x, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True, tiles=tiles, **sizes)

    there = [on_gpu(x) for x in (q, k, v)]
    starts, bits = on_gpu(lengths[0]), on_gpu(lists[0].bits)
    step(starts, bits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(starts, bits)
    for at in (1, 0):
        starts.copy_(lengths[at])
        bits.copy_(lists[at].bits)
        graph.replay()
        close("out", out, step(lengths[at], lists[at].bits))


def test_a_graph_draws_other_dropout_in_each_replay():
    q, k, v = (on_gpu(half(1, 64, 2, DIM, seed=s)) for s in (1, 2, 3))
    tessera.attention(q, k, v, dropout=0.5, seed=torch.zeros(1, dtype=torch.int64, device=CUDA).view(torch.uint64))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tessera.attention(q, k, v, dropout=0.5)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)


def test_a_cold_graph_says_to_warm_up():
    q, k, v = (on_gpu(half(1, 64, 2, 152, seed=s)) for s in (1, 2, 3))  # a head dim that no other test has
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="captur"), torch.cuda.graph(graph):
        tessera.attention(q, k, v)
    torch.cuda.synchronize()
    tessera.attention(q, k, v)
