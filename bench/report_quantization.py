# SPDX-License-Identifier: Apache-2.0
"""Tables of quantization_errors.py."""

from report_text import table, wrapped


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
