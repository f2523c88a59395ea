# SPDX-License-Identifier: Apache-2.0
"""Routes torch's scaled_dot_product_attention to Tessera, where Tessera computes the same function.

A TorchFunctionMode, and not a patch of ``torch.nn.functional``, because a mode belongs to the thread that entered it,
sees the calls of modules that imported the function by name before, leaves no trace when an exception passes, and
nests. It costs every torch function inside the block about a microsecond.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from .._arguments import parse
from ..values import Offsets
from .calls import forward
from .mask_patterns import MaskPattern, Unrecognised, recognise

_SDPA = torch.nn.functional.scaled_dot_product_attention
_MULTI_HEAD = torch.nn.functional.multi_head_attention_forward
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class SdpaReport:
    """What became of the calls inside one ``sdpa_replacement`` block."""

    replaced: int = 0  # calls that Tessera computed
    fallbacks: dict[str, int] = field(default_factory=dict)  # reason: calls that torch computed

    @property
    def calls(self) -> int:
        """Calls of scaled_dot_product_attention that were seen."""
        return self.replaced + sum(self.fallbacks.values())

    def __str__(self) -> str:
        lines = [f"scaled_dot_product_attention: {self.replaced} of {self.calls} calls by Tessera"]
        lines += [f"  {self.fallbacks[reason]} by torch: {reason}" for reason in sorted(self.fallbacks)]
        return "\n".join(lines)


@contextlib.contextmanager
def sdpa_replacement(*, strict: bool = False) -> Iterator[SdpaReport]:
    """Inside the block, ``torch.nn.functional.scaled_dot_product_attention`` runs on Tessera where it can.

    Yields a SdpaReport that counts the calls and says why each call that went to torch did. Calls keep torch's
    meaning: (batch, heads, seqlen, head_dim) without a copy, ``is_causal`` aligned at the top left corner, 0 for rows
    without a visible key. A mask is read (on CUDA: waited for), and replaced when it is exactly a window, lengths of
    keys or rows, or both; under torch.compile and in a CUDA graph, where data cannot be read, every mask goes to torch.
    Dropout draws its seed from torch's default generator: repeatable by manual_seed, but not torch's own bits. Results
    lie in memory as (batch, seqlen, heads, head_dim), which torch does on CUDA. Enter the block outside of compiled
    code. On CUDA, fp32 is torch's, and so are gradients of head dims above 256.

    strict: raise NotImplementedError with the reason instead of falling back.
    """
    report = SdpaReport()
    with _SdpaMode(report, strict):
        yield report


class _SdpaMode(TorchFunctionMode):
    def __init__(self, report: SdpaReport, strict: bool) -> None:
        super().__init__()
        self._report = report
        self._strict = strict
        self._patterns = WeakIdKeyDictionary()  # mask: (what it was recognised for, outcome)
        # multi_head_attention_forward is itself a torch function, and inside of one no mode is asked again. Hence
        # nn.MultiheadAttention runs a copy of it that calls this mode.
        self._multi_head = FunctionType(
            _MULTI_HEAD.__code__,
            {**_MULTI_HEAD.__globals__, _SDPA.__name__: self._attend},
            argdefs=_MULTI_HEAD.__defaults__,
        )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _SDPA:
            return self._attend(*args, **kwargs)
        return (self._multi_head if func is _MULTI_HEAD else func)(*args, **kwargs)

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        outcome = self._route(*args, **kwargs)
        if isinstance(outcome, Tensor):
            self._report.replaced += 1
            return outcome
        if self._strict:
            raise NotImplementedError(f"scaled_dot_product_attention: got {outcome}; want what Tessera replaces")
        self._report.fallbacks[outcome] = self._report.fallbacks.get(outcome, 0) + 1
        return _SDPA(*args, **kwargs)

    def _route(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | str:
        """Tessera's result, or the reason why the call is torch's."""
        reason = _unsupported_tensors(query, key, value, enable_gqa) or _unsupported_numbers(dropout_p, scale)
        if reason is not None:
            return reason
        if attn_mask is not None and is_causal:
            return "attn_mask together with is_causal"
        if attn_mask is not None and attn_mask.device != query.device:
            return f"device {attn_mask.device} of attn_mask"
        heads_dropped = query.dim() == 3
        if heads_dropped:  # (batch, seqlen, head_dim) is one head
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            attn_mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        batch, _, seqlen_q, _ = query.shape
        seqlen_k = key.shape[2]
        pattern = MaskPattern(right=0 if is_causal else None)
        if attn_mask is not None:
            found = self._pattern(attn_mask, batch, seqlen_q, seqlen_k)
            if isinstance(found, Unrecognised):
                return found.reason
            pattern = found
        try:
            q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            arguments = _pattern_arguments(pattern, batch, seqlen_q, seqlen_k, q.device)
            call = parse(q, k, v, scale=scale, dropout=dropout_p, **arguments)
            out = forward(call, q, k, v)[0].transpose(1, 2)
        except NotImplementedError as refusal:
            return str(refusal)
        return out.squeeze(1) if heads_dropped else out

    def _pattern(self, mask: Tensor, batch: int, seqlen_q: int, seqlen_k: int) -> MaskPattern | Unrecognised:
        if torch.compiler.is_compiling():
            return Unrecognised("a mask under torch.compile")
        if mask.is_cuda and torch.cuda.is_current_stream_capturing():
            return Unrecognised("a mask in a captured graph")
        if mask.requires_grad:
            return Unrecognised("a mask that requires grad")
        # An inference tensor has no version counter, so its contents may change unnoticed: it is read every time.
        asked = None if mask.is_inference() else (mask._version, batch, seqlen_q, seqlen_k)
        known = self._patterns.get(mask)
        if asked is not None and known is not None and known[0] == asked:
            return known[1]
        with torch.no_grad():
            pattern = recognise(mask, batch, seqlen_q, seqlen_k)
        if asked is not None:
            self._patterns[mask] = (asked, pattern)
        return pattern


def _unsupported_numbers(dropout_p: float, scale: float | None) -> str | None:
    """Why these numbers are for torch, which computes with them or raises its own error; None if they are not."""
    if not 0.0 <= dropout_p < 1.0:
        return f"dropout_p {dropout_p}"
    if scale is not None and not abs(scale) <= torch.finfo(torch.float32).max:
        return f"scale {scale}"
    return None


def _unsupported_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> str | None:
    """Why these tensors are not for Tessera; None if they are."""
    tensors = (query, key, value)
    if any(type(x) not in (Tensor, torch.nn.Parameter) for x in tensors) and not torch.compiler.is_compiling():
        return "a tensor subclass"
    if any(x.layout != torch.strided for x in tensors):
        return f"layout {query.layout}"
    if query.device.type not in ("cpu", "cuda") or any(x.device != query.device for x in tensors):
        return f"device {', '.join(sorted({str(x.device) for x in tensors}))}"
    wide = max(query.shape[-1], value.shape[-1]) > 256 if query.dim() > 0 and value.dim() > 0 else False
    if query.is_cuda and wide and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "gradients on cuda of head dims above 256"
    if query.dim() not in (3, 4) or key.dim() != query.dim() or value.dim() != query.dim():
        return f"{query.dim()}, {key.dim()} and {value.dim()} dimensions"
    if any(x.dtype not in _DTYPES for x in tensors):
        return f"dtype {', '.join(sorted({str(x.dtype) for x in tensors if x.dtype not in _DTYPES}))}"
    if len({x.dtype for x in tensors}) > 1 and not torch.is_autocast_enabled(query.device.type):
        return "q, k, v of different dtypes"
    if key.shape[0] != query.shape[0] or value.shape[0] != query.shape[0]:
        return "batch sizes that broadcast"
    if query.dim() == 4 and query.shape[1] == 0:
        return "no heads"
    if key.shape[:-1] != value.shape[:-1] or key.shape[-1] != query.shape[-1]:
        return "shapes of k and v that do not fit"
    if query.dim() == 4 and query.shape[1] != key.shape[1]:
        if not enable_gqa:
            return "other heads in k than in q without enable_gqa"
        if key.shape[1] == 0 or query.shape[1] % key.shape[1] != 0:
            return "heads of q that are no multiple of those of k"
    if any(x.shape[-1] % 8 != 0 or not 8 <= x.shape[-1] <= 512 for x in tensors):
        return f"head dims {query.shape[-1]} and {value.shape[-1]}"
    if any(x.stride(-1) != 1 for x in tensors):
        return "a last dimension that is not contiguous"
    return None


def _pattern_arguments(
    pattern: MaskPattern, batch: int, seqlen_q: int, seqlen_k: int, device: torch.device
) -> dict[str, Any]:
    """The pattern in Tessera's terms, where positions align at the bottom right corner unless offsets are given."""
    arguments: dict[str, Any] = {}
    if pattern.keys is not None:
        arguments["seqused_k"] = pattern.keys
    if pattern.rows is not None:
        arguments["seqused_q"] = pattern.rows
    left, right = pattern.left, pattern.right
    if left is None and right is None:
        return arguments
    if arguments or pattern.starts is not None:  # default positions would follow the lengths of each sequence
        starts = pattern.starts
        first = torch.zeros(batch, dtype=torch.int64, device=device) if starts is None else starts
        arguments["offsets"] = Offsets(q=first)
        arguments["window"] = (left, right)
    else:  # row i stands at i + seqlen_k - seqlen_q: the window moves by as much
        shift = seqlen_k - seqlen_q
        arguments["window"] = (None if left is None else left + shift, None if right is None else right - shift)
    return arguments
