# SPDX-License-Identifier: Apache-2.0
"""Text of the report's pages: numbers with units, tables, paragraphs."""

import math
import textwrap

COLUMNS = 120  # of a line of text; those of tables are as long as they must be
PEERS = {"torch_cpu": "PyTorch", "torch_flash": "FlashAttention-2", "torch_cudnn": "cuDNN"}
PEERS |= {"flash_attn_4": "FlashAttention-4", "fla_chunk": "Flash Linear Attention"}
PEERS |= {"openvino_cpu": "OpenVINO", "onnxruntime_cpu": "ONNX Runtime"}
PEERS |= {"fla_decode": "Flash Linear Attention", "cula_decode": "cuLA"}


def tokens(problem):
    """The key=value words and flags of a problem's text form."""
    words = problem.split()[1:]
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def time_of(us):
    return f"{us / 1e6:.2f} s" if us >= 1e6 else f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.0f} µs"


def size_of(count):
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def wrapped(text, indent=""):
    """`indent`: of the lines after the first."""
    return textwrap.fill(text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def item(text):
    return wrapped(f"- {text}", "  ")


def mean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
