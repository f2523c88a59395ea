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
    """Each call's time, how many times faster than the peer it is, and the memory of its longest pass. The peer is
    dense attention, or, where that was not measured, flash-linear-attention."""
    peer = "dense" if any(row["call"] == "dense" for row in rows) else "fla"
    calls = [call for call in NAMES if call != peer and any(row["call"] == call for row in rows)]
    told_peer = NAMES.get(peer, peer)
    head = ["tokens", "pass", told_peer]
    head += [cell for call in calls for cell in (NAMES[call], f"{told_peer} over it", "memory")]
    if not any("peak_bytes" in row for row in rows):
        head = [cell for cell in head if cell != "memory"]
    body = []
    for tokens, which in dict.fromkeys((row["tokens"], row["pass"]) for row in rows):
        own = {row["call"]: row for row in rows if (row["tokens"], row["pass"]) == (tokens, which)}
        other = own.get(peer)
        told = "" if other is None else time_of(other["us"])
        if other is not None and "from_tokens" in other:
            told += f", from {other['from_tokens']}"
        cells = [str(tokens), "forward and backward" if which == "both" else which, told]
        for call in calls:
            row = own.get(call)
            made = ["", "", ""] if row is None else [time_of(row["us"]), "", _peak(row)]
            if row is not None and other is not None:
                made[1] = f"{other['us'] / row['us']:.1f}"
            cells += made if "memory" in head else made[:2]
        body.append(cells)
    return table(head, body)
