# SPDX-License-Identifier: Apache-2.0
"""LiteAttention's modules on skip states: its usage, and what went wrong in it."""

import pytest

torch = pytest.importorskip("torch")

import tessera  # noqa: E402
from tessera.compat.lite_attention import LiteAttention, SeqParallelLiteAttention  # noqa: E402

BLOCK = (16, 16)
PARTS = (slice(0, 48), slice(48, 96))


def inputs(seed=0, seqlen=96, batch=1):
    """Scores of the 16 keys around a query are above all others by 8."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, seqlen, 2, 16, generator=generator) for _ in range(3))
    block = 6 * torch.eye(16)[torch.arange(seqlen) // 16 % 16, None]
    return q + block, k + block, v


class Block(torch.nn.Module):
    """As its README says to use it."""

    def __init__(self):
        super().__init__()
        self.lite_attention = LiteAttention(enable_skipping=True, threshold=-3.0, block=BLOCK)

    def forward(self, q, k, v, must_do_list=None):
        return self.lite_attention(q, k, v, must_do_list=must_do_list)


def test_a_block_of_a_model_leaves_out_more_from_call_to_call():
    model, other = Block(), Block()
    dense = tessera.attention(*inputs())
    torch.testing.assert_close(model(*inputs()), dense, rtol=0, atol=1e-6)  # the first call computes all
    shares = [model.lite_attention.active]
    for _ in range(3):
        model(*inputs())
        shares.append(model.lite_attention.active)
    assert shares == sorted(shares, reverse=True) and shares[-1] < 0.5
    assert other.lite_attention.active == 1.0  # a layer's list is its own
    model.lite_attention.reset_skip_state()
    assert model.lite_attention.active == 1.0
    torch.testing.assert_close(model(*inputs()), dense, rtol=0, atol=1e-6)


def test_it_is_the_threshold_rule():
    q, k, v = inputs()
    module = LiteAttention(threshold=-4.0, block=BLOCK)
    state = tessera.SkipState(
        seqlen_q=96, seqlen_k=96, heads_q=2, block=BLOCK, rule="threshold", ramp=(-4, -4), warm_up=0, steps=5
    )
    for step in range(5):
        out, lse = module(q, k, v, return_softmax_lse=True)
        want, want_lse = state(q, k, v, step=step, return_lse=True)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_tiles_with_a_token_that_must_be_done_are_done():
    """must_do_list rounds outward; LiteAttention before 0.3 ignored it on SM80, dropped the first tile of a range."""
    module = LiteAttention(threshold=-1e-3, block=BLOCK)
    for _ in range(3):
        module(*inputs(), must_do_list=[20, 21, 50, 66])
    words = module._attention.state().tile_list().bits
    assert all((int(row) & 0b011010) == 0b011010 for row in words.reshape(-1)[:: words.shape[-1]])


def test_no_token_is_left_out_that_was_not_named():
    """must_skip_list rounds inward: keys 8 to 16 and 32 to 40 of the range lie in tiles with others."""
    q, k, v = inputs()
    module = LiteAttention(block=BLOCK)
    got = module(q, k, v, must_skip_list=[8, 40])
    keep = [*range(16), *range(32, 96)]
    torch.testing.assert_close(got, tessera.attention(q, k[:, keep], v[:, keep]), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        LiteAttention(block=BLOCK)(q, k, v, must_skip_list=[3, 9]), tessera.attention(q, k, v), rtol=0, atol=1e-6
    )


def test_ranges_are_those_of_the_call():
    """LiteAttention's must_skip_list counts when the list is made and never again."""
    q, k, v = inputs()
    module = LiteAttention(threshold=-90.0, block=BLOCK)
    module(q, k, v, must_skip_list=[0, 32])
    torch.testing.assert_close(module(q, k, v), tessera.attention(q, k, v), rtol=0, atol=1e-6)


def test_the_last_range_may_end_in_a_part_of_a_tile():
    q, k, v = inputs(seqlen=90)
    got = LiteAttention(block=BLOCK)(q, k, v, must_skip_list=[64, 90])
    torch.testing.assert_close(got, tessera.attention(q, k[:, :64], v[:, :64]), rtol=0, atol=1e-6)


def test_another_shape_begins_anew_and_a_disabled_one_stays():
    module = LiteAttention(threshold=-2.0, block=BLOCK)
    for _ in range(2):
        module(*inputs())
    share = module.active
    module.enable_skip_optimization(False)
    assert torch.equal(module(*inputs(seqlen=40)), tessera.attention(*inputs(seqlen=40)))
    assert module.active == share < 1
    module.enable_skip_optimization()
    torch.testing.assert_close(module(*inputs(seqlen=40)), tessera.attention(*inputs(seqlen=40)), rtol=0, atol=1e-6)


def test_state_dict_brings_a_run_back():
    module, other = (LiteAttention(threshold=-2.0, block=BLOCK) for _ in range(2))
    for _ in range(2):
        module(*inputs())
    other.load_state_dict(module.state_dict())
    assert other.active == module.active < 1
    assert torch.equal(other(*inputs(1)), module(*inputs(1)))
    with pytest.raises(ValueError, match=r"^threshold: got a state of -2\.0; want one of -3\.0"):
        LiteAttention(threshold=-3.0, block=BLOCK).load_state_dict(module.state_dict())


def test_parts_of_keys_have_lists_of_their_own():
    q, k, v = inputs()
    module = SeqParallelLiteAttention(num_nodes=2, threshold=-90.0, block=BLOCK)
    for _ in range(2):
        parts = [module(q, k[:, part], v[:, part], i, return_softmax_lse=True) for i, part in enumerate(PARTS)]
    outs, lses = zip(*parts, strict=True)
    weights = torch.softmax(torch.stack(lses), 0).transpose(-1, -2)[..., None]
    torch.testing.assert_close(sum(weights * torch.stack(outs)), tessera.attention(q, k, v), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"^split_idx: got 2; want 0 to below num_nodes, 2"):
        module(q, k, v, 2)


def test_bad_arguments_are_named():
    q, k, v = inputs(batch=3)
    with pytest.raises(ValueError, match=r"^query: got a batch of 3; want at most max_batch_size, 2"):
        LiteAttention()(q, k, v)
    for threshold in (0.0, 1.0, float("nan"), -101.0):
        with pytest.raises(ValueError, match=r"^threshold: got"):
            LiteAttention(threshold=threshold)
    for name, value in (("use_int8", True), ("reverse_skip_list", False), ("config", {})):
        with pytest.raises(NotImplementedError, match=rf"^{name}: got"):
            LiteAttention(**{name: value})
    module = LiteAttention(block=BLOCK, steps=1)
    q, k, v = inputs()
    for given in ([1], [5, 5], [9, 4], [0, 20, 10, 30], [-1, 4], [0, 97]):
        with pytest.raises(ValueError, match=r"^must_do_list: got \["):
            module(q, k, v, must_do_list=given)
    with pytest.raises(ValueError, match=r"^must_skip"):
        module(q, k, v, must_do_list=[0, 20], must_skip_list=[0, 32])
    module(q, k, v)
    with pytest.raises(ValueError, match=r"^steps: got call 2; want at most 1 before reset_skip_state"):
        module(q, k, v)
