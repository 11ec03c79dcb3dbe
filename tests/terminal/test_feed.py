"""The newest picture in the background: over HTTP and from Redis, over failures, and each decision once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.errors import StoreUnavailable
from app.terminal.by_redis import ByRedis
from app.terminal.by_url import ByUrl, events
from app.terminal.failures import CommandError
from app.terminal.feed import Feed, place
from tests.support.contract import Scripted, ScriptedView, decision, node, state
from tests.support.wait import eventually


@pytest.fixture
def feed(deployment: Scripted) -> Iterator[Feed]:
    feed = Feed(ByUrl(deployment.url, "ad"), 0.05)
    yield feed
    feed.close()


@pytest.fixture
def from_redis(view: ScriptedView) -> Iterator[Feed]:
    feed = Feed(ByRedis("redis://r", "default"), 0.02)
    yield feed
    feed.close()


def test_it_follows_the_events(deployment: Scripted, feed: Feed) -> None:
    deployment.decisions = [decision(1), decision(2)]
    feed.start()
    eventually(lambda: [one["id"] for one in feed.seen.decisions] == ["1002-0", "1001-0"])
    deployment.state = state(node("http://new:1"))
    eventually(lambda: [one["url"] for one in feed.seen.state["nodes"]] == ["http://new:1"])
    assert ("GET", "/dashboard/events", "Bearer ad") in deployment.asked


def test_it_begins_anew_after_the_stream_ended_and_tells_each_decision_once(deployment: Scripted, feed: Feed) -> None:
    deployment.decisions = [decision(1)]
    feed.start()
    eventually(lambda: feed.seen.decisions)
    deployment.hang_up()
    eventually(lambda: "ended the connection" in feed.seen.trouble)
    deployment.decisions.append(decision(2))
    eventually(lambda: len(feed.seen.decisions) == 2, within_s=5)
    eventually(lambda: feed.seen.trouble == "")
    assert [one["id"] for one in feed.seen.decisions] == ["1002-0", "1001-0"]


def test_while_it_fails_it_says_why_and_how_old_the_state_is(deployment: Scripted, feed: Feed) -> None:
    feed.start()
    deployment.refusal = (503, "This worker is stopping")
    deployment.hang_up()
    eventually(lambda: feed.seen.trouble == "503 This worker is stopping", within_s=5)
    before = feed.seen.age_s
    eventually(lambda: feed.seen.age_s > before)
    assert feed.seen.state == deployment.state
    deployment.refusal = None
    eventually(lambda: feed.seen.trouble == "", within_s=5)
    eventually(lambda: feed.seen.age_s < 1)


def test_a_deployment_that_was_never_reached_is_an_error_at_once() -> None:
    with pytest.raises(CommandError, match="can't reach"):
        Feed(ByUrl("http://127.0.0.1:1", None), 1.0).start()


def test_from_redis_it_looks_again_and_again_and_says_that_it_watches(view: ScriptedView, from_redis: Feed) -> None:
    view.told = [decision(1)]
    from_redis.start()
    eventually(lambda: len(from_redis.seen.decisions) == 1 and view.watched > 2)
    view.told.append(decision(2))
    eventually(lambda: [one["id"] for one in from_redis.seen.decisions] == ["1002-0", "1001-0"])


def test_from_redis_it_says_that_it_watches_more_often_than_it_looks(
    view: ScriptedView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.terminal.by_redis.WATCH_EVERY_S", 0.02)
    feed = Feed(ByRedis("redis://r", "default"), 0.5)
    feed.start()
    try:
        eventually(lambda: view.watched > 10 and view.looked <= 3)
    finally:
        feed.close()


def test_from_redis_it_goes_on_after_an_outage(view: ScriptedView, from_redis: Feed) -> None:
    from_redis.start()
    view.failure = StoreUnavailable("Connection refused")
    eventually(lambda: from_redis.seen.trouble == "Redis at r:6379, namespace default: Connection refused")
    view.failure = None
    eventually(lambda: from_redis.seen.trouble == "", within_s=5)


def test_entries_of_a_stream_stand_in_the_order_of_their_numbers() -> None:
    assert place("999-0") < place("1000-0") < place("1000-2") < place("1000-10")
    assert place("") == place("what?") == (0, 0)


def test_events_are_read_as_the_format_says() -> None:
    lines = [
        *(b": a comment\n", b"\n"),
        *(b"event: state\r\n", b"data: one\r\n", b"data:two\r\n", b"\r\n"),
        *(b"event: nothing\n", b"\n"),
        *(b"data: of no kind\n", b"id: 7\n", b"\n"),
        b"data: never ended\n",
    ]
    assert list(events(lines)) == [("state", "one\ntwo"), ("message", "of no kind")]
