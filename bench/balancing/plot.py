"""A table of ratios as a picture: a row a scenario, a dot a contender. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

WIDTH, LEFT, RIGHT, ROW, TOP = 860, 300, 30, 26, 84
LOW, HIGH = 0.8, 2.2
COLOURS = ("#0969da", "#1a7f37", "#bf8700", "#cf222e")

Means = Mapping[str, Mapping[str, float]]  # scenario -> contender -> ratio


def plot(title: str, ratios: Means) -> str:
    """What lies beyond HIGH stands at its edge."""
    names = list(next(iter(ratios.values())))
    bottom = TOP + ROW * len(ratios)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + 30}" font-family="sans-serif" '
        f'font-size="12" viewBox="0 0 {WIDTH} {bottom + 30}">',
        f'<rect width="{WIDTH}" height="{bottom + 30}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="16" font-weight="bold" fill="#24292f">{escape(title)}</text>',
    ]
    at = 12
    for name, colour in zip(names, COLOURS, strict=False):
        lines.append(f'<circle cx="{at + 5}" cy="46" r="4.5" fill="{colour}"/>')
        lines.append(f'<text x="{at + 14}" y="50" fill="{colour}">{escape(name)}</text>')
        at += 30 + 7 * len(name)
    for tenth in range(round(LOW * 10), round(HIGH * 10) + 1, 2):
        tick_x, bold = x(tenth / 10), ' stroke-width="2"' if tenth == 10 else ""
        lines.append(
            f'<line x1="{tick_x:.1f}" y1="{TOP - 10}" x2="{tick_x:.1f}" y2="{bottom}" stroke="#d0d7de"{bold}/>'
        )
        text = f'text-anchor="middle" fill="#57606a">{tenth / 10:g}</text>'
        lines.append(f'<text x="{tick_x:.1f}" y="{bottom + 16}" {text}')
    for nth, (scenario, of) in enumerate(ratios.items()):
        y = TOP + ROW * nth + ROW // 2
        lines.append(f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end" fill="#24292f">{escape(scenario)}</text>')
        for name, colour in reversed([*zip(names, COLOURS, strict=False)]):
            lines.append(f'<circle cx="{x(of[name]):.1f}" cy="{y}" r="4.5" fill="{colour}"/>')
    return "\n".join([*lines, "</svg>", ""])


def x(ratio: float) -> float:
    return LEFT + (min(max(ratio, LOW), HIGH) - LOW) / (HIGH - LOW) * (WIDTH - LEFT - RIGHT)
