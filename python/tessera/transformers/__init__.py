# SPDX-License-Identifier: Apache-2.0
"""Attention of Hugging Face transformers models by Tessera.

    import tessera.transformers
    tessera.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="tessera")

Causal, sliding, chunked and bidirectional masks, padding on either side, packed sequences, static, dynamic and sliding
caches, sinks, softcap and dropout reach the kernels as windows, lengths and varlen boundaries. No (b, 1, sq, sk) mask
is made for them. A mask of one's own is `attention_mask=` of the model: dense, or a BlockMask of torch's.
`use_continuous_batching(model)` makes continuous batching of a model compute by it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tessera.transformers.attention import attention
from tessera.transformers.forms import VisibleKeys
from tessera.transformers.visible_keys import visible_keys

if TYPE_CHECKING:
    from tessera.transformers.continuous import use_continuous_batching

__all__ = ["VisibleKeys", "attention", "register", "use_continuous_batching", "visible_keys"]


def __getattr__(name: str) -> Any:
    """`use_continuous_batching`, which older transformers have no manager for."""
    if name != "use_continuous_batching":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tessera.transformers.continuous import use_continuous_batching

    return use_continuous_batching


def register(name: str = "tessera") -> None:
    """Makes ``attn_implementation=name`` known to transformers: an attention function and its mask function.

    Raises:
        ValueError: a name that transformers would take for something else.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    taken = {"eager", "sdpa", "flex_attention"}
    if not name or name in taken or any(part in name for part in ("flash", "|", "/")):
        raise ValueError(
            f"name: got {name!r}; want one without 'flash', '|' and '/' that is no implementation of transformers"
        )
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, visible_keys)
