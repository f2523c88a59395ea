# SPDX-License-Identifier: Apache-2.0
"""A small GPT of random weights for tests of the examples."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


def tiny_gpt(model: ModuleType, layers: int) -> Any:
    """Of examples/gpt's module `model`, with weights that are large enough for attention to decide what comes next."""
    config = model.Config(
        dim=64, layers=layers, heads_q=4, heads_kv=2, head_dim=16, ffn=96, trained_context=128, rope_base=100.0
    )
    made = model.initialise(model.GPT(config), seed=5)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() == 2:
                weight.mul_(6)
    return made.eval()
