#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of bench/results from the JSON files there: a README.md beside those of each machine.

usage: bench/report.py [--check]
In the README.md of the repository the summary between '<!-- measured -->' and '<!-- end of measured -->' is replaced;
the text around it is written by hand.
--check changes nothing and exits 1 when a page is not what follows from the JSON files.
"""

import json
import sys
from pathlib import Path

from report_context_parallel import context_parallel_rows
from report_native_sparse import native_sparse_rows
from report_quantization import eight_bit_rows, quantization_rows
from report_skip import skip_steps_rows, training_step_rows
from report_tables import (
    accuracy_rows,
    chunk_rows,
    dense_rows,
    gpu_rows,
    gradient_rows,
    host_time_rows,
    input_rows,
    linear_rows,
    list_rows,
    loader_rows,
    overhead_rows,
    peer_means,
    plain_rows,
    profile_rows,
    ratio_summary,
    residual_rows,
    skip_rows,
    sweep_rows,
)
from report_text import tokens, wrapped

ROOT = Path(__file__).resolve().parent.parent


def without_a_limit(machine, rows):
    """Older results of SM90 have a limit of mma.sync, which kernels by wgmma pass."""
    if "wgmma" in machine.get("roofline", {}).get("products", "") or "target" not in machine:
        return rows
    return [{**row, "roofline_percent": None} if "wgmma" in row["implementation"] else row for row in rows]


def instruction_sets(rows):
    """The instruction set of the rows, or that of each pass where they differ."""
    sets = dict.fromkeys((row.get("pass", "?"), row.get("isa", "?")) for row in rows)
    if len({isa for _, isa in sets}) < 2:
        return f"instruction set {rows[0].get('isa', '?') if rows else '?'}"
    return "instruction sets: " + ", ".join(f"{kind} {isa}" for kind, isa in sets)


def cpu_machine(machine, rows):
    """What stands above the table of a CPU: the processor, threads, its roofline."""
    roofline = machine.get("roofline", {})
    threads = rows[0].get("threads", "?") if rows else "?"
    return (
        f"{machine.get('cpu', '?')} ({machine.get('identity', '')}), {threads} threads, {instruction_sets(rows)}; "
        f"measured roofline {roofline.get('gflops', '?')} GFLOP/s (fp32 FMA) and {roofline.get('gbytes_s', '?')} GB/s"
    )


def part_of(machine):
    """Says so where a part of the multiprocessors was used."""
    used = int(tokens(machine["target"])["multiprocessors"])
    return "" if used == machine["gpus"][0]["multiprocessors"] else f", {used} of its multiprocessors"


def gpu_machine(machine, rows):
    """What stands above the table of a GPU: the device, its roofline, versions."""
    gpu = machine["gpus"][0]
    roofline = machine.get("roofline", {})
    driver = machine.get("driver", 0)
    products = roofline.get("products", "mma.sync")  # older results do not say it
    return (
        f"{gpu['name']}{part_of(machine)}, plans of {rows[0]['isa'] if rows else '?'}; measured roofline "
        f"{roofline.get('gflops', 0) / 1e3:.0f} TFLOP/s ({products}, bf16) and {roofline.get('gbytes_s', '?')} GB/s "
        f"(copy); driver for CUDA {driver // 1000}.{driver % 1000 // 10}, NVRTC {machine.get('nvrtc', '?')}"
    )


def torch_machine(machine, _):
    """What stands above a table of a script that measures through torch."""
    host = f", host {machine['host']}, Python {machine['python']}" if "host" in machine else ""
    return machine["device"] + host


def profiled_machine(machine, _):
    """What stands above a table of a profiler."""
    return f"{machine['gpus'][0]['name']}, Nsight Compute, clocks as they are"


LAYOUTS = {
    "cpu_dense": ("Dense attention beside other libraries", dense_rows),
    "cpu_dense_two": ("Dense attention beside other libraries, two threads", dense_rows),
    "cpu_lists": ("A list of tiles beside dense attention", list_rows),
    "cpu_window": ("A sliding window beside the causal mask", plain_rows),
    "cpu_decode": ("Decode", plain_rows),
    "cpu_decode_two": ("Decode, two threads", plain_rows),
    "gpu_dense": ("Dense attention beside cuDNN and FlashAttention-4", gpu_rows),
    "gpu_graph": ("Length 512 as CUDA graphs, caches as they are", gpu_rows),
    "gpu_dense_sm80": ("Dense attention under the plans of SM80", gpu_rows),
    "gpu_dense_sm120": ("Dense attention under the plans of SM120: 99 KB of shared memory", gpu_rows),
    "gpu_gqa_prefill": ("Short prefills with grouped heads", gpu_rows),
    "gpu_gqa_prefill_mma": ("Short prefills with grouped heads by `cuda.fwd_mma`", gpu_rows),
    "gpu_gqa_prefill_sm120": ("Short prefills with grouped heads under the plans of SM120", gpu_rows),
    "gpu_lists": ("Lists of tiles beside dense attention", list_rows),
    "gpu_skip": ("Lists that move on from step to step", skip_rows),
    "skip_steps": ("Steps of skip states", skip_steps_rows),
    "gpu_fp8": ("Operands of e4m3 beside bf16", eight_bit_rows),
    "gpu_int8": ("Scores of int8 beside bf16", eight_bit_rows),
    "gpu_quantize": ("Rows to 8 bits and their descales", plain_rows),
    "gpu_inputs": ("Inputs of larger and rising scores", input_rows),
    "gpu_accuracy": ("Relative L2 distance of outputs from double precision", accuracy_rows),
    "gpu_paged": ("Keys in pages", plain_rows),
    "gpu_decode": ("Decode steps as CUDA graphs", plain_rows),
    "gpu_decode_sm80": ("Decode steps under the plans of SM80", plain_rows),
    "gpu_decode_sm89": ("Decode steps under the plans of SM89", plain_rows),
    "gpu_decode_sm120": ("Decode steps under the plans of SM120", plain_rows),
    "gpu_mixed": ("Serving steps: prefill, chunks and decode in one launch", plain_rows),
    "gpu_decode_bytes": ("Decode steps from caches of e4m3 beside bf16", eight_bit_rows),
    "gpu_nsa": ("Native sparse attention: its operations, and attention of its branches", plain_rows),
    "native_sparse": ("Native sparse attention beside dense attention", native_sparse_rows),
    "native_sparse_fla": ("Native sparse attention without a window beside flash-linear-attention", native_sparse_rows),
    "gpu_linear": ("Linear attention: decode steps on cold states", linear_rows),
    "gpu_linear_part": ("Linear attention: decode steps on a part of the multiprocessors", linear_rows),
    "gpu_linear_sweep": ("Linear attention: blocks of a decode step", linear_rows),
    "gpu_linear_profile": ("Linear attention: decode steps under a profiler", profile_rows),
    "gpu_linear_chunk": ("Linear attention: whole sequences", chunk_rows),
    "gpu_long": ("Long sequences, a window, packed sequences", plain_rows),
    "gpu_types": ("bf16 and fp16", plain_rows),
    "gpu_loaders": ("cp.async and TMA", plain_rows),
    "gpu_mma_loader": ("Loaders of `cuda.fwd_mma`", loader_rows),
    "gpu_mma_loader_sm120": ("Loaders of `cuda.fwd_mma` under the plans of SM120", loader_rows),
    "gpu_sweep": ("Tiles, stages and warps of the forward", sweep_rows),
    "gpu_backward": ("Gradients of dense attention beside cuDNN and FlashAttention-4", gpu_rows),
    "gpu_backward_sm80": ("Gradients of dense attention under the plans of SM80", gpu_rows),
    "gpu_backward_sm120": ("Gradients of dense attention under the plans of SM120: 99 KB of shared memory", gpu_rows),
    "gpu_backward_lists": ("Gradients by lists of tiles beside dense attention", list_rows),
    "gpu_backward_shares": ("Gradients by shares of tiles beside dense attention", list_rows),
    "gpu_residual": ("What the residual of O costs", residual_rows),
    "training_step": ("Training steps with a list in the backward", training_step_rows),
    "context_parallel": ("Context parallel attention on GPUs of one host", context_parallel_rows),
    "gradient_errors": ("Errors of gradients against double precision", gradient_rows),
    "quantization_errors": ("Attention of quantised operands beside double precision", quantization_rows),
    "python_overhead": ("What a call from Python adds", overhead_rows),
    "python_overhead_cuda": ("Host time of a call from Python", host_time_rows),
}


def report(folder, files):
    """The page of a machine."""
    root = "../" * len(folder.relative_to(ROOT).parts)
    generated = (
        "Generated by `python3 bench/report.py` from the JSON files of this folder. "
        f"How they are measured: [docs/performance.md]({root}docs/performance.md)."
    )
    parts = [f"<!-- SPDX-License-Identifier: Apache-2.0 -->\n# {folder.name}\n", wrapped(generated) + "\n"]
    for file in sorted(files, key=lambda f: [*LAYOUTS, f.stem].index(f.stem)):
        data = json.loads(file.read_text())
        machine, rows = data["machine"], without_a_limit(data["machine"], data["rows"])
        title, layout = LAYOUTS.get(file.stem, (file.stem, plain_rows))
        peers = ", ".join(dict.fromkeys(machine.get("peers", {}).values()))
        describe = gpu_machine if "target" in machine else torch_machine if "device" in machine else cpu_machine
        if file.stem == "gpu_linear_profile":
            describe = profiled_machine
        about = (
            f"{describe(machine, rows)}; Tessera {machine.get('version', '?')}"
            f"{', ' + peers if peers else ''}; {machine.get('date', '?')}. From [{file.name}]({file.name})."
        )
        parts += [f"## {title}\n", wrapped(about) + "\n", layout(rows)]
    return "\n".join(parts)


def reports():
    """The page of every machine, by its path."""
    folders = sorted((ROOT / "bench" / "results").glob("*/"))
    files = {folder: list(folder.glob("*.json")) for folder in folders}
    return {folder / "README.md": report(folder, found) for folder, found in files.items() if found}


def is_plain(row):
    """Whether peers were measured on it, at a head dim of 64, 128 or 256, as many key heads as heads and N(0, 1)."""
    words = tokens(row["problem"])
    other = {"dv", "hkv", "inputs", "layout"} & words.keys() or words.get("d", "64") not in ("64", "128", "256")
    return row["ratios"] and not other


def readme_summary():
    lines = []
    for file in sorted((ROOT / "bench" / "results").glob("*/cpu_dense.json")):
        data = json.loads(file.read_text())
        machine, rows = data["machine"], data["rows"]
        peers = ", ".join(machine.get("peers", {}).values())
        threads = rows[0].get("threads", "?") if rows else "?"
        beside = f", beside {peers}" if peers else ""
        family = " ".join(machine.get("identity", "").split()[:4])  # without the stepping
        name = machine.get("cpu", file.parent.name) + (f" ({family})" if family else "")
        isas = f", {instruction_sets(rows)}" if len({row.get("isa") for row in rows}) > 1 else ""
        lines.append(wrapped(f"{name}, {threads} threads{isas}{beside}:") + "\n")
        lines.append(ratio_summary(rows))
    for file in sorted((ROOT / "bench" / "results").glob("*/gpu_dense.json")):
        data = json.loads(file.read_text())
        name = data["machine"]["gpus"][0]["name"]
        lines.append(f"{name}, forward, bf16, head dims 64, 128 and 256:\n")
        lines.append(peer_means(data["rows"]))
        gradients = file.with_name("gpu_backward.json")
        if gradients.exists():
            rows = [row for row in json.loads(gradients.read_text())["rows"] if is_plain(row)]
            about = f"{name}, gradients, the same head dims:"
            lines += [wrapped(about) + "\n", peer_means(rows)]
    return "\n".join(lines)


def renewed(text, begin, end, content, page):
    if text.count(begin) != 1 or text.count(end) != 1:
        sys.exit(f"report: {page} needs one '{begin}' and one '{end}'")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{content}\n{end}{after}"


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__)
        sys.exit(0 if {"-h", "--help"} & set(sys.argv[1:]) else 2)
    readme = ROOT / "README.md"
    begin, end = "<!-- measured -->", "<!-- end of measured -->"
    pages = reports() | {readme: renewed(readme.read_text(), begin, end, readme_summary(), readme)}
    for page, content in pages.items():
        if "--check" not in sys.argv[1:]:
            page.write_text(content)
        elif not page.exists() or page.read_text() != content:
            sys.exit(f"report: {page} is not what bench/report.py writes from bench/results")


if __name__ == "__main__":
    main()
