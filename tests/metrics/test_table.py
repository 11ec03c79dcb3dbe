"""docs/metrics.md says what `app/metrics/families.py` says, and names follow Prometheus's rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.metrics.families import FAMILIES, Family, Kind

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
RESERVED = {"le", "quantile", "job", "instance"}


def rendered_table() -> str:
    """The table as it should stand between the markers; paste it there when a metric has changed."""
    rows = ["| metric | type | labels | of | what |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        where = "deployment" if family.shared else "host"
        rows.append(f"| `{family.name}` | {family.kind} | {labels} | {where} | {family.help} |")
    return "\n".join(rows)


def test_the_table_is_the_families() -> None:
    found = re.search(r"<!-- metrics: begin -->\n(.*)\n?<!-- metrics: end -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    assert found[1].strip() == rendered_table()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_follow_the_rules_of_prometheus(family: Family) -> None:
    # https://prometheus.io/docs/practices/naming/: one prefix, base units, _total for counters and nothing else.
    assert re.fullmatch(r"evenhand(_[a-z]+)+", family.name)
    assert family.name.endswith("_total") == (family.kind is Kind.COUNTER)
    assert family.name.endswith("_seconds") == (family.kind is Kind.HISTOGRAM)
    assert all(re.fullmatch(r"[a-z]+", label) for label in family.labels) and not RESERVED & set(family.labels)
    assert list(family.buckets) == sorted(set(family.buckets)) and bool(family.buckets) == (
        family.kind is Kind.HISTOGRAM
    )
    assert not re.search(r"_(ms|s|milliseconds|kb|count|sum|bucket)(_|$)", family.name)
    assert family.help.endswith(".") and "|" not in family.help


def test_names_are_unique() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    assert {family.merge for family in FAMILIES if family.kind is Kind.GAUGE and not family.shared} <= {
        "livesum",
        "livemin",
    }
