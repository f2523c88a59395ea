# SPDX-License-Identifier: Apache-2.0
"""The `tessera` command, as a script of the wheel and as ``python -m tessera`` (docs/cli.md)."""

from __future__ import annotations

import os
import pathlib
import sys

_FILE_ERROR = 4  # the command's exit code for files that cannot be opened


def main() -> int:
    """Becomes the command, with this process's arguments. Returns an exit code where there is none."""
    command = pathlib.Path(__file__).parent / "bin" / "tessera"
    try:
        os.execv(command, ["tessera", *sys.argv[1:]])
    except FileNotFoundError:
        print(
            f"tessera: got no {command}; want a package that was built where CMake finds fmt, nlohmann_json and CLI11 "
            "(Debian: libfmt-dev nlohmann-json3-dev libcli11-dev)",
            file=sys.stderr,
        )
    return _FILE_ERROR


if __name__ == "__main__":
    sys.exit(main())
