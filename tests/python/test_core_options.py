# SPDX-License-Identifier: Apache-2.0
"""The table of attention's options, and what follows from it: signatures, types, help, fields of the problem."""

from __future__ import annotations

import inspect
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tessera
from tessera import _arguments, _core, _features, _options

PACKAGE = pathlib.Path(tessera.__file__).parent
SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "python-options"


def test_files_are_as_the_table_has_them():
    done = subprocess.run([sys.executable, SCRIPT, "--check", PACKAGE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_signatures_and_types():
    names = [option.name for option in _options.OPTIONS]
    parsed = inspect.signature(_arguments.parse).parameters
    own = inspect.signature(tessera.attention).parameters
    assert list(parsed) == ["q", "k", "v", *names, "moved"]
    assert [name for name in own if name not in ("q", "k", "v", "out", "moved")] == names
    for option in _options.OPTIONS:
        assert own[option.name].default == parsed[option.name].default == option.default
        assert own[option.name].annotation == parsed[option.name].annotation == option.type


def test_help_has_every_option():
    text = inspect.getdoc(tessera.attention)
    for option in _options.OPTIONS:
        assert option.name in text, option.name


def test_options_become_fields():
    fields = [option for option in _options.FIELDS if option.name != "keep_residual"]  # which is autograd's to know
    assert {option.field for option in fields} <= set(_core.Problem.fields())
    given = {
        "compressed_causal": (4, 2),
        "scale": 0.5,
        "softcap": 3.0,
        "dropout": 0.25,
        "return_lse": True,
        "return_residual": True,
        "deterministic": True,
        "batch_invariant": True,
        "metadata": "trust",
        "score": "relative",
        "mask": "prefix",
        "attention_chunk": 3,
        "descale": 32,
    }
    assert set(given) == {option.name for option in fields}
    q = np.zeros((1, 4, 2, 16), np.float32)
    call = _arguments.parse(q, q, q, seed=1, **given)
    for option in fields:
        assert call.features.fields[option.field] == given[option.name]
    assert _arguments.parse(q, q, q).features.fields == {}
    assert not _arguments.parse(q, q, q).features.drops_residual
    dropping = _arguments.parse(q, q, q, keep_residual=False).features
    assert dropping.drops_residual and dropping.fields == {}
    assert _features.features_of(dropping.text()).drops_residual


def test_equal_options_are_one_object_and_their_text_reads_back():
    q = np.zeros((1, 4, 2, 16), np.float32)
    tiles = tessera.Tiles(mass="mean", next="indices", threshold=0.25, block=(2, 2))
    options = {"window": (3, None), "softcap": 2.0, "tiles": tiles, "wishes": "splits=2 tile_kv=8", "threads": 2}
    first, second = (_arguments.parse(q, q, q, out_dtype="bf16", **options).features for _ in range(2))
    assert first is second
    again = _features.features_of(first.text())
    assert (again.fields, again.out, again.threads, again.wishes) == (first.fields, "bf16", 2, "splits=2 tile_kv=8")


class TestProblem:
    LINES = (
        "attention b=2 sq=128 sk=64 hq=8 hkv=2 d=32 dv=16 dtype=bf16:bf16:bf16:fp32 kv=table page=16 causal sink lse",
        "attention sq=9 layout=varlen tq=30 kv=csr page=4 pages=7 sk=12 window=3:* softcap=2 alibi seqused_q",
        "attention pass=backward sq=9 kv2=dense sk2=5 block=8x8 list=indices:kv:1:full dlse grad=fp32 accumulate",
        "combine b=1 sq=7 layout=varlen tq=7 parts=3 hq=2 dv=16 dtype=fp16 sink lse",
        "kv_append b=2 sq=3 hq=4 hkv=2 kv=dense sk=20 rotary=interleaved:32 seqused_q",
        "linear_decode b=3 t=2 h=4 state=bf16 layout=kv slots=9 ring=16 rounding=stochastic metadata=report",
        "linear_chunk pass=backward b=2 t=5 h=4 varlen tq=9 slots=2 scale=0.25",
    )

    @pytest.mark.parametrize("line", LINES)
    def test_fields_make_the_same_problem(self, line):
        parsed = _core.Problem.parse(line)
        fields = {name: getattr(parsed, name) for name in _core.Problem.fields()}
        again = _core.Problem(parsed.operation, **fields)
        assert again == parsed and hash(again) == hash(parsed) and str(again) == str(parsed)

    def test_defaults_are_those_of_a_line(self):
        made = _core.Problem("attention", batch=2, seqlen_q=8, heads_q=4, q_type="fp16", q_layout="varlen")
        assert made == _core.Problem.parse("attention b=2 sq=8 hq=4 dtype=fp16 layout=varlen")
        assert made != _core.Problem.parse("attention b=2 sq=8 hq=4") and made != "attention"
        assert repr(made) == f'Problem.parse("{made}")'

    def test_makes_plans(self):
        made = _core.Problem("attention", seqlen_q=8, window=(None, 0))
        plan = _core.Plan(made, threads=1)
        assert plan.problem == str(made) == "attention sq=8 causal"
        made = _core.Problem("attention", seqlen_q=8, q_type="fp16")
        assert _core.explain_for(made, "sm_80").startswith("problem:        attention sq=8 dtype=fp16")

    @pytest.mark.parametrize(
        ("error", "fields", "text"),
        [
            (ValueError, {"softcap": 1e60}, r"softcap: got 1e\+60; want a number that fits in fp32"),
            (ValueError, {"softcap": -1.0}, r"softcap: got -1\.0+; want 0 \(none\) or a finite cap above 0"),
            (ValueError, {"scale": "x"}, "scale: got 'x'; want a number"),
            (ValueError, {"batch": 2.5}, r"batch: got 2\.5; want an integer"),
            (ValueError, {"batch": 1 << 70}, "batch: got 1180591620717411303424; want an integer that fits in 64 bits"),
            (ValueError, {"window": (1,)}, r"window: got \(1,\); want \(left, right\)"),
            (ValueError, {"mass": "median"}, "mass: got 'median'; want one of mean, rms"),
            (ValueError, {"lse": 1}, "lse: got 1; want True or False"),
            (ValueError, {"q_type": "fp31"}, "q_type: got"),
            (ValueError, {"kv": {"size": 3}}, "kv: got 'size'; want layout, seqlen"),
            (ValueError, {"kv": {"seqlen": "3"}}, r"kv\.seqlen: got '3'; want an integer"),
            (ValueError, {"kv": 3}, "kv: got 3; want a dict"),
            (TypeError, {"causal": True}, r"got the field 'causal'; want one of Problem\.fields\(\)"),
        ],
    )
    def test_refuses(self, error, fields, text):
        with pytest.raises(error, match=text):
            _core.Problem("attention", seqlen_q=8, **fields)

    def test_refuses_other_things(self):
        with pytest.raises(ValueError, match='operation: got "attend"; want one of attention, combine'):
            _core.Problem("attend")
        with pytest.raises(AttributeError, match="Problem has no field 'causal'"):
            _ = _core.Problem("attention", seqlen_q=8).causal
        with pytest.raises(TypeError, match="problem: got 3; want a Problem or its line"):
            _core.Plan(3)


def test_a_source_stands_alone():
    q = np.zeros((1, 4, 2, 16), np.float32)
    source = tessera.KeySource(q, q)
    np.testing.assert_array_equal(tessera.attention(q, source), tessera.attention(q, q, q))
    for options in ({"seqused_k": np.ones(1, np.int32)}, {"max_seqlen_k": 4}):
        with pytest.raises(TypeError, match=f"{next(iter(options))}: got .* beside a KeySource; want it as a field"):
            tessera.attention(q, source, **options)
    with pytest.raises(TypeError, match=r"v: got an array of shape .* beside a KeySource"):
        tessera.attention(q, source, q)
    for call in (tessera.attention, tessera.plan):
        with pytest.raises(TypeError, match="v: got None; want an array, or a KeySource in place of k"):
            call(q, q)
