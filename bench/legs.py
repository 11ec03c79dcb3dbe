#!/usr/bin/env python3
"""What a split request costs against the single requests that it is made of.

    python -m bench.legs [--requests 3000] [--rounds 3]

One deployment of one worker after the other, in front of engines of zero latency: Hybrid, prefill and decode (NIXL), an
encoder before one node, an encoder before a pair. CPU is user and system time of all that `evenhand serve` started,
Redis included. The ratio is the CPU of a split request to that of as many Hybrid requests as it has legs.
Everything is on loopback and ends with it; about two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from typing import NamedTuple

from bench.memory import HOST, one_worker
from bench.routing import tree

CONNECTIONS = 8
WARM_UP = 300
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
PARAMS = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_block_ids": [1, 2],
    "remote_host": HOST,
    "remote_port": 5600,
}
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "y" * 600}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18},
    "kv_transfer_params": PARAMS,
}


class Way(NamedTuple):
    """How a request is served: flags with the engine's URL for {}, legs, and images in the request."""

    flags: str
    legs: int
    images: int = 0


WAYS = {
    "Hybrid": Way("--nodes {}", 1),
    "prefill and decode": Way("--prefill-servers-urls {} --decode-servers-urls {} --pd-protocol nixl", 2),
    "one image, one node": Way("--encode-servers-urls {} --decode-servers-urls {}", 2, images=1),
    "two images, prefill and decode": Way(
        "--encode-servers-urls {} --prefill-servers-urls {} --decode-servers-urls {} --pd-protocol nixl", 4, images=2
    ),
}


class Engine(asyncio.Protocol):
    """Answers whatever it is asked, as soon as all of it has come."""

    def __init__(self) -> None:
        self._got = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._got += data
        while (end := self._got.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._got[:end]).lower()
            length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
            if len(self._got) < end + 4 + length:
                return
            del self._got[: end + 4 + length]
            self._transport.write(MODELS if b" /v1/models " in head else WHOLE)  # type: ignore[attr-defined]


def whole(answer: object) -> bytes:
    body = json.dumps(answer).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


MODELS, WHOLE = whole({"object": "list", "data": [{"id": "m", "object": "model"}]}), whole(ANSWER)


def request(images: int) -> bytes:
    content = [{"type": "text", "text": "x" * 900}, *[IMAGE] * images]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )


async def ask(port: int, asked: bytes, times: int) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    for _ in range(times):
        writer.write(asked)
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise SystemExit(f"not served: {head.decode()}{(await reader.read(2000)).decode()}")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
    writer.close()


async def measure(way: Way, requests: int, engines: list[str]) -> float:
    """CPU of one request, ms."""
    asked = request(way.images)
    async with one_worker(way.flags.format(*engines)) as (pid, port):

        async def all_ask(times: int) -> None:
            await asyncio.gather(*(ask(port, asked, times // CONNECTIONS) for _ in range(CONNECTIONS)))

        await all_ask(WARM_UP)
        (since_s,) = tree.read([pid]).trees_s
        await all_ask(requests)
        (until_s,) = tree.read([pid]).trees_s
        return (until_s - since_s) / (requests // CONNECTIONS * CONNECTIONS) * 1000


async def run(requests: int, rounds: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Engine, HOST, 0) for _ in range(3)]  # a node has one role
    engines = [f"http://{HOST}:{server.sockets[0].getsockname()[1]}" for server in servers]
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(rounds):
        for name, way in WAYS.items():
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr)
            found[name].append(await measure(way, requests, engines))
    for server in servers:
        server.close()
    single = found["Hybrid"]
    print("| request | legs | CPU, ms | against as many Hybrid requests: min / median / max |\n|---|---|---|---|")
    for name, way in WAYS.items():
        ratios = sorted(own / (way.legs * one) for own, one in zip(found[name], single, strict=True))
        spread = f"{ratios[0]:.2f} / {statistics.median(ratios):.2f} / {ratios[-1]:.2f}"
        print(f"| {name} | {way.legs} | {statistics.median(found[name]):.3f} | {spread} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000, help="measured of each way in each round (3000)")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    known = parser.parse_args()
    asyncio.run(run(known.requests, known.rounds))


if __name__ == "__main__":
    main()
