"""What `deploy/` holds: alert rules and a dashboard that ask for metrics that there are, and are understood."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.metrics.families import FAMILIES, Kind

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD = DEPLOY / "grafana" / "evenhand.json"


def promtool(*words: str | Path) -> str:
    """What promtool says; the test fails with it where it finds a fault."""
    tool = shutil.which("promtool")
    if tool is None:
        assert "EVENHAND_CI_RUN" not in os.environ, "promtool is missing (Debian's package prometheus)"
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    done = subprocess.run([tool, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def known_names() -> set[str]:
    names = set()
    for family in FAMILIES:
        suffixes = ("_bucket", "_sum", "_count") if family.kind is Kind.HISTOGRAM else ("",)
        names |= {family.name + suffix for suffix in suffixes}
    return names


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """(where, expression) of the dashboard, its variables filled in as Grafana does."""
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in panels():
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for note in dashboard["annotations"]["list"]:
        yield note["name"], note["expr"]


def filled(expression: str) -> str:
    return re.sub(r"\$(model|node)", ".*", expression).replace("$__rate_interval", "1m")


def test_the_alerts_fire_when_they_should_and_only_then() -> None:
    rules = (PROMETHEUS / "alerts.yml").read_text()
    alerts = set(re.findall(r"- alert: (\w+)", rules))
    tested = set(re.findall(r'alertname="(\w+)"', (PROMETHEUS / "alerts_test.yml").read_text()))
    assert alerts == tested and len(alerts) == 12
    assert "SUCCESS: 12 rules" in promtool("check", "rules", PROMETHEUS / "alerts.yml")
    promtool("check", "config", PROMETHEUS / "prometheus.yml")
    assert "SUCCESS" in promtool("test", "rules", PROMETHEUS / "alerts_test.yml")


def test_every_expression_of_the_dashboard_is_right(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{n}", "expr": filled(expression)} for n, (_, expression) in enumerate(expressions())]
    assert len(rules) > 25 and not any("$" in rule["expr"] for rule in rules)
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"SUCCESS: {len(rules)} rules" in promtool("check", "rules", tmp_path / "rules.yml")


def test_alerts_and_dashboard_ask_for_metrics_and_labels_that_there_are() -> None:
    texts = [*expressions(), ("alerts", (PROMETHEUS / "alerts.yml").read_text())]
    known, used = known_names(), set()
    labels = {"instance", "le"} | {label for family in FAMILIES for label in family.labels}
    for where, text in texts:
        names = set(re.findall(r"\bevenhand_\w+", text))
        assert names <= known, f"{where}: {names - known}"
        used |= names
        for group in re.findall(r"by \(([^)]*)\)", text):
            assert {word.strip() for word in group.split(",")} <= labels, f"{where}: {group}"
        for group in re.findall(r"evenhand_\w+\{([^}]*)\}", text):
            assert set(re.findall(r"(\w+)[=!]", group)) <= labels, f"{where}: {group}"
    stems = {name.removesuffix("_bucket").removesuffix("_total") for name in used}
    unused = {family.stem for family in FAMILIES} - stems
    assert unused == {"evenhand_degraded_seconds", "evenhand_node_models"}, "a metric that nobody would look at"


def test_the_dashboard_has_room_for_each_panel() -> None:
    places = [panel["gridPos"] for panel in panels()]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in panels()}) == len(places)
