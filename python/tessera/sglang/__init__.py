# SPDX-License-Identifier: Apache-2.0
"""Tessera as an attention backend of SGLang: `--attention-backend tessera`, written against SGLang 0.5.23
(docs/engines.md).

`register` is the entry point `tessera` of the group `sglang.srt.plugins`, which SGLang loads in each of its processes.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]

NAME = "tessera"


def register() -> None:
    """Names the backend in SGLang's registry and among the choices of its command line."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(create)


def create(model_runner: Any) -> Any:
    """The backend of a model runner, as SGLang's registry calls for it."""
    from .backend import TesseraAttnBackend

    return TesseraAttnBackend(model_runner)
