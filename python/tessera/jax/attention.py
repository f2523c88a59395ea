# SPDX-License-Identifier: Apache-2.0
"""`attention` for jax: options to a pass, and its gradient."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tessera._arguments import parse
from tessera._features import Features, with_lse, with_residual
from tessera._libraries import dtype_name
from tessera.jax.batching import batched
from tessera.jax.call import BACKWARD, FORWARD, Pass, varying_alike
from tessera.values import KeySource, Tiles, arrays_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tessera._arguments import AttentionOptions

Array = Any

_REFUSED = {
    "quantization": "None: quantise before, and give descales",
    "return_residual": "False: the gradient keeps what it needs by itself",
    "metadata": "None: a GPU clamps bad lengths",
    "status": "None",
}


def attention(q: Array, k: Array | KeySource, v: Array | None = None, **options: Unpack[AttentionOptions]) -> Any:
    """`tessera.attention` on jax arrays, inside or outside of jax's transformations.

    Args:
        q: (batch, seqlen_q, heads_q, dim), or (tokens, heads_q, dim) with `cu_seqlens_q`. fp32, fp16 or bf16.
        k: (batch, seqlen_k, heads_kv, dim), (tokens, heads_kv, dim) with `cu_seqlens_k`, or a `KeySource`.
        v: as k, with a dim of its own; None where k is a `KeySource`.
        options: those of `tessera.attention` but for quantization, return_residual, metadata, status, out, what `Tiles`
            asks to be returned, and oracles written in Python. Arrays among them may be traced; the others are
            static. `max_seqlen_q` and `max_seqlen_k` of traced boundaries are all tokens if not given. `seed`, which
            dropout wants here, is an integer, a key of `jax.random`, or uint32 (2), the low word first. Positions
            (`Offsets`) may be int32.

    Returns:
        out (…, heads_q, dim of v), or (out, lse) with `return_lse`. Differentiable by q, k, v, sinks and a second
        source's k and v, through out and lse, once; not for pages.

    Raises:
        ValueError: shapes, dtypes and values that fit no problem, while tracing.
        NotImplementedError: what nothing computes, or not here, while tracing.
        jax.errors.JaxRuntimeError: lengths, boundaries, pages and lists that are wrong, on the CPU, when the call runs.
            A GPU clamps them.

    Source: Vaswani et al. 2017 (arXiv:1706.03762); Dao et al. 2022 (arXiv:2205.14135).
    """
    for name, want in _REFUSED.items():
        if options.get(name):
            raise NotImplementedError(f"{name}: got {options[name]!r}; want {want}")  # type: ignore[literal-required]
    tiles = options.get("tiles")
    if isinstance(tiles, Tiles) and (tiles.mass is not None or tiles.next is not None):
        raise NotImplementedError("tiles: got mass or next; want lists to read: only `tessera.attention` returns them")
    q = jnp.asarray(q)
    seed = _seed_words(options) if options.get("dropout") else None
    k = _with_longest(q, k, options)
    call = parse(q, k, v, **options)
    if call.callables != (None, None):
        raise NotImplementedError("score, mask: got a function for the oracle; want one that is traced")
    k, v = arrays_of(k, v)
    slots, tensors = call.slots, call.tensors
    if seed is not None:
        slots, tensors = (*slots, "dropout_seed"), (*tensors, seed)
    plain = _Plain(call.features, slots, call.sizes, call.scalars)
    arrays = tuple(_array_of(array) for array in (q, k, v, *tensors))
    return _call(plain, arrays)


class _Plain(NamedTuple):
    """A call without its arrays. Equal arguments give equal ones, by which jax finds what it has traced."""

    features: Features
    slots: tuple[str, ...]
    sizes: tuple[int, int, int]
    scalars: tuple[int, int, int, int]

    def forward(self, features: Features) -> Pass:
        return Pass(FORWARD, features, self.slots, self.sizes, self.scalars)


@partial(jax.jit, static_argnums=0)
def _call(plain: _Plain, arrays: tuple[Array, ...]) -> Any:
    return _attention(plain, varying_alike(arrays))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plain: _Plain, arrays: tuple[Array, ...]) -> Any:
    results = batched(plain.forward(plain.features))(*arrays)
    return results if plain.features.lse else results[0]


def _attention_forward(plain: _Plain, arrays: tuple[Array, ...]) -> tuple[Any, Any]:
    features = with_lse(plain.features)
    rounded = features.out or dtype_name(arrays[0].dtype)
    if rounded in ("fp16", "bf16") and not features.drops_residual:
        features = with_residual(features)
    out, lse, *residual = batched(plain.forward(features))(*arrays)
    return (out, lse) if plain.features.lse else out, (arrays, out, lse, *residual)


def _attention_backward(plain: _Plain, kept: Any, gradient: Any) -> tuple[Any]:
    arrays, out, lse, *residual = kept
    dout, dlse = gradient if plain.features.lse else (gradient, None)
    features = with_residual(plain.features) if residual else plain.features
    given = [out, lse, *residual, dout.astype(out.dtype)]
    extra: tuple[str, ...] = ()
    if dlse is not None:
        given.append(dlse)
        extra = ("dlse",)
    run = Pass(BACKWARD, features, plain.slots, plain.sizes, plain.scalars, extra)
    dq, dk, dv, *others = batched(run)(*arrays, *given)
    by_slot = dict(zip((slot for slot in ("sink", "k2", "v2") if slot in plain.slots), others, strict=True))
    gradients = (dq, dk, dv, *(by_slot.get(slot) for slot in plain.slots))
    return (tuple(_no_gradient(x) if each is None else each for each, x in zip(gradients, arrays, strict=True)),)


_attention.defvjp(_attention_forward, _attention_backward)


def _no_gradient(array: Array) -> Array:
    """Of ALiBi's slopes, descales and the like, which have none: zeros, of float0 for integers."""
    if jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.zeros(array.shape, array.dtype)
    return np.zeros(array.shape, jax.dtypes.float0)


def _array_of(array: Array) -> Array:
    """As jax's; integers of 64 bits, which jax may not have, as two words of 32."""
    if isinstance(array, np.ndarray) and array.dtype in (np.int64, np.uint64):
        return jnp.asarray(np.ascontiguousarray(array).view(np.uint32).reshape(*array.shape, 2))
    return jnp.asarray(array)


def _seed_words(options: Any) -> Array | None:
    """Takes an array of a seed out of the options: uint32 (2), or a key of jax.random."""
    seed = options.get("seed")
    if seed is None:
        raise ValueError("seed: got None; want an integer, a key of jax.random or uint32 (2): none is drawn here")
    if not hasattr(seed, "shape") or isinstance(seed, np.generic):
        return None
    if jax.dtypes.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed).reshape(-1)[:2]
    if seed.dtype != np.uint32 or tuple(seed.shape) != (2,):
        raise ValueError(f"seed: got {seed.dtype} {tuple(seed.shape)}; want uint32 (2), the low word first, or a key")
    options["seed"] = 0
    return jnp.asarray(seed).reshape(1, 2)


def _with_longest(q: Array, k: Any, options: Any) -> Any:
    """k, and in the options how long sequences may be whose traced boundaries nobody can look at: all tokens."""
    if _is_traced(options.get("cu_seqlens_q")):
        options.setdefault("max_seqlen_q", q.shape[0])
    if isinstance(k, KeySource):
        k = _bounded(k)
    elif _is_traced(options.get("cu_seqlens_k")):
        options.setdefault("max_seqlen_k", k.shape[0])
    if isinstance(options.get("k2"), KeySource):
        options["k2"] = _bounded(options["k2"])
    return k


def _bounded(source: KeySource) -> KeySource:
    if source.max_seqlen is not None:
        return source
    if _is_traced(source.page_indptr) and source.page_indices is not None:
        return source._replace(max_seqlen=source.page_indices.shape[0] * source.k.shape[1])
    if _is_traced(source.cu_seqlens) and source.page_table is None:
        return source._replace(max_seqlen=source.k.shape[0])
    return source


def _is_traced(array: Any) -> bool:
    return isinstance(array, jax.core.Tracer)
