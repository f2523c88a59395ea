# SPDX-License-Identifier: Apache-2.0
"""Runs docs/python.md: its python blocks in order and in one namespace, comparing what they print with what it shows.

A text block after a python block is what the block prints: line by line, where `...` stands for anything within a line,
and a line that is nothing but `...` for any number of lines. `<!-- needs: torch, transformers -->` before a block names
what it cannot do without; the block is skipped where that is missing. Blocks run in a folder that holds `examples` and
`bench` of this repository and `my-gpt`, a model that the command of the guide made in a few steps.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("numpy")

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "python.md"


class Block(NamedTuple):
    line: int  # of the first line of code, from 1
    code: str
    shown: str | None
    needs: tuple[str, ...]


def blocks_of(page):
    """The python blocks of a Markdown page, in order."""
    blocks, needs, fence, begin = [], (), None, 0
    lines = page.splitlines()
    for number, line in enumerate(lines, 1):
        if fence is None:
            if match := re.fullmatch(r"<!-- needs: (.+) -->", line):
                needs = tuple(word.strip() for word in match[1].split(","))
            elif line.startswith("```"):
                fence, begin = line[3:].strip(), number + 1
            elif line.strip():
                needs = () if not line.startswith("<!--") else needs
            continue
        if line != "```":
            continue
        body = "\n".join(lines[begin - 1 : number - 1]) + "\n"
        if fence == "python":
            blocks.append(Block(begin, body, None, needs))
        elif fence == "text" and blocks and not "".join(lines[_end(blocks[-1]) : begin - 2]).strip():
            blocks[-1] = blocks[-1]._replace(shown=body)
        fence, needs = None, ()
    return blocks


def _end(block):
    """The number of the line of a block's closing fence."""
    return block.line + block.code.count("\n")


def pattern_of(shown):
    """A regular expression for the text that a block shows."""
    parts = []
    for line in shown.splitlines():
        if line.strip() == "...":
            parts.append("(?:.*\n)*")
        else:
            parts.append(".*".join(map(re.escape, line.rstrip().split("..."))) + " *\n")
    return "".join(parts)


BLOCKS = blocks_of(GUIDE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def namespace(tmp_path_factory):
    """The namespace that the blocks share, and the working folder that they expect."""
    folder = tmp_path_factory.mktemp("guide")
    for name in ("examples", "bench"):
        (folder / name).symlink_to(ROOT / name)
    if importlib.util.find_spec("torch") and importlib.util.find_spec("safetensors"):
        made = ["--steps", "2", "--batch", "1", "--context", "1024", "--save", "my-gpt"]
        subprocess.run([sys.executable, "examples/train/train.py", *made], cwd=folder, check=True, capture_output=True)
    path, modules = list(sys.path), set(sys.modules)
    yield {"__name__": "guide", "folder": folder}
    sys.path[:] = path
    for name in {"model", "attention", "run"} - modules:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line_{block.line}")
def test_block(block, namespace, capsys, monkeypatch):
    missing = [name for name in block.needs if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    monkeypatch.chdir(namespace["folder"])
    exec(compile("\n" * (block.line - 1) + block.code, str(GUIDE), "exec"), namespace)
    printed = capsys.readouterr().out
    if block.shown is not None:
        want = pattern_of(block.shown)
        assert re.fullmatch(want, printed), f"{GUIDE}:{block.line} prints\n{printed}\nand shows\n{block.shown}"
    else:
        assert not printed, f"{GUIDE}:{block.line} prints what the page does not show:\n{printed}"


def test_the_guide_is_read_whole():
    text = GUIDE.read_text(encoding="utf-8")
    assert len(BLOCKS) == text.count("```python\n") >= 10
    assert sum(block.shown is not None for block in BLOCKS) == text.count("```text\n")


def test_the_reader_of_the_guide():
    page = "\n".join(
        [
            "a page",
            "<!-- needs: torch, no_such_library -->",
            "```python",
            "print('2.0 s')",
            "```",
            "",
            "```text",
            "... s",
            "```",
            "```sh",
            "not python",
            "```",
            "```python",
            "x = 1",
            "```",
            "words between",
            "```text",
            "not what it prints",
            "```",
        ]
    )
    first, second = blocks_of(page)
    assert first == Block(4, "print('2.0 s')\n", "... s\n", ("torch", "no_such_library"))
    assert second == Block(14, "x = 1\n", None, ())
    assert re.fullmatch(pattern_of("... s\n"), "2.0 s\n")
    assert not re.fullmatch(pattern_of("... s\n"), "2.0 ms\n")
    assert not re.fullmatch(pattern_of("a\n"), "a\nb\n")
    assert re.fullmatch(pattern_of("a\n...\n"), "a\nb\nc\n")
