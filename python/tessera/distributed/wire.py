# SPDX-License-Identifier: Apache-2.0
"""Moves tensors between the ranks of a torch.distributed group, with a timeout that names the rank that is missing.

NCCL's operations are queued on a stream of its own and `wait` only makes the current stream wait; Gloo's run in threads
and `wait` blocks. Code above sees one order of calls for both: start, compute, wait.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .faults import rank_error

ANYONE = -1  # of the peers of work that several have to do with


class Moved(NamedTuple):
    """A tensor on its way to or from a rank of the group; contiguous."""

    peer: int
    tensor: Tensor


class Pending:
    """Operations under way. `wait` once, before what was received is read or what was sent is written."""

    def __init__(self, wire: Wire, doing: str) -> None:
        self._wire, self._doing = wire, doing
        self._works: list[tuple[int, Any]] = []  # receives first: their peers are those that may be missing
        self._kept: list[Tensor] = []

    def wait(self) -> None:
        for peer, work in self._works:
            try:
                self._wire.wait_for(work, peer == ANYONE)
            except RuntimeError as error:
                raise self._wire.error(peer, self._doing, error) from error
        self._works.clear()
        self._kept.clear()


class Wire:
    """A process group as the schedules see it.

    timeout: seconds that a rank is waited for; None for the group's own. On CUDA NCCL's watchdog has the last word: it
    ends the process after the group's timeout. collectives: all-gather and reduce-scatter by the backend's own, by
    default of CUDA tensors; otherwise by sends and receives, whose errors can name a rank.
    """

    def __init__(self, group: Any, timeout: float | None = None, collectives: bool | None = None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"group: got one that rank {dist.get_rank()} is no member of; want one that it is in")
        on_cpu = _has_backend(group, "cpu")
        self.control = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        self.seconds = timeout
        self._collectives = collectives
        self._names = dist.get_process_group_ranks(group)

    def name(self, rank: int) -> int:
        """The global rank of one of the group."""
        return self._names[rank]

    def by_backend(self, tensor: Tensor) -> bool:
        """Whether such tensors are moved by the backend's collectives."""
        return tensor.is_cuda if self._collectives is None else self._collectives

    def wait_for(self, work: Any, on_gpu: bool) -> None:
        """NCCL's work would block the host if it were given a timeout."""
        work.wait() if self.seconds is None or on_gpu else work.wait(timedelta(seconds=self.seconds))

    def error(self, peer: int, doing: str, cause: Exception) -> Exception:
        peers = [rank for rank in range(self.size) if rank != self.rank] if peer == ANYONE else [peer]
        return rank_error(self.group, [self.name(rank) for rank in peers], doing, self.seconds, cause)

    def start(self, sends: list[Moved], receives: list[Moved], doing: str) -> Pending:
        """Queues all of it. Of one peer, tensors are received in the order in which it sends them."""
        pending = Pending(self, doing)
        ops, peers = [], []
        for kind, moved in ((dist.irecv, receives), (dist.isend, sends)):
            counts: dict[int, int] = {}
            for peer, tensor in moved:
                if tensor.numel():
                    tag = counts[peer] = counts.get(peer, 0) + 1
                    ops.append(dist.P2POp(kind, _bytes(tensor), self.name(peer), self.group, tag))
                    peers.append(peer)
        if not ops:
            return pending
        if any(op.tensor.is_cuda for op in ops):
            works = dist.batch_isend_irecv(ops)
            pending._works = [(ANYONE, work) for work in works]
        else:
            for peer, op in zip(peers, ops, strict=True):
                try:
                    pending._works.append((peer, op.op(op.tensor, op.peer, op.group, op.tag)))
                except RuntimeError as error:
                    raise self.error(peer, doing, error) from error
        pending._kept = [op.tensor for op in ops]
        return pending

    def gather(self, tensor: Tensor, doing: str) -> Tensor:
        """(ranks, …) of the tensors of all ranks, which have one shape."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        if self.by_backend(tensor):
            self._collective("all_gather", gathered, tensor.contiguous(), doing)
            return gathered
        gathered[self.rank] = tensor
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = [Moved(rank, gathered[self.rank]) for rank in others]
        self.start(sends, [Moved(rank, gathered[rank]) for rank in others], doing).wait()
        return gathered

    def scatter_sum(self, parts: Tensor, doing: str) -> Tensor:
        """The sum over ranks of their `parts[this rank]`, added up by the library in an order of its own."""
        summed = parts.new_empty(parts.shape[1:])
        self._collective("reduce_scatter", summed, parts.contiguous(), doing)
        return summed

    def _collective(self, name: str, output: Tensor, given: Tensor, doing: str) -> None:
        # torch 2.13 calls them all_gather_single and reduce_scatter_single.
        function = getattr(dist, f"{name}_single", None) or getattr(
            dist, {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[name]
        )
        moves = name == "all_gather"
        try:
            flat = [_bytes(x) if moves else x.view(-1) for x in (output, given)]
            work = function(*flat, group=self.group, async_op=True)
            self.wait_for(work, given.is_cuda)
        except RuntimeError as error:
            raise self.error(ANYONE, doing, error) from error


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory in one dimension, as bytes: every backend moves those, whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)


def _has_backend(group: Any, device: str) -> bool:
    try:
        group._get_backend(torch.device(device))
    except RuntimeError:
        return False
    return True


class Team:
    """All ranks of a layout: those of one wire, or of an inner one (neighbours in the layout) and an outer one."""

    def __init__(self, inner: Wire, outer: Wire | None = None) -> None:
        self.inner, self.outer = inner, outer
        self.control = inner.control
        self.rank = inner.rank if outer is None else outer.rank * inner.size + inner.rank
        self.size = inner.size if outer is None else outer.size * inner.size
        mine = torch.tensor([dist.get_rank()], dtype=torch.int64, device=self.control)
        self._names = [int(name) for name in self.gather(mine, "the first meeting of the group").flatten().tolist()]
        if len(set(self._names)) != self.size:
            raise ValueError(f"group: got ranks {self._names}; want groups in a grid, each rank once")

    def name(self, rank: int) -> int:
        """The global rank of one of the team."""
        return self._names[rank]

    def gather(self, tensor: Tensor, doing: str) -> Tensor:
        """(ranks, …) of the tensors of all ranks, which have one shape."""
        found = self.inner.gather(tensor, doing)
        return found if self.outer is None else self.outer.gather(found, doing).flatten(0, 1)


def groups_of(group: Any) -> tuple[Any, Any]:
    """(inner, outer) process groups; outer is None for one."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("group: got no process group; want torch.distributed.init_process_group before")
    if group is None:
        return dist.group.WORLD, None
    if isinstance(group, (tuple, list)):
        if len(group) != 2:
            raise ValueError(f"group: got {len(group)} groups; want one, or (inner, outer)")
        return group[0], group[1]
    if hasattr(group, "get_all_groups"):
        groups = group.get_all_groups()
        if len(groups) not in (1, 2):
            raise ValueError(f"group: got a mesh of {len(groups)} dimensions; want 1, or 2 for 'two_level'")
        return groups[-1], groups[0] if len(groups) == 2 else None
    return group, None
