"""The nodes of a `state` as lines of a table that fits so many columns: bars, sparklines, who is in trouble first.

Owns the columns, their widths and the order of the nodes. It must not know what stands around the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from app.nodes import Role, about_itself
from app.terminal.words import WIDEST_URL, count, printable

BLOCKS = "▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉"
WINDOW = 15
SORTS = ("trouble", "load", "name")
ROLES = [role.name for role in Role]

STATE_STYLE = {
    "ready": "green",
    "pending": "yellow",
    "asleep": "yellow",
    "draining": "cyan",
    "down": "bold red",
    "gone": "red",
}


@dataclass(frozen=True, slots=True)
class Columns:
    """How wide each is; 0: not there."""

    state: int
    role: int
    url: int
    bar: int
    number: int
    speed: int
    spark: int
    mean: int
    share: int
    reason: int


def _columns(width: int) -> Columns:
    reason = max(0, min(60, width - 118)) if width >= 126 else 0
    wide = width >= 100
    bar, spark, speed = (12, WINDOW, 7) if wide else (6, 8, 0)
    if width < 70:
        bar, spark = 4, 0
    fixed = 10 + 8 + (bar + 1) + 6 + (speed + 1 if speed else 0) + (spark + 1 if spark else 0) + 8 + 5 + 1
    return Columns(
        state=9,
        role=7,
        url=max(8, min(WIDEST_URL, width - fixed - (reason + 1 if reason else 0))),
        bar=bar,
        number=5,
        speed=speed,
        spark=spark,
        mean=7,
        share=4,
        reason=reason,
    )


def _row(cells: Sequence[tuple[str, int, str, str]]) -> Text:
    """Cells as (text, width, side, style); those without a width are not there."""
    line = Text()
    for text, width, side, style in cells:
        if not width:
            continue
        if len(line):
            line.append(" ")
        line.append(sized(text, width, side), style=style)
    line.rstrip()
    return line


def sized(text: str, width: int, side: str) -> str:
    """The text in so many cells; what is too long loses its beginning where `side` is tail, else its end."""
    if cell_len(text) > width:
        if side == "tail":
            while cell_len(text) > width - 1:
                text = text[1:]
            return set_cell_size(f"…{text}", width)
        return set_cell_size(text, width - 1) + "…"
    gap = " " * (width - cell_len(text))
    return gap + text if side == "right" else text + gap


def node_head(width: int) -> Text:
    c = _columns(width)
    cells = [
        ("STATE", c.state, "left", ""),
        ("ROLE", c.role, "left", ""),
        ("NODE", c.url, "left", ""),
        ("LOAD", c.bar, "left", ""),
        ("UNFIN", c.number, "right", ""),
        ("SPEED", c.speed, "right", ""),
        ("LATENCY", c.spark, "left", ""),
        ("MEAN_S", c.mean, "right", ""),
        ("1MIN", c.share, "right", ""),
        ("REASON", c.reason, "left", ""),
    ]
    line = _row(cells)
    line.stylize("dim")
    return line


def node_lines(state: dict[str, Any], width: int, sort: str) -> list[Text]:
    c = _columns(width)
    loads = loads_of(state["nodes"])
    most = max(loads.values(), default=0.0)
    order: dict[str, Callable[[dict[str, Any]], Any]] = {
        "trouble": lambda node: (TROUBLES.index(_trouble(node)), _place(node)),
        "load": lambda node: (_place(node), -loads[node["url"]]),
        "name": lambda node: str(node["url"]),
    }
    nodes = sorted(state["nodes"], key=order[sort])  # stable: alike ones stay as they are registered
    known = state["redis"]["up"]
    return [_node(node, c, loads[node["url"]] / most if most else 0.0, known, width) for node in nodes]


def _place(node: dict[str, Any]) -> int:
    """Nodes of a role stand together."""
    return ROLES.index(node["role"]) if node["role"] in ROLES else len(ROLES)


def loads_of(nodes: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Unfinished against speed, by url; a node without a speed counts as the average of those that have one."""
    given = [node["speed"] for node in nodes if node["speed"]]
    default = sum(given) / len(given) if given else 1.0
    return {node["url"]: node["unfinished"] / (node["speed"] or default) for node in nodes}


TROUBLES = ("down", "gone", "breaker", "other", "")
"""The worst first."""


def _trouble(node: dict[str, Any]) -> str:
    if node["state"] in TROUBLES:
        return str(node["state"])
    if node["breaker"] != "closed":
        return "breaker"
    return "" if node["state"] == "ready" else "other"


def _node(node: dict[str, Any], c: Columns, part: float, known: bool, width: int) -> Text:
    """`known`: whether Redis is there to say what all workers together sent there."""
    state, style = printable(node["state"]), STATE_STYLE.get(node["state"], "")
    if node["state"] == "ready" and node["breaker"] != "closed":
        state, style = "open" if node["breaker"] == "open" else "half-open", "bold red"
    window = [value for value in node["latency_s"] if value is not None]
    mean = sum(window) / len(window) if window else None
    reason = _reason(node)
    url = printable(node["url"]).removeprefix("http://")
    start = [(state, c.state, "left", style), (printable(node["role"]), c.role, "left", "")]
    if cell_len(reason) > c.reason and not node["unfinished"] and node["state"] != "ready":
        # Nothing runs there: the cells of its load and latency are the reason's.
        url = sized(url, c.url, "tail").rstrip()
        return _row([*start, (f"{url}: {reason}", width - c.state - c.role - 2, "left", "bold")])
    if reason and not c.reason:
        url = f"{url}: {reason}" if cell_len(url) + 8 < c.url else url
    share = node["share"] if known else None
    return _row(
        [
            *start,
            (url, c.url, "left" if reason and ": " in url else "tail", "bold" if _trouble(node) else ""),
            (bar(part, c.bar), c.bar, "left", "cyan"),
            (f"{node['unfinished']}", c.number, "right", ""),
            ("-" if node["speed"] is None else f"{node['speed']:g}", c.speed, "right", ""),
            (sparkline(window, c.spark), c.spark, "left", "magenta"),
            ("-" if mean is None else f"{mean:.3f}", c.mean, "right", ""),
            (f"{share:.0%}" if share is not None else "-", c.share, "right", ""),
            (reason, c.reason, "left", "red"),
        ]
    )


def _reason(node: dict[str, Any]) -> str:
    """What matters most first: the breaker of a node that is down is an addition."""
    words = [printable(about_itself(node["reason"], node["url"]))]
    if node["breaker"] != "closed":
        failures = count(node["failures"], "failure")
        words.append(f"breaker {printable(node['breaker']).replace('_', '-')}, {failures} in a row")
    return "; ".join(filter(None, words))


def bar(part: float, width: int) -> str:
    """A bar of eighths of a cell; anything above nothing is seen."""
    eighths = round(max(0.0, min(1.0, part)) * width * 8)
    if part > 0:
        eighths = max(eighths, 1)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (EIGHTHS[rest] if rest else "")


def sparkline(values: Sequence[float], width: int) -> str:
    """The latest values, oldest first, each against the largest of them."""
    latest = list(values)[-width:] if width else []
    most = max(latest, default=0.0)
    if most <= 0:
        return BLOCKS[0] * len(latest)
    return "".join(BLOCKS[max(0, min(7, int(value / most * 8 - 1e-9)))] for value in latest)
