# SPDX-License-Identifier: Apache-2.0
"""What flash-attn's calls refuse: the error names the caller's argument, what was got and what is wanted."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import tessera
from tessera.compat import flash_attn_2, flash_attn_3, flash_attn_4

INT32 = np.int32
X = np.ones((2, 8, 2, 16), np.float32)  # q, k or v
PACKED = np.ones((2, 8, 3, 2, 16), np.float32)
TOKENS = X.reshape(16, 2, 16)
CU = np.array([0, 8, 16], INT32)
NEW = X[:, :1]
HALF = X.astype(np.float16)
ARRAY = "want an array with shape, dtype and __dlpack__"
WINDOW = "want (left, right), each an integer, -1 for unbounded"


def refused(error, text, call, *arguments, **options):
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as raised:
        call(*arguments, **options)
    assert text in str(raised.value), raised.value
    assert isinstance(raised.value, error)


@pytest.mark.parametrize(
    "call", [flash_attn_2.flash_attn_func, flash_attn_3.flash_attn_func, flash_attn_4.flash_attn_func]
)
class TestTensorsOfEveryVersion:
    @pytest.mark.parametrize("at", range(3))
    @pytest.mark.parametrize(
        ("value", "got"),
        [(None, "builtins.NoneType"), ([1, 2], "builtins.list"), ("q", "builtins.str"), (3, "builtins.int")],
    )
    def test_no_array(self, call, at, value, got):
        arguments = [X, X, X]
        arguments[at] = value
        if value is None and at < 2 and call is flash_attn_4.flash_attn_func:
            return  # flash-attn 4 has calls without q or k, which are refused by name too
        refused(TypeError, f"{'qkv'[at]}: got {got}; {ARRAY}", call, *arguments)

    def test_shapes(self, call):
        refused(ValueError, "q: got 3 dimensions, shape (8, 2, 16); want (batch, seqlen_q", call, X[0], X, X)
        refused(ValueError, "k: got 3 dimensions, shape (8, 2, 16); want (batch, seqlen_k", call, X, X[0], X)
        refused(ValueError, "v: got fp32 (8, 2, 16) on cpu; want fp32 (2, 8, 2, 16)", call, X, X, X[0])
        refused(ValueError, "k: got fp32 (1, 8, 2, 16) on cpu; want fp32 (2, 8, 2, 16)", call, X, X[:1], X)
        refused(
            ValueError,
            "k: got fp32 (2, 8, 2, 8) strides (256, 32, 16, 1) on cpu; want fp32 (2, 8, 2, 16)",
            call,
            X,
            X[..., :8],
            X,
        )
        refused(
            ValueError,
            "k: got an array of shape (2, 8, 2, 16) and dtype float32; want the head dim of q, 15"
            if call is flash_attn_2.flash_attn_func
            else "head_dim of q: got 15; want a multiple of 8"
            if call is flash_attn_3.flash_attn_func
            else "head_dim: got 15: ",
            call,
            X[..., :15],
            X,
            X,
        )

    def test_dtypes(self, call):
        refused(
            ValueError,
            "k: got an array of shape (2, 8, 2, 16) and dtype float16; want the dtype of q, fp32",
            call,
            X,
            HALF,
            X,
        )
        refused(
            ValueError,
            "v: got an array of shape (2, 8, 2, 16) and dtype float32; want the dtype of q, fp16",
            call,
            HALF,
            HALF,
            X,
        )
        refused(ValueError, "q: got int64; want fp32", call, *[X.astype(np.int64)] * 3)

    def test_options(self, call):
        refused(TypeError, "softmax_scale: got 'x'; want a number", call, X, X, X, softmax_scale="x")
        refused(TypeError, "softcap: got 'x'; want a number", call, X, X, X, softcap="x")
        refused(
            TypeError,
            "causal: got an array of shape (2, 8, 2, 16) and dtype float32; want True or",
            call,
            X,
            X,
            X,
            causal=X,
        )
        refused(TypeError, "deterministic: got an array of shape", call, X, X, X, deterministic=X)
        refused(ValueError, "window_size: got 16; want (left, right), each an integer", call, X, X, X, window_size=16)
        refused(ValueError, "window_size: got 16.5; want (left, right), each", call, X, X, X, window_size=(16.5, 0))
        refused(ValueError, "window_size: got (1, 2, 3); want (left, right)", call, X, X, X, window_size=(1, 2, 3))
        refused(TypeError, "window_size: got an array of shape", call, X, X, X, window_size=(X, 0))
        if call is not flash_attn_2.flash_attn_func:
            refused(ValueError, "num_splits: got -1; want 0, for", call, X, X, X, num_splits=-1)
            refused(ValueError, "num_splits: got 1.5; want an integer", call, X, X, X, num_splits=1.5)
            refused(TypeError, "num_splits: got 'a'; want an integer", call, X, X, X, num_splits="a")


class TestVersion2:
    def test_options(self):
        call = flash_attn_2.flash_attn_func
        refused(ValueError, f"window_size: got None; {WINDOW}", call, X, X, X, window_size=None)
        refused(ValueError, "dropout_p: got 2.000000; want a probability", call, X, X, X, dropout_p=2.0)
        for probabilities in (False, True):
            options = {"dropout_p": "a", "return_attn_probs": probabilities}
            refused(TypeError, "dropout_p: got 'a'; want a number", call, X, X, X, **options)
        refused(ValueError, "alibi_slopes: got fp32 (3) on cpu", call, X, X, X, alibi_slopes=np.ones(3, np.float32))
        refused(TypeError, "alibi_slopes: got builtins.list", call, X, X, X, alibi_slopes=[1.0, 2.0])

    def test_padding_hides_no_head_dim(self):
        odd = X[..., :15]
        refused(
            ValueError,
            "want the head dim of q, 15, which is no multiple of 8",
            flash_attn_2.flash_attn_func,
            odd,
            odd,
            X,
        )

    def test_packed(self):
        text = "qkv: got an array of shape (2, 8, 2, 16) and dtype float32; want (batch, seqlen, 3, heads, dim)"
        refused(ValueError, text, flash_attn_2.flash_attn_qkvpacked_func, X)
        refused(ValueError, text, flash_attn_2.flash_attn_qkvpacked_func, X)
        refused(
            ValueError,
            "qkv: got an array of shape (2, 8, 2, 2, 16)",
            flash_attn_2.flash_attn_qkvpacked_func,
            PACKED[:, :, :2],
        )
        refused(ValueError, "want (batch, seqlen, 2, heads, dim)", flash_attn_2.flash_attn_kvpacked_func, X, PACKED)
        refused(
            ValueError, "want (tokens, 3, heads, dim)", flash_attn_2.flash_attn_varlen_qkvpacked_func, TOKENS, CU, 8
        )
        refused(
            ValueError,
            "want (tokens, 2, heads, dim)",
            flash_attn_2.flash_attn_varlen_kvpacked_func,
            TOKENS,
            TOKENS,
            CU,
            CU,
            8,
            8,
        )
        refused(TypeError, f"qkv: got builtins.NoneType; {ARRAY}", flash_attn_2.flash_attn_qkvpacked_func, None)
        refused(
            ValueError,
            "qkv: got an array of shape (2, 8, 2, 2, 16)",
            flash_attn_3.flash_attn_qkvpacked_func,
            PACKED[:, :, :2],
        )
        long = PACKED.reshape(16, 3, 2, 16), CU.astype(np.int64), 8
        refused(
            ValueError,
            "cu_seqlens: got int64 (3) on cpu; want int32 (3)",
            flash_attn_2.flash_attn_varlen_qkvpacked_func,
            *long,
        )

    @pytest.mark.parametrize("call", [flash_attn_2.flash_attn_varlen_func, flash_attn_3.flash_attn_varlen_func])
    def test_lengths(self, call):
        for value, got in (([0, 8, 16], "builtins.list"), (None, "builtins.NoneType")):
            refused(TypeError, f"cu_seqlens_q: got {got}; {ARRAY}", call, TOKENS, TOKENS, TOKENS, value, CU, 8, 8)
            refused(TypeError, f"cu_seqlens_k: got {got}; {ARRAY}", call, TOKENS, TOKENS, TOKENS, CU, value, 8, 8)
        refused(ValueError, "max_seqlen_q: got 8.5; want an integer", call, TOKENS, TOKENS, TOKENS, CU, CU, 8.5, 8)
        refused(TypeError, "max_seqlen_k: got '8'; want an integer", call, TOKENS, TOKENS, TOKENS, CU, CU, 8, "8")
        refused(ValueError, "q: got 4 dimensions, shape (2, 8, 2, 16); want (tokens", call, X, X, X, CU, CU, 8, 8)

    @pytest.mark.parametrize(
        ("table", "error", "text"),
        [
            (np.zeros((2, 1), np.int64), ValueError, "got int64 (2, 1) on cpu; want int32 (2, 1+)"),
            (np.full((2, 1), 7, INT32), ValueError, "got [0] = 7; want a page from 0 to below 2"),
            (np.zeros(2, INT32), ValueError, "got int32 (2) on cpu"),
            ([[0], [1]], TypeError, "got builtins.list"),
        ],
    )
    def test_block_table(self, table, error, text):
        call = flash_attn_2.flash_attn_varlen_func
        refused(error, f"block_table: {text}", call, TOKENS, X, X, CU, CU, 8, 8, block_table=table)


def i32(*values):
    return np.array(values, INT32)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"cache_seqlens": 8.0}, TypeError, "cache_seqlens: got builtins.float"),
        ({"cache_seqlens": [8, 8]}, TypeError, "cache_seqlens: got builtins.list"),
        (
            {"cache_seqlens": np.array([8, 8])},
            ValueError,
            "cache_seqlens: got an array of shape (2,) and dtype int64; want int32 (batch), or",
        ),
        ({"cache_seqlens": 9}, ValueError, "cache_seqlens: got [0] = 9; want 0 to 8"),
        ({"cache_seqlens": i32(8, 8, 8)}, ValueError, "cache_seqlens: got int32 (3) on cpu; want int32 (2)"),
        (
            {"block_table": np.zeros((2, 1), np.int64)},
            ValueError,
            "block_table: got an array of shape (2, 1) and dtype int64; want int32",
        ),
        ({"block_table": [[0]]}, TypeError, "block_table: got builtins.list"),
        (
            {"block_table": np.full((2, 1), 5, INT32)},
            ValueError,
            "block_table: got [0] = 5; want a page from 0 to below 2",
        ),
        ({"block_table": i32(0, 1)}, ValueError, "block_table: got an array of shape (2,)"),
        ({"cache_batch_idx": i32(0, 5)}, ValueError, "cache_batch_idx: got [1] = 5; want a page from 0 to below 2"),
        (
            {"cache_batch_idx": np.array([0, 1])},
            ValueError,
            "cache_batch_idx: got an array of shape (2,) and dtype int64",
        ),
        ({"cache_batch_idx": [0, 1]}, TypeError, "cache_batch_idx: got builtins.list"),
        (
            {"cache_batch_idx": i32(0, 5), "block_table": np.zeros((2, 1), INT32)},
            ValueError,
            "cache_batch_idx: got an array of shape (2,) and dtype int32; want rows below 2",
        ),
        ({"cache_leftpad": [0, 1]}, TypeError, "cache_leftpad: got builtins.list"),
        ({"cache_leftpad": 3}, TypeError, "cache_leftpad: got builtins.int"),
        ({"cache_leftpad": i32(0, 9)}, ValueError, "cache_seqlens - cache_leftpad: got [1] = -1; want 0 to 8"),
        ({"num_splits": -1}, ValueError, "num_splits: got -1; want 0, for the plan's choice, or more"),
        ({"num_splits": None}, TypeError, "num_splits: got None; want an integer"),
        ({"window_size": 3}, ValueError, "window_size: got 3; want"),
        ({"k": X}, ValueError, "v: got None; want new keys and new values together"),
        ({"k": X, "v": X}, ValueError, "cache_seqlens: got None; want the lengths before the append"),
        ({"k": X, "v": X, "cache_seqlens": 3}, ValueError, "cache_seqlens: got [0] = 3; want room for 8 new tokens"),
        ({"k": [1], "v": [1], "cache_seqlens": 3}, TypeError, "k: got builtins.list"),
        ({"k": NEW[:, :, :1], "v": NEW, "cache_seqlens": 3}, ValueError, "k: got fp32 (2, 1, 1, 16)"),
        (
            {"k": NEW.astype(np.float16), "v": NEW, "cache_seqlens": 3},
            ValueError,
            "k: got fp16 (2, 1, 2, 16) on cpu; want fp32",
        ),
        (
            {"k": NEW, "v": NEW, "cache_seqlens": 3, "rotary_cos": [1], "rotary_sin": [1]},
            ValueError,
            "rotary_cos: got [1]; want an array (positions, rotary_dim / 2)",
        ),
    ],
)
def test_caches(options, error, text):
    cache = flash_attn_2.flash_attn_with_kvcache
    refused(error, text, cache, X, X.copy(), X.copy(), **options)


def test_tensors_of_caches():
    call = flash_attn_3.flash_attn_with_kvcache
    refused(TypeError, "q: got builtins.NoneType", call, None, X, X)
    refused(TypeError, "k_cache: got builtins.list", call, X, [1], X)
    refused(
        ValueError,
        "v_cache: got an array of shape (2, 8, 2, 16) and dtype float16; want the dtype of q",
        call,
        X,
        X,
        HALF,
    )
    refused(
        ValueError,
        "k_cache: got an array of shape (2, 8, 2, 16) and dtype float32; want the head dim",
        call,
        X[..., :15],
        X,
        X,
    )
    refused(ValueError, "v_cache: got fp32 (2, 4, 2, 16)", call, X, X, X[:, :4])
    refused(
        ValueError,
        "page_table: got an array of shape (2, 1) and dtype int64",
        call,
        X,
        X,
        X,
        page_table=np.zeros((2, 1), np.int64),
    )


class TestVersion4:
    def test_options(self):
        call = flash_attn_4.flash_attn_func
        refused(TypeError, "learnable_sink: got builtins.int", call, X, X, X, learnable_sink=3)
        refused(
            ValueError,
            "learnable_sink: got fp32 (3) on cpu; want fp32 (2)",
            call,
            X,
            X,
            X,
            learnable_sink=np.ones(3, np.float32),
        )
        refused(
            TypeError,
            "block_sparse_tensors: got 3; want a BlockSparseTensorsTorch",
            call,
            X,
            X,
            X,
            block_sparse_tensors=3,
        )
        lists = flash_attn_4.BlockSparseTensorsTorch([1], [2])
        refused(TypeError, "block_sparse_tensors: got builtins.list", call, X, X, X, block_sparse_tensors=lists)

    def test_page_table(self):
        call = flash_attn_4.flash_attn_varlen_func
        refused(TypeError, "page_table: got builtins.list", call, X, X, X, page_table=[[0]])
        refused(
            ValueError,
            "page_table: got an array of shape (2,) and dtype int32; want int32",
            call,
            X,
            X,
            X,
            page_table=i32(0, 1),
        )


class TestHeadsBeforeLengths:
    """Tensors that look like (batch, heads, seqlen, dim)."""

    HINT = "if it is (batch, heads, seqlen, dim), pass q, k and v with dimensions 1 and 2 exchanged"

    def test_a_warning_where_it_is_computed(self):
        q, k = np.ones((1, 8, 320, 16), np.float32), np.ones((1, 2, 320, 16), np.float32)
        with pytest.warns(UserWarning) as caught:
            tessera.flash_attn_func(q, k, k)
        assert self.HINT in str(caught[0].message) and caught[0].filename == __file__
        with warnings.catch_warnings():  # once for a shape
            warnings.simplefilter("error")
            tessera.flash_attn_func(q, k, k)

    def test_a_hint_in_the_error_where_it_is_not(self):
        q, k = np.ones((1, 8, 1, 16), np.float32), np.ones((1, 8, 330, 16), np.float32)
        refused(ValueError, self.HINT, tessera.flash_attn_func, q, k, k)

    def test_nothing_for_what_is_likely_as_it_is(self):
        decode = np.ones((3, 1, 128, 16), np.float32), *[np.ones((3, 400, 8, 16), np.float32)] * 2
        short = [np.ones((2, 4, 64, 16), np.float32)] * 3
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tessera.attention(*decode)
            tessera.attention(*short)
