# SPDX-License-Identifier: Apache-2.0
"""tessera.plot: what the pictures hold, read back from the figures, and what it refuses."""

import copy
import json
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("matplotlib")

from tessera import plot  # noqa: E402
from tessera.plot.__main__ import main  # noqa: E402

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "amd-epyc-f26-m2-2c"


def causal_mass(heads=3, blocks=8, seed=0):
    """(1, heads, blocks, blocks); each row of tiles sums to 1, as the mean mass of a causal forward does."""
    mass = np.tril(np.random.default_rng(seed).random((1, heads, blocks, blocks), dtype=np.float32))
    return mass / mass.sum(-1, keepdims=True)


def maps_of(figure):
    """The first image of every visible map with a title, in order."""
    return [axes.images[0].get_array() for axes in figure.axes if axes.get_title()]


def titles_of(figure):
    return [axes.get_title() for axes in figure.axes if axes.get_title()]


def test_mass_is_drawn_per_head_and_zero_is_left_white():
    mass = causal_mass()
    figure = plot.tiles(mass)
    drawn = maps_of(figure)
    assert len(drawn) == 3
    for head, image in enumerate(drawn):
        assert np.array_equal(np.ma.getmaskarray(image), mass[0, head] == 0)
        assert np.array_equal(image.filled(0), mass[0, head])


def test_title_says_how_few_tiles_hold_the_mass():
    mass = np.zeros((1, 1, 1, 10), np.float32)
    mass[0, 0, 0, :] = 0.0011
    mass[0, 0, 0, 3], mass[0, 0, 0, 7] = 0.6, 0.3912
    assert "99% of the mass in 20% of the tiles" in titles_of(plot.tiles(mass))[0]


def test_kept_tiles_are_counted_and_the_rest_is_greyed():
    mass = causal_mass(heads=2)
    kept = mass > 0.1
    figure = plot.tiles(mass, kept=kept)
    for head, axes in enumerate(axes for axes in figure.axes if axes.get_title()):
        part, choice, title = mass[0, head], kept[0, head], axes.get_title()
        assert f"{part[choice].sum() / part.sum():.2%} of the mass" in title
        assert f"in {choice.sum() / (part > 0).sum():.0%} of the tiles" in title
        assert np.array_equal(~np.ma.getmaskarray(axes.images[1].get_array()), (part > 0) & ~choice)


def test_a_choice_by_key_head_serves_its_group():
    mass = causal_mass(heads=4)
    kept = np.zeros((1, 2, 8, 8), bool)
    kept[:, 1] = True
    maps = [axes for axes in plot.tiles(mass, kept=kept).axes if axes.get_title()]
    assert [np.ma.count(axes.images[1].get_array()) for axes in maps] == [36, 36, 0, 0]


def test_bool_tiles_heads_names_and_lower_dimensions():
    tiles = causal_mass(heads=5)[0] > 0.1
    figure = plot.tiles(tiles, heads=[4, 1], names=["last", "second"], title="two heads")
    assert [title.split("\n")[0] for title in titles_of(figure)] == ["last", "second"]
    assert np.array_equal(maps_of(figure)[0], tiles[4])
    assert f"{tiles[4].mean():.0%} of the tiles" in titles_of(figure)[0]
    assert figure.get_suptitle() == "two heads"
    assert len(maps_of(plot.tiles(tiles[0]))) == 1


def test_torch_tensors_are_taken_also_bf16_with_gradients():
    torch = pytest.importorskip("torch")
    mass = torch.from_numpy(causal_mass()).bfloat16().requires_grad_()
    assert np.array_equal(maps_of(plot.tiles(mass))[0].filled(0), mass.detach().float().numpy()[0, 0])


def test_a_tile_list_is_drawn_as_its_mask():
    import tessera

    mask = causal_mass() > 0.1
    tiles = tessera.TileList.from_mask(mask, block=(64, 64))
    for head, image in enumerate(maps_of(plot.tiles(tiles, key_blocks=8))):
        assert np.array_equal(image, mask[0, head])
    assert "of the mass" in titles_of(plot.tiles(causal_mass(), kept=tiles))[0]


def test_mass_of_a_run_is_drawn():
    import tessera

    q, k, v = np.random.default_rng(1).standard_normal((3, 1, 100, 2, 16), dtype=np.float32)
    out, mass = tessera.attention(q, k, v, causal=True, tiles=tessera.Tiles(mass="mean", block=(16, 16)))
    assert out.shape == q.shape
    image = maps_of(plot.tiles(mass))[1]
    assert image.shape == (7, 7)
    assert np.allclose(image.filled(0).sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"source": np.ones(4)}, "source"),
        ({"source": np.ones((1, 1, 0, 4))}, "source"),
        ({"source": np.full((2, 2), np.nan)}, "source"),
        ({"source": -np.ones((2, 2))}, "source"),
        ({"source": np.array([["a", "b"]])}, "source"),
        ({"source": causal_mass(), "batch": 1}, "batch"),
        ({"source": causal_mass(), "heads": [3]}, "heads"),
        ({"source": causal_mass(), "heads": []}, "heads"),
        ({"source": causal_mass(), "names": ["a"]}, "names"),
        ({"source": causal_mass(), "columns": 0}, "columns"),
        ({"source": causal_mass(), "kept": np.ones((1, 2, 8, 8), bool)}, "kept"),
        ({"source": causal_mass(), "kept": causal_mass()}, "kept"),
        ({"source": causal_mass() > 0, "kept": causal_mass() > 0}, "kept"),
    ],
)
def test_tiles_refuses(options, argument):
    with pytest.raises(ValueError, match=f"^{argument}: got .*; want "):
        plot.tiles(**options)


def dense():
    return json.loads((RESULTS / "cpu_dense.json").read_text())


def test_speedup_has_a_bar_for_each_row():
    data = dense()
    figure = plot.bench(RESULTS / "cpu_dense.json")
    bars = [patch.get_width() for patch in figure.axes[0].patches]
    assert bars == [row["ratios"]["torch_cpu"] for row in data["rows"]]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(set(labels)) == len(labels) == len(data["rows"])
    mean = np.exp(np.mean(np.log(bars)))
    assert f"{mean:.2f} times PyTorch's speed" in figure.get_suptitle()
    assert data["machine"]["cpu"] in figure.get_suptitle()


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("ms", lambda row, us: us / 1e3),
        ("tflops", lambda row, us: row["gflop"] / us * 1e3),
        ("gbytes_s", lambda row, us: row["gbyte"] / us * 1e6),
    ],
)
def test_length_has_a_line_for_each_setting_and_peer(metric, value):
    data = dense()
    rows = [row for row in data["rows"] if row["pass"] == "forward"]
    figure = plot.bench({"machine": {}, "rows": rows}, kind="length", metric=metric)
    (axes,) = figure.axes
    lines = [line for line in axes.lines if len(line.get_xdata()) > 0]
    assert len(lines) == 2 * 8  # dtype x dim x mask, and PyTorch beside each
    drawn = sorted(y for line in lines for y in line.get_ydata())
    want = sorted(value(row, us) for row in rows for us in (row["us"], row["peers"]["torch_cpu"]))
    assert np.allclose(drawn, want)
    assert len(plot.bench(data, kind="length").axes) == 2  # forward and backward
    if metric == "tflops":
        assert np.isclose(lines[0].get_ydata()[0], rows[0]["tflops"], rtol=1e-3)


@pytest.mark.parametrize(("metric", "value"), [("ms", lambda row, us: us / 1e3), ("tflops", None)])
def test_bars_have_a_panel_for_each_dim_and_mask_and_a_bar_for_each_side(metric, value):
    value = value or (lambda row, us: row["gflop"] / us * 1e3)
    source = RESULTS.parent / "nvidia-h200" / "gpu_dense.json"
    panels = {f"d={dim}, {mask}": [] for dim in (64, 128, 256) for mask in ("full", "causal")}
    for row in json.loads(source.read_text())["rows"]:
        words = row["problem"].split()
        dim = next((word for word in words if word.startswith("d=")), "d=64")
        panels[f"{dim}, {'causal' if 'causal' in words else 'full'}"].append(row)
    lengths = ["512", "2048", "4096", "8192", "16384", "32768"]
    figure = plot.bench(source, kind="bars", metric=metric)
    assert [axes.get_title() for axes in figure.axes] == list(panels)
    for axes, rows in zip(figure.axes, panels.values(), strict=True):
        assert len(rows) == 6
        want = [value(row, us) for row in rows for us in (row["us"], *row["peers"].values())]
        assert np.allclose(sorted(bar.get_height() for bar in axes.patches), sorted(want))
        assert [label.get_text() for label in axes.get_xticklabels()] == lengths
    assert "Tessera beside FlashAttention-4, cuDNN" in figure.get_suptitle()
    one = plot.bench(source, kind="bars", peer="torch_cudnn")
    assert {len(axes.patches) for axes in one.axes} == {12}


def test_bars_of_one_problem_twice_or_one_length_are_refused():
    row = {"problem": "attention sq=8", "us": 1.0, "gflop": 1.0}
    other = row | {"problem": "attention sq=16"}
    with pytest.raises(ValueError, match=r"^source: got several rows of one problem"):
        plot.bench({"rows": [row, row, other]}, kind="bars")
    with pytest.raises(ValueError, match=r"^source: got rows of one length"):
        plot.bench({"rows": [row]}, kind="bars")
    # Batches make panels only where two bars would have one place.
    batches = [row, row | {"problem": "attention b=2 sq=8"}, other]
    assert len(plot.bench({"rows": batches}, kind="bars").axes) == 2
    assert len(plot.bench({"rows": batches[1:]}, kind="bars").axes) == 1


def test_roofline_names_the_instruction_of_its_limit():
    data = json.loads((RESULTS.parent / "nvidia-h200" / "gpu_dense.json").read_text())
    for products in ("wgmma", "mma.sync"):
        data["machine"]["roofline"]["products"] = products
        (axes,) = plot.bench(data, kind="roofline").axes
        assert f"limits measured beside, {products}" in [line.get_label() for line in axes.lines]


def test_roofline_has_every_row_and_peer_under_the_measured_limits():
    data = dense()
    (axes,) = plot.bench(data, kind="roofline").axes
    limits = data["machine"]["roofline"]
    (roof,) = [line for line in axes.lines if line.get_label() == "limits measured beside"]
    for x, y in zip(roof.get_xdata(), roof.get_ydata(), strict=True):
        assert np.isclose(y, min(limits["gflops"], x * limits["gbytes_s"]) / 1e3)
    assert np.isclose(max(roof.get_ydata()), limits["gflops"] / 1e3)
    drawn = sorted((x, y) for line in axes.lines if line is not roof for x, y in line.get_xydata())
    times = [(row, us) for row in data["rows"] for us in (row["us"], row["peers"]["torch_cpu"])]
    assert np.allclose(drawn, sorted((row["gflop"] / row["gbyte"], row["gflop"] / us * 1e3) for row, us in times))


def test_time_is_the_picture_of_rows_without_peers_and_of_one_length():
    data = json.loads((RESULTS / "cpu_lists.json").read_text())
    figure = plot.bench(RESULTS / "cpu_lists.json", title="lists")
    assert [patch.get_width() for patch in figure.axes[0].patches] == [row["us"] / 1e3 for row in data["rows"]]
    assert figure.get_suptitle() == "lists"


def without(key):
    data = copy.deepcopy(dense())
    del data["rows"][2][key]
    return data


@pytest.mark.parametrize(
    ("source", "options", "argument"),
    [
        ({}, {}, "source"),
        ({"rows": []}, {}, "source"),
        ({"rows": [{"problem": "attention sq=1", "us": 0}]}, {}, "source"),
        (without("us"), {}, "source"),
        (without("problem"), {}, "source"),
        (RESULTS / "cpu_lists.json", {"kind": "length"}, "source"),
        (RESULTS / "cpu_lists.json", {"kind": "speedup"}, "peer"),
        (dense(), {"peer": "onnx"}, "peer"),
        (dense(), {"kind": "pie"}, "kind"),
        ({"rows": dense()["rows"]}, {"kind": "roofline"}, "source"),
        (dense(), {"metric": "joules"}, "metric"),
    ],
)
def test_bench_refuses(source, options, argument):
    with pytest.raises(ValueError, match=f"^{argument}: got .*; want "):
        plot.bench(source, **options)


def test_a_file_that_is_not_json_is_named(tmp_path):
    file = tmp_path / "broken.json"
    file.write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json, not JSON"):
        plot.bench(file)
    with pytest.raises(FileNotFoundError):
        plot.bench(tmp_path / "none.json")


def test_command_line_writes_pictures(tmp_path, capsys):
    np.save(tmp_path / "mass.npy", causal_mass())
    assert main(["tiles", str(tmp_path / "mass.npy"), "--head", "1", "-o", str(tmp_path / "mass.svg")]) == 0
    assert main(["bench", str(RESULTS / "cpu_dense.json"), "-o", str(tmp_path / "speed.png")]) == 0
    assert "<svg" in (tmp_path / "mass.svg").read_text()
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    assert main(["bench", str(tmp_path / "none.json"), "-o", str(tmp_path / "x.svg")]) == 2
    assert "tessera.plot: " in capsys.readouterr().err
    assert main(["tiles", str(tmp_path / "mass.npy"), "--batch", "7", "-o", str(tmp_path / "x.svg")]) == 2
    assert "batch: got 7" in capsys.readouterr().err


def test_figures_leave_pyplot_alone():
    import matplotlib._pylab_helpers as managers

    plot.tiles(causal_mass())
    assert not managers.Gcf.figs
