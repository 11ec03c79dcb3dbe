"""What a check found, as lines for a person and as a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from app.checks.finding import Finding, Level
from app.terminal.words import count, paint, printable

COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.BAD: "red"}


class Report:
    """What was found, and what could not be looked at and why."""

    def __init__(self, deployment: str) -> None:
        self.deployment = deployment
        self.findings: list[Finding] = []
        self.not_checked: list[tuple[str, str]] = []

    def __repr__(self) -> str:
        return f"<Report {dict(self.tally)}>"

    def add(self, findings: Iterable[Finding]) -> None:
        self.findings += findings

    @property
    def tally(self) -> Counter[Level]:
        return Counter(finding.level for finding in self.findings)


def told(report: Report, *, colour: bool = False) -> Iterator[str]:
    """The findings in lines, part by part."""
    yield printable(report.deployment)
    part = ""
    width = max((len(f.check.partition(".")[2]) for f in report.findings), default=0)
    for finding in report.findings:
        now, _, what = finding.check.partition(".")
        if now != part:
            part = now
            yield ""
            yield part
        level = finding.level.value.ljust(4)
        level = paint(level, COLOURS[finding.level]) if colour else level
        yield f"  {level}  {what.ljust(width)}  {printable(finding.says)}"
        if finding.mend:
            yield f"        {' ' * width}  -> {printable(finding.mend)}"
    if report.not_checked:
        yield ""
        yield "not looked at"
        yield from (f"  {printable(what)} ({printable(why)})" for what, why in report.not_checked)
    yield ""
    tally = report.tally
    yield f"{count(tally[Level.BAD], 'thing')} bad, {count(tally[Level.WARN], 'warning')}, {tally[Level.OK]} ok"


def document_of(report: Report) -> dict[str, Any]:
    tally = report.tally
    return {
        "deployment": report.deployment,
        "findings": [
            {"check": f.check, "level": f.level.value, "says": printable(f.says), "mend": printable(f.mend)}
            for f in report.findings
        ],
        "not_checked": [{"what": what, "why": why} for what, why in report.not_checked],
        **{level.value: tally[level] for level in Level},
    }
