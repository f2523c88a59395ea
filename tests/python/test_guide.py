# SPDX-License-Identifier: Apache-2.0
"""Runs docs/python.md: its python blocks in order and in one namespace, comparing what they print with what it shows.

A text block after a python block is what the block prints: line by line, where `...` stands for anything within a line,
and a line that is nothing but `...` for any number of lines. `<!-- numbers: within 20% -->` before the text block lets
its numbers be off by so much, `<!-- numbers: an example -->` by anything (times, a model trained for longer); the words
around them still have to be right. `<!-- needs: torch, transformers -->` before a python block names what it cannot do
without; it is skipped where that is missing. Blocks run in a folder that holds `examples` and `bench` of this clone and
`my-gpt`, a model that the command of the guide made in a few steps.
"""

import importlib.util
import math
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
    needs: tuple[str, ...]
    shown: str | None = None
    tolerance: float = 0.0  # of numbers, relative


NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def blocks_of(page):
    """The python blocks of a Markdown page, in order."""
    blocks, needs, tolerance, fence, begin = [], (), 0.0, None, 0
    lines = page.splitlines()
    for number, line in enumerate(lines, 1):
        if fence is None:
            if match := re.fullmatch(r"<!-- needs: (.+) -->", line):
                needs = tuple(word.strip() for word in match[1].split(","))
            elif match := re.fullmatch(r"<!-- numbers: (?:within (\d+)%|an example) -->", line):
                tolerance = math.inf if match[1] is None else int(match[1]) / 100
            elif line.startswith("```"):
                fence, begin = line[3:].strip(), number + 1
            elif line.strip():
                needs, tolerance = (), 0.0
            continue
        if line != "```":
            continue
        body = "\n".join(lines[begin - 1 : number - 1]) + "\n"
        if fence == "python":
            blocks.append(Block(begin, body, needs))
        elif fence == "text" and blocks and _only_comments(lines[_end(blocks[-1]) : begin - 2]):
            blocks[-1] = blocks[-1]._replace(shown=body, tolerance=tolerance)
        fence, needs, tolerance = None, (), 0.0
    return blocks


def _only_comments(lines):
    return all(not line.strip() or line.startswith("<!--") for line in lines)


def _end(block):
    """The number of the line of a block's closing fence."""
    return block.line + block.code.count("\n")


def agrees(printed, shown, tolerance=0.0):
    """Whether a block printed what the page shows."""
    if tolerance:  # numbers apart from the words; spaces may differ, because numbers have widths
        got, want = ([float(n) for n in NUMBER.findall(text)] for text in (printed, shown))
        if len(got) != len(want) or any(abs(g - w) > tolerance * abs(w) for g, w in zip(got, want, strict=True)):
            return False
        printed, shown = (
            "".join(" ".join(line.split()) + "\n" for line in NUMBER.sub("0", text).splitlines())
            for text in (printed, shown)
        )
    parts = []
    for line in shown.splitlines():
        if line.strip() == "...":
            parts.append("(?:.*\n)*")
        else:
            parts.append(".*".join(map(re.escape, line.rstrip().split("..."))) + " *\n")
    return re.fullmatch("".join(parts), printed) is not None


BLOCKS = blocks_of(GUIDE.read_text(encoding="utf-8"))


def _new_namespace(folder):
    return {"__name__": "guide", "folder": folder, "run": set()}


@pytest.fixture(scope="module")
def namespace(tmp_path_factory):
    """The namespace that the blocks share, and the working folder that they expect."""
    folder = tmp_path_factory.mktemp("guide")
    for name in ("examples", "bench"):
        (folder / name).symlink_to(ROOT / name)
    if importlib.util.find_spec("torch") and importlib.util.find_spec("safetensors"):
        made = ["--alone", "--steps", "2", "--batch", "1", "--context", "1024", "--save", "my-gpt"]
        subprocess.run([sys.executable, "examples/train/train.py", *made], cwd=folder, check=True, capture_output=True)
    path, modules = list(sys.path), set(sys.modules)
    yield _new_namespace(folder)
    sys.path[:] = path
    for name in {"model", "attention", "run"} - modules:
        sys.modules.pop(name, None)


def _missing(block):
    return [name for name in block.needs if importlib.util.find_spec(name) is None]


def _run(block, namespace):
    namespace["run"].add(block.line)
    exec(compile("\n" * (block.line - 1) + block.code, str(GUIDE), "exec"), namespace)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line_{block.line}")
def test_block(block, namespace, capsys, monkeypatch):
    if missing := _missing(block):
        pytest.skip(f"needs {', '.join(missing)}")
    monkeypatch.chdir(namespace["folder"])
    if any(line > block.line for line in namespace["run"]):  # pytest's processes take blocks in any order
        folder = namespace["folder"]
        namespace.clear()
        namespace.update(_new_namespace(folder))
    for earlier in BLOCKS:  # those that another process of pytest has run
        if earlier.line < block.line and earlier.line not in namespace["run"] and not _missing(earlier):
            _run(earlier, namespace)
    capsys.readouterr()
    _run(block, namespace)
    printed = capsys.readouterr().out
    if block.shown is not None:
        told = f"{GUIDE}:{block.line} prints\n{printed}\nand shows\n{block.shown}"
        assert agrees(printed, block.shown, block.tolerance), told
    else:
        assert not printed, f"{GUIDE}:{block.line} prints what the page does not show:\n{printed}"


def test_the_first_lines_of_the_readme():
    (block,) = blocks_of((ROOT / "README.md").read_text(encoding="utf-8"))
    found = {}
    exec(compile(block.code, "README.md", "exec"), found)
    assert found["out"].shape == found["q"].shape and 0 < found["tiles"].counts.sum() < 8 * 36  # of causal tiles


def test_the_guide_is_read_whole():
    text = GUIDE.read_text(encoding="utf-8")
    assert len(BLOCKS) == text.count("```python\n") >= 10
    assert sum(block.shown is not None for block in BLOCKS) == text.count("```text\n")


def test_the_reader_of_the_guide():
    page = """a page
<!-- needs: torch, no_such_library -->
```python
print('2.0 s')
```

<!-- numbers: within 10% -->

```text
2.1 s
```
```sh
not python
```
```python
x = 1
```
words between
```text
not what it prints
```
"""
    first, second = blocks_of(page)
    assert first == Block(4, "print('2.0 s')\n", ("torch", "no_such_library"), "2.1 s\n", 0.1)
    assert second == Block(16, "x = 1\n", ())
    assert agrees("2.0 s\n", "... s\n") and not agrees("2.0 ms\n", "... s\n")
    assert agrees("a\nb\nc\n", "a\n...\n") and not agrees("a\nb\n", "a\n")
    assert agrees(" 9% of 5\n", "10% of 5\n", 0.11) and not agrees("9% of 5\n", "10% of 5\n", 0.09)
    assert agrees("7 ms\n", "123 ms\n", math.inf) and not agrees("7 s\n", "123 ms\n", math.inf)
    assert not agrees("7 ms 8\n", "123 ms\n", math.inf)
