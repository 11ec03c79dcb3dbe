"""What the EPD tests stand on: a test's part of a shared deployment, media items, and the order that Redis saw."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tests.support import load
from tests.support.deployment import Deployment
from tests.support.epd import ROLE_OF, EpdEngine, Fabric, Part
from tests.support.loop import LoopThread
from tests.support.quiet import quiet_check
from tests.support.redis import Space

# --- media items


def image(name: object, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"http://media/{name}.png"}, **more}


def video(name: object, **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": f"http://media/{name}.mp4"}, **more}


def audio(name: object, **more: Any) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": f"http://media/{name}.mp3"}, **more}


def spoken(data: str, **more: Any) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}, **more}


def text(words: str = "what is this?") -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def pictures(count: int, name: object = "") -> list[dict[str, Any]]:
    """A message with `count` images that no other call of this makes."""
    name = name or secrets.token_hex(4)
    return user(text(), *(image(f"{name}-{i}") for i in range(count)))


# --- the floor


class Floor:
    """A model of its own, strict engines that serve it, and what is asked of them.

    Args:
        masters: none yet where the engines are named at their start (`engines(register=False)`, then `open`).
        headers: of management calls, where they need a key.
    """

    def __init__(
        self,
        space: Space,
        masters: Sequence[Deployment],
        loop: LoopThread,
        *,
        fabric: Fabric | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.space = space
        self.masters = list(masters)
        self.fabric = fabric or Fabric()
        self.model = f"model-{secrets.token_hex(4)}"
        self.headers = dict(headers or {})
        self.made: list[EpdEngine] = []
        self._loop = loop

    @property
    def deployment(self) -> Deployment:
        return self.masters[0]

    @property
    def urls(self) -> list[str]:
        return [master.url for master in self.masters]

    def open(self, *masters: Deployment) -> None:
        """Deployments that name the engines themselves; all are ready when this returns."""
        self.masters += masters
        self.wait_until_ready(*self.made)

    # --- engines

    def engines(
        self,
        part: Part,
        count: int,
        *,
        role: str | None = None,
        ready: bool = True,
        speeds: Sequence[float] = (),
        key: str | None = None,
        register: bool = True,
        **knobs: Any,
    ) -> list[EpdEngine]:
        """Started, registered in this order, and ready for all masters."""
        options = {"models": (self.model,)} | ({"key": key} if key else {}) | knobs
        made = [EpdEngine(part, self.fabric, loop=self._loop, **options) for _ in range(count)]
        self.made += made
        if not register:
            return made
        for i, engine in enumerate(made):
            speed = {"speed": speeds[i]} if speeds else {}
            self.deployment.add(engine, ready=False, role=role or ROLE_OF[part], key=key, headers=self.headers, **speed)
        if ready:
            self.wait_until_ready(*made)
        return made

    def encoders(self, count: int, **more: Any) -> list[EpdEngine]:
        return self.engines("encode", count, **more)

    def one(self, part: Part, **more: Any) -> EpdEngine:
        return self.engines(part, 1, **more)[0]

    def wait_until_ready(self, *engines: EpdEngine) -> None:
        for master in self.masters:
            master.wait_for_state("ready", *engines, headers=self.headers)

    def remove(self, engine: EpdEngine, *, drain: bool = False) -> None:
        query = "?drain=true&timeout_s=20" if drain else ""
        reply = self.deployment.post(f"/nodes/remove{query}", {"url": engine.url}, headers=self.headers)
        assert reply.status == 200, reply

    def of(self, part: Part) -> list[EpdEngine]:
        return [engine for engine in self.made if engine.part == part]

    # --- requests

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> load.Answer:
        """One request to the first master; other options as in `load.chat`."""
        return asyncio.run(load.chat(self.urls[0], **({"model": self.model, "messages": messages} | options)))

    async def many(self, n: int, **options: Any) -> list[load.Answer]:
        return await load.many(self.urls, n, **({"model": self.model} | options))

    # --- state

    def counts(self, *engines: EpdEngine) -> list[int]:
        """Unfinished of each in Redis, read in one command."""
        urls = [engine.url for engine in engines or self.made]
        return [int(n or 0) for n in self.space.client.hmget(self.space.key("unfinished"), urls)]

    def cursor(self) -> int:
        return int(self.space.cli("GET", self.space.key("encoder_cursor")) or 0)

    def turn_to(self, position: int) -> None:
        """Have the cursor there by requests of one image, and forget them."""
        for _ in range(20):
            if self.cursor() == position:
                break
            assert self.chat(pictures(1)).ok
        assert self.cursor() == position, "it does not move on by one"
        for engine in self.made:
            engine.forget()

    def quiet(self, within_s: float = 2.0) -> None:
        """Rule Q: no count, nothing in flight, no key but those that may stay."""

        quiet_check(self.space, engines=self.made, within_s=within_s)

    def close(self) -> None:
        """Quiet, no engine was asked for what is not in the protocol, and no node of the test stays."""
        try:
            self.quiet()
            assert not self.fabric.violations, self.fabric.violations
        finally:
            for engine in self.made:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    self.deployment.post("/nodes/remove", {"url": engine.url}, headers=self.headers)
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


# --- the order that Redis saw

ARGUMENT = re.compile(r'"((?:[^"\\]|\\.)*)"')
SEEN_WITHIN_S = 10.0


class RedisOrder:
    """Every command that Redis ran while the block was open, in its order (MONITOR), the scripts' own among them.

    An encoder is assigned where the script counts an item on it: HINCRBY <unfinished> <url> 1; the cursor moves
    where it is SET. Both keys are documented state, so this sees the order that Redis gave, over all workers, masters
    and connections, and not the order in which requests came to encoders.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._commands: list[list[str]] = []
        self._end = f"end-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._socket.settimeout(SEEN_WITHIN_S)
        self._socket.connect(str(self._space.server.socket))
        self._socket.sendall(b"MONITOR\r\n")
        assert self._socket.recv(5) == b"+OK\r\n"
        self._socket.settimeout(None)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._space.cli("ECHO", self._end)
            assert self._over.wait(SEEN_WITHIN_S) or e is not None, "MONITOR did not show the end"
        finally:
            self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join(5)
            self._socket.close()

    def _read(self) -> None:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                command = ARGUMENT.findall(line.decode("latin-1"))
                if len(command) > 1 and command[1] == self._end:
                    self._over.set()
                    return
                if any(self._space.prefix in word for word in command):
                    self._commands.append(command)

    def assignments(self, encoders: Sequence[EpdEngine]) -> list[int]:
        """The number of the encoder (its place in `encoders`) of each item, in Redis's order."""
        return self.numbers([engine.url for engine in encoders])

    def numbers(self, urls: Sequence[str]) -> list[int]:
        number = {url: i for i, url in enumerate(urls)}
        key = self._space.key("unfinished")
        return [
            number[words[2]]
            for words in list(self._commands)
            if len(words) == 4 and words[0].upper() == "HINCRBY" and words[1] == key
            if words[3] == "1" and words[2] in number
        ]

    def ledgers(self) -> set[str]:
        """The keys of the workers' ledgers that something was counted in: one for each worker that took part."""
        start = self._space.key("unfinished:")
        return {
            words[1] for words in list(self._commands) if words[0].upper() == "HINCRBY" and words[1].startswith(start)
        }

    def cursors(self) -> list[int]:
        """The values that the cursor was set to."""
        key = self._space.key("encoder_cursor")
        return [int(words[2]) for words in list(self._commands) if words[0].upper() == "SET" and words[1] == key]


def spread(values: Sequence[int], kinds: int) -> int:
    """Greatest difference between how often each of range(kinds) occurs."""
    found = [values.count(kind) for kind in range(kinds)]
    return max(found) - min(found)
