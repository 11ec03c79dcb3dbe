"""Clients that are slow in sending or in reading: bounded in time and in memory, and nobody else notices."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.serving import Factory, Together, chat_body, connected, raw_post, read_reply
from tests.support.deployment import Deployment
from tests.support.wait import eventually

pytestmark = pytest.mark.long

LIMIT_S = 2.0
# An eighth, twice, for the looks; the rest for a busy machine.
LATEST_S = 1.25 * LIMIT_S + 2.0

together = Together(workers=1, settings={"client_timeout_s": LIMIT_S})
running = together.fixture()

KB = 1024
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def request(model: str, **fields: Any) -> bytes:
    body = chat_body(model, **fields)
    return raw_post(["Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"], body)


def until_closed(client: socket.socket, send: Callable[[], bytes] = lambda: b"", every_s: float = 0.1) -> bytes:
    """What came until the end, while `send()` goes out every so often; a reset is an end too."""
    client.settimeout(every_s)
    came = b""
    deadline_s = time.monotonic() + 6 * LIMIT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(TimeoutError):
            try:
                data = client.recv(65536)
            except ConnectionError:
                return came
            if not data:
                return came
            came += data
            continue
        with contextlib.suppress(ConnectionError):
            client.sendall(send())
    raise AssertionError(f"still open after {6 * LIMIT_S} s: {came[-500:]!r}")


@contextlib.contextmanager
def ends_in_time(earliest_s: float = LIMIT_S) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert earliest_s <= time.monotonic() - began_s < LATEST_S


def rss_mb(deployment: Deployment) -> float:
    (pid,) = deployment.worker_pids()
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / KB


# --- heads


@together
def test_a_connection_that_says_nothing_is_closed_without_a_word(deployment: Deployment, make: Factory) -> None:
    with connected(deployment.url) as client, ends_in_time():
        assert until_closed(client) == b""


@together
def test_a_head_that_comes_line_by_line_is_given_up(deployment: Deployment, make: Factory) -> None:
    with connected(deployment.url) as client, ends_in_time():
        client.sendall(HEAD)
        assert until_closed(client, lambda: b"X: y\r\n").startswith(b"HTTP/1.1 408 ")


@together
def test_empty_lines_behind_an_answer_do_not_keep_a_connection(deployment: Deployment, make: Factory) -> None:
    with connected(deployment.url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        read_reply(client)
        with ends_in_time():
            assert until_closed(client, lambda: b"\r\n") == b""


@together
def test_half_a_head_behind_a_running_answer_leaves_it_whole(deployment: Deployment, make: Factory) -> None:
    engine = make(models=("half",), gap_s=0.1, chunks=int(20 * LIMIT_S))
    deployment.add(engine)
    with connected(deployment.url) as client:
        client.sendall(request("half", stream=True) + HEAD)
        stream, _, refusal = until_closed(client).partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert stream.startswith(b"HTTP/1.1 200 ") and b"408" not in stream
    assert refusal.startswith(b"HTTP/1.1 408 ")


@together
def test_idle_connections_and_long_answers_have_no_such_limit(deployment: Deployment, make: Factory) -> None:
    engine = make(models=("long",), ttft_s=2 * LIMIT_S)
    deployment.add(engine)
    with connected(deployment.url) as client:
        client.sendall(request("long"))
        assert read_reply(client).status == 200
        client.settimeout(2 * LIMIT_S)
        with contextlib.suppress(TimeoutError):
            assert client.recv(1), "closed while it was idle"
        engine.set(ttft_s=0)
        client.sendall(request("long"))
        assert read_reply(client).status == 200


# --- bodies


def check_given_up(deployment: Deployment, make: Factory, model: str, piece: bytes) -> None:
    engine = make(models=(model,))
    deployment.add(engine)
    with connected(deployment.url) as client, ends_in_time():
        client.sendall(HEAD + b"Content-Length: 100000\r\n\r\n" + b" " * 10)
        assert until_closed(client, lambda: piece).startswith(b"HTTP/1.1 408 ")
    assert engine.requests == []


@together
def test_a_body_that_stalls_is_given_up(deployment: Deployment, make: Factory) -> None:
    check_given_up(deployment, make, "stalled", b"")


@together
def test_a_body_of_a_byte_at_a_time_is_given_up(deployment: Deployment, make: Factory) -> None:
    check_given_up(deployment, make, "dripping", b" ")


@together
def test_a_body_that_nobody_wants_any_more_ends_too(deployment: Deployment, make: Factory) -> None:
    with connected(deployment.url) as client, ends_in_time():
        client.sendall(HEAD + b"Content-Length: 900000000\r\n\r\n")
        came = until_closed(client, lambda: b" ")
    assert came.startswith(b"HTTP/1.1 413 ") and b"408" not in came


@together
def test_a_slow_body_that_gets_on_is_served(deployment: Deployment, make: Factory) -> None:
    engine = make(models=("uphill",))
    deployment.add(engine)
    body = chat_body("uphill", prompt="a" * 600 * KB)
    began_s = time.monotonic()
    with connected(deployment.url) as client:
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
        for at in range(0, len(body), 30 * KB):
            client.sendall(body[at : at + 30 * KB])
            time.sleep(0.3)  # the client is slow: that is the test
        assert read_reply(client).status == 200
    assert time.monotonic() - began_s > 2 * LIMIT_S
    assert engine.requests[0].body == body


# --- readers


@together
def test_clients_that_read_nothing_hold_little_memory_and_leave_in_time(deployment: Deployment, make: Factory) -> None:
    engine = make(models=("big",), body_mb=64)
    deployment.add(engine)
    before_mb = rss_mb(deployment)
    with contextlib.ExitStack() as stack:
        began_s = time.monotonic()
        for _ in range(8):
            client = stack.enter_context(connected(deployment.url, receive_bytes=4 * KB))
            client.sendall(request("big"))
        eventually(lambda: engine.in_flight + len(engine.aborts) == 8, within_s=10)
        all_s = time.monotonic()
        most_mb = 0.0
        while engine.in_flight:
            most_mb = max(most_mb, rss_mb(deployment) - before_mb)
            assert time.monotonic() - all_s < LATEST_S + 1, "they are held for ever"
            time.sleep(0.02)
    # Each: 256 KiB and a read from its engine, that as one piece on its way out, and 64 KiB before it.
    assert most_mb < 16, f"{most_mb} MB for 8 answers of 64 MB"
    assert time.monotonic() - began_s >= LIMIT_S
    assert len(engine.aborts) == 8
    eventually(lambda: deployment.unfinished()[engine.url] == 0)


@together
def test_a_reader_is_not_cut_while_it_empties_what_the_system_holds_for_it(
    deployment: Deployment, make: Factory
) -> None:
    """The system buffers megabytes, and takes none from the worker before a third of them has gone."""
    engine = make(models=("trickle",), body_mb=12)
    deployment.add(engine)
    with connected(deployment.url, receive_bytes=64 * KB) as client:
        client.sendall(request("trickle"))
        time.sleep(0.5)  # until all buffers are full
        began_s = time.monotonic()
        while time.monotonic() - began_s < 2 * LIMIT_S:
            assert client.recv(100 * KB), "cut"
            time.sleep(0.25)  # 400 KB/s at most: that is the test
        assert engine.aborts == []


@together
def test_a_slow_reader_that_gets_on_has_its_whole_answer(deployment: Deployment, make: Factory) -> None:
    engine = make(models=("downhill",), body_mb=12)
    deployment.add(engine)
    began_s = time.monotonic()
    with connected(deployment.url, receive_bytes=64 * KB) as client:
        client.sendall(request("downhill"))
        came = b""
        while len(came) < 12_000_000:
            data = client.recv(256 * KB)
            assert data, f"cut after {len(came)} bytes"
            came += data
            time.sleep(0.02)  # the client is slow: that is the test
    assert came.startswith(b"HTTP/1.1 200 ")
    assert time.monotonic() - began_s > LIMIT_S
    assert engine.aborts == []
