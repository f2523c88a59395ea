# SPDX-License-Identifier: Apache-2.0
"""What each operation writes must be writable, and nothing else of a call need be."""

from __future__ import annotations

import numpy as np
import pytest
import tessera
from tessera._core import Plan

F, INT = np.float32, np.int32


def normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(F)


def integers(*values):
    return np.array(values, INT)


def rows(**shapes):
    return {name: normal(*shape) for name, shape in shapes.items()}


def blank(**shapes):
    """Outputs: fp32, or int32 for a shape that begins with INT."""
    return {name: np.zeros(shape[1:], INT) if shape[0] is INT else np.zeros(shape, F) for name, shape in shapes.items()}


Q, K = (1, 9, 2, 16), (1, 9, 1, 16)
QKV, SECOND = rows(q=Q, k=K, v=K), rows(k2=K, v2=K)
GRADIENTS = {"dq": Q, "dk": K, "dv": K, "dk2": K, "dv2": K, "dsink": (2,)}
LINEAR = rows(q=(2, 3, 2, 16), k=(2, 3, 2, 16), v=(2, 3, 2, 16)) | {"decay_slopes": np.array([0.1, 0.5], F)}
STATE, RING = (2, 2, 16, 16), (2, 2, 8, 16)
LINEAR_LINE = "b=2 t=3 h=2 d=16 slots=2"

# The line, what it reads, what it writes.
PROBLEMS = {
    "forward, next list by indices": (
        "attention sq=9 hq=2 hkv=1 d=16 lse mass=mean next=indices block=8x8 metadata=report",
        QKV,
        blank(
            o=Q,
            lse=(1, 2, 9),
            tile_mass=(1, 2, 2, 2),
            next_counts=(INT, 1, 2, 2),
            next_indices=(INT, 1, 2, 2, 2),
            status=(INT, 1),
        ),
    ),
    "forward, next list by bits": (
        "attention sq=9 hq=2 hkv=1 d=16 next=bitmask block=8x8",
        QKV,
        blank(o=Q) | {"next_bits": np.zeros((1, 2, 2, 1), np.uint32)},
    ),
    "backward": (
        "attention pass=backward sq=9 hq=2 hkv=1 d=16 kv2=dense sk2=9 sink grad=fp32 accumulate",
        QKV | SECOND | rows(o=Q, dout=Q, lse=(1, 2, 9), sink=(2,)),
        rows(**GRADIENTS),
    ),
    "combine": (
        "combine sq=9 hq=2 dv=16 lse",
        rows(o_parts=(2, *Q), lse_parts=(2, 1, 2, 9)),
        blank(o=Q, lse=(1, 2, 9)),
    ),
    "kv_append": (
        "kv_append sq=3 sk=9 hq=2 hkv=1 d=16 rotary=half:16",
        rows(k_new=(1, 3, 1, 16), v_new=(1, 3, 1, 16), q=(1, 3, 2, 16), rotary_cos=(9, 8), rotary_sin=(9, 8))
        | {"seqused_k": integers(4)},
        blank(k=K, v=K, q_rotated=(1, 3, 2, 16)),
    ),
    "linear_decode": (
        f"linear_decode {LINEAR_LINE}",
        LINEAR | {"state_slots": integers(1, 0)},
        rows(state=STATE, o=(2, 3, 2, 16)),
    ),
    "linear_decode with a ring": (
        f"linear_decode {LINEAR_LINE} ring=4",
        LINEAR | {"ring_cursor": integers(3, 0)},
        rows(state=STATE, ring_k=RING, ring_v=RING, o=(2, 3, 2, 16)),
    ),
    "linear_decode, a flush": (
        "linear_decode b=2 t=0 h=2 d=16 slots=2 ring=4",
        {"decay_slopes": LINEAR["decay_slopes"], "ring_cursor": integers(3, 0)},
        rows(state=STATE, ring_k=RING, ring_v=RING),
    ),
    "linear_chunk": (
        f"linear_chunk {LINEAR_LINE}",
        LINEAR | {"dest_slots": integers(1, 0)},
        rows(state=STATE, o=(2, 3, 2, 16)),
    ),
    "linear_chunk, backward": (
        f"linear_chunk pass=backward {LINEAR_LINE}",
        LINEAR | rows(state=STATE, dstate_final=STATE, dout=(2, 3, 2, 16)),
        rows(dq=(2, 3, 2, 16), dk=(2, 3, 2, 16), dv=(2, 3, 2, 16), dstate_initial=STATE),
    ),
}


def frozen(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("name", PROBLEMS)
def test_only_what_is_written_must_be_writable(name):
    line, read, written = PROBLEMS[name]
    plan, slots = Plan(line), (*read, *written)
    inputs, outputs = [frozen(x) for x in read.values()], [x.copy() for x in written.values()]
    plan.run(slots, (*inputs, *outputs))
    for got, given in zip(inputs, read.values(), strict=True):
        np.testing.assert_array_equal(got, given)
    for i, slot in enumerate(written):
        arrays = [x.copy() for x in outputs]
        arrays[i] = frozen(arrays[i])
        with pytest.raises(ValueError, match=rf"^{slot}: got numpy\.ndarray that is read-only; want a writable array"):
            plan.run(slots, (*inputs, *arrays))


@pytest.mark.parametrize("name", PROBLEMS)
def test_arrays_of_jax_are_never_written(name):
    jnp = pytest.importorskip("jax.numpy")
    line, read, written = PROBLEMS[name]
    plan, slots = Plan(line), (*read, *written)
    inputs = [jnp.asarray(x) for x in read.values()]
    for i, slot in enumerate(written):
        outputs = [x.copy() for x in written.values()]
        before = outputs[i].copy()
        outputs[i] = jnp.asarray(before)
        with pytest.raises(ValueError, match=rf"^{slot}: got jax.* read-only; want a writable array"):
            plan.run(slots, (*inputs, *outputs))
        np.testing.assert_array_equal(outputs[i], before)


def test_a_mapped_file_as_ring(tmp_path):
    """Its pages cannot be written: what is not refused here ends the process."""
    np.save(tmp_path / "ring.npy", np.zeros(RING, F))
    q, k, v, slopes = LINEAR.values()
    ring_k = np.load(tmp_path / "ring.npy", mmap_mode="r")
    with pytest.raises(ValueError, match=r"^ring_k: got numpy\.memmap that is read-only"):
        tessera.linear_decode(
            q, k, v, np.zeros(STATE, F), slopes, ring_k=ring_k, ring_v=np.zeros(RING, F), ring_cursor=integers(0, 0)
        )
