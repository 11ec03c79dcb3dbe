"""A `state` and the latest decisions as a picture of so many columns and lines.

Owns what is shown, in which order, and what is left out where there is no room, which it says. It must not know
where the documents come from (docs/decisions/0022 describes them), nor the terminal beyond its size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from app.terminal.feed import Seen
from app.terminal.node_table import SORTS, node_head, node_lines, sized
from app.terminal.words import count, printable, span

DECISIONS = "latest decisions: a sample, at most 5 a second of each worker"
OLD_S = 3.0
"""Where a state comes each second: an older one is no longer the present."""
AWAY = (
    "counts are of this worker only; the other workers are not shown",
    "leases, the last minute and decisions are not known while Redis is away",
)
LINK_MARKS = {
    "connected": ("●", "green"),
    "connecting": ("◐", "yellow"),
    "failed": ("✗", "bold red"),
    "undoing": ("○", "yellow"),
    "stale": ("-", "dim"),
}
DEAD = ("down", "gone")
"""A link of such a node is none, whatever was noted of it."""


@dataclass(slots=True)
class Section:
    """Lines under a heading. `least`: how many it gets before another gets more than that; `of`: what a line is."""

    heading: str
    lines: list[Text]
    of: str
    least: int = 3
    head: Text | None = None
    shown: int = field(default=0)

    @property
    def extra(self) -> int:
        """Lines beside its own: the gap before it, its heading, a table's head."""
        return 2 + (self.head is not None)

    def drawn(self) -> list[Text]:
        """With the last line given to what is left out, where something is."""
        left_out = len(self.lines) - self.shown
        lines = self.lines[: self.shown] if not left_out else self.lines[: max(self.shown - 1, 0)]
        drawn = [Text(), Text(self.heading, style="bold"), *([self.head] if self.head else []), *lines]
        if left_out:
            drawn.append(Text(f"  {count(len(self.lines) - len(lines), f'more {self.of}')}", style="dim"))
        return drawn


def draw(
    seen: Seen,
    *,
    width: int,
    height: int | None = None,
    sort: str = SORTS[0],
    keys: str = "",
    old_after_s: float = OLD_S,
) -> list[Text]:
    """The lines of the picture, none longer than `width`; at most `height` of them where that is given."""
    width = max(width, 40)
    state = seen.state
    top = [
        *_summary(seen, bool(seen.trouble) or seen.age_s > old_after_s),
        *([Text(keys, style="dim")] if keys else []),
    ]
    nodes = Section("nodes", node_lines(state, width, sort), "node", least=6, head=node_head(width))
    workers = Section("workers", [_worker(worker, state["redis"]["up"]) for worker in state["workers"]], "worker")
    encoders = Section("encoders, in the order of the round", _encoders(state["encoders"], width), "line", least=1)
    links = Section("links: prefill down, decode across", _links(_noted(state), width), "line", least=4)
    decisions = Section(DECISIONS, [_decision(one) for one in seen.decisions], "decision", least=4)
    room = None if height is None else max(height - len(top), 0)
    dropped = _fit([nodes, decisions, workers, encoders, links], [nodes, workers, encoders, links, decisions], room)
    lines = top
    for section in (nodes, workers, encoders, links, decisions):
        lines += section.drawn() if section.shown else []
    if dropped:
        lines.append(Text(f"no room for: {', '.join(dropped)}", style="dim"))
    lines = lines if height is None else lines[:height]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _fit(by_need: Sequence[Section], by_growth: Sequence[Section], room: int | None) -> list[str]:
    """Say how many lines of each section are shown; the headings of those that are not at all.

    Each gets its least in the order of need; what is left goes to those that want more, in the order of growth.
    """
    sections = [section for section in by_need if section.lines]
    if room is None or sum(len(section.lines) + section.extra for section in sections) <= room:
        for section in sections:
            section.shown = len(section.lines)
        return []
    left = _give_least(sections, room)
    if not all(section.shown for section in sections):
        left = _give_least(sections, room - 1)  # a line says who has none
    for section in by_growth:
        if section.shown:
            more = min(left, len(section.lines) - section.shown)
            section.shown += more
            left -= more
    return [section.heading.partition(",")[0].partition(":")[0] for section in sections if not section.shown]


def _give_least(sections: Sequence[Section], room: int) -> int:
    """The lines that are left."""
    for section in sections:
        wanted = min(len(section.lines), section.least)
        given = min(wanted, room - section.extra)
        # One line of many would only say how many more there are.
        section.shown = given if given >= min(wanted, 2) else 0
        room -= section.shown + section.extra if section.shown else 0
    return room


# --- the first lines --------------------------------------------------------------------------------


def _summary(seen: Seen, old: bool) -> list[Text]:
    state = seen.state
    nodes = state["nodes"]
    ready = sum(node["state"] == "ready" for node in nodes)
    unfinished = sum(node["unfinished"] for node in nodes)
    requests = sum(node["requests"] for node in nodes if node["role"] != "Prefill" and node["role"] != "Encode")
    what = " ".join(printable(state[name]) for name in ("serving", "strategy") if state[name])
    first = Text.assemble(("Evenhand ", "bold"), printable(state["version"] or ""), f"  {what}", "  Redis ")
    up = state["redis"]["up"]
    if up and old:
        first.append("not known now", style="bold red")  # it may be Redis itself that is silent
    elif up:
        first.append("up", style="green")
    else:
        first.append(f"away: {printable(state['redis']['reason'])}", style="bold red")
    if not old:
        first.append(f"  {_clock(state['time'])}", style="dim")
    second = Text.assemble(
        (f"{ready}/{len(nodes)} nodes ready", "green" if ready == len(nodes) and nodes else "bold red"),
        f"  {unfinished:,} unfinished on nodes  {f'{requests:,}' if up else '-'} given/min",
        f"  {count(len(state['workers']), 'worker')}  {count(len(state['models']), 'model')}",
    )
    lines = [first, second]
    if not up:
        lines += [Text(words, style="bold yellow") for words in AWAY]
    if any(node["role"] in ("Prefill", "Encode") for node in nodes):
        lines.append(Text("unfinished: a split request counts on each of its nodes", style="dim"))
    if old:
        why = printable(seen.trouble).rstrip(". ") or "nothing comes"
        lines.insert(0, Text(f"{span(seen.age_s)} old: {why}; it is tried again", style="bold red"))
    return lines


def _clock(instant_s: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(instant_s))
    except (OverflowError, ValueError, OSError):
        return "?"


# --- the other sections -----------------------------------------------------------------------------


def _worker(worker: dict[str, Any], known: bool) -> Text:
    """`known`: whether Redis is there to say how its lease is."""
    left = worker["lease_s"]
    style = "" if left >= 1 else "bold red" if left <= 0 else "yellow"
    busy = sum(number > 0 for number in worker["nodes"].values())
    return Text.assemble(
        f"{printable(worker['id'])}  {worker['unfinished']} unfinished on {count(busy, 'node')}",
        ("  lease " if known else ""),
        ("" if not known else f"{left:.1f} s left" if left > 0 else "over", style),
    )


def _encoders(encoders: dict[str, Any], width: int) -> list[Text]:
    """The round, wrapped; the next one is marked."""
    lines: list[Text] = []
    for url in encoders["urls"]:
        name = printable(url).removeprefix("http://")
        item = Text(f" ▶ {name} ", style="reverse") if url == encoders["next"] else Text(f"   {name} ")
        if not lines or lines[-1].cell_len + item.cell_len > width:
            lines.append(Text())
        lines[-1].append_text(item)
    return lines


def _noted(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The links; those of a dead node are stale."""
    dead = {node["url"] for node in state["nodes"] if node["state"] in DEAD}
    return [{**link, "state": "stale"} if dead & {link["prefill"], link["decode"]} else link for link in state["links"]]


def _links(links: Sequence[dict[str, Any]], width: int) -> list[Text]:
    """A line for each prefill node, a column for each decode node; the columns are named below."""
    if not links:
        return []
    states = {(link["prefill"], link["decode"]): link["state"] for link in links}
    prefills = list(dict.fromkeys(link["prefill"] for link in links))
    decodes = list(dict.fromkeys(link["decode"] for link in links))
    name = min(40, max(cell_len(printable(url)) for url in prefills), max(width - 20, 12))
    fits = max(1, (width - name - 12) // 3)
    shown = decodes[:fits]
    lines = [Text(" " * name + "".join(f"{place:>3}" for place in range(1, len(shown) + 1)), style="dim")]
    if len(decodes) > fits:
        lines[0].append(f"  {len(decodes) - fits} more")
    for prefill in prefills:
        line = Text(sized(printable(prefill), name, "tail"))
        for decode in shown:
            mark, style = LINK_MARKS.get(states.get((prefill, decode), ""), ("·", "dim"))
            line.append(f"  {mark}", style=style)
        lines.append(line)
    lines += [Text(f"{place:>3} {printable(url)}", style="dim") for place, url in enumerate(shown, 1)]
    if any(link["state"] == "stale" for link in links):
        lines.append(Text("  - stale: a node of it is down", style="dim"))
    return lines


def _decision(decision: dict[str, Any]) -> Text:
    """One request: when, what became of it, where it was sent, and by which score."""
    status, outcome = decision["status"], printable(decision["outcome"])
    well = isinstance(status, int) and status < 400
    took = "" if decision["seconds"] is None else f" {decision['seconds']:.3f} s"
    line = Text.assemble(
        (f"{_clock(decision['time'])} ", "dim"),
        (f"{status or '-'} {outcome}", "green" if well else "bold red"),
        f"{took}  {printable(decision['model'] or '-')} → ",
    )
    legs = decision["legs"]
    for place, leg in enumerate(legs):
        failed = leg["error"] is not None or (leg["status"] or 0) >= 400
        line.append(" → " if place else "")
        stage = "" if leg["stage"] == "request" else f"{printable(leg['stage'])} "
        line.append(f"{stage}{printable(leg['node']).removeprefix('http://')}", style="red" if failed else "")
        if failed:
            line.append(f" ({printable(leg['error'] or leg['status'])})", style="red")
    if not legs:
        line.append(printable(decision["node"] or "nobody").removeprefix("http://"))
    if decision["tries"]:
        last = decision["tries"][-1]
        score = "" if last["score"] is None else f"score {last['score']:.3g}, "
        line.append(f"  {score}{count(len(last['candidates']) + last['left_off'], 'candidate')}", style="dim")
    return line
