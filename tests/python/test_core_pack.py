# SPDX-License-Identifier: Apache-2.0
"""A package with a pack of kernels calls a GPU without any compiler; the driver is the stand-in of tests/fakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tessera

FOLDER = Path(__file__).parent
FAKES = Path(os.environ.get("TESSERA_FAKES", FOLDER.parents[1] / "build" / "release" / "fakes"))
PACK = Path(tessera.__file__).parent / "tessera.pack"

CALL = """
import os
import fake_gpu
os.environ["TESSERA_NVRTC"] = "/nowhere"
import tessera
q, k, v = (fake_gpu.Array((1, 4096, 16, 128)) for _ in "qkv")
tessera.attention(q, k, v, causal=True)
print(fake_gpu.gpu.launches)
"""


def first_call(pack: str) -> subprocess.CompletedProcess[str]:
    variables = {"TESSERA_FAKES": str(FAKES), "PYTHONPATH": str(FOLDER), "HOME": "/nowhere", "TESSERA_PACK": pack}
    return subprocess.run([sys.executable, "-c", CALL], env=variables, capture_output=True, text=True)


@pytest.mark.skipif(not PACK.exists(), reason="a package without a pack")
@pytest.mark.skipif(not (FAKES / "libcuda.so.1").exists(), reason="no stand-ins of libcuda and NVRTC")
def test_a_first_call_needs_no_compiler():
    with_pack, without = first_call(""), first_call("none")
    assert with_pack.returncode == 0, with_pack.stderr
    assert with_pack.stdout == "1\n"
    assert without.returncode != 0 and "nvrtc: got none" in without.stderr
