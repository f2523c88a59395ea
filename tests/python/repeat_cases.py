# SPDX-License-Identifier: Apache-2.0
"""Makes calls of the flash-attn grids again and again, by many processes at once, and looks for what changes.

    python tests/python/repeat_cases.py --seconds 30
    python tests/python/repeat_cases.py --seconds 30 --processes 13 --load 2 --case d=224 softcap=50.0 alibi=True

Cases are drawn at random from those whose names have all the texts of ``--case``. Each is called ``--calls`` times,
forward and backward, after NaN has been written to the memory that its outputs and its workspace then get. Told of are
NaN, and bits of an output that are not those of the first call: of out and, where the call is to be deterministic, of
gradients. A call that does not end is named. Processes take turns at the GPU, or run beside each other with CUDA's
Multi-Process Service. Exits with 1 if something was told of.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from complete_grid import MODULES, Test, device_of, find_tests
from flash_grid import Case
from tessera import _core

GRACE = 30.0  # seconds for the calls running at the end
BEGIN = 300.0  # seconds for all processes to have imported what they need


class Call(NamedTuple):
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Called(Exception):
    """Instead of a test's call of a flash-attn function."""

    def __init__(self, call: Call) -> None:
        self.call = call


def catch_calls(test: Test) -> None:
    """From now on the test's module raises Called where it would call a function of flash-attn."""
    module = sys.modules[test.call.__module__]
    for name, function in list(vars(module).items()):
        if name.startswith("flash_attn") and name.endswith("_func") and not hasattr(function, "is_caught"):

            def caught(*arguments: Any, _function: Callable[..., Any] = function, **options: Any) -> None:
                raise Called(Call(_function, arguments, options))

            caught.is_caught = True  # type: ignore[attr-defined]
            setattr(module, name, caught)


def workspaces() -> set[int]:
    """Bytes of the workspaces of all plans made from now on."""
    sizes: set[int] = set()
    make = _core.Plan

    def plan(*arguments: Any, **options: Any) -> _core.Plan:
        made = make(*arguments, **options)
        sizes.add(made.workspace_bytes)
        return made

    _core.Plan = plan  # type: ignore[misc, assignment]
    return sizes


def poison(sizes: list[int]) -> None:
    """The allocator's next two blocks of each size hold NaN."""
    blocks = [torch.full((size // 2 + 1,), float("nan"), dtype=torch.float16) for size in sizes for _ in range(2)]
    del blocks


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return (a.view(kind) == b.view(kind)).all()


def repeat(call: Call, calls: int, sizes: set[int], end: float) -> tuple[int, dict[str, int]]:
    """(calls made, in how many of them an output had NaN or other bits than in the first). None begins behind `end`."""
    arguments = [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in call.arguments
    ]
    leaves = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
    first: list[torch.Tensor] = []
    grad = torch.empty(0)
    wrong = []
    while len(wrong) < calls and (not wrong or time.perf_counter() < end):
        poison([*sizes, *(x.numel() * x.element_size() for x in leaves)])
        torch.manual_seed(1)  # of dropout
        result = call.function(*arguments, **call.options)
        out = result[0] if isinstance(result, tuple) else result
        if not first:
            grad = torch.randn_like(out)
        poison([*sizes, *(x.numel() * x.element_size() for x in leaves)])
        outputs = [out.detach(), *(torch.autograd.grad(out, leaves, grad) if leaves else ())]
        first = first or [x.clone() for x in outputs]
        nan = [x.isnan().any() for x in outputs]
        other = [~same_bits(x, y) for x, y in zip(outputs, first, strict=True)]
        wrong.append(torch.stack([*nan, *other]))
    counts = torch.stack(wrong).sum(0).tolist()
    names = ["out", *(f"gradient {i}" for i in range(len(leaves)))]
    told = {f"NaN in {name}": n for name, n in zip(names, counts, strict=False)}
    exact = names if call.options.get("deterministic") else names[:1]
    told |= {f"other bits of {name}": n for name, n in zip(exact, counts[len(names) :], strict=False)}
    return len(wrong), {what: n for what, n in told.items() if n > 0}


def draw(tests: list[Test], texts: list[str], numbers: random.Random) -> tuple[Test, Case, str, dict[str, Any]]:
    for _ in range(100000):
        test = numbers.choice(tests)
        case = test.grid.at(numbers.randrange(test.grid.size))
        name, arguments = numbers.choice(list(test.variants.items()))
        whole = f"{case}-{name}" if name else str(case)
        if test.grid.valid(case) and all(text in whole.split("-") for text in texts):
            return test, case, whole, arguments
    raise SystemExit(f"repeat_cases.py: --case: got {' '.join(texts)}; want what the name of a case has between dashes")


def work(number: int, options: argparse.Namespace, begin: Any, current: Any, results: Any) -> None:
    device = device_of(number, options.device)
    torch.set_default_device(device)
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    torch.zeros(1)  # makes the GPU's context
    begin.wait(BEGIN)
    end = time.perf_counter() + options.seconds
    if number >= options.processes:
        matrix = torch.randn(2048, 2048, dtype=torch.float16)
        while time.perf_counter() < end:
            for _ in range(20):
                (matrix @ matrix).softmax(-1)
            torch.accelerator.synchronize()
        return
    sizes = workspaces()
    tests = [test for (module, _), test in find_tests().items() if module in options.modules]
    for test in tests:
        catch_calls(test)
    numbers = random.Random(options.seed * 1000 + number)
    sizes_of: dict[str, set[int]] = {}  # by the case's name
    while time.perf_counter() < end:
        test, case, name, arguments = draw(tests, options.case, numbers)
        current.value = f"{test.call.__name__}[{name}]".encode()
        try:
            test.call(case=case, **arguments)
        except Called as caught:
            if name not in sizes_of:
                sizes.clear()
                repeat(caught.call, 1, sizes, end)  # makes the plans, unless another case has the same
                sizes_of[name] = set(sizes) or set().union(*sizes_of.values())
            calls, told = repeat(caught.call, options.calls, sizes_of[name], end)
            results.put((current.value.decode(), calls, told))
    current.value = b""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30, help="after which no case begins")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--load", type=int, default=0, help="processes beside them that multiply matrices")
    parser.add_argument("--calls", type=int, default=40, help="of each case")
    parser.add_argument("--case", nargs="+", default=[], help="parts of a case's name: d=224 causal=True")
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=["dense", "varlen"])
    parser.add_argument("--device", default="cuda", help="cuda (GPUs in turn by process), cuda:1, or cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the cases drawn")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    begin = context.Barrier(options.processes + options.load + 1)
    workers = []
    for number in range(options.processes + options.load):
        current = context.RawArray("c", 500)
        process = context.Process(target=work, args=(number, options, begin, current, results), daemon=True)
        process.start()
        workers.append((process, current))
    with contextlib.suppress(threading.BrokenBarrierError):  # of processes that died
        begin.wait(BEGIN)
    cases = calls = bad = 0
    end = time.perf_counter() + options.seconds + GRACE
    while any(process.is_alive() for process, _ in workers) or not results.empty():
        if results.empty():
            if time.perf_counter() > end:
                break
            time.sleep(0.1)
            continue
        name, count, told = results.get()
        cases, calls, bad = cases + 1, calls + count, bad + bool(told)
        if told:
            print(f"WRONG {name}: " + ", ".join(f"{what} in {n} of {count} calls" for what, n in told.items()))
    for process, current in workers:
        if process.is_alive():
            print(f"RUNNING {current.value.decode()}")
            bad += 1
            process.kill()
        elif process.exitcode != 0:
            print(f"DIED with exit code {process.exitcode} {current.value.decode()}")
            bad += 1
    print(f"{cases} cases, {calls} calls, {bad} wrong, dead or without an end")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
