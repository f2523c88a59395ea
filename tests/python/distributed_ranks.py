# SPDX-License-Identifier: Apache-2.0
"""Runs a function in N processes that are ranks of one Gloo group, and brings back what each returns or raises."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Imported once, by the server that the processes are forked from: they take seconds otherwise.
PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.device_mesh",
    "torch.testing",
    "torch.utils.checkpoint",
    "tessera",
    "tessera.distributed",
]


class Died(NamedTuple):
    """Of a rank that ended without an answer; None: it was still running and was killed."""

    exit_code: int | None


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 100,
    group_timeout: float = 60,
    silent: Sequence[int] = (),
    backend: str = "gloo",
) -> list[Any]:
    """function(rank, size, *arguments) in each of `size` processes; the results by rank. With NCCL each has a GPU.

    An exception comes back as its object; a rank that ended without an answer, or is still running after `timeout`
    seconds, is `Died`. Ranks `silent` are not waited for once the others have answered. No process is left when this
    returns. `function` belongs to a module that can be imported.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            told = (rank, size, backend, store, group_timeout, theirs, function, arguments)
            process = context.Process(target=_work, args=told, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, processes, time.monotonic() + timeout, set(silent))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(pipes: list[Connection], processes: list[Any], deadline: float, silent: set[int]) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    waiting = dict(enumerate(pipes))
    while waiting.keys() - silent and time.monotonic() < deadline:
        for pipe in multiprocessing.connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic())):
            rank = pipes.index(pipe)
            del waiting[rank]
            try:
                results[rank] = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
            except EOFError:
                processes[rank].join(5)
                results[rank] = Died(processes[rank].exitcode)
    for rank in waiting:
        results[rank] = Died(None)
    return results


def _work(
    rank: int,
    size: int,
    backend: str,
    store: str,
    seconds: float,
    pipe: Connection,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
        )
        result = function(rank, size, *arguments)
    except Exception as error:
        traceback.print_exc()  # pytest shows it where a test fails
        result = error
    sent = io.BytesIO()
    torch.save(result, sent)
    pipe.send_bytes(sent.getvalue())
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
