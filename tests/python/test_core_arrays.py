# SPDX-License-Identifier: Apache-2.0
"""Arrays of other libraries, and arrays that must be refused: devices, byte orders, strides, lifetimes, overlaps."""

from __future__ import annotations

import array
import gc
import tracemalloc
import weakref

import numpy as np
import pytest
import tessera
from tessera import _arguments, _core, _execute

SLOTS = ("q", "k", "v", "o")


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.fixture
def qkv(rng):
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((1, 5, 2, 16), (1, 7, 2, 16), (1, 7, 2, 16))]


class Exporter:
    """An array with nothing but DLPack; `versions` of the protocol, 0 for no keywords."""

    def __init__(self, array, versions=1, device=(1, 0)):
        self.array, self.versions, self.device = array, versions, device
        self.shape, self.dtype = array.shape, array.dtype
        self.exported = 0

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if not self.versions and options:
            raise TypeError("no keywords")
        self.exported += 1
        return self.array.__dlpack__(**options)


class TestLibraries:
    def test_ml_dtypes(self, qkv):
        ml_dtypes = pytest.importorskip("ml_dtypes")
        half = [x.astype(ml_dtypes.bfloat16) for x in qkv]
        want = tessera.attention(*(x.astype(np.float32) for x in half))
        for wide in range(3):  # one operand of fp32, and the arithmetic is fp32's on every processor
            out = tessera.attention(*(x.astype(np.float32) if i == wide else x for i, x in enumerate(half)))
            np.testing.assert_array_equal(out, want.astype(out.dtype))
        out = tessera.attention(*half)
        assert out.dtype == ml_dtypes.bfloat16
        # Dot products of bf16, where the processor has them, round the probabilities to bf16, as all outputs are.
        most = 2.0**-8 * np.abs(qkv[2]).max()
        np.testing.assert_allclose(out.astype(np.float32), want, rtol=0, atol=most)

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_jax(self, qkv, dtype):
        jax = pytest.importorskip("jax")
        arrays = [jax.numpy.asarray(x).astype(dtype) for x in qkv]
        out, lse = tessera.attention(*arrays, causal=True, return_lse=True)
        assert isinstance(out, jax.Array) and out.dtype == arrays[0].dtype and isinstance(lse, jax.Array)
        want, its = tessera.attention(*(np.asarray(x) for x in arrays), causal=True, return_lse=True)
        np.testing.assert_array_equal(np.asarray(out), want)
        np.testing.assert_array_equal(np.asarray(lse), its)
        grads = tessera.attention_backward(out, *arrays, out, lse, causal=True)
        assert all(isinstance(each, jax.Array) for each in grads)
        numpy_grads = tessera.attention_backward(want, *(np.asarray(x) for x in arrays), want, its, causal=True)
        for got, each in zip(grads, numpy_grads, strict=True):
            np.testing.assert_array_equal(np.asarray(got), each)

    def test_jax_arrays_are_never_written(self, qkv):
        jax = pytest.importorskip("jax")
        q, k, v = (jax.numpy.asarray(x) for x in qkv)
        with pytest.raises(ValueError, match=r"o: got .* read-only; want a writable array"):
            tessera.attention(q, k, v, out=jax.numpy.zeros((1, 5, 2, 16)))
        half = jax.numpy.zeros((1, 5, 2, 16), "bfloat16")
        with pytest.raises(ValueError, match=r"o: got .* read-only; want a writable array"):
            tessera.attention(q, k, v, out=half)

    @pytest.mark.parametrize("versions", [0, 1])
    def test_dlpack_alone(self, qkv, versions):
        exporters = [Exporter(x, versions) for x in qkv]
        out = tessera.attention(*exporters)
        assert isinstance(out, np.ndarray)
        np.testing.assert_array_equal(out, tessera.attention(*qkv))
        assert [each.exported for each in exporters] == [1, 1, 1]

    def test_torch_without_gradient(self, qkv):
        torch = pytest.importorskip("torch")
        out = tessera.attention(*(torch.from_numpy(x) for x in qkv), causal=True)
        np.testing.assert_array_equal(out.numpy(), tessera.attention(*qkv, causal=True))
        merged, _ = tessera.merge_states(*(torch.from_numpy(x) for x in (*_state(qkv), *_state(qkv))))
        np.testing.assert_array_equal(merged.numpy(), tessera.merge_states(*_state(qkv), *_state(qkv))[0])

    def test_buffers_without_a_library(self, qkv):
        """The extension itself needs no array library: bytes by the buffer protocol."""
        plan = _core.Plan("attention sq=2 d=8")
        arrays = [memoryview(array.array("f", x.ravel()[:16])).cast("B").cast("f", (1, 2, 1, 8)) for x in qkv]
        out = memoryview(array.array("f", [0.0] * 16)).cast("B").cast("f", (1, 2, 1, 8))
        plan.run(SLOTS, (*arrays, out))
        want = tessera.attention(*(np.asarray(x).reshape(1, 2, 1, 8) for x in arrays))
        np.testing.assert_array_equal(np.asarray(out), want)

    def test_our_own_memory(self):
        buffer = _core.Buffer((2, 3), "bf16")
        assert buffer.shape == (2, 3) and buffer.dtype == "bf16"
        plain = np.from_dlpack(_core.Buffer((4, 5), "int32"))
        assert plain.shape == (4, 5) and plain.dtype == np.int32 and plain.ctypes.data % 64 == 0
        plain[:] = 7  # the memory is the array's now
        gc.collect()
        assert (plain == 7).all()
        with pytest.raises(ValueError, match='dtype: got "float"; want one of'):
            _core.Buffer((1,), "float")
        with pytest.raises(ValueError, match="sizes of 0 and more"):
            _core.Buffer((-1,), "fp32")


def _state(qkv):
    return tessera.attention(*qkv, return_lse=True)


class TestRefusals:
    @pytest.mark.parametrize(
        ("bad", "error", "text"),
        [
            (lambda x: x.tolist(), TypeError, "k: got builtins.list; want an array with shape, dtype and __dlpack__"),
            (lambda x: None, TypeError, "k: got builtins.NoneType; want an array"),
            (lambda x: x.astype(">f4"), ValueError, "k: got float32 in a foreign byte order; want"),
            (lambda x: x.astype(np.complex64), ValueError, "k: got complex64; want one of"),
            (lambda x: x.astype(np.int32), ValueError, "k_type: got int32; want fp32"),
            (lambda x: x[..., ::-1], ValueError, "k: got stride -1 in the last dimension; want 1"),
            (lambda x: np.repeat(x, 2, -1)[..., ::2], ValueError, "k: got stride 2 in the last dimension; want 1"),
            (
                lambda x: x[0],
                ValueError,
                "k: got 3 dimensions, shape (7, 2, 16); want (batch, seqlen_k, heads_kv, dim)",
            ),
            (lambda x: x[..., :8], ValueError, "k: got fp32 (1, 7, 2, 8)"),
            (lambda x: np.repeat(x, 2, 0), ValueError, "k: got fp32 (2, 7, 2, 16) on cpu; want fp32 (1, 7, 2, 16)"),
            (lambda x: np.repeat(x, 2, 2)[:, :, :3], ValueError, "heads_kv: got 3 for 2 query heads; want"),
        ],
    )
    def test_keys(self, qkv, bad, error, text):
        q, k, v = qkv
        with pytest.raises(error) as raised:
            tessera.attention(q, bad(k), v)
        assert text in str(raised.value)

    def test_a_stride_between_elements(self, qkv):
        q, k, v = qkv
        record = np.zeros(k.shape[:-1], np.dtype([("x", np.float32, 16), ("byte", np.uint8)]))
        with pytest.raises(ValueError, match=r"k: got a stride of .* bytes; want a multiple of the element's 4 bytes"):
            tessera.attention(q, record["x"], v)

    @pytest.mark.parametrize("stride", [2**62, -(2**62), 3])
    def test_strides_of_one_element_mean_nothing(self, rng, stride):
        q, k, v = (rng.standard_normal((1, 1, 2, 16)).astype(np.float32) for _ in range(3))
        odd = [np.lib.stride_tricks.as_strided(x, strides=(stride, -stride, *x.strides[2:])) for x in (q, k, v)]
        np.testing.assert_array_equal(tessera.attention(*odd), tessera.attention(q, k, v))

    def test_read_only_inputs_are_fine_and_outputs_are_not(self, qkv):
        want = tessera.attention(*qkv)
        for x in qkv:
            x.flags.writeable = False
        np.testing.assert_array_equal(tessera.attention(*qkv), want)
        want.flags.writeable = False
        with pytest.raises(ValueError, match=r"o: got numpy\.ndarray that is read-only; want a writable array"):
            tessera.attention(*qkv, out=want)

    def test_devices(self, qkv):
        q, k, v = qkv
        for device, text in (((2, 1), "on cuda:1; want an array on cpu"), ((8, 0), "on DLPack device type 8; want")):
            elsewhere = Exporter(k, device=device)
            with pytest.raises(ValueError) as raised:
                tessera.attention(q, elsewhere, v)
            assert str(raised.value).startswith("k: got") and text in str(raised.value)
            assert elsewhere.exported == 0  # nothing was asked to move

    def test_torch_devices_and_gradients(self, qkv):
        torch = pytest.importorskip("torch")
        q, k, v = (torch.from_numpy(x) for x in qkv)
        plan = _core.Plan("attention sq=5 sk=7 hq=2 d=16")
        with pytest.raises(ValueError, match=r"k: got torch\.Tensor: .*meta.*; want a tensor with memory"):
            plan.run(SLOTS, (q, k.to("meta"), v, torch.empty_like(q)))
        out, lse = tessera.attention(q, k, v, return_lse=True)
        with pytest.raises(ValueError, match="got a tensor that requires grad; want one that does not: combine"):
            tessera.merge_states(out.requires_grad_(), lse, out, lse)
        with torch.no_grad():
            tessera.merge_states(out, lse, out, lse)
        with pytest.raises(ValueError, match=r"v_new: got a tensor that requires grad; want .*kv_append"):
            tessera.kv_append(
                k, v, k[:, :1], v[:, :1].clone().requires_grad_(), seqused_k=torch.zeros(1, dtype=torch.int32)
            )
        with pytest.raises(ValueError, match="q: got a tensor that requires grad"):
            tessera.plan(q, k, v)(q.clone().requires_grad_(), k, v)
        with pytest.raises(ValueError, match="lazy negative sign"):
            tessera.merge_states(torch._neg_view(out.detach()), lse, out.detach(), lse)

    def test_libraries_that_differ(self, qkv):
        torch = pytest.importorskip("torch")
        q, k, v = qkv
        with pytest.raises(TypeError, match="k: got an array of torch; want one of numpy, as q is"):
            tessera.attention(q, torch.from_numpy(k), v)
        with pytest.raises(TypeError, match=r"v: got numpy\.ndarray; want a torch\.Tensor"):
            tessera.attention(torch.from_numpy(q), torch.from_numpy(k), v)

    def test_overlapping_outputs(self, qkv):
        q, k, v = qkv
        with pytest.raises(ValueError, match="o: got memory shared with q; want memory of its own"):
            tessera.attention(q, k, v, out=q)
        same = np.zeros((1, 7, 2, 16), np.float32)
        out, lse = tessera.attention(q, k, v, return_lse=True)
        with pytest.raises(ValueError, match="dv: got memory shared with dk; want memory of its own"):
            tessera.attention_backward(out, q, k, v, out, lse, grads=(np.empty_like(q), same, same))
        with pytest.raises(ValueError, match="strides under which no two elements share an address"):
            tessera.attention(q, k, v, out=np.lib.stride_tricks.as_strided(same, (1, 5, 2, 16), (0, 0, 64, 4)))

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"scale": float("inf")}, "scale: got inf; want a finite number"),
            ({"softcap": -1.0}, "softcap: got -1.000000; want"),
            ({"dropout": 1.0}, "dropout: got 1.000000; want"),
            ({"window": (1,)}, "window: got (1,); want (left, right)"),
            ({"window": (1.5, 0)}, "window: got 1.5; want (left, right), each an integer or None"),
            (
                {"tiles": tessera.Tiles(block=(0, 4), mass="mean")},
                "block: got (0, 4); want (query rows, keys), each an integer of 1",
            ),
            ({"tiles": tessera.Tiles(block=4)}, "block: got 4; want (query rows, keys)"),
            ({"offsets": tessera.Offsets(batch=0.5)}, "offsets.batch: got 0.5; want an integer"),
            ({"tiles": tessera.Tiles(mass="median")}, "tiles.mass: got 'median'; want None, 'mean', 'rms'"),
            ({"tiles": tessera.Tiles(next="list")}, "tiles.next: got 'list'; want None, 'indices', 'bitmask'"),
            (
                {"score": "swish"},
                "score: got 'swish'; want a function, a name of register_score, or a built-in: relative, soft_clip",
            ),
            ({"wishes": "tile_p=3"}, "tile_p"),
            ({"threads": -1}, "threads: got -1; want 0"),
            ({"seed": -1, "dropout": 0.5}, "seed: got -1; want 0 to below 2^64"),
            ({"sinks": np.zeros(3, np.float32)}, "sink: got fp32 (3) on cpu; want fp32 (2)"),
            ({"alibi_slopes": np.zeros(2)}, "alibi_slopes: got fp64 (2) on cpu; want fp32"),
            ({"seqused_k": np.array([9], np.int32)}, "seqused_k: got [0] = 9; want 0 to 7"),
            ({"seqused_k": np.array([3], np.int64)}, "seqused_k: got int64 (1) on cpu; want int32 (1)"),
            (
                {"offsets": tessera.Offsets(batch=1 << 62)},
                "batch_offset: got 4611686018427387904; want at most 2^60 either way",
            ),
            ({"tiles": tessera.Tiles(backward=3)}, "tiles.backward: got 3; want a share of the mass above 0 and below"),
        ],
    )
    def test_options(self, qkv, options, text):
        with pytest.raises(ValueError) as raised:
            tessera.attention(*qkv, **options)
        assert text in str(raised.value)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"scale": "1"}, "scale: got '1'; want a number"),
            ({"scale": np.ones(2)}, "scale: got an array of shape (2,) and dtype float64; want a number"),
            ({"softcap": "x"}, "softcap: got 'x'; want a number"),
            (
                {"mask": np.ones((5, 7), bool)},
                "mask: got an array of shape (5, 7) and dtype bool; want None, a built-in's name or a",
            ),
            (
                {"causal": np.ones((5, 7), bool)},
                "causal: got an array of shape (5, 7) and dtype bool; want True or False",
            ),
            (
                {"return_lse": np.ones(2)},
                "return_lse: got an array of shape (2,) and dtype float64; want True or False",
            ),
            ({"tiles": np.ones((1, 1))}, "tiles: got an array of shape (1, 1) and dtype float64; want a TileList"),
            ({"tiles": tessera.Tiles(backward="all")}, "tiles.backward: got 'all'; want a TileList"),
            (
                {"tiles": tessera.Tiles(mass=np.ones(2))},
                "tiles.mass: got an array of shape (2,) and dtype float64; want",
            ),
            ({"offsets": 3}, "offsets: got 3; want Offsets(q=…, k=…)"),
            ({"k2": np.ones(2)}, "k2: got an array of shape (2,) and dtype float64; want a KeySource(k2, v2)"),
            (
                {"page_table": np.ones(2)},
                "page_table: got a keyword of its own; want KeySource(k, v, page_table=…) for k",
            ),
            ({"next_tiles": "indices"}, "next_tiles: got a keyword of its own; want tiles=Tiles(next=…)"),
            ({"q_offset": 3}, "q_offset: got a keyword of its own; want offsets=Offsets(q=…)"),
            ({"seed": 3, "offset": 1}, "offset: got a keyword of its own; want seed=(seed, offset)"),
            ({"casual": True}, "attention() got an unexpected keyword argument 'casual'"),
            ({"window": ("a", 0)}, "window: got 'a'; want (left, right), each an integer or None"),
            ({"threads": "2"}, "threads: got '2'; want an integer"),
            ({"wishes": 3}, "wishes: got 3; want a text"),
            ({"seed": "a", "dropout": 0.5}, "seed: got 'a'; want an integer"),
            ({"extras": 3}, "extras: got 3; want a tuple or list of arrays"),
            ({"out": 3}, "out: got builtins.int; want an array"),
        ],
    )
    def test_options_of_another_type(self, qkv, options, text):
        with pytest.raises(TypeError) as raised:
            tessera.attention(*qkv, **options)
        assert text in str(raised.value)

    def test_equal_numbers_are_one_option_whichever_comes_first(self, qkv):
        """1, 1.0 and True are one key of a cache."""
        for first in (1.0, True, 1):
            for cache in (_arguments.features, _execute.forward_route):
                cache.cache_clear()
            calls = [{"threads": first}, {"threads": 1}, {"threads": True}, {"threads": 1.0}]
            calls += [
                {"window": (first, 0)},
                {"window": (1, False)},
                {"tiles": tessera.Tiles(block=(first, 4), mass="mean")},
            ]
            calls += [{"softcap": first}, {"softcap": 1}, {"scale": first}, {"compressed_causal": (first, 1)}]
            for options in calls:
                tessera.attention(*qkv, **options)
        with pytest.raises(ValueError, match=r"threads: got 1\.5; want an integer"):
            tessera.attention(*qkv, threads=1.5)
        tessera.attention(*qkv, threads=1)

    def test_traced_values_of_jax(self, qkv):
        jax = pytest.importorskip("jax")
        q, k, v = (jax.numpy.asarray(x) for x in qkv)
        with pytest.raises(
            TypeError, match=r"q: got jax.*Tracer; want an array with memory, or tessera\.jax\.attention"
        ):
            jax.jit(lambda q: tessera.attention(q, k, v))(q)
        with pytest.raises(
            TypeError, match=r"v: got jax.*Tracer; want an array with memory, or tessera\.jax\.attention"
        ):
            jax.grad(lambda v: tessera.flash_attn_func(q, k, v).sum())(v)

    def test_slots_of_the_extension(self, qkv):
        plan = _core.Plan("attention sq=5 sk=7 hq=2 d=16")
        out = np.empty_like(qkv[0])
        with pytest.raises(ValueError, match='slots: got "xx"; want the name of a slot'):
            plan.run(("q", "xx"), (qkv[0], out))
        with pytest.raises(ValueError, match="slots: got q twice; want each slot once"):
            plan.run(("q", "q"), (qkv[0], out))
        with pytest.raises(ValueError, match="arrays: got 3 arrays; want 4, one for each slot"):
            plan.run(SLOTS, qkv)
        with pytest.raises(ValueError, match="v: got unbound; want"):
            plan.run(SLOTS, (*qkv[:2], None, out))
        with pytest.raises(TypeError, match="slots: got 3; want names of slots"):
            plan.run((3,), (out,))
        with pytest.raises(TypeError):
            plan.run(SLOTS, 5)


class TestLifetimes:
    def test_a_page_table_that_nobody_else_holds(self, qkv):
        q, k, v = qkv
        pages = k.reshape(7, 1, 2, 16)

        def result():
            source = tessera.KeySource(
                pages,
                v.reshape(7, 1, 2, 16),
                page_table=np.arange(7, dtype=np.int32)[None].copy(),
                seqused=np.array([7], np.int32),
            )
            return tessera.attention(q, source)

        want = tessera.attention(q, k, v)
        for _ in range(50):
            np.testing.assert_array_equal(result(), want)

    def test_a_plan_keeps_its_page_table(self, qkv):
        q, k, v = qkv
        table = np.arange(7, dtype=np.int32)[None].copy()
        k_pages, v_pages = k.reshape(7, 1, 2, 16), v.reshape(7, 1, 2, 16)
        source = tessera.KeySource(k_pages, v_pages, page_table=table, seqused=np.array([7], np.int32))
        plan = tessera.plan(q, source)
        alive = weakref.ref(table)
        del table, source
        gc.collect()
        assert alive() is not None
        np.testing.assert_array_equal(plan(q, k_pages, v_pages), tessera.attention(q, k, v))
        del plan
        gc.collect()
        assert alive() is None

    def test_no_input_is_copied(self, rng):
        """Strided views, gradients too: nothing is allocated but the results."""
        packed = rng.standard_normal((1, 300, 4, 3, 64)).astype(np.float32)
        q, k, v = (packed[:, ::2, :, i] for i in range(3))
        out, lse = tessera.attention(q, k, v, causal=True, return_lse=True)
        tracemalloc.start()
        try:
            tessera.attention(q, k, v, causal=True, return_lse=True)
            forward = tracemalloc.get_traced_memory()[1]
            tracemalloc.reset_peak()
            tessera.attention_backward(out, q, k, v, out, lse, causal=True)
            backward = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert out.nbytes < forward < 1.5 * out.nbytes
        assert 3 * out.nbytes < backward < 3.5 * out.nbytes

    def test_a_run_keeps_nothing(self, qkv):
        references = []
        arrays = [x.copy() for x in qkv]
        references = [weakref.ref(x) for x in arrays]
        out = tessera.attention(*arrays)
        references.append(weakref.ref(out))
        del arrays, out
        gc.collect()
        assert [reference() for reference in references] == [None] * 4

    def test_refusals_keep_nothing(self, qkv):
        lengths = np.array([9], np.int32)
        alive = weakref.ref(lengths)
        try:
            tessera.attention(*qkv, seqused_k=lengths)
        except ValueError as error:
            text = str(error)
        assert text.startswith("seqused_k: got [0] = 9")
        del lengths
        gc.collect()
        assert alive() is None
