# SPDX-License-Identifier: Apache-2.0
"""Cascade attention: leading pages that sequences share are read once a group, the rest once a sequence."""

from __future__ import annotations

from typing import Any

from .._checks import shown
from .._libraries import CPU, Library, common_library, device_of, dtype_name, refuse_gradient
from ..attention import attention
from ..operations import combine
from ..values import KeySource
from .layout import int32, level_queries, level_source, rest_source
from .prefixes import SharedPrefixes
from .tree import tree_mask

Array = Any


def cascade_attention(
    q: Array,
    source: KeySource,
    prefixes: SharedPrefixes,
    *,
    causal: bool = False,
    tree: Array | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    cu_seqlens_q: Array | None = None,
    max_seqlen_q: int | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    out_dtype: Any = None,
    threads: int = 0,
    metadata: str | None = None,
) -> Any:
    """As `attention(q, source, ...)` of a paged cache, with pages that sequences share read once for all of them.

    q: (b, tokens, hq, d), the last tokens of each sequence, or (tokens, hq, d) with int32 cu_seqlens_q (b + 1) and, so
    that a GPU need not take all tokens for one sequence's, max_seqlen_q. source: `KeySource` of pages with page_table
    (b, columns) and seqused (b). prefixes: `SharedPrefixes` of the batch, given or by `find_shared_prefixes`; every
    query sees its sequence's whole prefix, so the new tokens lie behind it.

    causal, scale, softcap, sinks, threads, metadata ("clamp" or "trust") are those of `attention`. tree: bits of a
    speculative step's mask, as `tree_mask` has them, instead of causal. out: memory for the result, without gaps
    between its rows; out_dtype: its dtype.

    Each level of groups is one problem, whose query rows are the tokens of all sequences of a group; what is left of
    the sequences is another; `combine` merges their results, in fp32, by LSE. Arrays of numpy, torch and cupy. On a GPU
    nothing is read or waited for, but in the first call with `prefixes` and a number of tokens and of columns of the
    table, so a CUDA graph may be captured after it and replayed with other contents of q, pages, page_table and
    seqused, as long as the groups stay true.

    Returns out, or (out, lse) as `attention` does, lse sink-free and maybe a view. No gradient.

    Raises as `attention` does; ValueError for groups that disagree with page_table and seqused where these are on the
    host. On a GPU `SharedPrefixes.check` finds that: a sequence whose page table disagrees gets the prefix of its
    group's first one, and one that is shorter than its prefix sees all of that.

    Source: Ye et al. 2025, FlashInfer (arXiv:2501.01005); Juravsky et al. 2024, Hydragen (arXiv:2402.05099).
    """
    library = _check(q, source, prefixes, out, sinks)
    _check_rows(q, source, prefixes, cu_seqlens_q, causal, tree)
    packed = cu_seqlens_q is not None
    rows, each = (q, 0) if packed else (q.reshape((-1, *q.shape[2:])), q.shape[1])
    most = max_seqlen_q if packed else each
    common = {"scale": scale, "softcap": softcap, "threads": threads, "metadata": metadata, "return_lse": True}
    parts = library.empty((len(prefixes.levels) + 1, *rows.shape[:2], source.v.shape[-1]), "fp32", q)
    lses = []
    for i, level in enumerate(prefixes.levels):  # every row sees all that its run reads
        begins = level_queries(prefixes, i, level, cu_seqlens_q, each, q)
        longest = None if most is None else most * max(run.stop - run.first for run in level)
        options = {"cu_seqlens_q": begins, "max_seqlen_q": longest, "out": parts[i], **common}
        lses.append(attention(rows, level_source(source, prefixes, i, level), **options)[1])
    rest = rest_source(source, prefixes)
    if not packed:
        begins = [i * each for i in range(prefixes.batch + 1)]
        cu_seqlens_q = prefixes.placed(("begins", each), lambda: int32(begins), q)
    mask = None if tree is None else tree_mask(tree, rest.seqused)
    options = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": most, "out": parts[len(lses)], **common}
    lses.append(attention(rows, rest, causal=causal, mask=mask, **options)[1])
    shape = (*q.shape[:-1], source.v.shape[-1])
    dtype = dtype_name(q.dtype if out_dtype is None else out_dtype)
    merged = combine(
        parts,
        lses[0][None] if len(lses) == 1 else lses,
        sinks=sinks,
        return_lse=return_lse,
        out=None if out is None else _flat(out, shape),
        out_dtype=dtype,
        threads=threads,
    )
    result = (merged[0] if return_lse else merged).reshape(shape) if out is None else out
    if not return_lse:
        return result
    return result, merged[1] if packed else merged[1].reshape((q.shape[2], *q.shape[:2])).swapaxes(0, 1)


def _check(q: Array, source: KeySource, prefixes: SharedPrefixes, out: Array | None, sinks: Array | None) -> Library:
    """The library of all arrays; an error for a source that is no table of pages and for prefixes of another one."""
    if not isinstance(source, KeySource):
        raise TypeError(f"source: got {shown(source)}; want a KeySource of pages")
    if not isinstance(prefixes, SharedPrefixes):
        raise TypeError(f"prefixes: got {shown(prefixes)}; want SharedPrefixes")
    if source.page_table is None or source.seqused is None or source.page_indptr is not None:
        raise ValueError("source: got a KeySource without page_table or seqused; want pages with both, and no CSR")
    arrays = {"q": q, "k": source.k, "v": source.v, "page_table": source.page_table, "seqused_k": source.seqused}
    optional = {"out": out, "sinks": sinks}
    library: Library = common_library([*arrays.items(), *((name, x) for name, x in optional.items() if x is not None)])
    if library.name not in ("numpy", "torch", "cupy"):
        raise TypeError(f"q: got an array of {library.name}; want one of numpy, torch or cupy")
    refuse_gradient("cascade_attention", "has no gradient", q=q, k=source.k, v=source.v, sinks=sinks)
    if len(source.k.shape) != 4 or source.k.shape[1] != prefixes.page_size:
        raise ValueError(f"k: got {shown(source.k)}; want pages of {prefixes.page_size} tokens, as prefixes says")
    prefixes.check_shapes(source.page_table.shape, source.seqused.shape)
    return library


def _check_rows(
    q: Array, source: KeySource, prefixes: SharedPrefixes, cu_seqlens_q: Array | None, causal: bool, tree: Array | None
) -> None:
    """Errors for queries and bits of other shapes and, where all is on the host, for groups that are not true."""
    batch = prefixes.batch
    if cu_seqlens_q is None:
        fits, want = len(q.shape) == 4 and q.shape[0] == batch, f"({batch}, tokens, hq, d)"
    else:
        fits = len(q.shape) == 3 and tuple(cu_seqlens_q.shape) == (batch + 1,)
        want = f"(tokens, hq, d) with cu_seqlens_q of {batch + 1}"
    if not fits:
        raise ValueError(f"q: got {shown(q)}; want {want}, as prefixes says")
    if tree is not None and (causal or cu_seqlens_q is not None or tuple(tree.shape[:2]) != tuple(q.shape[:2])):
        raise ValueError(
            f"tree: got {shown(tree)} with q of shape {tuple(q.shape)} and causal={causal}; want bits (b, tokens) of a "
            "dense q, and no causal beside them"
        )
    if any(device_of(x) != CPU for x in (q, source.page_table, source.seqused, cu_seqlens_q) if x is not None):
        return
    if not causal and tree is None:
        own: Any = 0
    elif cu_seqlens_q is None:
        own = q.shape[1]
    else:
        own = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).tolist()
    prefixes.check(source.page_table, source.seqused, tokens=own)


def _flat(out: Array, shape: tuple[int, ...]) -> Array:
    """`out` of (b, tokens, heads, dim) as (rows, heads, dim), in its own memory."""
    if tuple(out.shape) != shape:
        raise ValueError(f"out: got {shown(out)}; want shape {shape}")
    if len(shape) == 3:
        return out
    strides = out.stride() if callable(getattr(out, "stride", None)) else out.strides
    if shape[0] > 1 and shape[1] > 1 and strides[0] != shape[1] * strides[1]:
        raise ValueError(f"out: got strides {tuple(strides)}; want sequences behind each other, without a gap")
    return out.reshape((-1, *shape[2:]))
