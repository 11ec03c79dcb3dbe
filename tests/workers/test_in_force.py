"""What a start says of its settings: the values in force, where each came from, and no secret."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from app.settings import SOURCES_VARIABLE, Settings, sources_of
from workers.in_force import read_sources, say_in_force, shown_value
from workers.logs import formatter

FLAGS: dict[str, Any] = {
    "workers": "4",
    "redis_url": "redis://:hush@r:6379/3",
    "api_keys": ["sk-hush", "sk-hush2"],
    "log_level": None,
}


def said(caplog: pytest.LogCaptureFixture, style: str) -> str:
    (record,) = caplog.records
    return formatter(style).format(record)


def say(monkeypatch: pytest.MonkeyPatch, style: str = "text") -> None:
    monkeypatch.setenv("EVENHAND_LOG_FORMAT", style)
    monkeypatch.setenv("AIOHTTP_TIMEOUT", "33")
    say_in_force(Settings.load(FLAGS), sources_of(FLAGS))


def test_what_was_given_is_said_with_its_source_and_the_rest_is_a_number(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    say(monkeypatch)
    first, *rows = said(caplog, "text").splitlines()
    assert first.endswith(
        f"settings in force: 5; {len(Settings.model_fields) - 5} more by default (--log-level DEBUG names them)"
    )
    assert [row.split() for row in rows] == [
        ["--api-keys", "**********", "**********", "--api-keys"],
        ["--workers", "4", "--workers"],
        ["--redis-url", "redis://***@r:6379/3", "--redis-url"],
        ["--log-format", "text", "EVENHAND_LOG_FORMAT"],
        ["--first-byte-timeout-s", "33", "AIOHTTP_TIMEOUT"],
    ]
    starts = [row.index(row.split()[-1], 30) for row in rows]
    assert len(set(starts)) == 1, "aligned"
    assert "hush" not in caplog.text


def test_at_debug_all_are_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.DEBUG)
    say(monkeypatch)
    first, *rows = said(caplog, "text").splitlines()
    assert len(rows) == len(Settings.model_fields) and "more by default" not in first
    assert ["--retries", "2", "default"] in [row.split() for row in rows]


def test_in_json_it_is_one_object(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    say(monkeypatch, "json")
    found = json.loads(said(caplog, "json"))
    assert found["message"] == "settings in force" and found["by_default"] == len(Settings.model_fields) - 5
    assert found["settings"]["workers"] == {"value": "4", "from": "--workers"}
    assert found["settings"]["log_format"] == {"value": "json", "from": "EVENHAND_LOG_FORMAT"}
    assert "hush" not in json.dumps(found)


def test_above_info_nothing_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.WARNING)
    say(monkeypatch)
    assert not caplog.records


def test_sources_come_from_who_started_us_or_else_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_WORKERS", "3")
    for text in ("", "no json", "[]"):
        assert read_sources({SOURCES_VARIABLE: text}) == {"workers": "EVENHAND_WORKERS"}
    assert read_sources({SOURCES_VARIABLE: '{"workers": "--workers"}'}) == {"workers": "--workers"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("redis://:hush@h:1/0", "redis://***@h:1/0"),
        ("redis://u:hu@sh@h/0", "redis://***@h/0"),
        ("redis://h/0?password=hush&db=3", "redis://h/0?***"),
        ("unix:///run/r.sock?db=3", "unix:///run/r.sock?db=3"),
        ("redis+sentinel://:hush@a:1,b:2/m/0?sentinel_password=hush", "redis+sentinel://***@a:1,b:2/m/0?***"),
        ("https://user:hush@collector:4318/v1/traces", "https://***@collector:4318/v1/traces"),
        (("http://a:1", "http://b:2"), "http://a:1 http://b:2"),
        ((), "none"),
        (None, "none"),
        (True, "on"),
        (0.5, "0.5"),
    ],
)
def test_a_value_without_what_must_not_be_shown(value: object, shown: str) -> None:
    assert shown_value(value) == shown


def test_the_options_of_a_source_are_no_secret() -> None:
    text = "dns://engine:8000?role=Prefill"
    assert shown_value(Settings.load({"discover": [text, "file:///n.yaml"]}).discover) == f"{text} file:///n.yaml"
