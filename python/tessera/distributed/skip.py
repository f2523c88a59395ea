# SPDX-License-Identifier: Apache-2.0
"""Skip states under context parallelism: each rank carries those of its heads, over all rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..torch.skip import SkipAttention
from .arguments import Given, asked_of, refuse_bad_tensors
from .ulysses import Ulysses

if TYPE_CHECKING:
    from .api import ContextParallel


def examined(
    cp: ContextParallel, module: Any, q: Tensor, k: Tensor, v: Tensor, step: int, stream: str, options: dict[str, Any]
) -> tuple[dict[str, str], Any, Exception | None]:
    """What ranks have to agree on, what says that they did, and why this rank's arguments are refused."""
    failure: Exception | None = None
    if not isinstance(module, SkipAttention):
        failure = TypeError(f"module: got {type(module).__name__}; want a tessera.torch.SkipAttention")
    elif cp.method not in ("auto", "ulysses"):
        failure = NotImplementedError(
            f"method: got {cp.method!r}; want 'ulysses' or 'auto': a step needs all keys of a row tile in one call"
        )
    elif cp.layout.packed:
        failure = NotImplementedError("cu_seqlens: got packed sequences; want seqlen=, as skip states have it")
    else:
        failure = refuse_bad_tensors(cp.layout, cp.rank, Given(q, k, v, (False, None, 0), {}, None, None, None, False))
    if failure is not None:
        return {}, None, failure
    same = {
        "q": f"{tuple(q.shape[:1])} {tuple(q.shape[2:])} {q.dtype}",
        "k": f"{tuple(k.shape[2:])} {k.dtype}",
        "v": f"{tuple(v.shape[2:])} {v.dtype}",
        "module": repr(sorted(module.options.items())),
        "stream": repr(stream),
        "options": repr(sorted(options.items())),
    }
    return same | {"step": str(step)}, ("skip", *same.values()), None


def run(
    exchange: Ulysses, module: SkipAttention, q: Tensor, k: Tensor, v: Tensor, step: int, options: dict[str, Any]
) -> Tensor:
    """This rank's rows of all heads."""
    asked = asked_of((False, None, 0), {}, None, None, False, q.shape[-2], False)
    of_heads = exchange.to_heads(asked, q, k, v)
    return exchange.to_rows(asked, module(*of_heads, step=step, **options))
