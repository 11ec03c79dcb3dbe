"""Metrics as Prometheus reads them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    """(name, labels) -> value; each at most once."""
    found: Samples = {}
    for metric in text_string_to_metric_families(text):
        for sample in metric.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def value(found: Samples, name: str, **labels: str) -> float | None:
    """Of the one series with exactly these labels."""
    return found.get((name, frozenset(labels.items())))


def total(found: Samples, name: str, **labels: str) -> float:
    """Of all series that have these labels, and any others."""
    wanted = set(labels.items())
    return sum(number for (of, having), number in found.items() if of == name and wanted <= having)
