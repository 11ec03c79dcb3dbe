"""Clients that send their next request before the answer to the last one."""

from __future__ import annotations

import contextlib
import socket
import struct

import pytest

from tests.integration.serving import SharedDeployment
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.wait import eventually

DEPLOYMENT = SharedDeployment(workers=1)
BODY = b'{"model":"sim","messages":[]}'
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    % len(BODY)
) + BODY


def test_a_pipelined_client_that_leaves_frees_the_engine(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(ttft_s=30)
    for together in (True, False):
        engine.forget()
        client = socket.create_connection(("127.0.0.1", deployment.port))
        client.sendall(REQUEST * 2 if together else REQUEST)
        eventually(lambda: engine.in_flight == 1, within_s=5)
        if not together:
            client.sendall(REQUEST)
        client.close()
        eventually(lambda: engine.in_flight == 0, within_s=1)
        eventually(lambda: deployment.unfinished() == {engine.url: 0}, within_s=2)


def large(size: int) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size + b" " * size


NO_LINGER = struct.pack("ii", 1, 0)  # close() is a reset
BEHIND = {
    "many requests": (b"1.1", REQUEST.replace(b"Host: x", b"Host: x\r\nX: " + b"x" * 9000) * 60),
    "a body": (b"1.1", large(400_000)),
    "a body that the system has no room for": (b"1.1", large(20_000_000)),
    "a body behind a request that can't be asked": (b"1.0", large(400_000)),
    "a body beyond all room behind a request that can't be asked": (b"1.0", large(20_000_000)),
}


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("name", BEHIND)
def test_a_client_that_leaves_behind_what_nobody_reads_frees_the_engine(
    deployment: Deployment, engine: SimulatedEngine, name: str, reset: bool
) -> None:
    version, behind = BEHIND[name]
    engine.set(ttft_s=30)
    client = socket.create_connection(("127.0.0.1", deployment.port))
    client.sendall(REQUEST.replace(b"HTTP/1.1", b"HTTP/" + version))
    eventually(lambda: engine.in_flight == 1, within_s=5)
    client.settimeout(0.3)
    with contextlib.suppress(TimeoutError):
        client.sendall(behind)
    if reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    client.close()
    eventually(lambda: engine.in_flight == 0, within_s=1)
    eventually(lambda: deployment.unfinished() == {engine.url: 0}, within_s=2)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(("count", "size"), [(40, 100), (40, 20_000), (8, 100_000)])
def test_a_client_that_is_still_there_behind_what_nobody_reads_gets_all_its_answers(
    deployment: Deployment, engine: SimulatedEngine, count: int, size: int, ends: bool
) -> None:
    body = b'{"model":"sim","messages":[],"user":"%s"}' % (b"x" * size)
    request = REQUEST[: REQUEST.index(b"Content-Length")] + b"Content-Length: %d\r\n\r\n" % len(body) + body
    engine.set(ttft_s=0.6)  # of the first: until then nobody reads, and it is looked whether the client has left
    with socket.create_connection(("127.0.0.1", deployment.port)) as client:
        client.settimeout(10)
        client.sendall(request * count)
        if ends:
            client.shutdown(socket.SHUT_WR)
        eventually(lambda: engine.in_flight == 1, within_s=5)
        engine.set(ttft_s=0)
        came = b""
        while came.count(b"HTTP/1.1 200") < count:
            data = client.recv(65536)
            assert data
            came += data
    assert len(engine.requests) == count


def test_pipelined_requests_are_answered_in_order(deployment: Deployment, engine: SimulatedEngine) -> None:
    with socket.create_connection(("127.0.0.1", deployment.port)) as client:
        client.settimeout(10)
        ids = [b"request-%d" % n for n in range(40)]
        for identifier in ids:
            client.sendall(REQUEST.replace(b"Host: x", b"Host: x\r\nX-Request-Id: " + identifier))
        came = b""
        while came.count(b"HTTP/1.1 200") < len(ids):
            data = client.recv(65536)
            assert data
            came += data
    places = [came.index(b"x-request-id: " + identifier + b"\r\n") for identifier in ids]
    assert places == sorted(places)


def test_trailers_are_no_headers(deployment: Deployment, engine: SimulatedEngine) -> None:
    with socket.create_connection(("127.0.0.1", deployment.port)) as client:
        client.settimeout(10)
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            b"%x\r\n%s\r\n0\r\nX-Forwarded-For: 6.6.6.6\r\nX-Smuggled: yes\r\n\r\n" % (len(BODY), BODY)
        )
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
    names = {name.lower(): value for name, value in engine.requests[0].headers}
    assert names[b"x-forwarded-for"] == b"127.0.0.1"
    assert b"x-smuggled" not in names


def test_a_path_that_is_encoded_many_times_costs_no_time(deployment: Deployment) -> None:
    with socket.create_connection(("127.0.0.1", deployment.port)) as client:
        client.settimeout(1)
        client.sendall(b"POST /v1/%" + b"25" * 20_000 + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 400")
