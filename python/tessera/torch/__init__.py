# SPDX-License-Identifier: Apache-2.0
"""Tessera for torch: operators of ``torch.library`` with autograd, torch.compile, vmap, autocast; SDPA's replacement.

``tessera.attention`` comes here with torch tensors; there is no need to import this module for it.

- Gradients: of q, k, v, sinks, k2, v2, through the output and the LSE, once (a double backward is refused), and on the
  CPU of fp32 tensors that a traced score reads. Whatever else requires grad is refused, and so is any gradient through
  paged keys.
- ``torch.autocast`` casts q, k, v, k2, v2 as it does for scaled_dot_product_attention; sinks and slopes stay fp32.
- ``torch.compile(fullgraph=True)`` traces one operator, dynamic shapes included. With packed sequences give
  max_seqlen_q and max_seqlen_k: compiled code cannot read them from cu_seqlens, and takes the token count instead.
- ``torch.vmap`` over dense q, k, v makes the mapped dimension part of the batch; other forms are refused, and so is
  ``torch.func.grad``.
- A dropout seed that is not given is drawn from torch's default generator; in a captured CUDA graph by each replay.
- CUDA tensors, all of a call's on one device, are computed on its current stream in memory of torch's allocator, and
  nothing waits: calls can be captured in a ``torch.cuda.graph`` after one run of the same shapes. fp32 tensors raise
  NotImplementedError, and so does the backward of head dims above 256 and of a score text without ``derivative_text``.
- ``linear_decode``, ``linear_chunk``, ``linear_flush`` and ``kv_append`` are operators too, which say what they write:
  ``torch.compile(fullgraph=True)`` traces them.
- Every call, of whatever function of the package, counts what it writes (``out``, caches, states) as modified in place:
  a backward that needs what was there before raises.
- ``torch.use_deterministic_algorithms`` makes the backward deterministic.
"""

import warnings

from .calls import forward
from .library import LIBRARY as LIBRARY
from .linear import linear_attention
from .nsa import NativeSparseAttention
from .sdpa import SdpaReport, sdpa_replacement
from .skip import SkipAttention

# torch.compile traces through caches and says so once for each; ours are of pure functions.
warnings.filterwarnings("ignore", message=r"(?s)Dynamo detected a call to a `functools\.lru_cache`.*tessera")

__all__ = ["NativeSparseAttention", "SdpaReport", "SkipAttention", "forward", "linear_attention", "sdpa_replacement"]
