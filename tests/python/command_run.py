# SPDX-License-Identifier: Apache-2.0
"""`tessera run` from Python, and its comparison with the package."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

ml_dtypes = pytest.importorskip("ml_dtypes")
THREADS = 2  # the same on both sides: splits may follow their number

DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


class Command:
    """`tessera run` on arrays through .npy files in a folder of its own."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.folder = path, folder

    def __call__(self, words: str, wishes: str = "", seed: int = 0, **arrays: np.ndarray) -> dict[str, np.ndarray]:
        """The outputs by slot."""
        done = self.run(words, wishes, seed, arrays)
        assert done.returncode == 0, done.stderr
        found = {"o" if path.name == "o.npy" else path.name.split(".")[1]: path for path in self.folder.glob("o*.npy")}
        return {slot: _read(path) for slot, path in found.items()}

    def refusal(self, words: str, **arrays: np.ndarray) -> str:
        """The text of its error."""
        done = self.run(words, "", 0, arrays)
        assert done.returncode in (2, 3), done.stdout
        return done.stderr.removeprefix("tessera: ").strip()

    def run(self, words: str, wishes: str, seed: int, arrays: dict) -> subprocess.CompletedProcess:
        call = [
            str(self.path),
            "run",
            "--quiet",
            f"--threads={THREADS}",
            f"--seed={seed}",
            f"--out={self.folder}/o.npy",
        ]
        for wish in wishes.split():
            call += ["--wish", wish]
        for name, value in arrays.items():
            file = self.folder / f"{name}.in.npy"
            np.save(file, value)
            call += ["--in", f"{name}={file}"]
        return subprocess.run([*call, "--", *words.split()], capture_output=True, text=True, check=False)


def _read(path: Path) -> np.ndarray:
    read = np.load(path)
    return read.view(ml_dtypes.bfloat16) if read.dtype == np.dtype("V2") else read


def normal(rng, *shape, dtype="fp32"):
    return rng.standard_normal(shape).astype(DTYPES[dtype])


def identical(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    assert got.tobytes() == want.tobytes()
