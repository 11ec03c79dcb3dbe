"""Watching two masters with two workers each: the same picture from everywhere, and the decisions of all workers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from app.store.view import explain_over_redis, view_over_redis
from tests.integration.stage import TWO_HOSTS, Stage, lanes
from tests.support.epd_floor import Floor, pictures
from tests.support.wait import eventually
from tests.support.watch import Viewer

pytestmark = pytest.mark.timeout(120)

FLEET = TWO_HOSTS


@pytest.fixture
def viewer(stage: Stage) -> Iterator[Viewer]:
    """On the second master; every worker knows that somebody looks."""
    with Viewer(stage.masters[1].url) as one:
        time.sleep(1.2)  # each asks once a second
        yield one


def nodes_of(state: dict[str, Any], stage: Stage) -> list[dict[str, Any]]:
    """Those of the test, in its order."""
    by_url = {node["url"]: node for node in state["nodes"]}
    return [by_url[engine.url] for engine in stage.made]


def state_from(stage: Stage, number: int) -> dict[str, Any]:
    found: dict[str, Any] = stage.masters[number % 2].get("/dashboard/state").json()
    return found


# --- the state ------------------------------------------------------------------------------------


def test_every_worker_tells_the_same_exact_counts(stage: Stage) -> None:
    engines = stage.engines(2, stall_after=1)  # nothing ends before all have told
    streams = stage.many(60, stream=True)
    eventually(lambda: sum(stage.counts()) == 60)
    for number in range(12):
        state = state_from(stage, number)
        assert [node["unfinished"] for node in nodes_of(state, stage)] == [30, 30]
        assert sorted(worker["id"] for worker in state["workers"]) == sorted(stage.worker_ids())
        assert sum(worker["unfinished"] for worker in state["workers"]) == 60
        assert all(0 < worker["lease_s"] <= 2 for worker in state["workers"])
        assert (state["redis"], state["strategy"], state["serving"]) == (
            {"up": True, "reason": None},
            "min_expected_latency",
            "Hybrid",
        )
    assert not streams.done()
    for engine in engines:
        engine.crash()
    assert len(streams.result(20)) == 60


def test_requests_and_shares_of_the_last_minute_are_exact_within_two_seconds(stage: Stage) -> None:
    fast, slow = stage.engines(2, speeds=[3, 1])
    assert all(answer.ok for answer in stage.many(120).result(20))
    expected = [len(fast.requests), len(slow.requests)]
    assert sum(expected) == 120

    def look() -> bool:
        found = nodes_of(state_from(stage, 0), stage)
        return [node["requests"] for node in found] == expected

    eventually(look, within_s=2.0)
    state = state_from(stage, 1)
    hybrids = sum(node["requests"] for node in state["nodes"] if node["role"] == "Hybrid")
    assert [node["share"] for node in nodes_of(state, stage)] == [count / hybrids for count in expected]


def test_from_outside_over_redis_it_is_the_same(stage: Stage) -> None:
    engine = stage.engine(speed=2)
    there = asyncio.run(view_over_redis(stage.space.url, stage.space.namespace))
    here = state_from(stage, 0)
    assert nodes_of(there, stage) == nodes_of(here, stage)
    assert {name: there[name] for name in ("strategy", "encoder_policy", "serving", "registry_version")} == {
        "strategy": "min_expected_latency",
        "encoder_policy": "round_robin",
        "serving": "Hybrid",
        "registry_version": here["registry_version"],
    }
    explained = asyncio.run(explain_over_redis(stage.space.url, stage.space.namespace, stage.model))
    assert explained == stage.deployment.get(f"/nodes/explain?model={stage.model}").json()
    (choice,) = [one for one in explained["choices"] if "Hybrid" in one["roles"]]
    assert [(one["node"], one["chance"]) for one in choice["candidates"]] == [(engine.url, 1.0)]


def test_the_next_request_goes_where_it_is_explained(stage: Stage) -> None:
    stage.engines(3, speeds=[3, 2, 1], gap_s=0.05, chunks=40)
    streams = []
    for number in range(12):
        explained = stage.masters[number % 2].get(f"/nodes/explain?model={stage.model}").json()
        before = stage.counts()
        streams.append(stage.many(1, stream=True))
        eventually(lambda before=before: sum(stage.counts()) == sum(before) + 1)  # type: ignore[misc]
        went = [engine.url for engine, a, b in zip(stage.made, before, stage.counts(), strict=True) if b > a]
        (choice,) = [one for one in explained["choices"] if "Hybrid" in one["roles"]]
        assert {one["node"]: one["chance"] for one in choice["candidates"]}[went[0]] > 0
    assert all(answer.done for stream in streams for answer in stream.result(20))


def test_an_unknown_model_is_a_404_and_a_missing_one_a_400(stage: Stage) -> None:
    assert stage.deployment.get("/nodes/explain?model=nobody-has-it").status == 404
    assert stage.deployment.get("/nodes/explain").status == 400


# --- decisions ------------------------------------------------------------------------------------


def test_decisions_of_all_workers_come_to_whoever_looks(stage: Stage, viewer: Viewer) -> None:
    stage.engines(3, speeds=[3, 1, 1], ttft_s=0.2)
    answers = stage.many(200, concurrency=40).result(30)
    assert all(answer.ok for answer in answers)
    eventually(lambda: {one["worker"] for one in viewer.decided(stage.model, 4)} == set(stage.worker_ids()), within_s=5)
    found = viewer.decided(stage.model, 4)
    assert len(found) < 200, "five a second of each worker"
    urls = {engine.url for engine in stage.made}
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert {one["request"] for one in found} <= ids and len({one["request"] for one in found}) == len(found)
    assert [one["id"] for one in found] == sorted(
        (one["id"] for one in found), key=lambda name: [*map(int, name.split("-"))]
    )
    for one in found:
        (taken,) = one["tries"]
        assert {seen["node"] for seen in taken["candidates"]} == urls and taken["left_off"] == 0
        assert all(seen["score"] == seen["unfinished"] / seen["speed"] for seen in taken["candidates"])
        assert taken["score"] == min(seen["score"] for seen in taken["candidates"])
        assert (taken["node"], taken["stage"]) == (one["node"], "request")
        assert (one["outcome"], one["status"], one["path"]) == ("ok", 200, "/v1/chat/completions")
        assert one["seconds"] >= 0.2 and abs(one["time"] - time.time()) < 60
    assert max(sum(seen["unfinished"] for seen in one["tries"][0]["candidates"]) for one in found) > 5


def test_of_a_retry_both_nodes_are_shown(stage: Stage, viewer: Viewer) -> None:
    bad, good = stage.engines(2, speeds=[1000, 1])
    bad.set(status=503)
    with lanes(stage.masters[0], stage.masters[0].worker_pids()[0], 1) as (lane,):
        while not any(len(one["tries"]) == 2 for one in viewer.decisions if one["model"] == stage.model):
            assert lane.chat(stage.model).status == 200
            time.sleep(0.25)
    one = next(one for one in viewer.decided(stage.model, 1) if len(one["tries"]) == 2)
    assert [taken["node"] for taken in one["tries"]] == [bad.url, good.url]
    assert [len(taken["candidates"]) for taken in one["tries"]] == [2, 1], "who failed is no candidate again"
    assert one["node"] == good.url and one["status"] == 200


def test_of_media_the_encoders_are_shown_before_the_node(floor: Floor) -> None:
    encoders = floor.encoders(2)
    both = floor.one("both", chunks=1)
    with Viewer(floor.deployment.url) as viewer:
        time.sleep(1.2)
        assert all(answer.ok for answer in asyncio.run(floor.many(1, each=lambda i: {"messages": pictures(3)})))
        (one,) = viewer.decided(floor.model, 1)
    assert [taken["stage"] for taken in one["tries"]] == ["encode", "encode", "request"]
    assert {taken["node"] for taken in one["tries"][:2]} == {encoder.url for encoder in encoders}
    assert one["tries"][2]["node"] == one["node"] == both.url
    assert all(len(taken["candidates"]) == 2 for taken in one["tries"][:2])


def test_when_nobody_looks_any_more_decisions_are_shared_no_more(stage: Stage) -> None:
    stage.engine()
    with Viewer(stage.deployment.url) as viewer:
        time.sleep(1.2)
        stage.many(1).result(5)
        viewer.decided(stage.model, 1)
    key = stage.space.key
    eventually(lambda: not stage.space.cli("EXISTS", key("watched")), within_s=7)
    time.sleep(1.2)  # each asks once a second
    length = stage.space.cli("XLEN", key("decisions"))
    stage.many(20).result(5)
    time.sleep(0.3)  # ended requests are looked at ten times a second
    assert stage.space.cli("XLEN", key("decisions")) == length
    assert 0 < stage.space.cli("TTL", key("decisions")) <= 60


# --- when things go wrong -------------------------------------------------------------------------


def test_after_a_flush_in_the_middle_the_stream_goes_on_and_is_true(stage: Stage, viewer: Viewer) -> None:
    stage.engines(2, gap_s=0.1, chunks=30)
    streams = stage.many(10, stream=True)
    eventually(lambda: sum(stage.counts()) == 10)
    stage.space.clear()
    seen = len(viewer.states)

    def whole() -> bool:
        last = viewer.states[-1]
        nodes = {node["url"]: node["unfinished"] for node in last["nodes"]}
        return len(viewer.states) > seen and [nodes.get(engine.url) for engine in stage.made] == [5, 5]

    eventually(whole, within_s=4)
    assert not viewer.ended
    assert all(answer.done for answer in streams.result(20))
    time.sleep(1.2)
    before = len([one for one in viewer.decisions if one["model"] == stage.model])
    stage.many(4).result(5)
    viewer.decided(stage.model, before + 1)


def test_while_redis_is_frozen_states_come_and_say_so(stage: Stage, viewer: Viewer) -> None:
    engine = stage.engine()
    stage.space.server.pause()
    try:
        eventually(lambda: not viewer.states[-1]["redis"]["up"], within_s=6)
        state = viewer.states[-1]
        assert state["redis"]["reason"] and engine.url in [node["url"] for node in state["nodes"]]
        assert len(state["workers"]) == 1
        asked_s = time.monotonic()
        assert state_from(stage, 0)["redis"]["up"] is False
        assert time.monotonic() - asked_s < 1
        assert stage.deployment.get(f"/nodes/explain?model={stage.model}").status == 200
    finally:
        stage.space.server.resume()
    eventually(lambda: viewer.states[-1]["redis"]["up"], within_s=6)


def test_a_worker_that_stops_ends_its_streams_at_once(stage: Stage) -> None:
    here = stage.masters[0]
    pid = here.worker_pids()[0]
    with lanes(here, pid, 1) as (lane,), Viewer(here.url, connection=lane._connection) as viewer:
        os.kill(pid, signal.SIGTERM)
        eventually(lambda: viewer.ended, within_s=3)
    here.wait_for_workers(without=[pid])


def test_a_worker_takes_fifty_viewers(stage: Stage) -> None:
    here = stage.masters[0]
    with lanes(here, here.worker_pids()[0], 51) as made:
        viewers = [Viewer(here.url, connection=lane._connection) for lane in made]
        assert [one.status for one in viewers] == [200] * 50 + [503]
        assert viewers[-1]._answer.getheader("retry-after") == "5"
        assert viewers[-1]._answer.read()
        threads = [threading.Thread(target=one.__enter__) for one in viewers[:50]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert all(one.states for one in viewers[:50])
        for one in viewers[:50]:
            one.leave()

        def again() -> bool:
            with Viewer(here.url) as one:
                return bool(one.states)

        eventually(again, within_s=3)
