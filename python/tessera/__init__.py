# SPDX-License-Identifier: Apache-2.0
"""Attention that computes the tiles it must and skips the rest.

`attention` has everything; `flash_attn_func` and its relatives have flash-attn 2.8's names and arguments (other
versions: `tessera.compat`). Arguments are arrays of any library, results are in the same one. `tessera.torch` comes in
with torch, `tessera.transformers` when asked for; `import tessera` imports no array library.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _core
from ._core import build_info, cpu_isas
from ._execute import get_threads, set_threads
from ._libraries import Library, register_loader
from .attention import attention, attention_backward
from .callables import register_mask, register_score
from .cascade import SharedPrefix, SharedPrefixes, cascade_attention, check_tree, find_shared_prefixes, tree_mask
from .decay import decay_slopes
from .linear import linear_attention, linear_chunk, linear_decode
from .linear_ring import linear_flush, ring_advance
from .native_sparse import nsa
from .native_sparse.gates import nsa_gate, nsa_gate_backward
from .native_sparse.operations import nsa_pool, nsa_pool_backward, nsa_select
from .operations import combine, dropout_keep, kv_append, merge_states, violation_of
from .plans import AttentionPlan, explain, plan
from .quantization.operations import Quantized, dequantize, quantize
from .skip import SkipState
from .tiles import TileList
from .values import KeySource, Offsets, Tiles

if TYPE_CHECKING:
    from . import compat as compat
    from . import distributed as distributed
    from . import expressions as expressions
    from . import plot as plot
    from . import torch as torch
    from . import transformers as transformers
    from .compat.flash_attn_2 import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
    )
    from .compat.flex_attention import and_masks, create_block_mask, flex_attention, noop_mask, or_masks

__version__: str = _core.version()

_FLASH_ATTN = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
)
_FLEX = ("and_masks", "create_block_mask", "flex_attention", "noop_mask", "or_masks")
_MODULES = ("compat", "distributed", "expressions", "plot", "torch", "transformers")

__all__ = [
    "AttentionPlan",
    "KeySource",
    "Offsets",
    "Quantized",
    "SharedPrefix",
    "SharedPrefixes",
    "SkipState",
    "TileList",
    "Tiles",
    "and_masks",
    "attention",
    "attention_backward",
    "build_info",
    "cascade_attention",
    "check_tree",
    "combine",
    "cpu_isas",
    "create_block_mask",
    "decay_slopes",
    "dequantize",
    "dropout_keep",
    "explain",
    "find_shared_prefixes",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "get_threads",
    "kv_append",
    "linear_attention",
    "linear_chunk",
    "linear_decode",
    "linear_flush",
    "merge_states",
    "noop_mask",
    "nsa",
    "nsa_gate",
    "nsa_gate_backward",
    "nsa_pool",
    "nsa_pool_backward",
    "nsa_select",
    "or_masks",
    "plan",
    "quantize",
    "register_mask",
    "register_score",
    "ring_advance",
    "set_threads",
    "tree_mask",
    "violation_of",
]


def _load_torch() -> Library:
    from .torch.library import LIBRARY  # a statement, because torch.compile traces it

    return LIBRARY


register_loader("torch", _load_torch)
if sys.modules.get("torch") is not None:  # otherwise with the first torch tensor
    _load_torch()


if not TYPE_CHECKING:  # to a type checker every name is an attribute of a module that has a __getattr__

    def __getattr__(name: str) -> Any:
        if name in _FLASH_ATTN:
            found = getattr(import_module(".compat.flash_attn_2", __name__), name)
            globals()[name] = found
            return found
        if name in _FLEX:
            found = getattr(import_module(".compat.flex_attention", __name__), name)
            globals()[name] = found
            return found
        if name in _MODULES:
            try:
                return import_module(f".{name}", __name__)
            except ModuleNotFoundError as error:
                if error.name is not None and error.name.partition(".")[0] == __name__:
                    raise
                # hasattr, help and pydoc ask for every name, and want to hear that there is none.
                raise AttributeError(f"module {__name__!r} has no attribute {name!r} here: {error}") from error
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
