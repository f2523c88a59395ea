# SPDX-License-Identifier: Apache-2.0
"""OpenVINO (pip: openvino), its ScaledDotProductAttention on the CPU, as a peer of `tessera bench`: forward, fp32 and
bf16, without groups of heads.

The model is this one operation. Its inputs lie as (batch, heads, seqlen, dim), or as (batch, seqlen, heads, dim) with
transpositions around it, which OpenVINO fuses: the faster is taken. Tensors are shared with it, not copied.
"""

import math

import cpu_peer
import numpy as np
import openvino as ov
from openvino import opset13 as ops

TYPES = {"fp32": (ov.Type.f32, np.float32), "bf16": (ov.Type.bf16, np.uint16)}


def normal(generator, shape, dtype):
    """N(0, 1); bf16 as its bits, rounded to nearest."""
    x = generator.standard_normal(shape, np.float32)
    if dtype == "fp32":
        return x
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def model_of(r, token_major):
    dtype = TYPES[r["dtype"]][0]

    def parameter(heads, length, dim):
        shape = [r["b"], length, heads, dim] if token_major else [r["b"], heads, length, dim]
        return ops.parameter(shape, dtype)

    inputs = [
        parameter(r["hq"], r["sq"], r["d"]),
        parameter(r["hkv"], r["sk"], r["d"]),
        parameter(r["hkv"], r["sk"], r["dv"]),
    ]
    order = ops.constant(np.array([0, 2, 1, 3], np.int64))
    q, k, v = (ops.transpose(x, order) if token_major else x for x in inputs)
    extra = []
    if not math.isclose(r["scale"], r["d"] ** -0.5, rel_tol=1e-6):
        extra = [ops.constant(np.zeros((), np.float32)), ops.constant(np.array(r["scale"], np.float32))]
        extra = [x if dtype == ov.Type.f32 else ops.convert(x, dtype) for x in extra]
    out = ops.scaled_dot_product_attention(q, k, v, *extra, causal=r["causal"] and r["sq"] > 1)
    if token_major:
        out = ops.transpose(out, order)
    return ov.Model([out], inputs)


def make_call(core, r, arrays, token_major):
    """A callable that does the problem once and gives o as (batch, seqlen, heads, dim)."""
    dtype, _ = TYPES[r["dtype"]]
    config = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": r["threads"],
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "f32" if dtype == ov.Type.f32 else "bf16",
    }
    compiled = core.compile_model(model_of(r, token_major), "CPU", config)
    request = compiled.create_infer_request()
    placed = [x if token_major else np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in arrays]
    for index, array in enumerate(placed):
        request.set_input_tensor(index, ov.Tensor(array, list(array.shape), dtype))
    shape = [r["b"], r["sq"], r["hq"], r["dv"]] if token_major else [r["b"], r["hq"], r["sq"], r["dv"]]
    # What comes out has the type that the compiled model says.
    kind = compiled.output(0).element_type
    out = np.empty(shape, np.uint16 if kind == ov.Type.bf16 else np.float32)
    request.set_output_tensor(0, ov.Tensor(out, shape, kind))

    def call():
        request.infer()
        return out if token_major else out.transpose(0, 2, 1, 3)

    call.inputs = placed  # they must outlive the request, which reads them in place
    return call


def set_up(r):
    reason = cpu_peer.refusal_of_inference(r, TYPES)
    if reason:
        return reason
    generator = np.random.default_rng(1)
    arrays = []
    for name, heads, length, dim in (
        ("q", r["hq"], r["sq"], r["d"]),
        ("k", r["hkv"], r["sk"], r["d"]),
        ("v", r["hkv"], r["sk"], r["dv"]),
    ):
        shape = (r["b"], length, heads, dim)
        path = r.get("tensors", {}).get(name)
        if path is None:
            arrays.append(normal(generator, shape, r["dtype"]))
        else:
            arrays.append(np.fromfile(path, TYPES[r["dtype"]][1]).reshape(shape))
    core = ov.Core()
    call = cpu_peer.fastest([make_call(core, r, arrays, token_major) for token_major in (False, True)])
    return call, lambda path: np.ascontiguousarray(call()).tofile(path)


if __name__ == "__main__":
    cpu_peer.serve(f"openvino {ov.__version__.split('-')[0]}", set_up)
