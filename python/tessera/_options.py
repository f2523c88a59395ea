# SPDX-License-Identifier: Apache-2.0
"""The table of `attention`'s options. What repeats it elsewhere, signatures, types and help, is written from it by
`scripts/python-options`; the features of a call are made by it (`_features.py`).

A new option is a row here, `scripts/python-options`, and where it becomes no field of the problem a line of
`_arguments.parse`, which binds arrays and scalars.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ._checks import pair, shown, whole


class Option(NamedTuple):
    """name, type and default are as the signature writes them.

    doc: a paragraph of the help; options that are told together have it in the first of them.
    field: of the problem, set by the checked value where that is not None; "": it becomes something else.
    check: (name, value) to the field's value, None for what leaves the field alone. Equal values must give the same: 1,
        1.0 and True are one key of a cache.
    """

    name: str
    type: str
    default: Any
    section: str
    doc: str = ""
    field: str = ""
    check: Callable[[str, Any], Any] | None = None
    plain: str = "True or False"  # what is wanted instead of an array


def _as_given(name: str, value: Any) -> Any:
    return value


def _nonzero(name: str, value: Any) -> Any:
    return value or None


def _set(name: str, value: Any) -> bool | None:
    return True if value else None


def _cleared(name: str, value: Any) -> bool | None:
    return None if value else True


def _compressed(name: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    length, stride = pair(name, value, "(length, stride)")
    return whole(name, length), whole(name, stride)


def _chunk(name: str, value: Any) -> int | None:
    if not value:
        return None
    keys = whole(name, value)
    if keys < 0:
        raise ValueError(f"{name}: got {value!r}; want 0 (none) or the keys of a chunk")
    return keys


def _grain(name: str, value: Any) -> Any:
    if value == "head":
        return None
    if value == "token":
        return value
    if isinstance(value, str) or whole(name, value) < 1:
        raise ValueError(f"{name}: got {value!r}; want 'head', 'token' or the rows of a block")
    return whole(name, value)


def one_of(*known: str) -> Callable[[str, Any], Any]:
    """The check of a name, or None."""

    def check(name: str, value: Any) -> str | None:
        if value is not None and value not in known:
            raise ValueError(f"{name}: got {value!r}; want None, {', '.join(map(repr, known))}")
        return value

    return check


MASKS, SEQUENCES, TILES, PROMISES = "Masks and scores", "Sequences (int32)", "Tiles", "Promises and results"
EIGHT_BITS = "8 bits"

OPTIONS = (
    Option(
        "causal",
        "bool",
        False,
        MASKS,
        "causal, window: keys from `left` before to `right` after the query's position, inclusive, signed, None is "
        "unbounded; causal closes the right end at 0. The last query stands at the last key unless offsets say so.",
    ),
    Option("window", "tuple[int | None, int | None] | None", None, MASKS),
    Option(
        "compressed_causal",
        "tuple[int, int] | None",
        None,
        MASKS,
        "compressed_causal: (length, stride) of compressed keys, visible when complete.",
        "compressed_causal",
        _compressed,
        "(length, stride), two integers",
    ),
    Option(
        "attention_chunk",
        "int",
        0,
        MASKS,
        "attention_chunk: keys of a chunk; a query sees its own only, that of number floor(position / "
        "attention_chunk).",
        "chunk",
        _chunk,
    ),
    Option(
        "scale",
        "float | None",
        None,
        MASKS,
        "scale (default d ** −0.5), softcap (0: none), alibi_slopes fp32 (hq) or (b, hq), sinks fp32 (hq): one "
        "logit a head in the denominator.",
        "scale",
        _as_given,
    ),
    Option("softcap", "float", 0.0, MASKS, "", "softcap", _nonzero),
    Option("alibi_slopes", "Array | None", None, MASKS),
    Option("sinks", "Array | None", None, MASKS),
    Option(
        "dropout",
        "float",
        0.0,
        MASKS,
        "dropout: probability of dropping; seed: an int or a uint64 array of 1, or two of them, (seed, offset). "
        "Without one it is drawn from torch's default generator for torch tensors, else from `random`.",
        "dropout",
        _nonzero,
    ),
    Option("seed", "Any", None, MASKS),
    Option(
        "score",
        "Any",
        None,
        MASKS,
        "score, mask: a Python function of positions, score(score, batch, head, query, key) and mask(batch, head, "
        "query, key), which is traced (`tessera.expressions`): called with symbols in place of numbers, and "
        "differentiated; on the CPU fp32 torch tensors that a score reads have gradients. Or a built-in's name, or "
        "one that `register_score` or `register_mask` gave to C++ text; extras: the arrays that the texts read, the "
        "score's first. With "
        'wishes="implementation=cpu.reference" the oracle calls the function itself, whose attribute `derivative` '
        "gradients want, and a text wants `derivative_text`.",
        "score",
        _as_given,
    ),
    Option("mask", "Any", None, MASKS, "", "mask", _as_given),
    Option("extras", "Sequence[Array]", (), MASKS),
    Option(
        "cu_seqlens_q",
        "Array | None",
        None,
        SEQUENCES,
        "cu_seqlens_q, cu_seqlens_k (b + 1): where packed sequences begin. max_seqlen_q, max_seqlen_k: the longest, "
        "read from cu_seqlens when not given; on a GPU the number of all tokens then stands for it. seqused_q, "
        "seqused_k (b): lengths in use.",
    ),
    Option("cu_seqlens_k", "Array | None", None, SEQUENCES),
    Option("max_seqlen_q", "int | None", None, SEQUENCES),
    Option("max_seqlen_k", "int | None", None, SEQUENCES),
    Option("seqused_q", "Array | None", None, SEQUENCES),
    Option("seqused_k", "Array | None", None, SEQUENCES),
    Option("k2", "KeySource | None", None, SEQUENCES, "k2: a second `KeySource` in the same softmax."),
    Option("offsets", "Offsets | None", None, SEQUENCES, "offsets: positions, as `Offsets`."),
    Option(
        "tiles",
        "TileList | Tiles | None",
        None,
        TILES,
        "tiles: a `TileList` of those to compute, or `Tiles`: lists of both passes, masses, the list for the next "
        "call.",
    ),
    Option(
        "quantization",
        "str | None",
        None,
        EIGHT_BITS,
        'quantization: "fp8" quantises q, k and v to e4m3 first, "int8" q and k, without the mean of k; descales as '
        "`descale` says. torch's gradients are those of the values that the forward saw, as if rounding had none.",
        plain="None or a name",
    ),
    Option(
        "q_descale",
        "Array | None",
        None,
        EIGHT_BITS,
        "q_descale, k_descale, v_descale: fp32, positive: what elements of 8 bits are multiplied by, which "
        "`quantize` gives. k_mean: fp32 (b, hkv, d), added to every key. descale: which elements share one: 'head', "
        "those of a (batch, key head), (b, hkv); N, blocks of N rows of a head, (b, hq or hkv, blocks), of pages "
        "(pages, hkv, page_size / N); 'token', (b, hq or hkv, tokens), (hq or hkv, tokens), (pages, hkv, page_size).",
    ),
    Option("k_descale", "Array | None", None, EIGHT_BITS),
    Option("v_descale", "Array | None", None, EIGHT_BITS),
    Option("k_mean", "Array | None", None, EIGHT_BITS),
    Option("descale", "str | int", "head", EIGHT_BITS, "", "descale", _grain, "'head', 'token' or an integer"),
    Option(
        "return_lse",
        "bool",
        False,
        PROMISES,
        "return_lse: the LSE too. return_residual: what rounding out to fp16 or bf16 lost too, int8 as out, for "
        "`attention_backward`; keep_residual: torch's autograd keeps it until the backward, whose gradients then do "
        "not inherit out's rounding; False saves a byte an element of out. deterministic: the backward's bits are the "
        "same in every run too, for which a GPU adds up dq in a fixed order and takes longer; "
        "`torch.use_deterministic_algorithms` asks for it as well; on a CPU they are without it, by as many threads. "
        "batch_invariant: a sequence's bits do not depend on the others. out: memory for the result; out_dtype: its "
        "dtype.",
        "lse",
        _set,
    ),
    Option("return_residual", "bool", False, PROMISES, "", "residual", _set),
    Option("keep_residual", "bool", True, PROMISES, "", "drops_residual", _cleared),
    Option("deterministic", "bool", False, PROMISES, "", "deterministic", _set),
    Option("batch_invariant", "bool", False, PROMISES, "", "batch_invariant", _set),
    Option("out_dtype", "Any", None, PROMISES),
    Option(
        "wishes",
        "str",
        "",
        PROMISES,
        'wishes: "tile_q=64 tile_kv=128 splits=2", refused if they cannot be met. threads: 0 for `set_threads`\' '
        "number.",
        plain="a text",
    ),
    Option("threads", "int", 0, PROMISES, plain="an integer"),
    Option(
        "metadata",
        "str | None",
        None,
        PROMISES,
        'metadata: what a GPU does about bad lengths, pages and lists, "clamp" (default), "report": clamp, and note '
        'the first in `status`, int32 (1) that holds 0, for `violation_of`, or "trust": page ids and lists are used '
        "as they are, and wrong ones read or write memory that is not the call's.",
        "metadata",
        one_of("trust", "clamp", "report"),
        "None or a name",
    ),
    Option("status", "Array | None", None, PROMISES),
)

# In the order in which `_features.features` gets their values.
FIELDS = tuple(option for option in OPTIONS if option.field)


def refuse_arrays(values: dict[str, Any]) -> None:
    """TypeError for the first option whose value is an array or holds one, or is no key of a cache."""
    for option in OPTIONS:
        if option.name not in values:
            continue
        value = values[option.name]
        try:
            hash(value)
            good = getattr(value, "shape", None) is None
        except TypeError:
            good = False
        if not good:
            raise TypeError(f"{option.name}: got {shown(value)}; want {option.plain}")
