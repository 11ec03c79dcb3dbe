"""Before the client has a byte of its answer, a failing engine is replaced by another one, and nobody notices.

The order in which nodes are tried is forced (`ranked`), so that each expected count is exact.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.integration.failing import (
    SEEN,
    UNSEEN,
    asked,
    breaker,
    failures,
    fresh_budget,
    never_twice,
    ranked,
    sent,
    tries,
)
from tests.integration.serving import broken_stream, chat_body, openai_error, post_json
from tests.integration.stage import MOSTLY_STREAM, EngineFactory, Fleet, Lane, Stage, each_once_and_all_wide, staged
from tests.support.redis import PrivateRedis
from tests.support.wait import eventually

FIRST_BYTE_S = 0.6
SETTINGS = {"first_byte_timeout_s": FIRST_BYTE_S, "connect_timeout_s": 0.3, "probe_interval_s": 60}
FLEET = {"workers": 2, "settings": SETTINGS}
STRATEGIES = ["min_expected_latency", "random", "min_observed_latency", "least_expected_delay"]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def budget(stage: Stage) -> None:
    fresh_budget(stage.space)


@pytest.fixture(scope="module")
def other_fleets(redis_server: PrivateRedis) -> Iterator[dict[str, Fleet]]:
    settings: dict[str, dict[str, Any]] = {name: {"routing_strategy": name} for name in STRATEGIES[1:]}
    settings["no retries"] = {"retries": 0}
    made = {name: Fleet(redis_server, workers=2, settings=SETTINGS | more) for name, more in settings.items()}
    yield made
    for fleet in made.values():
        fleet.close()


@pytest.fixture
def without_retries(other_fleets: dict[str, Fleet], engine_factory: EngineFactory) -> Iterator[Stage]:
    with staged(*other_fleets["no retries"].get(), engine_factory) as stage:
        yield stage


# --- one node fails, another one answers


@pytest.mark.parametrize(("fault", "stream"), each_once_and_all_wide([*UNSEEN, *SEEN]))
def test_r24_another_node_answers_for_one_that_fails(stage: Stage, fault: str, stream: bool) -> None:
    with ranked(stage, (UNSEEN | SEEN)[fault], {}) as (bad, good):
        answer = stage.many(1, stream=stream).result(5)[0]
        assert answer.ok and (answer.done or not stream)
        assert answer.text == "".join(f"token{i} " for i in range(16))
        assert tries(bad, good) == [fault in SEEN, 1]
        eventually(lambda: stage.counts(bad, good) == (0, 1))  # the stream that keeps it busy
        if fault == "refused":
            # That it was asked at all: only a refused request makes the deployment look after it so soon.
            eventually(lambda: stage.state(bad) == "down")
        elif fault == "reset on accept":
            eventually(lambda: failures(stage, bad) == 1)


@pytest.mark.parametrize("given", [{}, {"X-Request-Id": "given-by-the-client"}])
def test_r24_the_same_bytes_and_headers_are_sent_again(stage: Stage, given: dict[str, str]) -> None:
    body = chat_body(stage.model, prompt="\u00fcber  \\u00fc\t", temperature=0.10) + b" \n"
    headers = {"X-Own": "yes", "Authorization": "Bearer sk", "Accept": "text/x", "X-Twice": "a, b", **given}
    with ranked(stage, {"status": 503}, {"cut_after": -1}, {}) as engines:
        reply = post_json(stage.deployment.url, "/v1/chat/completions?a=%20b", body, headers)
        assert reply.status == 200
        assert tries(*engines) == [1, 1, 1]
        first, second, third = (asked(engine)[0] for engine in engines)
        assert first.body == body
        assert sent(first) == sent(second) == sent(third)
        assert first.id == reply.headers["x-request-id"] == given.get("X-Request-Id", first.id)
        assert first.header(b"x-own") == b"yes"
        # One after the other, without a pause between.
        assert first.started_s < second.started_s < third.started_s < first.started_s + 0.3


@pytest.mark.parametrize(("fault", "stream"), each_once_and_all_wide(["refused", "reset before the head", "503"]))
def test_r24_hundred_requests_are_all_answered(stage: Stage, fault: str, stream: bool) -> None:
    bad, good = stage.engines(2)
    bad.set(**(UNSEEN | SEEN)[fault])
    ok = 0
    for _ in range(5):  # 20 at a time, each time with a budget of 20: all can be sent again
        fresh_budget(stage.space)
        ok += sum(answer.ok for answer in stage.many(20, concurrency=5, stream=stream).result(20))
    assert ok == len(good.requests) == 100
    never_twice(bad, good)
    eventually(lambda: stage.counts(bad, good) == (0, 0))
    if fault != "refused":
        assert bad.requests, "it must have been tried"


def test_r24_a_refused_connection_delays_by_less_than_100_ms(stage: Stage) -> None:
    models = [f"{stage.model}-{i}" for i in range(8)]
    good = stage.engine(models=(stage.model, *models), stall_after=1)
    with contextlib.closing(Lane(stage.deployment.port)) as lane:
        assert lane.stream(stage.model).status == 200  # busier than the others: they are asked first
        good.set(stall_after=None)
        refusing = [stage.engine(models=(model,)) for model in models]
        for engine in refusing:
            engine.set(refuse=True)
        took = []
        for model in models:
            answer = stage.many(1, model=model).result(5)[0]
            assert answer.ok and answer.head_s is not None
            took.append(answer.head_s - answer.started_s)
        assert sorted(took)[len(took) // 2] < 0.1, took
        eventually(lambda: [stage.state(engine) for engine in refusing] == ["down"] * 8, within_s=5)


# --- how often


def test_r24_no_node_twice_and_two_others_at_most(stage: Stage) -> None:
    with ranked(stage, *[{"status": 503, "body": f"words of {i}"} for i in range(4)]) as engines:
        reply = stage.many(1).result(5)[0]
        assert tries(*engines) == [1, 1, 1, 0], "the first and --retries others"
        assert (reply.status, reply.body) == (503, b"words of 2"), "the last one's own answer"


def test_with_fewer_nodes_than_tries_no_node_is_asked_again(stage: Stage) -> None:
    with ranked(stage, {"status": 502}, {"status": 504, "body": "of the last"}) as engines:
        reply = stage.many(1).result(5)[0]
        assert tries(*engines) == [1, 1]
        assert (reply.status, reply.body) == (504, b"of the last")


def test_retries_0_tries_one_node_only(without_retries: Stage) -> None:
    stage = without_retries
    with ranked(stage, {"cut_after": -1}, {}) as (bad, good):

        def given_back() -> None:
            # A client may have its answer before Redis has the count; the next worker would find both equally busy.
            eventually(lambda: stage.counts(bad, good) == (0, 1))

        openai_error(stage.many(1).result(5)[0], 502, 10402)
        given_back()
        bad.set(**SEEN["silence"], cut_after=None)
        openai_error(stage.many(1, stream=True).result(5)[0], 504, 10402)
        given_back()
        bad.set(blackhole=False, status=503, body="own", error_headers=(("Retry-After", "7"),))
        reply = stage.many(1).result(5)[0]
        given_back()
        assert (reply.status, reply.body, reply.headers["retry-after"]) == (503, b"own", "7")
        bad.set(refuse=True)
        openai_error(stage.many(1, stream=True).result(5)[0], 502, 10402)
        assert tries(bad, good) == [3, 0]


@pytest.mark.parametrize(
    ("last", "status"), [("refused", 502), ("reset before the head", 502), ("silence", 504), ("502", 502)]
)
def test_when_all_fail_the_client_is_told_of_the_last_failure(stage: Stage, last: str, status: int) -> None:
    final = (UNSEEN | SEEN)[last] | ({"body": "its own", "error_headers": (("X-Own", "y"),)} if last == "502" else {})
    with ranked(stage, {"cut_after": -1}, {"status": 503}, final) as engines:
        reply = stage.many(1).result(5)[0]
        assert tries(*engines) == [1, 1, last in SEEN]
        if last == "502":
            assert (reply.status, reply.body, reply.headers["x-own"]) == (502, b"its own", "y")
        else:
            openai_error(reply, status, 10402)


def test_a_500_is_tried_at_one_other_node_only(stage: Stage) -> None:
    """It may be the request's own fault: then it would go through all nodes."""
    with ranked(stage, {"status": 500}, {"status": 500, "body": "again"}, {}) as engines:
        reply = stage.many(1).result(5)[0]
        assert (reply.status, reply.body) == (500, b"again")
        assert tries(*engines) == [1, 1, 0]


def test_a_500_after_another_failure_is_tried_elsewhere_once(stage: Stage) -> None:
    with ranked(stage, {"status": 503}, {"status": 500}, {}) as engines:
        assert stage.many(1).result(5)[0].ok
        assert tries(*engines) == [1, 1, 1]


# --- what is no failure of the node


@MOSTLY_STREAM
def test_a_refusal_is_passed_on_as_it_is_and_tried_nowhere_else(stage: Stage, stream: bool) -> None:
    own = b'{"error": {"message":  "its own words"}}'
    headers = (("Retry-After", "17"), ("X-Own", "yes"))
    with ranked(stage, {"body": own, "error_headers": headers}, {}) as (refusing, other):
        for status in (400, 401, 404, 408, 409, 413, 422, 429, 501):
            refusing.set(status=status)
            eventually(lambda: stage.counts(refusing, other) == (0, 1))  # the request before is given back
            answer = stage.many(1, stream=stream).result(5)[0]
            assert (answer.status, answer.body) == (status, own)
            assert (answer.headers["retry-after"], answer.headers["x-own"]) == ("17", "yes")
        assert tries(refusing, other) == [9, 0]
        assert (breaker(stage, refusing), failures(stage, refusing)) == ("closed", 0)


@pytest.mark.parametrize("fault", [{"cut_after": 5}, {"eof_after": 5}, {"eof_after": 5, "eof_how": "close"}])
def test_r25_nothing_is_sent_again_after_the_first_chunk(stage: Stage, fault: dict[str, Any]) -> None:
    with ranked(stage, fault, {}) as (bad, good):
        answer = stage.many(1, stream=True).result(5)[0]
        assert answer.status == 200
        broken_stream(answer.body, chunks=5)
        assert tries(bad, good) == [1, 0]


def test_r25_nothing_is_sent_again_after_the_head(stage: Stage) -> None:
    with ranked(stage, {"cut_after": 0, "head_first": True, "ttft_s": 0.1}, {}) as (bad, good):
        answer = stage.many(1, stream=True).result(5)[0]
        assert answer.status == 200
        broken_stream(answer.body, chunks=0)
        assert tries(bad, good) == [1, 0]


def test_r25_half_an_answer_that_is_no_stream_is_not_begun_anew(stage: Stage) -> None:
    with ranked(stage, {"cut_after": 1, "body_mb": 0.5}, {}) as (bad, good):
        answer = stage.many(1).result(5)[0]
        assert not (answer.ok and answer.body.endswith(b"}")), "it must not look complete"
        assert tries(bad, good) == [1, 0]


def test_a_client_that_left_is_not_tried_for_again(stage: Stage) -> None:
    with ranked(stage, {"ttft_s": 0.4, "status": 503}, {}) as (bad, good):
        assert stage.many(1, leave_after_s=0.2).result(5)[0].left
        eventually(lambda: not bad.in_flight and stage.counts(bad, good) == (0, 1))
        assert tries(bad, good) == [1, 0]


# --- what is counted meanwhile


@pytest.mark.parametrize(
    "strategy", [*STRATEGIES[:2], *(pytest.param(s, marks=pytest.mark.wide) for s in STRATEGIES[2:])]
)
def test_counts_follow_the_request_to_the_other_node(
    stage: Stage, other_fleets: dict[str, Fleet], engine_factory: EngineFactory, strategy: str
) -> None:
    if strategy != STRATEGIES[0]:
        with staged(*other_fleets[strategy].get(), engine_factory) as other:
            counts_follow(other)
    else:
        counts_follow(stage)


def counts_follow(stage: Stage) -> None:
    bad, good = stage.engines(2)
    bad.set(status=503)
    good.set(gap_s=0.2, chunks=12)  # answers last for longer than the first byte may take
    burst = stage.many(18, stream=True)
    eventually(lambda: stage.counts(bad, good) == (0, 18) and good.in_flight == 18, within_s=2.0)
    assert all(answer.done for answer in burst.result(10))
    assert bad.requests, "it must have been tried"
    never_twice(bad, good)
    eventually(lambda: stage.counts(bad, good) == (0, 0))


def test_only_the_node_that_answered_gets_a_latency_and_only_its_own(stage: Stage) -> None:
    with ranked(stage, SEEN["silence"], {"status": 503}, {"ttft_s": 0.3}) as (silent, bad, good):
        assert stage.many(1).result(5)[0].ok
        nodes = eventually(lambda: [n for n in [stage.deployment.nodes()] if n[good.url]["latency"]])[0]
        assert (nodes[silent.url]["latency"], nodes[bad.url]["latency"]) == ([], [])
        (latency,) = nodes[good.url]["latency"]
        assert 0.3 <= latency < 0.3 + FIRST_BYTE_S, "not the time that others took before"


# --- field reports, through the SDK where a user would see it


def test_r18_sixty_mistakes_of_a_client_change_nothing_for_others(stage: Stage) -> None:
    engines = stage.engines(2, body=b"its own", only_for="long")
    for status in (400, 401, 404, 413, 422, 429):
        for engine in engines:
            engine.set(status=status)
            engine.forget()
        bad = stage.many(10, prompt="long").result(10)
        assert {(answer.status, answer.body) for answer in bad} == {(status, b"its own")}
        assert sum(tries(*engines)) == 10, "each is asked of one node"
        assert all(answer.ok for answer in stage.many(10).result(10))
        for engine in engines:
            assert (stage.state(engine), breaker(stage, engine), failures(stage, engine)) == ("ready", "closed", 0)


def test_r19_one_clients_500s_evict_nobody(stage: Stage) -> None:
    engines = stage.engines(2, status=500, only_for="poison")
    bad = stage.many(50, concurrency=10, prompt="poison").result(20)
    assert {answer.status for answer in bad} == {500}
    assert 50 < sum(tries(*engines)) <= 100, "each at one other node at most"
    never_twice(*engines)
    assert all(answer.ok for answer in stage.many(40, concurrency=10).result(20))
    for engine in engines:
        assert (stage.state(engine), breaker(stage, engine), failures(stage, engine)) == ("ready", "closed", 0)


HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("fault", [{"refuse": True}, {"status": 503}, SEEN["silence"]])
def test_r90_the_sdk_without_retries_sees_nothing_of_a_node_that_fails(stage: Stage, fault: dict[str, Any]) -> None:
    with (
        ranked(stage, fault, {}) as (_, good),
        openai.OpenAI(base_url=stage.deployment.url + "/v1", api_key="sk", max_retries=0) as client,
    ):
        said = client.chat.completions.create(model=stage.model, messages=HELLO).choices[0].message.content
        stream = client.chat.completions.create(model=stage.model, messages=HELLO, stream=True)
        assert said == "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert tries(good) == [2]


def test_r90_the_sdk_at_its_defaults_gets_over_an_outage_that_all_nodes_tell_of(stage: Stage) -> None:
    engines = stage.engines(2, status=503, error_headers=(("Retry-After", "2"),))

    def end_outage() -> None:
        eventually(lambda: tries(*engines) == [1, 1], within_s=10)
        for engine in engines:
            engine.set(status=200)

    with openai.OpenAI(base_url=stage.deployment.url + "/v1", api_key="sk") as client, ThreadPoolExecutor(1) as pool:
        begun_s = time.monotonic()
        ending = pool.submit(end_outage)
        assert client.chat.completions.create(model=stage.model, messages=HELLO).choices[0].message.content
        ending.result()
        assert time.monotonic() - begun_s >= 2, "it waited as long as the engines asked for"
    assert sorted(tries(*engines)) == [1, 2], "both at first, then one that answers"
