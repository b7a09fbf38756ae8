"""Plain text tables for the command line, as wide as their content; readable in a terminal, a log and a pipe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_PLACE = re.compile(r"\[\S+\.(?:cc|cpp|cu|h|hpp):\d+\]\s*")  # [/__w/pytorch/.../tcp/pair.cc:547]


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns, numbers to the right; None is shown as a dash."""
    cells = [[shown(cell) for cell in row] for row in rows]
    right = [all(isinstance(row[i], (int, float, type(None))) for row in rows) for i in range(len(headers))]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, [headers, *cells]))


def shown(cell: Any) -> str:
    if cell is None:
        return "-"
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def brief(cause: str, most: int) -> str:
    """For a line or a cell: without where in its C++ sources torch has found the error, and not longer than `most`."""
    text = " ".join(_PLACE.sub("", cause).split())
    return text if len(text) <= most else text[: most - 3].rstrip() + "..."


def human_bytes(count: int | None) -> str | None:
    """Such as `1.06 GB`."""
    if count is None:
        return None
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"
