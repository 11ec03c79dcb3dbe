"""EPD under other settings than the defaults: policies, batch limit, --no-rewrite, Mooncake consumers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from tests.integration.stage import Fleet, start
from tests.support.deployment import Deployment
from tests.support.epd import EpdEngine, Fabric
from tests.support.epd_floor import Floor, audio, floor_on, image, pictures, text, user, video
from tests.support.loop import LoopThread
from tests.support.redis import PrivateRedis, Space
from tests.support.wait import eventually

SETTINGS = {"probe_interval_s": 1, "lease_s": 2}


FLEETS: dict[str, dict[str, Any]] = {
    "weighted": {"encoder_policy": "weighted", "encoder_max_batch_size": 2},
    "unwritten": {"encoder_policy": "least_unfinished", "no_rewrite": True},
}


@pytest.fixture(scope="module")
def fleets(redis_server: PrivateRedis) -> Iterator[dict[str, Fleet]]:
    made = {name: Fleet(redis_server, workers=1, settings=SETTINGS | more) for name, more in FLEETS.items()}
    yield made
    for fleet in made.values():
        fleet.close()


@pytest.fixture
def weighted(fleets: dict[str, Fleet], engine_loop: LoopThread) -> Iterator[Floor]:
    with floor_on(*fleets["weighted"].get(), engine_loop) as one:
        yield one


@pytest.fixture
def unwritten(fleets: dict[str, Fleet], engine_loop: LoopThread) -> Iterator[Floor]:
    with floor_on(*fleets["unwritten"].get(), engine_loop, fabric=Fabric(rewrite=False)) as one:
        yield one


def calls_of(encoder: EpdEngine) -> list[list[str]]:
    """The names of each call's items, as `image("x-3")` gives them: without what stands before the last dash."""
    kinds = ("image_url", "video_url", "audio_url")
    contents = [body["messages"][0]["content"] for body in encoder.bodies]
    urls = [[part[kind]["url"] for part in content for kind in kinds if kind in part] for content in contents]
    return sorted([url.rpartition("-")[2].rpartition(".")[0] for url in call] for call in urls)


# --- weighted, and at most two images a call


def test_weighted_is_smooth_weighted_round_robin_by_speed(weighted: Floor) -> None:
    first, second = weighted.encoders(2, speeds=[3, 1])
    weighted.one("both", chunks=1)
    # Worked out by hand for speeds 3 and 1: a a b a, where a tie is the first one's, and so on from the start.
    assert weighted.chat(pictures(8)).ok
    assert sorted(chain(*calls_of(first))) == ["0", "1", "3", "4", "5", "7"]
    assert sorted(chain(*calls_of(second))) == ["2", "6"]
    answers = asyncio.run(weighted.many(80, concurrency=8, each=lambda i: {"messages": pictures(1)}))
    assert all(answer.ok for answer in answers)
    assert (first.items, second.items) == (6 + 60, 2 + 20)


def test_a_call_has_no_more_images_than_the_limit(weighted: Floor) -> None:
    first, second = weighted.encoders(2, speeds=[1, 1])
    weighted.one("both", chunks=1)
    assert weighted.chat(pictures(6)).ok
    # vLLM's own vector: 6 images, 2 encoders, limit 2 are calls of 2, 2, 1 and 1.
    assert calls_of(first) == [["0", "2"], ["4"]]
    assert calls_of(second) == [["1", "3"], ["5"]]


# --- least unfinished, and media passed on as they are


def test_least_unfinished_passes_by_a_busy_encoder(unwritten: Floor) -> None:
    encoders = unwritten.encoders(2, ttft_s=5)
    unwritten.one("both", chunks=1)
    first = start(unwritten.many(1, messages=user(image("slow"))))
    eventually(lambda: sum(encoder.in_flight for encoder in encoders) == 1)
    busy, idle = sorted(encoders, key=lambda encoder: -encoder.in_flight)
    idle.set(ttft_s=0)
    assert unwritten.counts(busy, idle) == [1, 0]
    assert all(answer.ok for answer in asyncio.run(unwritten.many(5, concurrency=1, messages=pictures(1))))
    assert (busy.items, idle.items) == (1, 5)
    assert not first.done(), "the busy one must have been busy all the time"
    busy.crash()  # its item need not be waited for: it goes to the other one
    assert first.result(5)[0].ok
    assert idle.items == 6


def test_no_rewrite_passes_the_media_on_as_they_came_with_the_handles_beside_them(unwritten: Floor) -> None:
    unwritten.encoders(2)
    both = unwritten.one("both", chunks=1)
    messages = user(text(), image("a", uuid="own-a"), image("b"), video("c"), audio("d"))
    assert unwritten.chat(messages, temperature=0.5).ok
    (body,) = both.bodies
    handles = body.pop("ec_transfer_params")
    assert body == {"model": unwritten.model, "stream": False, "messages": messages, "temperature": 0.5}
    # What the encoders reported, whole; without a Mooncake consumer no transfer ids (the engine holds it to that).
    assert len(handles) == 4
    assert {handle["item_indices"][0] for handle in handles.values()} == {0}
    assert "processed-own-a" in handles


# --- Mooncake

ADDRESSES = [
    f"tcp://10.1.0.{host}:{port}" for host in (1, 2) for port in (14579, 14580)
]  # server by server, rank by rank


@pytest.fixture(scope="module")
def mooncake(redis_server: PrivateRedis, engine_loop: LoopThread) -> Iterator[Floor]:
    """Two encoders and two decode servers with two data-parallel ranks each, all named at the start."""
    floor = Floor(Space(redis_server, "mooncake"), [], engine_loop, fabric=Fabric(mooncake=tuple(ADDRESSES)))
    encoders = floor.encoders(2, register=False)
    decodes = floor.engines("both", 2, register=False, chunks=1)
    settings = SETTINGS | {
        "encode_servers_urls": ",".join(engine.url for engine in encoders),
        "prefill_servers_urls": "disable",
        "decode_servers_urls": ",".join(engine.url for engine in decodes),
        "ec_consumer_zmq_addrs": ",".join(ADDRESSES),
        "ec_consumer_dp_size": 2,
    }
    with Deployment(1, redis=floor.space, settings=settings) as deployment:
        floor.open(deployment)
        assert deployment.get("/health?detail=1").json()["roles"]["Decode"] == {"ready": 2}
        yield floor
        floor.close()
        assert deployment.stop() == 0
    floor.space.clear()


@pytest.fixture
def pushed(mooncake: Floor) -> Iterator[Floor]:
    _forget(mooncake)
    mooncake.fabric.violations.clear()
    yield mooncake
    mooncake.quiet()
    violations, mooncake.fabric.violations = mooncake.fabric.violations, []
    assert violations == []


def _forget(floor: Floor) -> None:
    for engine in floor.made:
        engine.forget()
    floor.fabric.encodes.clear()


def _consumers_of_a_request(floor: Floor) -> tuple[str, EpdEngine, int]:
    """(the address that all its encodes were given, the server that got it, the rank it was given)."""
    (address,) = {encode.consumer for encode in floor.fabric.encodes}
    assert address is not None
    (server,) = [engine for engine in floor.of("both") if engine.requests]
    rank = server.requests[-1].header(b"x-data-parallel-rank")
    assert rank is not None
    return address, server, int(rank)


def test_r78_encode_and_decode_servers_named_at_the_start_are_e_pd(pushed: Floor) -> None:
    answers = asyncio.run(pushed.many(4, messages=pictures(2)))
    assert all(answer.ok for answer in answers)
    assert [encoder.items for encoder in pushed.of("encode")] == [4, 4]
    assert all(
        [part for part, _, _ in stages] == ["encode", "encode", "both"]
        for parent, stages in pushed.fabric.orders()
        if parent in {answer.headers["x-request-id"] for answer in answers}
    )


def test_mooncake_encoders_push_to_the_server_and_rank_that_get_the_request(pushed: Floor) -> None:
    seen = set()
    for _ in range(8):
        assert pushed.chat(pictures(3)).ok
        address, server, rank = _consumers_of_a_request(pushed)
        assert address == ADDRESSES[pushed.of("both").index(server) * 2 + rank]
        seen.add(rank)
        _forget(pushed)
    assert seen == {0, 1}, "both ranks in turn"


def test_mooncake_transfer_ids_are_one_per_item_and_the_same_on_both_sides(pushed: Floor) -> None:
    assert pushed.chat(user(image("a"), image("b"), video("c"), image("a"), audio("d"))).ok
    announced = {
        item["uuid"]: transfer["transfer_id"]
        for encoder in pushed.of("encode")
        for body in encoder.bodies
        for item, transfer in zip(body["messages"][0]["content"], body["ec_transfer_params"]["ec_items"], strict=True)
    }
    assert len(announced) == len(set(announced.values())) == 4, "the image that came twice is encoded once"
    (body,) = [body for engine in pushed.of("both") for body in engine.bodies]
    uuids = [part["uuid"] for part in body["messages"][0]["content"]]
    assert body["ec_transfer_params"]["ec_items"] == [
        {"mm_hash": f"processed-{uuid}", "transfer_id": announced[uuid]} for uuid in uuids
    ]
    assert all("consumer_zmq" not in json.dumps(body) for engine in pushed.of("both") for body in engine.bodies)


def test_mooncake_keeps_server_and_rank_over_a_decode_retry_with_new_transfer_ids(pushed: Floor) -> None:
    for engine in pushed.of("both"):
        engine.next(500)
    answer = pushed.chat(pictures(2))
    for engine in pushed.of("both"):
        engine.strict.coming.clear()
    assert answer.ok
    address, server, rank = _consumers_of_a_request(pushed)  # one address, one server
    assert len(server.requests) == 2
    assert address == ADDRESSES[pushed.of("both").index(server) * 2 + rank]
    ids = [transfer_id for encode in pushed.fabric.encodes for transfer_id in encode.transfer_ids]
    assert len(ids) == len(set(ids)) == 4


def test_mooncake_rank_of_a_client_gives_way_to_the_chosen_one(pushed: Floor) -> None:
    for _ in range(4):
        assert pushed.chat(pictures(1), headers={"x-data-parallel-rank": "7"}).ok
        address, server, rank = _consumers_of_a_request(pushed)
        names = [name.lower() for name, _ in server.requests[0].headers]
        assert names.count(b"x-data-parallel-rank") == 1
        assert address == ADDRESSES[pushed.of("both").index(server) * 2 + rank]
        _forget(pushed)


def test_mooncake_has_no_part_in_a_request_without_media(pushed: Floor) -> None:
    assert pushed.chat(user(text())).ok
    (server,) = [engine for engine in pushed.of("both") if engine.requests]
    assert "ec_transfer_params" not in server.bodies[0]
    assert server.requests[0].header(b"x-data-parallel-rank") in (None, b"0", b"1")
    assert not any(encoder.requests for encoder in pushed.of("encode"))


def test_mooncake_media_pass_by_a_node_without_a_control_channel(pushed: Floor) -> None:
    """Whoever registers at run time has none: nothing can be pushed to it."""
    late = pushed.one("both", chunks=1)
    try:
        assert all(pushed.chat(pictures(2)).ok for _ in range(6))
        assert not late.requests
        assert all(pushed.chat(user(text())).ok for _ in range(12))
        assert late.requests, "text goes to all"
    finally:
        pushed.remove(late)
        pushed.made.remove(late)
        late.close()
