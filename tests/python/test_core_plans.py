# SPDX-License-Identifier: Apache-2.0
"""Plans, what they explain, threads of theirs, and calls from many Python threads at once."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import tessera
from tessera import _core


@pytest.fixture
def rng():
    return np.random.default_rng(6)


@pytest.fixture
def qkv(rng):
    return [rng.standard_normal((2, 30, 2, 16)).astype(np.float32) for _ in "qkv"]


@pytest.fixture
def restore_threads():
    yield
    tessera.set_threads(0)


class TestPlans:
    def test_runs_as_attention_does(self, qkv, rng):
        options = {
            "causal": True,
            "return_lse": True,
            "tiles": tessera.Tiles(mass="mean", next="bitmask", block=(8, 8)),
        }
        plan = tessera.plan(*qkv, **options)
        for _ in range(3):
            arrays = [rng.standard_normal((2, 30, 2, 16)).astype(np.float32) for _ in "qkv"]
            got = plan(*arrays)
            want = tessera.attention(*arrays, **options)
            for one, other in zip(got[:3], want[:3], strict=True):
                np.testing.assert_array_equal(one, other)
            np.testing.assert_array_equal(got[3].bits, want[3].bits)

    def test_out_alone(self, qkv):
        plan = tessera.plan(*qkv)
        memory = np.empty_like(qkv[0])
        assert plan(*qkv, out=memory) is memory
        np.testing.assert_array_equal(memory, tessera.attention(*qkv))
        assert [x.shape for x in plan.run(*qkv)] == [(2, 30, 2, 16)]

    def test_other_tensors_and_scalars(self, qkv):
        plan = tessera.plan(*qkv, seqused_k=np.array([30, 30], np.int32), dropout=0.5, seed=1)
        lengths = np.array([4, 9], np.int32)
        np.testing.assert_array_equal(
            plan(*qkv, seqused_k=lengths, seed=9, head_offset=2),
            tessera.attention(*qkv, seqused_k=lengths, dropout=0.5, seed=9, offsets=tessera.Offsets(head=2)),
        )
        with pytest.raises(
            TypeError, match="sinks: got an argument that the plan does not bind; want one of seqused_k"
        ):
            plan(*qkv, sinks=np.zeros(2, np.float32))

    def test_other_shapes_are_refused(self, qkv):
        plan = tessera.plan(*qkv)
        with pytest.raises(ValueError, match=r"q: got fp32 \(2, 29, 2, 16\)"):
            plan(qkv[0][:, :29], *qkv[1:])

    def test_says_what_it_is(self, qkv):
        plan = tessera.plan(*qkv, causal=True, threads=1)
        assert plan.problem == "attention b=2 sq=30 hq=2 d=16 causal"
        assert plan.implementation == "cpu.tiled" and plan.workspace_bytes > 0
        assert "cpu.tiled" in repr(plan) and plan.problem in repr(plan)
        assert plan.explain() == tessera.explain(*qkv, causal=True, threads=1)
        assert plan.explain() == tessera.explain(plan.problem, threads=1)
        assert "implementation: cpu.reference" in tessera.explain(plan.problem, wishes="implementation=cpu.reference")

    @pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
    @pytest.mark.parametrize("library", ["numpy", "torch", "jax.numpy"])
    def test_copies_and_pickles(self, qkv, again, library):
        module = pytest.importorskip(library)
        qkv = [module.asarray(x) for x in qkv]
        used = module.asarray(np.array([20, 11], np.int32))
        plan = tessera.plan(*qkv, causal=True, seqused_k=used, return_lse=True)
        other = again(plan)
        assert other is not plan and other.explain() == plan.explain()
        for got, want in zip(other(*qkv), plan(*qkv), strict=True):
            assert type(got) is type(want) and np.array_equal(got, want)
        with pytest.raises(ValueError, match=r"q: got fp32 \(2, 29, 2, 16\)"):
            other(qkv[0][:, :29], *qkv[1:])

    def test_copies_of_extension_plans(self):
        plan = _core.Plan("attention sq=40 d=8 causal", wishes="tile_q=16", threads=2, isa=tessera.cpu_isas()[-1])
        for other in (copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
            assert other.explain() == plan.explain()

    def test_explain_refuses_a_mixture(self, qkv):
        with pytest.raises(TypeError, match="explain: got a line and causal; want wishes and threads only"):
            tessera.explain("attention sq=4", causal=True)
        with pytest.raises(ValueError, match="sq: got "):
            tessera.explain("attention hq=4")
        with pytest.raises(NotImplementedError, match=r"cpu\.combine: "):
            tessera.explain("combine sq=4 dtype=e4m3:e4m3:e4m3:bf16")

    def test_explains_gpus_that_are_not_there(self):
        q = np.zeros((1, 1, 8, 128), np.float16)
        k = v = np.zeros((1, 4096, 1, 128), np.float16)
        line = "attention sq=1 sk=4096 hq=8 hkv=1 d=128 dtype=fp16 lse"
        text = tessera.explain(q, k, v, return_lse=True, target="sm_120f", multiprocessors=170)
        assert f"problem:        {line}\n" in text and "sm=120" in text and "multiprocessors=170" in text
        assert "implementation: cuda.fwd_decode" in text and "splits:         1\n" not in text
        assert text == tessera.explain(line, target="sm_120f", multiprocessors=170)
        assert "splits:         1\n" in tessera.explain(line, target="sm_120f")
        wishes = "splits=3 stages=1"  # a CPU has no stages
        assert "splits:         3\n" in tessera.explain(q, k, v, target="sm_80", wishes=wishes)
        assert "implementation: cuda.fwd_wgmma" in tessera.explain("attention sq=512 d=64 dtype=bf16", target="sm_90a")
        with pytest.raises(ValueError, match="target: got rtx5090; want sm_80 or newer"):
            tessera.explain(line, target="rtx5090")
        with pytest.raises(ValueError, match="multiprocessors: got -1; want 0 or more"):
            tessera.explain(line, target="sm_80", multiprocessors=-1)
        with pytest.raises(TypeError, match="multiprocessors: got 8 without target"):
            tessera.explain(line, multiprocessors=8)
        with pytest.raises(NotImplementedError, match="sm=80"):
            tessera.explain("attention sq=4 dtype=fp32", target="sm_80")

    def test_extension_plans(self):
        plan = _core.Plan("attention sq=4 d=8", wishes="tile_q=16", threads=1, isa=tessera.cpu_isas()[-1])
        assert plan.threads == 1 and plan.isa == tessera.cpu_isas()[-1]
        assert "tile_q: 16 (wish)" in plan.explain()
        with pytest.raises(ValueError, match="threads: got -2; want 0"):
            _core.Plan("attention sq=4", threads=-2)
        with pytest.raises(NotImplementedError, match="isa: got z80; want one that this build has"):
            _core.Plan("attention sq=4", isa="z80")


class TestThreads:
    def test_number_of_a_call(self, qkv, restore_threads):
        assert "threads=3" in tessera.explain(*qkv, threads=3)
        tessera.set_threads(2)
        assert tessera.get_threads() == 2 and "threads=2" in tessera.explain(*qkv)
        assert "threads=2" in tessera.explain("attention sq=8")
        assert "threads=1" in tessera.explain(*qkv, threads=1)
        tessera.set_threads(0)
        assert tessera.get_threads() == _core.default_threads()
        with pytest.raises(ValueError, match="threads: got -1; want 0 or more"):
            tessera.set_threads(-1)

    def test_batch_invariant_results_do_not_depend_on_it(self, qkv):
        one, two, four = (tessera.attention(*qkv, batch_invariant=True, threads=n) for n in (1, 2, 4))
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(one, four)

    def test_torch_number_is_followed_where_the_runtime_is_shared(self):
        torch = pytest.importorskip("torch")
        runtimes = {
            line.split()[-1]
            for line in open("/proc/self/maps")  # noqa: SIM115
            if "libgomp" in line or "libomp" in line or "libiomp" in line
        }
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(before + 1)
            shared = _core.default_threads() == before + 1
        finally:
            torch.set_num_threads(before)
        assert shared == (len(runtimes) == 1)


class TestConcurrency:
    def test_many_threads_on_one_plan(self, rng):
        """Results of eight threads, each of its own inputs, are those of one after the other."""
        inputs = [[rng.standard_normal((1, 50, 2, 32)).astype(np.float32) for _ in "qkv"] for _ in range(8)]
        plan = tessera.plan(*inputs[0], causal=True)
        want = [plan(*arrays) for arrays in inputs]
        start = threading.Barrier(8)

        def work(index):
            start.wait()
            return [plan(*inputs[index]) for _ in range(20)]

        with ThreadPoolExecutor(8) as pool:
            for index, results in enumerate(pool.map(work, range(8))):
                for result in results:
                    np.testing.assert_array_equal(result, want[index])

    def test_many_threads_on_different_problems(self, rng):
        shapes = [(1, 20 + 7 * i, 2, 16) for i in range(6)]
        inputs = [[rng.standard_normal(shape).astype(np.float32) for _ in "qkv"] for shape in shapes]
        want = [tessera.attention(*arrays) for arrays in inputs]

        def work(turn):
            index = turn % 6
            try:
                tessera.attention(*inputs[index], scale=float("nan"))
            except ValueError:
                return index, tessera.attention(*inputs[index])
            return index, None

        with ThreadPoolExecutor(6) as pool:
            for index, result in pool.map(work, range(120)):
                np.testing.assert_array_equal(result, want[index])

    def test_the_lock_is_released(self, rng):
        """Python goes on while a run computes."""
        q = rng.standard_normal((1, 4096, 4, 64)).astype(np.float32)
        tessera.attention(q[:, :8], q, q, threads=1)
        spans = []

        def compute():
            begin = time.perf_counter()
            tessera.attention(q, q, q, threads=1)
            spans.append((begin, time.perf_counter()))

        worker = threading.Thread(target=compute)
        worker.start()
        turns = []
        while not spans:
            time.sleep(0)
            turns.append(time.perf_counter())
        worker.join()
        begin, end = spans[0]
        inside = [begin, *(turn for turn in turns if begin < turn < end), end]
        # With the lock held, one wait would be as long as the attention. Other programs may take some of the time.
        assert max(b - a for a, b in pairwise(inside)) < (end - begin) / 2

    def test_a_function_may_call_tessera(self, qkv):
        q, k, v = (x[:1, :3] for x in qkv)
        inner = []

        def mask(batch, head, query, key):
            inner.append(tessera.attention(q, k, v))
            return True

        out = tessera.attention(q, k, v, mask=mask, wishes="implementation=cpu.reference")
        np.testing.assert_allclose(out, inner[0], rtol=1e-5, atol=1e-6)
        assert len(inner) == 2 * 3 * 3

    def test_workspaces_are_given_back(self, qkv):
        tessera.attention(*qkv)
        _core.free_workspaces()
        np.testing.assert_array_equal(tessera.attention(*qkv), tessera.attention(*qkv))
