# SPDX-License-Identifier: Apache-2.0
"""docs/cli.md and the options of the C++ command."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

CLI_GUIDE = Path(__file__).parents[2] / "docs" / "cli.md"
VERBS = ("info", "explain", "run", "verify", "bench", "compile", "doctor", "random")


class TestDocumentation:
    """docs/cli.md names the options that the command has, and no others."""

    @staticmethod
    def options_of(command: Path, verb: str) -> set[str]:
        done = subprocess.run([str(command), verb, "--help"], capture_output=True, text=True, check=True)
        listed = "".join(line for line in done.stdout.splitlines(keepends=True) if re.match(r"  -", line))
        return set(re.findall(r"--[a-z][a-z-]*", re.sub(r"(Excludes|Needs):.*", "", listed))) - {"--help"}

    @pytest.mark.parametrize("verb", VERBS)
    def test_names_every_option_of_a_verb(self, tessera_command, verb):
        sections = re.split(r"^## ", CLI_GUIDE.read_text(), flags=re.MULTILINE)
        section = next(each for each in sections if each.startswith(f"{verb}\n"))
        shared = next(each for each in sections if each.startswith("Exit codes"))
        known = self.options_of(tessera_command, verb)
        assert known - set(re.findall(r"--[a-z][a-z-]*", section + shared)) == set()

    def test_names_no_option_that_there_is_not(self, tessera_command):
        known = set().union(*(self.options_of(tessera_command, verb) for verb in VERBS))
        assert set(re.findall(r"--[a-z][a-z-]*", CLI_GUIDE.read_text())) <= known | {"--help"}
