# SPDX-License-Identifier: Apache-2.0
"""The modules of LiteAttention (arXiv:2511.11062; names and defaults of its version 0.4) on `tessera.SkipState`.

    from tessera.compat.lite_attention import LiteAttention

A module is one layer's: each layer wants its own, and conditional and unconditional calls a module each. Its rule is
`threshold` of docs/skip-state.md: a tile is left out from the next call on where no score beats its row's maximum over
the tiles before it by 2^threshold; directions alternate from call to call, and what is left out never comes back before
`reset_skip_state`. It differs from LiteAttention on purpose where tokens do not fill tiles: must_do_list takes every
tile that has one of its tokens, must_skip_list leaves out none that has another, and both count in the call that they
are given to. Not here: use_int8, reverse_skip_list=False, config and LiteAttentionRegistry, read_list and write_list
(`active` tells the share).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from ..attention import attention
from ..torch.skip import SkipAttention

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_THRESHOLD = -10.0


class LiteAttention(torch.nn.Module):
    """Attention of one layer over the calls of a diffusion run, with fewer tiles from call to call.

    enable_skipping: False computes all tiles and leaves the list alone.
    threshold: a power of two, from -100 to below 0; nearer to 0 leaves out more. Default -10.
    max_batch_size: of calls. steps: calls between two resets, at most. block: queries and keys of a tile.

    The list is part of `state_dict`. Raises ValueError for values out of range, NotImplementedError for what is not
    here.
    """

    def __init__(
        self,
        enable_skipping: bool = True,
        threshold: float | None = None,
        max_batch_size: int = 2,
        reverse_skip_list: bool = True,
        use_int8: bool = False,
        config: Any = None,
        *,
        steps: int = 1000,
        block: tuple[int, int] = (128, 128),
    ) -> None:
        super().__init__()
        for name, got, want in (
            ("reverse_skip_list", reverse_skip_list, True),
            ("use_int8", use_int8, False),
            ("config", config, None),
        ):
            if got is not want:
                raise NotImplementedError(f"{name}: got {got!r}; want {want!r}")
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size: got {max_batch_size}; want at least 1")
        self.enable_skipping, self.max_batch_size = enable_skipping, max_batch_size
        self._steps, self._block = steps, block
        self.set_threshold(threshold)

    @property
    def threshold(self) -> float:
        return self._threshold

    def set_threshold(self, threshold: float | None) -> None:
        """Another threshold, None for the default; begins anew."""
        value = DEFAULT_THRESHOLD if threshold is None else float(threshold)
        if not -100 <= value < 0:
            raise ValueError(f"threshold: got {value}; want a power of two from -100 to below 0")
        self._threshold = value
        self._attention = SkipAttention(
            rule="threshold", ramp=(value, value), steps=self._steps, warm_up=0, block=self._block
        )
        self.reset_skip_state()

    def reset_skip_state(self) -> None:
        """The next call computes every tile."""
        self._next = 0
        self._shape: tuple[int, ...] | None = None
        self._ranges: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])

    def enable_skip_optimization(self, enable: bool = True) -> None:
        self.enable_skipping = enable

    @property
    def active(self) -> float:
        """Share of the tiles that the next call computes, 0 to 1. Waits for a GPU."""
        return self._attention.state().active if self._next else 1.0

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None = None,
        return_softmax_lse: bool = False,
        must_do_list: Sequence[int] | None = None,
        must_skip_list: Sequence[int] | None = None,
    ) -> Any:
        """query (b, sq, h, d), key (b, sk, hkv, d), value (b, sk, hkv, dv): out (b, sq, h, dv), or (out, lse).

        lse: fp32 (b, h, sq), with return_softmax_lse.

        scale: of query·key, default 1 / sqrt(d). must_do_list, must_skip_list: tokens of keys as [begin, end, begin,
        end, …], ascending, ends exclusive, for this call and the list of the next. A call of another shape begins anew.
        No gradient. Raises ValueError for a larger batch than max_batch_size, ranges that are not of that form or want
        the same tokens, and more calls than `steps` without a reset.
        """
        if query.dim() != 4 or key.dim() != 4:
            raise ValueError(f"query: got shape {tuple(query.shape)}; want (batch, seqlen, heads, dim), as of key")
        if query.shape[0] > self.max_batch_size:
            raise ValueError(
                f"query: got a batch of {query.shape[0]}; want at most max_batch_size, {self.max_batch_size}"
            )
        if not self.enable_skipping:
            return attention(query, key, value, scale=scale, return_lse=return_softmax_lse)
        shape = (*query.shape[:3], key.shape[1])
        if shape != self._shape:
            self.reset_skip_state()
        if self._next == self._steps:
            raise ValueError(f"steps: got call {self._next + 1}; want at most {self._steps} before reset_skip_state()")
        block, keys = self._block[1], key.shape[1]
        done = [
            (begin // block * block, min(-(-end // block) * block, keys))
            for begin, end in _ranges("must_do_list", must_do_list, keys)
        ]
        left_out = [
            (-(-begin // block) * block, end if end == keys else end // block * block)
            for begin, end in _ranges("must_skip_list", must_skip_list, keys)
        ]
        ranges = (done, [(begin, end) for begin, end in left_out if begin < end])
        told = {} if ranges == self._ranges else {"must_do": ranges[0], "must_skip": ranges[1]}
        out = self._attention(query, key, value, step=self._next, scale=scale, return_lse=return_softmax_lse, **told)
        self._next, self._shape, self._ranges = self._next + 1, shape, ranges
        return out

    def get_extra_state(self) -> dict[str, Any]:
        """What the list alone does not tell."""
        return {"next": self._next, "shape": self._shape, "threshold": self._threshold}

    def set_extra_state(self, saved: dict[str, Any]) -> None:
        """Raises ValueError for another threshold's."""
        if saved["threshold"] != self._threshold:
            raise ValueError(f"threshold: got a state of {saved['threshold']}; want one of {self._threshold}")
        self._next, self._shape = saved["next"], saved["shape"]
        self._ranges = ([], [])  # a state forgets them: the next call tells them again


class SeqParallelLiteAttention(torch.nn.Module):
    """A `LiteAttention` for each part of the keys, which `split_idx` tells: parts are merged by their LSEs.

    num_nodes: parts. Other arguments: as `LiteAttention` has them.
    """

    def __init__(
        self,
        num_nodes: int,
        enable_skipping: bool = True,
        threshold: float | None = None,
        max_batch_size: int = 2,
        use_int8: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if num_nodes < 1:
            raise ValueError(f"num_nodes: got {num_nodes}; want at least 1")
        self.lite_attention = torch.nn.ModuleList(
            LiteAttention(enable_skipping, threshold, max_batch_size, use_int8=use_int8, **options)
            for _ in range(num_nodes)
        )

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, split_idx: int, *args: Any, **options: Any
    ) -> Any:
        """`LiteAttention.forward` of part `split_idx` of the keys. Raises ValueError for a part that there is not."""
        if not 0 <= split_idx < len(self.lite_attention):
            raise ValueError(f"split_idx: got {split_idx}; want 0 to below num_nodes, {len(self.lite_attention)}")
        return self.lite_attention[split_idx](query, key, value, *args, **options)

    def reset_skip_state(self) -> None:
        for part in self.lite_attention:
            part.reset_skip_state()

    def set_threshold(self, threshold: float | None) -> None:
        for part in self.lite_attention:
            part.set_threshold(threshold)

    def enable_skip_optimization(self, enable: bool = True) -> None:
        for part in self.lite_attention:
            part.enable_skip_optimization(enable)


def _ranges(name: str, given: Sequence[int] | None, keys: int) -> list[tuple[int, int]]:
    """[begin, end, …] as pairs."""
    flat = [int(x) for x in given or ()]
    pairs = list(zip(flat[::2], flat[1::2], strict=False))
    ascending = all(a < b for a, b in pairs) and all(a[1] <= b[0] for a, b in pairwise(pairs))
    if len(flat) % 2 or not ascending or (flat and (flat[0] < 0 or flat[-1] > keys)):
        raise ValueError(f"{name}: got {flat}; want [begin, end, begin, end, …], ascending, within {keys} keys")
    return pairs
