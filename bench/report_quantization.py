# SPDX-License-Identifier: Apache-2.0
"""Tables of quantization_errors.py, and of suites of operands of 8 bits."""

from report_text import table, time_of, wrapped

QUANTISED = ("dtype=", "descale=", "smooth")  # words of a problem that its twin in bf16 has not, or others


def eight_bit_rows(rows):
    """Problems of 8 bits beside their twins in bf16, of the same run."""

    def twin_of(row):
        return " ".join(word for word in row["problem"].split() if not word.startswith(QUANTISED))

    in_bf16 = {twin_of(row): row for row in rows if "dtype=bf16" in row["problem"].split()}
    body = []
    for row in rows:
        twin = in_bf16.get(twin_of(row))
        if twin is None or twin is row:
            continue
        cells = [f"`{row['problem']}`", time_of(row["us"]), f"{row['tflops']:.0f}", f"{twin['tflops']:.0f}"]
        body.append([*cells, f"{twin['us'] / row['us']:.2f}"])
    return table(["problem", "time", "TFLOP/s", "bf16", "bf16 over it"], body)


def quantization_rows(rows):
    """Distances from double by inputs and keys, then the needles."""
    errors = [row for row in rows if "out_error" in row]
    columns = list(dict.fromkeys((row["inputs"], row["keys"]) for row in errors))
    found = {(row["by"], row["inputs"], row["keys"]): row for row in errors}
    ways = list(dict.fromkeys(row["by"] for row in rows))
    heads = [f"{kind}, {keys} keys" for kind, keys in columns]

    def distances(way, field, shown):
        return [shown(found[(way, *column)][field]) if (way, *column) in found else "" for column in columns]

    outs = [[way, *distances(way, "out_error", lambda x: f"{100 * x:.2f}")] for way in ways]
    lses = [[way, *distances(way, "lse_error", lambda x: f"{x:.1e}")] for way in ways]
    depths = list(dict.fromkeys(row["inputs"] for row in rows if "share" in row))
    shares = {(row["by"], row["inputs"]): row["share"] for row in rows if "share" in row}
    keys = max((row["keys"] for row in rows if "share" in row), default=0)
    picked = [[way, *(f"{shares[way, depth]:.3f}" for depth in depths)] for way in ways]
    parts = (
        "Relative L2 distance of out from attention in double of the inputs before they are quantised, in percent:",
        table(["by", *heads], outs),
        "Largest distance of the LSE:",
        table(["by", *heads], lses),
        f"The least weight that a query gives its needle among {keys} keys, over what double gives it:",
        table(["by", *depths], picked),
    )
    return "\n".join(wrapped(part) + "\n" if i % 2 == 0 else part for i, part in enumerate(parts))
