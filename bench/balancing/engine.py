"""Engines that batch continuously, in real time: one port each, one process.

    python -m bench.balancing.engine SLOWER SPEED SPEED ...

The model is that of `simulation`, SLOWER times as slow. An answer has `max_tokens` tokens. Prints its ports as a line
of JSON; `GET /bench/counts` on any port says how many chats each has had. Ends with its guard.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import deque
from functools import partial
from typing import cast

import httptools
import uvloop

from bench.balancing.simulation import BASE_S, FLAT, FULL
from bench.routing.engine import CHUNKS, COUNTS, CREATED, INFO, MARK, MODEL, head, wants_stream, whole

_max_tokens = re.compile(rb'"max_(?:completion_)?tokens"\s*:\s*(\d+)').search


class Engine:
    """One port's batch."""

    def __init__(self, number: int, base_s: float) -> None:
        self.number = number
        self.chats = 0
        self._base_s = base_s
        self._running: list[Chat] = []
        self._queue: deque[Chat] = deque()
        self._due_s = 0.0
        self._stepping = False

    def add(self, chat: Chat) -> None:
        self.chats += 1
        self._queue.append(chat)
        if not self._stepping:
            self._due_s = asyncio.get_running_loop().time()
            self._begin()

    def _begin(self) -> None:
        while self._queue and len(self._running) < FULL:
            self._running.append(self._queue.popleft())
        self._stepping = bool(self._running)
        if self._stepping:
            # From when it was due: a late timer must not make the engine slower.
            self._due_s += self._base_s * (FLAT + len(self._running))
            asyncio.get_running_loop().call_at(self._due_s, self._end)

    def _end(self) -> None:
        self._running = [chat for chat in self._running if not chat.token()]
        self._begin()


class Chat:
    """One request's answer."""

    def __init__(self, engine: Engine, transport: asyncio.Transport, body: bytes) -> None:
        found = _max_tokens(body)
        self.tokens = self._left = int(found[1]) if found else CHUNKS
        self._engine, self._transport, self._stream = engine, transport, wants_stream(body)
        if self._stream:
            transport.write(head(b"200 OK", b"text/event-stream", None))

    def token(self) -> bool:
        """One more; whether that was the last."""
        self._left -= 1
        if self._transport.is_closing():
            return True
        if self._stream:
            self._event({"delta": {"content": f"{MARK} {self._engine.number} "}})
            if not self._left:
                self._event({"delta": {}, "finish_reason": "stop"})
                self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        elif not self._left:
            message = {"role": "assistant", "content": f"{MARK} {self._engine.number} " + "word " * self.tokens}
            usage = {"prompt_tokens": 9, "completion_tokens": self.tokens, "total_tokens": 9 + self.tokens}
            said = self._said("chat.completion", {"message": message, "finish_reason": "stop"})
            self._transport.write(whole(said | {"usage": usage}))
        return not self._left

    def _event(self, choice: dict[str, object]) -> None:
        said = json.dumps(self._said("chat.completion.chunk", {"finish_reason": None} | choice), separators=(",", ":"))
        event = f"data: {said}\n\n".encode()
        self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))

    def _said(self, kind: str, choice: dict[str, object]) -> dict[str, object]:
        choices = [{"index": 0} | choice]
        return {"id": "chatcmpl-1", "object": kind, "created": CREATED, "model": MODEL, "choices": choices}


class Connection(asyncio.Protocol):
    """One request after the other."""

    def __init__(self, engine: Engine, all_of_them: list[Engine]) -> None:
        self._engine, self._all = engine, all_of_them
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._body = b"", b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        url, self._url = self._url, b""
        body, self._body = self._body, b""
        if url == b"/v1/chat/completions":
            self._engine.add(Chat(self._engine, self._transport, body))
            return
        info = {path.encode(): value for path, value in INFO.items()}
        value: object = [one.chats for one in self._all] if url == COUNTS.encode() else info.get(url.partition(b"?")[0])
        self._transport.write(whole({"error": "not here"}, b"404 Not Found") if value is None else whole(value))


async def serve(slower: float, speeds: list[float]) -> None:
    loop = asyncio.get_running_loop()
    engines = [Engine(number, BASE_S * slower / speed) for number, speed in enumerate(speeds, 1)]
    servers = [
        await loop.create_server(partial(Connection, engine, engines), "127.0.0.1", 0, backlog=1024)
        for engine in engines
    ]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(float(sys.argv[1]), [float(word) for word in sys.argv[2:]]))
