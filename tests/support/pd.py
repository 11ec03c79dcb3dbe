"""What the DistServe tests stand on: strict LMDeploy engines, a test's part of a shared deployment, and its end.

Every test ends with the same check (`Floor.close`): no session and no block is held, no engine was asked for what is
not in the protocol, no count is left, and no session stands in the ledger of migrations. The key names are written
out here on purpose: a test must not take them from the code under test.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from app.nodes import Role
from tests.support import load
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.loop import LoopThread
from tests.support.quiet import quiet_check
from tests.support.redis import Space
from tests.support.wait import eventually
from workers.engine.answers import Knobs
from workers.engine.books import Fabric
from workers.engine.http import Record
from workers.engine.lmdeploy import Call, LmdeployEngine, Traits
from workers.engine.rules import parse

__all__ = ["Fabric", "Floor", "Leaving", "PdEngine", "floor_on"]

TRAITS = {field.name for field in fields(Traits)}
CHAT = "/v1/chat/completions"


class PdEngine(SimulatedEngine):
    """A strict engine in the loop of the tests; knobs of the engine and traits of LMDeploy go by one name each.

    prefill = PdEngine(Role.Prefill, fabric, loop=loop, ttft_s=0.1, cache_session_id=False)
    prefill.set(status=500)                      # the knobs of the simulated engine, and the traits
    prefill.fault("p2p_connect", status=500, times=2)
    prefill.restart()                            # its sessions are gone, its links void

    As long as it is not told otherwise (`abort_frees`), a prefill whose client left stays held.
    """

    def __init__(
        self, role: Role, fabric: Fabric, *, loop: LoopThread, host: str = "127.0.0.1", port: int = 0, **options: Any
    ) -> None:
        # Not SimulatedEngine's own __init__: it would make an engine that is not strict.
        self._own_loop = None
        self._loop = loop
        self.terminated = 0
        self._closed = False
        self.role = role
        self.fabric = fabric
        traits = Traits(**({"abort_frees": False} | {k: v for k, v in options.items() if k in TRAITS}))
        knobs = Knobs(**{k: v for k, v in options.items() if k not in TRAITS})
        self.strict = LmdeployEngine(
            role, fabric, knobs, traits, host=host, port=port, on_terminate=self._count_terminate
        )
        self._engine = self.strict
        self.start()

    def set(self, **options: Any) -> None:
        assert self._loop is not None
        traits = {k: v for k, v in options.items() if k in TRAITS}
        if traits:
            self._loop.run(self.strict.change(**traits))
        if len(traits) < len(options):
            super().set(**{k: v for k, v in options.items() if k not in TRAITS})

    def fault(self, call: Call, **how: Any) -> None:
        """How the next calls of `/distserve/<call>` go: status=, delay_s=, body=, times= (-1: for ever)."""
        assert self._loop is not None

        async def work() -> None:
            self.strict.fault(call, **how)

        self._loop.run(work())

    def heal(self) -> None:
        """No fault of /distserve is left."""
        self.strict.faults.clear()

    def restart(self) -> None:
        """As a new process on the same port, which nobody has registered yet."""
        self.crash()
        self.start()

    @property
    def incarnation(self) -> int:
        return self.strict.incarnation

    @property
    def held(self) -> list[int]:
        """Numbers of the sessions that it holds."""
        return list(self.strict.books.sessions)

    @property
    def blocks(self) -> int:
        return self.strict.books.blocks

    @property
    def links(self) -> set[str]:
        """The engines to which it has a link that is true on both sides."""
        return {remote for remote in list(self.strict.links.held) if self.strict.links.true_to(remote) is not None}

    def calls(self, call: Call | None = None) -> list[Any]:
        """(call, body) of every POST to /distserve; with a name, the bodies of that one."""
        made = list(self.strict.calls)
        return made if call is None else [body for name, body in made if name == call]

    @property
    def legs(self) -> list[Record]:
        """Inference requests so far, without the calls of /distserve."""
        return [record for record in self.requests if record.path.startswith("/v1/")]

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [parse(record.body) for record in self.legs]

    @property
    def freed(self) -> list[int]:
        """Numbers that free_cache was called with."""
        return [body["remote_session_id"] for body in self.calls("free_cache")]


class Leaving:
    """A client that asks and closes its connection when told to."""

    def __init__(
        self, deployment: Deployment, model: str, *, path: str = CHAT, prompt: str = "hello", **more: Any
    ) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", deployment.port, timeout=15)
        asked = {"prompt": prompt} if path == "/v1/completions" else {"messages": [user(prompt)]}
        body = json.dumps({"model": model, **asked, **more})
        self._connection.request("POST", path, body, {"content-type": "application/json"})

    def leave(self) -> float:
        """When it left."""
        self._connection.close()
        return time.monotonic()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Floor:
    """A model of its own, the engines that serve it, and what is asked of them.

    Args:
        masters: those over which requests go; management calls go to the first.
    """

    def __init__(
        self, space: Space, masters: Sequence[Deployment], loop: LoopThread, *, fabric: Fabric | None = None
    ) -> None:
        self.space = space
        self.masters = list(masters)
        self.fabric = fabric or Fabric()
        self.model = f"model-{secrets.token_hex(4)}"
        self.made: list[PdEngine] = []
        self.plain: list[SimulatedEngine] = []
        self.clients: list[Leaving] = []
        self._loop = loop

    @property
    def deployment(self) -> Deployment:
        return self.masters[0]

    @property
    def urls(self) -> list[str]:
        return [master.url for master in self.masters]

    # --- engines

    def engines(
        self, role: Role, count: int, *, add: bool = True, ready: bool = True, **options: Any
    ) -> list[PdEngine]:
        made = [
            PdEngine(role, self.fabric, loop=self._loop, **({"models": (self.model,)} | options)) for _ in range(count)
        ]
        self.made += made
        if add:
            self.add(*made, ready=ready)
        return made

    def prefill(self, **options: Any) -> PdEngine:
        return self.engines(Role.Prefill, 1, **options)[0]

    def decode(self, **options: Any) -> PdEngine:
        return self.engines(Role.Decode, 1, **options)[0]

    def pair(self, **options: Any) -> tuple[PdEngine, PdEngine]:
        return self.prefill(**options), self.decode(**options)

    def linked_pair(self, **options: Any) -> tuple[PdEngine, PdEngine]:
        """A pair that has served once, so that nothing but the test's own matter takes time; session 1 is over."""
        made = self.pair(**options)
        assert self.chat().ok
        for engine in made:
            engine.forget()
        return made

    def hybrid(self, **options: Any) -> SimulatedEngine:
        """A plain engine of role Hybrid."""
        engine = SimulatedEngine(loop=self._loop, **({"models": (self.model,)} | options))
        self.plain.append(engine)
        self.deployment.add(engine, role="Hybrid")
        self.wait_until_ready(engine)
        return engine

    def add(self, *engines: PdEngine, ready: bool = True) -> None:
        """Register (again), as the engine itself does when it starts."""
        for engine in engines:
            key = {"key": engine.knobs.key} if engine.knobs.key else {}
            self.deployment.add(engine, ready=False, role=engine.role.name, **key)
        if ready:
            self.wait_until_ready(*engines)

    def wait_until_ready(self, *engines: SimulatedEngine) -> None:
        for master in self.masters:
            master.wait_for_state("ready", *engines, within_s=10)

    def remove(self, engine: SimulatedEngine) -> None:
        reply = self.deployment.post("/nodes/remove", {"url": engine.url})
        assert reply.status == 200, reply

    def of(self, role: Role) -> list[PdEngine]:
        return [engine for engine in self.made if engine.role is role]

    @property
    def prefills(self) -> list[PdEngine]:
        return self.of(Role.Prefill)

    @property
    def decodes(self) -> list[PdEngine]:
        return self.of(Role.Decode)

    # --- requests

    def chat(self, **options: Any) -> load.Answer:
        """One request to the first master; other options as in `load.chat`."""
        return asyncio.run(load.chat(self.urls[0], **({"model": self.model} | options)))

    def complete(self, **options: Any) -> load.Answer:
        return self.chat(path="/v1/completions", **options)

    def many(self, n: int, **options: Any) -> list[load.Answer]:
        """Over all masters, all at once unless `concurrency` says otherwise."""
        return asyncio.run(load.many(self.urls, n, **({"model": self.model} | options)))

    def leaving(self, **options: Any) -> Leaving:
        """A client of the first master; it has left at the latest when the test ends."""
        self.clients.append(Leaving(self.deployment, self.model, **options))
        return self.clients[-1]

    # --- state

    def counts(self, *engines: SimulatedEngine) -> list[int]:
        """Unfinished of each in Redis, read in one command."""
        urls = [engine.url for engine in engines or [*self.made, *self.plain]]
        return [int(n or 0) for n in self.space.client.hmget(self.space.key("unfinished"), urls)]

    def hash(self, name: str) -> dict[str, str]:
        found: dict[str, str] = self.space.cli("HGETALL", self.space.key(name))
        return found

    def migrations(self) -> set[tuple[str, int]]:
        """(prefill, session) of the ledger of sessions under migration."""
        pairs = [field.rpartition("|") for field in self.hash("migrations")]
        return {(url, int(number)) for url, _, number in pairs}

    def handovers(self, name: str) -> int:
        """One of the counts of hand-overs."""
        return int(self.hash("handovers").get(name, 0))

    def link(self, prefill: SimulatedEngine, decode: SimulatedEngine) -> dict[str, Any] | None:
        """The entry of the pair in Redis."""
        text = self.space.cli("HGET", self.space.key("links"), f"{prefill.url}|{decode.url}")
        return None if text is None else json.loads(text)

    def linked(self, prefill: SimulatedEngine, decode: SimulatedEngine) -> bool:
        entry = self.link(prefill, decode)
        return entry is not None and entry["state"] == "connected"

    def table(self, master: Deployment | None = None) -> dict[str, Any]:
        """`GET /distserve/links`."""
        reply = (master or self.deployment).get("/distserve/links")
        assert reply.status == 200, reply
        found: dict[str, Any] = reply.json()
        return found

    def made_once(self) -> None:
        """Every link that there is was made once for its pair and incarnations."""
        assert set(self.fabric.links_made.values()) <= {1}, self.fabric.links_made

    def check(self) -> None:
        """No session, no block, no entry of the ledger, and nothing outside the protocol.

        Raises:
            AssertionError: with all that is wrong.
        """
        wrong = [f"{engine.url} holds {engine.held}" for engine in self.made if engine.held or engine.blocks]
        wrong += [f"in the ledger: {one}" for one in sorted(self.migrations())]
        assert not self.fabric.violations, self.fabric.violations[:10]
        assert not wrong, wrong

    def settle(self, within_s: float = 3.0) -> None:
        """Wait for the state that every test ends with."""
        quiet_check(self.space, engines=[*self.made, *self.plain], within_s=within_s)
        eventually(lambda: self.check() is None, within_s=within_s)

    def close(self) -> None:
        for client in self.clients:
            client.leave()
        try:
            self.settle()
        finally:
            for engine in [*self.made, *self.plain]:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    self.deployment.post("/nodes/remove", {"url": engine.url})
                engine.close()


@contextlib.contextmanager
def floor_on(
    space: Space, masters: Sequence[Deployment], loop: LoopThread, *, kind: type[Floor] = Floor, **options: Any
) -> Iterator[Floor]:
    """Closed properly if the test went well; else what it left is taken away all the same."""
    floor = kind(space, masters, loop, **options)
    try:
        yield floor
    except BaseException:
        with contextlib.suppress(AssertionError):
            floor.close()
        raise
    floor.close()


def server_timing(answer: load.Answer) -> dict[str, float]:
    """Stages of the Server-Timing header in ms."""
    entries = [part.strip().partition(";dur=") for part in answer.headers.get("server-timing", "").split(",")]
    return {name: float(value) for name, _, value in entries if name}


def openai_error(answer: load.Answer, status: int) -> dict[str, Any]:
    """The error object of an answer that must have this status."""
    assert answer.status == status, (answer.status, answer.error, answer.body)
    error: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error), error
    return error
