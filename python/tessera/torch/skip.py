# SPDX-License-Identifier: Apache-2.0
"""Attention of a layer whose list of tiles lives across the steps of a diffusion run, as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..skip import SkipState
from .library import LIBRARY

if TYPE_CHECKING:
    from collections.abc import Sequence


class SkipAttention(torch.nn.Module):
    """`tessera.SkipState` for one layer of a model, with a state for each stream of calls.

    A stream's state is allocated by its first call, for the shapes of that: conditional and unconditional calls are
    streams with names of their own. Options are those of `SkipState` but for the shape. States are part of
    `state_dict`. There are no parameters and no gradient. A stream's state lies where the tensors of its last call did;
    steps on a GPU may be captured into a CUDA graph behind a step that was not, which allocates the state.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        shape = {"seqlen_q", "seqlen_k", "heads_q", "batch", "total_q"} & options.keys()
        if shape:
            raise TypeError(f"{sorted(shape)[0]}: got an argument; want none, a stream's first call has the shape")
        # Raises for bad options.
        SkipState(seqlen_q=1, seqlen_k=1, heads_q=_most_heads(options), like=torch.empty(0), **options)
        self._options = options
        self._states: dict[str, SkipState] = {}
        self._shapes: dict[str, dict[str, Any]] = {}

    @property
    def options(self) -> dict[str, Any]:
        """Those of the states."""
        return dict(self._options)

    def state(self, stream: str = "") -> SkipState:
        """The state of a stream. Raises KeyError before the stream's first call."""
        return self._states[stream]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        step: int,
        stream: str = "",
        must_do: Sequence[tuple[int, int]] | None = None,
        must_skip: Sequence[tuple[int, int]] | None = None,
        **options: Any,
    ) -> Any:
        """q (batch, seqlen_q, heads_q, dim), k and v (batch, seqlen_k, heads_kv, dim): `attention` in step `step`.

        must_do, must_skip: ranges of key tokens from this call on, as `SkipState.set_ranges` takes them; where both are
        None they stay. Another shape than the stream's is taken at step 0, which begins anew. Raises ValueError for it
        at other steps, and as `SkipState` does.
        """
        if q.dim() != 4 or k.dim() != 4:
            raise ValueError(f"q: got shape {tuple(q.shape)}; want (batch, seqlen, heads, dim), as of k")
        shape: dict[str, Any] = {
            "batch": q.shape[0],
            "seqlen_q": q.shape[1],
            "heads_q": q.shape[2],
            "seqlen_k": k.shape[1],
        }
        state = self._states.get(stream)
        if state is None:
            state = self._states[stream] = SkipState(**shape, **self._options, like=q)
        elif state.device != (q.device.index if q.is_cuda else None):
            state = self._states[stream] = state.to(q)
        if shape != self._shapes.setdefault(stream, shape):
            if step != 0:
                raise ValueError(
                    f"q: got {shape} in step {step} of a run of {self._shapes[stream]}; want that shape, or step 0"
                )
            state.reshape(**shape)
        self._shapes[stream] = shape
        if must_do is not None or must_skip is not None:
            state.set_ranges(must_do or (), must_skip or ())
        return state(q, k, v, step=step, **options)

    def reset(self) -> None:
        """All streams begin anew."""
        for state in self._states.values():
            state.reset()

    @property
    def nbytes(self) -> int:
        """Bytes of the states of all streams."""
        return sum(int(state.nbytes) for state in self._states.values())

    def extra_repr(self) -> str:
        return "; ".join(f"{stream or 'one stream'}: {state!r}" for stream, state in self._states.items())

    def get_extra_state(self) -> dict[str, Any]:
        """States by stream: shape, and bytes as a uint8 tensor."""
        return {
            stream: (self._shapes[stream], torch.frombuffer(bytearray(state.to_bytes()), dtype=torch.uint8))
            for stream, state in self._states.items()
        }

    def set_extra_state(self, saved: dict[str, Any]) -> None:
        """What `get_extra_state` gave. Raises ValueError for states of other options or another layer."""
        states = {}
        for stream, (shape, data) in saved.items():
            state = states[stream] = SkipState(**shape, **self._options, like=data)
            state.from_bytes(LIBRARY.to_bytes(data))
        self._states = states
        self._shapes = {stream: dict(shape) for stream, (shape, _) in saved.items()}


def _most_heads(options: dict[str, Any]) -> int:
    """As many heads as options of single heads need; which a model has is not known yet."""
    return 1 + int(max((*(options.get("heads") or {}), 0)))
