# SPDX-License-Identifier: Apache-2.0
"""torch.nn.functional.scaled_dot_product_attention on a GPU by one of its backends: what torch_flash.py and
torch_cudnn.py share.

Requests and answers are those of torch_cpu.py, with "graph" besides. Timing is that of `tessera bench --device cuda`:
256 MiB are written before each call, so that no input is in the L2 cache and the host's work is done while the device
still writes; events around the call; the median of the calls. With "graph", as with `--graph`: calls in a row as one
CUDA graph. With fewer "multiprocessors" than the device has, on a part of it (torch 2.10 and newer). Of the layouts
that torch takes ((batch, heads, seqlen, dim) contiguous, or a view of (batch, seqlen, heads, dim)) and the ways to do
grouped heads, the fastest that the backend accepts is taken.
"""

import functools
import json
import statistics
import sys
import warnings

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
FLUSH_BYTES = 256 << 20


def given(request, name, length, heads, dim, device):
    """(batch, length, heads, dim): the tensor that the request names a file of, else None."""
    path = request.get("tensors", {}).get(name)
    if path is None:
        return None
    count = request["b"] * length * heads * dim
    host = torch.from_file(path, size=count, dtype=DTYPES[request["dtype"]])
    return host.to(device).view(request["b"], length, heads, dim)


class Problem:
    """One problem on the device, with every way to call it."""

    def __init__(self, request, backend):
        self.request = request
        self.backend = backend
        self.device = torch.device("cuda", request["device"])
        self.generator = torch.Generator(self.device).manual_seed(1)

    def tensor(self, name, heads, length, dim, heads_first):
        batch = self.request["b"]
        x = given(self.request, name, length, heads, dim, self.device)
        if x is not None:
            x = x.transpose(1, 2)
            return x.contiguous() if heads_first else x
        shape = (batch, heads, length, dim) if heads_first else (batch, length, heads, dim)
        x = torch.randn(shape, generator=self.generator, device=self.device, dtype=DTYPES[self.request["dtype"]])
        return x if heads_first else x.transpose(1, 2)

    def call(self, heads_first, repeat_heads):
        """A callable that does the problem once, its result thrown away."""
        r = self.request
        q = self.tensor("q", r["hq"], r["sq"], r["d"], heads_first)
        k = self.tensor("k", r["hkv"], r["sk"], r["d"], heads_first)
        v = self.tensor("v", r["hkv"], r["sk"], r["dv"], heads_first)
        options = {"scale": r["scale"], "is_causal": r["causal"] and r["sq"] > 1}
        group = r["hq"] // r["hkv"]
        backward = r["pass"] == "backward"
        if backward:
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        inputs = q, k, v
        if group > 1 and repeat_heads:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        elif group > 1:
            options["enable_gqa"] = True

        def forward():
            with torch.set_grad_enabled(backward), sdpa_kernel(self.backend):
                return scaled_dot_product_attention(q, k, v, **options)

        return gradients_of(forward(), inputs, self.generator) if backward else forward

    def candidates(self):
        """Makers of callables; a backward's makes the forward too, which the backend may refuse."""
        grouped = self.request["hq"] != self.request["hkv"]
        for heads_first in (True, False):
            for repeat_heads in (False, True) if grouped else (False,):
                yield functools.partial(self.call, heads_first, repeat_heads)


def gradients_of(out, inputs, generator):
    """A callable that computes the gradients once: the time of autograd alone."""
    dout = torch.empty_like(out).normal_(generator=generator)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def timed(call, calls, flush):
    """Median microseconds of one call."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e3


def timed_as_graph(call, calls):
    """Microseconds of one call, the mean of `calls` in a row as one CUDA graph, caches as they are."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # a first call allocates, which a graph cannot record
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / calls


def take_part(request):
    """A green context of the multiprocessors asked for, made this process's current one; None for all of them. Before
    any stream is made: a stream belongs to the context that is current then."""
    device = request["device"]
    if request["multiprocessors"] >= torch.cuda.get_device_properties(device).multi_processor_count:
        return None
    from torch.cuda.green_contexts import GreenContext

    part = GreenContext.create(num_sms=request["multiprocessors"], device_id=device)
    part.set_context()
    return part


def refusal(request):
    if request["operation"] != "attention":
        return "it has no such operation"
    if request["dtype"] not in DTYPES:
        return f"it has no dtype {request['dtype']}"
    if request["density"] < 1:
        return "it has no lists of tiles"
    if request["causal"] and request["sq"] not in (1, request["sk"]):
        return "its causal mask is aligned to the first key"
    return None


def set_up(request, backend, flush):
    """The fastest callable, or a sentence that says why there is none."""
    reason = refusal(request)
    if reason:
        return None, reason
    best, best_us, why = None, float("inf"), "no way to call it"
    for candidate in Problem(request, backend).candidates():
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                call = candidate()
                call()
        except RuntimeError as error:
            why = "; ".join(dict.fromkeys(str(w.message).split("(Triggered")[0].strip() for w in said)) or str(error)
            continue
        us = min(timed(call, 3, flush), timed(call, 3, flush))
        if us < best_us:
            best, best_us = call, us
    return best, None if best else why.replace("\n", " ")[:300]


def save(output, path):
    """(batch, seqlen, heads, dim), row-major."""
    host = torch.from_file(path, shared=True, size=output.numel(), dtype=output.dtype)
    host.copy_(output.flatten())


def serve(backend, set_up=set_up, package="", output=lambda result: result.transpose(1, 2)):
    """Answers requests until their end; `package`: what the peer uses beside torch, with its version; `output`: from
    what a call returns to o as (batch, seqlen, heads, dim), None if there is no such."""
    call, as_graph, part = None, False, None
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    torch_version = torch.__version__.split("+")[0]
    version = f"torch {torch_version}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    if package:
        version = f"{package}, {version}"
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "setup":
                part = part or take_part(request)  # the same for all problems
                call = None  # frees the tensors of the last problem first
                torch.cuda.empty_cache()
                torch.use_deterministic_algorithms(request["deterministic"])
                torch.utils.deterministic.fill_uninitialized_memory = False  # would be timed
                call, reason = set_up(request, backend, flush)
                as_graph = request["graph"]
                answer = {"ok": call is not None, "version": version, "reason": reason}
                if call is not None:
                    del answer["reason"]
                    answer["output"] = output is not None and request["pass"] == "forward"
            elif request["do"] == "output":
                save(output(call()), request["path"])
                answer = {"ok": True}
            else:
                for _ in range(request["warm_up"]):
                    call()
                calls = max(1, min(request["calls"], 100))
                answer = {"us": timed_as_graph(call, calls) if as_graph else timed(call, calls, flush)}
        except Exception as error:  # any failure of the peer is an answer, not the end of the measurement
            answer = {"error": f"{type(error).__name__}: {error}".replace("\n", " ")}
        print(json.dumps(answer), flush=True)


FLASH = SDPBackend.FLASH_ATTENTION
CUDNN = SDPBackend.CUDNN_ATTENTION
