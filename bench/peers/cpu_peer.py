# SPDX-License-Identifier: Apache-2.0
"""What peers of `tessera bench` on the CPU share: their protocol and their clock.

A peer speaks one JSON object a line: requests on stdin, answers on stdout.
  {"do": "setup", "pass": "forward", "b": 1, "sq": 512, …, "threads": 2} -> {"ok": true, "version": "torch 2.13.0"}
  {"do": "run", "calls": 3, "warm_up": 1}                                -> {"us": microseconds of one call}
  {"do": "output", "path": FILE}     -> {"ok": true}, and FILE holds o as (batch, seqlen, heads, dim) of the dtype
"""

import json
import sys
import time


def timed(call, calls):
    """Microseconds of one call, the mean of `calls` in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def fastest(candidates):
    """Of callables the one that takes the least time, by the best of three each. A single one is not timed."""
    if len(candidates) == 1:
        return candidates[0]
    for call in candidates:
        call()
    return min(candidates, key=lambda call: min(timed(call, 1) for _ in range(3)))


def refusal(request, dtypes):
    """Why no peer on the CPU does this problem, or None."""
    if request["operation"] != "attention":
        return "it has no such operation"
    if request["density"] < 1:
        return "it has no lists of tiles"
    if request["dtype"] not in dtypes:
        return f"it has no dtype {request['dtype']}"
    return None


def refusal_of_inference(request, dtypes):
    """The same for engines that infer: their attention has no gradients, one key head a query head, and a causal mask
    from the first key on."""
    reason = refusal(request, dtypes)
    if reason is None and request["pass"] != "forward":
        reason = "it has no gradients"
    if reason is None and request["hq"] != request["hkv"]:
        reason = "its operation has no groups of heads"
    if reason is None and request["causal"] and request["sq"] not in (1, request["sk"]):
        reason = "its causal mask is aligned to the first key"
    return reason


def serve(version, set_up):
    """Answers requests until stdin ends. `set_up(request)` gives a callable that does the problem once and one that
    writes o to a path (None for a backward), or a sentence that says why there is none."""
    call = save = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "setup":
                call = save = None  # frees the tensors of the last problem first
                made = set_up(request)
                if isinstance(made, str):
                    answer = {"ok": False, "reason": made}
                else:
                    call, save = made
                    answer = {"ok": True, "output": save is not None}
                answer["version"] = version
            elif request["do"] == "output":
                save(request["path"])
                answer = {"ok": True}
            else:
                for _ in range(request["warm_up"]):
                    call()
                answer = {"us": timed(call, request["calls"])}
        except Exception as error:  # any failure of the peer is an answer, not the end of the measurement
            answer = {"error": f"{type(error).__name__}: {error}".replace("\n", " ")}
        print(json.dumps(answer), flush=True)
