# SPDX-License-Identifier: Apache-2.0
"""Scores and masks registered as C++ text, as far as no GPU is needed; gpu_protocol.py has the calls."""

from __future__ import annotations

import numpy as np
import pytest
import tessera


def refused(error, call, *texts):
    with pytest.raises(error) as found:
        call()
    for text in texts:
        assert text in str(found.value)


@pytest.fixture
def qkv():
    return [np.random.default_rng(2).standard_normal((1, 8, 2, 16)).astype(np.float32) for _ in "qkv"]


def test_a_name_is_given_once():
    text = "score + bias(at.head, at.query - at.key)"
    for _ in range(2):
        assert tessera.register_score("python.bias", text, {"bias": (np.float16, 2)}) == "python.bias"
    refused(ValueError, lambda: tessera.register_score("python.bias", "score"), "name", "python.bias")
    refused(ValueError, lambda: tessera.register_score("python.bias", text, {"bias": ("bf16", 2)}), "python.bias")
    assert tessera.register_mask("python.bias", "at.key > 3") == "python.bias"


def test_a_derivative_belongs_to_its_score():
    for _ in range(2):
        tessera.register_score("python.square", "score * score", derivative_text="2.0F * score")
    refused(ValueError, lambda: tessera.register_score("python.square", "score * score"), "name", "python.square")
    refused(ValueError, lambda: tessera.register_score("python.blank", "score", derivative_text=" "), "derivative_text")
    refused(TypeError, lambda: tessera.register_score("python.number", "score", derivative_text=1.0))


def test_what_cannot_be_is_refused():
    refused(ValueError, lambda: tessera.register_score("relative", "score"), "name", "built in")
    refused(ValueError, lambda: tessera.register_mask("two words", "true"), "name", "letters")
    refused(ValueError, lambda: tessera.register_mask("python.empty", " "), "text")
    refused(ValueError, lambda: tessera.register_mask("python.extras", "true", {"if": ("fp32", 1)}), "extras", "if")
    refused(ValueError, lambda: tessera.register_mask("python.extras", "true", {"x": ("fp32", 5)}), "extras", "5")
    refused(
        ValueError, lambda: tessera.register_mask("python.extras", "true", {"x": (np.float64, 1)}), "extras", "fp64"
    )
    refused(ValueError, lambda: tessera.register_mask("python.extras", "true", {"x": ("complex", 1)}), "complex")


def test_a_text_is_for_gpus(qkv):
    tessera.register_score("python.half", "score * 0.5F")
    refused(ValueError, lambda: tessera.attention(*qkv, score="python.half"), "score", "no host function")
    refused(ValueError, lambda: tessera.attention(*qkv, mask="python.half"), "mask", "register_mask", "checkerboard")


def test_extras_are_bound_in_their_order(qkv):
    tessera.register_mask("python.ids", "a(at.key) == b()", {"a": ("int32", 1), "b": ("int64", 0)})
    arrays = np.zeros(8, np.int32), np.zeros((), np.int64)
    refused(ValueError, lambda: tessera.attention(*qkv, mask="python.ids"), "extra0", "int32 (1+)")
    refused(ValueError, lambda: tessera.attention(*qkv, mask="python.ids", extras=arrays[:1]), "extra1", "int64 ()")
    refused(ValueError, lambda: tessera.attention(*qkv, mask="python.ids", extras=arrays[::-1]), "extra0")
    refused(ValueError, lambda: tessera.attention(*qkv, mask="python.ids", extras=arrays), "no host function")
    refused(ValueError, lambda: tessera.attention(*qkv, extras=arrays), "extra0", "nothing bound")
