# SPDX-License-Identifier: Apache-2.0
"""What `test_jax_transforms` runs in a process with four devices: prints a word for each thing that was right."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import tessera
import tessera.jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

SPEC = PartitionSpec("data", None, "model", None)
OPTIONS = {"causal": True, "batch_invariant": True, "deterministic": True}
rng = np.random.default_rng(3)
q = rng.standard_normal((4, 30, 8, 16), dtype=np.float32)
k, v = rng.standard_normal((2, 4, 33, 4, 16), dtype=np.float32)
sinks = rng.standard_normal(8, dtype=np.float32)
used = np.int32([33, 20, 1, 30])

want, lse = tessera.attention(q, k, v, sinks=sinks, seqused_k=used, return_lse=True, **OPTIONS)
want_gradients = tessera.attention_backward(2 * want, q, k, v, want, lse, sinks=sinks, seqused_k=used, **OPTIONS)


def attend(q, k, v, sinks, used):
    return tessera.jax.attention(q, k, v, sinks=sinks, seqused_k=used, **OPTIONS)


def loss_of(call):
    return lambda *arrays: jnp.square(call(*arrays)).sum()


def spread(mesh):
    specs = (SPEC, SPEC, SPEC, PartitionSpec("model"), PartitionSpec("data"))
    arrays = (q, k, v, sinks, used)
    return specs, [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]


def check(call, arrays):
    out = jax.jit(call)(*arrays)
    np.testing.assert_array_equal(out, want)
    gradients = jax.jit(jax.grad(loss_of(call), argnums=(0, 1, 2, 3)))(*arrays)
    for got, its in zip(gradients[:3], want_gradients[:3], strict=True):
        np.testing.assert_array_equal(got, its)
    np.testing.assert_allclose(gradients[3], want_gradients[3], rtol=1e-4, atol=1e-5)  # summed in another order
    return out, gradients


assert jax.device_count() == 4
auto = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
explicit = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

specs, arrays = spread(auto)
out, gradients = check(attend, arrays)
assert out.sharding.is_equivalent_to(NamedSharding(auto, SPEC), 4)
assert all(x.sharding.is_equivalent_to(NamedSharding(auto, SPEC), 4) for x in gradients[:3])
text = jax.jit(attend).lower(*arrays).compile().as_text()
assert "f32[2,30,4,16]" in text and "all-gather" not in text, text  # a quarter on each device, nothing gathered
print("jit")

_, arrays = spread(explicit)
check(attend, arrays)
print("explicit")

# Two parts of one key head each cannot share it: heads stay whole, the batch is split.
few = [q, k[:, :, :1], v[:, :, :1]]
few_spec = PartitionSpec("data", None, "model")
few_arrays = [jax.device_put(few[0], NamedSharding(auto, few_spec)), *(jnp.asarray(x) for x in few[1:])]
text = jax.jit(lambda *a: tessera.jax.attention(*a, **OPTIONS)).lower(*few_arrays).compile().as_text()
assert "f32[2,30,8,16]" in text
got = jax.jit(lambda *a: tessera.jax.attention(*a, **OPTIONS))(*few_arrays)
np.testing.assert_array_equal(got, tessera.attention(*few, **OPTIONS))
# Dropout depends on the number of a sequence: computed whole.
_, arrays = spread(auto)
got = jax.jit(lambda q, k, v: tessera.jax.attention(q, k, v, dropout=0.5, seed=1))(*arrays[:3])
np.testing.assert_array_equal(got, tessera.attention(q, k, v, dropout=0.5, seed=1))
print("replicated")

for mesh in (auto, explicit):
    specs, arrays = spread(mesh)
    check(jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=SPEC), arrays)
print("shard_map")

two = jax.vmap(lambda q, k: attend(q, k, *arrays[2:]))(jnp.stack([arrays[0]] * 2), jnp.stack([arrays[1]] * 2))
np.testing.assert_array_equal(two[1], want)
print("vmap")
