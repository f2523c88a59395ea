# SPDX-License-Identifier: Apache-2.0
"""Checks of plain arguments, and how errors show what they got."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def shown(value: Any) -> str:
    """`value` in an error: shape and dtype of an array, else its `repr`, cut off after 80 characters."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        dtype = str(getattr(value, "dtype", "unknown")).removeprefix("torch.")
        return f"an array of shape {tuple(shape)} and dtype {dtype}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def rename(error: Exception, names: dict[str, str]) -> None:
    """Gives an error that begins with one of these names that which the caller knows."""
    argument, separator, rest = str(error).partition(": ")
    if separator and argument in names:
        error.args = (f"{names[argument]}: {rest}",)


@contextmanager
def renamed(names: dict[str, str]) -> Iterator[None]:
    """As `rename`, for the errors of a block."""
    try:
        yield
    except (IndexError, NotImplementedError, TypeError, ValueError) as error:
        rename(error, names)
        raise


def whole(name: str, value: Any, want: str = "an integer") -> int:
    """`value` as an int. Equal numbers are one key of a dict or cache, so 2.0 and True count as 2 and 1.

    Raises ValueError for a fraction or infinity, TypeError for what is no number.
    """
    if type(value) is int:
        return value
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError(f"{name}: got {value!r}; want {want}")
        return int(value)
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {shown(value)}; want {want}") from None


def real(name: str, value: Any, want: str = "a number") -> float:
    """`value` as a float. Raises TypeError for what is no number, strings among them."""
    if not isinstance(value, (str, bytes, bytearray)):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: torch, of a tensor of several elements
            pass
    raise TypeError(f"{name}: got {shown(value)}; want {want}")


def flag(name: str, value: Any) -> bool:
    """Whether `value` is true. Raises TypeError for an array of several elements."""
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: got {shown(value)}; want True or False") from None


def pair(name: str, value: Any, want: str) -> tuple[Any, Any]:
    """The two members of `value`. Raises ValueError if there are not two."""
    if not isinstance(value, (str, bytes)) and getattr(value, "shape", None) is None:
        try:
            first, second = value
            return first, second
        except (TypeError, ValueError):
            pass
    raise ValueError(f"{name}: got {shown(value)}; want {want}")


def check_extras(extras: Any) -> None:
    """Raises TypeError for what is no tuple or list."""
    if not isinstance(extras, (tuple, list)):
        raise TypeError(f"extras: got {shown(extras)}; want a tuple or list of arrays")


def frames_of_the_package() -> int:
    """How many frames lie between the function that asks and the code that called Tessera, as `stacklevel` counts."""
    level = 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "tessera":
        level, frame = level + 1, frame.f_back
    return level
