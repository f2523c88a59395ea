# SPDX-License-Identifier: Apache-2.0
"""Problems for context parallel attention: inputs of all tokens, Tessera's keywords and the textbook's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import tessera
import torch
import torch_textbook as textbook
from torch import Tensor

TOKENS = 101  # no multiple of any number of ranks


class Problem(NamedTuple):
    """options: of `tessera.attention` and of the context parallel call. visible, words: of the textbook, which sees
    packed sequences as one. ends: cu_seqlens."""

    shape: tuple[int, int, int, int, int]  # batch, heads of q, of k, dim, dim of v
    options: dict[str, Any]
    words: dict[str, Any]
    ends: tuple[int, ...] | None = None

    @property
    def tokens(self) -> int:
        return TOKENS if self.ends is None else self.ends[-1]


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(problem: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    """q, k, v, dout, dlse, and sinks where the problem has them."""
    b, hq, hkv, d, dv = problem.shape
    rows = (b, problem.tokens) if problem.ends is None else (problem.tokens,)
    made = {
        "q": normal(*rows, hq, d, dtype=dtype, seed=1),
        "k": normal(*rows, hkv, d, dtype=dtype, seed=2),
        "v": normal(*rows, hkv, dv, dtype=dtype, seed=3),
        "dout": normal(*rows, hq, dv, dtype=dtype, seed=4),
        "dlse": normal(*((b, hq) if problem.ends is None else (hq,)), problem.tokens, dtype=torch.float32, seed=5),
    }
    if problem.options.get("sinks") is not None:
        made["sinks"] = normal(hq, dtype=torch.float32, seed=6)
    return made


def sequences(ends: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Sequence and position of each token."""
    lengths = [b - a for a, b in pairwise(ends)]
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.cat([torch.arange(length) for length in lengths])
    return sequence, position


def _visible(
    left: int | None, right: int | None, chunk: int = 0, ends: tuple[int, ...] | None = None
) -> dict[str, Tensor]:
    n = TOKENS if ends is None else ends[-1]
    sequence, position = sequences((0, n) if ends is None else ends)
    shown = sequence[:, None] == sequence
    apart = position[:, None] - position
    if left is not None:
        shown &= apart <= left
    if right is not None:
        shown &= -apart <= right
    if chunk:
        shown &= (position // chunk)[:, None] == position // chunk
    return {"visible": shown[None, None]}


def _kept(b: int, hq: int, ends: tuple[int, ...] | None = None) -> Tensor:
    """The weights of dropout 0.25 with seed 77."""
    if ends is None:
        kept = torch.from_numpy(tessera.dropout_keep((b, hq, TOKENS, TOKENS), 0.25, 77))
    else:
        kept = torch.zeros(1, hq, ends[-1], ends[-1], dtype=torch.bool)
        for s, (begin, end) in enumerate(pairwise(ends)):
            own = tessera.dropout_keep((1, hq, end - begin, end - begin), 0.25, 77, batch_offset=s)
            kept[:, :, begin:end, begin:end] = torch.from_numpy(own)
    return kept * (65536 / round(0.75 * 65536))


SLOPES = 2.0 ** -torch.arange(1, 9, dtype=torch.float32)
APART = (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).abs()
GQA = (2, 8, 2, 32, 24)
MHA = (1, 8, 8, 16, 16)
ENDS = (0, 13, 13, 60, 61, 107)
ONE_LONG = (0, 3, 90)

ALL: dict[str, Problem] = {
    "full": Problem(GQA, {}, {}),
    "causal": Problem(GQA, {"causal": True}, _visible(None, 0)),
    "causal_mha": Problem(MHA, {"causal": True}, _visible(None, 0)),
    "mqa": Problem((2, 8, 1, 32, 32), {"causal": True, "scale": 0.3}, {**_visible(None, 0), "scale": 0.3}),
    "window": Problem(GQA, {"window": (9, 4)}, _visible(9, 4)),
    "causal_window": Problem(MHA, {"causal": True, "window": (17, None)}, _visible(17, 0)),
    "window_behind": Problem(GQA, {"window": (30, -3)}, _visible(30, -3)),
    "chunked": Problem(GQA, {"causal": True, "attention_chunk": 19}, _visible(None, 0, 19)),
    "sinks": Problem(GQA, {"causal": True, "sinks": True}, _visible(None, 0)),
    "sinks_window": Problem(GQA, {"window": (30, -3), "sinks": True}, _visible(30, -3)),
    "softcap": Problem(GQA, {"causal": True, "softcap": 3.0}, {**_visible(None, 0), "softcap": 3.0}),
    "mask_by_name": Problem(GQA, {"mask": "document"}, _visible(None, None, 40)),
    "score_by_name": Problem(GQA, {"score": "soft_clip"}, {"softcap": 4.0}),
    "alibi": Problem(
        GQA, {"causal": True, "alibi_slopes": SLOPES}, {**_visible(None, 0), "bias": -SLOPES[:, None, None] * APART}
    ),
    "dropout": Problem(GQA, {"causal": True, "dropout": 0.25, "seed": 77}, {**_visible(None, 0), "keep": _kept(2, 8)}),
    "packed": Problem((1, 8, 2, 32, 32), {"causal": True}, _visible(None, 0, 0, ENDS), ENDS),
    "packed_full": Problem((1, 8, 4, 32, 24), {}, _visible(None, None, 0, ENDS), ENDS),
    "packed_window": Problem((1, 8, 8, 16, 16), {"window": (5, 2)}, _visible(5, 2, 0, ENDS), ENDS),
    "packed_long": Problem(
        (1, 8, 2, 32, 32), {"causal": True, "sinks": True}, _visible(None, 0, 0, ONE_LONG), ONE_LONG
    ),
    "packed_dropout": Problem(
        (1, 8, 2, 32, 32),
        {"causal": True, "dropout": 0.25, "seed": 77},
        {**_visible(None, 0, 0, ENDS), "keep": _kept(1, 8, ENDS)},
        ENDS,
    ),
}


def options_on(problem: Problem, device: torch.device | str) -> dict[str, Any]:
    """The problem's options with their tensors on a device."""
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in problem.options.items()}


def single(problem: Problem, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """What one process computes of all tokens: out, lse, dq, dk, dv, dsinks."""
    leaves = {name: given[name].clone().requires_grad_() for name in ("q", "k", "v", "sinks") if name in given}
    device = given["q"].device
    options = options_on(problem, device) | ({"sinks": leaves["sinks"]} if "sinks" in leaves else {})
    if problem.ends is not None:
        ends = torch.tensor(problem.ends, dtype=torch.int32, device=device)
        longest = max(b - a for a, b in pairwise(problem.ends))
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    q, k, v = (leaves[name] for name in "qkv")
    out, lse = tessera.attention(q, k, v, return_lse=True, **options)
    return _with_gradients(out, lse, leaves, given)


def _with_gradients(out: Tensor, lse: Tensor, leaves: dict[str, Tensor], given: dict[str, Tensor]) -> dict[str, Tensor]:
    grads = torch.autograd.grad(
        (out, lse), tuple(leaves.values()), (given["dout"].to(out.dtype), given["dlse"].to(lse.dtype))
    )
    found = {"out": out.detach(), "lse": lse.detach()}
    return found | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def plain(
    problem: Problem, given: dict[str, Tensor], dtype: torch.dtype, order: Tensor | None = None
) -> dict[str, Tensor]:
    """The textbook's, in a dtype."""
    leaves = {name: given[name].to(dtype).requires_grad_() for name in ("q", "k", "v", "sinks") if name in given}
    packed = problem.ends is not None
    q, k, v = (leaves[name][None] if packed else leaves[name] for name in "qkv")
    out, lse = textbook.attend(q, k, v, sinks=leaves.get("sinks"), order=order, **problem.words)
    return _with_gradients(out[0] if packed else out, lse[0] if packed else lse, leaves, given)
