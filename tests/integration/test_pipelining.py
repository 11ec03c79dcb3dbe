"""Clients that send their next request before the answer to the last one."""

from __future__ import annotations

import socket

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
