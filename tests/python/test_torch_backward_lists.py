# SPDX-License-Identifier: Apache-2.0
"""Lists of tiles for the backward: the forward's own, by hand, of a skip state, of the forward's masses.

Each is compared with its own definition in double: the gradient of the masked problem for the forward's own list, and
for the others the dense gradient's sums over the listed tiles alone. Rows of 96 tiles have three words, with holes.
"""

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
from tessera import Tiles  # noqa: E402
from tessera.torch.backward_lists import heaviest_bits  # noqa: E402

BLOCK = (16, 8)
QUERIES, KEYS, HEADS, DIM = 70, 762, 2, 16
GRID = (-(-QUERIES // BLOCK[0]), -(-KEYS // BLOCK[1]))


def qkv(seed=0, dtype=torch.float32):
    """Keys between which softmax tells: masses of tiles differ by powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((2, QUERIES, HEADS, DIM), (2, KEYS, HEADS, DIM), (2, KEYS, HEADS, DIM))
    q, k, v = (torch.randn(size, generator=generator) for size in sizes)
    return [x.to(dtype).requires_grad_() for x in (2 * q, k, v)]


def holes(share=0.4, seed=1, key_blocks=GRID[1]):
    """Some tiles of every row tile: first, last, and holes in each word; one row tile has none."""
    kept = torch.rand(2, HEADS, GRID[0], key_blocks, generator=torch.Generator().manual_seed(seed)) < share
    kept[:, :, 0, 0] = kept[:, :, 1, -1] = True
    kept[:, :, 2] = False
    return kept


def by_definition(leaves, dout, kept, own, dlse=None):
    """Gradients in double. own: of the masked problem; else P, o and delta are the dense forward's."""
    q, k, v = (x.detach().double().transpose(1, 2) for x in leaves)
    shown = kept.repeat_interleave(BLOCK[0], 2)[:, :, :QUERIES].repeat_interleave(BLOCK[1], 3)[..., :KEYS]
    scores = q @ k.mT / DIM**0.5
    weights = scores.masked_fill(~shown, -torch.inf).softmax(-1).nan_to_num() if own else scores.softmax(-1)
    dout = dout.double().transpose(1, 2)
    delta = (weights @ v * dout).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.double()[..., None]
    weights = weights * shown
    dscores = weights * (dout @ v.mT - delta) / DIM**0.5
    return [x.transpose(1, 2) for x in (dscores @ k, dscores.mT @ q, weights.mT @ dout)]


def same(got, wanted, tolerance=2e-5):
    for one, want in zip(got, wanted, strict=True):
        assert (one.double() - want).norm() <= tolerance * want.norm()


def dense_mass(leaves):
    q, k = (x.detach().double().transpose(1, 2) for x in leaves[:2])
    weights = (q @ k.mT / DIM**0.5).softmax(-1)
    padded = torch.nn.functional.pad(weights, (0, GRID[1] * BLOCK[1] - KEYS, 0, GRID[0] * BLOCK[0] - QUERIES))
    tiles = padded.unflatten(2, (GRID[0], BLOCK[0])).unflatten(4, (GRID[1], BLOCK[1]))
    return tiles.sum((3, 5)) / torch.tensor([16, 16, 16, 16, 6])[:, None]


def gradients(leaves, dout, tiles, **options):
    out = tessera.attention(*leaves, tiles=tiles, **options)
    return torch.autograd.grad(out, leaves, dout)


def test_the_forward_s_own_list_gives_the_gradient_of_the_masked_problem():
    leaves, kept = qkv(), holes()
    dout = torch.randn(leaves[0].shape)
    got = gradients(leaves, dout, tessera.TileList.from_mask(kept, form="bitmask", block=BLOCK))
    same(got, by_definition(leaves, dout, kept, own=True))


def test_a_list_by_hand_truncates_the_dense_gradient():
    """As a bool mask, its words, and a TileList. BackLite read the first word of a list only; the backward of the
    reference's fork loaded the tile after the last one where a list has a hole."""
    leaves, kept = qkv(), holes()
    dout = torch.randn(leaves[0].shape)
    listed = tessera.TileList.from_mask(kept, form="bitmask", block=BLOCK)
    assert listed.bits.shape[-1] == 3
    wanted = by_definition(leaves, dout, kept, own=False)
    for given in (kept, listed.bits, listed):
        same(gradients(leaves, dout, Tiles(backward=given, block=BLOCK)), wanted)
    assert torch.equal(tessera.attention(*leaves, tiles=Tiles(backward=kept, block=BLOCK)), tessera.attention(*leaves))


def test_a_list_of_the_last_tile_alone_and_of_single_words():
    for only in ([GRID[1] - 1], [31, 32], [63], [64], [0]):
        kept = torch.zeros(2, HEADS, *GRID, dtype=torch.bool)
        kept[..., only] = True
        leaves = qkv(2)
        dout = torch.randn(leaves[0].shape)
        got = gradients(leaves, dout, Tiles(backward=kept, block=BLOCK))
        same(got, by_definition(leaves, dout, kept, own=False))


@pytest.mark.parametrize("rule", ["mass", "threshold"])
def test_a_skip_state_s_list_truncates_the_dense_gradient(rule):
    leaves = qkv()
    state = tessera.SkipState(
        batch=2,
        seqlen_q=QUERIES,
        seqlen_k=KEYS,
        heads_q=HEADS,
        block=BLOCK,
        rule=rule,
        ramp=(0.01, 0.01) if rule == "mass" else (-1.0, -1.0),
        warm_up=0,
    )
    with torch.no_grad():
        for step in range(2):
            state(*leaves, step=step)
    assert 0.1 < state.active < 0.9
    kept = torch.from_numpy(state.tile_list().to_mask(key_blocks=GRID[1]))
    dout = torch.randn(leaves[0].shape)
    same(gradients(leaves, dout, Tiles(backward=state)), by_definition(leaves, dout, kept, own=False))
    out = tessera.attention(*leaves, tiles=Tiles(backward=state))
    with torch.no_grad():
        state(*leaves, step=5)
    state.reset()  # the list of the call is kept
    same(torch.autograd.grad(out, leaves, dout), by_definition(leaves, dout, kept, own=False))


@pytest.mark.parametrize("dropped", [0.05, 0.2, 0.7])
@pytest.mark.parametrize("dlse", [False, True])
def test_masses_of_the_forward_drop_the_lightest_tiles(dropped, dlse):
    leaves = qkv(3)
    mass = dense_mass(leaves)
    kept = torch.zeros_like(mass, dtype=torch.bool)
    for row, values in zip(kept.flatten(0, 2), mass.flatten(0, 2), strict=True):
        left = 0.0
        for tile in values.argsort():
            left += float(values[tile])
            row[tile] = left >= dropped * float(values.sum())
    assert 0.05 < kept.double().mean() < 0.95
    dout = torch.randn(leaves[0].shape)
    tiles = Tiles(backward=dropped, block=BLOCK)
    out, lse = tessera.attention(*leaves, tiles=tiles, return_lse=True)
    assert torch.equal(out, tessera.attention(*leaves))
    upstream = torch.randn(lse.shape) if dlse else None
    told = ((out, lse), leaves, (dout, upstream)) if dlse else (out, leaves, dout)
    same(torch.autograd.grad(*told), by_definition(leaves, dout, kept, False, upstream))


def test_a_small_share_is_near_the_dense_gradient_and_every_input_has_one():
    """LiteAttention's autograd function returned 17 gradients for more than 24 inputs."""
    leaves = qkv(4)
    dout = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(0))
    dense = gradients(leaves, dout, None)
    errors = []
    for dropped in (0.3, 0.03, 0.003):
        got = gradients(leaves, dout, Tiles(backward=dropped, block=BLOCK))
        errors.append(max(float((a - b).norm() / b.norm()) for a, b in zip(got, dense, strict=True)))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.02
    q, k, v = (x.detach() for x in leaves)
    for at in range(3):
        one = [x.clone().requires_grad_(i == at) for i, x in enumerate((q, k, v))]
        tessera.attention(*one, tiles=Tiles(backward=0.03, block=BLOCK)).backward(dout)
        assert [x.grad is not None for x in one] == [i == at for i in range(3)]


def test_bf16_gradients_by_masses():
    leaves = qkv(5, torch.bfloat16)
    dout = torch.randn(leaves[0].shape).bfloat16()
    got = gradients(leaves, dout, Tiles(backward=0.1, block=BLOCK), causal=True)
    listed = tessera.attention(*(x.detach() for x in leaves), causal=True, tiles=Tiles(mass="mean", block=BLOCK))[1]
    bits = heaviest_bits(listed, 0.1)
    wanted = gradients(leaves, dout, Tiles(backward=bits, block=BLOCK), causal=True)
    same(got, [x.double() for x in wanted], 4e-3)


@pytest.mark.parametrize("upstream", ["expanded", "turned", "expanded, of the LSE"])
def test_upstream_gradients_come_in_any_strides(upstream):
    leaves = qkv(6)
    out, lse = tessera.attention(*leaves, tiles=Tiles(backward=0.1, block=BLOCK), return_lse=True)
    result, given = {
        "expanded": (out, torch.ones(1).expand(out.shape)),
        "turned": (out, torch.randn(out.mT.shape).mT),
        "expanded, of the LSE": (lse, torch.ones(1).expand(lse.shape)),
    }[upstream]
    got = torch.autograd.grad(result, leaves, given, retain_graph=True)
    wanted = torch.autograd.grad(result, leaves, given.clone(memory_format=torch.contiguous_format))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("leaf", [True, False])
def test_sinks_and_a_second_source_beside_masses(leaf, dtype):
    """With gradients of their own where they require them: those of the same list by hand."""
    q, k, v = qkv(7, dtype)
    k2, v2 = (x.detach()[:, :50].requires_grad_(leaf) for x in qkv(8, dtype)[1:])
    sinks = torch.tensor([0.5, -1.0]).requires_grad_(leaf)
    leaves = [q, k, v, k2, v2, sinks][: 6 if leaf else 3]
    dout = torch.randn(q.shape).to(dtype)

    def call(**tiles):
        return tessera.attention(q, k, v, k2=tessera.KeySource(k2, v2), sinks=sinks, tiles=Tiles(**tiles, block=BLOCK))

    with torch.no_grad():
        bits = heaviest_bits(call(mass="mean")[1], 0.1)
    got = torch.autograd.grad(call(backward=0.1), leaves, dout)
    wanted = torch.autograd.grad(call(backward=bits), leaves, dout)
    same(got, [x.double() for x in wanted], 1e-6 if dtype == torch.float32 else 4e-3)
    dense = torch.autograd.grad(call(), leaves, dout)
    assert not torch.equal(got[1], dense[1])


def test_outputs_of_other_types_have_gradients_by_masses():
    """An fp32 output of bf16 tensors, and autocast."""
    leaves, tiles = qkv(9, torch.bfloat16), Tiles(backward=0.1, block=BLOCK)
    out = tessera.attention(*leaves, tiles=tiles, out_dtype=torch.float32)
    dout = torch.randn(out.shape)
    wanted = [x.double() for x in torch.autograd.grad(out, leaves, dout)]
    wide = [x.detach().float().requires_grad_() for x in leaves]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = tessera.attention(*wide, tiles=tiles)
    assert lowered.dtype is torch.bfloat16
    same(torch.autograd.grad(lowered, wide, dout.bfloat16()), wanted, 1e-2)
    plain = tessera.attention(*leaves, tiles=tiles)
    by_hand = torch.autograd.grad(plain, leaves, dout.bfloat16())
    cast = torch.autograd.grad(tessera.attention(*(x.bfloat16() for x in wide), tiles=tiles), wide, dout.bfloat16())
    assert all(torch.equal(a.float(), b) for a, b in zip(by_hand, cast, strict=True))


def test_there_are_first_derivatives_only():
    leaves = qkv(10)
    out = tessera.attention(*leaves, tiles=Tiles(backward=0.1, block=BLOCK))
    gradients = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    refused = r"^attention_backward: got a derivative of a gradient \(double backward\)"
    for gradient, leaf in zip(gradients, leaves, strict=True):
        with pytest.raises(NotImplementedError, match=refused):
            torch.autograd.grad(gradient.sum(), leaf, retain_graph=True)
    (dq,) = torch.autograd.grad(
        tessera.attention(*leaves, tiles=Tiles(backward=0.1, block=BLOCK)).sum(), leaves[0], create_graph=True
    )
    with pytest.raises(NotImplementedError, match=refused):
        dq.sum().backward()


def test_masses_that_are_not_finite_keep_their_tiles():
    mass = torch.zeros(1, 1, 3, 70)
    mass[0, 0, 0, 69] = 1.0
    mass[0, 0, 1, 33] = torch.nan
    mass[0, 0, 1, 2] = 1e-30
    words = heaviest_bits(mass, 0.5).view(torch.int32).tolist()[0][0]
    assert words == [[0, 0, 1 << 5], [1 << 2, 1 << 1, 0], [0, 0, 0]]


def test_bad_lists_are_named():
    leaves = qkv()
    for given in (0.0, 1.0, -0.5, float("nan")):
        with pytest.raises(ValueError, match=r"^tiles.backward: got"):
            tessera.attention(*leaves, tiles=Tiles(backward=given))
    for given in ("all", torch.zeros(3), True):
        with pytest.raises(TypeError, match=r"^tiles.backward: got"):
            tessera.attention(*leaves, tiles=Tiles(backward=given))
    with pytest.raises(TypeError, match=r"^tiles.backward: got a number for arrays without autograd"):
        tessera.attention(*(x.detach().numpy() for x in leaves), tiles=Tiles(backward=0.1))
    with pytest.raises(NotImplementedError, match=r"^tiles.backward: got a number beside mass"):
        tessera.attention(*leaves, tiles=Tiles(backward=0.1, mass="mean"))
    with pytest.raises(NotImplementedError, match=r"^tiles.backward: got a number beside dropout"):
        tessera.attention(*leaves, tiles=Tiles(backward=0.1), dropout=0.1)
    with pytest.raises(NotImplementedError, match=r"^tiles.backward: got a number beside dropout or quantization"):
        tessera.attention(*leaves, tiles=Tiles(backward=0.1), quantization="fp8")
    with pytest.raises(NotImplementedError, match=r"^alibi_slopes: got a tensor that requires grad"):
        tessera.attention(*leaves, tiles=Tiles(backward=0.1), alibi_slopes=torch.ones(HEADS, requires_grad=True))
    with pytest.raises(NotImplementedError, match=r"^score: got a Python function without the attribute derivative"):
        tessera.attention(
            *leaves, tiles=Tiles(backward=0.1), score=lambda s, *at: s, wishes="implementation=cpu.reference"
        )
    with pytest.raises(ValueError, match=r"^bwd_tile_bits: got"):
        gradients(leaves, torch.ones_like(leaves[0]), Tiles(backward=holes(key_blocks=GRID[1] + 33), block=BLOCK))
    with torch.no_grad():
        assert torch.equal(tessera.attention(*leaves, tiles=Tiles(backward=0.1)), tessera.attention(*leaves))
