# SPDX-License-Identifier: Apache-2.0
"""Arguments of a context parallel call: what is refused, what ranks must agree on, what the schedules get."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._checks import pair, whole
from .partial import Asked
from .reach import Mask
from .shards import Layout
from .wire import Team

if TYPE_CHECKING:
    from ..native_sparse import NsaCall
    from .api import ContextParallel
    from .native_sparse import Parameters

Masks = tuple[bool, "tuple[int | None, int | None] | None", int]  # causal, window, attention_chunk


class Given(NamedTuple):
    """The arguments of a call on this rank, as they came. options: keywords of `tessera.attention` that are no tensors
    and no mask of positions."""

    q: Tensor
    k: Tensor
    v: Tensor
    masks: Masks
    options: dict[str, Any]
    slopes: Tensor | None
    sinks: Tensor | None
    seed: Any
    return_lse: bool


def mask_of(masks: Masks) -> Mask:
    causal, window, chunk = masks
    left, right = (None, None) if window is None else pair("window", window, "(left, right), integers or None")
    if causal:
        right = 0 if right is None else min(right, 0)
    return Mask(left, right, whole("attention_chunk", chunk))


def asked_of(
    masks: Masks,
    options: dict[str, Any],
    slopes: Tensor | None,
    sinks: Tensor | None,
    packed: bool,
    heads: int,
    keeps_residual: bool,
) -> Asked:
    given = {name: value for name, value in options.items() if value is not None}
    return Asked(
        mask_of(masks),
        given,
        packed,
        heads,
        slopes=None if slopes is None else slopes.detach(),
        sinks=sinks,
        keeps_residual=keeps_residual,
    )


def refuse_bad_tensors(layout: Layout, rank: int, given: Given) -> Exception | None:
    """What this rank's own arguments are refused for."""
    q, k, v, masks, options, slopes, sinks, *_ = given
    rank_of, rows = (3, layout.rows(rank)) if layout.packed else (4, layout.rows(rank))
    at = 0 if layout.packed else 1
    want = f"(rows, heads, dim) with {rows} rows" if layout.packed else f"(batch, rows, heads, dim) with {rows} rows"
    try:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name}: got {type(x).__name__}; want a torch.Tensor")
            if x.dim() != rank_of or x.shape[at] != rows:
                raise ValueError(f"{name}: got shape {tuple(x.shape)}; want {want}, this rank's of {layout}")
            if x.device != q.device:
                raise ValueError(f"{name}: got a tensor on {x.device}; want one on {q.device}, as q is")
        if k.shape[:-1] != v.shape[:-1] or k.shape[-1] != q.shape[-1] or (not layout.packed and len(k) != len(q)):
            shapes = tuple(tuple(x.shape) for x in (q, k, v))
            raise ValueError(f"k: got {shapes[1]} beside q {shapes[0]} and v {shapes[2]}; want shapes that fit")
        if q.shape[-2] == 0 or k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
            raise ValueError(f"q: got {q.shape[-2]} heads; want a multiple of the {k.shape[-2]} of k")
        for name, by_head in (("alibi_slopes", slopes), ("sinks", sinks)):
            x = q if by_head is None else by_head
            if by_head is not None and (x.dtype != torch.float32 or x.shape[-1] != q.shape[-2] or x.device != q.device):
                got = f"{x.dtype} {tuple(x.shape)} on {x.device}"
                raise ValueError(f"{name}: got {got}; want torch.float32 ({q.shape[-2]},) on {q.device}")
        if slopes is not None and slopes.requires_grad:
            raise NotImplementedError("alibi_slopes: got a tensor that requires grad; want one that does not")
        for name in ("score", "mask"):
            if options.get(name) is not None and not isinstance(options[name], str):
                raise TypeError(f"{name}: got {type(options[name]).__name__}; want a name, of a built-in or registered")
        if options.get("dropout") and (options.get("score") or options.get("mask")):
            raise NotImplementedError("dropout: got one with score or mask; want one of them when heads are spread")
        mask_of(masks)
    except (TypeError, ValueError, NotImplementedError) as error:
        return error
    return None


def summary_of(cp: ContextParallel, given: Given) -> tuple[dict[str, str], Any]:
    """(argument by argument what must be the same on every rank, a key of all of it but the seed)."""
    q, k, v, masks, options, slopes, sinks, seed, return_lse = given
    layout = cp.layout
    lengths = hashlib.sha256(repr(layout.lengths).encode()).hexdigest()[:16]
    found = {
        "cu_seqlens" if layout.packed else "seqlen": f"{layout.lengths if len(layout.lengths) < 9 else lengths}",
        "balance": layout.balance,
        "multiple": f"{layout.multiple}",
        "method": cp.method,
    }
    for name, x in (("q", q), ("k", k), ("v", v)):
        shape = tuple(x.shape[1:]) if layout.packed else (x.shape[0], *x.shape[2:])
        words = "heads and dim" if layout.packed else "batch, heads and dim"
        found[name] = f"{str(x.dtype).removeprefix('torch.')} with {words} {shape}"
    found |= {"causal": f"{masks[0]}", "window": f"{masks[1]}", "attention_chunk": f"{masks[2]}"}
    found |= {name: f"{value}" for name, value in options.items()}
    found |= {
        name: "None" if x is None else f"{tuple(x.shape)}" for name, x in (("alibi_slopes", slopes), ("sinks", sinks))
    }
    found["return_lse"] = f"{return_lse}"
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    found["requires_grad"] = f"{needs_grad}"
    key = tuple(found.items())
    found["seed"] = f"{seed}" if isinstance(seed, (int, tuple, list)) or seed is None else "a tensor"
    return found, key


def sparse_summary(
    cp: ContextParallel, given: Given, call: NsaCall, parameters: Parameters
) -> tuple[dict[str, str], Any]:
    """The same of `nsa`."""
    found, _ = summary_of(cp, given)
    found |= {"call": "nsa", "preset": found["preset"]}
    found |= {name: f"{value}" for name, value in call.options._asdict().items()}
    found["tile"] = f"{call.tile}"
    for name, x in zip(parameters._fields, parameters, strict=True):
        # Of gates the rows are each rank's own.
        shape = None if x is None else tuple(x.shape[-2:] if name == "gates" else x.shape)
        found[name] = "None" if x is None else f"{str(x.dtype).removeprefix('torch.')} {shape}"
    tensors = (given.q, given.k, given.v, *parameters)
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    found["requires_grad"] = f"{needs_grad}"
    return found, tuple(found.items())


def refuse_bad_gates(layout: Layout, q: Tensor, parameters: Parameters) -> None:
    """Raises ValueError for parameters of nsa that no rows of this rank have."""
    if parameters.gate_weight is not None and parameters.gates is not None:
        raise ValueError("gates: got both gates and gate_weight; want one of them, or neither for 1/3 each")
    if (parameters.k_projection is None) != (parameters.v_projection is None):
        missing = "k_projection" if parameters.k_projection is None else "v_projection"
        raise ValueError(f"{missing}: got None; want projections of both keys and values, or of neither")
    gates, want = parameters.gates, (*q.shape[:-1], 3)
    if gates is not None and tuple(gates.shape) != want:
        raise ValueError(f"gates: got shape {tuple(gates.shape)}; want {want}, of this rank's rows of {layout}")


def decode_summary(q: Tensor, sinks: Tensor | None, out_dtype: Any, options: dict[str, Any]) -> dict[str, str]:
    """What must be the same on every rank of a decode step. Where its keys lie is each rank's own."""
    found = {"decode: q": f"{str(q.dtype).removeprefix('torch.')} {tuple(q.shape)}", "out_dtype": f"{out_dtype}"}
    found["sinks"] = "None" if sinks is None else f"{tuple(sinks.shape)}"
    plain = (bool, int, float, str, tuple)
    return found | {name: f"{value}" for name, value in sorted(options.items()) if type(value) in plain}


def seed_of(team: Team, seed: Any) -> Any:
    """The seed, or one that the first rank draws from torch's default generator."""
    if seed is not None:
        return seed
    drawn = torch.randint(0, 2**62, (1,), dtype=torch.int64).to(team.control)
    return int(team.gather(drawn, "the drawing of a seed")[0])
