"""OpenTelemetry: a span for each request, and below it one for each node that was taken, each leg, and the relay.

Owns what spans say and where they go. Imported only where traces are on: the libraries are an extra. Spans are made
when a request is over, from its journey, together with the others of that tenth of a second; only their ids are drawn
while it runs. Prompts, answers and keys are in none of them. It must not know Redis, or how a request is served.

Source: OpenTelemetry semantic conventions 1.41, HTTP spans and GenAI client spans.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Self
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from app import __version__
from app.errors import Headers
from app.journey import Journey, Leg
from app.metrics.figures import ROUTES, Served, text_of
from app.traceparent import Trace, new_span_id, new_trace_id, read_parent

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
}
PROVIDER = "openai"
"""Whose API is spoken. The conventions have a name for no engine that is run by oneself."""
NO_FAULT = ("ok", "client_error", "aborted")
"""Outcomes that are not the server's fault, so that its span is none of an error."""
LAST_SPANS_S = 2.0
LOUD = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")
"""The library's loggers that tell of a collector that takes no spans."""
"""How long a worker that stops waits for the collector to take the last spans."""
SCOPE = InstrumentationScope("evenhand", __version__)

Attributes = dict[str, str | int | float]


class OnceAMinute(logging.Filter):
    """Lets one line a minute through: of a collector that is away the library tells four times a batch."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._until_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = self._clock()
        if now_s < self._until_s:
            return False
        self._until_s = now_s + 60
        return True


class Traces:
    """One per worker: `begin` a request's trace; told of those that have ended, by `Figures.on_ended`."""

    def __init__(self, processor: SpanProcessor, *, resource: Resource, sampler: Sampler) -> None:
        self._processor = processor
        self._resource = resource
        self._sampler = sampler

    def __repr__(self) -> str:
        return f"<Traces {self._sampler.get_description()}>"

    @classmethod
    def of(cls, endpoint: str, worker: str) -> Self:
        """To the collector at `endpoint`; the rest as OTEL_* variables say."""
        ours = {"service.name": "evenhand", "service.version": __version__, "service.instance.id": worker}
        resource = Resource.create(ours | dict(OTELResourceDetector().detect().attributes))
        exporter = OTLPSpanExporter(traces_url(endpoint))
        for name in LOUD:
            logging.getLogger(name).addFilter(OnceAMinute())
        return cls(
            BatchSpanProcessor(exporter), resource=resource, sampler=TracerProvider(shutdown_on_exit=False).sampler
        )

    def begin(self, headers: Headers) -> Trace:
        """The span of a request: below its client's where that has one, and recorded if that is."""
        parent = read_parent(headers)
        context: Context | None = None
        if parent is not None:
            flags = TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT)
            remote = SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
            context = set_span_in_context(NonRecordingSpan(remote), Context())
        trace_id = parent.trace_id if parent is not None else new_trace_id()
        decision = self._sampler.should_sample(context or Context(), trace_id, "POST", SpanKind.SERVER).decision
        return Trace(
            trace_id, new_span_id(), parent.span_id if parent is not None else 0, decision is Decision.RECORD_AND_SAMPLE
        )

    def __call__(self, ended: list[Served]) -> None:
        for served in ended:
            journey = served.journey
            if journey is not None and journey.trace is not None and journey.trace.sampled:
                journey.settle(served.ended_s)
                for span in _Spans(served, journey, journey.trace, self._resource).all():
                    self._processor.on_end(span)

    def close(self) -> None:
        """Send what is left, in the background, for `LAST_SPANS_S` at most: a collector that hangs holds nobody up."""
        sending = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(LAST_SPANS_S)


class _Spans:
    """Those of one request."""

    def __init__(self, served: Served, journey: Journey, trace: Trace, resource: Resource) -> None:
        self._served = served
        self._journey = journey
        self._trace = trace
        self._resource = resource
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        path = served.path.rstrip("/")
        # Outside /v1 only a few paths are forwarded, by name.
        self._route = path if path in ROUTES or not path.startswith("/v1/") else "/v1/{path}"
        self._genai: Attributes = {}
        if path in OPERATIONS:
            self._genai = {"gen_ai.operation.name": OPERATIONS[path], "gen_ai.provider.name": PROVIDER}
            if served.model:
                self._genai["gen_ai.request.model"] = text_of(served.model)

    def all(self) -> Iterator[ReadableSpan]:
        yield self._request()
        for tried in self._journey.tries:
            yield self._span(
                "acquire",
                tried.at_s,
                tried.at_s + tried.took_s,
                {"evenhand.node": tried.node} | ({"evenhand.stage": tried.stage} if tried.stage else {}),
            )
        for leg in self._journey.legs:
            yield self._leg(leg)
        if self._trace.relay_at_s:
            chunks: Attributes = {"evenhand.chunks": self._served.chunks} if self._served.chunks else {}
            yield self._span("relay", self._trace.relay_at_s, self._served.ended_s, chunks)

    def _request(self) -> ReadableSpan:
        served = self._served
        attributes: Attributes = {
            "http.request.method": "POST",
            "http.route": self._route,
            "url.path": text_of(served.path),
            "http.request.body.size": served.bytes_in,
            "http.response.body.size": served.bytes_out,
            "evenhand.request_id": served.request.decode("latin-1"),
            "evenhand.outcome": str(served.outcome),
            **self._genai,
        }
        if served.status is not None:
            attributes["http.response.status_code"] = served.status
        if served.client:
            attributes["client.address"] = served.client[0]
        if served.outcome != "ok":
            attributes["error.type"] = str(served.outcome)
        return self._span(
            f"POST {self._route}",
            served.began_s,
            served.ended_s,
            attributes,
            kind=SpanKind.SERVER,
            failed=served.outcome not in NO_FAULT,
            span_id=self._trace.span_id,
            parent_id=self._trace.parent_id,
        )

    def _leg(self, leg: Leg) -> ReadableSpan:
        parts = urlsplit(leg.node)
        fault = leg.error or (str(leg.status) if leg.status is not None and leg.status >= 400 else None)
        attributes: Attributes = {
            "http.request.method": "POST",
            "server.address": parts.hostname or "",
            "server.port": parts.port or (443 if parts.scheme == "https" else 80),
            "url.full": leg.node + text_of(self._served.path),
            "evenhand.stage": leg.stage,
            **self._genai,
        }
        if leg.status is not None:
            attributes["http.response.status_code"] = leg.status
        if fault:
            attributes["error.type"] = fault
        operation, model = self._genai.get("gen_ai.operation.name"), self._genai.get("gen_ai.request.model")
        name = f"{operation} {model}" if operation and model else "POST"
        return self._span(
            name,
            leg.began_s,
            leg.began_s + leg.seconds,
            attributes,
            kind=SpanKind.CLIENT,
            failed=fault is not None,
            span_id=leg.span_id,
        )

    def _span(
        self,
        name: str,
        began_s: float,
        ended_s: float,
        attributes: Mapping[str, str | int | float],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        failed: bool = False,
        span_id: int = 0,
        parent_id: int | None = None,
    ) -> ReadableSpan:
        parent_id = self._trace.span_id if parent_id is None else parent_id
        return ReadableSpan(
            name,
            context=self._context(span_id or new_span_id()),
            parent=self._context(parent_id, is_remote=kind is SpanKind.SERVER) if parent_id else None,
            resource=self._resource,
            attributes=attributes,
            kind=kind,
            status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
            start_time=self._epoch_ns + round(began_s * 1e9),
            end_time=self._epoch_ns + round(ended_s * 1e9),
            instrumentation_scope=SCOPE,
        )

    def _context(self, span_id: int, *, is_remote: bool = False) -> SpanContext:
        return SpanContext(self._trace.trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED))


def traces_url(endpoint: str) -> str:
    """As OTEL_EXPORTER_OTLP_ENDPOINT is read: the path of traces goes behind an address without one."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
