# SPDX-License-Identifier: Apache-2.0
"""Flash Linear Attention (pip: fla-core), its linear attention with a constant decay for each head, as a peer of
`tessera bench --device cuda` for linear_chunk.

Requests, answers and timing are those of torch_cuda.py. Of its two kernels in chunks the faster is taken. A backward is
the time of autograd alone.
"""

import importlib.metadata
import warnings

import linear_steps
import torch
import torch_cuda
from fla.ops.simple_gla import chunk_simple_gla, fused_chunk_simple_gla


class Problem:
    """One problem on the device."""

    def __init__(self, request):
        self.request = request
        device = torch.device("cuda", request["device"])
        generator = torch.Generator(device).manual_seed(1)
        dtype = torch_cuda.DTYPES[request["dtype"]]
        backward = request["pass"] == "backward"

        def normal(dim):
            shape = (request["b"], request["sq"], request["hq"], dim)
            x = torch.randn(shape, generator=generator, device=device, dtype=dtype)
            return x.requires_grad_(backward)

        self.tokens = normal(request["d"]), normal(request["d"]), normal(request["dv"])
        self.dout = normal(request["dv"]).detach()
        self.options = {"g_gamma": -linear_steps.slopes(request["hq"], device), "scale": request["scale"]}
        if request["slots"] > 0:
            shape = (request["b"], request["hq"], request["d"], request["dv"])
            state = torch.randn(shape, generator=generator, device=device)
            self.options.update(initial_state=state, output_final_state=not backward)

    def call(self, function):
        """A callable that does the problem once."""
        if self.request["pass"] == "forward":

            def forward():
                with torch.no_grad():
                    return function(*self.tokens, **self.options)

            return forward
        out = function(*self.tokens, **self.options)[0]
        return lambda: torch.autograd.grad(out, self.tokens, self.dout, retain_graph=True)


def set_up(request, _, flush):
    """The faster callable, or a sentence that says why there is none."""
    if request["operation"] != "linear_chunk":
        return None, "it does linear_chunk only"
    if request["dtype"] not in torch_cuda.DTYPES:
        return None, f"it has no dtype {request['dtype']}"
    problem = Problem(request)
    best, best_us, why = None, float("inf"), ""
    for function in (chunk_simple_gla, fused_chunk_simple_gla):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call = problem.call(function)
                call()  # compiles and tunes
        except Exception as error:
            why = f"{function.__name__}: {type(error).__name__}: {error}"
            continue
        us = min(torch_cuda.timed(call, 3, flush), torch_cuda.timed(call, 3, flush))
        if us < best_us:
            best, best_us = call, us
    return best, None if best else why.replace("\n", " ")[:300]


if __name__ == "__main__":
    torch_cuda.serve(None, set_up, f"fla-core {importlib.metadata.version('fla-core')}", output=None)
