# SPDX-License-Identifier: Apache-2.0
"""A tensor that a backward needs and one of our calls has written over: the backward raises, as after torch's own."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
from tessera.compat.flash_attn_2 import flash_attn_with_kvcache  # noqa: E402


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


Q, K = (1, 9, 2, 16), (1, 9, 1, 16)
STATE, RING = (2, 2, 16, 16), (2, 2, 8, 16)
SLOPES, CURSOR = torch.tensor([0.1, 0.5]), torch.tensor([3, 0], dtype=torch.int32)
LENGTH = torch.tensor([4], dtype=torch.int32)
ROWS = [normal(2, 3, 2, 16) for _ in range(3)]
ORACLE = "implementation=cpu.reference"  # the only one that calls a Python function
WHOLE = normal(*Q), normal(*K), normal(*K)
PART = normal(1, 3, 2, 16), normal(1, 3, 1, 16), normal(1, 3, 1, 16)


def backward_into(dq, dk, dv):
    out, lse = tessera.attention(*WHOLE, return_lse=True)
    tessera.attention_backward(out, *WHOLE, out, lse, grads=(dq, dk, dv))


def linear_decode_with_a_ring(state, ring_k, ring_v, out):
    tessera.linear_decode(*ROWS, state, SLOPES, ring_k=ring_k, ring_v=ring_v, ring_cursor=CURSOR, out=out)


def compiled(out):
    def call(q, k, v, out):
        tessera.attention(q, k, v, out=out)

    torch.compile(call, backend="aot_eager", fullgraph=True)(*WHOLE, out)


# Calls of what they write, and its shapes.
WRITES = {
    "attention": (lambda out: tessera.attention(*WHOLE, out=out), [Q]),
    "attention, compiled": (compiled, [Q]),
    "attention, a Python mask": (
        lambda out: tessera.attention(*WHOLE, mask=lambda *_: True, wishes=ORACLE, out=out),
        [Q],
    ),
    "plan": (lambda out: tessera.plan(*WHOLE)(*WHOLE, out=out), [Q]),
    "backward": (backward_into, [Q, K, K]),
    "combine": (lambda out: tessera.combine(normal(2, *Q), normal(2, 1, 2, 9), out=out), [Q]),
    "kv_append": (lambda k, v: tessera.kv_append(k, v, *PART[1:], seqused_k=LENGTH), [K, K]),
    "flash_attn": (
        lambda k, v: flash_attn_with_kvcache(PART[0], k, v, *PART[1:], cache_seqlens=LENGTH),
        [K, K],
    ),
    "linear_decode": (
        lambda state, out: tessera.linear_decode(*ROWS, state, SLOPES, out=out),
        [STATE, (2, 3, 2, 16)],
    ),
    "linear_decode with a ring": (linear_decode_with_a_ring, [STATE, RING, RING, (2, 3, 2, 16)]),
    "linear_flush": (
        lambda state, ring_k, ring_v: tessera.linear_flush(state, SLOPES, ring_k, ring_v, CURSOR),
        [STATE, RING, RING],
    ),
    "linear_chunk": (
        lambda state, out: tessera.linear_chunk(*ROWS, state, SLOPES, out=out),
        [STATE, (2, 3, 2, 16)],
    ),
}


@pytest.mark.parametrize("through", ["the tensor", "a view", "its base"])
@pytest.mark.parametrize("name", WRITES)
def test_what_was_saved_and_written_over_is_noticed(name, through):
    call, shapes = WRITES[name]
    for wanted in range(len(shapes)):
        memory = [normal(*shape) for shape in shapes]
        given = list(memory)
        if through == "its base":
            given[wanted] = memory[wanted].view(-1).view(shapes[wanted])
        saved = memory[wanted].flatten() if through == "a view" else memory[wanted]
        weight = torch.ones_like(saved, requires_grad=True)
        product = (weight * saved).sum()
        with torch.no_grad():
            call(*given)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_what_is_only_read_is_not_counted():
    tensors = [*WHOLE, *ROWS, SLOPES, CURSOR, LENGTH]
    before = [x._version for x in tensors]
    for call, shapes in WRITES.values():
        call(*(normal(*shape) for shape in shapes))
    assert [x._version for x in tensors] == before


def test_tensors_without_a_counter():
    with torch.inference_mode():
        for call, shapes in WRITES.values():
            call(*(normal(*shape) for shape in shapes))
