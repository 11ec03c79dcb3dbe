"""A small ASGI app that keeps the worker class's contract, for tests of the worker class alone.

`/` answers its process id and our version, `/stream?n=&gap_s=` sends n events, `/stuck` ignores the notice and
never ends, `/body` answers the length of the body, `/wait?s=` answers after so long unless its client leaves, `/left`
how many left and how long after they had asked. A stream still open shortly before the deadline ends with an error
event.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any
from urllib.parse import parse_qs

from app import __version__

END_EARLY_S = 0.3


class SmallApp:
    def __init__(self) -> None:
        self.deadline: float | None = None
        self.left_after_s: list[float] = []

    def begin_shutdown(self, deadline: float) -> None:
        self.deadline = deadline

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["path"] == "/stream":
            query = parse_qs(scope["query_string"].decode())
            await self._stream(send, int(query["n"][0]), float(query["gap_s"][0]))
        elif scope["path"] == "/stuck":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data: stuck\n\n", "more_body": True})
            await asyncio.sleep(3600)
        elif scope["path"] == "/wait":
            await self._wait(receive, send, float(parse_qs(scope["query_string"].decode())["s"][0]))
        elif scope["path"] == "/left":
            await self._answer(send, {"left": self.left_after_s})
        elif scope["path"] == "/body":
            length, more = 0, True
            while more:
                message = await receive()
                length += len(message.get("body", b""))
                more = message.get("more_body", False)
            await self._answer(send, {"length": length})
        else:
            await self._answer(
                send,
                {
                    "pid": os.getpid(),
                    "client": scope["client"][0],
                    "worker": os.environ["EVENHAND_WORKER_ID"],
                    "version": __version__,
                },
            )

    async def _lifespan(self, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def _wait(self, receive: Any, send: Any, wait_s: float) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(wait_s):
                while (await receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            await self._answer(send, {"waited": wait_s})
        else:
            self.left_after_s.append(time.monotonic() - began)

    async def _answer(self, send: Any, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Any, n: int, gap_s: float) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for i in range(n):
            end = time.monotonic() + gap_s
            while time.monotonic() < end:
                if self.deadline is not None and time.monotonic() > self.deadline - END_EARLY_S:
                    await send({"type": "http.response.body", "body": b'data: {"error": "shutting down"}\n\n'})
                    return
                await asyncio.sleep(0.02)
            await send({"type": "http.response.body", "body": b"data: %d\n\n" % i, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


app = SmallApp()
