"""What stands in for engines, Redis and the inner use case: a caller with a script, a ledger in memory, a taker."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.balancing import ENCODER_POLICIES, Encoder
from app.dispatch.answer import Answer, EngineRequest, Whole
from app.dispatch.caller import Caller, Leg
from app.dispatch.handover.nixl import Nixl
from app.dispatch.handover.protocol import Protocol
from app.dispatch.prefill_decode import PrefillDecode, SplitRules
from app.errors import EngineRefused, Headers, UpstreamError
from app.nodes import Node, Role, State
from app.store.ledger import Select, Ticket
from app.store.snapshot import Snapshot
from app.upstream.transport import Response, Timeouts

Json = dict[str, Any]
MODEL = "m"
E0, E1, E2, E3 = ENCODERS = tuple(f"http://e{n}:1" for n in range(4))
P0, P1 = "http://p0:1", "http://p1:1"
D0, D1 = "http://d0:1", "http://d1:1"
HEADERS: Headers = [(b"content-type", b"application/json"), (b"x-request-id", b"parent")]


class FakeRegistry:
    """A registry in memory; changed by `set`."""

    def __init__(self, *nodes: Node) -> None:
        self.snapshot = Snapshot(1, {node.url: node for node in nodes})
        self.refusals: list[str] = []

    def refused(self, url: str) -> None:
        self.refusals.append(url)

    def set(self, *nodes: Node, gone: tuple[str, ...] = (), keys: dict[str, str] | None = None) -> None:
        left = {url: node for url, node in self.snapshot.nodes.items() if url not in gone}
        self.snapshot = Snapshot(self.snapshot.version + 1, left | {node.url: node for node in nodes}, keys)


def nodes_of(
    encoders: int = 3, *, prefill: int = 0, decode: int = 1, hybrid: int = 0, state: State = State.READY
) -> list[Node]:
    wanted = [(f"http://e{n}:1", Role.Encode) for n in range(encoders)]
    wanted += [(f"http://p{n}:1", Role.Prefill) for n in range(prefill)]
    wanted += [(f"http://d{n}:1", Role.Decode) for n in range(decode)]
    wanted += [(f"http://h{n}:1", Role.Hybrid) for n in range(hybrid)]
    return [Node(url, role=role, models=(MODEL,), state=state, order=n) for n, (url, role) in enumerate(wanted)]


class FakeLedger:
    """Counts in memory, by the policies' own pure functions; real tickets.

    `latencies` counts good releases, `rows_ended` those that end a row of failures.
    """

    learns = True

    def __init__(self, registry: FakeRegistry) -> None:
        self._registry = registry
        self.counts: Counter[str] = Counter()
        self.taken: Counter[str] = Counter()
        self.latencies: Counter[str] = Counter()
        self.learned: list[tuple[str, float]] = []  # url, work
        self.rows_ended: Counter[str] = Counter()
        self.cursor = 0
        self.steps: list[int] = []
        self.waits: Callable[[], Awaitable[None]] | None = None

    async def acquire(self, select: Select, *, again: bool = False) -> Ticket:
        if self.waits is not None:
            await self.waits()
        return self.ticket(min(select(self._registry.snapshot).urls, key=lambda url: self.counts[url]))

    async def acquire_each(self, *selects: Select, again: bool = False) -> list[Ticket]:
        if self.waits is not None:
            await self.waits()
        pools = [select(self._registry.snapshot) for select in selects]
        return [self.ticket(min(pool.urls, key=lambda url: self.counts[url])) for pool in pools]

    async def acquire_encoders(self, select: Select, items: int) -> list[Ticket]:
        if self.waits is not None:
            await self.waits()
        urls = select(self._registry.snapshot).urls
        self.steps.append(items)
        indices = ENCODER_POLICIES["round_robin"]([Encoder(1.0) for _ in urls], self.cursor, items)
        self.cursor = (self.cursor + items) % len(urls)
        return [self.ticket(urls[index]) for index in indices]

    def ticket(self, url: str) -> Ticket:
        self.counts[url] += 1
        self.taken[url] += 1
        return Ticket(self, url)  # type: ignore[arg-type]

    def _learn(self, url: str, work: float, latency_s: float) -> None:
        self.learned.append((url, work))

    def _release(self, url: str, latency_s: float | None, *, answered: bool = False) -> None:
        assert self.counts[url] > 0, f"{url} was given back more often than taken"
        self.counts[url] -= 1
        self.latencies[url] += latency_s is not None
        self.rows_ended[url] += answered

    @property
    def unfinished(self) -> dict[str, int]:
        return {url: count for url, count in self.counts.items() if count}


class FakeFigures:
    """Counts in memory: what happened how often, and which stages took place at which node."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.stages: list[tuple[str, str]] = []

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def took(self, url: str, stage: str, seconds: float) -> None:
        assert seconds >= 0
        self.stages.append((stage, url))


class FakeHanding:
    """Hand-overs that go on, by pair."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def begin(self, prefill: str, decode: str) -> None:
        self.counts[f"{prefill}|{decode}"] += 1

    def end(self, prefill: str, decode: str) -> None:
        assert self.counts[f"{prefill}|{decode}"] > 0, f"{prefill} has handed over more often than it began"
        self.counts[f"{prefill}|{decode}"] -= 1


class FakeResponse:
    """An engine's answer that has a status; `closed` once somebody is done with it."""

    def __init__(self, status: int = 200, body: bytes = b"{}", headers: Headers | None = None) -> None:
        self.status = status
        self.headers = headers or [(b"content-type", b"application/json")]
        self.body = [body] if body else []
        self.closed = 0

    async def read(self) -> bytes:
        return self.body.pop(0) if self.body else b""

    def close(self) -> None:
        self.closed += 1


@dataclass
class Call:
    """One call that an engine got, decoded."""

    url: str
    request: EngineRequest = field(repr=False)
    leg: Leg = Leg.WHOLE
    cancelled: bool = False

    @property
    def body(self) -> Json:
        body: Json = json.loads(self.request.body)
        return body

    @property
    def id(self) -> str:
        (found,) = (value for name, value in self.request.headers if name == b"x-request-id")
        return found.decode()

    @property
    def parts(self) -> list[Json]:
        parts: list[Json] = self.body["messages"][0]["content"]
        return parts

    @property
    def transfer_ids(self) -> list[str]:
        return [item["transfer_id"] for item in self.body["ec_transfer_params"]["ec_items"]]


Behaviour = Callable[[Call], Any]
"""What an engine does with a call: bytes or a (status, bytes) are its answer, an exception is raised, an
awaitable is waited for and then looked at the same way. None: the good answer."""


class FakeCaller:
    """Engines by URL. `calls` in the order of their beginning; `behaviour[url]` or `[url, n]` for the n-th call."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.behaviour: dict[str | tuple[str, int], Behaviour] = {}
        self.running: Counter[str] = Counter()
        self.most = 0
        self.responses: list[FakeResponse] = []
        self.limits: dict[str, int] = {}
        self.stages: list[tuple[str, str]] = []  # as calls name themselves
        self.timeouts = Timeouts(0, 0, 0, 0)
        self.kind = b"application/json"  # of answers that are read as they come
        self.broken: list[tuple[str, str]] = []

    async def fetch(
        self, url: str, request: EngineRequest, *, limit_bytes: int, leg: Leg = Leg.WHOLE, stage: str = "request"
    ) -> Whole:
        self.stages.append((stage, url))
        self.limits[url] = limit_bytes
        status, body = await self._answer(url, request, leg)
        return Whole(url, status, [(b"content-type", b"application/json"), (b"x-engine", b"yes")], body)

    async def send(
        self, url: str, request: EngineRequest, leg: Leg = Leg.WHOLE, *, stage: str = "request"
    ) -> FakeResponse:
        self.stages.append((stage, url))
        status, body = await self._answer(url, request, leg)
        self.responses.append(FakeResponse(status, body, [(b"content-type", self.kind)]))
        return self.responses[-1]

    def broke(self, url: str, error: UpstreamError) -> None:
        self.broken.append((url, type(error).__name__))

    async def read(self, url: str, response: Response) -> bytes:
        try:
            return await response.read()
        except UpstreamError as e:
            self.broke(url, e)
            raise

    read_refusal = Caller.read_refusal

    async def _answer(self, url: str, request: EngineRequest, leg: Leg) -> tuple[int, bytes]:
        call = Call(url, request, leg)
        nth = sum(other.url == url for other in self.calls)
        self.calls.append(call)
        self.running[url] += 1
        self.most = max(self.most, self.running.total())
        try:
            await asyncio.sleep(0)
            behaviour = self.behaviour.get((url, nth)) or self.behaviour.get(url)
            result = behaviour(call) if behaviour else None
            if isinstance(result, Awaitable):
                result = await result
            if isinstance(result, BaseException):
                raise result
            if result is None:
                result = encoded(call) if "/e" in url else PREFILLED if "/p" in url else b'{"answered":true}'
            return result if isinstance(result, tuple) else (200, result)
        except asyncio.CancelledError:
            call.cancelled = True
            raise
        finally:
            self.running[url] -= 1

    def to(self, *urls: str) -> list[Call]:
        return [call for call in self.calls if call.url in urls]

    @property
    def encodes(self) -> list[Call]:
        return self.to(*ENCODERS)


PARAMS: Json = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "engine-p",
    "remote_request_id": "chatcmpl-1",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 1,
}
PREFILLED = json.dumps(
    {"id": "chatcmpl-1", "choices": [{"finish_reason": "length"}], "kv_transfer_params": PARAMS}
).encode()


def encoded(call: Call, **more: Any) -> bytes:
    """What a good encoder answers: each item under a hash of its own making."""
    entries = {
        "hash-of-" + (part.get("uuid") or part[part["type"]]["url"])[:12]: {
            "metadata": {"image_grid_thw": [[1, 2, 2]]},
            "item_indices": [n],
            "peer_host": call.url,
            **more,
        }
        for n, part in enumerate(call.parts)
    }
    return json.dumps({"id": "x", "choices": [], "ec_transfer_params": entries}).encode()


def refuses(call: Call) -> Exception:
    return EngineRefused(f"engine {call.url} refused the connection")


async def for_ever(call: Call) -> None:
    await asyncio.Event().wait()


def hangs(call: Call) -> Any:
    return for_ever(call)


@dataclass
class FakeHeld:
    """What a fake taker gives: notes what is sent on it."""

    taker: FakeTaker
    url: str
    ticket: Ticket

    async def send(self, request: EngineRequest) -> Answer:
        self.taker.sent.append(request)
        status = self.taker.statuses.pop(0) if self.taker.statuses else 200
        if isinstance(status, Exception):
            self.give_back()
            raise status
        response = FakeResponse(status)
        self.taker.responses.append(response)
        return Answer(response, self.url, (self.ticket,))

    def give_back(self) -> None:
        self.ticket.release(succeeded=False)


class FakeTaker:
    """The inner use case: its nodes in turn, or the one asked for; `statuses` of its answers in order."""

    def __init__(self, ledger: FakeLedger, *urls: str) -> None:
        self._ledger = ledger
        self._urls = urls or (D0,)
        self.statuses: list[int | Exception] = []
        self.takes: list[str | None] = []
        self.retries_500: list[bool] = []
        self.sent: list[EngineRequest] = []
        self.responses: list[FakeResponse] = []

    async def open(self, request: EngineRequest, *, retry_500: bool = True) -> Answer:
        self.retries_500.append(retry_500)
        return await (await self.take(request.model)).send(request)

    async def take(self, model: str, *, only: str | None = None) -> FakeHeld:
        return self._take(self._urls, only)

    async def take_among(self, model: str, urls: Collection[str], *, only: str | None = None) -> FakeHeld:
        return self._take([url for url in self._urls if url in urls], only)

    def _take(self, urls: Sequence[str], only: str | None) -> FakeHeld:
        url = only if only in urls else urls[len(self.takes) % len(urls)]
        self.takes.append(only)
        return FakeHeld(self, url, self._ledger.ticket(url))

    @property
    def bodies(self) -> list[Json]:
        return [json.loads(request.body) for request in self.sent]


class FakeBreakers:
    """Nodes whose connections nobody doubts; who was told of what."""

    def __init__(self) -> None:
        self.failures: list[tuple[str, str]] = []
        self.answers: list[str] = []

    async def select(self, otherwise: Select, model: str, *roles: Role) -> Select:
        return otherwise

    def failed(self, url: str, error: UpstreamError) -> None:
        self.failures.append((url, type(error).__name__))

    def answered(self, url: str) -> None:
        self.answers.append(url)


class FakeBudget:
    """`left`: retries that are affordable; `taken` so far."""

    def __init__(self, left: int = 100) -> None:
        self.left = left
        self.taken = 0

    async def take(self) -> bool:
        if self.taken == self.left:
            return False
        self.taken += 1
        return True


def split_by(
    registry: FakeRegistry,
    ledger: FakeLedger,
    caller: FakeCaller,
    figures: FakeFigures,
    protocol: Protocol | None = None,
    *,
    fallback: bool = False,
    dummy: int | None = None,
    retries: int = 2,
    budget: FakeBudget | None = None,
    handing: FakeHanding | None = None,
) -> PrefillDecode:
    """The use case of split serving among fakes, by NIXL if nothing else is said."""
    parts: Any = {"caller": caller, "figures": figures}
    store: Any = {"registry": registry, "ledger": ledger}
    store |= {"breakers": FakeBreakers(), "budget": budget or FakeBudget(), "handing": handing or FakeHanding()}
    protocol = protocol or Nixl(**parts, lease_s=30, recompute=True)
    return PrefillDecode(**parts, **store, protocol=protocol, rules=SplitRules(fallback, dummy, retries))
