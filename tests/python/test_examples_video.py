# SPDX-License-Identifier: Apache-2.0
"""examples/video, run as a user runs it, on a model of random weights."""

import importlib.util
import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

VIDEO = Path(__file__).resolve().parents[2] / "examples" / "video"
CONFIG = {"dim": 128, "heads": 1, "layers": 2, "ffn": 64, "patch": 4}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """One matrix lies in int8 with factors, as its file format allows."""
    from safetensors.torch import save_file

    spec = importlib.util.spec_from_file_location("video_model", VIDEO / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(4)
    tensors = {name: tensor.clone() for name, tensor in module.VideoModel(**CONFIG).state_dict().items()}
    tensors["blocks.0.mod"] += 1
    name = "blocks.1.w1.weight"
    scale = tensors[name].abs().amax(1) / 127
    tensors[f"{name}.scale"] = scale
    tensors[name] = (tensors[name] / scale[:, None]).round().to(torch.int8)
    folder = tmp_path_factory.mktemp("video")
    save_file(tensors, folder / "weights_1.safetensors", {"config": json.dumps(CONFIG)})
    return folder


def test_each_rule_has_a_row_beside_dense(weights, tmp_path):
    rows = tmp_path / "rows.json"
    words = ["--weights", weights, "--frames", 4, "--side", 8, "--steps", 5, "--dtype", "float32", "--json", rows]
    done = subprocess.run([sys.executable, VIDEO / "run.py", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {row["rule"]: row for row in json.loads(rows.read_text())}
    assert list(found) == ["dense", "mass", "mass-careful", "threshold", "threshold-careful"]
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["seed"] * 5
    assert [line.split()[0] for line in lines[6:]] == ["mean", *found]
    assert found["dense"]["active"] == 1
    for rule, row in found.items():
        if rule != "dense":  # two tiles a row, of noise: nearly all of them matter
            assert 0.5 < row["active"] <= 1
            assert row["relative_l2"] < 0.05
            assert row["psnr_db"] > 40


def test_calibration_writes_thresholds_that_a_run_takes(weights, tmp_path):
    rows, thresholds = tmp_path / "rows.json", tmp_path / "thresholds.json"
    words = ["--weights", weights, "--frames", 4, "--side", 8, "--steps", 5, "--dtype", "float32", "--json", rows]
    page = tmp_path / "report.html"
    words += ["--calibrate", 0.02, "--thresholds", thresholds, "--calibration-seeds", 0, "--report", page, "--rules"]
    done = subprocess.run([sys.executable, VIDEO / "run.py", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[:2]] == [["layer", "0"], ["layer", "1"]]
    told = json.loads(thresholds.read_text())
    assert list(told["layers"]) == ["blocks.0", "blocks.1"] and told["target"] == 0.02
    found = {row["rule"]: row for row in json.loads(rows.read_text())}
    assert list(found) == ["dense", "calibrated"]
    assert found["calibrated"]["relative_l2"] < 0.1
    # Well-formed, with a cell for each layer and step, and a map of 2 × 2 tiles for each step but the first.
    text = page.read_text().replace("<!doctype html>", "").replace('"utf-8">', '"utf-8"/>')
    parsed = xml.etree.ElementTree.fromstring(text)
    pictures = [len(each.findall("rect")) for each in parsed.iter("svg")]
    assert pictures == [2 * 5, *[4] * 4]
    assert "seed 3, calibrated" in page.read_text()
