# SPDX-License-Identifier: Apache-2.0
"""`attention` and its backward on arrays of any library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._arguments import Call, parse
from ._execute import BackwardInputs, backward_outputs, forward_route, get_threads, run_backward, shapes_of
from ._gpu import run_on_gpu
from ._kept import ATTENTION
from ._libraries import CPU, common_library, dtype_name, is_compiling, library_of, refuse_gradient
from ._options import OPTIONS
from .expressions.register import Options, with_traced
from .quantization.operands import attend_quantised
from .tiles import TileList
from .values import KeySource, Offsets, Tiles, arrays_of, unexpected, with_backward_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Never, Unpack

    from ._arguments import AttentionOptions

Array = Any

_LISTED = (TileList, type(None))


def attention(
    q: Array,
    k: Array | KeySource,
    v: Array | None = None,
    *,
    # options: begin
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    compressed_causal: tuple[int, int] | None = None,
    attention_chunk: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    dropout: float = 0.0,
    seed: Any = None,
    score: Any = None,
    mask: Any = None,
    extras: Sequence[Array] = (),
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    k2: KeySource | None = None,
    offsets: Offsets | None = None,
    tiles: TileList | Tiles | None = None,
    quantization: str | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    k_mean: Array | None = None,
    descale: str | int = "head",
    return_lse: bool = False,
    return_residual: bool = False,
    keep_residual: bool = True,
    deterministic: bool = False,
    batch_invariant: bool = False,
    out_dtype: Any = None,
    wishes: str = "",
    threads: int = 0,
    metadata: str | None = None,
    status: Array | None = None,
    # options: end
    out: Array | None = None,
    **moved: Never,
) -> Any:
    """softmax(scale · q kᵀ, softcapped, biased and masked) v, head by head; docs/semantics.md is the definition.

    Shapes: q (b, sq, hq, d), or (tokens, hq, d) with int32 `cu_seqlens_q` (b + 1); k and v (b, sk, hkv, d | dv),
    (tokens, hkv, d | dv) with `cu_seqlens_k`; or k is a `KeySource`, pages for one, and v is left out. hq is a multiple
    of hkv; d and dv are multiples of 8 from 8 to 512. Dtypes: fp32, fp16 or bf16, each array its own; arrays of any
    library with the buffer protocol or `__dlpack__`, last dimension contiguous, never copied: on the CPU, or all on one
    NVIDIA GPU (fp16, bf16; gradients want q, k, v and out of one type and head dims of at most 256), where torch's and
    cupy's current stream computes and the call returns at once, while jax's arrays are waited for. What says where and
    how long, lists too, is there as well and is not read here: bad lengths and entries are clamped instead of refused.

    Masks and scores
        causal, window: keys from `left` before to `right` after the query's position, inclusive, signed, None is
            unbounded; causal closes the right end at 0. The last query stands at the last key unless offsets say so.
        compressed_causal: (length, stride) of compressed keys, visible when complete.
        attention_chunk: keys of a chunk; a query sees its own only, that of number floor(position / attention_chunk).
        scale (default d ** −0.5), softcap (0: none), alibi_slopes fp32 (hq) or (b, hq), sinks fp32 (hq): one logit a
            head in the denominator.
        dropout: probability of dropping; seed: an int or a uint64 array of 1, or two of them, (seed, offset). Without
            one it is drawn from torch's default generator for torch tensors, else from `random`.
        score, mask: a Python function of positions, score(score, batch, head, query, key) and mask(batch, head, query,
            key), which is traced (`tessera.expressions`): called with symbols in place of numbers, and differentiated;
            on the CPU fp32 torch tensors that a score reads have gradients. Or a built-in's name, or one that
            `register_score` or `register_mask` gave to C++ text; extras: the arrays that the texts read, the score's
            first. With wishes="implementation=cpu.reference" the oracle calls the function itself, whose attribute
            `derivative` gradients want, and a text wants `derivative_text`.
    Sequences (int32)
        cu_seqlens_q, cu_seqlens_k (b + 1): where packed sequences begin. max_seqlen_q, max_seqlen_k: the longest, read
            from cu_seqlens when not given; on a GPU the number of all tokens then stands for it. seqused_q, seqused_k
            (b): lengths in use.
        k2: a second `KeySource` in the same softmax.
        offsets: positions, as `Offsets`.
    Tiles
        tiles: a `TileList` of those to compute, or `Tiles`: lists of both passes, masses, the list for the next call.
    8 bits
        quantization: "fp8" quantises q, k and v to e4m3 first, "int8" q and k, without the mean of k; descales as
            `descale` says. torch's gradients are those of the values that the forward saw, as if rounding had none.
        q_descale, k_descale, v_descale: fp32, positive: what elements of 8 bits are multiplied by, which `quantize`
            gives. k_mean: fp32 (b, hkv, d), added to every key. descale: which elements share one: 'head', those of a
            (batch, key head), (b, hkv); N, blocks of N rows of a head, (b, hq or hkv, blocks), of pages (pages, hkv,
            page_size / N); 'token', (b, hq or hkv, tokens), (hq or hkv, tokens), (pages, hkv, page_size).
    Promises and results
        return_lse: the LSE too. return_residual: what rounding out to fp16 or bf16 lost too, int8 as out, for
            `attention_backward`; keep_residual: torch's autograd keeps it until the backward, whose gradients then do
            not inherit out's rounding; False saves a byte an element of out. deterministic: the backward's bits are the
            same in every run too, for which a GPU adds up dq in a fixed order and takes longer;
            `torch.use_deterministic_algorithms` asks for it as well; on a CPU they are without it, by as many threads.
            batch_invariant: a sequence's bits do not depend on the others. out: memory for the result; out_dtype: its
            dtype.
        wishes: "tile_q=64 tile_kv=128 splits=2", refused if they cannot be met. threads: 0 for `set_threads`' number.
        metadata: what a GPU does about bad lengths, pages and lists, "clamp" (default), "report": clamp, and note the
            first in `status`, int32 (1) that holds 0, for `violation_of`, or "trust": page ids and lists are used as
            they are, and wrong ones read or write memory that is not the call's.

    Returns out (as q with dv), alone or, where more is asked for, a tuple (out, lse, residual, mass, next TileList) of
    what was asked, in the library of q. LSE: natural log, fp32 (b, hq, sq) or (hq, tokens), scale included, sink
    excluded, −inf
    for rows that see nothing, whose out is 0. torch tensors have gradients; others use `attention_backward`.

    Raises ValueError for values, shapes, dtypes, devices, lengths or lists that are wrong, TypeError for what is no
    array, NotImplementedError for what nothing computes; the text names the argument, what was got and what is wanted.

    Source: Vaswani et al. 2017 (arXiv:1706.03762); blocked online softmax: Milakov and Gimelshein 2018
    (arXiv:1805.02867), Dao et al. 2022 (arXiv:2205.14135).
    """
    if moved:
        raise unexpected("attention", moved)
    operators = library_of(q, "q").operators
    if out is not None:
        library_of(out, "out")
    if isinstance(tiles, Tiles) and not isinstance(tiles.backward, _LISTED):
        tiles = with_backward_list(tiles, q)
    if callable(score) or callable(mask):  # names from here on, by which calls are kept
        traced = with_traced(Options(causal, window, score, mask, extras), tiles, wishes)
        causal, window, score, mask, extras = traced
    options = (
        # values: begin
        causal,
        window,
        compressed_causal,
        attention_chunk,
        scale,
        softcap,
        alibi_slopes,
        sinks,
        dropout,
        seed,
        score,
        mask,
        extras,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q,
        seqused_k,
        k2,
        offsets,
        tiles,
        quantization,
        q_descale,
        k_descale,
        v_descale,
        k_mean,
        descale,
        return_lse,
        return_residual,
        keep_residual,
        deterministic,
        batch_invariant,
        out_dtype if out is None else out.dtype,
        wishes,
        threads,
        metadata,
        status,
        # values: end
    )
    if isinstance(tiles, Tiles) and not isinstance(tiles.backward, _LISTED):
        if operators is None:
            raise TypeError("tiles.backward: got a number for arrays without autograd; want a list, or torch tensors")
        named = {option.name: value for option, value in zip(OPTIONS, options, strict=True)}
        return operators.attend_by_masses(q, k, v, out, named)
    if quantization is not None:
        named = {option.name: value for option, value in zip(OPTIONS, options, strict=True)}
        return attend_quantised(attention, q, k, v, out, named)
    if score is not None and operators is not None and not is_compiling() and operators.trains(score, extras):
        return operators.attend_and_train(q, k, v, out, options)
    if operators is not None and out is None and not is_compiling():
        result = ATTENTION.call(q, k, v, options)
        if result is not None:
            return result
    call = parse(q, k, v, *options)
    if v is None:
        k, v = arrays_of(k, v)
    results = (
        compute_forward(call, q, k, v, out) if operators is None else operators.forward(call, q, k, v, out, options)
    )
    return results[0] if len(results) == 1 else answer(call, results)


def answer(call: Call, results: tuple[Array, ...]) -> tuple[Any, ...]:
    """(out, lse, residual, mass, next TileList) of what was asked, from the arrays as in `forward_outputs`."""
    following, size = call.features.fields.get("next"), call.features.block
    if following is None:
        return tuple(results)
    if following == "bitmask":
        return (*results[:-1], TileList(bits=results[-1], form="bitmask", block=size))
    return (*results[:-2], TileList(counts=results[-2], indices=results[-1], form="indices", block=size))


def compute_forward(call: Call, q: Array, k: Array, v: Array, out: Array | None = None) -> tuple[Array, ...]:
    """Outputs of a call without autograd, in the order of `forward_outputs`; `out` takes the first if given."""
    tensors = call.tensors
    named = (("q", q), ("k", k), ("v", v))
    library = common_library((*named, *zip(call.slots, tensors, strict=True)) if tensors else named)
    device = library.device(q)
    route = forward_route(
        call.features,
        shapes_of(call, q, k, v),
        (q.dtype, k.dtype, v.dtype),
        None if out is None else out.dtype,
        get_threads() if device == CPU else 0,
        device,
    )
    made = route.made if out is None else route.made[1:]
    outputs = [library.empty(shape, dtype, q) for shape, dtype in made]
    if route.taken is not None:
        tensors = tuple([tensors[i] for i in route.taken])
    arrays = (q, k, v, *tensors, *outputs) if out is None else (q, k, v, *tensors, out, *outputs)
    if device == CPU:
        route.run(route.slots, arrays, *call.scalars, *call.callables)
    else:
        run_on_gpu(library, route.plan, route.slots, arrays, q, call.scalars, call.callables)
    finished = tuple([library.finish(array, q) for array in outputs])
    return finished if out is None else (out, *finished)


def attention_backward(
    dout: Array,
    q: Array,
    k: Array | KeySource,
    v: Array | None,
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    residual: Array | None = None,
    grads: tuple[Array, ...] | None = None,
    grad_dtype: Any = None,
    accumulate: bool = False,
    **options: Unpack[AttentionOptions],
) -> tuple[Array, ...]:
    """Gradients of `attention` with the same keywords, for arrays without autograd.

    dout and out as the forward's out, lse as it returned it (`return_lse=True`), dlse like lse: the gradient of the
    LSE. residual as the forward returned it (`return_residual=True`): without it the gradients inherit the rounding of
    a 16-bit out, most where one key outweighs its row. out and lse may come from elsewhere, such as `merge_states`.
    `Tiles(backward=…)` restricts the gradient to a list's tiles. v is None where k is a `KeySource`.

    Returns (dq, dk, dv), then dsinks fp32 (hq) if there are sinks, then dk2, dv2 if there is a second source: in the
    dtypes of q, k, v or all in `grad_dtype` "fp32". `grads` gives memory for them in that order; with `accumulate`
    (fp32 only) they are added to what is there. Dropout needs the forward's seed.

    Raises as `attention` does; NotImplementedError for paged keys, because a page may belong to several sequences.

    Source: Dao et al. 2022 (arXiv:2205.14135), appendix B; docs/semantics.md, section 6.
    """
    source, values = k, v
    k, v = arrays_of(k, v)
    refuse_gradient("attention_backward", "has no gradient itself", dout=dout, q=q, k=k, v=v)
    if options.get("dropout") and options.get("seed") is None:
        raise ValueError("seed: got None; want the forward's seed, which dropout's gradient needs")
    options["return_lse"] = False
    options["return_residual"] = residual is not None
    tiles = options.get("tiles")
    if isinstance(tiles, Tiles):
        tiles = with_backward_list(tiles, q)
        if not isinstance(tiles.backward, _LISTED):
            raise TypeError("tiles.backward: got a number; want the list that a forward made of it")
        options["tiles"] = Tiles(tiles.forward, tiles.backward, tiles.block)
    call = parse(q, source, values, **options)
    if residual is not None:
        call = call._replace(slots=(*call.slots, "o_residual"), tensors=(*call.tensors, residual))
    named = [("q", q), ("k", k), ("v", v), ("dout", dout), ("out", out), ("lse", lse)]
    if dlse is not None:
        named.append(("dlse", dlse))
    library = common_library([*named, *zip(call.slots, call.tensors, strict=True)])
    if accumulate and grads is None:
        raise ValueError("grads: got None; want the arrays to add to")
    if grads is None:
        dtypes = (dtype_name(q.dtype), dtype_name(k.dtype), dtype_name(v.dtype))
        gradient_dtype = None if grad_dtype is None else dtype_name(grad_dtype)
        wanted = backward_outputs(shapes_of(call, q, k, v), dtypes, gradient_dtype)
        outputs = tuple([library.empty(shape, dtype, q) for _, shape, dtype in wanted])
    else:
        outputs = tuple(grads)
    run_backward(call, BackwardInputs(q, k, v, out, lse, dout, dlse), outputs, accumulate)
    return outputs if grads is not None else tuple([library.finish(array, q) for array in outputs])
