# SPDX-License-Identifier: Apache-2.0
"""Times of calls: on a GPU those of CUDA graphs behind a write that overwrites the L2 cache."""

from __future__ import annotations

import datetime
import itertools
import platform
import time
from collections.abc import Callable
from typing import Any

import tessera
import torch

Call = Callable[[], Any]


def captured(call: Call, run_before: bool = True) -> Call:
    """The call as a CUDA graph. `run_before`: it runs once without one, which compiles its kernels."""
    if run_before:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


class Clock:
    """Microseconds of calls on a device, "cpu" or "cuda"."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device != "cpu"
        self._scratch = torch.empty(256 << 20 if self.on_gpu else 0, dtype=torch.uint8, device=device)

    def prepared(self, call: Call, run_before: bool = True) -> Call:
        """The call as it is to be timed: on a GPU a graph of it."""
        return captured(call, run_before) if self.on_gpu else call

    def microseconds(self, call: Call) -> float:
        return self.of_parts([call])[0]

    def of_parts(self, parts: list[Call], writes: int = 1) -> list[float]:
        """Of calls that follow each other, each on its own. `writes`: of 256 MB before them, each some 0.1 ms of a GPU,
        in which the host runs ahead: as many as let it come to the end.
        """
        if not self.on_gpu:
            stamps = [time.perf_counter()]
            for part in parts:
                part()
                stamps.append(time.perf_counter())
            return [(end - begin) * 1e6 for begin, end in itertools.pairwise(stamps)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
        for _ in range(writes):
            self._scratch.zero_()
        events[0].record()
        for part, event in zip(parts, events[1:], strict=True):
            part()
            event.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in itertools.pairwise(events)]


def machine(device: str) -> dict[str, Any]:
    """What a JSON file of bench/results says of the machine and versions."""
    name = platform.processor() or platform.machine()
    return {
        "device": name if device == "cpu" else torch.cuda.get_device_name(),
        "version": tessera.__version__,
        "peers": {"torch": f"torch {torch.__version__}"},
        "date": datetime.date.today().isoformat(),
    }
