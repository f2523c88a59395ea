# SPDX-License-Identifier: Apache-2.0
"""The package's modules import each other one way, and its core knows no array library."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import tessera

ROOT = Path(tessera.__file__).parent


def module_of(file: Path) -> str:
    parts = ("tessera", *file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(file): file for file in ROOT.rglob("*.py")}


class Imports(ast.NodeVisitor):
    """Modules of the package that a module's statements import, in functions too."""

    def __init__(self, module: str) -> None:
        self.package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
        self.found: set[str] = set()
        self.visit(ast.parse(FILES[module].read_text("utf-8")))

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {name.name for name in node.names if name.name in FILES}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parents = self.package.split(".")
        base = ".".join([*parents[: len(parents) - node.level + 1], *([node.module] if node.module else [])])
        source = base if node.level else node.module
        for name in node.names:
            inner = f"{source}.{name.name}"
            self.found |= {inner} if inner in FILES else {source} & FILES.keys()


# The package itself is at the top: folders such as compat import from it what a user would, after it is complete.
GRAPH = {module: Imports(module).found - {"tessera", module} for module in FILES if module != "tessera"}


def test_no_circles():
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in sorted(GRAPH[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in GRAPH:
        visit(module, ())


CORE = sorted(file.name for file in ROOT.glob("_*.py") if not file.name.startswith("__"))


@pytest.mark.parametrize("name", CORE)
def test_the_core_imports_no_torch(name: str):
    tree = ast.parse((ROOT / name).read_text("utf-8"))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert "torch" not in names
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert "torch" not in ast.unparse(node)


def test_files_are_short_and_folders_small():
    for folder in (ROOT, *(path for path in ROOT.rglob("*") if path.is_dir() and path.name != "__pycache__")):
        files = [file for file in folder.glob("*.py*") if file.suffix in (".py", ".pyi")]
        assert len(files) <= 25, folder
        for file in files:
            assert len(file.read_text("utf-8").splitlines()) <= 400, file
