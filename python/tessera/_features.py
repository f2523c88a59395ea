# SPDX-License-Identifier: Apache-2.0
"""What a call asks for besides its tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ._checks import shown, whole
from ._options import FIELDS, one_of

BLOCK = "(query rows, keys), each an integer of 1 or more"
MASS, NEXT = one_of("mean", "rms"), one_of("indices", "bitmask")

# Fields of a problem that only a forward has.
_FORWARD_ONLY = frozenset(("lse", "mass", "mass_prior_lse", "next", "next_threshold", "metadata"))


class Features:
    """The problem's fields that no shape decides, and four things that are no fields.

    Two are the same only if they are one object, so that caches go by identity: equal arguments of a call give one.

    fields: as `_core.Problem` takes them, only those that are not at their defaults; list and bwd_list are the form.
    out: Tessera's name of the output's dtype; None: that of q. threads: 0 for `set_threads`' number. wishes: a text.
    drops_residual: autograd does not keep what rounding the output lost.
    """

    __slots__ = ("drops_residual", "fields", "out", "threads", "wishes")

    def __init__(
        self,
        fields: dict[str, Any],
        out: str | None = None,
        threads: int = 0,
        wishes: str = "",
        drops_residual: bool = False,
    ) -> None:
        self.fields = fields
        self.out = out
        self.threads = threads
        self.wishes = wishes
        self.drops_residual = drops_residual

    def with_fields(self, **more: Any) -> Features:
        fields = {**self.fields, **more}
        return Features(fields, self.out, self.threads, self.wishes, self.drops_residual)

    @property
    def lse(self) -> bool:
        return "lse" in self.fields

    @property
    def block(self) -> tuple[int, int]:
        return self.fields.get("block_q", 64), self.fields.get("block_kv", 64)

    def of_backward(self) -> dict[str, Any]:
        return {name: value for name, value in self.fields.items() if name not in _FORWARD_ONLY}

    def text(self) -> str:
        """As words, which a graph of torch.compile can hold: "window=*:0 scale=0.5 lse". `features_of` reads them."""
        words = [_word(name, value) for name, value in self.fields.items()]
        if self.out is not None:
            words.append(f"out={self.out}")
        if self.threads:
            words.append(f"threads={self.threads}")
        if self.drops_residual:
            words.append("drops_residual")
        return " ".join([*words, *[f"wish:{wish}" for wish in self.wishes.split()]])


def _word(name: str, value: Any) -> str:
    if value is True:
        return name
    if isinstance(value, tuple):
        return f"{name}=" + ":".join(["*" if each is None else str(each) for each in value])
    return f"{name}={value}"


def _value(text: str) -> Any:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return None if text == "*" else text


@lru_cache(maxsize=4096)
def features_of(text: str) -> Features:
    """The inverse of `Features.text`."""
    fields: dict[str, Any] = {}
    wishes = []
    for word in text.split():
        name, separator, value = word.partition("=")
        if word.startswith("wish:"):
            wishes.append(word[5:])
        elif not separator:
            fields[name] = True
        elif ":" in value:
            fields[name] = tuple(_value(each) for each in value.split(":"))
        else:
            fields[name] = value if name in _NAMES else _value(value)
    out, threads, drops = fields.pop("out", None), fields.pop("threads", 0), fields.pop("drops_residual", False)
    return Features(fields, out, threads, " ".join(wishes), drops)


_NAMES = frozenset(("score", "mask"))  # of which a user's may look like a number


@lru_cache(maxsize=1024)
def with_lse(features: Features) -> Features:
    """The same, and the LSE is written."""
    if features.lse:
        return features
    return features.with_fields(lse=True)


@lru_cache(maxsize=1024)
def with_residual(features: Features) -> Features:
    """The same, and what rounding the output lost is written, or read by a backward."""
    return features if "residual" in features.fields else features.with_fields(residual=True)


@lru_cache(maxsize=1024)
def with_skip(features: Features, block: tuple[int, int], skip: tuple[str, bool, int]) -> Features:
    """The same for a skip state's list."""
    return features.with_fields(block_q=block[0], block_kv=block[1], list="bitmask", skip=skip)


def _window(causal: bool, window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None] | None:
    left, right = (None, None) if window is None else window
    if causal:
        right = 0 if right is None else min(right, 0)
    return None if left is None and right is None else (left, right)


# What a call asks of tiles: the members of `values.Tiles`, with forms in place of lists and a bool in place of an LSE.
Asked = tuple[Any, ...]


def _tile_fields(asked: Asked) -> dict[str, Any]:
    form, bwd_form, block, mass, prior, following, threshold = asked
    block_q = block_kv = None
    if block is not None:
        block_q, block_kv = (whole("block", size, BLOCK) for size in block)
        if block_q < 1 or block_kv < 1:
            raise ValueError(f"block: got ({block_q}, {block_kv}); want {BLOCK}")
    return {
        "block_q": block_q,
        "block_kv": block_kv,
        "list": form,
        "bwd_list": bwd_form,
        "next": NEXT("tiles.next", following),
        "next_threshold": threshold or None,
        "mass": MASS("tiles.mass", mass),
        "mass_prior_lse": prior or None,
    }


@lru_cache(maxsize=4096)
def features(
    causal: bool,
    window: tuple[int | None, int | None] | None,
    asked: Asked | None,
    out_dtype: str | None,
    wishes: str,
    threads: int,
    values: tuple[Any, ...],
) -> Features:
    """The features of a `Call`; `values` of the options in `FIELDS`. Raises ValueError for what no problem could be.

    The cache takes 1, 1.0 and True for one key, so each of them must give the same.
    """
    if not isinstance(wishes, str):
        raise TypeError(f"wishes: got {shown(wishes)}; want a text such as 'tile_q=64 splits=2'")
    fields: dict[str, Any] = {"window": _window(causal, window)}
    for option, value in zip(FIELDS, values, strict=True):
        if option.check is not None:
            fields[option.field] = option.check(option.name, value)
    if asked is not None:
        fields.update(_tile_fields(asked))
    given = {name: value for name, value in fields.items() if value is not None}
    drops = given.pop("drops_residual", False)
    return Features(given, out_dtype, whole("threads", threads), " ".join(wishes.split()), drops)
