# SPDX-License-Identifier: Apache-2.0
"""`tessera.jax` on a GPU as far as it can be seen without one and without jax, each check in a process of its own
(xla_protocol.py)."""

from __future__ import annotations

import pytest
from stand_in_checks import checks_of, run_check

SCRIPT = "xla_protocol.py"


@pytest.mark.parametrize("check", [name for name in checks_of(SCRIPT) if name.startswith("check_")])
def test_call_of_xla(check, tmp_path):
    run_check(SCRIPT, check, tmp_path)
