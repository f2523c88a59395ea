# SPDX-License-Identifier: Apache-2.0
"""Tables of context_parallel.py."""

from report_text import table, time_of


def context_parallel_rows(rows):
    """Methods beside the ideal, a table for each length and mask."""
    kinds = list(dict.fromkeys((r["seqlen"], r["heads"], r["dim"], r["mask"], r["ranks"]) for r in rows))
    parts = []
    for kind in kinds:
        seqlen, heads, dim, mask, ranks = kind
        mine = [r for r in rows if (r["seqlen"], r["heads"], r["dim"], r["mask"], r["ranks"]) == kind]
        parts.append(f"{seqlen} tokens, {heads} heads of {dim}, {mask}, {ranks} ranks; time and share of the ideal:\n")
        columns = list(mine[0]["milliseconds"])
        cells = []
        for row in mine:
            shares = row.get("of_ideal", {})
            of_each = [
                (time_of(1e3 * row["milliseconds"][c]), f"{shares[c]:.3f}" if c in shares else "") for c in columns
            ]
            cells.append([row["method"], *(cell for each in of_each for cell in each)])
        parts.append(table(["method", *(cell for c in columns for cell in (c, "of ideal"))], cells))
    return "\n".join(parts)
