# SPDX-License-Identifier: Apache-2.0
"""Runs on a GPU: on the current stream of the arrays' library, in memory of its allocator."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from . import _core
from ._libraries import Library

Array = Any


class KeptWorkspaces:
    """Workspaces that a plan, or who runs several plans, keeps between runs, for each stream; of the streams used last,
    MOST_STREAMS at most.

    A run behind another one on the same stream may use its workspace, one on another stream may not. Streams are told
    apart by the driver's ids: a handle may come back with another stream, and is one for the default streams of all
    threads.
    """

    MOST_STREAMS = 16

    def __init__(self) -> None:
        self._free: OrderedDict[int, list[Array]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, device: int, stream: int) -> list[Array]:
        """Those that no run holds; a run takes one from there and appends it when it is queued. Not kept for a stream
        that is being captured, whose graph needs a workspace of its own, or that cannot be told from others."""
        stream_id = None if _core.is_capturing(device, stream) else _core.stream_id(device, stream)
        if stream_id is None:
            return []
        with self._lock:
            free = self._free.setdefault(stream_id, [])
            self._free.move_to_end(stream_id)
            if len(self._free) > self.MOST_STREAMS:
                self._free.popitem(last=False)
            return free


def run_on_gpu(
    library: Library,
    plan: Any,
    slots: tuple[str, ...],
    arrays: tuple[Array, ...],
    like: Array,
    scalars: Iterable[int] = (),
    callables: Iterable[Any] = (),
    kept: KeptWorkspaces | None = None,
) -> None:
    """Runs a `_core.Plan` of the GPU of `like` on the current stream of its library, with a workspace made there.

    A workspace by the library's own allocator is reused in the order of the stream, and belongs to the graph if one is
    captured. `kept`: the workspaces that a plan, or who runs several plans, keeps.
    """
    device = library.device(like)
    stream = library.stream(device)
    if stream is None:
        plan.run(slots, arrays, *scalars, *callables, wait=True)
        return
    size = plan.workspace_bytes
    free = [] if kept is None or size == 0 else kept.of(device, stream)
    try:
        workspace = free.pop()
    except IndexError:  # none, or another thread has it
        workspace = None
    if size > 0 and (workspace is None or workspace.shape[0] < size):  # that of a smaller shape's plan is given up
        workspace = library.empty((size,), "uint8", like)
    plan.run(slots, arrays, *scalars, *callables, stream=stream, workspace=workspace)
    free.append(workspace)  # what follows on the stream comes behind the run
