# SPDX-License-Identifier: Apache-2.0
"""The C++ command and Python give the same bits on the same arrays, and refuse with the same words."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tessera

ml_dtypes = pytest.importorskip("ml_dtypes")
CLI_GUIDE = Path(__file__).parents[2] / "docs" / "cli.md"
THREADS = 2  # the same on both sides: splits may follow their number

DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


class Command:
    """`tessera run` on arrays through .npy files in a folder of its own."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.folder = path, folder

    def __call__(self, words: str, wishes: str = "", seed: int = 0, **arrays: np.ndarray) -> dict[str, np.ndarray]:
        """The outputs by slot."""
        done = self.run(words, wishes, seed, arrays)
        assert done.returncode == 0, done.stderr
        found = {"o" if path.name == "o.npy" else path.name.split(".")[1]: path for path in self.folder.glob("o*.npy")}
        return {slot: _read(path) for slot, path in found.items()}

    def refusal(self, words: str, **arrays: np.ndarray) -> str:
        """The text of its error."""
        done = self.run(words, "", 0, arrays)
        assert done.returncode in (2, 3), done.stdout
        return done.stderr.removeprefix("tessera: ").strip()

    def run(self, words: str, wishes: str, seed: int, arrays: dict) -> subprocess.CompletedProcess:
        call = [
            str(self.path),
            "run",
            "--quiet",
            f"--threads={THREADS}",
            f"--seed={seed}",
            f"--out={self.folder}/o.npy",
        ]
        for wish in wishes.split():
            call += ["--wish", wish]
        for name, value in arrays.items():
            file = self.folder / f"{name}.in.npy"
            np.save(file, value)
            call += ["--in", f"{name}={file}"]
        return subprocess.run([*call, "--", *words.split()], capture_output=True, text=True, check=False)


def _read(path: Path) -> np.ndarray:
    read = np.load(path)
    return read.view(ml_dtypes.bfloat16) if read.dtype == np.dtype("V2") else read


@pytest.fixture
def command(tessera_command, tmp_path):
    return Command(tessera_command, tmp_path)


@pytest.fixture
def rng():
    return np.random.default_rng(77)


def normal(rng, *shape, dtype="fp32"):
    return rng.standard_normal(shape).astype(DTYPES[dtype])


def identical(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    assert got.tobytes() == want.tobytes()


# (Python's options, words of the line); sizes and dtypes come from the arrays on both sides.
OPTIONS = {
    "plain": ({}, ""),
    "causal": ({"causal": True}, "causal"),
    "window": ({"window": (9, 3)}, "window=9:3"),
    "compressed_causal": ({"compressed_causal": (4, 2)}, "compressed_causal=4:2"),
    "chunks": ({"causal": True, "attention_chunk": 20}, "causal chunk=20"),
    "scores": ({"scale": 0.2, "softcap": 3.5}, "scale=0.2 softcap=3.5"),
    "built-ins": ({"score": "relative", "mask": "prefix"}, "score=relative mask=prefix"),
    "dropout": ({"dropout": 0.3, "seed": 8}, "dropout=0.3"),
    "invariant": ({"causal": True, "batch_invariant": True}, "causal batch_invariant"),
    "wish": ({"wishes": "splits=3 tile_kv=16"}, ""),
    "oracle": ({"causal": True, "wishes": "implementation=cpu.reference"}, "causal"),
}


class TestForward:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("name", OPTIONS)
    def test_options(self, command, rng, name, dtype):
        options, words = OPTIONS[name]
        q, k, v = (normal(rng, *shape, dtype=dtype) for shape in ((2, 33, 4, 32), (2, 70, 2, 32), (2, 70, 2, 16)))
        out, lse = tessera.attention(q, k, v, return_lse=True, threads=THREADS, **options)
        theirs = command(f"{words} lse", options.get("wishes", ""), options.get("seed", 0), q=q, k=k, v=v)
        identical(out, theirs["o"])
        identical(lse, theirs["lse"])

    def test_decode_with_splits(self, command, rng):
        q, k, v = normal(rng, 1, 1, 8, 64, dtype="bf16"), *(normal(rng, 1, 3000, 2, 64, dtype="bf16") for _ in "kv")
        identical(tessera.attention(q, k, v, threads=THREADS), command("", q=q, k=k, v=v)["o"])

    def test_dtypes_of_their_own(self, command, rng):
        q, k, v = (
            normal(rng, 1, 9, 2, 16),
            normal(rng, 1, 9, 2, 16, dtype="fp16"),
            normal(rng, 1, 9, 2, 16, dtype="bf16"),
        )
        out = tessera.attention(q, k, v, out_dtype="bf16", threads=THREADS)
        identical(out, command("dtype=fp32:fp16:bf16:bf16", q=q, k=k, v=v)["o"])

    def test_sinks_slopes_offsets(self, command, rng):
        q, k, v = normal(rng, 2, 20, 4, 16), normal(rng, 2, 30, 4, 16), normal(rng, 2, 30, 4, 16)
        sink, slopes = normal(rng, 4), rng.random(4).astype(np.float32)
        shift = np.array([3, -5], np.int64)
        options = {"sinks": sink, "alibi_slopes": slopes, "offsets": tessera.Offsets(q=shift)}
        out = tessera.attention(q, k, v, causal=True, threads=THREADS, **options)
        theirs = command("causal", q=q, k=k, v=v, sink=sink, alibi_slopes=slopes, q_offset=shift)
        identical(out, theirs["o"])

    def test_packed_sequences(self, command, rng):
        q, k, v = normal(rng, 50, 4, 16), normal(rng, 60, 2, 16), normal(rng, 60, 2, 16)
        cu = {"cu_seqlens_q": np.array([0, 31, 31, 48], np.int32), "cu_seqlens_k": np.array([0, 20, 35, 60], np.int32)}
        used = {"seqused_k": np.array([20, 9, 25], np.int32)}
        out, lse = tessera.attention(q, k, v, causal=True, return_lse=True, threads=THREADS, **cu, **used)
        theirs = command("causal lse seqused_k", q=q, k=k, v=v, **cu, **used)
        # What lies behind the last sequence is nobody's: neither side writes it.
        identical(out[:48], theirs["o"][:48])
        identical(lse[:, :48], theirs["lse"][:, :48])

    @pytest.mark.parametrize("form", ["table", "csr"])
    def test_pages(self, command, rng, form):
        q = normal(rng, 2, 3, 4, 16)
        k, v = normal(rng, 9, 8, 2, 16), normal(rng, 9, 8, 2, 16)
        if form == "table":
            pages = {
                "page_table": rng.permutation(9)[:8].astype(np.int32).reshape(2, 4),
                "seqused_k": np.array([31, 12], np.int32),
            }
        else:
            pages = {
                "page_indptr": np.array([0, 3, 5], np.int32),
                "page_indices": np.array([4, 1, 8, 0, 2], np.int32),
                "last_page_len": np.array([8, 1], np.int32),
            }
        # The longest sequence in use, which is what the command plans for.
        longest = {"max_seqlen": 31} if form == "table" else {}
        fields = {"seqused" if name == "seqused_k" else name: array for name, array in pages.items()}
        out = tessera.attention(q, tessera.KeySource(k, v, **fields, **longest), causal=True, threads=THREADS)
        identical(out, command("causal", q=q, k=k, v=v, **pages)["o"])

    def test_two_segments(self, command, rng):
        q, k, v, k2, v2 = (normal(rng, 1, n, 2, 16) for n in (17, 40, 40, 17, 17))
        out = tessera.attention(q, k, v, k2=tessera.KeySource(k2, v2), causal=True, threads=THREADS)
        identical(out, command("causal", q=q, k=k, v=v, k2=k2, v2=v2)["o"])

    @pytest.mark.parametrize("form", ["indices", "bitmask", "transposed"])
    def test_tile_lists(self, command, rng, form):
        q, k, v = (normal(rng, 1, 100, 4, 16) for _ in "qkv")
        tiles = tessera.TileList.from_mask(rng.random((1, 2, 7, 13)) < 0.5, form=form, block=(16, 8))
        q4, k2, v2 = q, k[:, :, :2].copy(), v[:, :, :2].copy()
        out = tessera.attention(q4, k2, v2, tiles=tiles, threads=THREADS)
        theirs = command(f"block=16x8 list={form}:kv", q=q4, k=k2, v=v2, **dict(tiles.arrays()))
        identical(out, theirs["o"])

    def test_mass_and_next_list(self, command, rng):
        q, k, v = (normal(rng, 1, 40, 2, 16) for _ in "qkv")
        out, mass, tiles = tessera.attention(
            q, k, v, tiles=tessera.Tiles(mass="rms", next="indices", threshold=0.3, block=(8, 8)), threads=THREADS
        )
        theirs = command("mass=rms next=indices threshold=0.3 block=8x8", q=q, k=k, v=v)
        identical(out, theirs["o"])
        identical(mass, theirs["tile_mass"])
        identical(tiles.counts, theirs["next_counts"])
        identical(tiles.indices, theirs["next_indices"])


class TestBackward:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_after_either_forward(self, command, rng, dtype):
        q, k, v, dout = (normal(rng, 2, 40, 4, 16, dtype=dtype) for _ in range(4))
        sinks = normal(rng, 4)
        out, lse = tessera.attention(q, k, v, causal=True, sinks=sinks, return_lse=True, threads=THREADS)
        options = {"causal": True, "sinks": sinks, "deterministic": True, "threads": THREADS}
        ours = tessera.attention_backward(dout, q, k, v, out, lse, **options)
        given = {"q": q, "k": k, "v": v, "dout": dout, "sink": sinks}
        after_ours = command("pass=backward causal deterministic", o=out, lse=lse, **given)
        after_theirs = command("pass=backward causal deterministic", **given)
        for slot, gradient in zip(("dq", "dk", "dv", "dsink"), ours, strict=True):
            identical(gradient, after_ours[slot])
            identical(gradient, after_theirs[slot])
        theirs = command("causal lse", q=q, k=k, v=v, sink=sinks)
        for got, want in zip(
            tessera.attention_backward(dout, q, k, v, theirs["o"], theirs["lse"], **options), ours, strict=True
        ):
            identical(got, want)

    @pytest.mark.parametrize("name", [name for name in OPTIONS if name != "wish"])
    def test_options(self, command, rng, name):
        options, words = OPTIONS[name]
        q, dout = normal(rng, 2, 33, 4, 32), normal(rng, 2, 33, 4, 16)
        k, v = normal(rng, 2, 70, 2, 32), normal(rng, 2, 70, 2, 16)
        out, lse = tessera.attention(q, k, v, return_lse=True, threads=THREADS, **options)
        ours = tessera.attention_backward(
            dout, q, k, v, out, lse, **{**options, "deterministic": True, "threads": THREADS}
        )
        words = f"pass=backward deterministic {words}"
        arrays = {"q": q, "k": k, "v": v, "dout": dout, "o": out, "lse": lse}
        theirs = command(words, options.get("wishes", ""), options.get("seed", 0), **arrays)
        for slot, gradient in zip(("dq", "dk", "dv"), ours, strict=True):
            identical(gradient, theirs[slot])

    def test_packed_sequences(self, command, rng):
        q, dout = normal(rng, 50, 4, 16), normal(rng, 50, 4, 16)
        k, v = normal(rng, 60, 2, 16), normal(rng, 60, 2, 16)
        cu = {"cu_seqlens_q": np.array([0, 31, 31, 50], np.int32), "cu_seqlens_k": np.array([0, 20, 35, 60], np.int32)}
        options = {"causal": True, "deterministic": True, "threads": THREADS, **cu}
        out, lse = tessera.attention(q, k, v, return_lse=True, **options)
        ours = tessera.attention_backward(dout, q, k, v, out, lse, **options)
        theirs = command("pass=backward causal deterministic", q=q, k=k, v=v, dout=dout, o=out, lse=lse, **cu)
        for slot, gradient in zip(("dq", "dk", "dv"), ours, strict=True):
            identical(gradient, theirs[slot])

    def test_two_segments(self, command, rng):
        q, k, v, k2, v2, dout = (normal(rng, 1, n, 2, 16) for n in (17, 40, 40, 17, 17, 17))
        options = {"k2": tessera.KeySource(k2, v2), "causal": True, "deterministic": True, "threads": THREADS}
        out, lse = tessera.attention(q, k, v, return_lse=True, **options)
        ours = tessera.attention_backward(dout, q, k, v, out, lse, **options)
        arrays = {"q": q, "k": k, "v": v, "k2": k2, "v2": v2, "dout": dout, "o": out, "lse": lse}
        theirs = command("pass=backward causal deterministic", **arrays)
        for slot, gradient in zip(("dq", "dk", "dv", "dk2", "dv2"), ours, strict=True):
            identical(gradient, theirs[slot])

    @pytest.mark.parametrize("form", ["indices", "bitmask", "transposed"])
    def test_tile_lists_of_either_pass(self, command, rng, form):
        q, k, v, dout = (normal(rng, 1, 100, 2, 16, dtype="bf16") for _ in range(4))
        kept = rng.random((1, 2, 7, 13)) < 0.5
        tiles = tessera.TileList.from_mask(kept, form=form, block=(16, 8))
        fewer = tessera.TileList.from_mask(kept & (rng.random(kept.shape) < 0.7), form=form, block=(16, 8))
        options = {"tiles": tessera.Tiles(tiles, fewer), "deterministic": True, "threads": THREADS}
        out, lse = tessera.attention(q, k, v, return_lse=True, **options)
        ours = tessera.attention_backward(dout, q, k, v, out, lse, **options)
        arrays = {"q": q, "k": k, "v": v, "dout": dout, "o": out, "lse": lse}
        arrays |= dict(tiles.arrays()) | {f"bwd_{name}": array for name, array in fewer.arrays()}
        theirs = command(f"pass=backward deterministic block=16x8 list={form}:kv bwd_list={form}:kv", **arrays)
        for slot, gradient in zip(("dq", "dk", "dv"), ours, strict=True):
            identical(gradient, theirs[slot])

    def test_fp32_gradients_and_dlse(self, command, rng):
        q, k, v, dout = (normal(rng, 1, 20, 2, 16, dtype="bf16") for _ in range(4))
        dlse = normal(rng, 1, 2, 20)
        out, lse = tessera.attention(q, k, v, return_lse=True, threads=THREADS)
        ours = tessera.attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, grad_dtype="fp32", deterministic=True, threads=THREADS
        )
        theirs = command("pass=backward grad=fp32 deterministic", q=q, k=k, v=v, dout=dout, dlse=dlse, o=out, lse=lse)
        for slot, gradient in zip(("dq", "dk", "dv"), ours, strict=True):
            identical(gradient, theirs[slot])


class TestOtherOperations:
    def test_combine(self, command, rng):
        outs, lses = normal(rng, 3, 2, 5, 4, 16), normal(rng, 3, 2, 4, 5)
        sinks = normal(rng, 4)
        out, lse = tessera.combine(outs, lses, sinks=sinks, threads=THREADS)
        theirs = command("combine lse", o_parts=outs, lse_parts=lses, sink=sinks)
        identical(out, theirs["o"])
        identical(lse, theirs["lse"])

    def test_kv_append(self, command, rng):
        k, v, k_new, v_new, q = (
            normal(rng, *shape) for shape in ((2, 9, 2, 16),) * 2 + ((2, 3, 2, 16),) * 2 + ((2, 3, 4, 16),)
        )
        cos, sin, used = normal(rng, 9, 4), normal(rng, 9, 4), np.array([1, 6], np.int32)
        theirs = command(
            "kv_append rotary=half:8",
            k=k,
            v=v,
            k_new=k_new,
            v_new=v_new,
            q=q,
            seqused_k=used,
            rotary_cos=cos,
            rotary_sin=sin,
        )
        turned = tessera.kv_append(k, v, k_new, v_new, seqused_k=used, rotary_cos=cos, rotary_sin=sin, q=q)
        identical(k, theirs["k"])
        identical(v, theirs["v"])
        identical(turned, theirs["q_rotated"])

    def test_linear_decode(self, command, rng):
        q, k, v = (normal(rng, 2, 3, 4, dim) for dim in (16, 16, 24))
        state, slopes = normal(rng, 5, 4, 16, 24), np.array([0, 0.1, 0.5, 2], np.float32)
        slots = np.array([3, -1], np.int64)
        tensors = {"q": q, "k": k, "v": v, "state": state, "decay_slopes": slopes, "state_slots": slots}
        theirs = command("linear_decode layout=kv scale=0.5", **tensors)
        out = tessera.linear_decode(q, k, v, state, slopes, state_slots=slots, scale=0.5, layout="kv", threads=THREADS)
        identical(out, theirs["o"])
        identical(state, theirs["state"])

    def test_linear_decode_with_a_ring(self, command, rng):
        q, k, v = (normal(rng, 2, 3, 4, dim) for dim in (16, 16, 24))
        ring_k, ring_v = normal(rng, 5, 4, 10, 16), normal(rng, 5, 4, 10, 24)
        tensors = {"state": normal(rng, 5, 4, 16, 24), "decay_slopes": np.array([0, 0.1, 0.5, 2], np.float32)}
        tensors |= {"state_slots": np.array([3, 1], np.int64), "ring_k": ring_k, "ring_v": ring_v}
        tensors["ring_cursor"] = np.array([4, 7], np.int32)  # the first has no room for three more of five
        theirs = command("linear_decode layout=kv", q=q, k=k, v=v, **tensors)
        flushed = command("linear_decode layout=kv", **tensors)
        ours = {name: array.copy() for name, array in tensors.items()}
        tessera.linear_flush(**ours, layout="kv", threads=THREADS)
        identical(ours["state"], flushed["state"])
        out = tessera.linear_decode(q, k, v, **tensors, layout="kv", threads=THREADS)
        identical(out, theirs["o"])
        for name in ("state", "ring_k", "ring_v"):
            identical(tensors[name], theirs[name])

    @pytest.mark.parametrize("pool", [False, True])
    @pytest.mark.parametrize("form", ["dense", "packed", "without batch"])
    def test_linear_chunk(self, command, rng, form, pool):
        rows = (2, 70) if form == "dense" else (140,)
        tensors = {name: normal(rng, *rows, 4, dim, dtype="bf16") for name, dim in (("q", 16), ("k", 16), ("v", 24))}
        cu = {"cu_seqlens": np.array([0, 101, 101, 140], np.int32)} if form == "packed" else {}
        batch = {"dense": 2, "packed": 3, "without batch": 1}[form]
        slopes, state = np.array([0, 0.1, 0.5, 2], np.float32), normal(rng, 5, 4, 16, 24) if pool else None
        slots = {"state_slots": np.arange(3, 3 - batch, -1), "dest_slots": np.arange(batch)} if pool else {}
        given = tensors | slots | {"decay_slopes": slopes} | ({"state": state} if pool else {})
        given |= {"cu_seqlens_q": cu["cu_seqlens"]} if cu else {}
        theirs = command("linear_chunk layout=kv scale=0.5", **given)
        if form == "without batch":
            tensors = {name: array[None] for name, array in tensors.items()}
        out = tessera.linear_chunk(
            *tensors.values(), state, slopes, **slots, **cu, scale=0.5, layout="kv", threads=THREADS
        )
        identical(out[0] if form == "without batch" else out, theirs["o"])
        assert set(theirs) == ({"o", "state"} if pool else {"o"})
        if pool:
            identical(state, theirs["state"])

    @pytest.mark.parametrize("pool", [False, True])
    @pytest.mark.parametrize("packed", [False, True])
    def test_linear_chunk_backward(self, command, rng, packed, pool):
        torch = pytest.importorskip("torch")
        rows = (140,) if packed else (3, 70)
        arrays = {name: normal(rng, *rows, 4, dim) for name, dim in (("q", 16), ("k", 16), ("v", 24), ("dout", 24))}
        slopes = np.array([0, 0.1, 0.5, 2], np.float32)
        states = {"state": normal(rng, 3, 4, 24, 16), "dstate_final": normal(rng, 3, 4, 24, 16)} if pool else {}
        cu = {"cu_seqlens": np.array([0, 101, 101, 140], np.int32)} if packed else {}
        given = arrays | states | {"decay_slopes": slopes} | ({"cu_seqlens_q": cu["cu_seqlens"]} if packed else {})
        theirs = command("linear_chunk pass=backward", **given)
        leaves = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items() if name != "dout"}
        initial = torch.tensor(states["state"], requires_grad=True) if pool else None
        cu = {name: torch.tensor(array) for name, array in cu.items()}
        out, final = tessera.linear_attention(
            *leaves.values(),
            torch.tensor(slopes),
            initial_state=initial,
            output_final_state=pool,
            layout="vk",
            **cu,
        )
        outputs, gradients = [out], [torch.tensor(arrays["dout"])]
        if pool:
            outputs, gradients = [out, final], [*gradients, torch.tensor(states["dstate_final"])]
        torch.autograd.backward(outputs, gradients)
        for name, leaf in leaves.items():
            identical(leaf.grad.numpy(), theirs[f"d{name}"])
        assert set(theirs) == {"dq", "dk", "dv"} | ({"dstate_initial"} if pool else set())
        if pool:
            identical(initial.grad.numpy(), theirs["dstate_initial"])


VERBS = ("info", "explain", "run", "verify", "bench", "compile", "random")


class TestDocumentation:
    """docs/cli.md names the options that the command has, and no others."""

    @staticmethod
    def options_of(command: Path, verb: str) -> set[str]:
        done = subprocess.run([str(command), verb, "--help"], capture_output=True, text=True, check=True)
        listed = "".join(line for line in done.stdout.splitlines(keepends=True) if re.match(r"  -", line))
        return set(re.findall(r"--[a-z][a-z-]*", re.sub(r"(Excludes|Needs):.*", "", listed))) - {"--help"}

    @pytest.mark.parametrize("verb", VERBS)
    def test_names_every_option_of_a_verb(self, tessera_command, verb):
        sections = re.split(r"^## ", CLI_GUIDE.read_text(), flags=re.MULTILINE)
        section = next(each for each in sections if each.startswith(f"{verb}\n"))
        shared = next(each for each in sections if each.startswith("Exit codes"))
        known = self.options_of(tessera_command, verb)
        assert known - set(re.findall(r"--[a-z][a-z-]*", section + shared)) == set()

    def test_names_no_option_that_there_is_not(self, tessera_command):
        known = set().union(*(self.options_of(tessera_command, verb) for verb in VERBS))
        assert set(re.findall(r"--[a-z][a-z-]*", CLI_GUIDE.read_text())) <= known | {"--help"}


def refused(call) -> str:
    with pytest.raises((ValueError, NotImplementedError)) as raised:
        call()
    return str(raised.value)


class TestRefusals:
    """The same text from both, where both get as far as the library."""

    @pytest.mark.parametrize(
        ("words", "options", "arrays"),
        [
            ("scale=inf", {"scale": float("inf")}, {}),
            ("softcap=-2", {"softcap": -2.0}, {}),
            ("dropout=1.5", {"dropout": 1.5}, {}),
            ("compressed_causal=0:2", {"compressed_causal": (0, 2)}, {}),
            ("", {"sinks": "sink"}, {"sink": np.zeros(3, np.float32)}),
            ("", {"alibi_slopes": "alibi_slopes"}, {"alibi_slopes": np.zeros((1, 4, 1), np.float32)}),
            ("", {"seqused_k": "seqused_k"}, {"seqused_k": np.array([3, 11], np.int32)}),
            ("", {"seqused_k": "seqused_k"}, {"seqused_k": np.array([3, 1], np.int64)}),
            ("", {"offsets": lambda q: tessera.Offsets(q=q)}, {"q_offset": np.array([1 << 61, 0], np.int64)}),
            ("", {"offsets": lambda k2: tessera.Offsets(k2=k2)}, {"k_offset2": np.zeros(2, np.int64)}),
        ],
    )
    def test_options(self, command, rng, words, options, arrays):
        q, k, v = (normal(rng, 2, 7, 2, 16) for _ in "qkv")
        options = {name: arrays[value] if isinstance(value, str) else value for name, value in options.items()}
        options = {name: value(*arrays.values()) if callable(value) else value for name, value in options.items()}
        ours = refused(lambda: tessera.attention(q, k, v, **options))
        assert ours == command.refusal(words, q=q, k=k, v=v, **arrays)

    def test_shapes(self, command, rng):
        q, k, v = normal(rng, 2, 7, 2, 16), normal(rng, 2, 9, 2, 16), normal(rng, 2, 8, 2, 16)
        assert refused(lambda: tessera.attention(q, k, v)) == command.refusal("", q=q, k=k, v=v)
        k3 = normal(rng, 2, 7, 3, 16)
        assert refused(lambda: tessera.attention(q, k3, k3)) == command.refusal("", q=q, k=k3, v=k3)
        odd = normal(rng, 2, 7, 2, 12)
        assert refused(lambda: tessera.attention(odd, odd, odd)) == command.refusal("", q=odd, k=odd, v=odd)

    def test_unsorted_tiles(self, command, rng):
        q = normal(rng, 1, 32, 1, 16)
        counts, indices = np.full((1, 1, 2), 2, np.int32), np.array([[[[0, 1], [1, 0]]]], np.int32)
        tiles = tessera.TileList(counts=counts, indices=indices, block=(16, 16))
        ours = refused(lambda: tessera.attention(q, q, q, tiles=tiles))
        theirs = command.refusal("block=16x16 list=indices", q=q, k=q, v=q, tile_counts=counts, tile_indices=indices)
        assert ours == theirs and ours.startswith("tile_indices: got ")

    def test_what_nothing_computes(self, command, rng):
        q = normal(rng, 1, 8, 1, 16)
        ours = refused(lambda: tessera.attention(q, q, q, wishes="splits=2000", threads=THREADS))
        done = command.run("", "splits=2000", 0, {"q": q, "k": q, "v": q})
        assert done.returncode == 3
        # Both name the problem; they say its defaults differently.
        assert ours.split("; want ")[1] == done.stderr.strip().split("; want ")[1]
