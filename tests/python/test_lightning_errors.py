# SPDX-License-Identifier: Apache-2.0
"""What the calls for lightning attention refuse: the error names the caller's argument, what was got and what is
wanted."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from tessera.compat import lightning  # noqa: E402

HEADS, DIM, SLOTS = 3, 16, 6
ARRAY = "want an array with shape, dtype and __dlpack__"
SLOPES = torch.tensor([0.05, 0.4, 1.5])
PLACES = torch.tensor([4, 0, -1, 2], dtype=torch.int32)
POOL = torch.zeros(SLOTS, HEADS, DIM, DIM)


def meta() -> lightning.SegLaMeta:
    """Four sequences of nine tokens, three of them with a state."""
    return lightning.SegLaMeta(
        batch_size=4,
        max_q_length=None,
        q_offsets=torch.tensor([0, 3, 5, 7, 9], dtype=torch.int32),
        s_offsets=PLACES,
        q_lengths=None,
        s_scales=torch.ones(4),
    )


@dataclass
class Call:
    """A function and what it calls the arguments that are much the same in all."""

    name: str
    shape: tuple[int, ...]  # of q, k and v
    dims: str  # of q, k and v, in errors
    slopes: str
    state: str  # the pool, or the first state of each sequence
    slots: str | None  # of the pool; None: the function has no pool
    more: dict  # further arguments
    rows: str = "qkv"

    def __call__(self, **changed):
        """The function on good arguments, but for those that are `changed`; `meta_x` is field x of `meta`."""
        given = {x: torch.ones(self.shape) for x in self.rows} | {self.slopes: SLOPES} | self.more
        if self.slots is not None:
            given[self.state] = POOL.clone()
        if self.name == "seg_la_fwd":
            given["meta"] = meta()
        for argument, value in changed.items():
            if argument.startswith("meta_"):
                setattr(given["meta"], argument.removeprefix("meta_"), value)
            else:
                given[argument] = value
        return getattr(lightning, self.name)(**given)

    def refuses(self, error, text, **changed):
        with pytest.raises(error) as raised:
            self(**changed)
        assert str(raised.value).startswith(text), raised.value


VLLM_PREFILL = Call("lightning_attention", (2, HEADS, 7, DIM), "(b, h, n, d)", "ed", "kv_history", None, {})
VLLM_STEP = Call(
    "linear_decode_forward_triton",
    (4, HEADS, 1, DIM),
    "(b, h, 1, d)",
    "slope_rate",
    "kv_caches",
    "slot_idx",
    {"slot_idx": PLACES},
)
SGLANG = Call("seg_la_fwd", (9, HEADS, DIM), "(tokens, h, d)", "decay_scales", "s", "meta.s_offsets", {})
CULA_PREFILL = Call(
    "lightning_attn_fwd", (2, 7, HEADS, DIM), "(b, t, h, d)", "decay", "initial_state", None, {}, rows="QKV"
)
CULA_PACKED = Call(
    "lightning_attn_fwd_varlen",
    (1, 9, HEADS, DIM),
    "(1, tokens, h, d)",
    "decay",
    "state_pool",
    "initial_state_indices",
    {
        "cu_seqlens": torch.tensor([0, 3, 5, 7, 9], dtype=torch.int32),
        "initial_state_indices": PLACES,
    },
    rows="QKV",
)
CULA_STEP = Call(
    "linear_attention_decode",
    (4, HEADS, DIM),
    "(b, h, d) or (b, 1, h, d)",
    "decay_scales",
    "s",
    "s_offsets",
    {
        **{"out": torch.empty(4, HEADS, DIM), "softmax_scale": 1.0, "s_offsets": PLACES},
        **dict.fromkeys(("stride_q", "stride_k", "stride_v", "stride_s", "stride_o"), 0),
        **dict.fromkeys(("HEAD_DIM", "K_SPLIT_DIM", "V_SPLIT_DIM"), DIM),
    },
)
CALLS = (VLLM_PREFILL, VLLM_STEP, SGLANG, CULA_PREFILL, CULA_PACKED, CULA_STEP)


def shown(shape):
    return f"got an array of shape {tuple(shape)} and dtype float32; "


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
class TestArgumentsOfEveryFunction:
    def test_good_ones(self, call):
        call()

    def test_rows(self, call):
        for row in call.rows:
            call.refuses(TypeError, f"{row}: got builtins.list; {ARRAY}", **{row: [1.0]})
            call.refuses(ValueError, f"{row}: got int64; want fp32", **{row: torch.ones(call.shape).long()})
            call.refuses(ValueError, f"{row}: {shown((DIM, DIM))}want {call.dims}", **{row: torch.ones(DIM, DIM)})

    def test_shapes_that_differ(self, call):
        q, k, v = call.rows
        wide, fewer = ([new if x == old else x for x in call.shape] for old, new in ((DIM, 24), (HEADS, 2)))
        with_token = (4, 1, *wide[1:]) if call is CULA_STEP else wide
        call.refuses(ValueError, f"{k}: {shown(with_token)}want the shape of {q}, (", **{k: torch.ones(wide)})
        with pytest.raises(NotImplementedError, match=f"^{v}: got an array .* as many heads as {q}, 3$"):
            call(**{v: torch.ones(fewer)})
        longer = [call.shape[0] + 1, *call.shape[1:]]
        with pytest.raises(ValueError, match=f"^{v}: got an array .* want the shape of {q}, .* but for the last dim"):
            call(**{v: torch.ones(longer)})

    def test_head_dims(self, call):
        narrow = {row: torch.ones(*call.shape[:-1], 12) for row in call.rows}
        if call.slots is not None:
            narrow[call.state] = torch.zeros(SLOTS, HEADS, 12, 12)
        call.refuses(ValueError, f"head_dim of {call.rows[0]}: got 12; want a multiple of 8", **narrow)

    def test_slopes(self, call):
        slopes = call.slopes
        call.refuses(TypeError, f"{slopes}: got builtins.NoneType; {ARRAY}", **{slopes: None})
        call.refuses(ValueError, f"{slopes}: {shown([2])}want one for each of 3 heads", **{slopes: SLOPES[:2]})
        call.refuses(ValueError, f"{slopes}: got [0] = -0.050000; want 0 or more", **{slopes: -SLOPES})

    def test_states(self, call):
        state, shape = call.state, POOL.shape if call.slots is not None else (2, HEADS, DIM, DIM)
        call.refuses(TypeError, f"{state}: got builtins.list; {ARRAY}", **{state: [1.0]})
        call.refuses(ValueError, f"{state}: got ", **{state: torch.zeros(*shape[:3], 8)})
        call.refuses(TypeError, f"{state}: got an array of numpy; want", **{state: torch.zeros(shape).numpy()})
        if call.slots is not None:
            call.refuses(ValueError, f"{state}: got fp16; want fp32 or bf16", **{state: POOL.half()})
            with_gradient = POOL.clone().requires_grad_()
            call.refuses(ValueError, f"{state}: got a tensor that requires grad", **{state: with_gradient})

    def test_slots(self, call):
        if call.slots is None:
            return
        argument = call.slots.replace(".", "_")
        call.refuses(ValueError, f"{call.slots}: got [0] = 6; want a state below 6", **{argument: PLACES + 2})
        call.refuses(ValueError, f"{call.slots}: got fp32 (4)", **{argument: PLACES.float()})
        call.refuses(TypeError, f"{call.slots}: got builtins.list; {ARRAY}", **{argument: [0, 1]})


@pytest.mark.parametrize("call", [VLLM_PREFILL, CULA_PREFILL], ids=lambda call: call.name)
def test_slopes_of_another_library(call):
    text = f"{call.slopes}: got an array of numpy; want one of torch, as "
    call.refuses(TypeError, text, **{call.slopes: SLOPES.numpy()})


def test_sequences():
    starts = torch.tensor([0, 5, 3, 7, 9], dtype=torch.int32)
    SGLANG.refuses(ValueError, "meta.q_offsets: got [2] = 3; want 5 or more", meta_q_offsets=starts)
    SGLANG.refuses(ValueError, "meta.q_offsets: got int64 (5)", meta_q_offsets=starts.long())
    SGLANG.refuses(TypeError, f"meta.q_offsets: got builtins.NoneType; {ARRAY}", meta_q_offsets=None)
    SGLANG.refuses(ValueError, "meta.q_offsets: got [1] = 3; want a sequence of at most 2", meta_max_q_length=2)
    SGLANG.refuses(TypeError, "meta.max_q_length: got 'a'; want an integer", meta_max_q_length="a")
    SGLANG.refuses(TypeError, f"meta.s_scales: got builtins.NoneType; {ARRAY}", meta_s_scales=None)
    text = f"meta.s_scales: {shown([2])}want the shape of meta.s_offsets, (4,)"
    SGLANG.refuses(ValueError, text, meta_s_scales=torch.ones(2))
    CULA_PACKED.refuses(ValueError, "cu_seqlens: got [2] = 3; want 5 or more", cu_seqlens=starts)
    CULA_PACKED.refuses(TypeError, f"cu_seqlens: got builtins.NoneType; {ARRAY}", cu_seqlens=None)
    two = {row: torch.ones(2, 9, HEADS, DIM) for row in "QKV"}
    text = f"Q: {shown((2, 9, HEADS, DIM))}want packed sequences, (1, tokens, h, d)"
    CULA_PACKED.refuses(ValueError, text, **two)


def test_tokens_of_a_step():
    two = {row: torch.ones(4, HEADS, 2, DIM) for row in "qkv"}
    VLLM_STEP.refuses(ValueError, f"q: {shown((4, HEADS, 2, DIM))}want one token, (b, h, 1, d)", **two)
    nine = {row: torch.ones(4, 9, HEADS, DIM) for row in "qkv"} | {"out": torch.empty(4, 9, HEADS, DIM)}
    CULA_STEP.refuses(ValueError, "tokens of q: got 9; want 1 to 8", **nine)


@pytest.mark.parametrize("call", [SGLANG, CULA_PREFILL, CULA_PACKED, CULA_STEP], ids=lambda call: call.name)
def test_scales(call):
    scale = "scale" if call.rows == "QKV" else "softmax_scale"
    call.refuses(TypeError, f"{scale}: got 'x'; want a number", **{scale: "x"})
    call.refuses(ValueError, f"{scale}: got nan; want a finite number", **{scale: float("nan")})


def test_memory_of_a_step():
    CULA_STEP.refuses(ValueError, "out: got fp32 (4, 1, 3, 8)", out=torch.empty(4, HEADS, 8))
    CULA_STEP.refuses(ValueError, "out: got int32; want", out=torch.empty(4, HEADS, DIM, dtype=torch.int32))
    CULA_STEP.refuses(TypeError, f"out: got builtins.NoneType; {ARRAY}", out=None)
    text = f"s: {shown((16, DIM, DIM))}want (slots * 3, dv, d) or (slots, 3, dv, d)"
    CULA_STEP.refuses(ValueError, text, s=torch.zeros(16, DIM, DIM))
