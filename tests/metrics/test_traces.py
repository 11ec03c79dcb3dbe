"""What spans are made of a request that has ended, and how they reach a collector."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler
from opentelemetry.trace import SpanKind, StatusCode

from app.journey import Journey, Leg, Try
from app.metrics.figures import Served
from app.metrics.traces import LAST_SPANS_S, LOUD, OnceAMinute, Traces, traces_url
from tests.support.collector import collecting
from tests.support.wait import eventually

ROOT = Path(__file__).parents[2]
TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
SAMPLED = (b"traceparent", b"00-%032x-%016x-01" % (TRACE, SPAN))
NOT_SAMPLED = (b"traceparent", b"00-%032x-%016x-00" % (TRACE, SPAN))


class World:
    """Traces into memory."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        self.traces = Traces(
            SimpleSpanProcessor(self.exporter), resource=Resource({}), sampler=sampler or ParentBased(ALWAYS_ON)
        )

    def served(self, *headers: tuple[bytes, bytes], path: str = "/v1/chat/completions", model: str = "m") -> Served:
        one = Served(path)
        one.request, one.client, one.model, one.status = b"r7", ("10.1.2.3", 50000), model, 200
        one.bytes_in, one.bytes_out = 120, 3400
        one.journey = Journey(trace=self.traces.begin(list(headers)))
        one.end("http://d:80", "ok")
        one.began_s, one.ended_s = 100.0, 103.0
        return one

    def told(self, *ended: Served) -> list[ReadableSpan]:
        self.traces([*ended])
        spans = list(self.exporter.get_finished_spans())
        self.exporter.clear()
        return spans


def seconds_of(span: ReadableSpan, first: ReadableSpan) -> tuple[float, float]:
    assert span.start_time and span.end_time and first.start_time
    return tuple(round((at - first.start_time) / 1e9, 6) for at in (span.start_time, span.end_time))  # type: ignore[return-value]


def test_a_request_on_two_engines_is_one_trace_below_its_clients_span() -> None:
    world = World()
    one = world.served(SAMPLED)
    journey = one.journey
    assert journey is not None and journey.trace is not None
    journey.trace.relay_at_s = 101.5
    journey.tries += [Try("http://p:80", 100.1, 0.002, stage="prefill"), Try("http://d:80", 100.1, 0.002)]
    one.first_s, one.chunks = 101.6, 5
    journey.legs += [
        Leg("http://p:80", "prefill", 100.2, 0.3, 200, span_id=0xF1),
        Leg("https://d.example/v", "decode", 100.5, 0.0, 200, span_id=0xF2),
    ]
    request, first, second, prefill, decode, relay = world.told(one)

    assert {span.context.trace_id for span in (request, first, second, prefill, decode, relay)} == {TRACE}
    assert request.parent is not None and (request.parent.span_id, request.parent.is_remote) == (SPAN, True)
    assert {span.parent.span_id for span in (first, second, prefill, decode, relay) if span.parent} == {
        request.context.span_id
    }
    assert [span.name for span in (request, first, second, prefill, decode, relay)] == [
        "POST /v1/chat/completions",
        "acquire",
        "acquire",
        "chat m",
        "chat m",
        "relay",
    ]
    assert [span.kind for span in (request, first, prefill, relay)] == [
        SpanKind.SERVER,
        SpanKind.INTERNAL,
        SpanKind.CLIENT,
        SpanKind.INTERNAL,
    ]
    times = [seconds_of(span, request) for span in (request, first, prefill, decode, relay)]
    assert times == [(0, 3), (0.1, 0.102), (0.2, 0.5), (0.5, 3.0), (1.5, 3.0)]
    assert request.start_time is not None
    assert abs(time.time_ns() - time.monotonic_ns() + 100 * 10**9 - request.start_time) < 10**9
    assert (prefill.context.span_id, decode.context.span_id) == (0xF1, 0xF2)
    assert dict(request.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "http.request.body.size": 120,
        "http.response.body.size": 3400,
        "http.response.status_code": 200,
        "client.address": "10.1.2.3",
        "evenhand.request_id": "r7",
        "evenhand.outcome": "ok",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
    }
    assert dict(decode.attributes or {}) == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "server.address": "d.example",
        "server.port": 443,
        "url.full": "https://d.example/v/v1/chat/completions",
        "evenhand.stage": "decode",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
    }
    assert {span.status.status_code for span in (request, prefill, decode)} == {StatusCode.UNSET}


@pytest.mark.parametrize(
    ("path", "model", "name", "operation"),
    [
        ("/v1/completions", "m", "text_completion m", "text_completion"),
        ("/v1/responses/", "m", "chat m", "chat"),
        ("/v1/embeddings", "m", "embeddings m", "embeddings"),
        ("/v1/audio/speech", "m", "POST", None),
        ("/v1/embeddings", "\ud800", "embeddings ?", "embeddings"),
    ],
)
def test_an_operation_has_the_name_that_the_conventions_give_it(
    path: str, model: str, name: str, operation: str | None
) -> None:
    world = World()
    one = world.served(path=path, model=model)
    one.journey.legs.append(Leg("http://d:80", "request", 100.0, 1.0, 200, span_id=1))  # type: ignore[union-attr]
    request, leg = world.told(one)
    assert leg.name == name and (leg.attributes or {}).get("gen_ai.operation.name") == operation
    route = path.rstrip("/") if operation else "/v1/{path}"
    assert request.name == f"POST {route}"
    assert request.parent is None and request.context.trace_id not in (0, TRACE)


@pytest.mark.parametrize(
    ("outcome", "status", "failed"),
    [("client_error", 404, False), ("aborted", None, False), ("engine_error", 502, True), ("no_node", 503, True)],
)
def test_what_went_wrong_is_on_the_spans(outcome: str, status: int | None, failed: bool) -> None:
    world = World()
    one = world.served()
    one.outcome, one.status = outcome, status
    assert one.journey is not None
    one.journey.legs += [
        Leg("http://d:80", "request", 100.0, 1.0, 503, span_id=1),
        Leg("http://d:80", "request", 101.0, 1.0, None, "engine_timeout", span_id=2),
    ]
    request, refused, silent = world.told(one)
    assert (request.attributes or {})["error.type"] == outcome
    assert (request.attributes or {}).get("http.response.status_code") == status
    assert request.status.status_code is (StatusCode.ERROR if failed else StatusCode.UNSET)
    assert [(span.attributes or {})["error.type"] for span in (refused, silent)] == ["503", "engine_timeout"]
    assert {span.status.status_code for span in (refused, silent)} == {StatusCode.ERROR}


def test_whether_a_trace_is_recorded_is_its_beginners_choice() -> None:
    world = World(ParentBased(ALWAYS_OFF))
    assert not world.told(world.served(), world.served(NOT_SAMPLED))
    assert len(world.told(world.served(SAMPLED))) == 1
    world = World()
    unrecorded = world.served(NOT_SAMPLED)
    assert not world.told(unrecorded) and len(world.told(world.served())) == 1
    # The engines are told so too, in the same trace.
    assert unrecorded.journey is not None and unrecorded.journey.trace is not None
    (_, value), *_ = unrecorded.journey.trace.onwards([NOT_SAMPLED])[1]
    assert value.startswith(b"00-%032x-" % TRACE) and value.endswith(b"-00")


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/own/path", "https://c/own/path"),
    ],
)
def test_an_address_without_a_path_gets_that_of_traces(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


# --- a collector


def test_spans_reach_a_collector_with_what_otel_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,zone=z1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with collecting() as collector:
        traces = Traces.of(collector.url, "w1")
        one = Served("/v1/embeddings")
        one.journey = Journey(trace=traces.begin([SAMPLED]))
        one.end("", "no_node")
        traces([one])
        eventually(lambda: len(collector.spans) == 1)
        traces.close()
    said = {pair.key: pair.value.string_value for pair in collector.got[0].resource.attributes}
    assert (said["service.name"], said["zone"], said["service.instance.id"]) == ("mine", "z1", "w1")
    (span,) = collector.spans
    assert span.name == "POST /v1/embeddings" and span.trace_id == TRACE.to_bytes(16, "big")
    assert span.parent_span_id == SPAN.to_bytes(8, "big")


def test_a_collector_that_does_not_answer_holds_no_end_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        traces = Traces.of(f"http://127.0.0.1:{silent.getsockname()[1]}", "w1")
        one = Served("/v1/embeddings")
        one.journey = Journey(trace=traces.begin([]))
        one.end("", "ok")
        traces([one])
        began_s = time.monotonic()
        traces.close()
        assert LAST_SPANS_S <= time.monotonic() - began_s < LAST_SPANS_S + 1
        eventually(lambda: not any(thread.name == "last spans" for thread in threading.enumerate()), within_s=10)


def test_switched_off_nothing_of_it_is_imported() -> None:
    program = (
        "import sys, os; os.environ['EVENHAND_REDIS_URL'] = 'redis://127.0.0.1:1/0'; import app.main; app.main.app;"
        # redis-py imports the metrics of OpenTelemetry for itself where they are installed.
        "ours = ('opentelemetry.sdk.trace', 'opentelemetry.exporter', 'app.metrics.traces', 'rich');"
        "print([name for name in sys.modules if name.startswith(ours)])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ran.stdout == "[]\n", ran.stderr


def test_a_collector_that_is_away_is_told_of_once_a_minute() -> None:
    now_s = [100.0]
    quiet = OnceAMinute(lambda: now_s[0])
    record = logging.makeLogRecord({"msg": "away"})
    passed = []
    for at_s in (100.0, 100.1, 159.9, 160.0, 160.1, 221.0):
        now_s[0] = at_s
        passed.append(quiet.filter(record))
    assert passed == [True, False, False, True, False, True]
    Traces.of("http://127.0.0.1:9", "w1").close()
    for name in LOUD:
        assert any(isinstance(one, OnceAMinute) for one in logging.getLogger(name).filters)
