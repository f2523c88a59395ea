# SPDX-License-Identifier: Apache-2.0
"""Calls in forked children, whose parent has computed with several threads before. Each child has 20 seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings

import numpy as np
import pytest
import tessera

RANDOM = np.random.default_rng(0)
Q, K, V = (RANDOM.standard_normal((2, 300, 4, 64), np.float32) for _ in range(3))

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    # Python's own warning, from 3.12 on, that a process with threads forks.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]


def attention() -> np.ndarray:
    return tessera.attention(Q, K, V, causal=True, threads=3)


def exit_code_of_child(body) -> int:
    """0 if body() is true in a forked child, 1 if not, negative for the signal that ended it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            os._exit(0 if body() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_computes_the_same():
    before = attention()
    assert exit_code_of_child(lambda: np.array_equal(attention(), before)) == 0
    assert np.array_equal(attention(), before)


def test_a_thread_of_a_forked_child_computes_the_same():
    before = attention()

    def in_thread() -> bool:
        results = []
        thread = threading.Thread(target=lambda: results.append(attention()))
        thread.start()
        thread.join()
        return np.array_equal(results[0], before)

    assert exit_code_of_child(in_thread) == 0


def _of_batch(index: int) -> np.ndarray:
    signal.alarm(20)
    return tessera.attention(Q[index : index + 1], K[index : index + 1], V[index : index + 1], causal=True, threads=3)


def test_multiprocessing_with_fork():
    before = attention()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        parts = pool.map_async(_of_batch, range(2)).get(60)
    assert np.array_equal(np.concatenate(parts), before)
