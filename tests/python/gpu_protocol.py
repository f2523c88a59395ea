# SPDX-License-Identifier: Apache-2.0
"""Checks of what a call on a GPU says to the driver and to the arrays' library: `python gpu_protocol.py NAME`."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable

import fake_gpu
import numpy as np
import tessera
from fake_gpu import Array, OldArray, _Stream, gpu
from tessera import _core
from tessera._gpu import KeptWorkspaces

SHAPE = (1, 64, 2, 64)


def three(kind: type = Array, shape: tuple[int, ...] = SHAPE) -> tuple[Array, Array, Array]:
    return kind(shape), kind(shape), kind(shape)


def refused(error: type[Exception], call: Callable[[], object], *texts: str) -> None:
    try:
        call()
    except error as found:
        for text in texts:
            assert text in str(found), f"{found} lacks {text!r}"
        return
    raise AssertionError(f"no {error.__name__}")


def array_api() -> None:
    """Without streams: the legacy default one, whose number is 1; done when the call returns."""
    q, k, v = three()
    out, lse = tessera.attention(q, k, v, causal=True, return_lse=True)
    assert q.streams == k.streams == v.streams == [1]
    assert (gpu.launches, gpu.last.stream, gpu.synchronisations) == (1, None, 1)
    assert (out.shape, out.dtype, out.__dlpack_device__()) == (SHAPE, "fp16", (2, 0))
    assert (lse.shape, lse.dtype, lse.__dlpack_device__()) == ((1, 2, 64), "fp32", (2, 0))


def workspace_of_ours() -> None:
    """A library without streams has no allocator for it either: none is left behind."""
    q, k, v = three(shape=(1, 1024, 2, 64))
    held = gpu.allocations
    out = tessera.attention(q, k, v, wishes="splits=2")
    assert (gpu.launches, gpu.allocations) == (2, held + 1)
    del out
    assert gpu.allocations == held


def gradients() -> None:
    """Row values, dQ, then dK and dV: three kernels, whose row values are the workspace."""
    cupy = fake_gpu.install_cupy()
    q, k, v = three(cupy.ndarray)
    cupy.stream = _Stream(77)
    lse = cupy.ndarray((1, 2, 64), "float32")
    dq, dk, dv = tessera.attention_backward(q, q, k, v, q, lse, causal=True)
    assert (gpu.launches, gpu.last.stream, gpu.synchronisations) == (3, 77, 0)
    assert [(x.shape, str(x.dtype)) for x in (dq, dk, dv)] == [(SHAPE, "float16")] * 3


def before_dlpack_1() -> None:
    q, k, v = three(OldArray)
    tessera.attention(q, k, v)
    assert q.streams == [1] and gpu.launches == 1
    refused(ValueError, lambda: tessera.attention(q, k, v, out=OldArray(SHAPE)), "o: got", "a writable array")


def cupy_stream() -> None:
    cupy = fake_gpu.install_cupy()
    q, k, v = three(cupy.ndarray)
    cupy.stream = _Stream(77)
    out = tessera.attention(q, k, v)
    assert q.streams == out.streams == [77]
    assert (gpu.last.stream, gpu.synchronisations) == (77, 0)
    assert isinstance(out, cupy.ndarray) and cupy.made == [(SHAPE, "float16", 0)]
    cupy.stream = _Stream(0)
    tessera.attention(q, k, v)
    assert q.streams == [77, 1] and gpu.last.stream is None
    cupy.stream = _Stream(2)  # per thread
    tessera.attention(q, k, v)
    assert q.streams[-1] == 2 and gpu.last.stream == 2


def workspaces(call: Callable[..., object], runs: int) -> list[int]:
    """How many workspaces each run of a call with splits lets cupy make."""
    import cupy  # what install_cupy made

    q, k, v = three(cupy.ndarray, (1, 1024, 2, 64))
    made = []
    for _ in range(runs):
        cupy.made.clear()
        call(q, k, v)
        made.append(sum(dtype == "uint8" for _, dtype, _ in cupy.made))
    return made


def plan_with_splits(cupy: types.ModuleType) -> tessera.AttentionPlan:
    return tessera.plan(*three(cupy.ndarray, (1, 1024, 2, 64)), wishes="splits=2")


def cupy_workspace() -> None:
    """Of cupy's allocator: a call's own; a plan's kept for each stream, but a graph's own while it is captured."""
    cupy = fake_gpu.install_cupy()
    held = gpu.allocations
    assert workspaces(lambda *x: tessera.attention(*x, wishes="splits=2"), 1) == [1]
    assert gpu.launches == 2
    assert gpu.allocations == held  # what cupy made is gone: nothing is kept
    plan = plan_with_splits(cupy)
    assert workspaces(plan, 3) == [1, 0, 0]
    cupy.stream = _Stream(5)
    assert workspaces(plan, 2) == [1, 0]
    gpu.capture = 1
    assert workspaces(plan, 2) == [1, 1]
    gpu.capture, gpu.capture_result = 0, 906  # of the legacy stream while another thread captures one that waits for it
    cupy.stream = _Stream(0)
    assert workspaces(plan, 2) == [1, 1]
    gpu.capture_result = 0
    assert workspaces(plan, 1) == [0]
    assert plan.implementation.startswith("cuda.fwd_")


def workspaces_of_streams_with_one_handle() -> None:
    """The default streams of threads, and one whose handle was another's before; no id, no workspace is kept."""
    cupy = fake_gpu.install_cupy()
    plan = plan_with_splits(cupy)
    cupy.stream = _Stream(2)
    seen = [workspaces(plan, 2)]
    thread = threading.Thread(target=lambda: seen.append(workspaces(plan, 2)))
    thread.start()
    thread.join()
    assert seen == [[1, 0], [1, 0]]
    cupy.stream = _Stream(7)
    assert workspaces(plan, 2) == [1, 0]
    gpu.streams += 1
    assert workspaces(plan, 2) == [1, 0]
    gpu.stream_id_result = 1
    assert workspaces(plan, 2) == [1, 1]


def workspaces_of_many_streams() -> None:
    cupy = fake_gpu.install_cupy()
    plan = plan_with_splits(cupy)
    held, most = gpu.allocations, KeptWorkspaces.MOST_STREAMS
    for stream in range(10, 10 + 3 * most):
        cupy.stream = _Stream(stream)
        assert workspaces(plan, 2) == [1, 0]
        cupy.stream = _Stream(10)
        assert workspaces(plan, 1) == [0]  # in use all the time
    assert gpu.allocations == held + most


def one_device() -> None:
    q, k, v = three()
    away = Array(SHAPE, device=1)
    refused(
        ValueError, lambda: tessera.attention(q, away, v), "k: got fake_gpu.Array on cuda:1; want an array on cuda:0"
    )
    assert away.streams == []  # nothing was asked of an array elsewhere
    lengths = np.array([64], np.int32)
    refused(
        ValueError, lambda: tessera.attention(q, k, v, seqused_k=lengths), "seqused_k: got int32 (1) on cpu", "cuda:0"
    )
    refused(TypeError, lambda: tessera.attention(q, np.zeros(SHAPE, np.float16), v), "k: got an array of numpy")
    refused(ValueError, lambda: tessera.attention(away, away, away), "device: got cuda:1; want cuda:0 to below 1")
    plan = tessera.plan(q, k, v)
    refused(ValueError, lambda: plan(away, away, away), "q: got an array on cuda:1; want one on cuda:0")
    host = [np.zeros(SHAPE, np.float16) for _ in range(3)]
    refused(TypeError, lambda: tessera.attention(host[0], k, host[2]), "k: got an array of fake_gpu")
    assert gpu.launches == 0


def cupy_on_a_second_gpu() -> None:
    """Whatever is made for a call is made where its arrays are, not on the device that is current."""
    gpu.devices = 2
    cupy = fake_gpu.install_cupy()

    def there(*shape: int, dtype: str = "float16") -> Array:
        return cupy.ndarray(shape, dtype, 1)

    rows, slopes = [there(2, 3, 2, 64) for _ in range(3)], there(2, dtype="float32")
    tessera.linear_decode(*rows, there(2, 2, 64, 64, dtype="float32"), slopes)
    tessera.linear_attention(*rows, slopes, initial_state=there(2, 2, 64, 64, dtype="float32"))
    packed, starts = [there(6, 2, 64) for _ in range(3)], there(3, dtype="int64")
    out, final = tessera.linear_attention(*packed, slopes, cu_seqlens=starts, output_final_state=True)
    assert out.number == final.number == 1
    tessera.combine([there(*SHAPE) for _ in range(5)], there(5, 1, 2, 64, dtype="float32"))
    tessera.plan(*(there(1, 1024, 2, 64) for _ in range(3)), wishes="splits=2")(
        *(there(1, 1024, 2, 64) for _ in range(3))
    )
    assert gpu.launches == 6 and len(cupy.made) > 6
    assert {device for _, _, device in cupy.made} == {1}


def unsupported() -> None:
    """What no kernel does is refused with the reasons of those that there are, before anything is allocated."""
    q, k, v = three()
    wide, lse = [Array(SHAPE, "float32") for _ in range(3)], Array((1, 2, 64), "float32")
    held = gpu.allocations
    what = "cuda.fwd_mma: wants q, k and v of one type, bf16 or fp16); cpu.tiled takes it on the CPU"
    refused(NotImplementedError, lambda: tessera.attention(*wide), "on cuda sm=90", what)
    refused(
        NotImplementedError, lambda: tessera.attention(q, k, v, wishes="implementation=cpu.tiled"), "runs on the CPU"
    )
    refused(
        NotImplementedError,
        lambda: tessera.attention_backward(wide[0], *wide, wide[0], lse),
        "cuda.bwd_wgmma, cuda.bwd_mma: wants q, k and v of one type",
    )
    refused(ValueError, lambda: tessera.attention(q, k, v, mask=lambda b, h, i, j: i > j and True), "truth of a symbol")
    assert gpu.launches == 0
    assert gpu.allocations == held


def lengths_stay_on_the_gpu() -> None:
    """Without the longest sequences the capacities stand for them; no length is read."""
    cupy = fake_gpu.install_cupy()
    q, k, v = three(cupy.ndarray, (96, 2, 64))
    starts = cupy.ndarray((4,), "int32")
    plan = tessera.plan(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts)
    assert "b=3 sq=96" in plan.problem
    assert starts.streams == []
    tessera.attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts)
    assert starts.streams == [1, 1]  # each binding once, by the run
    assert "sq=40" in tessera.plan(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=40).problem
    pages = cupy.ndarray((10, 16, 2, 64))
    paged = {
        "page_indptr": starts,
        "page_indices": cupy.ndarray((9,), "int32"),
        "last_page_len": cupy.ndarray((3,), "int32"),
    }
    assert "sk=144" in tessera.plan(q, tessera.KeySource(pages, pages, **paged), cu_seqlens_q=starts).problem


def beside_attention() -> None:
    """combine, kv_append, linear_decode and linear_chunk run where their arrays are."""
    cupy = fake_gpu.install_cupy()
    cupy.stream = _Stream(9)
    parts, lses = three(cupy.ndarray)[:2], [cupy.ndarray((1, 2, 64), "float32") for _ in range(2)]
    out, lse = tessera.combine(parts, lses)
    assert (gpu.launches, gpu.last.stream) == (1, 9)
    assert isinstance(out, cupy.ndarray) and lse.shape == (1, 2, 64) and set(parts[0].streams) == {9}
    cache, new = cupy.ndarray((2, 32, 2, 64)), cupy.ndarray((2, 4, 2, 64))
    values = cupy.ndarray((2, 32, 2, 64))
    assert tessera.kv_append(cache, values, new, new, seqused_k=cupy.ndarray((2,), "int32")) is None
    assert gpu.launches == 2 and cache.streams == [9]
    packed, starts = cupy.ndarray((8, 2, 64)), cupy.ndarray((3,), "int32")
    tessera.kv_append(cache, values, packed, packed, seqused_k=cupy.ndarray((2,), "int32"), cu_seqlens_q=starts)
    assert gpu.launches == 3 and list(gpu.last.grid)[:2] == [8, 2]  # any sequence may have all the tokens
    rows, pool = [cupy.ndarray((2, 3, 2, 64)) for _ in range(3)], cupy.ndarray((5, 2, 64, 64), "float32")
    slopes, slots = cupy.ndarray((2,), "float32"), cupy.ndarray((2,), "int64")
    out = tessera.linear_decode(*rows, pool, slopes, state_slots=slots)
    assert gpu.launches == 4 and list(gpu.last.grid)[1:] == [2, 2] and set(pool.streams) == {9}
    assert isinstance(out, cupy.ndarray) and out.shape == (2, 3, 2, 64)
    status = cupy.ndarray((1,), "int32")
    tessera.linear_decode(*rows, pool, slopes, state_slots=slots, status=status)
    assert gpu.launches == 6 and set(status.streams) == {9}  # the slots are checked in front
    out = tessera.linear_chunk(*rows, pool, slopes, state_slots=slots)
    assert gpu.launches == 7 and list(gpu.last.grid)[1:] == [2, 2] and out.shape == (2, 3, 2, 64)
    packed = [cupy.ndarray((8, 2, 64)) for _ in range(3)]
    out = tessera.linear_chunk(*packed, None, slopes, cu_seqlens=starts)
    assert gpu.launches == 8 and list(gpu.last.grid)[1:] == [2, 2] and out.shape == (8, 2, 64)
    ring, cursor = [cupy.ndarray((5, 2, 16, 64)) for _ in range(2)], cupy.ndarray((2,), "int32")
    rings = {"ring_k": ring[0], "ring_v": ring[1], "ring_cursor": cursor}
    out = tessera.linear_decode(*rows, pool, slopes, state_slots=slots, **rings)
    assert gpu.launches == 9 and set(ring[0].streams) == {9} and out.shape == (2, 3, 2, 64)
    assert tessera.linear_flush(pool, slopes, *ring, cursor, state_slots=slots) is None
    assert gpu.launches == 10 and list(gpu.last.grid)[1:] == [2, 2]


def native_sparse_attention() -> None:
    """Pool, select, three branches and gates: six kernels on the arrays' stream, without a wait."""
    cupy = fake_gpu.install_cupy()
    cupy.stream = _Stream(9)
    q, k, v = (cupy.ndarray((1, 300, heads, 64)) for heads in (4, 2, 2))
    out, tiles = tessera.nsa(q, k, v, return_tiles=True)
    assert isinstance(out, cupy.ndarray) and out.shape == (1, 300, 4, 64)
    assert tiles.counts.shape == (1, 2, 5) and tiles.indices.shape == (1, 2, 5, 16) and tiles.block == (64, 64)
    assert (gpu.launches, gpu.last.stream, gpu.synchronisations) == (6, 9, 0)
    assert set(q.streams) == set(k.streams) == set(v.streams) == {9}
    weight, starts = cupy.ndarray((4, 3, 64)), cupy.ndarray((3,), "int32")
    packed = [cupy.ndarray((300, heads, 64)) for heads in (4, 2, 2)]
    out = tessera.nsa(*packed, gate_weight=weight, cu_seqlens=starts, max_seqlen=200)
    assert gpu.launches == 12 and out.shape == (300, 4, 64) and set(starts.streams) == {9}


def capture_needs_a_warm_kernel() -> None:
    cupy = fake_gpu.install_cupy()
    q, k, v = three(cupy.ndarray)
    gpu.capture = 1
    refused(ValueError, lambda: tessera.attention(q, k, v), "capture")
    gpu.capture = 0
    tessera.attention(q, k, v)
    gpu.capture = 1
    tessera.attention(q, k, v)
    assert gpu.launches == 2


def reports() -> None:
    """metadata="report" puts a kernel in front that looks, if there is a word for what it finds."""
    cupy = fake_gpu.install_cupy()
    q, k, v = three(cupy.ndarray)
    used, status = cupy.ndarray((1,), "int32"), cupy.ndarray((1,), "int32")
    tessera.attention(q, k, v, seqused_k=used, metadata="report", status=status)
    assert gpu.launches == 2 and status.streams == [1]
    tessera.attention(q, k, v, seqused_k=used, metadata="report")
    assert gpu.launches == 3
    refused(ValueError, lambda: tessera.attention(q, k, v, seqused_k=used, status=status), "status: got an array")


def seeds_on_the_gpu() -> None:
    """A seed that lies there is bound, not read."""
    cupy = fake_gpu.install_cupy()
    q, k, v = three(cupy.ndarray)
    seed = cupy.ndarray((1,), "uint64")
    tessera.attention(q, k, v, dropout=0.5, seed=seed)
    assert seed.streams == [1] and gpu.launches == 1


def texts_and_their_arrays() -> None:
    q, k, v = three()
    score = tessera.register_score("protocol.bias", "score + bias(at.head, at.key)", {"bias": ("fp32", 2)})
    mask = tessera.register_mask("protocol.seen", "seen(at.key) > 0.0F", {"seen": ("fp16", 1)})
    bias, seen = Array((2, 64), "float32"), Array((64,))
    tessera.attention(q, k, v, score=score, mask=mask, extras=(bias, seen))
    assert gpu.launches == 1 and bias.streams == seen.streams == [1]
    plan = tessera.plan(q, k, v, score=score, extras=(bias,))
    plan(q, k, v)
    assert gpu.launches == 2
    refused(
        ValueError, lambda: tessera.attention(q, k, v, score=score, mask=mask, extras=(bias,)), "extra1", "fp16 (1+)"
    )
    host = np.zeros((2, 64), np.float32)
    refused((TypeError, ValueError), lambda: tessera.attention(q, k, v, score=score, extras=(host,)), "extra0")
    assert gpu.launches == 2
    lse = Array((1, 2, 64), "float32")

    def backward(score):
        return tessera.attention_backward(q, q, k, v, q, lse, score=score, extras=(bias,))

    refused(NotImplementedError, lambda: backward(score), "no derivative of score callable protocol.bias")
    gate = tessera.register_score(
        "protocol.gate",
        "score * bias(at.head, at.key)",
        {"bias": ("fp32", 2)},
        derivative_text="bias(at.head, at.key)",
    )
    backward(gate)
    assert gpu.launches == 5 and bias.streams[-1] == 1


def workspace_is_checked() -> None:
    plan = _core.Plan("attention sq=64 sk=1024 hq=2 d=64 dtype=fp16", wishes="splits=2", device=0)
    q, k = Array((1, 64, 2, 64)), Array((1, 1024, 2, 64))
    arrays = (q, k, k, Array((1, 64, 2, 64)))
    assert plan.workspace_bytes > 16
    for workspace, text in (
        (_core.Buffer((16,), "uint8", device=0), "workspace: got 16 bytes"),
        (np.zeros(plan.workspace_bytes, np.uint8), "workspace: got uint8"),
        (Array((plan.workspace_bytes,), "uint8", device=1), "workspace: got fake_gpu.Array on cuda:1"),
    ):
        refused(ValueError, lambda w=workspace: plan.run(("q", "k", "v", "o"), arrays, workspace=w), text)
    assert gpu.launches == 0


if __name__ == "__main__":
    globals()[sys.argv[1]]()
