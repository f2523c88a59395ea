# SPDX-License-Identifier: Apache-2.0
"""Attention over sequences that are longer than one device: context parallelism on torch.distributed.

`context_parallel` has everything; docs/context-parallel.md says which method is for what, and what moves.
"""

from .api import ContextParallel, context_parallel
from .cost import Estimate, Machine
from .faults import RankError
from .reach import Mask
from .shards import Layout, Part, layout_of

__all__ = [
    "ContextParallel",
    "Estimate",
    "Layout",
    "Machine",
    "Mask",
    "Part",
    "RankError",
    "context_parallel",
    "layout_of",
]
