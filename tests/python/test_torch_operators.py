# SPDX-License-Identifier: Apache-2.0
"""The torch operators under torch's own machinery: opcheck, modes, autocast, vmap, seeds; and what they refuse."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
import torch_problems as problems  # noqa: E402
from tessera import _core, _kept  # noqa: E402
from tessera._arguments import parse  # noqa: E402
from tessera._dropout_seed import drawn_seed  # noqa: E402
from tessera.torch import autograd, operators  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch_modes import Seen  # noqa: E402


def qkv(dtype=torch.float32, requires_grad=False, sq=20):
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(2, sq, h, 32, generator=generator).to(dtype) for h in (4, 2, 2)]
    return [x.requires_grad_(requires_grad) for x in made]


def packed(requires_grad=False):
    return [x.detach()[0].requires_grad_(requires_grad) for x in qkv()]


def arguments(q, k, v, **options):
    """What the operator gets for these options."""
    call = parse(q, k, v, **options)
    return q, k, v, list(call.tensors), " ".join(call.slots), call.features.text(), call.sizes, call.scalars


ENDS = torch.tensor([0, 7, 20], dtype=torch.int32)
SEQUENCES = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "max_seqlen_q": 13, "max_seqlen_k": 13}
OPTIONS = {
    "causal": lambda grad: (qkv(requires_grad=grad), {"causal": True}),
    "half": lambda grad: (qkv(torch.bfloat16, grad), {"softcap": 5.0, "out_dtype": torch.float32}),
    "packed, sinks": lambda grad: (packed(grad), SEQUENCES | {"sinks": torch.zeros(4, requires_grad=grad)}),
    "second source": lambda grad: (
        qkv(requires_grad=grad),
        {"k2": tessera.KeySource(*qkv(requires_grad=grad)[1:])},
    ),
    "mass and next list": lambda grad: (
        qkv(requires_grad=grad),
        {"tiles": tessera.Tiles(mass="rms", next="indices", block=(8, 8)), "return_lse": True},
    ),
    "bit mask": lambda grad: (qkv(requires_grad=grad), {"tiles": tessera.Tiles(next="bitmask", block=(4, 16))}),
    "dropout": lambda grad: (qkv(requires_grad=grad), {"dropout": 0.3, "seed": (1 << 64) - 1}),
}


def signed(call):
    """Seeds as the int64 of the schema."""
    return (*call[:-1], [x - (1 << 64) if x >= 1 << 63 else x for x in call[-1]])


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_opcheck(name, requires_grad):
    inputs, options = OPTIONS[name](requires_grad)
    torch.library.opcheck(operators.attention, signed(arguments(*inputs, **options)))


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("name", ["causal", "packed, sinks", "second source", "dropout"])
def test_opcheck_of_the_backward(name, dlse):
    inputs, options = OPTIONS[name](False)
    call = signed(arguments(*inputs, **options))
    out, lse, _ = operators.attention(*call)
    upstream = torch.randn_like(out), torch.randn_like(lse) if dlse else None
    torch.library.opcheck(operators.attention_backward, (*upstream, out, lse, *call))


@pytest.mark.parametrize("name", ["causal", "mass and next list"])
def test_opcheck_of_the_form_with_out(name):
    inputs, options = OPTIONS[name](False)
    call = arguments(*inputs, **options)
    out, lse, extra = operators.attention(*call)
    memory = torch.empty_like(out), torch.empty_like(lse), [torch.empty_like(x) for x in extra]
    torch.library.opcheck(operators.attention_out, (*memory, *call))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", problems.ALL)
def test_the_same_bits_as_on_numpy(name, dtype):
    """One problem through the operators and through the path of numpy and everything else."""
    numpy = pytest.importorskip("numpy")
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def as_numpy(x):
        if isinstance(x, (tessera.KeySource, tessera.Offsets)):
            return type(x)(*map(as_numpy, x))
        if not isinstance(x, torch.Tensor):
            return x
        x = x.detach()
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()

    problem = problems.ALL[name](dtype)
    seen = []
    own = tessera.attention

    def both(*tensors, **options):
        results = own(*tensors, **options)
        if "tiles" in options:
            mask = torch.from_numpy(numpy.asarray(options["tiles"].to_mask(key_blocks=9)))
            options["tiles"] = tessera.TileList.from_mask(as_numpy(mask), block=options["tiles"].block)
        seen.append((results, own(*map(as_numpy, tensors), **{key: as_numpy(x) for key, x in options.items()})))
        return results

    tessera.attention = both
    try:
        problem.call(*problem.inputs)
    finally:
        tessera.attention = own
    for by_torch, by_numpy in zip(*seen[0], strict=True):
        assert numpy.array_equal(as_numpy(by_torch).view(numpy.uint8), by_numpy.view(numpy.uint8))


def test_modes_see_the_operators():
    q, k, v = qkv(requires_grad=True)
    with Seen() as forward:
        out = tessera.attention(q, k, v)
    with Seen() as backward:
        out.sum().backward()
    with Seen() as without_gradients, torch.no_grad():
        tessera.attention(q, k, v)
    assert forward.names.count("tessera.attention.default") == 1
    assert backward.names.count("tessera.attention_backward.default") == 1
    assert without_gradients.names.count("tessera.attention.default") == 1


def test_profiler_sees_the_operator():
    q, k, v = qkv()
    with torch.profiler.profile() as profile:
        tessera.attention(q, k, v)
    assert any(event.key == "tessera::attention" for event in profile.key_averages())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    q, k, v = qkv(requires_grad=True)
    sinks, slopes = torch.randn(4, requires_grad=True), torch.rand(4)
    options = {"sinks": sinks, "alibi_slopes": slopes}
    with torch.autocast("cpu", dtype=dtype):
        out = tessera.attention(q, k, v, k2=tessera.KeySource(k, v), **options)
        assert tessera.attention(q.to(dtype), k, v.half()).dtype == dtype
        with pytest.raises(ValueError, match="fp64"):  # left as it is, as autocast does
            tessera.attention(q.double(), k, v)
    low = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    by_hand = tessera.attention(*low, k2=tessera.KeySource(low[1], low[2]), **options)
    assert out.dtype == dtype and torch.equal(out, by_hand)
    grads = torch.autograd.grad(out.float().square().sum(), (q, v, sinks))
    wanted = torch.autograd.grad(by_hand.float().square().sum(), (low[0], low[2], sinks))
    assert [x.dtype for x in grads] == [torch.float32] * 3
    assert torch.equal(grads[0], wanted[0].float()) and torch.equal(grads[2], wanted[2])
    # v's gradient has two parts, k2 and v2 being k and v: each is rounded before autocast's casts add them in fp32.
    torch.testing.assert_close(grads[1], wanted[1].float(), rtol=2**-6, atol=1e-2)


def test_vmap():
    q, k, v = qkv()
    many = torch.stack((q, 2 * q, q - 1))

    def call(q, k, v):
        return tessera.attention(q, k, v, causal=True, sinks=torch.ones(4), return_lse=True)

    out, lse = torch.vmap(call, in_dims=(0, None, None))(many, k, v)
    for i in range(3):
        assert torch.equal(out[i], call(many[i], k, v)[0]) and torch.equal(lse[i], call(many[i], k, v)[1])
    moved = torch.vmap(lambda q: call(q, k, v)[0], in_dims=2, out_dims=1)(many.movedim(0, 2))
    assert torch.equal(moved.movedim(1, 0), out)


def test_gradient_of_vmap():
    q, k, v = qkv()
    many = torch.stack((q, 2 * q)).requires_grad_()
    (grad,) = torch.autograd.grad(torch.vmap(lambda q: tessera.attention(q, k, v))(many).square().sum(), many)
    for i in range(2):
        one = many[i].detach().requires_grad_()
        assert torch.equal(grad[i], torch.autograd.grad(tessera.attention(one, k, v).square().sum(), one)[0])


def test_transforms_that_are_refused():
    q, k, v = qkv()

    def loss(q):
        return tessera.attention(q, k, v).sum()

    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(loss)(q)
    with pytest.raises(NotImplementedError, match="tangent"):
        torch.func.jvp(loss, (q,), (q,))
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(lambda q: tessera.attention(q, k, v, dropout=0.1), randomness="same")(torch.stack((q, q)))
    _, k, v = packed()
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.vmap(lambda q: tessera.attention(q, k, v, **SEQUENCES))(q)


def test_a_seed_is_drawn_for_the_stream_of_q(monkeypatch):
    """Whichever device is current: a graph on that of q draws its seed anew with each replay."""
    asked = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, device="cuda:1")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=40 + device))
    monkeypatch.setattr(_core, "is_capturing", lambda *stream: asked.append(stream) or False)
    assert isinstance(drawn_seed(q), int)
    assert asked == [(1, 41)]


def test_seeds_come_from_the_default_generator():
    q, k, v = qkv()
    torch.manual_seed(5)
    first, second = (tessera.attention(q, k, v, dropout=0.5) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(first, tessera.attention(q, k, v, dropout=0.5))
    assert not torch.equal(first, second)
    by_number = tessera.attention(q, k, v, dropout=0.5, seed=((1 << 63) + 7, 3))
    seed = torch.tensor([-(1 << 63) + 7])  # the same 64 bits
    offset = torch.tensor([3], dtype=torch.uint64)
    assert torch.equal(by_number, tessera.attention(q, k, v, dropout=0.5, seed=(seed, offset)))
    assert torch.equal(by_number, tessera.attention(q, k, v, dropout=0.5, seed=(seed.view(torch.uint64), 3)))


@pytest.fixture
def backward_problems(monkeypatch):
    """The problem lines of backwards that get a plan during the test."""
    lines = []

    def planned(*arguments, **more):
        answer = own(*arguments, **more)
        lines.append(answer.plan.problem + " by " + answer.plan.implementation)
        return answer

    own = operators._execute.plan_for
    monkeypatch.setattr(operators._execute, "plan_for", planned)
    operators.backward_run.cache_clear()
    return lines


def test_deterministic_algorithms_make_the_backward_deterministic(backward_problems):
    q, k, v = qkv(requires_grad=True)
    out = tessera.attention(q, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        grads = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert ["deterministic" in line for line in backward_problems] == [True]
    torch.autograd.grad(out.sum(), (q, k, v))
    assert ["deterministic" in line for line in backward_problems] == [True, False]
    by_option = torch.autograd.grad(tessera.attention(q, k, v, deterministic=True).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(grads, by_option, strict=True))


SPARSE = {"length": 8, "stride": 8, "block": 8, "top": 3, "window": 9, "tile": 8}
BESIDE_THE_OPERATORS = {
    "masses": lambda q, k, v: tessera.attention(q, k, v, tiles=tessera.Tiles(backward=0.1, block=(8, 8))),
    "8 bits": lambda q, k, v: tessera.attention(q, k, v, quantization="fp8"),
    "native sparse": lambda q, k, v: tessera.nsa(q, k, v, **SPARSE),
    "oracle": lambda q, k, v: tessera.attention(
        q, k, v, mask=lambda batch, head, query, key: key <= query, wishes="implementation=cpu.reference"
    ),
}


@pytest.mark.parametrize("name", BESIDE_THE_OPERATORS)
def test_deterministic_algorithms_make_every_backward_deterministic(name, backward_problems):
    """Of what autograd records beside the operators too; test_distributed_calls.py has the ranks'."""
    inputs = qkv(requires_grad=True)
    found = []
    for told in (True, False):
        out = BESIDE_THE_OPERATORS[name](*inputs)
        backward_problems.clear()
        torch.use_deterministic_algorithms(told)
        try:
            found.append(torch.autograd.grad(out.sum(), inputs))
        finally:
            torch.use_deterministic_algorithms(False)
        lines = [line for line in backward_problems if "pass=backward" in line]
        assert lines and all(("deterministic" in line) == told for line in lines), lines
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_of_the_wishes_only_the_implementation_reaches_the_backward(backward_problems):
    q, k, v = qkv(requires_grad=True)
    split = tessera.attention(q, k, v, wishes="splits=2 tile_kv=8", deterministic=True)
    torch.testing.assert_close(split, tessera.attention(q, k, v))
    split.sum().backward()
    by_oracle = tessera.attention(q, k, v, wishes="implementation=cpu.reference")
    grads = torch.autograd.grad(by_oracle.sum(), (q, k, v))
    assert [line.rpartition(" ")[2] for line in backward_problems] == ["cpu.tiled", "cpu.reference"]
    for grad, x in zip(grads, (q, k, v), strict=True):
        torch.testing.assert_close(grad, x.grad)


def test_an_lse_is_written_where_someone_may_want_it(monkeypatch):
    """By a call that nobody records only if it is asked for."""
    written = []

    def looked_at(call, threads, lse, *more):
        written.append(lse or call.features.lse)
        return own(call, threads, lse, *more)

    own = operators.forward_run
    monkeypatch.setattr(operators, "forward_run", looked_at)
    _kept.ATTENTION.clear()
    autograd.recorded_call.cache_clear()
    q, k, v = qkv()
    out = tessera.attention(q, k, v)
    both = tessera.attention(q, k, v, return_lse=True)
    recorded = tessera.attention(*qkv(requires_grad=True))
    assert written == [False, True, True]
    assert torch.equal(out, both[0]) and torch.equal(out, recorded)


@pytest.mark.parametrize(
    ("argument", "reason", "options"),
    [
        ("score", "has no derivative of score callable relative: some advice", {"score": "relative"}),
        ("out_dtype", "wants o and dout in q's type", {"out_dtype": torch.float32, "score": "relative"}),
        ("q", "wants head dims of at most 256", {}),
    ],
)
def test_a_missing_backward_is_told_by_the_argument(argument, reason, options, monkeypatch):
    """As on a GPU, whose backward takes less than the forward; test_cuda_autograd.py has the same there."""

    def refused(*arguments, **more):
        raise NotImplementedError(f"problem: got attention pass=backward; want less (cuda.bwd_mma: {reason})")

    monkeypatch.setattr(operators._execute, "plan_for", refused)
    operators.backward_run.cache_clear()
    q, k, v = qkv(torch.bfloat16, requires_grad=True)
    out = tessera.attention(q, k, v, **options)
    with pytest.raises(NotImplementedError, match=f"^{argument}: got attention pass=backward; want less .*{reason}"):
        out.sum().backward()


def test_lazy_negation_and_parameters():
    q, k, v = qkv()
    assert torch.equal(tessera.attention(torch._neg_view(q), k, v), tessera.attention(-q, k, v))
    assert tessera.attention(torch.nn.Parameter(q), k, v).requires_grad


def test_inference_mode():
    q, k, v = qkv()
    with torch.inference_mode():
        out = tessera.attention(q, k, v)
    assert out.is_inference() and torch.equal(out, tessera.attention(q, k, v))


def test_shapes_without_data():
    q, k, v = (x.to("meta") for x in qkv(torch.bfloat16))
    out, lse, mass, listed = tessera.attention(
        *(q, k, v),
        return_lse=True,
        tiles=tessera.Tiles(mass="mean", next="bitmask", block=(8, 8)),
        out_dtype=torch.float32,
    )
    assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.float32, "meta")
    assert (lse.shape, mass.shape, listed.bits.shape) == ((2, 4, 20), (2, 4, 3, 3), (2, 4, 3, 1))


@pytest.mark.parametrize(
    ("error", "text", "change"),
    [
        (TypeError, r"^k: got numpy\.ndarray; want a torch\.Tensor", lambda q, k, v: (q, k.numpy(), v)),
        (TypeError, r"^v: got builtins\.list", lambda q, k, v: (q, k, v.tolist())),
        (ValueError, r"^q: got stride 4 in the last dimension", lambda q, k, v: (q.mT.contiguous().mT, k, v)),
        (ValueError, r"^k: got a tensor on meta; want one on cpu", lambda q, k, v: (q, k.to("meta"), v)),
        (ValueError, r"^k: got a tensor on cpu; want one on meta", lambda q, k, v: (q.to("meta"), k, v)),
        (ValueError, r"^q: got layout torch\.sparse_coo", lambda q, k, v: (q.to_sparse(), k, v)),
        (ValueError, r"^v: got layout torch\.sparse_coo", lambda q, k, v: (q, k, v.to_sparse())),
        (ValueError, r"^k: got a nested tensor", lambda q, k, v: (q, torch.nested.as_nested_tensor(list(k)), v)),
        (ValueError, r"^q: got a nested tensor", lambda q, k, v: (torch.nested.as_nested_tensor(list(q)), k, v)),
        (ValueError, r"got fp64; want fp32", lambda q, k, v: (q.double(), k, v)),
        (ValueError, r"^q: got 3 dimensions", lambda q, k, v: (q[0], k, v)),
        (ValueError, r"^heads_kv: got 3", lambda q, k, v: (q, q[:, :, :3], q[:, :, :3])),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_bad_tensors(error, text, change):
    with pytest.raises(error, match=text):
        tessera.attention(*change(*qkv()))


def test_fake_tensors_of_a_gpu():
    """Shapes without data: what torch.compile and meta-programs see of CUDA tensors needs no GPU."""
    with FakeTensorMode():
        q = torch.empty(2, 20, 4, 32, device="cuda:1", dtype=torch.float16)
        options = {"return_lse": True, "tiles": tessera.Tiles(mass="mean", next="bitmask"), "dropout": 0.1, "seed": 3}
        out, lse, mass, tiles = tessera.attention(q, q, q, **options)
        assert {x.device for x in (out, lse, mass, tiles.bits)} == {q.device}
        assert (out.shape, out.dtype, lse.shape, mass.shape) == (q.shape, q.dtype, (2, 4, 20), (2, 4, 1, 1))
        packed = torch.empty(20, 4, 32, device="cuda:1", dtype=torch.float16)
        starts = torch.empty(3, device="cuda:1", dtype=torch.int32)
        assert tessera.attention(packed, packed, packed, cu_seqlens_q=starts, cu_seqlens_k=starts).shape == packed.shape
        memory = torch.empty_like(q)
        assert tessera.attention(q, q, q, out=memory) is memory


def test_all_tensors_are_on_one_device():
    _, k, v = qkv()
    with FakeTensorMode(allow_non_fake_inputs=True):
        elsewhere = torch.empty(2, 20, 4, 32, device="cuda:1")
        with pytest.raises(ValueError, match=r"^k: got a tensor on cpu; want one on cuda:1, as q is"):
            tessera.attention(elsewhere, k, v)
        with pytest.raises(ValueError, match=r"^v: got a tensor on cuda:0; want one on cuda:1, as q is"):
            tessera.attention(elsewhere, elsewhere, torch.empty(2, 20, 4, 32, device="cuda:0"))
        with pytest.raises(ValueError, match=r"^sink: got a tensor on cuda:0; want one on cpu, as q is"):
            tessera.attention(torch.empty(2, 20, 4, 32), k, v, sinks=torch.empty(4, device="cuda"))
        with pytest.raises(ValueError, match=r"^q: got a tensor on xpu:0; want one on cpu or cuda"):
            tessera.attention(*(torch.empty(2, 20, 4, 32, device="xpu") for _ in range(3)))
