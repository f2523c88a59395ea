# SPDX-License-Identifier: Apache-2.0
"""Times the attention calls of a run on a GPU."""

import torch


def time_calls(calls, run):
    """Microseconds of each of `calls`, in their order; `run(call)` computes one.

    Each is captured as a CUDA graph, and all graphs are replayed in the order of the run, so that nothing but the
    kernels of a call is between two events. The second of two replays counts.
    """
    graphs, pool = [], torch.cuda.graph_pool_handle()
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):  # outputs are dropped, so that all graphs share their memory
            run(call)
        graphs.append(graph)
    for _ in range(2):
        events = []
        for graph in graphs:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
    return [1e3 * begin.elapsed_time(end) for begin, end in events]
