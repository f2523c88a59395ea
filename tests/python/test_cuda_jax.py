# SPDX-License-Identifier: Apache-2.0
"""`tessera.jax.attention` on a GPU: results and gradients of the calls on numpy arrays, but for rounding."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tessera

jax = pytest.importorskip("jax")
try:
    DEVICE = jax.devices("cuda")[0]
except RuntimeError:
    pytest.skip("jax has no CUDA device", allow_module_level=True)
import jax.numpy as jnp  # noqa: E402
import tessera.jax  # noqa: E402
from ml_dtypes import bfloat16  # noqa: E402
from test_jax_attention import OPTIONS as ON_CPUS  # noqa: E402

NAMES = ("plain", "causal", "window", "chunks", "scale, softcap", "slopes", "lengths", "dropout", "compressed")
OPTIONS = {name: ON_CPUS[name] for name in NAMES} | {"deterministic": {"deterministic": True, "causal": True}}


def make(rng, dtype, queries=70, keys=91, dim=64):
    shapes = (2, queries, 4, dim), (2, keys, 2, dim), (2, keys, 2, dim)
    return [rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in shapes]


def near(got, want):
    """Two roundings of a type of 16 bits."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= 0.01 * np.linalg.norm(want)
    assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()


@pytest.mark.parametrize("dtype", [np.float16, bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_results_and_gradients_are_those_of_numpy_arrays(rng, options, dtype):
    arrays = make(rng, dtype)
    out, lse, residual = tessera.attention(*arrays, **options, return_lse=True, return_residual=True)
    dout = rng.standard_normal(out.shape, dtype=np.float32).astype(dtype)
    want = tessera.attention_backward(dout, *arrays, out, lse, residual=residual, **options)

    @jax.jit
    def call(q, k, v):
        return tessera.jax.attention(q, k, v, **options, return_lse=True)

    given = [jax.device_put(x, DEVICE) for x in arrays]
    (got, got_lse), pull = jax.vjp(call, *given)
    assert got.devices() == {DEVICE} and got.dtype == out.dtype
    near(got, out)
    seen = np.isfinite(lse)
    assert (np.isfinite(np.asarray(got_lse)) == seen).all()
    np.testing.assert_allclose(np.asarray(got_lse)[seen], lse[seen], atol=2e-3)
    for mine, its in zip(pull((jax.device_put(dout, DEVICE), jnp.zeros_like(got_lse))), want[:3], strict=True):
        near(mine, its)


def test_vmap_and_grad(rng):
    q, k, v = (jax.device_put(x, DEVICE) for x in make(rng, bfloat16))
    whole = tessera.jax.attention(q, k, v, causal=True)
    rows = jax.jit(jax.vmap(lambda q, k, v: tessera.jax.attention(q[None], k[None], v[None], causal=True)[0]))(q, k, v)
    near(rows, whole)

    def loss(q):
        return jnp.square(tessera.jax.attention(q, k, v, causal=True).astype(jnp.float32)).sum()

    step = 0.05 * jax.random.normal(jax.random.key(1), q.shape)
    gradient = jax.jit(jax.grad(loss))(q.astype(jnp.bfloat16)).astype(jnp.float32)
    ahead, behind = (loss((q.astype(jnp.float32) + s * step).astype(jnp.bfloat16)) for s in (1, -1))
    np.testing.assert_allclose(float((ahead - behind) / 2), float((gradient * step).sum()), rtol=0.1, atol=0.5)


def test_the_host_waits_for_nothing(rng):
    """Calls that keep a GPU busy for some hundred milliseconds come back in a fraction of that."""
    q, k, v = (jax.device_put(x, DEVICE) for x in make(rng, bfloat16, 32768, 32768, 128))

    @jax.jit
    def call(q, k, v):
        for _ in range(16):
            q = tessera.jax.attention(q, k, v)
        return q

    call(q, k, v).block_until_ready()
    begin = time.perf_counter()
    out = call(q, k, v)
    returned = time.perf_counter() - begin
    out.block_until_ready()
    assert returned < 0.25 * (time.perf_counter() - begin)
