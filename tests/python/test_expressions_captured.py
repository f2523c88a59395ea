# SPDX-License-Identifier: Apache-2.0
"""Gradients of tensors that a traced score reads, beside torch's autograd through its own operations in float64."""

from __future__ import annotations

import itertools
import random

import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

import expressions_zoo  # noqa: E402
import tessera  # noqa: E402
from tessera.expressions import Symbol  # noqa: E402
from tessera.expressions.register import traced_by_name  # noqa: E402
from tessera.torch import captured  # noqa: E402

LENGTH = 90
TENSORS = {"bias": (4, 2 * LENGTH), "slopes": (4,), "cap": (), "keys": (LENGTH,), "table": (2, 4, 9)}


def tensors_of(dtype, seed=1):
    """Captured tensors by name; the cap is above 0."""
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator) for name, shape in TENSORS.items()}
    made["cap"] = made["cap"].abs() + 3
    return {name: x.to(dtype).requires_grad_() for name, x in made.items()}


def causal(b, h, q, k):
    return q >= k


def dilated(b, h, q, k):
    return (q >= k) & ((q - k) % 3 != 1)


def moved_inside(i):
    """As traced functions have it without saying so."""
    return i if isinstance(i, Symbol) else torch.clamp(i, 0, LENGTH - 1)


# name: (tensors that the score reads, score of them, mask)
SCORES = {
    "relative bias": (("bias",), lambda t: lambda s, b, h, q, k: s + t["bias"][h, q - k + LENGTH], causal),
    "alibi": (("slopes",), lambda t: lambda s, b, h, q, k: s + t["slopes"][h] * (k - q) / 16, None),
    "cap": (("cap",), lambda t: lambda s, b, h, q, k: t["cap"] * torch.tanh(s / t["cap"]), dilated),
    "keys of a batch": (
        ("keys", "table"),
        lambda t: lambda s, b, h, q, k: s * torch.sigmoid(t["keys"][k]) + t["table"][b, h, q // 12],
        dilated,
    ),
    "outside": (("keys",), lambda t: lambda s, b, h, q, k: s - t["keys"][moved_inside(k + 40)], None),
    "hides": (
        ("keys", "cap"),
        lambda t: lambda s, b, h, q, k: torch.where(q - k < 30, s * t["cap"] + t["keys"][q] ** 2, -float("inf")),
        causal,
    ),
    "twice": (
        ("keys",),
        lambda t: lambda s, b, h, q, k: s + torch.maximum(t["keys"][q], t["keys"][k]) - (t["keys"][q] * s).abs(),
        None,
    ),
}


def inputs(dtype=torch.float32, sq=LENGTH, sk=LENGTH, batch=2):
    generator = torch.Generator().manual_seed(6)
    shapes = (batch, sq, 4, 32), (batch, sk, 2, 32), (batch, sk, 2, 24)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def gradients(call, leaves):
    out = call()
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def near(got, exact, unfused, dtype):
    """As near to float64 as torch's own operations in this type, up to a factor."""
    for ours, double, theirs in zip(got, exact, unfused, strict=True):
        assert ours.shape == double.shape
        error = (theirs.double() - double).abs().max()
        limit = 3 * error + 4 * torch.finfo(dtype).eps * double.abs().max()
        assert (ours.double() - double).abs().max() <= limit


@pytest.mark.parametrize("sq", [LENGTH, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_gradients_of_what_a_score_reads(name, dtype, sq, monkeypatch):
    monkeypatch.setattr(captured, "_ELEMENTS", 4 * LENGTH * 25)  # several blocks of rows
    reads, score, mask = SCORES[name]

    def of(call, qkv, tensors):
        return gradients(lambda: call(*qkv, score(tensors), mask), [*qkv, *(tensors[x] for x in reads)])

    ours = lambda q, k, v, f, g: tessera.attention(q, k, v, score=f, mask=g)  # noqa: E731
    got = of(ours, inputs(dtype, sq), tensors_of(torch.float32))
    exact, unfused = (
        of(
            lambda *x: expressions_zoo.attention(*x, shift=LENGTH - sq).to(x[0].dtype),
            [x.detach().to(type_).requires_grad_() for x in inputs(dtype, sq)],
            tensors_of(other),
        )
        for type_, other in ((torch.float64, torch.float64), (dtype, torch.float32))
    )
    near(got, exact, unfused, dtype)


STEPS = (
    lambda x, y, distance: x + y * 0.5,
    lambda x, y, distance: torch.tanh(x) * y,
    lambda x, y, distance: x / (y * y + 1.5),
    lambda x, y, distance: torch.where(distance < 20, x, y),
    lambda x, y, distance: torch.exp(torch.tanh(x)) - y,
    lambda x, y, distance: torch.log(x * x + 1) + torch.sin(y),
    lambda x, y, distance: torch.minimum(x, y),
    lambda x, y, distance: torch.maximum(x, torch.cos(y)),
    lambda x, y, distance: torch.sqrt(torch.sigmoid(x) + 0.25) - y.abs(),
    lambda x, y, distance: (x * x + 1.0) ** (torch.tanh(y) * 0.7),
)


@pytest.mark.parametrize("seed", range(20))
def test_random_scores(seed):
    random_ = random.Random(seed)
    plan = [(random_.randrange(len(STEPS)), random_.random(), random_.random()) for _ in range(8)]

    def score_of(t):
        def score(s, b, h, q, k):
            reals = [s, t["bias"][h, q - k + LENGTH], t["keys"][k], t["slopes"][h]]
            for kind, first, second in plan:
                x, y = reals[int(first * len(reals))], reals[int(second * len(reals))]
                reals.append(torch.tanh(STEPS[kind](x, y, q - k) / 8) * 8)
            return sum(reals[4:], s + t["bias"][h, q - k + LENGTH])

        return score

    names = ("bias", "keys", "slopes")

    def of(call, dtype, captured_dtype):
        tensors = tensors_of(captured_dtype)
        qkv = [x.detach().to(dtype) for x in inputs()]
        out = call(*qkv, score_of(tensors), dilated)
        found = torch.autograd.grad(out.sum(), [tensors[x] for x in names], allow_unused=True)
        return [torch.zeros_like(tensors[name]) if x is None else x for name, x in zip(names, found, strict=True)]

    got = of(lambda q, k, v, f, g: tessera.attention(q, k, v, score=f, mask=g), torch.float32, torch.float32)
    exact, unfused = (of(expressions_zoo.attention, x, x) for x in (torch.float64, torch.float32))
    near(got, exact, unfused, torch.float32)


def textbook(q, k, v, score, mask, sinks=None, softcap=0.0, scale=1.0, offset=0):
    """(out, lse) of (b, s, h, d)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    at = [torch.arange(n).view([-1 if d == i else 1 for d in range(4)]) for i, n in enumerate(s.shape)]
    at[2] = at[2] + offset
    s = torch.where(mask(*at), score(s, *at), -float("inf"))
    lse = s.logsumexp(-1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks[:, None])
    return (torch.exp(s - total[..., None]).nan_to_num(0) @ v).transpose(1, 2), lse


@pytest.mark.parametrize("rows", [7, LENGTH])
def test_sinks_softcap_the_window_and_the_gradient_of_the_lse(rows, monkeypatch):
    monkeypatch.setattr(captured, "_ELEMENTS", 4 * LENGTH * rows)

    def of(call, dtype):
        tensors = tensors_of(dtype)
        sinks = torch.linspace(-1, 1, 4, dtype=dtype).requires_grad_()
        qkv = [x.detach().to(dtype).requires_grad_() for x in inputs()]
        score = SCORES["relative bias"][1](tensors)
        out, lse = call(*qkv, score, sinks)
        wide = torch.Generator().manual_seed(3)
        grads = [torch.randn(x.shape, generator=wide).to(dtype) for x in (out, lse)]
        return torch.autograd.grad((out, lse), [*qkv, sinks, tensors["bias"]], grads)

    def window(b, h, q, k):
        return (q >= k) & (q - k <= 20)

    got = of(
        lambda q, k, v, f, sinks: tessera.attention(
            q, k, v, score=f, window=(20, 30), causal=True, sinks=sinks, softcap=5.0, scale=0.3, return_lse=True
        ),
        torch.float32,
    )
    exact, unfused = (
        of(lambda q, k, v, f, sinks: textbook(q, k, v, f, window, sinks, 5.0, 0.3), x)
        for x in (torch.float64, torch.float32)
    )
    near(got, exact, unfused, torch.float32)


def test_packed_sequences_and_positions():
    lengths = [0, 30, 31, LENGTH]
    cu = torch.tensor(lengths, dtype=torch.int32)
    score = SCORES["keys of a batch"][1]

    def of(call):
        tensors = tensors_of(torch.float32)
        tensors["table"] = torch.randn(5, 4, 9, generator=torch.Generator().manual_seed(2)).requires_grad_()
        out = call(*(x.detach()[0] for x in inputs(batch=1)), score(tensors))
        return torch.autograd.grad((out * torch.arange(24)).sum(), [tensors["keys"], tensors["table"]])

    def by_hand(q, k, v, f):
        def moved(sequence, part):  # as the sequence `sequence` of several, at positions from 3
            return lambda s, b, h, i, j: f(s, b + sequence + 2, h, i + 3, j)

        parts = []
        for number, part in enumerate(itertools.starmap(slice, itertools.pairwise(lengths))):
            one = (x[part][None] for x in (q, k, v))
            mask = lambda b, h, i, j: i + 3 >= j  # noqa: E731
            parts.append(expressions_zoo.attention(*one, moved(number, part), mask)[0])
        return torch.cat(parts)

    offsets = tessera.Offsets(q=torch.full((3,), 3), batch=2)
    got = of(
        lambda q, k, v, f: tessera.attention(
            q, k, v, score=f, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, offsets=offsets
        )
    )
    for ours, theirs in zip(got, of(by_hand), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-5)


@pytest.mark.parametrize("module", [tessera, flex], ids=["ours", "torchs"])
def test_flex_attention_trains_a_bias(module):
    def mask(b, h, i, j):
        return (i >= j) & (i // 40 == j // 40)

    def of(call):
        tensors = tensors_of(torch.float32)
        out = call(*(x.detach() for x in inputs()), SCORES["relative bias"][1](tensors))
        return torch.autograd.grad((out * torch.arange(24)).sum(), tensors["bias"])[0]

    def by_flex(q, k, v, score):
        block_mask = module.create_block_mask(mask, None, None, LENGTH, LENGTH, "cpu", 32)
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        return tessera.flex_attention(*heads_first, score, block_mask, enable_gqa=True).transpose(1, 2)

    want = of(lambda q, k, v, score: expressions_zoo.attention(q, k, v, score, mask))
    torch.testing.assert_close(of(by_flex), want, atol=2e-4, rtol=2e-5)


def test_full_tiles_of_a_list_show_what_the_mask_hides():
    tiles = tessera.TileList.from_mask(
        torch.tensor([[[[1, 0, 1], [1, 1, 0], [0, 1, 1]]] * 2] * 2) > 0,
        full=torch.tensor([[[[1, 0, 0], [0, 0, 0], [0, 0, 1]], [[0, 0, 1], [1, 0, 0], [0, 0, 0]]]] * 2) > 0,
        block=(32, 32),
    )
    listed, full = captured._lists(tiles, LENGTH, LENGTH, 4)

    def visible(b, h, i, j):
        tile = b, h, i // 32, j // 32
        return listed[tile] & (full[tile] | dilated(b, h, i, j))

    def of(call):
        tensors = tensors_of(torch.float32)
        out = call(*(x.detach() for x in inputs()), SCORES["relative bias"][1](tensors))
        return torch.autograd.grad(out.sum(), tensors["bias"])[0]

    # the window of a mask would hold in full tiles too: this one has none
    got = of(
        lambda q, k, v, f: tessera.attention(q, k, v, score=f, tiles=tiles, mask=lambda b, h, i, j: dilated(b, h, i, j))
    )
    torch.testing.assert_close(
        got, of(lambda q, k, v, f: expressions_zoo.attention(q, k, v, f, visible)), atol=2e-5, rtol=2e-5
    )


def test_only_what_is_asked_for_is_computed():
    tensors = tensors_of(torch.float32)
    tensors["keys"].requires_grad_(False)
    q, k, v = (x.detach() for x in inputs())
    score = SCORES["keys of a batch"][1](tensors)
    out = tessera.attention(q, k, v, score=score)
    out.sum().backward()
    assert tensors["keys"].grad is None and tensors["table"].grad.abs().sum() > 0
    with torch.no_grad():
        assert not tessera.attention(q, k, v, score=score).requires_grad
    detached = {name: x.detach() for name, x in tensors.items()}
    assert not tessera.attention(q, k, v, score=SCORES["keys of a batch"][1](detached)).requires_grad


def test_what_has_no_such_gradient_is_refused_by_name():
    tensors = tensors_of(torch.float32)
    q, k, v = (x.detach() for x in inputs())
    half_bias = torch.zeros(LENGTH, dtype=torch.float16, requires_grad=True)
    elsewhere = torch.zeros(LENGTH, device="meta", requires_grad=True)
    score = SCORES["relative bias"][1](tensors)
    both = tessera.Tiles(tessera.TileList.from_mask(torch.ones(1, 1, 2, 2, dtype=torch.bool)))
    for options, words in (
        ({"score": lambda s, b, h, q, k: s + half_bias[k]}, r"captured tensor half_bias of shape \(90,\) in float16"),
        ({"score": lambda s, b, h, q, k: s + elsewhere[k]}, r"captured tensor elsewhere of shape \(90,\) .* on meta"),
        ({"score": score, "dropout": 0.5}, "dropout: got a value beside a captured tensor"),
        ({"score": score, "attention_chunk": 32}, "attention_chunk: got a value"),
        ({"score": score, "seqused_k": torch.tensor([80, 90], dtype=torch.int32)}, "seqused_k: got a value"),
        ({"score": score, "out": torch.empty(2, LENGTH, 4, 24)}, "out: got a value"),
        ({"score": score, "tiles": both}, "tiles: got Tiles"),
        ({"score": score, "mask": "checkerboard"}, "mask: got 'checkerboard'"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            tessera.attention(q, k, v, **options)
    source = tessera.KeySource(k, v)
    with pytest.raises(NotImplementedError, match="k: got a KeySource"):
        tessera.attention(q, source, score=score)
    with pytest.raises(tessera.expressions.TraceError, match=r"mask: got a captured tensor of shape \(90,\)"):
        tessera.attention(q, k, v, mask=lambda b, h, q, k: tensors["keys"][k] > 0)
    loss = tessera.attention(q, k, v, score=score).sum()
    (first,) = torch.autograd.grad(loss, tensors["bias"], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        first.sum().backward()


def options_by_what_is_written():
    """name: (a tensor, options of a call that reads it)."""
    cu = [torch.tensor([0, 30, LENGTH], dtype=torch.int32) for _ in range(2)]
    packed = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]}
    tiles = tessera.TileList.from_mask(torch.ones(1, 1, 3, 3, dtype=torch.bool), block=(32, 32))
    sinks, seen, first = torch.ones(4), torch.ones(LENGTH, dtype=torch.bool), torch.full((2,), 3)
    return {
        "sinks": (sinks, {"sinks": sinks}),
        "cu_seqlens_q": (cu[0], packed),
        "cu_seqlens_k": (cu[1], packed),
        "positions of queries": (first, {"offsets": tessera.Offsets(q=first)}),
        "positions of keys": (first, {"offsets": tessera.Offsets(k=first)}),
        "counts of tiles": (tiles.counts, {"tiles": tiles}),
        "indices of tiles": (tiles.indices, {"tiles": tiles}),
        "what the mask reads": (seen, {"mask": lambda b, h, q, k: seen[k]}),
    }


@pytest.mark.parametrize("name", options_by_what_is_written())
def test_what_is_written_between_the_passes_is_noticed_where_only_a_bias_trains(name):
    written, options = options_by_what_is_written()[name]
    tensors = tensors_of(torch.float32)
    qkv = [x.detach()[0] if name.startswith("cu") else x.detach() for x in inputs()]
    outs = [tessera.attention(*qkv, score=SCORES["relative bias"][1](tensors), **options) for _ in range(2)]
    outs[0].sum().backward()
    written.fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outs[1].sum().backward()


def test_a_score_whose_derivatives_are_more_than_256_steps_together():
    def score_of(t):
        def score(s, b, h, q, k):
            for i in range(16):
                s = s + torch.tanh(t["keys"][(k + 5 * i) % LENGTH]) * t["bias"][h, (q + i) % LENGTH] / 8
            return s

        return score

    def of(call, dtype):
        tensors = tensors_of(dtype)
        out = call(*(x.detach().to(dtype) for x in inputs()), score_of(tensors), causal)
        return torch.autograd.grad(out.sum(), [tensors["keys"], tensors["bias"]])

    got = of(lambda q, k, v, f, g: tessera.attention(q, k, v, score=f, mask=g), torch.float32)
    exact, unfused = (of(expressions_zoo.attention, x) for x in (torch.float64, torch.float32))
    near(got, exact, unfused, torch.float32)


def test_a_backward_leaves_the_graph_that_threads_share_as_it_was():
    keys = tensors_of(torch.float32)["keys"]

    def score(s, b, h, q, k):  # no other test has this expression
        return s * torch.tanh(keys[k] * 0.40625)

    kept = traced_by_name(tessera.expressions.score_of(score).name)
    nodes = dict(kept.graph._made)
    tessera.attention(*(x.detach() for x in inputs()), score=score).sum().backward()
    assert kept.graph._made == nodes


def test_a_result_may_be_written_to():
    def of(train_q, written, returns):
        tensors = tensors_of(torch.float32)
        q, k, v = (x.detach().requires_grad_(train_q) for x in inputs())
        results = tessera.attention(q, k, v, score=SCORES["relative bias"][1](tensors), return_lse=returns)
        out = results[0] if returns else results
        if written:
            out += 1
            out *= 2
        else:
            out = (out + 1) * 2
        out.square().sum().backward()
        return out.detach(), tensors["bias"].grad

    for returns in (False, True):
        for got, want in zip(of(False, True, returns), of(False, False, returns), strict=True):
            assert torch.equal(got, want)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # q's gradient reads out, as always
        of(True, True, False)


def test_nan_spoils_what_reads_it_and_rows_that_see_nothing_give_nothing():
    tensors = tensors_of(torch.float32)
    q, k, v = (x.detach() for x in inputs())
    q[0, 40, 2] = torch.nan
    score = SCORES["relative bias"][1](tensors)
    results = tessera.attention(
        q, k, v, score=score, mask=lambda b, h, i, j: i > j + 3, sinks=torch.zeros(4), return_lse=True
    )
    for part in ([0], [1], [0, 1]):  # out, the LSE and both
        (got,) = torch.autograd.grad(
            [results[i].sum() for i in part], tensors["bias"], retain_graph=True, allow_unused=True
        )
        want = torch.zeros_like(got, dtype=torch.bool)
        want[2, LENGTH + 4 : LENGTH + 41] = True
        assert torch.equal(got.isnan(), want)


def test_autocast_decides_of_what_the_gradient_of_a_bias_is_computed():
    def of(qkv, enabled):
        tensors = tensors_of(torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = tessera.attention(*qkv, score=SCORES["relative bias"][1](tensors))
        out.float().square().sum().backward()
        return out.detach(), tensors["bias"].grad, *(x.grad for x in qkv if x.is_leaf)

    wide = inputs()
    got, want = of(wide, True), of([x.bfloat16().detach().requires_grad_() for x in wide], False)
    assert got[0].dtype is torch.bfloat16
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs.to(ours.dtype))


def test_rows_whose_scores_are_all_minus_infinity_give_nothing():
    def of(score_of, mask):
        bias = tensors_of(torch.float32)["bias"]
        results = tessera.attention(
            *(x.detach() for x in inputs()), score=score_of(bias), mask=mask, sinks=torch.zeros(4), return_lse=True
        )
        generator = torch.Generator().manual_seed(3)
        return torch.autograd.grad(results, bias, [torch.randn(x.shape, generator=generator) for x in results])[0]

    def seen(b, h, i, j):
        return i > j + 3

    def biased(bias):
        return SCORES["relative bias"][1]({"bias": bias})

    def hiding(bias):
        return lambda *x: torch.where(seen(*x[1:]), biased(bias)(*x), -torch.inf)

    torch.testing.assert_close(of(hiding, None), of(biased, seen))
