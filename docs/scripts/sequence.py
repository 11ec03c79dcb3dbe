"""Sequence diagrams of the pages, drawn when the site is built.

GitHub draws Mermaid's text by itself. A site would need Mermaid's script, which comes from elsewhere; the part of its
language that the pages use is small: participants, messages, notes, `par`, `and`, `opt`, `end` and `autonumber`.
"""

from __future__ import annotations

import re
from html import escape

COLUMN, ROW, MARGIN, HEAD = 150, 36, 80, 34
LETTER = 6.7
"""Width of a letter at 13 px, on average; a text that would leave the picture is set from its right end."""

STYLE = "stroke:currentColor;fill:none"
TEXT = "fill:currentColor;stroke:var(--md-default-bg-color);stroke-width:4px;paint-order:stroke"
MESSAGE = re.compile(r"(\w+)(-->>|->>|-\))(\w+): (.+)")


class UnknownLine(ValueError):
    """A line of a diagram that is not drawn here."""


def drawn(text: str) -> str:
    """The diagram as SVG. Raises UnknownLine."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    places: dict[str, float] = {}
    parts: list[str] = []
    frames: list[float] = []
    labels: list[str] = []
    y, number = HEAD + ROW, 0
    for line in lines:
        kind, _, rest = line.partition(" ")
        if message := MESSAGE.fullmatch(line):
            number += 1
            sender, arrow, receiver, words = message.groups()
            parts += _message(places[sender], places[receiver], y, arrow, f"{number}. {words}", len(places))
            y += ROW
        elif kind == "participant":
            name, _, label = rest.partition(" as ")
            places[name] = MARGIN + COLUMN * len(places)
            labels.append(label)
        elif kind in ("par", "opt"):
            frames.append(y - 22)
            parts.append(_text(14, y - 6, f"{kind}: {rest}", weight=700))
            y += 24
        elif line == "and":
            parts.append(_line(8, _width(places) - 8, y - 14, dashes="2 4"))
            y += 14
        elif line == "end":
            top = frames.pop()
            parts.append(
                f'<rect x="8" y="{top}" width="{_width(places) - 16}" height="{y - top - 12}" rx="4" '
                f'style="{STYLE};opacity:.4"/>'
            )
            y += 16
        elif note := re.fullmatch(r"Note over (\w+): (.+)", line):
            parts.append(_text(places[note[1]], y, note[2], anchor="middle", slant=True))
            y += ROW
        elif line not in ("sequenceDiagram", "autonumber"):
            raise UnknownLine(line)
    posts = [f'<line x1="{x}" y1="{HEAD}" x2="{x}" y2="{y - 10}" style="{STYLE};opacity:.3"/>' for x in places.values()]
    heads = [_text(x, 22, label, anchor="middle", weight=700) for x, label in zip(places.values(), labels, strict=True)]
    return (
        f'<svg viewBox="0 0 {_width(places)} {y}" style="width:100%;font-size:13px" role="img" '
        f'aria-label="sequence diagram">{"".join(posts + heads + parts)}</svg>'
    )


def _width(places: dict[str, float]) -> int:
    return MARGIN * 2 + COLUMN * (len(places) - 1)


def _message(start: float, end: float, y: float, arrow: str, words: str, columns: int) -> list[str]:
    right = MARGIN * 2 + COLUMN * (columns - 1)
    left, tip = min(start, end) + 6, 6 if end > start else -6
    head = f"M{end - tip} {y - 4} L{end} {y} L{end - tip} {y + 4}"
    from_right = left + LETTER * len(words) > right
    text = _text(right - 8, y - 8, words, anchor="end") if from_right else _text(left, y - 8, words)
    return [
        _line(start, end, y, dashes="5 4" if arrow == "-->>" else ""),
        f'<path d="{head}" style="{STYLE}"/>',
        text,
    ]


def _line(x1: float, x2: float, y: float, *, dashes: str = "") -> str:
    return f'<line x1="{x1}" y1="{y}" x2="{x2}" y2="{y}" style="{STYLE}" stroke-dasharray="{dashes or "none"}"/>'


def _text(x: float, y: float, words: str, *, anchor: str = "start", weight: int = 400, slant: bool = False) -> str:
    style = f"{TEXT};font-weight:{weight};font-style:{'italic' if slant else 'normal'}"
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" style="{style}">{escape(words)}</text>'
