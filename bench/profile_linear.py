#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Profiles decode steps of linear attention with Nsight Compute: how busy memory is, what is found in the L2 cache, how
many warps are resident and what they wait for.

usage: bench/profile_linear.py [--save | --json FILE] [--tessera COMMAND] [PROBLEM...]
A problem is checked against the oracle under the profiler, which runs the kernel once for each of its passes: with all
caches emptied before each ("cold"), and as the pass before left them ("hot"). Needs a GPU and ncu in PATH. Writes
bench/results/<GPU>/gpu_linear_profile.json with --save.
"""

import argparse
import csv
import datetime
import io
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROBLEMS = [
    f"linear_decode b={batch} h=64 d=128 dtype=bf16 slots={batch} state_slots=unbound{kind}"
    for kind in ("", " state=bf16", " ring=16")
    for batch in (64, 128, 256)
]
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
METRICS = {
    "us": "gpu__time_duration.sum",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
UNITS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1, "us": 1, "msecond": 1e3, "ms": 1e3}
UNITS |= {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "%": 1}


def profile(command, problem, caches):
    """The row of the longest kernel, by metric."""
    metrics = ",".join([*METRICS.values(), "regex:smsp__average_warps_issue_stalled_.*_per_issue_active"])
    ncu = ["ncu", "--csv", "--page", "raw", "--cache-control", caches, "--clock-control", "none", "--metrics", metrics]
    said = subprocess.run(
        [*ncu, *command, "verify", "--device", "cuda", f"{problem} seed=1"], capture_output=True, text=True, check=False
    )
    text = said.stdout[said.stdout.find('"ID"') :]
    rows = [row for row in csv.DictReader(io.StringIO(text)) if row.get("ID")]
    if said.returncode != 0 or not rows:
        sys.exit(f"profile_linear: ncu of '{problem}' failed:\n{said.stdout[-2000:]}{said.stderr[-2000:]}")
    units, *kernels = [row for row in csv.DictReader(io.StringIO(text))]

    def value(row, metric):
        return float(row[metric].replace(",", "")) * UNITS.get(units[metric], 1)

    longest = max(kernels, key=lambda row: value(row, METRICS["us"]))
    stalls = {m[1]: value(longest, name) for name in longest if name and (m := STALL.fullmatch(name))}
    stall = max(stalls, key=stalls.get)
    result = {key: value(longest, metric) for key, metric in METRICS.items()}
    return {
        "problem": problem,
        "caches": "cold" if caches == "all" else "hot",
        **result,
        "gbytes_s": (result["dram_read_bytes"] + result["dram_write_bytes"]) / result["us"] * 1e-3,
        "stall": stall,
        "stall_part": stalls[stall] / sum(stalls.values()),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tessera", default=str(ROOT / "build" / "release" / "tessera"))
    parser.add_argument("problems", nargs="*", metavar="PROBLEM")
    options = parser.parse_args()
    machine = json.loads(subprocess.check_output([options.tessera, "info", "--json"], text=True))
    machine = {"gpus": machine["gpus"], "version": machine["version"], "date": str(datetime.date.today())}
    path = options.json
    if options.save:
        name = re.sub(r"[^a-z0-9]+", "-", machine["gpus"][0]["name"].lower()).strip("-")
        path = ROOT / "bench" / "results" / name / "gpu_linear_profile.json"
    rows = []
    for problem in options.problems or PROBLEMS:
        for caches in ("all", "none"):
            rows.append(profile([options.tessera], problem, caches))
            print(
                ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else str(v) for k, v in rows[-1].items()), flush=True
            )
            if path:  # after every row, so that a run that is cut short keeps what it has
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
