# SPDX-License-Identifier: Apache-2.0
"""Attention inside of jax programs: under `jax.jit`, `grad`, `vmap`, `shard_map` and shardings of jit.

    import tessera.jax
    out = tessera.jax.attention(q, k, v, causal=True)

XLA calls Tessera's plan through its FFI, on the CPU and on the stream of an NVIDIA GPU; no Python runs and nothing is
copied. docs/engines.md has what is supported.
"""

from __future__ import annotations

from tessera.jax.attention import attention

__all__ = ["attention"]
