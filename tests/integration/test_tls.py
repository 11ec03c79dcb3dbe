"""TLS on the listener, and engines behind a private CA."""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import signal
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import httpx2
import openai
import pytest
import trustme

from tests.integration.serving import (
    Factory,
    chat,
    chat_body,
    connected,
    on_every_worker,
    openai_error,
    raw,
    raw_post,
    read_reply,
    remove_nodes,
)
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.loop import LoopThread
from tests.support.quiet import quiet_check
from tests.support.redis import PrivateRedis, Space
from tests.support.wait import eventually
from workers.engine.answers import Knobs

KEY = "clients-key"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def tls_deployment(
    authority: trustme.CA, redis_server: PrivateRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """With a key for clients, and the default trust in loopback: engines register without one."""
    directory: Path = tmp_path_factory.mktemp("tls")
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(directory / "key.pem")
    for i, blob in enumerate(certificate.cert_chain_pems):
        blob.write_to_path(directory / "cert.pem", append=i > 0)
    authority.cert_pem.write_to_path(directory / "ca.pem")
    env = {
        "SSL_KEYFILE": str(directory / "key.pem"),
        "SSL_CERTFILE": str(directory / "cert.pem"),
        "SSL_CERT_FILE": str(directory / "ca.pem"),  # OpenSSL's own: whom we trust as a client of engines
    }
    redis_server.ensure_running()
    space = Space(redis_server, f"t{secrets.token_hex(6)}")
    with Deployment(1, redis=space, settings={"ssl": True, "api_keys": KEY}, env=env) as deployment:
        yield deployment
        deployment.stop()
        assert not deployment.left_behind


@pytest.fixture(scope="module")
def tls_engine(tls_deployment: Deployment, engine_loop: LoopThread) -> Iterator[SimulatedEngine]:
    """It registers the way an LMDeploy engine does: without a key, from a trusted address."""
    with SimulatedEngine(loop=engine_loop) as engine:
        tls_deployment.add(engine)
        on_every_worker(tls_deployment, lambda: chat(tls_deployment, authorization=f"Bearer {KEY}").status == 200)
        yield engine


@pytest.fixture
def deployment(
    tls_deployment: Deployment, tls_engine: SimulatedEngine, engine_factory: Factory
) -> Iterator[Deployment]:
    yield tls_deployment
    assert tls_deployment.space is not None
    quiet_check(tls_deployment.space, engines=[tls_engine, *engine_factory.made])  # type: ignore[attr-defined]
    remove_nodes(tls_deployment, but=tls_engine.url)


@pytest.fixture
def engine(deployment: Deployment, tls_engine: SimulatedEngine) -> SimulatedEngine:
    tls_engine.set(**asdict(Knobs()))
    tls_engine.forget()
    return tls_engine


def _trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def test_r92_the_listener_shows_its_certificate(deployment: Deployment, authority: trustme.CA) -> None:
    connection = http.client.HTTPSConnection("localhost", deployment.port, context=_trusting(authority), timeout=5)
    connection.request("GET", "/health", headers={"connection": "close"})
    assert connection.getresponse().status == 200
    connection.close()
    stranger = http.client.HTTPSConnection("localhost", deployment.port, context=_trusting(trustme.CA()), timeout=5)
    with pytest.raises(ssl.SSLCertVerificationError):
        stranger.request("GET", "/health")
    stranger.close()


def test_a_client_without_tls_gets_no_answer(deployment: Deployment) -> None:
    with pytest.raises((OSError, http.client.HTTPException)):
        raw(f"http://127.0.0.1:{deployment.port}", b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n", timeout_s=3)


def _stream(deployment: Deployment, *, leave_after: int = 1_000_000) -> list[tuple[float, bytes]]:
    """(when, bytes) of each read; leaves after so many. Not by aiohttp: its TLS connections outlive its loop."""
    came: list[tuple[float, bytes]] = []
    lines = ["Host: h", f"Authorization: Bearer {KEY}", f"Content-Length: {len(chat_body(stream=True))}"]
    with connected(deployment.url) as s:
        s.sendall(raw_post(lines, chat_body(stream=True)))
        answer = http.client.HTTPResponse(s, method="POST")
        answer.begin()
        assert answer.status == 200
        while (data := answer.read1(65536)) and len(came) < leave_after:
            came.append((time.monotonic(), data))
        answer.close()
    return came


def test_r92_a_stream_over_tls_comes_chunk_by_chunk(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(chunks=8, gap_s=0.1)
    for _ in range(3):  # a busy machine may be late by itself
        engine.forget()
        came = [(at_s, data) for at_s, data in _stream(deployment) if b"choices" in data]
        written = engine.requests[0].chunk_s
        late_s = max(b - a for a, (b, _) in zip(written, came, strict=True))
        if late_s < 0.05:
            return
    pytest.fail(f"a chunk came {late_s:.3f} s after it was written")


def test_the_engine_is_told_of_https(deployment: Deployment, engine: SimulatedEngine) -> None:
    body = chat_body()
    lines = ["Host: chat.example", f"Authorization: Bearer {KEY}", f"Content-Length: {len(body)}"]
    assert raw(deployment.url, raw_post(lines, body)).status == 200
    (record,) = engine.requests
    assert record.header(b"x-forwarded-proto") == b"https"
    assert record.header(b"x-forwarded-host") == b"chat.example"
    assert record.header(b"authorization") is None


def test_r39_a_client_that_leaves_over_tls_is_noticed(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(chunks=1000, gap_s=0.05)
    _stream(deployment, leave_after=3)
    left_s = time.monotonic()
    (record,) = eventually(lambda: engine.aborts, within_s=1.5)
    assert record.aborted_s is not None
    assert record.aborted_s - left_s < 1


@pytest.mark.parametrize("behind", [0, 400_000, pytest.param(20_000_000, marks=pytest.mark.wide)])
def test_r39_a_client_that_leaves_behind_what_nobody_reads_is_noticed_over_tls(
    deployment: Deployment, engine: SimulatedEngine, behind: int
) -> None:
    engine.set(ttft_s=30)
    lines = ["Host: h", f"Authorization: Bearer {KEY}"]
    with connected(deployment.url) as s:
        s.sendall(raw_post([*lines, f"Content-Length: {len(chat_body())}"], chat_body()))
        eventually(lambda: engine.in_flight == 1, within_s=5)
        s.settimeout(0.3)
        with contextlib.suppress(TimeoutError):
            s.recv(1)  # the session tickets: a close before they are read would be a reset
        with contextlib.suppress(TimeoutError):
            s.sendall(raw_post([*lines, f"Content-Length: {behind}"], b" " * behind))
    eventually(lambda: engine.in_flight == 0, within_s=1)


def test_large_bodies_pass_over_tls(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(body_mb=3.0)
    body = chat_body(prompt="p" * 3_000_000)
    lines = ["Host: h", f"Authorization: Bearer {KEY}", f"Content-Length: {len(body)}"]
    with connected(deployment.url) as s:
        s.sendall(raw_post(lines, body))
        reply = read_reply(s)
    assert reply.status == 200
    assert reply.complete
    assert len(reply.body) > 3_000_000
    assert engine.requests[0].body == body


def test_the_sdk_works_over_tls(deployment: Deployment, engine: SimulatedEngine, authority: trustme.CA) -> None:
    transport = httpx2.Client(verify=_trusting(authority))
    url = f"https://localhost:{deployment.port}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, http_client=transport) as client:
        chunks = client.chat.completions.create(model="sim", messages=[], stream=True, max_tokens=2)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "token0 token1 "


# --- engines


def _server_side(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    return context


def test_r92_an_engine_behind_a_private_ca_that_is_trusted_serves(
    deployment: Deployment, engine_factory: Factory, authority: trustme.CA
) -> None:
    private = engine_factory(tls=_server_side(authority, "127.0.0.1"), models=("private",))
    assert deployment.post("/nodes/add", {"url": private.url}).json() == "Added successfully"
    deployment.wait_for_state("ready", private)

    def asked() -> bool:
        return chat(deployment, chat_body("private", stream=True), authorization=f"Bearer {KEY}").status == 200

    on_every_worker(deployment, asked)


def _write_files(authority: trustme.CA, directory: Path) -> dict[str, str]:
    """Whom engines are trusted by, and what they are shown; the settings that name the files."""
    certificate = authority.issue_cert("evenhand.example")
    certificate.private_key_pem.write_to_path(directory / "key.pem")
    for i, blob in enumerate(certificate.cert_chain_pems):
        blob.write_to_path(directory / "chain.pem", append=i > 0)
    authority.cert_pem.write_to_path(directory / "ca.pem")
    files = {"engine_ca_file": "ca.pem", "engine_key_file": "key.pem", "engine_cert_file": "chain.pem"}
    return {name: str(directory / file) for name, file in files.items()}


def _careful(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    """The side of an engine that asks for a certificate of the same authority."""
    tls = _server_side(authority, *names)
    tls.verify_mode = ssl.CERT_REQUIRED
    authority.configure_trust(tls)
    return tls


def test_r92_engines_with_a_private_ca_that_ask_for_a_certificate_and_files_that_are_replaced(
    deployment_factory: Callable[..., Deployment], engine_factory: Factory, tmp_path: Path
) -> None:
    before, after = trustme.CA(), trustme.CA()
    deployment = deployment_factory(1, settings=_write_files(before, tmp_path))
    old = engine_factory(tls=_careful(before, "127.0.0.1"), models=("old",))
    new = engine_factory(tls=_careful(after, "127.0.0.1"), models=("new",))
    assert deployment.post("/nodes/add", {"url": old.url}).json() == "Added successfully", "its models were asked for"
    deployment.wait_for_state("ready", old)
    assert chat(deployment, chat_body("old")).status == 200
    openai_error(deployment.post("/nodes/add", {"url": new.url}), 504, 10402)

    # By a name of its own, which its certificate has and its URL has not.
    named = engine_factory(tls=_careful(before, "engine.example"), models=("named",))
    openai_error(deployment.post("/nodes/add", {"url": named.url}), 504, 10402)
    status = {"host_header": "engine.example:443"}
    assert deployment.post("/nodes/add", {"url": named.url, "status": status}).json() == "Added successfully"
    deployment.wait_for_state("ready", named)
    assert chat(deployment, chat_body("named", stream=True)).status == 200
    assert {record.header(b"host") for record in [*named.requests, *named.probes]} == {b"engine.example:443"}
    assert deployment.nodes()[named.url]["host_header"] == "engine.example:443"

    _write_files(after, tmp_path)
    workers = deployment.worker_pids()
    os.kill(deployment.master_pid(), signal.SIGHUP)
    deployment.wait_for_workers(without=workers, within_s=20)
    assert deployment.post("/nodes/add", {"url": new.url}).json() == "Added successfully"
    deployment.wait_for_state("ready", new)
    assert chat(deployment, chat_body("new")).status == 200
    assert chat(deployment, chat_body("old")).status in (502, 503), "its authority is none of ours any more"

    # Files that are no pair: the reload is refused, and what was read before goes on.
    (tmp_path / "key.pem").write_text("no key")
    workers = deployment.worker_pids()
    os.kill(deployment.master_pid(), signal.SIGHUP)
    eventually(lambda: "are not a pair of PEM files" in deployment.log(), within_s=10)
    assert deployment.worker_pids() == workers
    assert chat(deployment, chat_body("new")).status == 200


def test_r92_without_a_certificate_an_engine_that_asks_for_one_is_a_clean_error(
    deployment: Deployment, engine_factory: Factory, authority: trustme.CA
) -> None:
    careful = engine_factory(tls=_careful(authority, "127.0.0.1"), models=("careful",))
    openai_error(deployment.post("/nodes/add", {"url": careful.url}), 504, 10402)


@pytest.mark.parametrize("kind", ["unknown CA", "wrong name", "no TLS at all"])
def test_r92_an_engine_that_cant_be_trusted_is_a_clean_error(
    deployment: Deployment, engine_factory: Factory, authority: trustme.CA, kind: str
) -> None:
    tls = {
        "unknown CA": _server_side(trustme.CA(), "127.0.0.1"),
        "wrong name": _server_side(authority, "engine.example"),
        "no TLS at all": None,
    }[kind]
    shady = engine_factory(tls=tls, models=("shady",))
    url = shady.url.replace("http://", "https://")
    reply = deployment.post("/nodes/add", {"url": url})
    openai_error(reply, 504, 10402)
    assert deployment.post("/nodes/add", {"url": url, "status": {"models": ["shady"]}}).status == 200

    def asked() -> bool:
        reply = chat(deployment, chat_body("shady"), authorization=f"Bearer {KEY}")
        assert reply.status in (502, 503)
        return reply.status == 502 and bool(openai_error(reply, 502, 10402)["message"])

    eventually(asked)
    assert deployment.nodes("?all=1")[url]["state"] in ("pending", "down")
    assert not shady.requests
    assert not shady.probes
