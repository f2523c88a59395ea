# SPDX-License-Identifier: Apache-2.0
"""Decoding of sequences that share leading pages, and trees of speculative tokens."""

from __future__ import annotations

from .attention import cascade_attention
from .finding import find_shared_prefixes
from .prefixes import SharedPrefix, SharedPrefixes
from .tree import check_tree, tree_mask

__all__ = [
    "SharedPrefix",
    "SharedPrefixes",
    "cascade_attention",
    "check_tree",
    "find_shared_prefixes",
    "tree_mask",
]
