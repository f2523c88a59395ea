# SPDX-License-Identifier: Apache-2.0
"""examples/gpt and examples/train: run as a user runs them, and their cache against attention without one."""

import importlib
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

ROOT = Path(__file__).resolve().parents[2]
GPT = ROOT / "examples" / "gpt"
TRAIN = ROOT / "examples" / "train" / "train.py"


@pytest.fixture(scope="module")
def gpt():
    """The modules of examples/gpt, which are no package: `model`, `attention` and `run` by their names."""
    names = ("model", "attention", "run")
    sys.path.insert(0, str(GPT))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(GPT))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def tiny(gpt):
    from tiny_gpt import tiny_gpt

    return tiny_gpt(gpt["model"], layers=3)


@pytest.fixture(scope="module")
def folder(gpt, tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    gpt["model"].save(tiny, path)
    return path


def command(script, *words):
    return subprocess.run([sys.executable, str(script), *map(str, words)], capture_output=True, text=True, timeout=300)


def random_bytes(*shape, seed=0):
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


def logits_without_cache(gpt, model, tokens):
    """(1, s, 256): every token in one call of SDPA."""
    attention = gpt["attention"].TorchAttention(model.config, tokens.shape[0], tokens.shape[1], torch.float32)
    with torch.inference_mode():
        return model(tokens, attention)


def test_a_saved_model_reads_back(gpt, tiny, tmp_path):
    gpt["model"].save(tiny, tmp_path, torch.float32)
    again = gpt["model"].load(tmp_path, torch.float32)
    assert again.config == tiny.config
    for name, weight in tiny.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


def test_the_attention_of_the_model_matters(gpt, tiny):
    tokens = random_bytes(1, 40)
    logits = logits_without_cache(gpt, tiny, tokens)
    tokens[0, 3] ^= 1
    changed = logits_without_cache(gpt, tiny, tokens)
    assert torch.equal(changed[0, :3], logits[0, :3])
    assert (changed[0, 30:] - logits[0, 30:]).abs().max() > 0.05


@pytest.mark.parametrize("page_size", [1, 7, 16, 256])
@pytest.mark.parametrize("chunk", [1, 13, 100])
def test_paged_cache_in_chunks_equals_no_cache(gpt, tiny, page_size, chunk):
    tokens = random_bytes(1, 100)
    want = logits_without_cache(gpt, tiny, tokens)
    paged = gpt["attention"].PagedAttention(tiny.config, 1, 100, torch.float32, page_size)
    with torch.inference_mode():
        got = gpt["run"].feed(tiny, paged, tokens, chunk)
    assert torch.allclose(got, want, atol=2e-4, rtol=0), (got - want).abs().max()


def test_sequences_of_different_length_share_the_pool(gpt, tiny):
    lengths, fresh = (5, 41, 18), 6
    texts = [random_bytes(1, length + fresh, seed=length) for length in lengths]
    paged = gpt["attention"].PagedAttention(tiny.config, 3, 64, torch.float32, page_size=8)
    with torch.inference_mode():
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            paged.select([row])
            gpt["run"].feed(tiny, paged, text[:, :length], chunk=16)
        paged.select(range(3))
        tails = torch.cat([text[:, -fresh:] for text in texts])
        got = gpt["run"].feed(tiny, paged, tails, chunk=1)
    for row, text in enumerate(texts):
        want = logits_without_cache(gpt, tiny, text)[0, -fresh:]
        assert torch.allclose(got[row], want, atol=2e-4, rtol=0), (row, (got[row] - want).abs().max())


def test_pages_follow_the_tokens_and_come_back(gpt, tiny):
    paged = gpt["attention"].PagedAttention(tiny.config, 2, 32, torch.float32, page_size=8)
    assert len(paged.free) == 8
    with torch.inference_mode():
        for row, count in ((0, 9), (1, 8)):
            paged.select([row])
            gpt["run"].feed(tiny, paged, random_bytes(1, count), chunk=count)
        assert len(paged.free) == 8 - 2 - 1
        taken = {*paged.table[0, :2].tolist(), int(paged.table[1, 0])}
        assert len(taken) == 3 and not taken & set(paged.free)
        paged.release(0)
        assert len(paged.free) == 8 - 1
        paged.select([0])
        tokens = random_bytes(1, 20, seed=3)
        got = gpt["run"].feed(tiny, paged, tokens, chunk=20)
        assert torch.allclose(got, logits_without_cache(gpt, tiny, tokens), atol=2e-4, rtol=0)
        with pytest.raises(ValueError, match="capacity: got 33 tokens in sequence 0; want at most 32"):
            gpt["run"].feed(tiny, paged, random_bytes(1, 13), chunk=13)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpt_agrees_with_torch(folder, tmp_path, dtype):
    text = tmp_path / "text"
    text.write_bytes(bytes(random_bytes(300).tolist()))  # more than two windows
    results = tmp_path / "results.json"
    words = ["--weights", folder, "--text", text, "--bytes", 0, "--generate", 40, "--dtype", dtype, "--json", results]
    run = command(GPT / "run.py", *words, "--compare", "--prompt", "a", "--prompt", "def f(x):", "--chunk", 50)
    both = json.loads(results.read_text())
    ours, theirs = both["Tessera, paged"], both["torch SDPA"]
    assert 8 < ours["bits_per_byte"] < 12  # random bytes, random model
    if dtype == "float32":  # a random model in bf16 has ties that rounding decides
        assert run.returncode == 0, run.stdout + run.stderr
        assert ours["texts"] == theirs["texts"] and len(ours["texts"]) == 2
        assert "greedy text: the same (2 prompts)" in run.stdout
        assert abs(ours["bits_per_byte"] - theirs["bits_per_byte"]) < 5e-5
    else:
        assert abs(ours["bits_per_byte"] - theirs["bits_per_byte"]) < 2e-2
    assert 0 < ours["decode_attention_share"] < 1 and ours["decode_rate"] > 0 and ours["prefill_rate"] > 0


def test_gpt_says_when_the_two_disagree(gpt, capsys):
    results = gpt["run"].Results
    ours = results(bits_per_byte=1.5, texts=["abc", "x"])
    assert gpt["run"].comparison(ours, results(bits_per_byte=1.5 + 1e-6, texts=["abc", "x"]))
    assert not gpt["run"].comparison(ours, results(bits_per_byte=1.5001, texts=["abc", "x"]))
    assert not gpt["run"].comparison(ours, results(bits_per_byte=1.5, texts=["abd", "x"]))
    assert "differs from byte 2 on: 'c' and 'd'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--weights", "/nowhere"], "weights: got /nowhere; want a folder"),
        (["--weights", "{folder}", "--text", "/nowhere"], "/nowhere"),
        (["--weights", "{folder}", "--generate", "0"], "--generate: got 0; want 1 or more"),
        (["--weights", "{folder}", "--prompt", ""], "--prompt: got an empty one"),
    ],
)
def test_gpt_refuses(folder, words, told):
    run = command(GPT / "run.py", *[word.replace("{folder}", str(folder)) for word in words])
    assert run.returncode == 2
    assert told in run.stderr and "Traceback" not in run.stderr


def test_gpt_refuses_weights_of_another_model(gpt, tiny, tmp_path):
    save_file = importlib.import_module("safetensors.torch").save_file
    weights = dict(tiny.state_dict())
    weights.pop("blocks.1.wk.weight")
    file = gpt["model"].save(tiny, tmp_path)
    save_file(weights, file, {"config": json.dumps(vars(tiny.config))})
    with pytest.raises(ValueError, match=r"want tensors named and sized .*blocks\.1\.wk\.weight"):
        gpt["model"].load(tmp_path, torch.float32)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of text to train on: ten files, of which the first is held out, and two that are none of the text."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(10):
        (folder / f"{number}.md").write_text("".join(f"{i} times {number} is {i * number}.\n" for i in range(200)))
    (folder / "build").mkdir()
    (folder / "build" / "x.py").write_text("built")
    (folder / "data.bin").write_text("data")
    return folder


def test_training_learns_and_agrees_with_sdpa(text, tmp_path):
    out, picture, save = tmp_path / "losses.json", tmp_path / "loss.svg", tmp_path / "model"
    words = ["--text", text, "--steps", 40, "--batch", 8, "--context", 64, "--dim", 64, "--layers", 2]
    words += ["--json", out, "--save", save]
    if importlib.util.find_spec("matplotlib"):
        words += ["--picture", picture]
    run = command(TRAIN, *words)
    assert run.returncode == 0, run.stderr
    ours, theirs = (json.loads(out.read_text())["runs"][name][0] for name in ("Tessera", "torch SDPA"))
    assert len(ours["losses"]) == len(theirs["losses"]) == 40
    assert abs(ours["losses"][0] - math.log(256)) < 0.1
    assert ours["losses"][-1] < 4
    assert max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)) < 1e-3
    assert ours["losses"] != theirs["losses"]  # they did not run the same code
    assert abs(ours["held_out_bits_per_byte"] - theirs["held_out_bits_per_byte"]) < 1e-3
    assert "10 files" in run.stdout
    assert "| 40 |" in run.stdout and "| ms per step, median |" in run.stdout
    if importlib.util.find_spec("matplotlib"):
        assert "<svg" in picture.read_text()
    # What was trained can be run.
    again = command(GPT / "run.py", "--weights", save, "--bytes", 500, "--generate", 20, "--compare")
    assert again.returncode == 0, again.stdout + again.stderr


def test_training_alone_is_the_same_training(text, tmp_path):
    losses = []
    for words in ([], ["--alone"]):
        out = tmp_path / "losses.json"
        sizes = ["--steps", 3, "--batch", 2, "--context", 32, "--dim", 32, "--layers", 1]
        run = command(TRAIN, *words, *sizes, "--text", text, "--json", out)
        assert run.returncode == 0, run.stderr
        losses.append({name: runs[0]["losses"] for name, runs in json.loads(out.read_text())["runs"].items()})
    assert losses[1].keys() == {"Tessera"}
    assert losses[0]["Tessera"] == pytest.approx(losses[1]["Tessera"], abs=1e-5)


def test_training_of_several_seeds_beside_a_judge(text, tmp_path):
    """Attentions of one seed are much closer to each other than seeds are."""
    out, picture = tmp_path / "losses.json", tmp_path / "loss.svg"
    words = ["--steps", 20, "--batch", 4, "--context", 64, "--dim", 32, "--head-dim", 16, "--layers", 1, "--seeds", 2]
    if importlib.util.find_spec("matplotlib"):
        words += ["--picture", picture]
    run = command(TRAIN, *words, "--judge", "--text", text, "--json", out)
    assert run.returncode == 0, run.stderr
    told = json.loads(out.read_text())
    assert told["arguments"]["head_dim"] == 16 and told["arguments"]["device"] == "cpu"
    assert list(told["runs"]) == ["Tessera", "torch SDPA", "math in fp32"]
    assert all([each["seed"] for each in runs] == [0, 1] for runs in told["runs"].values())
    assert "further apart than seeds at 0 of 20 steps" in run.stdout
    if importlib.util.find_spec("matplotlib"):
        assert "<svg" in picture.read_text()


def test_training_spread_over_processes_has_the_same_losses(text, tmp_path):
    """An odd number of bytes in a window, and ranks that do not divide it."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("no Gloo")
    out = tmp_path / "losses.json"
    sizes = ["--steps", 12, "--batch", 2, "--context", 61, "--dim", 64, "--head-dim", 16, "--layers", 2, "--threads", 1]
    run = command(TRAIN, *sizes, "--context-parallel", 3, "--text", text, "--json", out)
    assert run.returncode == 0, run.stderr
    runs = json.loads(out.read_text())["runs"]
    assert list(runs) == ["Tessera", "Tessera, 3 ranks"]
    one, spread = (found[0]["losses"] for found in runs.values())
    assert one == pytest.approx(spread, abs=2e-5) and one[-1] < one[0] - 0.5


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--context-parallel", "2", "--seeds", "2"],
            "--context-parallel: got it with --seeds",
        ),
        (["--dim", "40"], "--dim: got 40; want a multiple of 32"),
        (["--head-dim", "12"], "--head-dim: got 12; want a multiple of 8"),
        (["--alone", "--judge"], "--judge: got it with --alone; want one of them"),
        (["--device", "cuda:99"], "--device: got cuda:99; want cpu, or a cuda device that torch finds"),
        (["--device", "meta"], "--device: got meta; want cpu, or a cuda device that torch finds"),
        (["--seeds", "0"], "--seeds: got 0; want 1 or more"),
    ],
)
def test_training_refuses(words, told):
    run = command(TRAIN, *words)
    assert run.returncode == 2 and told in run.stderr and "Traceback" not in run.stderr
