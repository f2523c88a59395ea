# SPDX-License-Identifier: Apache-2.0
"""What stands around context parallel attention: shards, meshes, autograd's modes, decoding."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("no Gloo", allow_module_level=True)

import distributed_calls as calls  # noqa: E402
from distributed_ranks import run_ranks  # noqa: E402


@pytest.mark.parametrize("name", calls.ALL)
def test_on_every_rank(name):
    """Each function of distributed_calls, in four processes; they assert for themselves."""
    found = run_ranks(4, calls.check, name)
    assert found == [None] * 4, found
