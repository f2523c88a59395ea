# SPDX-License-Identifier: Apache-2.0
"""What stands beside attention: merging partial results, appending to a cache, the bits of dropout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from . import _core
from ._arguments import longest
from ._execute import get_threads
from ._gpu import run_on_gpu
from ._libraries import CPU, Library, common_library, device_of, dtype_name, library_of, refuse_gradient, untraced

Array = Any
Shape = tuple[int, ...]


@lru_cache(maxsize=512)
def _plan(problem: _core.Problem, threads: int, device: int) -> _core.Plan:
    return _core.Plan(problem, threads=threads, device=device)


def run_problem(
    library: Library,
    problem: _core.Problem,
    threads: int,
    slots: tuple[str, ...],
    arrays: tuple[Any, ...],
    q: Array,
    seeds: tuple[int, int] = (0, 0),
) -> None:
    """On the device of `q`, one of the arrays. `seeds`: seed and offset, where they are no arrays."""
    device = library.device(q)
    if device == CPU:
        _plan(problem, threads or get_threads(), CPU).run(slots, arrays, *seeds)
    else:
        run_on_gpu(library, _plan(problem, 0, device), slots, arrays, q, seeds)


def stacked(parts: tuple[Array, ...], name: str) -> Any:
    """The parts as one tensor (parts, ...): where they lie when their distances are even, else a copy."""
    library = library_of(parts[0], name)
    device = library.device(parts[0])
    stream = None if device == CPU else library.stream(device)
    if _core.parts_fit(parts, name, device, stream or 0):
        return parts
    return library.stack(parts)


@untraced
def combine(
    out_parts: Array | Sequence[Array],
    lse_parts: Array | Sequence[Array],
    *,
    sinks: Array | None = None,
    return_lse: bool = True,
    out: Array | None = None,
    out_dtype: Any = None,
    threads: int = 0,
) -> Any:
    """Merges results over disjoint keys: L = log Σ exp(L_p), out = Σ exp(L_p − L) · out_p.

    out_parts: (parts, b, sq, hq, dv) or (parts, tokens, hq, dv), fp32, fp16 or bf16; lse_parts: fp32 (parts, b, hq, sq)
    or (parts, hq, tokens), sink-free. Either may be a sequence of arrays instead; two are used where they lie, more
    only if they lie at even distances, otherwise they are copied into one. sinks: fp32 (hq); they enter out, not lse.

    Returns (out, lse), or out with return_lse=False, in the library of the parts; out in `out_dtype` (default: that of
    the parts) or written to `out`, which may be the first part. Rows that are empty in every part are 0, with LSE −inf.
    Raises as `attention` does; ValueError for torch tensors that require grad.

    Source: Rabe and Staats 2021 (arXiv:2112.05682); Dao et al. 2023, Flash-Decoding.
    """
    parts, first = _listed(out_parts, "out_parts")
    lses, first_lse = _listed(lse_parts, "lse_parts")
    library = library_of(first, "out_parts")
    library_of(first_lse, "lse_parts")
    refuse_gradient(
        "combine",
        "has no gradient",
        **{f"out_parts[{i}]": part for i, part in enumerate(parts)}
        if isinstance(parts, tuple)
        else {"out_parts": parts},
    )
    count, shape = (len(parts), first.shape) if isinstance(parts, tuple) else (first.shape[0], first.shape[1:])
    dtype = dtype_name(first.dtype)
    made = (
        dtype_name(out_dtype)
        if out is None and out_dtype is not None
        else dtype
        if out is None
        else dtype_name(out.dtype)
    )
    problem = _combine_problem(count, tuple(shape), dtype, made, sinks is not None, return_lse)
    result = library.empty(tuple(shape), made, first) if out is None else out
    slots: tuple[str, ...] = ("o_parts", "lse_parts", "o")
    arrays: tuple[Any, ...] = (_placed(parts, "o_parts"), _placed(lses, "lse_parts"), result)
    lse = None
    if return_lse:
        lse_shape = (shape[1], shape[0]) if len(shape) == 3 else (shape[0], shape[2], shape[1])
        lse = library.empty(lse_shape, "fp32", first)
        slots, arrays = (*slots, "lse"), (*arrays, lse)
    if sinks is not None:
        slots, arrays = (*slots, "sink"), (*arrays, sinks)
    run_problem(library, problem, threads, slots, arrays, first)
    if out is None:
        result = library.finish(result, first)
    return (result, library.finish(lse, first)) if return_lse else result


def _listed(parts: Any, name: str) -> tuple[Any, Array]:
    """(parts, the first): a tuple of arrays and one of them, or one array twice."""
    if not isinstance(parts, (tuple, list)):
        return parts, parts
    if not parts:
        raise ValueError(f"{name}: got no parts; want one or more")
    return tuple(parts), parts[0]


def _placed(parts: Any, name: str) -> Any:
    return stacked(parts, name) if isinstance(parts, tuple) else parts


@lru_cache(maxsize=512)
def _combine_problem(parts: int, shape: Shape, dtype: str, out: str, sink: bool, lse: bool) -> _core.Problem:
    if len(shape) not in (3, 4):
        raise ValueError(
            f"out_parts: got {len(shape) + 1} dimensions; want (parts, batch, seqlen, heads, dim) or "
            "(parts, tokens, heads, dim)"
        )
    rows: dict[str, Any] = {"batch": shape[0], "seqlen_q": shape[1]}
    if len(shape) == 3:
        rows = {"batch": 1, "seqlen_q": shape[0], "q_layout": "varlen", "total_q": shape[0]}
    sizes = {"parts": parts, "heads_q": shape[-2], "head_dim_v": shape[-1]}
    return _core.Problem("combine", **rows, **sizes, q_type=dtype, o_type=out, sink=sink, lse=lse)


def merge_states(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """(out, lse) of attention over the keys of a and of b, which are disjoint.

    out: (b, sq, hq, dv) or (tokens, hq, dv), both alike; lse: fp32 (b, hq, sq) or (hq, tokens), sink-free. Results are
    in the dtype of out_a and the library of a. Merging is associative; rows empty in both stay empty (0, −inf).
    Nothing is copied if a and b have the same strides. Raises ValueError for shapes or dtypes that differ.
    """
    return combine((out_a, out_b), (lse_a, lse_b))


def kv_append(
    k_cache: Array,
    v_cache: Array,
    k_new: Array,
    v_new: Array,
    *,
    seqused_k: Array,
    page_table: Array | None = None,
    page_indptr: Array | None = None,
    page_indices: Array | None = None,
    cu_seqlens_q: Array | None = None,
    max_seqlen_q: int | None = None,
    seqused_q: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    rotary_interleaved: bool = False,
    q: Array | None = None,
    threads: int = 0,
) -> Array | None:
    """Writes new keys and values behind those in a cache, in place.

    k_cache, v_cache: (b, sk, hkv, d | dv), or pages (pages, page_size, hkv, d | dv) with page_table int32 (b, columns)
    or CSR (page_indptr (b + 1), page_indices (n), which describe the table after the append). k_new, v_new:
    (b, sq, hkv, d | dv), or (tokens, hkv, d | dv) with cu_seqlens_q (b + 1), in the cache's dtypes. seqused_k: int32
    (b), tokens in the cache before; new token i of sequence b goes to position seqused_k[b] + i. seqused_q int32 (b):
    how many of the new tokens count.

    rotary_cos, rotary_sin: (positions, rotary_dim / 2) in fp32 or k's dtype; new keys are turned by the angles of their
    positions, pairs (j, j + rotary_dim / 2), or (2j, 2j + 1) with rotary_interleaved. q, shaped as k_new with hq heads,
    is turned likewise: returns the turned q, or None without q.

    Raises ValueError for tokens beyond the capacity, before anything is written (on a GPU, whose lengths no one reads
    here, such tokens are left out), and otherwise as `attention` does.

    Source: rotary embedding: Su et al. 2021 (arXiv:2104.09864).
    """
    named = {"k_cache": k_cache, "v_cache": v_cache, "k_new": k_new, "v_new": v_new}
    refuse_gradient("kv_append", "has no gradient", **named, **({} if q is None else {"q": q}))
    optional = {
        "seqused_k": seqused_k,
        "page_table": page_table,
        "page_indptr": page_indptr,
        "page_indices": page_indices,
        "cu_seqlens_q": cu_seqlens_q,
        "seqused_q": seqused_q,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
    }
    bound = {name: array for name, array in optional.items() if array is not None}
    library = common_library([*named.items(), *bound.items(), *([] if q is None else [("q", q)])])
    turned = None if q is None else library.empty(tuple(q.shape), dtype_name(q.dtype), q)
    call = (tuple(named.values()), bound, q, turned, max_seqlen_q, rotary_interleaved, threads)
    (compute_append if library.operators is None else library.operators.append)(*call)
    return None if turned is None else library.finish(turned, q)


def compute_append(
    arrays: tuple[Array, Array, Array, Array],
    bound: dict[str, Array],
    q: Array | None,
    turned: Array | None,
    max_seqlen_q: int | None,
    rotary_interleaved: bool,
    threads: int,
) -> None:
    """`arrays`: k_cache, v_cache, k_new, v_new; `bound`: more of them by slot; `turned`: where the turned q goes."""
    k_cache, v_cache, k_new, _ = arrays
    cu_seqlens_q, rotary_cos, page_table = (bound.get(x) for x in ("cu_seqlens_q", "rotary_cos", "page_table"))
    page_indptr, page_indices = bound.get("page_indptr"), bound.get("page_indices")
    sizes = (0, 0)
    if cu_seqlens_q is not None:  # a length that cannot be read is at most that of all tokens, or of all pages
        new_tokens = max_seqlen_q if max_seqlen_q is not None or device_of(cu_seqlens_q) == CPU else k_new.shape[0]
        sizes = (longest("cu_seqlens_q", cu_seqlens_q, new_tokens), 0)
    if page_indptr is not None:
        most_pages = None if page_indices is None or device_of(page_indptr) == CPU else page_indices.shape[0]
        sizes = (sizes[0], longest("page_indptr", page_indptr, most_pages))
    problem = _append_problem(
        tuple(bound),
        sizes,
        k_cache.shape,
        v_cache.shape,
        k_new.shape,
        None if q is None else q.shape,
        None if rotary_cos is None else rotary_cos.shape,
        None if page_table is None else page_table.shape,
        0 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1,
        tuple(map(dtype_name, (k_cache.dtype if q is None else q.dtype, k_cache.dtype, v_cache.dtype))),
        rotary_interleaved,
    )
    if q is not None:
        bound = {**bound, "q": q, "q_rotated": turned}
    slots = ("k", "v", "k_new", "v_new", *bound)
    library = library_of(k_cache, "k_cache")
    run_problem(library, problem, threads, slots, (*arrays, *bound.values()), k_cache)


@lru_cache(maxsize=512)
def _append_problem(
    bound: tuple[str, ...],
    sizes: tuple[int, int],
    k: Shape,
    v: Shape,
    k_new: Shape,
    q: Shape | None,
    rotary: Shape | None,
    table: Shape | None,
    varlen_batch: int,
    dtypes: tuple[str, str, str],
    interleaved: bool,
) -> _core.Problem:
    """`sizes`: longest run of new tokens, most pages of a sequence (CSR)."""
    rank = 3 if "cu_seqlens_q" in bound else 4
    for name, shape, want in (("k_cache", k, 4), ("v_cache", v, 4), ("k_new", k_new, rank)):
        if len(shape) != want:
            raise ValueError(f"{name}: got {len(shape)} dimensions, shape {tuple(shape)}; want {want}")
    if ("rotary_cos" in bound) != ("rotary_sin" in bound):
        raise ValueError("rotary_sin: got one table of two; want both rotary_cos and rotary_sin")
    fields: dict[str, Any] = {"batch": k_new[0], "seqlen_q": k_new[1]}
    if rank == 3:
        fields = {"batch": varlen_batch, "seqlen_q": sizes[0], "q_layout": "varlen", "total_q": k_new[0]}
    pages = {"page_size": k[1], "pages": k[0]}
    if table is not None:
        fields["kv"] = {"layout": "table", "seqlen": table[-1] * k[1], **pages}
    elif "page_indptr" in bound:
        fields["kv"] = {"layout": "csr", "seqlen": sizes[1] * k[1], **pages}
    else:
        fields["kv"] = {"layout": "dense", "seqlen": k[1]}
    if rotary is not None:
        fields |= {"rotary": "interleaved" if interleaved else "half", "rotary_dim": 2 * rotary[-1]}
    q_type, k_type, v_type = dtypes
    return _core.Problem(
        "kv_append",
        heads_kv=k[-2],
        heads_q=k[-2] if q is None else q[-2],
        head_dim_qk=k[-1],
        head_dim_v=v[-1],
        q_type=q_type,
        k_type=k_type,
        v_type=v_type,
        seqused_q="seqused_q" in bound,
        **fields,
    )


def dropout_keep(
    shape: tuple[int, int, int, int],
    dropout: float,
    seed: int,
    *,
    offset: int = 0,
    q_offset: int | None = None,
    k_offset: int = 0,
    batch_offset: int = 0,
    head_offset: int = 0,
) -> Array:
    """Which entries of the probabilities dropout keeps: numpy bool (b, hq, sq, sk), docs/semantics.md, section 7.

    The bits that `attention(..., dropout=dropout, seed=seed, offset=offset)` uses; kept entries are scaled by
    65536 / round((1 − dropout) · 65536). q_offset: default sk − sq. Needs numpy. Raises ValueError for a dropout
    outside 0 to below 1.

    Source: Philox4x32-10, Salmon, Moraes, Dror and Shaw, SC'11.
    """
    import numpy

    kept = numpy.empty(shape, bool)
    _core.dropout_keep(
        kept,
        dropout,
        seed,
        offset=offset,
        batch=batch_offset,
        head=head_offset,
        heads=shape[1],
        q_offset=shape[3] - shape[2] if q_offset is None else q_offset,
        k_offset=k_offset,
    )
    return kept


def violation_of(status: int) -> tuple[str, int] | None:
    """(tensor, sequence) of the status word of calls with metadata="report" on a GPU; None for 0, no violation.

    `tensor` is the name of what holds a length, page or list entry outside of what it addresses ("page_table"), in the
    first sequence that has one. docs/semantics.md, section 9, says what is checked.
    """
    return _core.violation_of(int(status))
