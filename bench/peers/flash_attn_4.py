# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4 (pip: flash-attn-4), forward and backward on dense keys and by lists of full tiles, as a peer of
`tessera bench --device cuda`.

Requests, answers and timing are those of torch_cuda.py. Its calls hold tens of microseconds of host time, which
problems that take less show unless they are measured with --graph.
"""

import importlib.metadata

import torch
import torch_cuda
from flash_attn.cute import flash_attn_func
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch


def full_tiles(rows, counts, block):
    """Lists of whole tiles, of which none wants a mask."""
    # Those by columns are laid out as the transposed tensor that they were found in, which the backward refuses.
    counts, rows = counts.contiguous(), rows.contiguous()
    return BlockSparseTensorsTorch(torch.zeros_like(counts), torch.zeros_like(rows), counts, rows, block_size=block)


def random_lists(request, device, generator):
    """For each head and row of tiles as many full tiles as the density says, drawn at random, ascending; and the same
    tiles by columns, for the backward."""
    block = tuple(request["block"])
    rows, columns = -(-request["sq"] // block[0]), -(-request["sk"] // block[1])
    kept = max(1, round(request["density"] * columns))
    shape = request["b"], request["hq"], rows, columns
    drawn = torch.rand(*shape, device=device, generator=generator).argsort(-1)[..., :kept]
    tiles = torch.zeros(shape, dtype=torch.bool, device=device).scatter_(-1, drawn, True)
    both = []
    for one in (tiles, tiles.transpose(-1, -2)):
        # Numbers of the tiles that are kept, ascending, in front of those of the others, which nobody reads.
        order = one.logical_not().byte().argsort(dim=-1, stable=True).int()
        both.append(full_tiles(order, one.sum(-1, dtype=torch.int32), block))
    return both


def set_up(request, _, __):
    """A callable, or a sentence that says why there is none."""
    reason = torch_cuda.refusal({**request, "density": 1})
    if reason is None and request["density"] < 1 and request["causal"]:
        reason = "a list with a mask needs one of its mask callables"
    if reason is None and request["density"] < 1 and request["deterministic"]:
        reason = "a fixed order of sums beside a list needs the order of writes, which nobody makes here"
    if reason is None and request["density"] < 1 and request["pass"] == "backward" and request["block"][0] % 128:
        reason = f"its backward wants lists of blocks of a multiple of 128 rows, not of {request['block'][0]}"
    if reason:
        return None, reason
    device = torch.device("cuda", request["device"])
    generator = torch.Generator(device).manual_seed(1)

    def tensor(name, length, heads, dim):
        x = torch_cuda.given(request, name, length, heads, dim, device)
        if x is not None:
            return x
        shape = request["b"], length, heads, dim
        return torch.randn(shape, generator=generator, device=device, dtype=torch_cuda.DTYPES[request["dtype"]])

    q = tensor("q", request["sq"], request["hq"], request["d"])
    k = tensor("k", request["sk"], request["hkv"], request["d"])
    v = tensor("v", request["sk"], request["hkv"], request["dv"])
    options = {"softmax_scale": request["scale"], "causal": request["causal"] and request["sq"] > 1}
    if request["deterministic"]:
        options["deterministic"] = True
    if request["density"] < 1:
        by_rows, by_columns = random_lists(request, device, generator)
        options["block_sparse_tensors"] = by_rows
        if request["pass"] == "backward":
            options["block_sparse_tensors_bwd"] = by_columns

    def forward():
        with torch.set_grad_enabled(backward):
            return flash_attn_func(q, k, v, **options)

    backward = request["pass"] == "backward"
    call = forward
    if backward:
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = forward()
        call = torch_cuda.gradients_of(out[0] if isinstance(out, tuple) else out, inputs, generator)
    call()  # compiles
    return call, None


if __name__ == "__main__":
    torch_cuda.serve(
        None,
        set_up,
        f"flash-attn-4 {importlib.metadata.version('flash-attn-4')}",
        output=lambda result: result[0] if isinstance(result, tuple) else result,
    )
