# SPDX-License-Identifier: Apache-2.0
"""Functions on symbols, found by the names that torch and NumPy have for them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

from .captured import Partial, item
from .symbols import Symbol, as_symbol, binary, cast, graph_of, known, refuse, unary, where


def exp(x: Any) -> Any:
    """e to the power of `x`; an integer or truth counts as fp32. Raises TraceError for what is no symbol."""
    return unary("exp", x)


def log(x: Any) -> Any:
    """The natural logarithm, likewise: NaN below 0, −∞ of 0."""
    return unary("log", x)


def sqrt(x: Any) -> Any:
    """The square root, likewise: NaN below 0."""
    return unary("sqrt", x)


def tanh(x: Any) -> Any:
    """The hyperbolic tangent, likewise."""
    return unary("tanh", x)


def sin(x: Any) -> Any:
    """The sine of `x` in radians, likewise."""
    return unary("sin", x)


def cos(x: Any) -> Any:
    """The cosine, likewise."""
    return unary("cos", x)


def floor(x: Any) -> Any:
    """The largest whole number that is at most `x`: fp32 of fp32, an integer itself."""
    return unary("floor", x)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(−x)) in fp32."""
    return 1.0 / (1.0 + exp(-x))


def minimum(x: Any, y: Any) -> Any:
    """The smaller of two symbols or numbers, in fp32 if one of them is; NaN if one is. Of truths, "and"."""
    return binary("min", x, y)


def maximum(x: Any, y: Any) -> Any:
    """The larger, likewise; of truths, "or"."""
    return binary("max", x, y)


def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """`x` from `min` to `max`, each a symbol, a number or None, in fp32 if one of them is; its derivative is 1 at both
    ends, as torch's is."""
    if min is not None:
        x = where(binary("lt", x, min), min, x)
    return x if max is None else where(binary("gt", x, max), max, x)


def integer(x: Any) -> Any:
    """int64: a float without its fraction (0 of NaN), or 0 and 1 of a truth."""
    return cast(x, "i")


def real(x: Any) -> Any:
    """`x`, an integer or a truth, as fp32."""
    return cast(x, "f")


def truth(x: Any) -> Any:
    """Whether `x` is not 0."""
    return cast(x, "b")


def _relu(x: Any) -> Any:
    return where(binary("le", x, 0), 0, x)  # NaN of NaN


def _divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return binary("truediv", a, b)
    if rounding_mode == "floor":
        return binary("floordiv", a, b)
    raise refuse(f"rounding_mode={rounding_mode!r}", "None or 'floor'")


def _scaled(op: str, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return binary(
        op, a, b if isinstance(alpha, int) and alpha == 1 else binary("mul", as_symbol(graph_of(a, b), b), alpha)
    )


def _to(x: Any, dtype: Any = None, *_: Any, **kwargs: Any) -> Any:
    dtype = kwargs.get("dtype", dtype)
    if isinstance(dtype, Symbol) or hasattr(dtype, "dtype"):  # of another tensor, as to(tensor) takes it
        dtype = dtype.dtype
    names_device = isinstance(dtype, str) and dtype.partition(":")[0] in ("cpu", "cuda", "meta")
    return x if dtype is None or names_device or "device" in type(dtype).__name__ else cast(x, _type_of(dtype))


def _type_of(dtype: Any) -> str:
    name = getattr(dtype, "__name__", None) or str(dtype).rpartition(".")[2]
    if name in ("bool", "bool_"):
        return "b"
    if name in ("int", "int32", "int64", "long"):
        return "i"
    if name in ("float", "float32", "float64", "double"):
        return "f"
    raise refuse(f"a cast to {name}", "bool, int32, int64 or float32")


def _filled(x: Any, value: Any, dtype: Any) -> Any:
    constant = as_symbol(x.graph, value)
    return cast(constant, x.node.type if dtype is None else _type_of(dtype))


def _ones(x: Any, size: Any = (), dtype: Any = None, **_: Any) -> Any:
    return _filled(x, 1, dtype)


def _zeros(x: Any, size: Any = (), dtype: Any = None, **_: Any) -> Any:
    return _filled(x, 0, dtype)


def _full(x: Any, size: Any, value: Any = None, dtype: Any = None, **_: Any) -> Any:
    return _filled(x, size if value is None else value, dtype)


_Table = dict[str, Callable[..., Any]]
_NAMED: _Table = {
    "exp": exp,
    "log": log,
    "sqrt": sqrt,
    "tanh": tanh,
    "sin": sin,
    "cos": cos,
    "floor": floor,
    "ceil": partial(unary, "ceil"),
    "trunc": partial(unary, "trunc"),
    "rsqrt": lambda x: 1.0 / sqrt(x),
    "exp2": lambda x: exp(x * 0.6931471805599453),
    "log2": lambda x: log(x) * 1.4426950408889634,
    "square": lambda x: x * x,
    "sigmoid": sigmoid,
    "relu": _relu,
    "abs": partial(unary, "abs"),
    "absolute": partial(unary, "abs"),
    "neg": partial(unary, "neg"),
    "negative": partial(unary, "neg"),
    "minimum": minimum,
    "maximum": maximum,
    "min": minimum,
    "max": maximum,
    "clamp": clamp,
    "clip": clamp,
    "clamp_min": lambda x, min: clamp(x, min),
    "clamp_max": lambda x, max: clamp(x, None, max),
    "where": where,
    "logical_and": lambda a, b: binary("and", truth(a), truth(b)),
    "logical_or": lambda a, b: binary("or", truth(a), truth(b)),
    "logical_xor": lambda a, b: binary("xor", truth(a), truth(b)),
    "logical_not": lambda a: unary("not", truth(a)),
    "bitwise_not": partial(unary, "not"),
    "invert": partial(unary, "not"),
    "div": _divide,
    "divide": _divide,
    "true_divide": _divide,
    "add": partial(_scaled, "add"),
    "sub": partial(_scaled, "sub"),
    "subtract": partial(_scaled, "sub"),
    "rsub": lambda a, b: binary("sub", b, a),
    "to": _to,
    "type": _to,
    "astype": _to,
    "float": real,
    "double": real,
    "int": integer,
    "long": integer,
    "bool": truth,
    "new_ones": _ones,
    "new_zeros": _zeros,
    "new_full": _full,
    "ones_like": lambda x, dtype=None, **_: _filled(x, 1, dtype),
    "zeros_like": lambda x, dtype=None, **_: _filled(x, 0, dtype),
    "full_like": lambda x, value, dtype=None, **_: _filled(x, value, dtype),
    "detach": lambda x: x,
    "contiguous": lambda x: x,
    "getitem": item,
}
for _op, _names in {
    "mul": ("mul", "multiply"),
    "mod": ("mod", "remainder"),
    "floordiv": ("floordiv", "floor_divide"),
    "truediv": ("truediv",),
    "pow": ("pow", "power"),
    "and": ("and", "bitwise_and"),
    "or": ("or", "bitwise_or"),
    "xor": ("xor", "bitwise_xor"),
    "shl": ("lshift", "bitwise_left_shift", "left_shift"),
    "shr": ("rshift", "bitwise_right_shift", "right_shift"),
    "lt": ("lt", "less"),
    "le": ("le", "less_equal"),
    "gt": ("gt", "greater"),
    "ge": ("ge", "greater_equal"),
    "eq": ("eq", "equal"),
    "ne": ("ne", "not_equal"),
}.items():
    for _name in _names:
        _NAMED[_name] = partial(binary, _op)
for _op in ("add", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    _NAMED.setdefault("r" + _op, lambda a, b, op=_op: binary(op, b, a))

_METHODS_ONLY = frozenset(("to", "type", "astype", "float", "double", "int", "long", "bool", "detach", "contiguous"))


def apply(function: Any, args: Any, kwargs: Any) -> Any:
    """What torch's or NumPy's `function` gives for symbols."""
    name = getattr(function, "__name__", str(function))
    found = _NAMED.get(name.strip("_"))
    if found is None:
        raise refuse(f"the function {name} of a symbol", f"one of {', '.join(sorted({*_NAMED} - _METHODS_ONLY))}")
    return _called(found, name, args, kwargs)


def method(symbol: Symbol, name: str) -> Any:
    """The method or attribute `name` that a tensor in the symbol's place would have."""
    if name == "dtype":
        torch = sys.modules.get("torch")
        word = {"f": "float32", "i": "int64", "b": "bool"}[symbol.node.type]
        return word if torch is None else getattr(torch, word)
    if name == "device":
        return "cpu"
    if name == "shape":
        return ()
    found = _NAMED.get(name)
    if found is None:
        raise refuse(f"the attribute {name} of a symbol", f"one of {', '.join(sorted(_NAMED))}")
    return lambda *args, **kwargs: _called(found, name, (symbol, *args), kwargs)


_signature = lru_cache(maxsize=256)(inspect.signature)


def _called(function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    try:
        _signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise refuse(f"{name} with other arguments than symbols have: {error}", "those of one number") from None
    return function(*args, **kwargs)


known.apply, known.method = apply, method


def watching() -> AbstractContextManager[Any]:
    """While a function is traced: torch tensors take symbols as indices, those of one element count as numbers."""
    torch = sys.modules.get("torch")
    return nullcontext() if torch is None or not hasattr(torch, "overrides") else _mode()()


@lru_cache(maxsize=1)
def _mode() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    class Indexing(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.__getitem__:
                array, indices = args
                every = indices if isinstance(indices, tuple) else (indices,)
                if any([isinstance(index, (Symbol, Partial)) for index in every]):
                    return item(array, indices)
            elif any([isinstance(arg, Symbol) for arg in (*args, *(kwargs or {}).values())]):
                return apply(function, args, kwargs or {})
            return function(*args, **(kwargs or {}))

    return Indexing
