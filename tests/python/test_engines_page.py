# SPDX-License-Identifier: Apache-2.0
"""Runs docs/engines.md as `test_guide` runs docs/python.md; every section's blocks stand for themselves."""

import re
from pathlib import Path

import pytest
from test_guide import agrees, blocks_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"
TEXT = PAGE.read_text(encoding="utf-8")


def sections():
    """(title, blocks) of each section that has any."""
    for match in re.finditer(r"^## (.+)\n((?:(?!^## ).*\n)*)", TEXT, re.MULTILINE):
        if blocks := blocks_of(match[2]):
            yield match[1], blocks


@pytest.mark.parametrize(("title", "blocks"), [pytest.param(*each, id=each[0]) for each in sections()])
def test_section(title, blocks, capsys, monkeypatch):
    monkeypatch.chdir(PAGE.parents[1])
    namespace = {"__name__": "page"}
    for block in blocks:
        for name in block.needs:
            pytest.importorskip(name)
        capsys.readouterr()
        exec(compile(block.code, f"{PAGE}, {title}", "exec"), namespace)
        printed = capsys.readouterr().out
        assert agrees(printed, block.shown or "", block.tolerance), f"{title} prints\n{printed}"


def test_the_page_is_read_whole():
    assert sum(len(blocks) for _, blocks in sections()) == TEXT.count("```python\n") >= 1
