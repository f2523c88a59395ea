# SPDX-License-Identifier: Apache-2.0
"""examples/serve on random weights: its checkpoint is the model of examples/gpt, and the load test runs."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers", minversion="5.24")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def modules():
    """convert.py, and the model.py that it imports, which are no package."""
    names = ("convert", "model")
    sys.path.insert(0, str(EXAMPLES / "serve"))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        for folder in ("serve", "gpt"):
            if str(EXAMPLES / folder) in sys.path:
                sys.path.remove(str(EXAMPLES / folder))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def tiny(modules):
    from tiny_gpt import tiny_gpt

    return tiny_gpt(modules["model"], layers=2)


@pytest.fixture(scope="module")
def checkpoint(modules, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    modules["model"].save(tiny, folder / "gpt", torch.float32)
    words = ["--weights", folder / "gpt", "--to", folder / "llama"]
    done = subprocess.run(
        [sys.executable, EXAMPLES / "serve" / "convert.py", *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder / "llama"


def test_the_checkpoint_is_the_model(modules, tiny, checkpoint):
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    cos, sin = modules["model"].rotary_tables(tiny.config, 40)

    def attention(_layer, q, k, v):
        q, k = modules["model"].rotate(q, cos, sin), modules["model"].rotate(k, cos, sin)
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, tiny(tokens, attention), rtol=1e-4, atol=1e-4)


def test_tokens_are_bytes(checkpoint):
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    for text in ("import os\n\tx = 'é€😀'  ", "", " a\n\n b", "".join(map(chr, range(1, 127)))):
        assert tokenizer(text)["input_ids"] == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text


def test_load(checkpoint, tmp_path):
    """Both servers answer every stream without an error, and with the same text."""
    for library in ("fastapi", "uvicorn", "openai", "accelerate", "matplotlib"):
        pytest.importorskip(library)
    rows, picture = tmp_path / "rows.json", tmp_path / "load.png"
    words = ["--model", checkpoint, "--streams", 3, "--requests", 6, "--prompt", 40, "--tokens", 8, "--blocks", 16]
    command = [sys.executable, EXAMPLES / "serve" / "load.py", *words, "--json", rows, "--plot", picture]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(rows.read_text())
    assert found["same_texts"] == 6
    assert [row["attention"] for row in found["rows"]] == ["sdpa", "tessera"]
    for row in found["rows"]:
        assert row["errors"] == 0 and row["tokens_per_second"] > 0
        assert 0 < row["first_token_ms"]["p50"] <= row["first_token_ms"]["p99"] <= row["whole_answer_ms"]["p99"]
    assert "| tessera | 3 | 0 |" in done.stdout and picture.read_bytes().startswith(b"\x89PNG")
