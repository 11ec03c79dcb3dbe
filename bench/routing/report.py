"""A run as a text that is Markdown too, and as plots. No measuring."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from bench.routing.figures import (
    CHUNK_CPU,
    CPU,
    GAP,
    P50,
    P99,
    SCENARIOS,
    TARGETS,
    TTFT,
    Metric,
    Run,
    Scenario,
    Spread,
    spread,
)

WORKER_MIB = 60
CHATTY_BYTES = 20  # logged for each request
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
ROW, LEFT, RIGHT, TOP, WIDTH = 22, 150, 150, 34, 720  # of a plot, in pixels
COLOURS = {"evenhand": "#0969da", "rust": "#bc4c00", "other": "#57606a"}
PANELS = {
    "performance-cpu.svg": (
        "CPU of the router's process tree",
        (("one", CPU), ("many", CPU), ("large", CPU), ("streams", CHUNK_CPU)),
    ),
    "performance-latency.svg": (
        "Latency that the router adds",
        (("one", P50), ("one", P99), ("streams", TTFT), ("streams", GAP)),
    ),
}


def text(run: Run) -> str:
    parts = [_machine(run), _targets(run)]
    parts += [_table(run, scenario) for scenario in SCENARIOS.values() if run.names(scenario.key)]
    parts += [_memory(run), _missing(run)]
    return "\n\n".join(part for part in parts if part)


def _table(run: Run, scenario: Scenario) -> str:
    lines = [
        f"### {scenario.title}",
        "",
        "| | " + " | ".join(metric.title for metric in scenario.metrics) + " | |",
        "|---" * (len(scenario.metrics) + 2) + "|",
    ]
    for name in run.names(scenario.key):
        cells = [
            shown(spread(run.values(scenario.key, name, metric).values()), metric.digits) for metric in scenario.metrics
        ]
        lines.append(f"| {label(run, name)} | {' | '.join(cells)} | {_remarks(run, scenario, name)} |")
    return "\n".join(lines)


def shown(figure: Spread | None, digits: int) -> str:
    """`median (least-most)`."""
    if figure is None:
        return "-"
    least, median, most = (f"{value:,.{digits}f}" for value in figure)
    return median if least == most else f"{median} ({least} to {most})"


def label(run: Run, name: str) -> str:
    about = run.contenders[name]
    return f"{name.removesuffix('-rr')} {about['version']}".strip() + f", {about['what']}"


def _remarks(run: Run, scenario: Scenario, name: str) -> str:
    remarks = []
    limits = run.limits(scenario.key, name)
    if limits:
        remarks.append(f"{' and '.join(limits)} at the limit")
    failures = run.failures(scenario.key, name)
    if failures:
        remarks.append("failed: " + ", ".join(f"{n} x {why}" for why, n in failures.items()))
    if any(
        one.get("logged_bytes", 0) > CHATTY_BYTES * one["requests"] for one in run.measured(scenario.key, name).values()
    ):
        remarks.append("logs its requests")
    if any(not one["requests"] for one in run.measured(scenario.key, name).values()):
        remarks.append("a window without a whole answer")
    return "; ".join(remarks)


def _targets(run: Run) -> str:
    lines = ["| what | of | target | min / median / max | |", "|---|---|---|---|---|"]
    for target in TARGETS:
        reached = target.reached(run)
        if reached is None:
            continue
        sign = "<=" if target.metric.less else ">="
        three = " / ".join(f"{value:.2f}" if value >= 0.1 else f"{value:.3f}" for value in reached)
        title = f"{SCENARIOS[target.scenario].title}: {target.metric.title}"
        if not target.bound:
            title = title.removesuffix(", ms")
        held = "held" if target.held(reached) else "missed"
        lines.append(f"| {title} | {target.title} | {sign} {target.limit:.3g} | {three} | {held} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _memory(run: Run) -> str:
    figures = {name: spread(values) for name, values in run.memory_mib.items()}
    if not figures:
        return ""
    lines = ["### Memory of the process tree before the load, MiB", "", "| | |", "|---|---|"]
    lines += [f"| {label(run, name)} | {shown(figures[name], 0)} |" for name in run.contenders if name in figures]
    worker = run.worker_mib()
    if worker:
        lines.append(f"| each further worker of Evenhand (target: <= {WORKER_MIB}) | {shown(worker, 0)} |")
    return "\n".join(lines)


def _machine(run: Run) -> str:
    lines = [f"{', '.join(f'{what} {value}' for what, value in run.machine.items())}."]
    others, stolen = run.elsewhere(), run.stolen()
    if others and stolen:
        lines.append(
            f"Other programs used {shown(others, 2)} cores meanwhile, and the host of this machine kept back "
            f"{shown(stolen, 2)}: the less, the truer the figures."
        )
    return "\n".join([*lines, *run.notes])


def _missing(run: Run) -> str:
    measured = {sample.contender for sample in run.samples}
    return "\n".join(
        f"- {name}: {'measured no further' if name in measured else 'not measured'}: {why}"
        for name, why in run.missing.items()
    )


# --- plots


def plots(run: Run) -> dict[str, str]:
    """File name -> SVG: each contender's median as a dot, least and most as a line, on a logarithmic axis."""
    return {name: _plot(run, title, panels) for name, (title, panels) in PANELS.items()}


def _plot(run: Run, title: str, panels: Iterable[tuple[str, Metric]]) -> str:
    drawn: list[str] = []
    y = 40
    for scenario, metric in panels:
        figures = {name: spread(run.values(scenario, name, metric).values()) for name in run.names(scenario)}
        there = {name: figure for name, figure in figures.items() if figure}
        if there:
            lines, height = _panel(run, f"{SCENARIOS[scenario].title}: {metric.title}", metric, there)
            drawn += [f'<g transform="translate(0,{y})">', *lines, "</g>"]
            y += height
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" '
        'font-family="sans-serif" font-size="12">'
    )
    paper = f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>'
    heading = f'<text x="12" y="24" font-size="16" font-weight="bold" fill="#24292f">{escape(title)}</text>'
    return "\n".join([head, paper, heading, *drawn, "</svg>", ""])


def _panel(run: Run, title: str, metric: Metric, figures: dict[str, Spread]) -> tuple[list[str], int]:
    axis = Axis([value for figure in figures.values() for value in figure], 10.0**-metric.digits)
    bottom = TOP + ROW * len(figures)
    lines = [f'<text x="12" y="16" font-weight="bold" fill="#24292f">{escape(title)}</text>']
    for tick in axis.ticks():
        x = axis.x(tick)
        lines.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}" stroke="#d0d7de"/>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle" fill="#57606a">{tick:g}</text>')
    for nth, (name, figure) in enumerate(sorted(figures.items(), key=lambda item: item[1].median)):
        y = TOP + ROW * nth + ROW // 2
        rust = run.contenders[name]["rust"]
        colour = COLOURS["evenhand" if name.startswith("evenhand") else "rust" if rust else "other"]
        least, median, most = map(axis.x, figure)
        lines += [
            f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end" fill="{colour}">{escape(name)}</text>',
            f'<line x1="{least:.1f}" y1="{y}" x2="{most:.1f}" y2="{y}" stroke="{colour}" stroke-width="2"/>',
            f'<circle cx="{median:.1f}" cy="{y}" r="4.5" fill="{colour}"/>',
            f'<text x="{WIDTH - RIGHT + 14}" y="{y + 4}" fill="{colour}">{figure.median:,.{metric.digits}f}</text>',
        ]
    return lines, bottom + 34


class Axis:
    """Decades from left to right. What is below `floor`, as an added latency can be, stands at the floor."""

    def __init__(self, values: Sequence[float], floor: float) -> None:
        self._floor = floor
        self._low = math.floor(math.log10(max(min(values), floor)))
        self._high = max(math.ceil(math.log10(max(*values, floor))), self._low + 1)

    def x(self, value: float) -> float:
        share = (math.log10(max(value, self._floor, 10.0**self._low)) - self._low) / (self._high - self._low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def ticks(self) -> list[float]:
        return [10.0**power for power in range(self._low, self._high + 1)]


# --- docs/performance.md


def write_docs(run: Run, docs: Path) -> list[Path]:
    """Rewrites the block between BEGIN and END, and the plots; what was written."""
    page = docs / "performance.md"
    images = "\n\n".join(f"![{title}]({name})" for name, (title, _) in PANELS.items())
    block = f"{BEGIN}\n{text(run)}\n\n{images}\n{END}"
    page.write_text(replaced(page.read_text(), block))
    written = [page]
    for name, drawing in plots(run).items():
        (docs / name).write_text(drawing)
        written.append(docs / name)
    return written


def replaced(page: str, block: str) -> str:
    """Raises ValueError where the page has no place for it."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return pattern.sub(lambda _: block, page)
