"""Text for a terminal: one line, no control characters, in columns.

Pure; it must not know what it shows. Names of nodes and models, reasons and messages come from elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

WIDEST_URL = 48
"""In a table: of a longer one the end is shown, where nodes of one host differ."""
COLOURS = ("black", "red", "green", "yellow")
"""In the order of their numbers, ECMA-48 SGR 30 and on."""


def printable(value: object) -> str:
    """One line without control characters: what a terminal would obey is a `?`."""
    return "".join(c if c.isprintable() else "?" for c in str(value))


def columns(rows: Sequence[Sequence[object]], *, right: Collection[int] = ()) -> list[str]:
    """The rows as lines, each column as wide as its widest cell; those of `right` end at the right."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def shortened(url: str) -> str:
    return url if len(url) <= WIDEST_URL else "…" + url[1 - WIDEST_URL :]


def count(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def span(seconds: float) -> str:
    """A length of time with two digits or so: `0.3 s`, `12 s`, `5 min`, `3 h`, `2 d`."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def paint(text: str, colour: str) -> str:
    """The text in a colour, for a terminal."""
    return f"\x1b[{30 + COLOURS.index(colour)}m{text}\x1b[0m"
