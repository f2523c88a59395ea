# SPDX-License-Identifier: Apache-2.0
"""Decoding over a cache that is spread over ranks: each attends to its own keys, then results are merged everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._libraries import refuse_gradient
from ..attention import attention
from ..operations import combine
from .wire import Team


def decode(
    team: Team,
    q: Tensor,
    k: Any,
    v: Tensor | None,
    *,
    sinks: Tensor | None,
    return_lse: bool,
    out_dtype: torch.dtype | None,
    options: dict[str, Any],
) -> Any:
    refuse_gradient("decode", "has no gradient", q=q)
    out, lse = attention(q, k, v, return_lse=True, out_dtype=torch.float32, **options)
    packed = q.dim() == 3
    # One message: out and its LSE beside it, a column more.
    column = lse.transpose(-1, -2)[..., None]
    parts = team.gather(torch.cat((out, column), -1), "the merging of a decode step")
    lses = parts[..., -1].transpose(-1, -2).contiguous()
    outs = parts[..., :-1].contiguous()
    result, merged = combine(outs, lses, sinks=sinks, out_dtype=out_dtype or q.dtype)
    assert merged.dim() == (2 if packed else 3)
    return (result, merged) if return_lse else result
