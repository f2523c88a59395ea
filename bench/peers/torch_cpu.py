# SPDX-License-Identifier: Apache-2.0
"""torch.nn.functional.scaled_dot_product_attention on the CPU as a peer of `tessera bench`.

Speaks one JSON object a line: requests on stdin, answers on stdout.
  {"do": "setup", "pass": "forward", "b": 1, "sq": 512, …, "threads": 2} -> {"ok": true, "version": "torch 2.13.0"}
  {"do": "run", "calls": 3, "warm_up": 1}                                -> {"us": microseconds of one call}
  {"do": "output", "path": FILE}     -> {"ok": true}, and FILE holds o as (batch, seqlen, heads, dim) of the dtype
Tensors are contiguous (batch, heads, seqlen, dim), the layout that torch is fastest on. The forward runs under no_grad;
the backward is the time of autograd alone. Of the ways torch offers to do a problem (grouped heads by enable_gqa or
repeated beforehand) the fastest is taken.
"""

import json
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def mask_arguments(r):
    """Tessera's causal mask is aligned to the last key; torch's flag to the first one."""
    if not r["causal"] or r["sq"] == 1:
        return {}
    if r["sq"] == r["sk"]:
        return {"is_causal": True}
    visible = torch.ones(r["sq"], r["sk"], dtype=torch.bool).tril(diagonal=r["sk"] - r["sq"])
    return {"attn_mask": visible}


def make_call(r, repeat_heads):
    """A callable that does the problem once."""
    dtype = DTYPES[r["dtype"]]
    backward = r["pass"] == "backward"
    generator = torch.Generator().manual_seed(1)

    def tensor(name, heads, length, dim):
        path = r.get("tensors", {}).get(name)
        if path is not None:
            given = torch.from_file(path, size=r["b"] * length * heads * dim, dtype=dtype)
            return given.view(r["b"], length, heads, dim).transpose(1, 2).contiguous().requires_grad_(backward)
        return torch.randn(r["b"], heads, length, dim, generator=generator).to(dtype).requires_grad_(backward)

    q = tensor("q", r["hq"], r["sq"], r["d"])
    k = tensor("k", r["hkv"], r["sk"], r["d"])
    v = tensor("v", r["hkv"], r["sk"], r["dv"])
    options = {"scale": r["scale"], **mask_arguments(r)}
    group = r["hq"] // r["hkv"]
    if group > 1 and repeat_heads:
        k, v = (x.detach().repeat_interleave(group, dim=1).contiguous().requires_grad_(backward) for x in (k, v))
    elif group > 1:
        options["enable_gqa"] = True

    if not backward:

        def forward():
            with torch.no_grad():
                return scaled_dot_product_attention(q, k, v, **options)

        return forward
    o = scaled_dot_product_attention(q, k, v, **options)
    dout = torch.randn(o.shape, generator=generator).to(dtype)
    return lambda: torch.autograd.grad(o, (q, k, v), dout, retain_graph=True)


def save(output, path):
    """(batch, seqlen, heads, dim), row-major."""
    torch.from_file(path, shared=True, size=output.numel(), dtype=output.dtype).copy_(output.flatten())


def timed(call, calls):
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def set_up(r):
    torch.set_num_threads(r["threads"])
    grouped = r["hq"] != r["hkv"]
    candidates = []
    # A backward through repeated heads would still have to add the groups' gradients up: only enable_gqa counts.
    for repeat_heads in [False, True] if grouped and r["pass"] == "forward" else [False]:
        call = make_call(r, repeat_heads)
        call()
        candidates.append((min(timed(call, 1) for _ in range(3)) if grouped else 0.0, call))
    return min(candidates, key=lambda each: each[0])[1]


def main():
    call = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "setup":
                call = None  # frees the tensors of the last problem first
                answer = {"ok": True, "version": f"torch {torch.__version__.split('+')[0]}"}
                if request["operation"] != "attention":
                    answer = {"ok": False, "reason": "it has no such operation"}
                elif request["density"] < 1:
                    answer = {"ok": False, "reason": "it has no lists of tiles"}
                elif request["dtype"] not in DTYPES:
                    answer = {"ok": False, "reason": f"it has no dtype {request['dtype']}"}
                else:
                    call = set_up(request)
                    answer["output"] = request["pass"] == "forward"
            elif request["do"] == "output":
                save(call().transpose(1, 2), request["path"])
                answer = {"ok": True}
            else:
                for _ in range(request["warm_up"]):
                    call()
                answer = {"us": timed(call, request["calls"])}
        except Exception as error:  # any failure of the peer is an answer, not the end of the measurement
            answer = {"error": f"{type(error).__name__}: {error}".replace("\n", " ")}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
