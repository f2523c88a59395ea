# SPDX-License-Identifier: Apache-2.0
"""Decode steps of linear attention on a GPU: what fla_decode.py and cula_decode.py share, with fla_chunk.py the slopes.

As `tessera bench` does, a pool of several times the sequences' states is walked, each call on states of its own, and
calls in a row are timed as one CUDA graph.
"""

import torch
import torch_cuda


def slopes(heads, device):
    """Of `tessera bench`: 2^(-8 h / heads) for heads from 1 on."""
    return torch.exp2(-8 * torch.arange(1, heads + 1, device=device, dtype=torch.float32) / heads)


class Steps:
    """One problem on the device."""

    def __init__(self, request):
        device = torch.device("cuda", request["device"])
        generator = torch.Generator(device).manual_seed(1)
        self.batch, self.heads, self.dim, self.scale = (request[key] for key in ("b", "hq", "d", "scale"))
        self.dtype = torch_cuda.DTYPES[request["dtype"]]
        shape = self.batch, 1, self.heads, self.dim
        self.q, self.k, self.v = (
            torch.randn(shape, generator=generator, device=device, dtype=self.dtype) for _ in range(3)
        )
        self.slopes = slopes(self.heads, device)
        turns = max(1, min(request["slots"] // self.batch, 100))
        shape = turns, self.batch, self.heads, self.dim, self.dim
        self.states = torch.randn(shape, generator=generator, device=device)
        self.turn = 0

    def next_turn(self):
        self.turn = (self.turn + 1) % len(self.states)
        return self.turn


def refusal(request):
    """Why a peer does not do the problem, or None."""
    if request["operation"] != "linear_decode" or request["sq"] != 1 or request["d"] != request["dv"]:
        return "it is measured for linear_decode with one token only"
    if request["dtype"] not in torch_cuda.DTYPES:
        return f"it has no dtype {request['dtype']}"
    return None if request["graph"] else "it is measured on several times as many states as sequences only"
