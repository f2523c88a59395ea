# SPDX-License-Identifier: Apache-2.0
"""cuLA (github.com/inclusionAI/cuLA; its cula/utils.py and cula/ops/la_decode.py in PYTHONPATH, pip:
nvidia-cutlass-dsl), its lightning attention decode, as a peer of `tessera bench --device cuda` for linear_decode.
"""

import importlib.metadata

import linear_steps
import torch
import torch_cuda
from cula.ops.la_decode import linear_attention_decode


def set_up(request, _, __):
    """A callable, or a sentence that says why there is none."""
    reason = linear_steps.refusal(request)
    if reason is None and (request["dtype"] != "bf16" or request["d"] != 128):
        reason = "it does bf16 and D = 128 only"
    if reason:
        return None, reason
    steps = linear_steps.Steps(request)
    q, k, v = (x.view(steps.batch, steps.heads, steps.dim) for x in (steps.q, steps.k, steps.v))
    out = torch.empty_like(v)
    slots = torch.arange(steps.batch, dtype=torch.int32, device=q.device)
    states = [x.view(steps.batch * steps.heads, steps.dim, steps.dim) for x in steps.states]

    def call():
        linear_attention_decode(
            q,
            k,
            v,
            states[steps.next_turn()],
            out,
            softmax_scale=steps.scale,
            stride_q=0,
            stride_k=0,
            stride_v=0,
            stride_s=0,
            stride_o=0,
            s_offsets=slots,
            decay_scales=steps.slopes,
            HEAD_DIM=steps.dim,
            K_SPLIT_DIM=steps.dim,
            V_SPLIT_DIM=steps.dim,
        )

    call()  # compiles
    return call, None


if __name__ == "__main__":
    torch_cuda.serve(
        None, set_up, f"cuLA, nvidia-cutlass-dsl {importlib.metadata.version('nvidia-cutlass-dsl')}", output=None
    )
