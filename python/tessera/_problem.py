# SPDX-License-Identifier: Apache-2.0
"""From a call's features, shapes and dtypes to its problem and its outputs' shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _core
from ._features import Features

Shape = tuple[int, ...]

FORWARD = "forward"
BACKWARD = "backward"


class Shapes(NamedTuple):
    """Everything of a call's tensors that its plan depends on, but for dtypes. Members of shapes may be symbolic.

    slots: names of the tensors that are bound besides q, k and v; tensors: their shapes, in the same order.
    longest: max_seqlen_q, max_seqlen_k, max_seqlen_k2; 0: the shapes say it.
    """

    slots: tuple[str, ...]
    longest: tuple[int, int, int]
    q: Shape
    k: Shape
    v: Shape
    tensors: tuple[Shape, ...]

    def by_slot(self) -> dict[str, Shape]:
        return dict(zip(self.slots, self.tensors, strict=True))


class Sizes(NamedTuple):
    """Sizes of a problem, from shapes; every member may be symbolic."""

    batch: Any
    seqlen_q: Any
    seqlen_k: Any
    seqlen_k2: Any  # None without a second source
    heads_q: Any
    heads_kv: Any


def _want_rank(name: str, shape: Shape, rank: int, dims: str) -> None:
    if len(shape) != rank:
        raise ValueError(f"{name}: got {len(shape)} dimensions, shape {tuple(shape)}; want {dims}")


def _keys_length(suffix: str, k: Shape, shapes: dict[str, Shape], given: int) -> Any:
    """Longest key sequence of a source; checks the rank of its tensor."""
    name = "k" + suffix
    if "page_table" + suffix in shapes or "page_indptr" + suffix in shapes:
        _want_rank(name, k, 4, "(pages, page_size, heads_kv, dim)")
        if given:
            return given
        if "page_table" + suffix in shapes:
            table = shapes["page_table" + suffix]
            _want_rank("page_table" + suffix, table, 2, "(batch, pages a sequence)")
            return table[1] * k[1]
        return shapes["page_indices" + suffix][0] * k[1]
    if "cu_seqlens_k" + suffix in shapes:
        _want_rank(name, k, 3, "(tokens, heads_kv, dim)")
        return given or k[0]
    _want_rank(name, k, 4, "(batch, seqlen_k, heads_kv, dim)")
    return k[1]


def sizes_of(shapes: Shapes) -> Sizes:
    """Raises ValueError for a wrong number of dimensions."""
    q, k, bound = shapes.q, shapes.k, shapes.by_slot()
    most_q, most_k, most_k2 = shapes.longest
    if "cu_seqlens_q" in bound:
        _want_rank("q", q, 3, "(tokens, heads_q, dim)")
        _want_rank("cu_seqlens_q", bound["cu_seqlens_q"], 1, "(batch + 1)")
        batch, seqlen_q = bound["cu_seqlens_q"][0] - 1, most_q or q[0]
    else:
        _want_rank("q", q, 4, "(batch, seqlen_q, heads_q, dim), or (tokens, heads_q, dim) with cu_seqlens_q")
        batch, seqlen_q = q[0], q[1]
    seqlen_k = _keys_length("", k, bound, most_k)
    seqlen_k2 = _keys_length("2", bound["k2"], bound, most_k2) if "k2" in bound else None
    return Sizes(batch, seqlen_q, seqlen_k, seqlen_k2, q[-2], k[-2])


_MOST_HEADS = 128  # of any model so far


def layout_hint(shapes: Shapes) -> str | None:
    """What to say of dense q and k that look like (batch, heads, seqlen, dim); None for what does not.

    They do when k would have more heads than any model, and its other dimension could be a number of heads.
    """
    q, k = shapes.q, shapes.k
    dense = not any(slot.startswith(("cu_seqlens_k", "page_")) for slot in shapes.slots)
    if not dense or len(q) != 4 or len(k) != 4 or not k[1] <= _MOST_HEADS < k[2]:
        return None
    return (
        f"k of shape {tuple(k)} has {k[1]} keys of {k[2]} heads as (batch, seqlen, heads, dim), which is wanted; "
        "if it is (batch, heads, seqlen, dim), pass q, k and v with dimensions 1 and 2 exchanged"
    )


def tile_grid(sizes: Sizes, block: tuple[int, int]) -> tuple[Any, Any]:
    """(query blocks, key blocks) of the problem; the second source's key blocks follow the first's."""
    key_blocks = -(-sizes.seqlen_k // block[1])
    if sizes.seqlen_k2 is not None:
        key_blocks = key_blocks + -(-sizes.seqlen_k2 // block[1])
    return -(-sizes.seqlen_q // block[0]), key_blocks


def out_dtype_of(q_dtype: str) -> str:
    """That of out, unless the call says: that of q, and bf16 for 8 bits."""
    return "bf16" if q_dtype in ("e4m3", "e5m2", "int8") else q_dtype


def forward_outputs(features: Features, shapes: Shapes, q_dtype: str) -> tuple[tuple[str, Shape, str], ...]:
    """(slot, shape, Tessera's dtype name) of what a forward writes: o, then lse, residual, mass and next list as far as
    asked.

    Only arithmetic, so that sizes may be symbolic.
    """
    q = shapes.q
    out: tuple[tuple[str, Shape, str], ...] = (("o", (*q[:-1], shapes.v[-1]), features.out or out_dtype_of(q_dtype)),)
    if features.lse:
        out += (("lse", (q[1], q[0]) if len(q) == 3 else (q[0], q[2], q[1]), "fp32"),)
    if "residual" in features.fields:
        out += (("o_residual", out[0][1], "int8"),)
    mass, following = features.fields.get("mass"), features.fields.get("next")
    if mass is None and following is None:
        return out
    size = sizes_of(shapes)
    query_blocks, key_blocks = tile_grid(size, features.block)
    rows = (size.batch, size.heads_q, query_blocks)
    if mass is not None:
        out += (("tile_mass", (*rows, key_blocks), "fp32"),)
    if following == "indices":
        out += (("next_counts", rows, "int32"), ("next_indices", (*rows, key_blocks), "int32"))
    elif following == "bitmask":
        out += (("next_bits", (*rows, -(-key_blocks // 32)), "uint32"),)
    return out


def backward_outputs(
    shapes: Shapes, dtypes: tuple[str, str, str], grad_dtype: str | None = None
) -> tuple[tuple[str, Shape, str], ...]:
    """(slot, shape, dtype name) of what a backward writes: dq, dk, dv, then dsink, dk2, dv2 where there is an input.

    `dtypes` are those of q, k, v; `grad_dtype` "fp32" overrides them.
    """
    names = [grad_dtype or name for name in dtypes]
    out = [("dq", tuple(shapes.q), names[0]), ("dk", tuple(shapes.k), names[1]), ("dv", tuple(shapes.v), names[2])]
    by_slot = shapes.by_slot()
    if "sink" in by_slot:
        out.append(("dsink", tuple(by_slot["sink"]), "fp32"))
    if "k2" in by_slot:
        out += [("dk2", tuple(by_slot["k2"]), names[1]), ("dv2", tuple(by_slot["v2"]), names[2])]
    return tuple(out)


def _list_of(slot: str, form: str, shapes: dict[str, Shape], sizes: Sizes) -> tuple[str, str, bool, bool]:
    """A list's form, heads, whether it is for each sequence, whether it has full tiles. `slot`: "" or "bwd_"."""
    shape = shapes[slot + ("tile_bits" if form == "bitmask" else "tile_counts")]
    rank, dims = (4, "blocks, words") if form == "bitmask" else (3, "blocks")
    _want_rank(f"{slot}tiles", shape, rank, f"(batch or 1, heads, {dims})")
    heads = {1: "1", sizes.heads_kv: "kv", sizes.heads_q: "q"}.get(shape[1])
    if heads is None:
        raise ValueError(f"{slot}tiles: got {shape[1]} heads; want {sizes.heads_q} (q), {sizes.heads_kv} (kv) or 1")
    full = slot + ("full_bits" if form == "bitmask" else "full_counts") in shapes
    return form, heads, shape[0] == sizes.batch, full


def _source(suffix: str, k: Shape, shapes: dict[str, Shape], seqlen: int) -> dict[str, Any]:
    """The fields of one source of keys."""
    if "page_table" + suffix in shapes or "page_indptr" + suffix in shapes:
        layout = "table" if "page_table" + suffix in shapes else "csr"
        return {"layout": layout, "seqlen": seqlen, "page_size": k[1], "pages": k[0]}
    seqused = "seqused_k" + suffix in shapes
    if "cu_seqlens_k" + suffix in shapes:
        return {"layout": "varlen", "seqlen": seqlen, "total": k[0], "seqused": seqused}
    return {"layout": "dense", "seqlen": seqlen, "seqused": seqused}


def problem_for(
    kind: str,
    features: Features,
    shapes: Shapes,
    dtypes: tuple[str, str, str, str],
    extra: tuple[str, ...] = (),
) -> _core.Problem:
    """`dtypes` of q, k, v, o; `extra`: what else a backward is asked for (dlse, grad_fp32, accumulate)."""
    by_slot = shapes.by_slot()
    size = sizes_of(shapes)
    fields = dict(features.fields) if kind == FORWARD else features.of_backward()
    for name, prefix in (("list", ""), ("bwd_list", "bwd_")):
        form = fields.pop(name, None)
        if form is not None and not (prefix and kind == FORWARD):
            fields[name] = _list_of(prefix, form, by_slot, size)
    fields |= dict.fromkeys(extra, True)
    if kind == BACKWARD:
        fields["backward"] = True
    if "cu_seqlens_q" in by_slot:
        fields |= {"q_layout": "varlen", "total_q": shapes.q[0]}
    if "k2" in by_slot:
        fields["kv2"] = _source("2", by_slot["k2"], by_slot, size.seqlen_k2)
    q_type, k_type, v_type, o_type = dtypes
    return _core.Problem(
        "attention",
        batch=size.batch,
        seqlen_q=size.seqlen_q,
        heads_q=size.heads_q,
        heads_kv=size.heads_kv,
        head_dim_qk=shapes.q[-1],
        head_dim_v=shapes.v[-1],
        q_type=q_type,
        k_type=k_type,
        v_type=v_type,
        o_type=o_type,
        kv=_source("", shapes.k, by_slot, size.seqlen_k),
        seqused_q="seqused_q" in by_slot,
        alibi="alibi_slopes" in by_slot,
        sink="sink" in by_slot,
        smooth="k_mean" in by_slot,
        **fields,
    )
