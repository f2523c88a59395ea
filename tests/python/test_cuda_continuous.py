# SPDX-License-Identifier: Apache-2.0
"""Continuous batching of transformers on a GPU under Tessera: greedy tokens of transformers' own attention."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from cuda_torch import CUDA  # noqa: E402
from tessera.transformers import use_continuous_batching  # noqa: E402
from test_transformers_continuous import KINDS, NEW, PROMPTS, calls, quiet, tokens  # noqa: E402, F401
from transformers_models import make  # noqa: E402

TIE = 0.05  # between logits, whose standard deviation is above 1: what rounding to 16 bits moves


def on_gpu(kind):
    return make(kind, "eager").to(CUDA, torch.float16)


def one_by_one(model):
    made = [
        model.generate(torch.tensor([each], device=CUDA), max_new_tokens=20, do_sample=False)[0] for each in PROMPTS
    ]
    return [each[len(given) :].tolist() for each, given in zip(made, PROMPTS, strict=True)]


def same_but_for_ties(kind, got, want):
    """Tokens up to the first that differs, if any; that one is a tie of the model in fp32."""
    exact = make(kind, "eager")
    for given, mine, its in zip(PROMPTS, got, want, strict=True):
        for n, (one, other) in enumerate(zip(mine, its, strict=True)):
            if one != other:
                logits = exact(torch.tensor([[*given, *mine[:n]]])).logits[0, -1]
                assert logits.std() > 1 and abs(logits[one] - logits[other]) < TIE, (kind, n)
                break


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens(kind, calls):  # noqa: F811
    got = tokens(use_continuous_batching(on_gpu(kind)))
    assert calls and any(calls) == (kind == "llama")  # pages are read in place where all layers have block tables
    same_but_for_ties(kind, got, one_by_one(on_gpu(kind)))
    if kind != "gemma2":  # whose softcap `paged|eager` leaves out
        same_but_for_ties(kind, got, tokens(on_gpu(kind)))
    assert all(len(set(each)) > 3 for each in got)
