# SPDX-License-Identifier: Apache-2.0
"""The C++ command and Python give the same bits on the same arrays: other operations."""

from __future__ import annotations

import numpy as np
import pytest
import tessera
from command_run import THREADS, identical, normal


class TestOtherOperations:
    def test_combine(self, command, rng):
        outs, lses = normal(rng, 3, 2, 5, 4, 16), normal(rng, 3, 2, 4, 5)
        sinks = normal(rng, 4)
        out, lse = tessera.combine(outs, lses, sinks=sinks, threads=THREADS)
        theirs = command("combine lse", o_parts=outs, lse_parts=lses, sink=sinks)
        identical(out, theirs["o"])
        identical(lse, theirs["lse"])

    def test_kv_append(self, command, rng):
        k, v, k_new, v_new, q = (
            normal(rng, *shape) for shape in ((2, 9, 2, 16),) * 2 + ((2, 3, 2, 16),) * 2 + ((2, 3, 4, 16),)
        )
        cos, sin, used = normal(rng, 9, 4), normal(rng, 9, 4), np.array([1, 6], np.int32)
        theirs = command(
            "kv_append rotary=half:8",
            k=k,
            v=v,
            k_new=k_new,
            v_new=v_new,
            q=q,
            seqused_k=used,
            rotary_cos=cos,
            rotary_sin=sin,
        )
        turned = tessera.kv_append(k, v, k_new, v_new, seqused_k=used, rotary_cos=cos, rotary_sin=sin, q=q)
        identical(k, theirs["k"])
        identical(v, theirs["v"])
        identical(turned, theirs["q_rotated"])

    def test_a_step_of_a_skip_state(self, command, rng):
        tensors = {name: normal(rng, 1, 70, 2, 16) for name in "qkv"}
        tensors |= {
            "tile_bits": np.full((1, 2, 5, 1), 0b10111, np.uint32),
            "skip_memory": np.full((1, 2, 5, 5), 200, np.uint8),
            "skip_lse": np.full((1, 2, 70), 4.5, np.float32),
            "skip_threshold": np.array([-2.3, -2.5], np.float32),
        }
        theirs = command("block=16x16 list=bitmask skip=mass", **tensors)
        ours = {name: array.copy() for name, array in tensors.items()} | {"o": np.empty_like(tensors["q"])}
        plan = tessera._core.Plan("attention sq=70 hq=2 d=16 block=16x16 list=bitmask skip=mass", threads=THREADS)
        plan.run(tuple(ours), tuple(ours.values()))
        assert 0 < np.unpackbits(ours["tile_bits"].view(np.uint8)).sum() < 50
        for name in ("o", "tile_bits", "skip_memory", "skip_lse"):
            identical(ours[name], theirs[name])

    def test_linear_decode(self, command, rng):
        q, k, v = (normal(rng, 2, 3, 4, dim) for dim in (16, 16, 24))
        state, slopes = normal(rng, 5, 4, 16, 24), np.array([0, 0.1, 0.5, 2], np.float32)
        slots = np.array([3, -1], np.int64)
        tensors = {"q": q, "k": k, "v": v, "state": state, "decay_slopes": slopes, "state_slots": slots}
        theirs = command("linear_decode layout=kv scale=0.5", **tensors)
        out = tessera.linear_decode(q, k, v, state, slopes, state_slots=slots, scale=0.5, layout="kv", threads=THREADS)
        identical(out, theirs["o"])
        identical(state, theirs["state"])

    def test_linear_decode_with_a_ring(self, command, rng):
        q, k, v = (normal(rng, 2, 3, 4, dim) for dim in (16, 16, 24))
        ring_k, ring_v = normal(rng, 5, 4, 10, 16), normal(rng, 5, 4, 10, 24)
        tensors = {"state": normal(rng, 5, 4, 16, 24), "decay_slopes": np.array([0, 0.1, 0.5, 2], np.float32)}
        tensors |= {"state_slots": np.array([3, 1], np.int64), "ring_k": ring_k, "ring_v": ring_v}
        tensors["ring_cursor"] = np.array([4, 7], np.int32)  # the first has no room for three more of five
        theirs = command("linear_decode layout=kv", q=q, k=k, v=v, **tensors)
        flushed = command("linear_decode layout=kv", **tensors)
        ours = {name: array.copy() for name, array in tensors.items()}
        tessera.linear_flush(**ours, layout="kv", threads=THREADS)
        identical(ours["state"], flushed["state"])
        out = tessera.linear_decode(q, k, v, **tensors, layout="kv", threads=THREADS)
        identical(out, theirs["o"])
        for name in ("state", "ring_k", "ring_v"):
            identical(tensors[name], theirs[name])

    @pytest.mark.parametrize("pool", [False, True])
    @pytest.mark.parametrize("form", ["dense", "packed", "without batch"])
    def test_linear_chunk(self, command, rng, form, pool):
        rows = (2, 70) if form == "dense" else (140,)
        tensors = {name: normal(rng, *rows, 4, dim, dtype="bf16") for name, dim in (("q", 16), ("k", 16), ("v", 24))}
        cu = {"cu_seqlens": np.array([0, 101, 101, 140], np.int32)} if form == "packed" else {}
        batch = {"dense": 2, "packed": 3, "without batch": 1}[form]
        slopes, state = np.array([0, 0.1, 0.5, 2], np.float32), normal(rng, 6, 4, 16, 24) if pool else None
        # No sequence reads what another writes.
        slots = {"state_slots": np.arange(5, 5 - batch, -1), "dest_slots": np.arange(batch)} if pool else {}
        given = tensors | slots | {"decay_slopes": slopes} | ({"state": state} if pool else {})
        given |= {"cu_seqlens_q": cu["cu_seqlens"]} if cu else {}
        theirs = command("linear_chunk layout=kv scale=0.5", **given)
        if form == "without batch":
            tensors = {name: array[None] for name, array in tensors.items()}
        out = tessera.linear_chunk(
            *tensors.values(), state, slopes, **slots, **cu, scale=0.5, layout="kv", threads=THREADS
        )
        identical(out[0] if form == "without batch" else out, theirs["o"])
        assert set(theirs) == ({"o", "state"} if pool else {"o"})
        if pool:
            identical(state, theirs["state"])

    @pytest.mark.parametrize("pool", [False, True])
    @pytest.mark.parametrize("packed", [False, True])
    def test_linear_chunk_backward(self, command, rng, packed, pool):
        torch = pytest.importorskip("torch")
        rows = (140,) if packed else (3, 70)
        arrays = {name: normal(rng, *rows, 4, dim) for name, dim in (("q", 16), ("k", 16), ("v", 24), ("dout", 24))}
        slopes = np.array([0, 0.1, 0.5, 2], np.float32)
        states = {"state": normal(rng, 3, 4, 24, 16), "dstate_final": normal(rng, 3, 4, 24, 16)} if pool else {}
        cu = {"cu_seqlens": np.array([0, 101, 101, 140], np.int32)} if packed else {}
        given = arrays | states | {"decay_slopes": slopes} | ({"cu_seqlens_q": cu["cu_seqlens"]} if packed else {})
        theirs = command("linear_chunk pass=backward", **given)
        leaves = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items() if name != "dout"}
        initial = torch.tensor(states["state"], requires_grad=True) if pool else None
        cu = {name: torch.tensor(array) for name, array in cu.items()}
        out, final = tessera.linear_attention(
            *leaves.values(),
            torch.tensor(slopes),
            initial_state=initial,
            output_final_state=pool,
            layout="vk",
            **cu,
        )
        outputs, gradients = [out], [torch.tensor(arrays["dout"])]
        if pool:
            outputs, gradients = [out, final], [*gradients, torch.tensor(states["dstate_final"])]
        torch.autograd.backward(outputs, gradients)
        for name, leaf in leaves.items():
            identical(leaf.grad.numpy(), theirs[f"d{name}"])
        assert set(theirs) == {"dq", "dk", "dv"} | ({"dstate_initial"} if pool else set())
        if pool:
            identical(initial.grad.numpy(), theirs["dstate_initial"])
