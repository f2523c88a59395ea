# SPDX-License-Identifier: Apache-2.0
"""Training with each window's bytes spread over processes: a rank has some rows of every window, all have the weights.

Only attention and the loss know of it. Attention is `tessera.distributed`'s; the loss is added up over ranks, and so
are the gradients of the weights, which every rank has.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tessera
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from tessera.distributed import context_parallel
from torch import Tensor, nn


class Spread:
    """Windows of `context` bytes over all ranks. rotate(x, rows): the rotary embedding of rows at these positions."""

    def __init__(self, context: int, device: torch.device, rotate: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.context = context
        self.cp = context_parallel(seqlen=context)
        self.positions, self.rotate = self.cp.positions(device), rotate

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (self.rotate(x, self.positions) for x in (q, k))
        return self.cp.attention(q, k, v, causal=True)

    def loss_of(self, model: nn.Module, attention: Any, tokens: Tensor, following: Tensor) -> Tensor:
        """This rank's share of the mean nats per byte."""
        mine, wanted = self.cp.shard(tokens), self.cp.shard(following)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            logits = model(mine, attention)
        return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="sum") / following.numel()

    def add_up(self, model: nn.Module, loss: Tensor) -> Tensor:
        """Adds up the weights' gradients over ranks, in one message; returns the whole loss."""
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads] + [loss.detach().reshape(1)])
        dist.all_reduce(flat)
        for grad, summed in zip(grads, flat[:-1].split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(summed.view_as(grad))
        return flat[-1]


Train = Callable[..., dict[str, Any]]


def in_processes(ranks: int, device: torch.device, train: Train, given: Any, *texts: Tensor) -> dict[str, Any]:
    """train(given, *texts) in `ranks` processes of one group; what the first returns, which JSON can hold."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (ranks, device.type, folder, train, given, texts), nprocs=ranks)
        return json.loads((Path(folder) / "result.json").read_text())


def _process(
    rank: int, ranks: int, kind: str, folder: str, train: Train, given: Any, texts: tuple[Tensor, ...]
) -> None:
    if kind == "cuda":
        torch.cuda.set_device(rank)
        given.device = torch.device("cuda", rank)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        threads = max(1, (os.cpu_count() or 1) // ranks)
        torch.set_num_threads(threads)
        tessera.set_threads(threads)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    result = train(given, *texts)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()
