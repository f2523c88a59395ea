# SPDX-License-Identifier: Apache-2.0
"""linear_decode, linear_chunk, linear_flush and kv_append as torch operators: what they say they write, compiled."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

SLOPES = torch.tensor([0.0, 0.1, 1.0])
SLOTS = torch.tensor([3, 0, -1], dtype=torch.int32)
ANGLES = torch.arange(20)[:, None] * 0.7 ** torch.arange(8)
CURSOR = torch.tensor([2, 4, 0], dtype=torch.int32)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def rows(tokens, batch=3):
    return [normal(batch, tokens, 3, 16, seed=seed) for seed in range(3)]


def pool(dtype=torch.float32):
    return normal(5, 3, 16, 16, dtype=dtype)


def rings():
    return [normal(5, 3, 8, 16, seed=seed) for seed in range(2)]


def decode(q, k, v, state):
    return tessera.linear_decode(q, k, v, state, SLOPES, state_slots=SLOTS)


def decode_elsewhere(q, k, v, state):
    return tessera.linear_decode(q, k, v, state, SLOPES, state_slots=SLOTS, dest_slots=SLOTS.flip(0) + 1, layout="kv")


def decode_with_a_ring(q, k, v, state, ring_k, ring_v):
    return tessera.linear_decode(
        q, k, v, state, SLOPES, state_slots=SLOTS, ring_k=ring_k, ring_v=ring_v, ring_cursor=CURSOR
    )


def decode_rounded(q, k, v, state):
    return tessera.linear_decode(q, k, v, state, SLOPES, state_slots=SLOTS, rounding="stochastic", seed=(1 << 64) - 5)


def decode_into(q, k, v, state, out):
    return tessera.linear_decode(q, k, v, state, SLOPES, state_slots=SLOTS, out=out)


def flush(state, ring_k, ring_v):
    return tessera.linear_flush(state, SLOPES, ring_k, ring_v, CURSOR, state_slots=SLOTS)


def chunk(q, k, v, state):
    return tessera.linear_chunk(q, k, v, state, SLOPES, state_slots=SLOTS, scale=0.5)


def packed_chunk(q, k, v, state):
    starts = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    return tessera.linear_chunk(q, k, v, state, SLOPES, state_slots=SLOTS, cu_seqlens=starts)


def append(keys, values, k, v):
    return tessera.kv_append(keys, values, k, v, seqused_k=torch.tensor([3, 0], dtype=torch.int32))


def append_and_turn(keys, values, k, v, q):
    table = torch.tensor([[1, 4], [0, 3]], dtype=torch.int32)
    used = torch.tensor([3, 0], dtype=torch.int32)
    tables = {"rotary_cos": ANGLES.cos(), "rotary_sin": ANGLES.sin(), "page_table": table}
    return tessera.kv_append(keys, values, k, v, seqused_k=used, q=q, **tables)


def new_tokens(heads=2):
    return normal(2, 4, heads, 16, seed=5)


CALLS = {
    "decode": (decode, lambda: [*rows(2), pool()]),
    "decode, to other slots": (decode_elsewhere, lambda: [*rows(1), pool()]),
    "decode, with a ring": (decode_with_a_ring, lambda: [*rows(2), pool(), *rings()]),
    "decode, rounded by chance": (decode_rounded, lambda: [*rows(1), pool(torch.bfloat16)]),
    "decode, into out": (decode_into, lambda: [*rows(2), pool(), normal(3, 2, 3, 16)]),
    "flush": (flush, lambda: [pool(), *rings()]),
    "chunk": (chunk, lambda: [*rows(70), pool()]),
    "chunk, packed": (packed_chunk, lambda: [*(x[0] for x in rows(12, 1)), pool()]),
    "append": (append, lambda: [normal(2, 10, 2, 16), normal(2, 10, 2, 16, seed=1), new_tokens(), new_tokens()]),
    "append to pages, rotary": (
        append_and_turn,
        lambda: [normal(5, 8, 2, 16), normal(5, 8, 2, 16, seed=1), new_tokens(), new_tokens(), new_tokens(4)],
    ),
}


class Seen(TorchDispatchMode):
    """The operators of ours that a mode sees, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tessera":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    call, inputs = CALLS[name]
    with Seen() as seen:
        call(*inputs())
    assert len(seen.calls) == 1
    operator, arguments = seen.calls[0]
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("name", CALLS)
def test_a_mode_changes_nothing(name):
    call, inputs = CALLS[name]
    ours, theirs = inputs(), inputs()
    out = call(*ours)
    with Seen():
        want = call(*theirs)
    same((out, *ours), (want, *theirs))


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "aot_eager") for name in CALLS), ("decode, with a ring", "inductor"), ("append", "inductor")],
)
def test_compiled(name, backend):
    """What is written in place, and what was computed before and after it in one graph."""
    call, inputs = CALLS[name]

    def step(*tensors):
        before = [x * 2 for x in tensors]
        out = call(*tensors)
        return before, out, [x + 1 for x in tensors]

    ours, theirs = inputs(), inputs()
    torch._dynamo.reset()
    got = torch.compile(step, fullgraph=True, backend=backend)(*ours)
    want = step(*theirs)
    same((*got[0], got[1], *got[2], *ours), (*want[0], want[1], *want[2], *theirs))


def test_compiled_for_any_number_of_tokens():
    """One graph for all batches and lengths: the states of a chunk of any size."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(chunk, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (70, 33, 150):
        ours, theirs = [*rows(tokens), pool()], [*rows(tokens), pool()]
        same((compiled(*ours), ours[3]), (chunk(*theirs), theirs[3]))
    assert len(graphs) == 1


def test_a_seed_is_drawn_by_each_call_of_a_graph():
    def step(q, k, v, state):
        return tessera.linear_decode(q, k, v, state, SLOPES, state_slots=SLOTS, rounding="stochastic")

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    states = []
    for _ in range(2):
        states.append(pool(torch.bfloat16))
        compiled(*rows(1), states[-1])
    assert not torch.equal(*states)


def same(got, want):
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)
