# SPDX-License-Identifier: Apache-2.0
"""Tessera as an attention backend of vLLM: `--attention-backend CUSTOM`, written against vLLM 0.33.0 (docs/engines.md).

`register` is the entry point `tessera` of the group `vllm.general_plugins`, which vLLM loads in each of its processes.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Names `TesseraAttentionBackend` as vLLM's custom backend. Nothing of vLLM is imported but its registry."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "tessera.vllm.backend.TesseraAttentionBackend")
