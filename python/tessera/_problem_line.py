# SPDX-License-Identifier: Apache-2.0
"""From a call's features, shapes and dtypes to its problem's line (docs/grammar.md) and its outputs' shapes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

Shape = tuple[int, ...]

FORWARD = "forward"
BACKWARD = "backward"


class Features(NamedTuple):
    """A features text, taken apart."""

    words: tuple[str, ...]  # of the line, less those below
    lse: bool
    mass: str | None
    next: str | None
    block: tuple[int, int]
    list_form: str | None
    bwd_list_form: str | None
    out: str | None  # Tessera's name of the output's dtype; None: that of q
    threads: int
    wishes: str


# Words that only a forward has, and which of them an output needs.
_FORWARD_ONLY = ("lse", "mass", "mass_lse", "next", "threshold", "metadata")


@lru_cache(maxsize=4096)
def features_of(text: str) -> Features:
    """Takes a features text apart; see `tessera._arguments.Call`."""
    words: list[str] = []
    wishes: list[str] = []
    taken: dict[str, str] = {}
    for word in text.split():
        key, _, value = word.partition("=")
        if word.startswith("wish:"):
            wishes.append(word[5:])
        elif key in ("lse", "mass", "next", "block", "list", "bwd_list", "out", "threads"):
            taken[key] = value
        else:
            words.append(word)
    rows, _, keys = taken.get("block", "64x64").partition("x")
    return Features(
        words=tuple(words),
        lse="lse" in taken,
        mass=taken.get("mass"),
        next=taken.get("next"),
        block=(int(rows), int(keys)),
        list_form=taken.get("list"),
        bwd_list_form=taken.get("bwd_list"),
        out=taken.get("out"),
        threads=int(taken.get("threads", "0")),
        wishes=" ".join(wishes),
    )


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


def sizes_of(q: Shape, k: Shape, shapes: dict[str, Shape], sizes: tuple[int, int, int]) -> Sizes:
    """`shapes`: of the bound tensors by slot. Raises ValueError for a wrong number of dimensions."""
    if "cu_seqlens_q" in shapes:
        _want_rank("q", q, 3, "(tokens, heads_q, dim)")
        _want_rank("cu_seqlens_q", shapes["cu_seqlens_q"], 1, "(batch + 1)")
        batch, seqlen_q = shapes["cu_seqlens_q"][0] - 1, sizes[0] or q[0]
    else:
        _want_rank("q", q, 4, "(batch, seqlen_q, heads_q, dim), or (tokens, heads_q, dim) with cu_seqlens_q")
        batch, seqlen_q = q[0], q[1]
    seqlen_k = _keys_length("", k, shapes, sizes[1])
    seqlen_k2 = _keys_length("2", shapes["k2"], shapes, sizes[2]) if "k2" in shapes else None
    return Sizes(batch, seqlen_q, seqlen_k, seqlen_k2, q[-2], k[-2])


_MOST_HEADS = 128  # of any model so far


def layout_hint(q: Shape, k: Shape, slots: tuple[str, ...]) -> str | None:
    """What to say of dense q and k that look like (batch, heads, seqlen, dim); None for what does not.

    They do when k would have more heads than any model, and its other dimension could be a number of heads.
    """
    dense = not any(slot.startswith(("cu_seqlens_k", "page_")) for slot in slots)
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


def forward_outputs(
    features: str,
    slots: tuple[str, ...],
    sizes: tuple[int, int, int],
    q: Shape,
    k: Shape,
    v: Shape,
    shapes: tuple[Shape, ...],
    q_dtype: str,
) -> tuple[tuple[str, Shape, str], ...]:
    """(slot, shape, Tessera's dtype name) of what a forward writes: o, then lse, mass and next list as far as asked.

    `shapes` are those of the tensors in `slots`. Only arithmetic, so that sizes may be symbolic.
    """
    f = features_of(features)
    out: tuple[tuple[str, Shape, str], ...] = (("o", (*q[:-1], v[-1]), f.out or q_dtype),)
    if f.lse:
        out += (("lse", (q[1], q[0]) if len(q) == 3 else (q[0], q[2], q[1]), "fp32"),)
    if f.mass is None and f.next is None:
        return out
    size = sizes_of(q, k, dict(zip(slots, shapes, strict=True)), sizes)
    query_blocks, key_blocks = tile_grid(size, f.block)
    rows = (size.batch, size.heads_q, query_blocks)
    if f.mass is not None:
        out += (("tile_mass", (*rows, key_blocks), "fp32"),)
    if f.next == "indices":
        out += (("next_counts", rows, "int32"), ("next_indices", (*rows, key_blocks), "int32"))
    elif f.next == "bitmask":
        out += (("next_bits", (*rows, -(-key_blocks // 32)), "uint32"),)
    return out


def backward_outputs(
    slots: tuple[str, ...],
    q: Shape,
    k: Shape,
    v: Shape,
    shapes: tuple[Shape, ...],
    dtypes: tuple[str, str, str],
    grad_dtype: str | None = None,
) -> tuple[tuple[str, Shape, str], ...]:
    """(slot, shape, dtype name) of what a backward writes: dq, dk, dv, then dsink, dk2, dv2 where there is an input.

    `dtypes` are those of q, k, v; `grad_dtype` "fp32" overrides them.
    """
    names = [grad_dtype or name for name in dtypes]
    out = [("dq", tuple(q), names[0]), ("dk", tuple(k), names[1]), ("dv", tuple(v), names[2])]
    by_slot = dict(zip(slots, shapes, strict=True))
    if "sink" in by_slot:
        out.append(("dsink", tuple(by_slot["sink"]), "fp32"))
    if "k2" in by_slot:
        out += [("dk2", tuple(by_slot["k2"]), names[1]), ("dv2", tuple(by_slot["v2"]), names[2])]
    return tuple(out)


def _list_word(key: str, form: str, shape: Shape, sizes: Sizes) -> str:
    """`list=FORM:HEADS:BATCH[:full]` from the shape of the list's first array."""
    slot = "bwd_tiles" if key == "bwd_list" else "tiles"
    _want_rank(
        slot,
        shape,
        4 if form == "bitmask" else 3,
        "(batch or 1, heads, blocks" + (", words)" if form == "bitmask" else ")"),
    )
    heads = {1: "1", sizes.heads_kv: "kv", sizes.heads_q: "q"}.get(shape[1])
    if heads is None:
        raise ValueError(f"{slot}: got {shape[1]} heads; want {sizes.heads_q} (q), {sizes.heads_kv} (kv) or 1")
    batch = "b" if shape[0] == sizes.batch else "1"
    return f"{key}={form}:{heads}:{batch}"


def _source_words(suffix: str, k: Shape, shapes: dict[str, Shape], seqlen: int) -> list[str]:
    """Words of one source of keys."""
    words = [f"sk{suffix}={seqlen}"]
    if "page_table" + suffix in shapes or "page_indptr" + suffix in shapes:
        kind = "table" if "page_table" + suffix in shapes else "csr"
        words += [f"kv{suffix}={kind}", f"page{suffix}={k[1]}", f"pages{suffix}={k[0]}"]
        return words
    if "cu_seqlens_k" + suffix in shapes:
        words += [f"kv{suffix}=varlen", f"tk{suffix}={k[0]}"]
    else:
        words.append(f"kv{suffix}=dense")
    if "seqused_k" + suffix in shapes:
        words.append("seqused_k" + suffix)
    return words


def attention_line(
    kind: str,
    features: Features,
    slots: tuple[str, ...],
    sizes: tuple[int, int, int],
    q: Shape,
    k: Shape,
    v: Shape,
    shapes: tuple[Shape, ...],
    dtypes: tuple[str, str, str, str],
    extra: tuple[str, ...] = (),
) -> str:
    """The problem's line. `dtypes` of q, k, v, o; `extra` words of a backward (dlse, grad=fp32, accumulate)."""
    by_slot = dict(zip(slots, shapes, strict=True))
    size = sizes_of(q, k, by_slot, sizes)
    words = ["attention", *(("pass=backward",) if kind == BACKWARD else ())]
    words += [f"b={size.batch}", f"sq={size.seqlen_q}", f"hq={size.heads_q}", f"hkv={size.heads_kv}"]
    words += [f"d={q[-1]}", f"dv={v[-1]}", "dtype=" + ":".join(dtypes)]
    if "cu_seqlens_q" in by_slot:
        words += ["layout=varlen", f"tq={q[0]}"]
    words += _source_words("", k, by_slot, size.seqlen_k)
    if "k2" in by_slot:
        words += _source_words("2", by_slot["k2"], by_slot, size.seqlen_k2)
    for slot, word in (("seqused_q", "seqused_q"), ("alibi_slopes", "alibi"), ("sink", "sink")):
        if slot in by_slot:
            words.append(word)
    words += [f"block={features.block[0]}x{features.block[1]}"]
    words += _list_words(kind, features, by_slot, size)
    if kind == FORWARD:
        for key, value in (("mass", features.mass), ("next", features.next)):
            if value is not None:
                words.append(f"{key}={value}")
        words += ["lse"] if features.lse else []
        words += features.words
    else:
        words += [word for word in features.words if word.partition("=")[0] not in _FORWARD_ONLY]
    return " ".join([*words, *extra])


def _list_words(kind: str, features: Features, by_slot: dict[str, Shape], size: Sizes) -> list[str]:
    words = []
    for key, form, prefix in (("list", features.list_form, ""), ("bwd_list", features.bwd_list_form, "bwd_")):
        if form is None or (prefix and kind == FORWARD):
            continue
        first = by_slot[prefix + ("tile_bits" if form == "bitmask" else "tile_counts")]
        full = prefix + ("full_bits" if form == "bitmask" else "full_counts") in by_slot
        words.append(_list_word(key, form, first, size) + (":full" if full else ""))
    return words
