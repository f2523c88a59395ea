# SPDX-License-Identifier: Apache-2.0
"""Traced scores and masks on a GPU: the zoo, forward and backward, beside the textbook in double."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import expressions_zoo  # noqa: E402
import tessera  # noqa: E402
from cuda_torch import CUDA, half, on_gpu  # noqa: E402
from expressions_zoo import LENGTH  # noqa: E402

HERE, THERE = expressions_zoo.zoo(), expressions_zoo.zoo(CUDA)


def inputs(dtype=torch.bfloat16):
    shapes = (2, LENGTH, 4, 64), (2, LENGTH, 2, 64), (2, LENGTH, 2, 64)
    return [half(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes, 1)]


def gradients(tensors, call):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = call(*leaves)
    dout = half(*out.shape, seed=9, dtype=torch.bfloat16).to(out)  # the same numbers for every type
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", HERE)
def test_the_zoo_and_its_gradients(name, dtype):
    """At most twice the error of the textbook in the half type, and 2 units in the last place of the result."""
    (score, mask), (score_there, mask_there) = HERE[name], THERE[name]

    def textbook(tensors):
        return gradients(tensors, lambda *x: expressions_zoo.attention(*x, score, mask).to(tensors[0].dtype))

    want, plain = textbook([x.double() for x in inputs(dtype)]), textbook(inputs(dtype))
    there = [on_gpu(x) for x in inputs(dtype)]
    got = gradients(there, lambda *x: tessera.attention(*x, score=score_there, mask=mask_there))
    for ours, theirs, exact in zip(got, plain, want, strict=True):
        unit = torch.finfo(dtype).eps * exact.abs().max()
        error, allowed = (ours.cpu() - exact).abs().max(), 2 * (theirs - exact).abs().max() + 2 * unit
        assert error <= allowed, f"error {error:.3g}; want at most {allowed:.3g}"


@pytest.mark.parametrize("name", HERE)
def test_lists_of_block_masks(name):
    mask = THERE[name][1]
    if mask is None:
        pytest.skip("no mask")
    q, k, v = (on_gpu(x).transpose(1, 2) for x in inputs())
    block_mask = tessera.create_block_mask(mask, None, 4, LENGTH, LENGTH, device="cuda")
    got = tessera.flex_attention(q, k, v, None, block_mask, enable_gqa=True)
    want = tessera.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=mask).transpose(1, 2)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_captured_tensors_have_no_gradient_on_a_gpu():
    bias = torch.zeros(LENGTH, device=CUDA, requires_grad=True)
    q, k, v = (on_gpu(x) for x in inputs())
    with pytest.raises(NotImplementedError, match=r"captured tensor bias of shape \(150,\) in float32 on cuda:0 that"):
        tessera.attention(q, k, v, score=lambda s, b, h, i, j: s + bias[j])
    tessera.attention(q, k, v, score=lambda s, b, h, i, j: s + bias.detach()[j])


def test_flash_attention_4s_functions():
    from tessera.compat import flash_attn_4

    def score_mod(score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
        return score + aux_tensors[0][h_idx] * (q_idx - kv_idx) * aux_scalars[0]

    def mask_mod(b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):
        return kv_idx <= q_idx + seqlen_info.seqlen_k - seqlen_info.seqlen_q

    def call(*tensors):
        slopes = torch.linspace(0.1, 0.4, 4, device=tensors[0].device)
        options = dict(score_mod=score_mod, mask_mod=mask_mod, aux_tensors=[slopes], aux_scalars=(-0.125,))
        return flash_attn_4.flash_attn_func(tensors[0][:, :40], *tensors[1:], **options)[0]

    for ours, cpus in zip(gradients([on_gpu(x) for x in inputs()], call), gradients(inputs(), call), strict=True):
        torch.testing.assert_close(ours.cpu().float(), cpus.float(), rtol=2e-2, atol=2e-2)
