# SPDX-License-Identifier: Apache-2.0
"""The calls people have code for, under their own names, over :func:`tessera.attention`.

Each module keeps the names, argument order, defaults and return shapes of one version of flash-attn's interface, so
that changing one import is enough to try Tessera:

====================  =================================================================================
``flash_attn_2``      flash-attn 2.8: ``flash_attn_func`` returns the tensor alone unless asked for more
``flash_attn_3``      the Hopper interface: ``return_attn_probs`` adds the LSE, ``qv`` and descales exist
``flash_attn_4``      the CuTe interface: always ``(out, lse)``, learnable sinks, block-sparse tensors, score_mod
``bert_padding``      ``flash_attn.bert_padding``: padded batches to packed tokens and back; torch only
====================  =================================================================================

``lightning`` has the calls of serving engines (vLLM, SGLang, cuLA) for lightning attention; its own page says more.

Rules common to the three of flash-attn:

- Arguments are torch tensors (with autograd), numpy arrays, or anything with DLPack; results come back in the library
  of q.
- torch's and cupy's arrays may be on a GPU, all of a call's on the same one. Lengths, page tables and lists are then
  read by the GPU alone, so that nothing waits and graphs can be captured.
- An argument that cannot be honoured raises ``NotImplementedError`` or ``ValueError`` naming it. Arguments that only
  tune flash-attention's kernels (``pack_gqa``, ``sm_margin``, ``scheduler_metadata``) are accepted and change nothing.
- fp32 is accepted besides fp16 and bf16 (on a GPU it is not), and so is every head dim up to 512 and every page size
  from 1.
- The LSE of a row that sees no key is −inf, in ``flash_attn_2`` too, where flash-attn 2 writes +inf: −inf is the
  identity of merging, and what versions 3 and 4 return. LSEs can be differentiated.
- Both ends of ``window_size`` are honoured as documented there (inclusive, aligned to the bottom right corner), also
  when one end is unbounded or longer than the keys.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["bert_padding", "flash_attn_2", "flash_attn_3", "flash_attn_4", "lightning"]


if TYPE_CHECKING:
    from . import bert_padding, flash_attn_2, flash_attn_3, flash_attn_4, lightning
else:  # to a type checker every name is an attribute of a module that has a __getattr__

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
