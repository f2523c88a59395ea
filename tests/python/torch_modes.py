# SPDX-License-Identifier: Apache-2.0
"""Modes of torch that tests enter."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """The names of all operators that a mode sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
