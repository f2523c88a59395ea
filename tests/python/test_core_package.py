# SPDX-License-Identifier: Apache-2.0
"""What `import tessera` brings and costs, its types, and that signatures which must agree do."""

from __future__ import annotations

import ast
import inspect
import pathlib
import subprocess
import sys

import pytest
import tessera
from tessera import _core

PACKAGE = pathlib.Path(tessera.__file__).parent


def fresh(code: str) -> str:
    """Output of a new interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_needs_no_array_library():
    loaded = fresh("import tessera, sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))").split()
    assert not {"numpy", "torch", "jax", "ml_dtypes", "matplotlib", "transformers"} & set(loaded)


def test_import_takes_150_ms_at_most():
    code = "import time; begin = time.process_time(); import tessera; print(time.process_time() - begin)"
    assert min(float(fresh(code)) for _ in range(5)) <= 0.150


def test_a_missing_library_is_named_when_it_is_needed():
    blocked = "import sys; sys.modules['numpy'] = sys.modules['torch'] = None; import tessera; "
    assert "True" in fresh(blocked + "print('cpu.tiled' in tessera.explain('attention sq=8 causal'))")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        fresh(blocked + "tessera.torch")
    assert "torch" in failed.value.stderr and "ModuleNotFoundError" in failed.value.stderr


def test_help_is_there_without_any_library():
    """help, pydoc, dir and hasattr ask for every name, those of modules that need a missing library too."""
    missing = ("numpy", "torch", "transformers", "matplotlib", "jax")
    blocked = f"import sys; sys.modules.update(dict.fromkeys({missing})); "
    text = fresh(blocked + "import pydoc, tessera; print(pydoc.plain(pydoc.render_doc(tessera)))")
    assert "Attention that computes the tiles it must" in text and "flash_attn_func(" in text
    names = ("torch", "transformers", "nonsense")
    assert fresh(blocked + f"import tessera; print([hasattr(tessera, name) for name in {names}])") == (
        "[False, False, False]\n"
    )


def test_the_command_is_in_the_wheel():
    """Installed packages have it, as a script too; what was built in place says what is missing."""
    module = [sys.executable, "-m", "tessera"]
    script = pathlib.Path(sys.executable).with_name("tessera")
    if PACKAGE.parent.name != "site-packages":
        done = subprocess.run([*module, "info"], capture_output=True, text=True)
        assert done.returncode == 4 and "CMake finds fmt, nlohmann_json and CLI11" in done.stderr
        return
    for command in (module, [str(script)]):
        shown = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
        assert shown == f"tessera {tessera.__version__}\n"
        done = subprocess.run([*command, "verify", "attention sq=70 hq=2 d=16 causal"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert subprocess.run([*command, "explain", "attention sq"], capture_output=True).returncode == 2


def test_public_names():
    for name in tessera.__all__:
        assert getattr(tessera, name) is not None
        assert name in dir(tessera)
    assert tessera.__version__ == _core.version()
    assert tessera.flash_attn_func is tessera.compat.flash_attn_2.flash_attn_func
    with pytest.raises(AttributeError, match="has no attribute 'flash_attention'"):
        _ = tessera.flash_attention


def test_every_public_function_says_what_it_takes():
    for name in tessera.__all__:
        assert inspect.getdoc(getattr(tessera, name)), name


def test_types_ship():
    assert (PACKAGE / "py.typed").exists()
    stub = ast.parse((PACKAGE / "_core.pyi").read_text())
    written = {node.name: node for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert set(written) == {name for name in dir(_core) if not name.startswith("_")}
    for name, node in written.items():
        if isinstance(node, ast.ClassDef):
            members = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            public = {m for m in vars(getattr(_core, name)) if not m.startswith("_") or m.startswith("__dlpack")}
            assert {m for m in members if not m.startswith("_") or m.startswith("__dlpack")} == public, name


CORE = sorted(file.name for file in PACKAGE.glob("_*.py") if not file.name.startswith("__"))


@pytest.mark.parametrize("name", CORE)
def test_the_core_imports_no_torch(name: str):
    tree = ast.parse((PACKAGE / name).read_text("utf-8"))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert "torch" not in names
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert "torch" not in ast.unparse(node)


def test_nothing_is_read_from_the_environment():
    """Of Tessera's own; OpenMP reads OMP_NUM_THREADS when it is loaded."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            assert named not in ("environ", "getenv"), path
