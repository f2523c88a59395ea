# SPDX-License-Identifier: Apache-2.0
"""torch.nn.functional.scaled_dot_product_attention on the CPU as a peer of `tessera bench`.

Tensors are contiguous (batch, heads, seqlen, dim), the layout that torch is fastest on. The forward runs under no_grad;
the backward is the time of autograd alone. Of the ways torch offers to do a problem (grouped heads by enable_gqa or
repeated beforehand) the fastest is taken.
"""

import cpu_peer
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


def set_up(r):
    reason = cpu_peer.refusal(r, DTYPES)
    if reason:
        return reason
    torch.set_num_threads(r["threads"])
    forward = r["pass"] == "forward"
    # A backward through repeated heads would still have to add the groups' gradients up: only enable_gqa counts.
    ways = [False, True] if r["hq"] != r["hkv"] and forward else [False]
    call = cpu_peer.fastest([make_call(r, repeat_heads) for repeat_heads in ways])
    return call, (lambda path: save(call().transpose(1, 2), path)) if forward else None


if __name__ == "__main__":
    cpu_peer.serve(f"torch {torch.__version__.split('+')[0]}", set_up)
