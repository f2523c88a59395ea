# SPDX-License-Identifier: Apache-2.0
"""What a type checker makes of calls, and that the stubs have the signatures of what they describe."""

from __future__ import annotations

import ast
import inspect
import pathlib
import re
import subprocess
import sys

import pytest
import tessera
from tessera.compat import flash_attn_2, flash_attn_3

CODE = """
import tessera
from tessera.compat import flash_attn_3

class Array: ...

q = Array()
reveal_type(tessera.flash_attn_func(q, q, q, 0.0, None, True))
reveal_type(tessera.flash_attn_func(q, q, q, return_attn_probs=True))
reveal_type(tessera.compat.flash_attn_2.flash_attn_qkvpacked_func(q))
reveal_type(tessera.flash_attn_with_kvcache(q, q, q, return_softmax_lse=True))
reveal_type(flash_attn_3.flash_attn_varlen_func(q, q, q, q, q, 1, 1))
tessera.flash_atn_func(q, q, q)
tessera.compat.flash_attn_1
tessera.flash_attn_func(q, q, q, casual=True)
tessera.torch
"""


def test_a_type_checker_sees_results_and_misspelt_names(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "tessera").symlink_to(pathlib.Path(tessera.__file__).parent)  # and nothing of what else is installed
    options = ["--no-site-packages", "--follow-imports=silent", "--ignore-missing-imports", f"--cache-dir={tmp_path}"]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--no-color-output", "code.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    revealed = re.findall(r'Revealed type is "(.*)"', checked.stdout)
    assert revealed == [
        "code.Array",
        "tuple[code.Array, code.Array, code.Array]",
        "code.Array",
        "tuple[code.Array, code.Array]",
        "code.Array",
    ]
    wrong = {int(line) for line in re.findall(r"code\.py:(\d+): error", checked.stdout)}
    first = CODE.splitlines().index("tessera.flash_atn_func(q, q, q)") + 1
    assert wrong == {first, first + 1, first + 2}, checked.stdout


@pytest.mark.parametrize("module", [flash_attn_2, flash_attn_3])
def test_stubs_have_the_signatures_of_the_functions(module):
    stub = ast.parse(pathlib.Path(module.__file__).with_suffix(".pyi").read_text())
    written = [node for node in stub.body if isinstance(node, ast.FunctionDef)]
    assert {node.name for node in written} == set(module.__all__)
    for node in written:
        want = inspect.signature(getattr(module, node.name)).parameters.values()
        arguments = node.args.args + node.args.kwonlyargs
        assert [each.arg for each in arguments] == [each.name for each in want], node.name
        defaults = [None] * (len(node.args.args) - len(node.args.defaults)) + node.args.defaults + node.args.kw_defaults
        for argument, default, parameter in zip(arguments, defaults, want, strict=True):
            if default is None:  # none at all, or that of the one result that is asked for
                required = parameter.default is inspect.Parameter.empty
                assert required or ast.unparse(argument.annotation) == "Literal[True]", (node.name, parameter)
            else:
                assert ast.literal_eval(default) == parameter.default, (node.name, parameter)
