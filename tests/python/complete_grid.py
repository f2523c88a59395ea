# SPDX-License-Identifier: Apache-2.0
"""Runs the complete flash-attn grids on many processes, with a limit of time, and goes on where an earlier run ended.

    python tests/python/complete_grid.py --results grid.jsonl --processes 64 --textbook-device cuda --limit 500
    python tests/python/complete_grid.py --results gpu.jsonl --grid-device cuda --textbook-device cuda --share 0.05

The results are JSON lines, one a shard: module, test, shard, shards, version, passed, failed, seconds, and failures, a
list of (case, message) of at most 20. A shard whose line is there already is not run again, unless a case of it failed
and ``--again`` is given. The version is of the files that draw the inputs and bound the errors, and of the device that
Tessera's calls run on if it is no CPU: lines of another one stay in the file and do not count. Closes with a table per
test; exits with 1 if a case failed, with 2 if none failed but some have not been run.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
for library in (
    "OMP",
    "OPENBLAS",
    "MKL",
):  # read when NumPy and PyTorch are imported; processes are there for all cores
    os.environ[f"{library}_NUM_THREADS"] = "1"

import flash_reference  # noqa: E402
import tessera  # noqa: E402
import torch  # noqa: E402
from flash_grid import Case, Grid  # noqa: E402

BEGIN = time.perf_counter()
MODULES = ("dense", "varlen", "newer", "kvcache")
CASES = 48  # about, in a shard
MOST_MEMORY = 3 << 30  # bytes that a process keeps from shard to shard
WAIT = 5.0  # seconds before a case is tried again that found no memory on the GPU


class Shard(NamedTuple):
    module: str
    test: str
    shard: int
    shards: int
    version: str


class Test(NamedTuple):
    """A test over a grid; `variants` are its further arguments, by their names in a case's name.

    `version` is the same as long as inputs and bounds are.
    """

    grid: Grid
    call: Callable[..., None]
    variants: dict[str, dict[str, Any]]
    version: str = ""

    def cases(self, shard: Shard) -> Iterator[tuple[Case, str, dict[str, Any]]]:
        """(case, name, further arguments)."""
        for case in self.grid.complete(shard.shard, shard.shards):
            for name, arguments in self.variants.items():
                yield case, f"{case}-{name}" if name else str(case), arguments


def variants_of(test: Callable[..., None]) -> dict[str, dict[str, Any]]:
    """The arguments of the ``parametrize`` marks of one name each."""
    choices = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            name, values = mark.args
            choices.append([(str(label), {name: x}) for label, x in zip(mark.kwargs["ids"], values, strict=True)])
    return {
        "-".join(label for label, _ in chosen): {k: x for _, one in chosen for k, x in one.items()}
        for chosen in itertools.product(*choices)
    }


def version_of(paths: list[Path]) -> str:
    """Of the contents of files."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def find_tests() -> dict[tuple[str, str], Test]:
    tests = {}
    here = Path(__file__).resolve().parent
    common = [here / f"flash_{name}.py" for name in ("grid", "reference", "textbook")]
    for short in MODULES:
        # The second module of packed sequences takes its prices and pairs from the first.
        modules = ("dense", "varlen") if short == "varlen" else (short,)
        version = version_of(common + [here / f"test_flash_grid_{name}.py" for name in modules])
        module = importlib.import_module(f"test_flash_grid_{short}")
        for name, test in vars(module).items():
            if name.startswith("test_") and hasattr(test, "grid"):
                tests[short, name] = Test(test.grid, test, variants_of(test), version)
    return tests


def all_shards(tests: dict[tuple[str, str], Test]) -> list[Shard]:
    """In a random order that is always the same, so that a part of them is a sample of all."""
    shards = []
    for (module, name), test in tests.items():
        valid = len(list(test.grid.complete(0, -(-test.grid.blocks // 64)))) / min(64, test.grid.blocks)
        count = max(1, min(test.grid.blocks, round(test.grid.blocks * max(valid, 0.5) / CASES)))
        shards += [Shard(module, name, n, count, test.version) for n in range(count)]
    random.Random(0).shuffle(shards)
    return shards


def run_case(test: Test, case: Case, arguments: dict[str, Any], threads: int) -> str | None:
    """The message of a failure. A case that finds no memory on the GPU, which others share, tries again later."""
    for patience in range(20, -1, -1):
        try:
            # What the fixture of the same name does.
            torch.set_num_threads(1)
            tessera.set_threads(threads)
            test.call(case=case, **arguments)
            return None
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            if patience == 0:
                return f"OutOfMemoryError: {str(error)[:500]}"
            time.sleep(WAIT * random.random())
        except (Exception, AssertionError) as error:
            if "CUDA error" in str(error):
                print(error, file=sys.stderr, flush=True)
                os._exit(3)  # nothing runs on the GPU after that in this process
            return f"{type(error).__name__}: {str(error)[:500]}"
    return None


def run_shard(test: Test, shard: Shard, threads: int, current: Any) -> dict[str, Any]:
    begin, passed, failed, failures = time.perf_counter(), 0, 0, []
    for case, name, arguments in test.cases(shard):
        current.value = name.encode()
        message = run_case(test, case, arguments, threads)
        if message is None:
            passed += 1
            continue
        failed += 1
        if len(failures) < 20:
            failures.append((name, message))
    seconds = round(time.perf_counter() - begin, 3)
    return {**shard._asdict(), "passed": passed, "failed": failed, "seconds": seconds, "failures": failures}


def keep_memory() -> None:
    """Tells glibc to keep freed memory: for the kernel to hand out zeroed pages anew takes longer than many a case."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_max = -1, -4
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_mmap_max, 0)


def return_memory() -> None:
    """Gives the kernel what is free if this process has grown large: what is kept comes to lie in pieces."""
    statm = Path("/proc/self/statm")
    if statm.exists() and int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > MOST_MEMORY:
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)


def device_of(number: int, device: str) -> str:
    """Of a process; GPUs take turns."""
    return f"cuda:{number % torch.cuda.device_count()}" if device == "cuda" else device


def work(number: int, options: argparse.Namespace, tests: Any, current: Any, pipe: Connection) -> None:
    """A process: shards come in, results go out, until None comes in."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_memory()
    flash_reference.use_device(device_of(number, options.textbook_device))
    if options.grid_device != "cpu":
        torch.set_default_device(device_of(number, options.grid_device))
    while (shard := pipe.recv()) is not None:
        pipe.send(run_shard(tests[shard.module, shard.test], shard, options.threads, current))
        return_memory()


class Worker:
    def __init__(self, number: int, options: argparse.Namespace, tests: Any) -> None:
        self.number, self.options, self.tests = number, options, tests
        self.shard: Shard | None = None
        self.current = multiprocessing.RawArray(ctypes.c_char, 500)
        self.pipe, other = multiprocessing.Pipe()
        arguments = (number, options, tests, self.current, other)
        self.process = multiprocessing.get_context("fork").Process(target=work, args=arguments, daemon=True)
        self.process.start()
        other.close()

    def give(self, shard: Shard | None) -> None:
        self.shard = shard
        self.pipe.send(shard)

    @property
    def case(self) -> str:
        """The last case that began."""
        return self.current.value.decode()

    def result(self) -> tuple[Worker | None, dict[str, Any]]:
        """(the worker to go on with, the shard's line): another worker if this one died, which fails one case."""
        try:
            return self, self.pipe.recv()
        except EOFError:
            self.process.join()
            failure = (self.case, f"the process died with exit code {self.process.exitcode}")
            line = {**self.shard._asdict(), "passed": 0, "failed": 1, "seconds": 0.0, "failures": [failure]}
            return Worker(self.number, self.options, self.tests), line


def shard_of(line: dict[str, Any]) -> Shard:
    """A line without a version is of none."""
    return Shard(**{name: line.get(name) for name in Shard._fields})


def earlier_results(path: Path) -> list[dict[str, Any]]:
    """The lines of the file; a last line that a killed run left half written is none."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def run_all(
    shards: list[Shard], tests: Any, options: argparse.Namespace, record: Callable[[dict[str, Any]], None]
) -> None:
    """Until all are done, or the limit is over, after which no shard begins; those running get the grace to end."""
    todo = iter(shards)
    workers = {w.pipe: w for w in (Worker(n, options, tests) for n in range(min(options.processes, len(shards))))}

    def give(worker: Worker) -> bool:
        shard = next(todo, None) if time.perf_counter() - BEGIN < options.limit else None
        worker.give(shard)
        return shard is not None

    busy = {pipe: worker for pipe, worker in workers.items() if give(worker)}
    while busy:
        left = options.limit + options.grace - (time.perf_counter() - BEGIN)
        ready = wait(list(busy), timeout=max(left, 0.0))
        if not ready:
            print(f"{len(busy)} shards did not end within {options.grace:.0f} s of grace", flush=True)
            for worker in busy.values():
                print(f"RUNNING {worker.shard.module}.{worker.shard.test}[{worker.case}]", flush=True)
            break
        for pipe in ready:
            worker, line = busy.pop(pipe).result()
            record(line)
            if give(worker):
                busy[worker.pipe] = worker
    for worker in busy.values():
        worker.process.terminate()


def table(lines: list[dict[str, Any]], shards: list[Shard], tests: dict[tuple[str, str], Test]) -> str:
    rows = [f"{'test':<52}{'cases':>9}{'passed':>9}{'failed':>8}{'not run':>9}{'core s':>9}"]
    total = [0, 0, 0, 0, 0.0]
    for (module, name), test in tests.items():
        cases = sum(test.grid.valid(test.grid.at(n)) for n in range(test.grid.size)) * len(test.variants)
        mine = [line for line in lines if (line["module"], line["test"]) == (module, name)]
        passed, failed = (sum(line[key] for line in mine) for key in ("passed", "failed"))
        row = [cases, passed, failed, cases - passed - failed, sum(line["seconds"] for line in mine)]
        total = [a + b for a, b in zip(total, row, strict=True)]
        rows.append(f"{f'{module}.{name}':<52}{row[0]:>9}{row[1]:>9}{row[2]:>8}{row[3]:>9}{row[4]:>9.0f}")
    rows.append(f"{'all':<52}{total[0]:>9}{total[1]:>9}{total[2]:>8}{total[3]:>9}{total[4]:>9.0f}")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="JSON lines: read first, then appended to")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--threads", type=int, default=1, help="Tessera's threads in each process")
    parser.add_argument("--grid-device", default="cpu", help="where Tessera's calls run: cpu, cuda or cuda:1")
    parser.add_argument("--textbook-device", default="cpu", help="cpu, cuda (GPUs in turn by process) or cuda:1")
    parser.add_argument("--limit", type=float, default=1e6, help="seconds after which no shard begins")
    parser.add_argument("--grace", type=float, default=60, help="seconds for the shards then running")
    parser.add_argument("--again", action="store_true", help="run shards with failures again")
    parser.add_argument("--share", type=float, default=1.0, help="of the shards, at random")
    parser.add_argument("--modules", nargs="+", choices=MODULES, help="only those")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tests = find_tests()
    if options.modules:
        tests = {place: test for place, test in tests.items() if place[0] in options.modules}
    shards = all_shards(tests)
    if options.grid_device != "cpu":
        shards = [shard._replace(version=f"{shard.version} {options.grid_device}") for shard in shards]
    all_lines = earlier_results(options.results)
    if options.again:
        all_lines = [line for line in all_lines if not line["failed"]]
        options.results.write_text("".join(json.dumps(line) + "\n" for line in all_lines))
    current = set(shards)
    lines = [line for line in all_lines if shard_of(line) in current]
    known = {shard_of(line) for line in lines}
    wanted = shards[: max(1, round(options.share * len(shards)))]
    missing = [shard for shard in wanted if shard not in known]
    stale = len(all_lines) - len(lines)
    print(f"{len(shards)} shards, {len(known)} there already, {stale} stale, {len(missing)} to run", flush=True)
    with options.results.open("a") as file:

        def record(line: dict[str, Any]) -> None:
            lines.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()
            for case, message in line["failures"][:2]:
                print(f"FAILED {line['module']}.{line['test']}[{case}] {message}", flush=True)

        run_all(missing, tests, options, record)
    print(table(lines, shards, tests))
    if any(line["failed"] for line in lines):
        return 1
    done = {shard_of(line) for line in lines}
    return 0 if done.issuperset(shards) else 2


if __name__ == "__main__":
    sys.exit(main())
