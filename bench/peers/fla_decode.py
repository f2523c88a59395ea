# SPDX-License-Identifier: Apache-2.0
"""Flash Linear Attention (pip: fla-core), one step of its recurrence with a constant decay for each head, as a peer of
`tessera bench --device cuda` for linear_decode. It leaves new states elsewhere: here in as many places as are read.
"""

import importlib.metadata

import linear_steps
import torch
import torch_cuda
from fla.ops.simple_gla import fused_recurrent_simple_gla


def set_up(request, _, __):
    """A callable, or a sentence that says why there is none."""
    reason = linear_steps.refusal(request)
    if reason:
        return None, reason
    steps = linear_steps.Steps(request)
    kept = [None] * len(steps.states)

    def call():
        turn = steps.next_turn()
        with torch.no_grad():
            kept[turn] = fused_recurrent_simple_gla(
                steps.q,
                steps.k,
                steps.v,
                g_gamma=-steps.slopes,
                scale=steps.scale,
                initial_state=steps.states[turn],
                output_final_state=True,
            )

    call()  # compiles and tunes
    return call, None


if __name__ == "__main__":
    torch_cuda.serve(None, set_up, f"fla-core {importlib.metadata.version('fla-core')}", output=None)
