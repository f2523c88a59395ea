# SPDX-License-Identifier: Apache-2.0
"""Lightning attention's decode and prefill under the names that serving engines call, over ``tessera.linear_decode``
and ``tessera.linear_chunk``.

================================  =====================================================================
vLLM                              ``lightning_attention``, ``linear_decode_forward_triton``
SGLang                            ``seg_la_fwd`` with ``SegLaMeta``; vLLM's two as well
cuLA                              ``lightning_attn_fwd``, ``lightning_attn_fwd_varlen``, ``linear_attention_decode``
================================  =====================================================================

For all of them S ← exp(−slope) · S + k ⊗ v for each token and head, and the token's result is (scale · q) · S with the
new S. vLLM's have no scale, cuLA's take it as an argument, SGLang's default is 1 / sqrt(d).

- Slopes are fp32, positive, (h), (h, 1, 1) or (1, h, 1, 1).
- Pools are written in place, fp32 or bf16, with any strides between slots: (slots, h, d, dv) for vLLM and SGLang,
  (slots, h, dv, d) for cuLA.
- A negative slot is padding: no state is read or written. Where the engines leave what was in memory, its rows of the
  result are 0 in a decode step; in a prefill they are those of a sequence that begins with zeros.
- Head dims and dtypes are those of ``tessera.linear_decode``, on a GPU and on the CPU. Arguments that tune a kernel
  (``block_size``, ``chunk_size``, ``persistent``, ``decouple``, strides) change nothing and are accepted.
- Only ``lightning_attention`` and ``lightning_attn_fwd`` have gradients, of q, k, v and the first state.
- Raises ValueError, TypeError or NotImplementedError naming the argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

from tessera import linear_attention, linear_chunk, linear_decode
from tessera._checks import real
from tessera._libraries import library_of

from .arguments import Array, array_module, is_torch, refuse, rename

__all__ = [
    "SegLaMeta",
    "lightning_attention",
    "lightning_attn_fwd",
    "lightning_attn_fwd_varlen",
    "linear_attention_decode",
    "linear_decode_forward_triton",
    "seg_la_fwd",
]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _renaming(
    q: str = "q", k: str = "k", v: str = "v", **names: str
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Makes errors of Tessera's functions name the decorated function's arguments. The keywords are Tessera's names,
    their values those of the decorated function."""
    names |= {"q": q, "k": k, "v": v, "q_type": q, "k_type": k, "v_type": v}
    names |= {"head_dim_qk": f"head_dim of {q}", "head_dim_v": f"head_dim of {v}"}
    names |= {"seqlen_q": f"tokens of {q}", "heads_q": f"heads of {q}", "o": "out", "o_type": "out"}
    if "state" in names:
        names["state_type"] = names["state"]

    def decorate(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @wraps(call)
        def renaming(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
            try:
                return call(*arguments, **options)
            except (NotImplementedError, TypeError, ValueError) as error:
                rename(error, names)
                raise

        return renaming

    return decorate


@_renaming(decay_slopes="ed", initial_state="kv_history")
def lightning_attention(
    q: Array, k: Array, v: Array, ed: Array, block_size: int = 256, kv_history: Array | None = None
) -> tuple[Array, Array]:
    """vLLM's prefill: q, k (b, h, n, d), v (b, h, n, dv), slopes `ed`, no scale; kv_history (b, h, d, dv) or None for
    zeros, which is not written.

    Returns out (b, h, n, dv), a view of memory with the heads inside, and kv fp32 (b, h, 1, d, dv), whose last entry of
    dimension 2 is the state after the last token: of vLLM's states at block ends the one that callers keep.
    """
    _check_rows(q, k, v, "(b, h, n, d)")
    slopes = _slopes("ed", ed, q.shape[1])
    final: Array
    out, final = linear_attention(
        _heads_inside(q),
        _heads_inside(k),
        _heads_inside(v),
        slopes,
        scale=1.0,
        initial_state=kv_history,
        output_final_state=True,
    )
    return _heads_inside(out), final[:, :, None]


@_renaming(state="kv_caches", decay_slopes="slope_rate", state_slots="slot_idx")
def linear_decode_forward_triton(
    q: Array, k: Array, v: Array, kv_caches: Array, slope_rate: Array, slot_idx: Array, BLOCK_SIZE: int = 32
) -> Array:
    """vLLM's step of one token: q, k, v (b, h, 1, d), pool kv_caches (slots, h, d, dv), no scale.

    Returns (b, h · dv) in q's dtype.
    """
    _check_rows(q, k, v, "(b, h, 1, d)")
    batch, heads, tokens, _ = q.shape
    if tokens != 1:
        refuse("q", q, "one token, (b, h, 1, d)", ValueError)
    library_of(kv_caches, "kv_caches")
    slopes = _slopes("slope_rate", slope_rate, heads)
    rows = (_heads_inside(q), _heads_inside(k), _heads_inside(v))
    out = linear_decode(*rows, kv_caches, slopes, state_slots=slot_idx, scale=1.0, layout="kv")
    return out.reshape(batch, heads * v.shape[-1])


@dataclass
class SegLaMeta:
    """Where the sequences of a `seg_la_fwd` are; its fields are SGLang's. `q_lengths`, `max_q_length` and the strides
    are not needed here and may be None."""

    batch_size: int
    max_q_length: int | None
    q_offsets: Array  # int32 (batch + 1): first token of each sequence
    s_offsets: Array  # int32 or int64 (batch): slots of the pool, negative for padding
    q_lengths: Array | None
    s_scales: Array  # (batch): 0 where a sequence begins with zeros, 1 where with the state in its slot
    s_offsets_stride: int = 0
    q_offsets_stride: int = 0
    s_scales_stride: int = 0
    decay_scales_stride: int = 0
    mask: Array | None = None


@_renaming(
    state="s",
    decay_slopes="decay_scales",
    state_slots="meta.s_offsets",
    dest_slots="meta.s_offsets",
    cu_seqlens="meta.q_offsets",
    cu_seqlens_q="meta.q_offsets",
    max_seqlen="meta.max_q_length",
    scale="softmax_scale",
)
def seg_la_fwd(
    q: Array,
    k: Array,
    v: Array,
    s: Array,
    decay_scales: Array,
    meta: SegLaMeta,
    caches: Array | None = None,
    cache_indices: Array | None = None,
    softmax_scale: float | None = None,
    decouple: bool = False,
    track_lens: Array | None = None,
    track_state_indices: Array | None = None,
) -> Array:
    """SGLang's decode and prefill of packed sequences: q, k, v (tokens, h, d), pool s (slots, h, d, dv).

    One token for each sequence is a decode step, which continues the states in the slots and ignores s_scales, as
    SGLang's does. Otherwise a sequence begins with its state or, where s_scales is 0, with zeros; the states after its
    last token go into the slots. Returns (tokens, h, dv) in q's dtype.

    Raises NotImplementedError for `caches` and `meta.mask`, states after each draft token and trees of them (instead:
    `tessera.linear_decode` with a ring, whose cursor steps back), and for `track_lens`.
    """
    for name, given in (("caches", caches), ("meta.mask", meta.mask), ("track_lens", track_lens)):
        if given is not None:
            refuse(name, given, "None; of draft tokens, tessera.linear_decode with a ring")
    _check_rows(q, k, v, "(tokens, h, d)")
    library_of(s, "s")
    slopes, scale = _slopes("decay_scales", decay_scales, q.shape[1]), _scale("softmax_scale", softmax_scale)
    if q.shape[0] == meta.batch_size:
        rows = (q[:, None], k[:, None], v[:, None])
        return linear_decode(*rows, s, slopes, state_slots=meta.s_offsets, scale=scale, layout="kv")[:, 0]
    for name in ("q_offsets", "s_offsets", "s_scales"):
        library_of(getattr(meta, name), f"meta.{name}")
    places = tuple(meta.s_offsets.shape)
    if tuple(meta.s_scales.shape) != places:
        refuse("meta.s_scales", meta.s_scales, f"the shape of meta.s_offsets, {places}", ValueError)
    module, _ = array_module(q)
    return linear_chunk(
        q,
        k,
        v,
        s,
        slopes,
        state_slots=module.where(meta.s_scales != 0, meta.s_offsets, -1),
        dest_slots=meta.s_offsets,
        cu_seqlens=meta.q_offsets,
        max_seqlen=meta.max_q_length,
        scale=scale,
        layout="kv",
    )


@_renaming("Q", "K", "V", decay_slopes="decay")
def lightning_attn_fwd(
    Q: Array,
    K: Array,
    V: Array,
    decay: Array,
    scale: float = 1.0,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Array, Array | None]:
    """cuLA's prefill: Q, K (b, t, h, d), V (b, t, h, dv), slopes `decay`, initial_state (b, h, dv, d) or None.

    Returns out (b, t, h, dv) and the last states, fp32 (b, h, dv, d), or None. Q and K of fewer heads than V are
    refused.
    """
    _check_rows(Q, K, V, "(b, t, h, d)", ("Q", "K", "V"))
    return linear_attention(
        Q,
        K,
        V,
        _slopes("decay", decay, Q.shape[2]),
        scale=_scale("scale", scale),
        initial_state=initial_state,
        output_final_state=output_final_state,
        layout="vk",
    )


@_renaming(
    "Q",
    "K",
    "V",
    state="state_pool",
    decay_slopes="decay",
    state_slots="initial_state_indices",
    cu_seqlens_q="cu_seqlens",
)
def lightning_attn_fwd_varlen(
    Q: Array,
    K: Array,
    V: Array,
    decay: Array,
    cu_seqlens: Array,
    scale: float = 1.0,
    state_pool: Array | None = None,
    initial_state_indices: Array | None = None,
    chunk_size: int = 64,
    persistent: bool = True,
) -> tuple[Array, Array]:
    """cuLA's prefill of packed sequences: Q, K (1, tokens, h, d), V (1, tokens, h, dv), cu_seqlens int32 (b + 1).

    state_pool (slots, h, dv, d): where `initial_state_indices` (b), by default 0, 1, …, says, a sequence finds its
    first state and leaves its last one. Without a pool one of zeros is made. Returns out (1, tokens, h, dv) and the
    pool.
    """
    _check_rows(Q, K, V, "(1, tokens, h, d)", ("Q", "K", "V"))
    if Q.shape[0] != 1:
        refuse("Q", Q, "packed sequences, (1, tokens, h, d)", ValueError)
    library_of(cu_seqlens, "cu_seqlens")
    pool = state_pool
    if pool is None:
        module, where = array_module(Q)
        shape = (cu_seqlens.shape[0] - 1, V.shape[2], V.shape[3], Q.shape[3])
        pool = module.zeros(shape, dtype=module.float32, **where)
    slopes, slots = _slopes("decay", decay, Q.shape[2]), initial_state_indices
    rows = (Q[0], K[0], V[0])
    out = linear_chunk(*rows, pool, slopes, state_slots=slots, cu_seqlens=cu_seqlens, scale=_scale("scale", scale))
    return out[None], pool


@_renaming(state="s", decay_slopes="decay_scales", state_slots="s_offsets", scale="softmax_scale")
def linear_attention_decode(
    q: Array,
    k: Array,
    v: Array,
    s: Array,
    out: Array,
    softmax_scale: float,
    stride_q: int,
    stride_k: int,
    stride_v: int,
    stride_s: int,
    stride_o: int,
    s_offsets: Array,
    decay_scales: Array,
    HEAD_DIM: int,
    K_SPLIT_DIM: int,
    V_SPLIT_DIM: int,
) -> None:
    """cuLA's step of one token, into `out`: q, k, v (b, h, d), or with a dimension for the token, (b, 1, h, d); out
    likewise, or (1, b, h, dv); pool s (slots, h, dv, d), also as (slots · h, dv, d).

    A sequence's state is in the slot that `s_offsets` says, also where versions of cuLA take that of its number. The
    arrays themselves say what their strides and dims are.
    """
    q, k, v = _with_token("q", q), _with_token("k", k), _with_token("v", v)
    _check_rows(q, k, v, "(b, 1, h, d)")
    batch, _, heads, _ = q.shape
    library_of(out, "out")
    if len(out.shape) == 3 or tuple(out.shape[:2]) == (1, batch):
        out = (out if len(out.shape) == 3 else out[0])[:, None]
    library_of(s, "s")
    pool = s
    if len(s.shape) == 3:
        if s.shape[0] % heads:
            refuse("s", s, f"(slots * {heads}, dv, d) or (slots, {heads}, dv, d)", ValueError)
        pool = s.reshape(s.shape[0] // heads, heads, *s.shape[1:])  # splits: always a view
    slopes, scale = _slopes("decay_scales", decay_scales, heads), _scale("softmax_scale", softmax_scale)
    linear_decode(q, k, v, pool, slopes, state_slots=s_offsets, scale=scale, out=out)


def _check_rows(q: Array, k: Array, v: Array, dims: str, names: tuple[str, str, str] = ("q", "k", "v")) -> None:
    """Refuses what is no array of dimensions `dims`, and shapes that differ, but for v's last dimension."""
    rank = dims.count(",") + 1
    for name, array in zip(names, (q, k, v), strict=True):
        library_of(array, name)
        if len(array.shape) != rank:
            refuse(name, array, dims, ValueError)
    shape = tuple(q.shape)
    if tuple(k.shape) != shape:
        refuse(names[1], k, f"the shape of {names[0]}, {shape}", ValueError)
    if tuple(v.shape[:-1]) != shape[:-1]:
        axis = dims.split(", ").index("h")
        if v.shape[axis] != shape[axis]:
            refuse(names[2], v, f"as many heads as {names[0]}, {shape[axis]}")
        refuse(names[2], v, f"the shape of {names[0]}, {shape}, but for the last dimension", ValueError)


def _with_token(name: str, x: Array) -> Array:
    """(b, h, d) or (b, 1, h, d) as (b, 1, h, d): a view."""
    library_of(x, name)
    if len(x.shape) not in (3, 4):
        refuse(name, x, "(b, h, d) or (b, 1, h, d)", ValueError)
    return x if len(x.shape) == 4 else x[:, None]


def _scale(name: str, scale: float | None) -> float | None:
    return None if scale is None else real(name, scale)


def _slopes(name: str, slopes: Array, heads: int) -> Array:
    """fp32 (h): a view, or a copy of other types. `name` is for errors."""
    library_of(slopes, name)
    flat = slopes.reshape(-1)
    if flat.shape[0] != heads:
        refuse(name, slopes, f"one for each of {heads} heads", ValueError)
    module, _ = array_module(slopes)
    return flat if flat.dtype == module.float32 else module.asarray(flat, dtype=module.float32)


def _heads_inside(x: Array) -> Array:
    """(b, h, n, d) as (b, n, h, d), and back: a view."""
    return x.transpose(1, 2) if is_torch(x) else x.swapaxes(1, 2)
