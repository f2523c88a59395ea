# SPDX-License-Identifier: Apache-2.0
"""`tessera.jax.attention` under jax's transformations, on several devices, and what it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tessera

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
import tessera.jax  # noqa: E402

HERE = Path(__file__).resolve().parent
INVARIANT = {"causal": True, "batch_invariant": True}  # so that a longer batch has the same bits


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


@pytest.fixture
def many(rng):
    """q of 3 problems; k and v."""
    return normal(rng, 3, 2, 40, 4, 16), normal(rng, 3, 2, 50, 2, 16), normal(rng, 3, 2, 50, 2, 16)


def one_by_one(call, *arrays):
    return np.stack([np.asarray(call(*(x[i] for x in arrays))) for i in range(len(arrays[0]))])


@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 3.0}, {"sinks": np.float32([1, 2, 0, -1])}, {"alibi_slopes": np.float32([0.5, 0.25, 0.1, 0])}],
    ids=str,
)
def test_vmap(many, options):
    def call(q, k, v):
        return tessera.jax.attention(q, k, v, **options, **INVARIANT)

    def loss(q, k, v):
        return jnp.square(call(q, k, v)).sum()

    np.testing.assert_array_equal(jax.jit(jax.vmap(call))(*many), one_by_one(call, *many))
    gradient = jax.grad(loss, argnums=1)
    np.testing.assert_array_equal(jax.vmap(gradient)(*many), one_by_one(gradient, *many))


def test_vmap_is_one_call(many):
    """A mapped dense call is one of a longer batch."""
    text = jax.jit(jax.vmap(lambda q, k, v: tessera.jax.attention(q, k, v))).lower(*many).as_text()
    assert text.count("stablehlo.custom_call @tessera_run") == 1 and "tensor<6x40x4x16xf32>" in text
    assert "while" not in text


def test_vmap_of_some_arguments(many):
    q, k, v = many
    call = jax.vmap(lambda q, v: tessera.jax.attention(q, k[0], v, **INVARIANT), in_axes=(None, 2), out_axes=1)
    got = np.moveaxis(np.asarray(call(q[0], np.moveaxis(v, 0, 2))), 1, 0)
    want = one_by_one(lambda v: tessera.attention(q[0], k[0], v, **INVARIANT), v)
    np.testing.assert_array_equal(got, want)


def test_vmap_twice(many):
    """And of lengths, slopes and positions of each sequence."""
    q, k, v = (x[None].repeat(2, 0) for x in many)
    used = np.int32([[[50, 3], [7, 20], [44, 45]], [[1, 2], [50, 50], [9, 8]]])
    slopes = np.linspace(0.1, 0.9, 24, dtype=np.float32).reshape(2, 3, 4)
    first = np.int32([5, 9])

    def call(q, k, v, used, slopes, attention=tessera.jax.attention, dtype=np.int32):
        offsets = tessera.Offsets(q=first.astype(dtype))
        return attention(q, k, v, seqused_k=used, alibi_slopes=slopes, offsets=offsets, **INVARIANT)

    got = jax.vmap(jax.vmap(call))(q, k, v, used, slopes)
    for i in range(2):
        for j in range(3):
            arrays = (x[i, j] for x in (q, k, v, used, slopes))
            np.testing.assert_array_equal(got[i, j], call(*arrays, tessera.attention, np.int64))


@pytest.mark.parametrize("kind", ["sinks", "dropout", "packed", "mapped sinks"])
def test_vmap_one_by_one(many, kind):
    """Where a longer batch would not be the same: the gradient of shared sinks, dropout, packed sequences."""
    q, k, v = (x[:, 0] if kind == "packed" else x for x in many)
    sinks = np.float32([[1, 2, 0, -1]] * 3) * np.float32([[1], [0.5], [2]])
    starts = np.int32([[0, 10, 40], [0, 40, 40], [0, 1, 30]])

    def loss(q, k, v, sinks, starts):
        options = {
            "sinks": {"sinks": jnp.asarray([1.0, 2, 0, -1])},
            "mapped sinks": {"sinks": sinks},
            "dropout": {"dropout": 0.5, "seed": 3},
            "packed": {"cu_seqlens_q": starts, "cu_seqlens_k": starts},
        }[kind]
        return jnp.square(tessera.jax.attention(q, k, v, **options, **INVARIANT)).sum()

    gradient = jax.grad(loss, argnums=(0, 3))
    got = jax.vmap(gradient)(q, k, v, sinks, starts)
    for i in range(3):
        want = gradient(*(x[i] for x in (q, k, v, sinks, starts)))
        np.testing.assert_array_equal(got[0][i], want[0])
        np.testing.assert_array_equal(got[1][i], want[1])


def test_scan_and_checkpoint(many):
    """Inside of control flow, with the forward computed again in the backward."""
    q, k, v = many

    @jax.checkpoint
    def layer(x, kv):
        return x + tessera.jax.attention(x, *kv, causal=True), None

    def loss(x):
        return jax.lax.scan(layer, x, (k, v))[0].sum()

    def by_hand(x):
        for each in zip(k, v, strict=True):
            x = x + tessera.jax.attention(x, *each, causal=True)
        return x.sum()

    got = jax.jit(jax.grad(loss))(q[0])
    np.testing.assert_allclose(got, jax.grad(by_hand)(jnp.asarray(q[0])), rtol=1e-5, atol=1e-5)


def test_compiled_once(many):
    """Equal options are one trace; lengths are data."""
    q, k, v = (x[0] for x in many)
    traces = 0

    @jax.jit
    def call(used):
        nonlocal traces
        traces += 1
        return tessera.jax.attention(q, k, v, causal=True, seqused_k=used)

    for lengths in ([50, 50], [3, 4]):
        want = tessera.attention(q, k, v, causal=True, seqused_k=np.int32(lengths))
        np.testing.assert_array_equal(call(np.int32(lengths)), want)
    assert traces == 1


def test_no_python_in_a_call(many):
    """A call is XLA's alone: the compiled program holds no callback."""
    q, k, v = (x[0] for x in many)
    text = jax.jit(lambda q: tessera.jax.attention(q, k, v)).lower(q).compile().as_text()
    assert "tessera_run" in text and "callback" not in text


class TestRefusals:
    def refuse(self, error, words, *arrays, **options):
        with pytest.raises(error, match=words):
            tessera.jax.attention(*arrays, **options)

    def test_while_tracing(self, many):
        q, k, v = (jnp.asarray(x[0]) for x in many)
        self.refuse(
            ValueError, "heads_kv: got 3 for 4 query heads; want", q, k[:, :, :1].repeat(3, 2), v[:, :, :1].repeat(3, 2)
        )
        self.refuse(ValueError, "window: got 3", q, k, v, window=3)
        self.refuse(TypeError, "unexpected keyword argument 'casual'", q, k, v, casual=True)
        self.refuse(ValueError, "seed: got None; want", q, k, v, dropout=0.5)
        self.refuse(
            ValueError, r"seed: got int32 \(3,\); want uint32", q, k, v, dropout=0.5, seed=jnp.zeros(3, "int32")
        )
        self.refuse(NotImplementedError, "quantization: got 'fp8'; want None", q, k, v, quantization="fp8")
        self.refuse(NotImplementedError, "return_residual", q, k, v, return_residual=True)
        self.refuse(NotImplementedError, "tiles: got mass or next", q, k, v, tiles=tessera.Tiles(mass="mean"))
        self.refuse(TypeError, "v: got None", q, k)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"seqused_k": np.int32([50, 51])}, r"seqused_k: got \[1\] = 51; want 0 to 50"),
            ({"seqused_k": np.int32([1, 2, 3])}, r"seqused_k: got int32 \(3\)"),
        ],
    )
    def test_while_running(self, many, options, words):
        """What the data say is known to the run alone; XLA passes the words on."""
        q, k, v = (x[0] for x in many)
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            jax.block_until_ready(tessera.jax.attention(q, k, v, **options))

    def test_second_derivative(self, many):
        q, k, v = (jnp.asarray(x[0]) for x in many)

        def slope(q):
            return jax.grad(lambda q: tessera.jax.attention(q, k, v).sum())(q).sum()

        with pytest.raises(ValueError, match="cannot be differentiated"):
            jax.grad(slope)(q)

    def test_tracers_elsewhere(self, many):
        """The calls for arrays with memory name the one for programs."""
        q, k, v = (x[0] for x in many)
        with pytest.raises(TypeError, match=r"tessera\.jax\.attention"):
            jax.jit(lambda q: tessera.attention(q, k, v))(q)


def test_several_devices():
    """Shardings of jit and shard_map, on four devices of the CPU, which a process has to ask for at its start."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    ran = subprocess.run(
        [sys.executable, str(HERE / "jax_sharding.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["jit", "explicit", "replicated", "shard_map", "vmap"]


def test_layout_of_ffi(tmp_path):
    """The structs of the FFI as they are declared here are those of the installed jax."""
    compiler = shutil.which("c++")
    source = HERE.parents[1] / "python" / "src"
    if compiler is None or not source.exists():
        pytest.skip("no c++")
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{source}", f"-I{jax.ffi.include_dir()}"]
    ran = subprocess.run([*command, str(HERE / "xla_ffi_layout.cpp")], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
