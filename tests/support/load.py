"""Clients: one chat, or many at once, with what came and when.

A failure of the connection does not raise: it is in `error`, with what had come before it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy


@dataclass
class Answer:
    """One answer. Instants are `time.monotonic()`, as in the engine's records."""

    status: int = 0  # 0: none came
    headers: CIMultiDictProxy[str] = field(default_factory=lambda: CIMultiDictProxy(CIMultiDict()))
    reads: list[tuple[float, bytes]] = field(default_factory=list)  # body as it came: (when, bytes)
    started_s: float = 0.0
    head_s: float | None = None
    finished_s: float | None = None
    left: bool = False  # we went away on purpose
    error: Exception | None = None

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.reads)

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.error is None

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[str]:
        """The data of each SSE event; comments left out."""
        lines = self.body.decode().replace("\r\n", "\n").split("\n")
        return [line[len("data: ") :] for line in lines if line.startswith("data: ")]

    def chunks(self) -> list[tuple[float, dict[str, Any]]]:
        """(when its last byte came, event) for each JSON event; `[DONE]` left out."""
        found, held = [], b""
        for at_s, data in self.reads:
            *whole, held = (held + data).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in whole:
                for line in event.split(b"\n"):
                    if line.startswith(b"data: ") and line != b"data: [DONE]":
                        found.append((at_s, json.loads(line[len(b"data: ") :])))
        return found

    @property
    def done(self) -> bool:
        """A stream that ended with `[DONE]`."""
        events = self.events()
        return bool(events) and events[-1] == "[DONE]"

    @property
    def text(self) -> str:
        """What the model said, stream or not."""
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            choices = [choice for _, event in self.chunks() for choice in event.get("choices", [])]
            return "".join(c.get("text", c.get("delta", {}).get("content", "")) for c in choices)
        choice = self.json()["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])


def session(*, keep_alive: bool = True, **more: Any) -> aiohttp.ClientSession:
    """A client without limits of its own; `keep_alive=False` opens a connection for each request."""
    # force_close spreads requests over workers: a kept connection stays with the worker that took it.
    connector = aiohttp.TCPConnector(limit=0, force_close=not keep_alive, ssl=False)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False, **more)


async def chat(
    url: str,
    *,
    model: str = "sim",
    stream: bool = False,
    prompt: str = "hello",
    path: str = "/v1/chat/completions",
    key: str | None = None,
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
    client: aiohttp.ClientSession | None = None,
    leave_after_s: float | None = None,
    leave_after_chunks: int | None = None,
    read_delay_s: float = 0.0,
    within_s: float = 60.0,
    **fields: Any,
) -> Answer:
    """One request; other `fields` go into its body.

    Args:
        body: sent as it is, instead of the one made of model, stream, prompt and fields.
        leave_after_s: close the connection so long after the start, whatever has come.
        leave_after_chunks: close it when so many SSE events have come.
        read_delay_s: pause between two reads of 64 KiB: a slow client.
        within_s: an answer that takes longer is an error (TimeoutError).
    """
    asked = {"prompt": prompt} if path == "/v1/completions" else {"messages": [{"role": "user", "content": prompt}]}
    data = body if body is not None else json.dumps({"model": model, "stream": stream, **asked, **fields}).encode()
    sent = {
        "content-type": "application/json",
        **({"authorization": f"Bearer {key}"} if key else {}),
        **(headers or {}),
    }
    answer = Answer(started_s=time.monotonic())
    async with AsyncExitStack() as stack:
        if client is None:
            client = await stack.enter_async_context(session(keep_alive=False))
        work = _read(client, url + path, data, sent, answer, leave_after_chunks, read_delay_s)
        limit_s = within_s if leave_after_s is None else leave_after_s
        try:
            async with asyncio.timeout(limit_s):
                await work
        except TimeoutError as e:
            answer.left = leave_after_s is not None
            answer.error = None if answer.left else e
        except (aiohttp.ClientError, OSError) as e:
            answer.error = e
    answer.finished_s = time.monotonic()
    return answer


async def _read(
    client: aiohttp.ClientSession,
    url: str,
    data: bytes,
    headers: dict[str, str],
    answer: Answer,
    leave_after_chunks: int | None,
    read_delay_s: float,
) -> None:
    response = await client.post(url, data=data, headers=headers)
    try:
        answer.status, answer.headers, answer.head_s = response.status, response.headers, time.monotonic()
        seen = 0
        while chunk := await (response.content.read(65536) if read_delay_s else response.content.readany()):
            answer.reads.append((time.monotonic(), chunk))
            if leave_after_chunks is not None:
                seen += chunk.count(b"data: ")
                if seen >= leave_after_chunks:
                    answer.left = True
                    return
            if read_delay_s:
                await asyncio.sleep(read_delay_s)
    finally:
        response.close()  # a complete answer has given its connection back already


async def many(
    url: str | Sequence[str],
    n: int,
    *,
    concurrency: int | None = None,
    keep_alive: bool = False,
    each: Callable[[int], dict[str, Any]] | None = None,
    **chat_options: Any,
) -> list[Answer]:
    """`n` chats, `concurrency` at a time (default: all at once), over the urls in turn; answers in order.

    Args:
        keep_alive: keep connections; by default each request opens its own, which spreads them over workers.
        each: options for the i-th request, over `chat_options`.
    """
    urls = [url] if isinstance(url, str) else list(url)
    numbers = iter(range(n))
    answers: list[Answer] = [Answer() for _ in range(n)]
    async with session(keep_alive=keep_alive) as client:

        async def worker() -> None:
            for i in numbers:
                options = chat_options | (each(i) if each is not None else {})
                answers[i] = await chat(urls[i % len(urls)], client=client, **options)

        await asyncio.gather(*(worker() for _ in range(min(concurrency or n, n))))
    return answers
