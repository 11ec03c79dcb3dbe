"""Simulated engines of split serving for tests: NIXL, Mooncake, SGLang; and a test's part of a deployment with them.

floor.engines("prefill", 2, ttft_s=0.1)      # registered, with their bootstrap ports, and ready
floor.chat(stream=True)                      # one request
floor.close()                                # nothing held, no count, nobody was asked for what is not in the protocol
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import re
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tests.support import load
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.loop import LoopThread
from tests.support.quiet import quiet_check
from tests.support.redis import Space
from tests.support.wait import eventually
from workers.engine.http import Record
from workers.engine.mooncake import MooncakeEngine
from workers.engine.nixl import NixlEngine
from workers.engine.pd import Fabric, PdEngine
from workers.engine.pd_answers import PdKnobs
from workers.engine.pd_rules import Body, Leg, Protocol
from workers.engine.rules import parse
from workers.engine.sglang import SglangEngine

ROLE_OF: dict[Leg, str] = {"prefill": "Prefill", "decode": "Decode"}
KINDS: dict[Protocol, type[PdEngine]] = {"nixl": NixlEngine, "mooncake": MooncakeEngine, "sglang": SglangEngine}

_bootstrap_ports = itertools.count(20001)  # of SGLang: nobody listens there, but no two are the same


class PdVllmEngine(SimulatedEngine):
    """One engine in the loop of the tests.

    engine.set(status=500, lease_s=1)            # the knobs of `workers.engine.pd_answers.PdKnobs`
    engine.set_bootstrap(status=503)             # those of a Mooncake prefill engine's bootstrap server
    engine.pd.recomputed, .expired, .engine_ids  # its books
    """

    def __init__(
        self,
        protocol: Protocol,
        leg: Leg,
        fabric: Fabric,
        *,
        loop: LoopThread,
        bootstrap_port: int | None = None,
        **knobs: Any,
    ) -> None:
        # Not SimulatedEngine's own __init__: it would make an engine without books.
        self._own_loop = None
        self._loop = loop
        self.terminated = 0
        self._closed = False
        self.leg: Leg = leg
        if bootstrap_port is None and protocol == "sglang":
            bootstrap_port = next(_bootstrap_ports)
        port: dict[str, Any] = {} if bootstrap_port is None else {"bootstrap_port": bootstrap_port}
        self.pd = KINDS[protocol](leg, fabric, PdKnobs(**knobs), **port)
        self._engine = self.pd
        self.start()

    @property
    def bootstrap_port(self) -> int | None:
        """To be registered with; None where the role or the protocol has none."""
        if self.leg == "decode":
            return None
        if isinstance(self.pd, MooncakeEngine):
            assert self.pd.bootstrap is not None
            return self.pd.bootstrap.port
        return self.pd.bootstrap_port if isinstance(self.pd, SglangEngine) else None

    @property
    def bodies(self) -> list[Body]:
        """Of the inference requests so far."""
        return [parse(record.body) for record in self.requests]

    @property
    def queries(self) -> list[Record]:
        """What the bootstrap server was asked."""
        assert isinstance(self.pd, MooncakeEngine) and self.pd.bootstrap is not None
        return list(self.pd.bootstrap.probes)

    @property
    def held(self) -> int:
        return self.pd.held

    def set_bootstrap(self, **knobs: Any) -> None:
        assert isinstance(self.pd, MooncakeEngine) and self.pd.bootstrap is not None
        self._loop.run(self.pd.bootstrap.apply(**knobs))  # type: ignore[union-attr]

    def restart(self) -> None:
        """Crash and come back at once: new engine ids, nothing kept."""
        self.crash()
        self.start()

    def aborted_since(self, instant_s: float, *, within_s: float = 1.0) -> bool:
        """Every request that it got was aborted, not later than that after `instant_s`."""
        records = self.requests
        return bool(records) and all(r.aborted_s is not None and r.aborted_s - instant_s <= within_s for r in records)


class PdFloor:
    """A model of its own, engines of one protocol that serve it, and what is asked of them.

    Args:
        protocol: that of the deployment, too.
    """

    def __init__(self, space: Space, masters: Sequence[Deployment], loop: LoopThread, protocol: Protocol) -> None:
        self.space = space
        self.masters = list(masters)
        self.protocol: Protocol = protocol
        self.fabric = Fabric()
        self.model = f"model-{secrets.token_hex(4)}"
        self.made: list[PdVllmEngine] = []
        self._loop = loop

    @property
    def deployment(self) -> Deployment:
        return self.masters[0]

    @property
    def urls(self) -> list[str]:
        return [master.url for master in self.masters]

    # --- engines

    def engines(
        self, leg: Leg, count: int = 1, *, ready: bool = True, register: bool = True, **knobs: Any
    ) -> list[PdVllmEngine]:
        """Started, registered in this order, and ready for all masters."""
        options = {"models": (self.model,)} | knobs
        made = [PdVllmEngine(self.protocol, leg, self.fabric, loop=self._loop, **options) for _ in range(count)]
        self.made += made
        if register:
            self.register(*made, ready=ready)
        return made

    def pair(
        self, *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
    ) -> tuple[PdVllmEngine, PdVllmEngine]:
        """One prefill and one decode engine; of prompts they count differently, so that usage can be told apart."""
        (p,) = self.engines("prefill", ready=False, **(prefill or {}))
        (d,) = self.engines("decode", ready=False, **({"prompt_tokens": 13, "chunks": 3} | (decode or {})))
        self.wait_until_ready(p, d)
        return p, d

    def register(self, *engines: PdVllmEngine, ready: bool = True, port: bool = True) -> None:
        """`port`: with its bootstrap port; without, the deployment's --bootstrap-port must be it."""
        for engine in engines:
            more = {"bootstrap_port": engine.bootstrap_port} if port and engine.bootstrap_port is not None else {}
            key = engine.knobs.key or None
            self.deployment.add(engine, ready=False, role=ROLE_OF[engine.leg], key=key, **more)
        if ready:
            self.wait_until_ready(*engines)

    def wait_until_ready(self, *engines: PdVllmEngine) -> None:
        for master in self.masters:
            master.wait_for_state("ready", *engines)

    def remove(self, engine: PdVllmEngine) -> None:
        reply = self.deployment.post("/nodes/remove", {"url": engine.url})
        assert reply.status == 200, reply

    def of(self, leg: Leg) -> list[PdVllmEngine]:
        return [engine for engine in self.made if engine.leg == leg]

    # --- requests

    def chat(self, **options: Any) -> load.Answer:
        """One request to the first master; options as in `load.chat`."""
        return asyncio.run(load.chat(self.urls[0], **({"model": self.model} | options)))

    async def many(self, n: int, **options: Any) -> list[load.Answer]:
        return await load.many(self.urls, n, **({"model": self.model} | options))

    # --- state

    def counts(self, *engines: PdVllmEngine) -> list[int]:
        """Unfinished of each in Redis, read in one command."""
        urls = [engine.url for engine in engines or self.made]
        return [int(n or 0) for n in self.space.client.hmget(self.space.key("unfinished"), urls)]

    def held(self) -> dict[str, int]:
        """What engines hold still, by url; and the meetings that one leg waits in."""
        found = {repr(engine.pd): engine.held for engine in self.made if engine.held}
        return found | ({"meetings": len(self.fabric.meetings)} if self.fabric.meetings else {})

    def violations(self) -> list[str]:
        return [line for engine in self.made for line in engine.pd.violations]

    def forget_violations(self) -> list[str]:
        """Those so far, which were wanted."""
        found = self.violations()
        for engine in self.made:
            engine.pd.violations.clear()
        return found

    def nothing_held(self, within_s: float = 2.0) -> None:
        def check() -> bool:
            held = self.held()
            assert not held, f"still held: {held}"
            return True

        eventually(check, within_s=within_s)

    def quiet(self, within_s: float = 2.0) -> None:
        """No count, nothing in flight, nothing held, no key but those that may stay."""
        self.nothing_held(within_s)
        quiet_check(self.space, engines=self.made, within_s=within_s)

    def close(self) -> None:
        """Quiet, no engine was asked for what is not in the protocol, and no node of the test stays."""
        try:
            self.quiet()
            assert not self.violations(), self.violations()
        finally:
            for engine in self.made:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    self.deployment.post("/nodes/remove", {"url": engine.url})
                engine.close()


class Leaving:
    """A client that asks and closes its connection when told to."""

    def __init__(self, floor: PdFloor, **fields: Any) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", floor.deployment.port, timeout=10)
        messages = [{"role": "user", "content": "hello"}]
        body = json.dumps({"model": floor.model, "messages": messages, **fields})
        self._connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})

    def leave(self) -> float:
        """When it left."""
        self._connection.close()
        return time.monotonic()


class FullListener:
    """Takes the place of an engine that does not listen: a connection to it is neither made nor refused."""

    def __init__(self, port: int) -> None:
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", port))
        self._listener.listen(0)
        self._waiting = [socket.socket() for _ in range(4)]  # one more than are queued; the rest never get through
        for one in self._waiting:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))

    def close(self) -> None:
        for one in [*self._waiting, self._listener]:
            one.close()


USAGE = re.compile(rb'"usage":\{(?:[^{}]|\{[^{}]*\})*\}')


def without_usage(body: bytes) -> bytes:
    """Every byte but those of the usage object."""
    return USAGE.sub(b'"usage":', body)


def usage_of(answer: load.Answer) -> Body:
    """Of an answer, or of the last event of a stream that has one."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        found: Body = answer.json()["usage"]
        return found
    told: list[Body] = [event["usage"] for _, event in answer.chunks() if event.get("usage")]
    return told[-1]


def timings(answer: load.Answer) -> dict[str, float]:
    """Server-Timing: {stage: ms}."""
    found = {}
    for entry in answer.headers["server-timing"].split(","):
        name, _, dur = entry.strip().partition(";dur=")
        found[name] = float(dur)
    return found


def took_s(answer: load.Answer) -> float:
    assert answer.finished_s is not None
    return answer.finished_s - answer.started_s


@contextlib.contextmanager
def pd_floor(space: Space, masters: Sequence[Deployment], loop: LoopThread, protocol: Protocol) -> Iterator[PdFloor]:
    """Closed properly if the test went well; else what it left is taken away all the same."""
    floor = PdFloor(space, masters, loop, protocol)
    try:
        yield floor
    except BaseException:
        with contextlib.suppress(AssertionError):
            floor.close()
        raise
    floor.close()
