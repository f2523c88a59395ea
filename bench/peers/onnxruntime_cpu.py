# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime (pip: onnxruntime, onnx), its MultiHeadAttention on the CPU, as a peer of `tessera bench`: forward, in
fp32, without groups of heads.

The model is this one operation on (batch, seqlen, heads · dim). Inputs and output are bound, not copied.
"""

import cpu_peer
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

TYPES = {"fp32"}


def model_of(r, causal):
    attributes = {"num_heads": r["hq"], "scale": r["scale"], "unidirectional": int(causal)}
    node = helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["o"], domain="com.microsoft", **attributes)

    def value(name, length, dim):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [r["b"], length, r["hq"] * dim])

    inputs = [value("q", r["sq"], r["d"]), value("k", r["sk"], r["d"]), value("v", r["sk"], r["dv"])]
    graph = helper.make_graph([node], "attention", inputs, [value("o", r["sq"], r["dv"])])
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=sets, ir_version=8).SerializeToString()


def set_up(r):
    reason = cpu_peer.refusal_of_inference(r, TYPES)
    if reason:
        return reason
    options = ort.SessionOptions()
    options.intra_op_num_threads = r["threads"]
    causal = r["causal"] and r["sq"] > 1
    session = ort.InferenceSession(model_of(r, causal), options, providers=["CPUExecutionProvider"])
    generator = np.random.default_rng(1)
    binding = session.io_binding()
    for name, length, dim in (("q", r["sq"], r["d"]), ("k", r["sk"], r["d"]), ("v", r["sk"], r["dv"])):
        path = r.get("tensors", {}).get(name)
        shape = (r["b"], length, r["hq"] * dim)
        array = generator.standard_normal(shape, np.float32) if path is None else np.fromfile(path, np.float32)
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array.reshape(shape)))
    out = ort.OrtValue.ortvalue_from_numpy(np.empty((r["b"], r["sq"], r["hq"] * r["dv"]), np.float32))
    binding.bind_ortvalue_output("o", out)

    def call():
        session.run_with_iobinding(binding)

    def save(path):
        call()
        out.numpy().tofile(path)

    return call, save


if __name__ == "__main__":
    cpu_peer.serve(f"onnxruntime {ort.__version__}", set_up)
