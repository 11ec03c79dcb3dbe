"""Warnings that are said once a minute."""

from __future__ import annotations

import logging

import pytest

from app.dispatch import seldom as seldom_module
from app.dispatch.seldom import Seldom

LOG = logging.getLogger("evenhand.test")


def test_a_warning_is_said_once_a_minute_for_each_node_and_reason_with_the_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    seldom = Seldom(LOG, lambda: now_s)
    for _ in range(5):
        seldom.warn("a", "a fails")
    seldom.warn("b", "b fails")
    now_s = 59.9
    seldom.warn("a", "a fails")
    now_s = 60.0
    seldom.warn("a", "a fails")
    seldom.warn("b", "b fails otherwise")
    said = [record.getMessage() for record in caplog.records]
    assert said == ["a fails", "b fails", "a fails (5 times more since the last such line)", "b fails otherwise"]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seldom_module, "REMEMBERED", 3)
    seldom = Seldom(LOG)
    for reason in "abcdef":
        seldom.warn("a", reason)
    assert repr(seldom) == "<Seldom 3>"
