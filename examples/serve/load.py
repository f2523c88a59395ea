# SPDX-License-Identifier: Apache-2.0
"""Load test of `transformers serve`: with its own attention, then with Tessera's, on the same requests.

Starts each server in turn, sends the requests of so many streams at once (each stream sends its next request when the
last is answered), reads the streamed tokens, and prints tokens a second and percentiles of latencies. The texts are
greedy, so they are compared too.

python examples/serve/load.py --model my-gpt-llama --text some.txt --streams 16 --json load.json --plot load.png
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PERCENTILES = (50, 90, 99)


@dataclass
class Answer:
    """One request: its text, and the times in seconds at which pieces of it came, since it was sent."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""


@contextmanager
def server(attention: str, given: argparse.Namespace) -> Iterator[int]:
    """A server's port, once it answers; the process ends with the block."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = {"tessera": [str(HERE / "serve.py")], "sdpa": ["-c", _DEFAULT]}[attention]
    words = [given.model, "--continuous-batching", "--port", str(port), "--device", given.device]
    words += ["--dtype", given.dtype, "--cb-num-blocks", str(given.blocks), "--log-level", "error"]
    if attention == "sdpa":
        words += ["--attn-implementation", "sdpa"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, *command, *words], stdout=log, stderr=log, env=environment)
        try:
            _wait_for(port, process, log)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


_DEFAULT = (
    "import sys; from transformers.cli.transformers import app; "
    "sys.argv = ['transformers serve', 'serve', *sys.argv[1:]]; app()"
)


def _wait_for(port: int, process: subprocess.Popen[bytes], log: object, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            connection = http.client.HTTPConnection("localhost", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.2)
    log.seek(0)  # type: ignore[attr-defined]
    raise RuntimeError(f"server: got no answer on port {port}:\n{log.read().decode()[-2000:]}")  # type: ignore[attr-defined]


def ask(port: int, model: str, prompt: str, tokens: int) -> Answer:
    """One streamed completion."""
    answer = Answer()
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    begin = time.monotonic()
    connection = http.client.HTTPConnection("localhost", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        answer.error = response.read().decode()
        return answer
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        piece = json.loads(line[6:])
        if "error" in piece:
            answer.error = str(piece["error"])
            break
        if piece.get("usage"):
            answer.tokens = piece["usage"]["completion_tokens"]
        elif text := piece["choices"][0].get("text"):
            answer.text += text
            answer.times.append(time.monotonic() - begin)
    return answer


def measure(attention: str, given: argparse.Namespace, prompts: list[str]) -> tuple[dict[str, object], list[Answer]]:
    """A row of the table, and the answers in the order of the prompts."""
    answers: list[Answer | None] = [None] * len(prompts)
    waiting = iter(range(len(prompts)))
    lock = threading.Lock()

    def stream(port: int) -> None:
        while True:
            with lock:
                number = next(waiting, None)
            if number is None:
                return
            answers[number] = ask(port, given.model, prompts[number], given.tokens)

    with server(attention, given) as port:
        ask(port, given.model, prompts[0], 2)  # makes the cache
        begin = time.monotonic()
        threads = [threading.Thread(target=stream, args=(port,)) for _ in range(given.streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - begin
    done = [each or Answer(error="no answer") for each in answers]
    errors = [each.error for each in done if each.error]
    first = [each.times[0] for each in done if each.times]
    between = [b - a for each in done for a, b in zip(each.times, each.times[1:], strict=False)]
    row = {
        "attention": attention,
        "streams": given.streams,
        "requests": len(prompts),
        "errors": len(errors),
        "tokens_per_second": sum(each.tokens for each in done) / seconds,
        "first_token_ms": _percentiles(first),
        "between_tokens_ms": _percentiles(between),
        "whole_answer_ms": _percentiles([each.times[-1] for each in done if each.times]),
    }
    if errors:
        print(f"{attention}: {len(errors)} errors, the first: {errors[0]}", file=sys.stderr)
    return row, done


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {f"p{each}": 1e3 * (seconds[0] if seconds else 0.0) for each in PERCENTILES}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{each}": 1e3 * cuts[each - 1] for each in PERCENTILES}


_LATENCIES = {"first_token_ms": "first token", "between_tokens_ms": "between tokens", "whole_answer_ms": "whole answer"}


def table(rows: list[dict[str, object]]) -> str:
    """Markdown; latencies in ms as p50 / p90 / p99."""
    lines = [
        "| attention | streams | errors | tokens/s | " + " | ".join(f"{x}, ms" for x in _LATENCIES.values()) + " |"
    ]
    lines.append("|---" * (4 + len(_LATENCIES)) + "|")
    for row in rows:
        cells = [" / ".join(f"{each:.0f}" for each in row[name].values()) for name in _LATENCIES]  # type: ignore[attr-defined]
        numbers = f"{row['streams']} | {row['errors']} | {row['tokens_per_second']:.0f}"
        lines.append(f"| {row['attention']} | {numbers} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: list[dict[str, object]], path: str) -> None:
    """Tokens a second, and the percentiles of each latency, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3), layout="constrained")
    axes = figure.subplots(1, 1 + len(_LATENCIES))
    colours = ("#0072b2", "#d55e00", "#009e73")
    names = [str(row["attention"]) for row in rows]
    axes[0].bar(names, [row["tokens_per_second"] for row in rows], color=colours[: len(rows)])
    axes[0].set_title("tokens a second")
    for axis, (key, title) in zip(axes[1:], _LATENCIES.items(), strict=True):
        for i, row in enumerate(rows):
            values = list(row[key].values())  # type: ignore[attr-defined]
            places = [each + 0.4 * i for each in range(len(values))]
            axis.bar(places, values, 0.4, color=colours[i], label=names[i])
        axis.set_xticks([each + 0.2 for each in range(len(PERCENTILES))], [f"p{each}" for each in PERCENTILES])
        axis.set_title(f"{title}, ms")
    axes[-1].legend()
    figure.savefig(path, dpi=110)


def prompts_of(path: str, count: int, length: int) -> list[str]:
    """Pieces of a text from places all over it, of one half to one and a half of the length."""
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    pieces = []
    for number in range(count):
        size = length // 2 + number * 7919 % (length + 1)
        start = number * 104729 % max(1, len(text) - size)
        pieces.append(text[start : start + size])
    return pieces


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder that convert.py made, or any checkpoint")
    parser.add_argument("--text", default=__file__, help="file that prompts are cut from (default: this program)")
    parser.add_argument("--attention", nargs="+", default=["sdpa", "tessera"], choices=["sdpa", "tessera"])
    parser.add_argument("--streams", type=int, default=16, help="requests in flight")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=400, help="characters of a prompt, on average")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--blocks", type=int, default=256, help="pages of 256 tokens in the cache")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--plot", help="file for a picture; wants matplotlib")
    given = parser.parse_args()
    given.model = str(Path(given.model).resolve())
    prompts = prompts_of(given.text, given.requests, given.prompt)
    rows, texts = [], []
    for attention in given.attention:
        row, answers = measure(attention, given, prompts)
        rows.append(row)
        texts.append([each.text for each in answers])
    same = sum(len(set(each)) == 1 for each in zip(*texts, strict=True))
    print(table(rows))
    print(f"\n{same} of {len(prompts)} texts are the same under every attention")
    if given.json:
        Path(given.json).write_text(json.dumps({"rows": rows, "same_texts": same}, indent=1) + "\n")
    if given.plot:
        plot(rows, given.plot)
    return int(any(row["errors"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
