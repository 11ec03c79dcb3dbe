"""Clients of all kinds, and what each of them saw.

A client is a balancer's: a host that refuses the connection is passed over for another one. Nothing else is sent
again, so that a failure that a user would see is counted.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from bench.soak.engine import BIG, MODEL
from tests.support import load
from tests.support.load import Answer

OK, LEFT = "ok", "left"
PATIENCE_S = 30.0
THINK_S = 0.4  # longest pause of a client between two requests
CHUNKS = (4, 40)  # fewest and most that a request asks for
SLOW_BUFFER_BYTES = 16384  # a slow reader's own receive buffer; the system's default would take in everything
SLOW_READ_S = 0.03  # its pause between two reads of 64 KiB

_reused: contextvars.ContextVar[list[bool]] = contextvars.ContextVar("reused")


@dataclass(frozen=True)
class Result:
    """One request. Instants are `time.monotonic()`; `head_s` is None where no answer began."""

    began_s: float
    head_s: float | None
    ended_s: float
    saw: str
    stream: bool
    passed_over: bool  # its first host refused the connection

    @property
    def failed(self) -> bool:
        return self.saw not in (OK, LEFT)


class Load:
    """`clients` closed loops over `urls`; what they do next is drawn from the seed.

    `leaving` is the share of requests whose client leaves at random; `slow` is how many of the clients read slowly.
    Both may be changed while it runs.
    """

    def __init__(self, urls: Sequence[str], *, clients: int, seed: int, leaving: float = 0.0, slow: int = 0) -> None:
        self.urls = list(urls)
        self.leaving = leaving
        self.slow = slow
        self.results: list[Result] = []
        self.running = 0
        self.stopping = False
        self._clients = clients
        self._seed = seed

    def __repr__(self) -> str:
        return f"<Load {len(self.results)} ended, {self.running} running>"

    async def run(self, until_s: float) -> None:
        """Until then, or until `stopping`; then the requests that run end as they may."""
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        slow = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_small_socket)
        async with (
            load.session(keep_alive=True, trace_configs=[trace]) as kept,
            load.session(keep_alive=False) as fresh,
            aiohttp.ClientSession(connector=slow, timeout=aiohttp.ClientTimeout(total=None, sock_connect=10)) as slowly,
            asyncio.TaskGroup() as group,
        ):
            for i in range(self._clients):
                group.create_task(self._client(i, [kept, fresh][i % 2], slowly, until_s))

    async def _client(
        self, i: int, session: aiohttp.ClientSession, slowly: aiohttp.ClientSession, until_s: float
    ) -> None:
        rng = random.Random(f"{self._seed}/client/{i}")
        await asyncio.sleep(rng.uniform(0, THINK_S))
        while time.monotonic() < until_s and not self.stopping:
            self.running += 1
            try:
                self.results.append(await self._request(rng, slowly if i < self.slow else session, i < self.slow))
            finally:
                self.running -= 1
            await asyncio.sleep(rng.uniform(0, THINK_S))

    async def _request(self, rng: random.Random, session: aiohttp.ClientSession, slow: bool) -> Result:
        stream = slow or rng.random() < 0.7
        count = rng.randint(*CHUNKS)
        options: dict[str, Any] = {"stream": stream, "max_tokens": count, "model": MODEL, "within_s": PATIENCE_S}
        leaves_s = rng.uniform(0, 1.5) if rng.random() < self.leaving else None
        if slow:
            options |= {"prompt": BIG, "read_delay_s": SLOW_READ_S}
        hosts = rng.sample(self.urls, len(self.urls))
        began_s, passed_over = time.monotonic(), False
        answer = Answer()
        for url in hosts:
            reused = [False]
            _reused.set(reused)
            answer = await load.chat(url, client=session, leave_after_s=leaves_s, **options)
            if not isinstance(answer.error, aiohttp.ClientConnectorError):
                break
            passed_over = True
        assert answer.finished_s is not None
        saw = what_came(answer, stream=stream, count=None if slow else count, reused=reused[0])
        return Result(began_s, answer.head_s, answer.finished_s, saw, stream, passed_over)


def what_came(answer: Answer, *, stream: bool, count: int | None, reused: bool = False) -> str:
    """In a user's words. `count`: chunks that were asked for; None: the text is not compared."""
    if answer.left:
        return LEFT
    if isinstance(answer.error, TimeoutError):
        return f"nothing more within {PATIENCE_S:.0f} s"
    if isinstance(answer.error, aiohttp.ClientConnectorError):
        return "every host refused"
    if answer.status == 0:
        return "a kept connection closed under the request" if reused else "connection lost, no answer"
    if answer.status != 200:
        return f"{answer.status} {code_of(answer.body)}"
    wanted = None if count is None else "".join(f"token{i} " for i in range(count))
    if not stream:
        if answer.error is not None:
            return "answer cut short"
        return OK if wanted in (None, answer.text) else "WRONG TEXT"
    try:
        events = answer.events()
        text = answer.text if wanted is not None else ""
    except (json.JSONDecodeError, UnicodeDecodeError):
        return "stream cut, no error event"
    if wanted is not None and not wanted.startswith(text):
        return "WRONG TEXT"
    if answer.error is None and events and events[-1] == "[DONE]":
        return OK if wanted in (None, text) else "WRONG TEXT"
    if events and '"error"' in events[-1]:
        return f"stream ended by an error event, {code_of(events[-1].encode())}"
    return "stream cut, no error event"


def code_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "(no error object)"


async def _note_reuse(*_: object) -> None:
    if (found := _reused.get(None)) is not None:
        found[0] = True


def _small_socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
    return made
