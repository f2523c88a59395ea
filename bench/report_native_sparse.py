# SPDX-License-Identifier: Apache-2.0
"""Tables of native_sparse.py."""

from report_text import table, time_of

NAMES = {
    "all": "all compressed keys",
    "top16": "`compressed_top=16`",
    "top16 of 32": "and `compressed_block=32`",
    "recent": "no window",
    "fla": "flash-linear-attention",
}


def _peak(row):
    return f"{row['peak_bytes'] / 2**30:.1f} GiB" if "peak_bytes" in row else ""


def native_sparse_rows(rows):
    """Each call's time, how many times faster than dense attention it is, and the memory of its longest pass."""
    calls = [call for call in NAMES if any(row["call"] == call for row in rows)]
    head = ["tokens", "pass", "dense", *(cell for call in calls for cell in (NAMES[call], "dense over it", "memory"))]
    if not any("peak_bytes" in row for row in rows):
        head = [cell for cell in head if cell != "memory"]
    body = []
    for tokens, which in dict.fromkeys((row["tokens"], row["pass"]) for row in rows):
        own = {row["call"]: row for row in rows if (row["tokens"], row["pass"]) == (tokens, which)}
        dense = own.get("dense")
        told = "" if dense is None else time_of(dense["us"])
        if dense is not None and "from_tokens" in dense:
            told += f", from {dense['from_tokens']}"
        cells = [str(tokens), "forward and backward" if which == "both" else which, told]
        for call in calls:
            row = own.get(call)
            made = ["", "", ""] if row is None else [time_of(row["us"]), "", _peak(row)]
            if row is not None and dense is not None:
                made[1] = f"{dense['us'] / row['us']:.1f}"
            cells += made if "memory" in head else made[:2]
        body.append(cells)
    return table(head, body)
