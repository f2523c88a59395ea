# SPDX-License-Identifier: Apache-2.0
"""The options that need no tensor as words of a problem's line."""

from __future__ import annotations

from functools import lru_cache

from ._checks import pair, shown, whole


def _number(number: float) -> str:
    """Shortest decimal that reads back as the same double; the line's reader rounds it to fp32 once."""
    return repr(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)


BLOCK = "(query rows, keys), each an integer of 1 or more"


def _window_word(causal: bool, window: tuple[int | None, int | None] | None) -> str:
    left, right = (None, None) if window is None else window
    if causal:
        right = 0 if right is None else min(right, 0)
    if left is None and right is None:
        return ""
    ends = ["*" if end is None else str(int(end)) for end in (left, right)]
    return "causal" if ends == ["*", "0"] else f"window={ends[0]}:{ends[1]}"


def _block_word(block: tuple[int, int]) -> str:
    rows, keys = (whole("block", size, BLOCK) for size in block)
    if rows < 1 or keys < 1:
        raise ValueError(f"block: got ({rows}, {keys}); want {BLOCK}")
    return f"block={rows}x{keys}"


def _choice(name: str, value: str | None, known: tuple[str, ...], argument: str = "") -> str:
    if value is None:
        return ""
    if value not in known:
        raise ValueError(f"{argument or name}: got {value!r}; want None, {', '.join(map(repr, known))}")
    return f"{name}={value}"


@lru_cache(maxsize=4096)
def features_text(
    causal: bool,
    window: tuple[int | None, int | None] | None,
    compressed_causal: tuple[int, int] | None,
    attention_chunk: int,
    scale: float | None,
    softcap: float,
    dropout: float,
    score: str | None,
    mask: str | None,
    list_form: str | None,
    bwd_list_form: str | None,
    block: tuple[int, int] | None,
    mass: str | None,
    prior: bool,
    next_tiles: str | None,
    threshold: float,
    return_lse: bool,
    deterministic: bool,
    batch_invariant: bool,
    out_dtype: str | None,
    wishes: str,
    threads: int,
    metadata: str | None,
) -> str:
    """The features of a `Call` from options that need no tensor. Raises ValueError for what no line could say.

    The cache takes 1, 1.0 and True for one key, so each of them must give the same text.
    """
    words = [_window_word(causal, window)]
    if compressed_causal is not None:
        length, stride = (
            whole("compressed_causal", each)
            for each in pair("compressed_causal", compressed_causal, "(length, stride)")
        )
        words.append(f"compressed_causal={length}:{stride}")
    if attention_chunk:
        chunk = whole("attention_chunk", attention_chunk)
        if chunk < 0:
            raise ValueError(f"attention_chunk: got {attention_chunk!r}; want 0 (none) or the keys of a chunk")
        words.append(f"chunk={chunk}")
    if scale is not None:
        words.append(f"scale={_number(scale)}")
    if softcap:
        words.append(f"softcap={_number(softcap)}")
    if score is not None:
        words.append(f"score={score}")
    if mask is not None:
        words.append(f"mask={mask}")
    if dropout:
        words.append(f"dropout={_number(dropout)}")
    if block is not None:
        words.append(_block_word(block))
    if list_form is not None:
        words.append(f"list={list_form}")
    if bwd_list_form is not None:
        words.append(f"bwd_list={bwd_list_form}")
    words.append(_choice("next", next_tiles, ("indices", "bitmask"), "next_tiles"))
    if threshold:
        words.append(f"threshold={_number(threshold)}")
    words.append(_choice("mass", mass, ("mean", "rms")))
    words.append(_choice("metadata", metadata, ("trust", "clamp", "report")))
    flags = {
        "mass_lse=prior": prior,
        "lse": return_lse,
        "deterministic": deterministic,
        "batch_invariant": batch_invariant,
        f"out={out_dtype}": out_dtype is not None,
        f"threads={whole('threads', threads)}": threads != 0,
    }
    if not isinstance(wishes, str):
        raise TypeError(f"wishes: got {shown(wishes)}; want a text such as 'tile_q=64 splits=2'")
    words += [word for word, wanted in flags.items() if wanted]
    words += [f"wish:{wish}" for wish in wishes.split()]
    return " ".join(filter(None, words))
