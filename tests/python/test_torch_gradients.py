# SPDX-License-Identifier: Apache-2.0
"""torch's autograd through Tessera: values against the textbook in float64, gradcheck, and what is refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
import torch_problems as problems  # noqa: E402
import torch_textbook as textbook  # noqa: E402
from tessera.torch.layouts import with_aligned_rows, with_rows_apart  # noqa: E402
from torch.autograd import gradcheck  # noqa: E402

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("through", ["out", "lse", "both"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", problems.ALL)
def test_gradients_are_those_of_the_textbook(name, dtype, through):
    problem = problems.ALL[name](dtype)
    out, lse = problem.plain(*problem.inputs)
    dout = problems.normal(*out.shape, dtype=dtype, seed=8) if through != "lse" else None
    dlse = problems.normal(*lse.shape, dtype=torch.float32, seed=9) if through != "out" else None
    got = textbook.results(problem.inputs, problem.call, dout, dlse)
    oracle = textbook.results(problem.inputs, problem.plain, dout, dlse, torch.float64)
    order = textbook.orders(problem.keys)
    runs = {}

    def plain(run):
        if run not in runs:

            def ordered(*inputs):
                return problem.plain(*inputs, order=order(run))

            runs[run] = textbook.results(problem.inputs, ordered, dout, dlse)
        return runs[run]

    names = ("out", "lse", "dq", "dk", "dv", "d_fourth", "d_fifth")
    for i, (mine, true) in enumerate(zip(got, oracle, strict=True)):
        textbook.judge(f"{name}: {names[i]}", mine, true, lambda run, i=i: plain(run)[i])


@pytest.mark.parametrize("name", ["causal", "sinks", "second_source", "softcap", "dropout"])
def test_gradcheck(name):
    """Central differences of the kernels themselves, which compute in fp32.

    eps = 1e-2 balances what limits a difference: rounding, 2^-24 |out| / eps = 1e-5, and the third derivative,
    eps^2 / 6 = 2e-5 times a value of some units. atol = 1e-3 holds both; gradients are about 0.1 to 1.
    """
    whole = problems.ALL[name](torch.float32)

    def call(*inputs):
        out, lse = whole.call(*(x.float() for x in inputs))
        return out.double(), lse.masked_fill(lse == -torch.inf, 0).double()

    few = {"causal": (6, 6), "sinks": (8, 5), "second_source": (4, 3), "softcap": (5, 5), "dropout": (5, 5)}[name]
    sizes = (1, few[0], 2, 8), (1, few[1], 1, 8), (1, few[1], 1, 8), (2,), (1, 2, 1, 8)
    if name == "second_source":
        shapes = (*sizes[:3], sizes[4], sizes[4])
    else:
        shapes = sizes[:4] if name == "sinks" else sizes[:3]
    inputs = [
        problems.normal(*shape, dtype=torch.float64, seed=20 + i).requires_grad_() for i, shape in enumerate(shapes)
    ]
    assert gradcheck(call, inputs, eps=1e-2, atol=1e-3, rtol=1e-3)


def qkv(requires_grad=True, dtype=torch.float32):
    return [x.requires_grad_(requires_grad) for x in problems.full(dtype).inputs]


def test_double_backward_is_refused():
    q, k, v = qkv()
    (dq,) = torch.autograd.grad(tessera.attention(q, k, v).square().sum(), q, create_graph=True)
    assert dq.requires_grad
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(dq.sum(), q)


def test_gradients_with_create_graph_are_the_same():
    q, k, v = qkv()
    first = torch.autograd.grad(tessera.attention(q, k, v, causal=True).sum(), (q, k, v))
    again = torch.autograd.grad(tessera.attention(q, k, v, causal=True).sum(), (q, k, v), create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("wanted", range(3))
def test_only_one_input_requires_grad(wanted):
    inputs = [x.requires_grad_(i == wanted) for i, x in enumerate(qkv(False))]
    tessera.attention(*inputs, causal=True).sum().backward()
    everything = qkv()
    tessera.attention(*everything, causal=True).sum().backward()
    assert [x.grad is not None for x in inputs] == [i == wanted for i in range(3)]
    assert torch.equal(inputs[wanted].grad, everything[wanted].grad)


def test_an_lse_that_is_not_used_costs_nothing_in_the_gradient():
    q, k, v = qkv()
    out, _ = tessera.attention(q, k, v, return_lse=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    alone = torch.autograd.grad(tessera.attention(q, k, v).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(grads, alone, strict=True))


@pytest.mark.parametrize(
    ("slot", "options", "value"),
    [
        ("alibi_slopes", lambda x: {"alibi_slopes": x}, torch.ones(4)),
        ("extra0", lambda x: {"score": "gradients.bias", "extras": (x,)}, torch.zeros(4)),
        ("prior_lse", lambda x: {"tiles": tessera.Tiles(mass="mean", prior_lse=x)}, torch.zeros(2, 4, 70)),
    ],
)
def test_what_has_no_gradient_is_refused(slot, options, value):
    q, k, v = qkv(False)
    tessera.register_score("gradients.bias", "score + bias(at.head)", {"bias": ("fp32", 1)}, derivative_text="1.0F")
    with pytest.raises(NotImplementedError, match=f"^{slot}: got a tensor that requires grad; want one that does not"):
        tessera.attention(q, k, v, **options(value.requires_grad_()))
    if slot == "extra0":  # its text is for GPUs
        return
    with torch.no_grad():
        tessera.attention(q, k, v, **options(value))


def test_paged_keys_have_no_gradient():
    q = qkv(False)[0]
    pages = torch.randn(12, 16, 2, 32)
    table = torch.arange(10, dtype=torch.int32).reshape(2, 5)
    used = torch.tensor([70, 64], dtype=torch.int32)
    options = {"page_table": table, "seqused": used}
    tessera.attention(q, tessera.KeySource(pages, pages, **options))
    with pytest.raises(NotImplementedError, match=r"^k: got a tensor that requires grad, with page_table"):
        tessera.attention(q, tessera.KeySource(pages.clone().requires_grad_(), pages, **options))
    with pytest.raises(NotImplementedError, match=r"^q: got a tensor that requires grad, with page_table"):
        tessera.attention(q.requires_grad_(), tessera.KeySource(pages, pages, **options))


def test_out_takes_no_gradient():
    q, k, v = qkv()
    out = torch.empty_like(q)
    with pytest.raises(NotImplementedError, match=r"^out: "):
        tessera.attention(q, k, v, out=out)
    with torch.no_grad():
        given = tessera.attention(q, k, v, out=out)
        assert given is out
        assert torch.equal(out, tessera.attention(q, k, v))


def test_mass_and_next_list_have_no_gradient_and_change_none():
    q, k, v = qkv()
    asked = tessera.Tiles(mass="mean", next="indices", threshold=0.1, block=(16, 16))
    out, mass, listed = tessera.attention(q, k, v, tiles=asked)
    assert out.requires_grad and not mass.requires_grad and not listed.indices.requires_grad
    with_mass = torch.autograd.grad(out.sum(), (q, k, v))
    without = torch.autograd.grad(tessera.attention(q, k, v).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(with_mass, without, strict=True))


def test_backward_list_truncates_the_gradient():
    """The gradient of a dense forward over the tiles of a list: tessera.attention_backward with the same list."""
    q, k, v = qkv()
    kept = torch.rand(2, 4, 5, 5, generator=torch.Generator().manual_seed(1)) < 0.5
    listed = tessera.TileList.from_mask(kept, block=(16, 16))
    out, lse = tessera.attention(q, k, v, tiles=tessera.Tiles(backward=listed), return_lse=True)
    assert torch.equal(out, tessera.attention(q, k, v))
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    with torch.no_grad():
        wanted = tessera.attention_backward(dout, q, k, v, out, lse, tiles=tessera.Tiles(backward=listed))
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))
    assert not torch.equal(grads[0], torch.autograd.grad(tessera.attention(q, k, v), q, dout)[0])


def test_gradients_through_views_of_a_packed_tensor():
    """q, k, v as slices of one tensor, heads before tokens: no copy in, one gradient out."""
    packed = torch.randn(2, 3, 4, 20, 32).requires_grad_()

    def packed_call(attend):
        q, k, v = (x.transpose(1, 2) for x in packed.unbind(1))
        return torch.autograd.grad(attend(q, k, v).square().sum(), packed)[0]

    def copied(q, k, v):
        return tessera.attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)

    assert torch.equal(packed_call(lambda q, k, v: tessera.attention(q, k, v, causal=True)), packed_call(copied))


def test_gradients_have_the_layout_of_their_inputs():
    q, k, v = (torch.randn(2, 4, 20, 32).requires_grad_() for _ in range(3))
    grads = torch.autograd.grad(tessera.attention(*(x.transpose(1, 2) for x in (q, k, v))).sum(), (q, k, v))
    assert all(grad.stride() == x.stride() for grad, x in zip(grads, (q, k, v), strict=True))


@pytest.mark.parametrize("dlse", [False, True])
def test_expanded_and_transposed_upstream_gradients(dlse):
    q, k, v = qkv()
    out, lse = tessera.attention(q, k, v, return_lse=True)
    dout = torch.randn(2, 4, 32, 70).permute(0, 3, 1, 2)
    upstream = [dout, torch.ones(1, 1, 1).expand_as(lse)] if dlse else [dout]
    heads = [out, lse] if dlse else [out]
    grads = torch.autograd.grad(heads, (q, k, v), upstream, retain_graph=True)
    same = torch.autograd.grad(heads, (q, k, v), [x.contiguous() for x in upstream])
    assert all(torch.equal(a, b) for a, b in zip(grads, same, strict=True))


def _odd_rows(shape):
    return torch.randn(*shape[:-1], shape[-1] + 3)[..., : shape[-1]]


LAYOUTS = {
    "contiguous": (torch.randn, True),
    "heads first": (lambda shape: torch.randn(2, 4, 70, 32).transpose(1, 2), True),
    "every second row": (lambda shape: torch.randn(2, 140, 4, 32)[:, ::2], True),
    "one sequence, expanded": (lambda shape: torch.randn(1, *shape[1:]).expand(1, *shape[1:]), True),
    "expanded over sequences": (lambda shape: torch.randn(1, *shape[1:]).expand(shape), False),
    "one number": (lambda shape: torch.ones(()).expand(shape), False),
    "dims first": (lambda shape: torch.randn(2, 32, 70, 4).permute(0, 2, 3, 1), False),
    "odd rows": (_odd_rows, False),
    "rows 4 bytes off": (lambda shape: torch.randn(2, 70, 4, 40)[..., 1:33], False),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_upstream_gradients_are_copied_only_where_they_must_be(name):
    """What a kernel gets: its values, rows that begin at multiples of 16 bytes, steps above 0."""
    make, as_it_is = LAYOUTS[name]
    given = make((2, 70, 4, 32))
    got = with_aligned_rows(given)
    assert torch.equal(got, given) and (got is given) == as_it_is
    assert got.data_ptr() % 16 == 0 and got.stride(-1) == 1
    sizes = [step * 4 for step, length in zip(got.stride(), got.shape, strict=True) if length > 1][:-1]
    assert all(step > 0 and step % 16 == 0 for step in sizes)


def test_only_rows_that_are_one_are_copied():
    """Heads and sequences that are one lie as kernels read them."""
    row = torch.randn(2, 1, 4, 32)
    apart = with_rows_apart(row.expand(2, 70, 4, 32))
    assert apart.is_contiguous() and torch.equal(apart, row.expand(2, 70, 4, 32))
    one = torch.randn(1, 70, 1, 32).expand(2, 70, 4, 32)
    for x in (row, one, one[0]):
        assert with_rows_apart(x) is x


def test_checkpointing_draws_the_same_dropout():
    from torch.utils.checkpoint import checkpoint

    q, k, v = qkv()
    torch.manual_seed(3)
    kept = torch.autograd.grad(tessera.attention(q, k, v, dropout=0.4).sum(), (q, k, v))
    torch.manual_seed(3)
    again = checkpoint(lambda *x: tessera.attention(*x, dropout=0.4), q, k, v, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(kept, torch.autograd.grad(again.sum(), (q, k, v)), strict=True))


def test_python_functions_have_gradients_by_the_oracle():
    q, k, v = (x[:, :9].detach().requires_grad_() for x in qkv())
    by_oracle = {"wishes": "implementation=cpu.reference"}

    def visible(batch, head, query, key):
        return key <= query

    masked = tessera.attention(q, k, v, mask=visible, **by_oracle)
    causal = tessera.attention(q, k, v, causal=True)
    torch.testing.assert_close(masked, causal)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (masked, causal)), strict=True):
        torch.testing.assert_close(a, b)

    def halved(score, batch, head, query, key):
        return score / 2

    refused = r"^score: got a Python function without the attribute derivative; want .* or torch.no_grad\(\)"
    for more in ({}, {"quantization": "fp8"}):
        with pytest.raises(NotImplementedError, match=refused):
            tessera.attention(q, k, v, score=halved, **by_oracle, **more)
    with torch.no_grad():
        assert tessera.attention(q, k, v, score=halved, **by_oracle).isfinite().all()
    halved.derivative = lambda score, batch, head, query, key: 0.5
    scored = tessera.attention(q, k, v, score=halved, **by_oracle)
    scaled = tessera.attention(q, k, v, scale=0.5 * 32**-0.5)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (scored, scaled)), strict=True):
        torch.testing.assert_close(a, b)
    (dq,) = torch.autograd.grad(
        tessera.attention(q, k, v, score=halved, **by_oracle), q, torch.ones_like(q), create_graph=True
    )
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(dq.sum(), q)
    torch.testing.assert_close(tessera.attention(q, k, v, mask=visible), causal)  # traced
    traced = tessera.attention(q, k, v, score=halved)
    scaled = tessera.attention(q, k, v, scale=0.5 * 32**-0.5)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (traced, scaled)), strict=True):
        torch.testing.assert_close(a, b)
