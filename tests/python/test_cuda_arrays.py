# SPDX-License-Identifier: Apache-2.0
"""cupy's and jax's arrays on a GPU: the results of the same call on the CPU, in the library of q, on its stream."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tessera

# jax would take most of the GPU's memory at its first use, from under the other tests of the process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

LENGTHS = np.array([0, 5, 125, 156], np.int32)


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(np.float16)


def qkv(b=2, sq=64, sk=96, hq=4, hkv=2, d=64):
    return [normal(b, sq, hq, d, seed=1), normal(b, sk, hkv, d, seed=2), normal(b, sk, hkv, d, seed=3)]


def close(name, got, want):
    assert got.shape == want.shape and got.dtype == want.dtype, f"{name}: {got.shape} {got.dtype}"
    hidden = np.isneginf(want)
    assert np.array_equal(np.isneginf(got), hidden), f"{name}: -inf elsewhere"
    got, want = got[~hidden].astype(np.float32), want[~hidden].astype(np.float32)
    size = np.abs(want).max(initial=0)
    # Probabilities are rounded to the half type before they meet v, and the result is; LSEs are fp32 sums.
    bound = 1e-5 * (1 + size) if name == "lse" else 2 * np.finfo(np.float16).eps * (0.5 + size)
    assert np.abs(got - want).max(initial=0) <= bound, name


class Cupy:
    def __init__(self):
        self.module = pytest.importorskip("cupy")
        try:
            self.module.cuda.runtime.getDeviceCount()
        except self.module.cuda.runtime.CUDARuntimeError as error:
            pytest.skip(f"no CUDA device: {error}")

    def to_gpu(self, array):
        return self.module.asarray(array)

    def to_cpu(self, array):
        assert isinstance(array, self.module.ndarray)
        return array.get()


class Jax:
    def __init__(self):
        self.module = pytest.importorskip("jax")
        try:
            self.device = self.module.devices("cuda")[0]
        except RuntimeError as error:
            pytest.skip(f"jax has no CUDA device: {error}")

    def to_gpu(self, array):
        return self.module.device_put(array, self.device)

    def to_cpu(self, array):
        assert isinstance(array, self.module.Array) and array.device == self.device
        return np.asarray(array)


@pytest.fixture(params=[Cupy, Jax], ids=["cupy", "jax"])
def library(request):
    return request.param()


def on_both(library, call, *arrays, **options):
    """Results on the GPU, as numpy's, and on the CPU."""
    there = {key: library.to_gpu(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
    gpu = call(*map(library.to_gpu, arrays), **there)
    cpu = call(*arrays, **options)
    pairs = zip(gpu, cpu, strict=True) if isinstance(cpu, tuple) else [(gpu, cpu)]
    return [(library.to_cpu(ours), theirs) for ours, theirs in pairs]


def test_attention(library):
    slopes = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    results = on_both(library, tessera.attention, *qkv(), causal=True, alibi_slopes=slopes, return_lse=True)
    for name, pair in zip(("out", "lse"), results, strict=True):
        close(name, *pair)


def test_packed_sequences(library):
    q, k, v = (x[0] for x in qkv(b=1, sq=156, sk=156))
    options = {"cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS, "causal": True, "return_lse": True}
    for name, pair in zip(("out", "lse"), on_both(library, tessera.attention, q, k, v, **options), strict=True):
        close(name, *pair)


def test_pages_and_splits(library):
    pool_k, pool_v = normal(40, 16, 2, 64, seed=2), normal(40, 16, 2, 64, seed=3)
    table = np.random.default_rng(1).permutation(40)[:32].reshape(2, 16).astype(np.int32)
    options = {"page_table": table, "seqused": np.array([250, 3], np.int32)}
    [(got, want)] = on_both(
        library,
        lambda q, k, v, **o: tessera.attention(q, tessera.KeySource(k, v, **o)),
        qkv()[0],
        pool_k,
        pool_v,
        **options,
    )
    close("out", got, want)
    q = qkv()[0]
    there = [library.to_gpu(x) for x in (q, pool_k, pool_v)]
    moved = {key: library.to_gpu(x) for key, x in options.items()}
    source = tessera.KeySource(*there[1:], **moved)
    close("out in splits", library.to_cpu(tessera.attention(there[0], source, wishes="splits=3")), want)


def test_merge(library):
    q, k, v = qkv()
    a = tessera.attention(q, k[:, :30], v[:, :30], return_lse=True)
    b = tessera.attention(q, k[:, 30:], v[:, 30:], return_lse=True)
    for name, pair in zip(("out", "lse"), on_both(library, tessera.merge_states, *a, *b), strict=True):
        close(name, *pair)


def test_a_plan_runs_often(library):
    q, k, v = qkv(b=1, sq=16, sk=2048)
    there = [library.to_gpu(x) for x in (q, k, v)]
    plan = tessera.plan(*there, wishes="splits=4")
    assert plan.implementation.startswith("cuda.fwd_")
    want = tessera.attention(q, k, v)
    for _ in range(3):
        close("out", library.to_cpu(plan(*there)), want)


def test_refusals(library):
    q, k, v = qkv()
    there = [library.to_gpu(x) for x in (q, k, v)]
    with pytest.raises(NotImplementedError, match="wants q, k and v of one type"):
        tessera.attention(*(library.to_gpu(x.astype(np.float32)) for x in (q, k, v)))
    with pytest.raises(TypeError, match="k: got an array of numpy"):
        tessera.attention(there[0], k, there[2])
    with pytest.raises(ValueError, match=r"seqused_k: got int32 \(2\) on cpu; want .* on cuda:0"):
        tessera.attention(*there, seqused_k=np.array([9, 9], np.int32))
    wide = [library.to_gpu(x) for x in qkv(d=512)]
    with pytest.raises(NotImplementedError, match="wants head dims of at most 256"):
        tessera.attention_backward(wide[0], *wide, wide[0], library.to_gpu(np.zeros((2, 4, 64), np.float32)))


def test_cupy_appends_in_place():
    library = Cupy()
    cache_k, cache_v = normal(2, 64, 2, 64, seed=5), normal(2, 64, 2, 64, seed=6)
    there = [library.to_gpu(x) for x in (cache_k, cache_v)]
    new = normal(2, 3, 2, 64, seed=7)
    used = np.array([0, 61], np.int32)
    tessera.kv_append(*there, *(library.to_gpu(new),) * 2, seqused_k=library.to_gpu(used))
    tessera.kv_append(cache_k, cache_v, new, new, seqused_k=used)
    assert np.array_equal(there[0].get(), cache_k) and np.array_equal(there[1].get(), cache_v)


def test_cupy_flash_attn():
    library = Cupy()
    from tessera.compat import flash_attn_2

    cache_k, cache_v = normal(3, 64, 2, 64, seed=5), normal(3, 64, 2, 64, seed=6)
    q, new = normal(2, 2, 4, 64, seed=7), normal(2, 3, 2, 64, seed=8)
    angle = np.arange(70)[:, None] * 0.7 ** np.arange(16)
    options = {
        "rotary_cos": np.cos(angle).astype(np.float16),
        "rotary_sin": np.sin(angle).astype(np.float16),
        "cache_seqlens": np.array([10, 50], np.int32),
        "cache_batch_idx": np.array([2, 0], np.int32),
        "cache_leftpad": np.array([4, 0], np.int32),
        "causal": True,
    }
    call = flash_attn_2.flash_attn_with_kvcache
    [(got, want)] = on_both(library, call, q, cache_k, cache_v, new, new, **options)
    close("out", got, want)
    starts = LENGTHS
    q, k, v = (x[0] for x in qkv(b=1, sq=156, sk=156))
    [(got, want)] = on_both(
        library, lambda *x: flash_attn_2.flash_attn_varlen_func(*x, 120, 120, causal=True), q, k, v, starts, starts
    )
    close("out", got, want)


def test_cupy_streams_and_graphs():
    library = Cupy()
    cupy = library.module
    q, k, v = qkv(b=1, sq=16, sk=2048)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        there = [library.to_gpu(x) for x in (q, k, v)]
        out = cupy.empty_like(there[0])
        tessera.attention(*there, out=out, wishes="splits=4")
        stream.begin_capture()
        tessera.attention(*there, out=out, wishes="splits=4")
        graph = stream.end_capture()
        there[0] *= 2
        graph.launch(stream)
    stream.synchronize()
    close("out", out.get(), tessera.attention(q * 2, k, v))


def test_jax_takes_bf16_and_keeps_its_arrays():
    library = Jax()
    jnp = library.module.numpy
    q, k, v = (library.to_gpu(x).astype(jnp.bfloat16) for x in qkv())
    out = tessera.attention(q, k, v)
    assert out.dtype == jnp.bfloat16
    halves = tessera.attention(*qkv()).astype(np.float32)
    assert np.abs(np.asarray(out.astype(jnp.float32)) - halves).max() < 4 * 2.0**-8 * (1 + np.abs(halves).max())
    twice = out + out  # the array is one of jax's own
    assert np.array_equal(np.asarray(twice.astype(jnp.float32)), 2 * np.asarray(out.astype(jnp.float32)))
    with pytest.raises(ValueError, match=r"o: got .*; want a writable array"):
        tessera.attention(q, k, v, out=q + 0)
