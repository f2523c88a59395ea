# SPDX-License-Identifier: Apache-2.0
"""`tessera.jax.attention` on the CPU: forward and gradient under jit have the bits of the calls on numpy arrays."""

from __future__ import annotations

import numpy as np
import pytest
import tessera

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
import tessera.jax  # noqa: E402
from ml_dtypes import bfloat16  # noqa: E402

BATCH, QUERIES, KEYS, HEADS, KEY_HEADS, DIM, DIM_V = 2, 70, 91, 4, 2, 32, 24
DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": bfloat16}


def normal(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


@pytest.fixture
def qkv(rng):
    return make(rng)


def make(rng, dtype=np.float32, key_heads=KEY_HEADS):
    return (
        normal(rng, BATCH, QUERIES, HEADS, DIM, dtype=dtype),
        normal(rng, BATCH, KEYS, key_heads, DIM, dtype=dtype),
        normal(rng, BATCH, KEYS, key_heads, DIM_V, dtype=dtype),
    )


def same(got, want):
    got = np.asarray(got)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def check(q, k, v, **options):
    """Output, LSE and gradients through both, against the calls on numpy arrays."""
    options["deterministic"] = True  # is passed on; a CPU's sums follow the number of threads with it and without
    names = [name for name, value in options.items() if isinstance(value, np.ndarray)]
    arrays = {name: options[name] for name in names}
    plain = {name: value for name, value in options.items() if name not in names}
    half = q.dtype != np.float32 and options.get("keep_residual", True)
    out, lse, *residual = tessera.attention(q, k, v, **options, return_lse=True, return_residual=half)
    rng = np.random.default_rng(5)
    dout = rng.standard_normal(out.shape).astype(out.dtype)
    dlse = np.where(np.isfinite(lse), rng.standard_normal(lse.shape), 0).astype(np.float32)

    @jax.jit
    def both(q, k, v, arrays):
        return tessera.jax.attention(q, k, v, **arrays, **plain, return_lse=True)

    @jax.jit
    def alone(q, k, v, arrays):
        return tessera.jax.attention(q, k, v, **arrays, **plain)

    got, pull = jax.vjp(both, q, k, v, arrays)
    same(got[0], out)
    same(got[1], lse)
    same(alone(q, k, v, arrays), out)
    same(tessera.jax.attention(q, k, v, **options), out)
    with_residual = {"residual": residual[0]} if half else {}
    want = tessera.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **with_residual, **options)
    got = pull((jnp.asarray(dout), jnp.asarray(dlse)))
    for mine, its in zip((*got[:3], *([got[3]["sinks"]] if "sinks" in names else [])), want, strict=True):
        same(mine, its)
    want = tessera.attention_backward(dout, q, k, v, out, lse, **with_residual, **options)
    for mine, its in zip(jax.vjp(alone, q, k, v, arrays)[1](jnp.asarray(dout))[:3], want[:3], strict=True):
        same(mine, its)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (20, 3)},
    "chunks": {"attention_chunk": 32, "causal": True},
    "scale, softcap": {"scale": 0.3, "softcap": 2.0, "causal": True},
    "slopes": {"alibi_slopes": np.float32([0.5, 0.25, 0.125, 0.0625]), "causal": True},
    "sinks": {"sinks": np.float32([1.0, -0.5, 3.0, 0.25]), "window": (15, 0)},
    "lengths": {"seqused_q": np.int32([70, 33]), "seqused_k": np.int32([64, 90]), "causal": True},
    "dropout": {"dropout": 0.25, "seed": 123456789012345678, "causal": True},
    "compressed": {"compressed_causal": (4, 2)},
    "wishes": {"wishes": "tile_kv=32 splits=1", "batch_invariant": True, "causal": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(qkv, options):
    check(*qkv, **options)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_types(rng, dtype, keep):
    """The gradient does not inherit the output's rounding, unless it is told to."""
    check(*make(rng, DTYPES[dtype]), causal=True, keep_residual=keep)


@pytest.mark.parametrize("key_heads", [1, 4])
def test_heads(rng, key_heads):
    check(*make(rng, key_heads=key_heads), causal=True)


def test_packed(rng):
    """Sequences laid end to end; with jit their boundaries are data."""
    starts_q, starts_k = np.int32([0, 50, 50, 140]), np.int32([0, 60, 75, 182])
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in make(rng))
    check(q, k, v, causal=True, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)
    check(q, k, v, window=(9, 0), cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, sinks=np.float32([1, 2, 3, 4]))


def test_rows_of_no_sequence(rng):
    """Capacity behind the last sequence: zeros, LSE −inf, no gradient, whatever memory held before."""
    starts = np.int32([0, 30, 64])
    q, k, v = (x.reshape(-1, *x.shape[2:])[:100] for x in make(rng))

    @jax.jit
    def call(q, k, v, starts):
        return tessera.jax.attention(q, k, v, causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts, return_lse=True)

    (out, lse), pull = jax.vjp(call, *map(jnp.asarray, (q, k, v)), jnp.asarray(starts))
    want = tessera.attention(q[:64], k[:64], v[:64], causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts)
    same(out[:64], want)
    assert not np.asarray(out[64:]).any() and np.isneginf(np.asarray(lse)[:, 64:]).all()
    for gradient in pull((out, jnp.zeros_like(lse)))[:3]:
        assert np.asarray(gradient[:64]).any() and not np.asarray(gradient[64:]).any()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_positions(qkv, dtype):
    """Integers of 64 bits reach the kernel whole although jax has none."""
    q, k, v = qkv
    at = np.array([3, -5], dtype)
    far = np.array([2**40, 2**40 + 7], np.int64)
    for first_q, first_k in ((at, None), (at + dtype(20), at)) if dtype == np.int32 else ((far, far),):
        offsets = tessera.Offsets(q=first_q, k=first_k)
        want = tessera.Offsets(*(None if x is None else x.astype(np.int64) for x in (first_q, first_k)))
        got = jax.jit(lambda q, offsets=offsets: tessera.jax.attention(q, k, v, window=(30, 2), offsets=offsets))(q)
        same(got, tessera.attention(q, k, v, window=(30, 2), offsets=want))


def test_traced_positions(qkv):
    q, k, v = qkv

    @jax.jit
    def call(first):
        return tessera.jax.attention(q, k, v, causal=True, offsets=tessera.Offsets(q=first))

    want = tessera.attention(q, k, v, causal=True, offsets=tessera.Offsets(q=np.array([-9, 40])))
    same(call(np.int32([-9, 40])), want)


def test_pages(rng):
    """A paged cache, as a table and as CSR, whose table is traced; there is no gradient."""
    q = normal(rng, 3, 2, HEADS, DIM)
    pool_k, pool_v = normal(rng, 20, 16, KEY_HEADS, DIM), normal(rng, 20, 16, KEY_HEADS, DIM)
    table, used = rng.permutation(20)[:12].reshape(3, 4).astype(np.int32), np.int32([64, 1, 37])

    def source(table, used):
        return tessera.KeySource(pool_k, pool_v, page_table=table, seqused=used)

    @jax.jit
    def step(q, table, used):
        return tessera.jax.attention(q, source(table, used), causal=True)

    same(step(q, table, used), tessera.attention(q, source(table, used), causal=True))
    indptr, last = np.int32([0, 4, 5, 8]), np.int32([16, 1, 5])
    pages = np.concatenate([table[0], table[1, :1], table[2, :3]])

    @jax.jit
    def step_csr(q, indptr, pages, last):
        keys = tessera.KeySource(pool_k, pool_v, page_indptr=indptr, page_indices=pages, last_page_len=last)
        return tessera.jax.attention(q, keys, causal=True)

    same(step_csr(q, indptr, pages, last), step(q, table, used))
    with pytest.raises(NotImplementedError, match="page"):
        jax.grad(lambda q: step(q, table, used).sum())(q)


def test_two_sources(rng, qkv):
    q, k, v = qkv
    k2, v2 = normal(rng, BATCH, 12, KEY_HEADS, DIM), normal(rng, BATCH, 12, KEY_HEADS, DIM_V)

    def call(q, k, v, k2, v2):
        return tessera.jax.attention(q, k, v, k2=tessera.KeySource(k2, v2), causal=True)

    out, lse = tessera.attention(q, k, v, k2=tessera.KeySource(k2, v2), causal=True, return_lse=True)
    got, pull = jax.vjp(jax.jit(call), q, k, v, k2, v2)
    same(got, out)
    want = tessera.attention_backward(out, q, k, v, out, lse, k2=tessera.KeySource(k2, v2), causal=True)
    for mine, its in zip(pull(got), want, strict=True):
        same(mine, its)


def test_tiles(rng, qkv):
    keep = rng.random((BATCH, HEADS, 3, 3)) < 0.5
    tiles = tessera.TileList.from_mask(keep, block=(32, 32))
    check(*qkv, tiles=tiles)


def test_functions_of_positions(qkv):
    def visible(batch, head, query, key):
        return (query >= key) & ((query - key < 9) | (key % 7 == 0))

    check(*qkv, mask=visible, score=lambda s, b, h, i, j: s * 0.5 + 0.01 * (j - i))


def test_seeds(qkv):
    """A key of jax.random and its two words are the integer of 64 bits."""
    q, k, v = qkv
    key = jax.random.key(7)
    low, high = (int(x) for x in jax.random.key_data(key))
    want = tessera.attention(q, k, v, dropout=0.4, seed=low | high << 32)
    call = jax.jit(lambda seed: tessera.jax.attention(q, k, v, dropout=0.4, seed=seed))
    same(call(key), want)
    same(call(jax.random.key_data(key)), want)
    assert not np.array_equal(call(jax.random.key(8)), want)


def test_dtypes_of_results(qkv):
    q, k, v = qkv
    same(tessera.jax.attention(q, k, v, out_dtype="bf16"), tessera.attention(q, k, v, out_dtype="bf16"))


def test_zero_sizes():
    q = jnp.zeros((0, 5, 2, 8))
    assert tessera.jax.attention(q, q, q).shape == (0, 5, 2, 8)


def test_threads(qkv):
    """`set_threads` reaches compiled programs, and so does the call's own number."""
    q, k, v = qkv
    want = tessera.attention(q, k, v, causal=True)
    call = jax.jit(lambda q: tessera.jax.attention(q, k, v, causal=True))
    try:
        for threads in (1, 2):
            tessera.set_threads(threads)
            np.testing.assert_allclose(call(q), want, rtol=1e-5, atol=1e-5)
    finally:
        tessera.set_threads(0)
    np.testing.assert_allclose(tessera.jax.attention(q, k, v, causal=True, threads=1), want, rtol=1e-5, atol=1e-5)
