# SPDX-License-Identifier: Apache-2.0
"""Tensors that a score or mask function reads elements of, by symbols."""

from __future__ import annotations

import sys
from typing import Any

from .._libraries import dtype_name
from .graph import Graph, Node
from .symbols import Symbol, as_symbol, built, known, refuse

_DTYPES = ("fp32", "fp16", "bf16", "int32", "int64", "uint8")


class Captured:
    """An array whose elements a score or a mask function reads: `captured(array)[head, q_idx - kv_idx]`.

    fp32, fp16 and bf16 are read as fp32, int32, int64 and uint8 as int64, truth as truth; up to 4 dimensions, none
    empty, and up to four arrays a call. torch tensors need no wrapping. An index outside is moved to the nearest
    inside; a constant one outside raises TraceError, as do indices that are floats, too many of them, other dtypes.
    """

    def __init__(self, array: Any) -> None:
        self.array = array

    def __getitem__(self, indices: Any) -> Any:
        return item(self.array, indices)


class Partial:
    """A captured tensor with some of its indices."""

    def __init__(self, array: Any, indices: tuple[Any, ...]) -> None:
        self.array, self.indices = array, indices

    def __getitem__(self, indices: Any) -> Any:
        more = indices if isinstance(indices, tuple) else (indices,)
        return item(self.array, (*self.indices, *more))


def item(array: Any, indices: Any) -> Any:
    """`array[indices]`: a symbol once there is an index for each dimension, before that what takes the others."""
    indices = indices if isinstance(indices, tuple) else (indices,)
    graph = next((index.graph for index in indices if isinstance(index, Symbol)), None)
    rank = len(array.shape)
    if len(indices) > rank:
        raise refuse(f"{len(indices)} indices of a tensor of shape {tuple(array.shape)}", "one a dimension")
    if graph is None and len(indices) < rank:
        return Captured(array[indices])
    if len(indices) < rank:
        return Partial(array, indices)
    if graph is None:
        raise refuse("an element of a captured array without a symbol among its indices", "the number, array[i].item()")
    nodes = [_index(graph, index, size) for index, size in zip(indices, array.shape, strict=True)]
    return _load(graph, array, tuple(nodes))


def _index(graph: Graph, index: Any, size: int) -> Node:
    node = as_symbol(graph, index).node
    if node.type != "i":
        raise refuse("an index that is a float or a truth", "an integer")
    if node.is_constant and -size <= node.data < 0:
        return graph.constant(node.data + size)
    if node.is_constant and not 0 <= node.data < size:
        raise refuse(f"the index {node.data} in a dimension of {size}", f"one from {-size} to {size - 1}")
    return node


def _load(graph: Graph, array: Any, nodes: tuple[Node, ...]) -> Symbol:
    for number, kept in enumerate(graph.arrays):
        if kept is array:
            return _element(graph, number, nodes, array)
    dtype = str(array.dtype).rpartition(".")[2]
    name = "uint8" if dtype == "bool" else dtype_name(array.dtype, "a captured tensor")
    if name not in _DTYPES or len(array.shape) > 4 or 0 in array.shape:
        raise refuse(
            f"a captured tensor of shape {tuple(array.shape)} in {name}",
            f"up to 4 dimensions, none empty, in {', '.join(_DTYPES)} or bool",
        )
    graph.arrays.append(array)
    graph.tensors.append((name, len(array.shape)))
    return _element(graph, len(graph.arrays) - 1, nodes, array)


def _element(graph: Graph, number: int, nodes: tuple[Node, ...], array: Any) -> Symbol:
    loaded = built(graph, graph.load, number, nodes)
    truth = str(array.dtype).endswith("bool")
    return Symbol(graph, graph.cast(loaded.node, "b")) if truth else loaded


def element_of(graph: Graph, value: Any) -> Symbol | None:
    """The one element of an array without dimensions; None for what is no array."""
    if isinstance(value, Captured):
        value = value.array
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "dtype"):
        return None
    if len(shape):
        raise refuse(f"a tensor of shape {tuple(shape)} as a number", "an element of it, tensor[…]")
    return _load(graph, value, ())


known.element_of = element_of


def bindable(array: Any) -> Any:
    """The array as bindings take it: truth as bytes, the last dimension contiguous."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        if array.dtype == torch.bool:
            array = array.view(torch.uint8)
        return array if array.dim() == 0 or array.stride(-1) == 1 else array.contiguous()
    if str(array.dtype) == "bool":
        array = array.view("uint8")
    strides = getattr(array, "strides", None)
    return array.copy() if strides and strides[-1] != array.itemsize else array
