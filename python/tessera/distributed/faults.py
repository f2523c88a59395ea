# SPDX-License-Identifier: Apache-2.0
"""What goes wrong between ranks: one that does not answer, and arguments that differ."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .wire import Team

_GRACE = 1.0  # seconds that reports of other ranks are waited for


class RankError(RuntimeError):
    """A rank did not answer. ranks: which, as torch.distributed's global ranks."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message, tuple(ranks))
        self.ranks = tuple(ranks)

    def __str__(self) -> str:
        return str(self.args[0])


def rank_error(group: Any, silent: Sequence[int], doing: str, seconds: float | None, cause: Exception) -> RankError:
    """The error of a rank that waited for the global ranks `silent` in vain.

    A rank that waits for one that itself waits for a dead one would name the wrong one. So each tells the group's store
    whom it waited for, and looks there for those who did not tell anything: they are dead, or hang.
    """
    told: dict[int, list[int]] = {}
    with contextlib.suppress(Exception):  # the store may have died with its host
        store, mine = dist.distributed_c10d._get_default_store(), dist.get_rank()
        members = dist.get_process_group_ranks(group)
        prefix = f"tessera/context_parallel/{group.group_name}/silent"
        store.set(f"{prefix}/{mine}", json.dumps(list(silent)))
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and len(told) < len(members) - 1:
            for rank in members:
                if rank not in told and store.check([f"{prefix}/{rank}"]):
                    told[rank] = json.loads(store.get(f"{prefix}/{rank}"))
            time.sleep(0.05)
    accused = sorted({rank for ranks in told.values() for rank in ranks} | set(silent))
    named = [rank for rank in accused if rank not in told] or sorted(set(silent))
    ranks = f"rank {named[0]}" if len(named) == 1 else "ranks " + ", ".join(map(str, named))
    within = "" if seconds is None else f" within {seconds:g} s"
    return RankError(
        f"{ranks}: got no answer{within} in {doing}; want every rank of the group alive and in the same "
        f"call ({str(cause).splitlines()[0][:200]})",
        named,
    )


def agree(wire: Team, summary: Mapping[str, str], failure: Exception | None) -> None:
    """Raises on every rank of the group, and at the same place, unless all have one summary and no failure.

    summary: argument by argument, what must be the same everywhere. failure: what this rank's own arguments are refused
    for; it is raised here, and the others say whose it is. Moves 24 bytes a rank, more only where there is an error.
    """
    if wire.size == 1:
        if failure is not None:
            raise failure
        return
    text = json.dumps({**summary, "": "" if failure is None else f"{failure}"}).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
    mine = torch.tensor([digest, len(text), failure is not None], dtype=torch.int64, device=wire.control)
    heads = wire.gather(mine, "the comparison of arguments").cpu().tolist()
    if failure is None and all(head == heads[0] for head in heads):
        return
    most = max(length for _, length, _ in heads)
    padded = torch.frombuffer(bytearray(text.ljust(most)), dtype=torch.uint8).to(wire.control)
    rows = wire.gather(padded, "the comparison of arguments").cpu()
    if failure is not None:
        raise failure
    summaries = [json.loads(bytes(row.tolist())) for row in rows]
    for rank, other in enumerate(summaries):
        if other[""]:
            raise ValueError(f"{other['']} (on rank {wire.name(rank)})")
    for rank, other in enumerate(summaries):
        for argument in summaries[0]:
            first, differs = summaries[0].get(argument), other.get(argument)
            if first != differs:
                raise ValueError(
                    f"{argument}: got {first} on rank {wire.name(0)} and {differs} on rank {wire.name(rank)}; "
                    "want the same on every rank"
                )
