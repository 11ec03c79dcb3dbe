"""The engine's own answers about itself, and every way in which it can fail to give one."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import trustme

from app.errors import EngineBroke, EngineRefused, EngineTimeout, EngineUnreachable, UpstreamError
from app.upstream.distserve import DistServeClient, Migration
from app.upstream.management import EngineClient, Health, Verdict, judge
from tests.upstream.scripted import Peer, Request, Script, ScriptedServer, black_hole, free_port, until

LOOPS = ("uvloop",)  # aiohttp is tested on both by its makers
KEY = "sk-never-in-a-message"


@pytest_asyncio.fixture
async def client() -> AsyncIterator[EngineClient]:
    client = EngineClient(probe_timeout_s=0.2, timeout_s=0.2)
    yield client
    await client.close()


class Engine:
    """Answers each path with (status, body); remembers what it was asked."""

    def __init__(self, **answers: tuple[int, bytes]) -> None:
        self.answers = {b"/" + path.replace("__", "/").encode(): answer for path, answer in answers.items()}
        self.requests: list[Request] = []

    async def __call__(self, peer: Peer) -> None:
        while True:
            request = await peer.request()
            self.requests.append(request)
            method, path, _ = request.line.split(b" ")
            status, body = self.answers.get(path, (404, b"{}")) if method == b"GET" else (405, b"")
            await peer.send(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)), body)


def words(status: str) -> bytes:
    return json.dumps({"status": status, "message": f"Engine is {status}."}).encode()


@pytest.mark.parametrize(
    ("status", "body", "verdict", "word"),
    [
        (200, words("healthy"), "ok", "healthy"),  # LMDeploy 0.18, serve/core/health.py
        (200, words("sleeping"), "asleep", "sleeping"),
        (503, words("initializing"), "asleep", "initializing"),
        (503, words("unhealthy"), "bad", "unhealthy"),
        (200, words("unhealthy"), "bad", "unhealthy"),
        (200, b"", "ok", "HTTP 200"),  # vLLM, SGLang, older LMDeploy
        (503, b"", "bad", "HTTP 503"),
        (200, b"OK", "ok", "HTTP 200"),
        (200, b'"ok"', "ok", "HTTP 200"),
        (200, b"\xff\xfe", "ok", "HTTP 200"),
        (200, b'{"status": 7}', "ok", "HTTP 200"),
        (200, words(" Sleeping "), "asleep", "sleeping"),
        (401, b'{"error": "Unauthorized"}', "bad", "HTTP 401"),
        (302, b"", "bad", "HTTP 302"),
        (500, words("x" * 5000), "bad", "x" * 40),
    ],
)
def test_health_is_judged_by_word_and_status(status: int, body: bytes, verdict: str, word: str) -> None:
    assert judge(status, body) == Health(Verdict(verdict), word)


async def test_health_is_asked_with_the_engines_key(client: EngineClient) -> None:
    engine = Engine(health=(200, words("healthy")))
    async with ScriptedServer(engine) as server:  # R83
        assert await client.health(server.url, KEY) == Health(Verdict.OK, "healthy")
        assert await client.health(server.url, None) == Health(Verdict.OK, "healthy")
    keyed, bare = engine.requests
    assert keyed.line == b"GET /health HTTP/1.1"
    assert keyed.header(b"authorization") == [f"Bearer {KEY}".encode()]
    assert bare.header(b"authorization") == []
    assert server.accepted == 2  # a probe that rides on an old connection proves less


@pytest.mark.parametrize(
    ("models", "health"),
    [((200, b'{"data": []}'), Health(Verdict.OK, "HTTP 200")), ((401, b""), Health(Verdict.BAD, "HTTP 401"))],
)
async def test_engine_without_health_is_judged_by_its_models(
    client: EngineClient, models: tuple[int, bytes], health: Health
) -> None:
    engine = Engine(v1__models=models)
    async with ScriptedServer(engine) as server:
        assert await client.health(server.url, KEY) == health
    assert [request.header(b"authorization") for request in engine.requests] == [[f"Bearer {KEY}".encode()]] * 2


async def test_redirect_is_not_followed(client: EngineClient) -> None:
    elsewhere = Engine()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 307 X\r\nLocation: %b/health\r\nContent-Length: 0\r\n\r\n" % other.url.encode())

    async with ScriptedServer(elsewhere) as other, ScriptedServer(script) as server:
        assert await client.health(server.url, KEY) == Health(Verdict.BAD, "HTTP 307")
    assert elsewhere.requests == []


async def ask(client: EngineClient, what: str, url: str) -> object:
    return await getattr(client, what)(url, KEY)


async def hang(peer: Peer) -> None:
    await peer.request()
    await peer.gone()


async def hang_in_body(peer: Peer) -> None:
    await peer.request()
    await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")
    await peer.gone()


async def leave(peer: Peer) -> None:
    await peer.request()


async def leave_in_body(peer: Peer) -> None:
    await peer.request()
    await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")


async def reset(peer: Peer) -> None:
    await peer.request()
    peer.reset()


async def speak_otherwise(peer: Peer) -> None:
    await peer.request()
    await peer.send(b"SSH-2.0-OpenSSH\r\n\r\n")


async def talk_for_ever(peer: Peer) -> None:
    await peer.request()
    await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n")
    for _ in range(100):
        await peer.send(b" " * 100_000)
        await peer.writer.drain()


WHAT = pytest.mark.parametrize("what", ["health", "models", "terminate"])


@WHAT
@pytest.mark.parametrize(
    ("script", "error"),
    [
        (hang, EngineTimeout),
        (hang_in_body, EngineTimeout),
        (leave, EngineBroke),
        (leave_in_body, EngineBroke),
        (reset, EngineBroke),
        (speak_otherwise, EngineBroke),
        (talk_for_ever, EngineBroke),
    ],
)
async def test_failures_are_told_as_they_are(what: str, script: Script, error: type[UpstreamError]) -> None:
    client = EngineClient(probe_timeout_s=0.15, timeout_s=0.15)
    async with ScriptedServer(script) as server:
        with pytest.raises(UpstreamError) as caught:
            await ask(client, what, server.url)
        assert type(caught.value) is error
        assert server.url in caught.value.message
        assert KEY not in repr(caught.value)
        if script is talk_for_ever:
            assert "is longer than" in caught.value.message
        if error is EngineTimeout:
            assert "within 0.15 s" in caught.value.message
            await until(lambda: server.done == 1, within_s=1)
    await client.close()


@WHAT
async def test_no_connection_is_told_as_it_is(client: EngineClient, what: str) -> None:
    with free_port() as port, pytest.raises(EngineRefused) as refused:
        await ask(client, what, f"http://127.0.0.1:{port}")
    assert refused.value.message == f"engine http://127.0.0.1:{port} refused the connection"
    with black_hole() as dark, pytest.raises(EngineTimeout):
        await ask(client, what, f"http://127.0.0.1:{dark}")
    with pytest.raises(EngineUnreachable) as unknown:
        await ask(client, what, "http://no-such-host.invalid:1")
    assert type(unknown.value) is EngineUnreachable


async def test_health_and_its_fall_back_share_one_time(client: EngineClient) -> None:
    async def script(peer: Peer) -> None:
        request = await peer.request()
        if b"/health" in request.line:
            await peer.send(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")
        else:
            await peer.gone()

    async with ScriptedServer(script) as server:
        with pytest.raises(EngineTimeout, match=r"within 0.2 s"):
            await client.health(server.url, None)


async def test_models_are_listed_once_each_in_order(client: EngineClient) -> None:
    listed = {"object": "list", "data": [{"id": "b", "root": "x"}, {"id": "a/c"}, {"id": "b"}, {"id": ""}]}
    engine = Engine(up__v1__models=(200, json.dumps(listed).encode()))
    async with ScriptedServer(engine) as server:
        assert await client.models(server.url + "/up", KEY) == ("b", "a/c")
    assert engine.requests[0].header(b"authorization") == [f"Bearer {KEY}".encode()]


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"data": null}', b'{"data": [{"name": "x"}]}', b'{"data": [{"id": 5}]}', b"\xff"]
)
async def test_what_is_no_list_of_models_is_not_taken(client: EngineClient, body: bytes) -> None:
    async with ScriptedServer(Engine(v1__models=(200, body))) as server:
        with pytest.raises(EngineBroke, match="is no list of models"):
            await client.models(server.url, None)


@pytest.mark.parametrize("status", [401, 404, 503])
async def test_models_refused(client: EngineClient, status: int) -> None:
    async with ScriptedServer(Engine(v1__models=(status, b"{}"))) as server:
        with pytest.raises(UpstreamError, match=f"answered {status} to /v1/models"):
            await client.models(server.url, None)


async def test_terminate(client: EngineClient) -> None:
    engine = Engine(terminate=(200, b""))
    async with ScriptedServer(engine) as server:
        await client.terminate(server.url, KEY)
    assert engine.requests[0].header(b"authorization") == [f"Bearer {KEY}".encode()]
    async with ScriptedServer(Engine(terminate=(400, b"{}"))) as server:
        with pytest.raises(UpstreamError, match="answered 400 to /terminate .*--allow-terminate-by-client"):
            await client.terminate(server.url, KEY)


async def test_profile_posts_the_options_and_waits_longer_than_for_other_questions() -> None:
    """vLLM writes its traces before it answers, which takes minutes."""
    client = EngineClient(timeout_s=0.05, profile_timeout_s=5)
    requests: list[Request] = []

    async def script(peer: Peer) -> None:
        requests.append(await peer.request())
        await asyncio.sleep(0.3)
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone")

    async with ScriptedServer(script) as server:
        assert await client.profile(server.url, "/stop_profile", KEY, b'{"num_steps": 3}') == (200, "done")
        assert await client.profile(server.url, "/stop_profile", None, b"") == (200, "done")
    await client.close()
    asked, bare = requests
    assert (asked.line, asked.body) == (b"POST /stop_profile HTTP/1.1", b'{"num_steps": 3}')
    assert asked.header(b"content-type") == [b"application/json"]
    assert asked.header(b"authorization") == [f"Bearer {KEY}".encode()]
    assert (bare.body, bare.header(b"authorization")) == (b"", [])


async def test_key_that_no_header_can_hold_is_not_shown(client: EngineClient) -> None:
    async with ScriptedServer(Engine(health=(200, b""))) as server:
        with pytest.raises(EngineUnreachable) as caught:
            await client.health(server.url, f"{KEY}\r\nx: y")
        assert KEY not in repr(caught.value)
        assert caught.value.__cause__ is None


async def test_many_probes_at_once_are_not_queued(client: EngineClient) -> None:
    everybody = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        if server.accepted == 110:
            everybody.set()
        await everybody.wait()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    client = EngineClient(probe_timeout_s=5)
    async with ScriptedServer(script) as server:
        found = await asyncio.gather(*[client.health(server.url, None) for _ in range(110)])
        assert {health.verdict for health in found} == {Verdict.OK}
    await client.close()


async def test_tls_certificates_are_checked(client: EngineClient) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    private = EngineClient(tls=trusting)
    async with ScriptedServer(Engine(health=(200, b"")), tls=context) as server:
        with pytest.raises(EngineUnreachable, match="TLS certificate was not accepted"):
            await client.health(server.url, KEY)
        assert (await private.health(server.url, KEY)).verdict is Verdict.OK
        await private.close()


async def test_a_host_header_is_sent_with_every_call_and_is_the_name_of_the_certificate() -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("engine.example").configure_cert(context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    named: dict[str, str] = {}
    client = EngineClient(tls=trusting, host_header=lambda url: named.get(url, ""))
    engine = Engine(health=(200, b""), v1__models=(200, b'{"data": [{"id": "m"}]}'), terminate=(200, b""))
    async with ScriptedServer(engine, tls=context) as server:
        with pytest.raises(EngineUnreachable, match="TLS certificate was not accepted"):
            await client.health(server.url, None)
        # Not known yet: said with the question.
        assert await client.models(server.url, None, host_header="engine.example") == ("m",)
        named[server.url] = "engine.example:8443"
        await client.health(server.url, None)
        await client.models(server.url, None)
        await client.terminate(server.url, None)
        hosts = [request.header(b"host") for request in engine.requests]
        assert hosts == [[b"engine.example"]] + [[b"engine.example:8443"]] * 3
        await client.close()


async def test_a_path_prefix_stands_before_the_path_of_every_call() -> None:
    answers = {b"/health": b"", b"/v1/models": b'{"data": [{"id": "m"}]}', b"/terminate": b""}
    answers[b"/distserve/engine_info"] = b'{"tp_size": 1}'
    answers[b"/distserve/p2p_initialize"] = b'{"status": 1, "engine_endpoint_info": {}, "kvtransfer_endpoint_info": []}'
    answers[b"/distserve/p2p_connect"] = b'{"status": 1}'
    lines: list[bytes] = []

    async def script(peer: Peer) -> None:
        line = (await peer.request()).line
        lines.append(line)
        path = line.split(b" ")[1]
        assert path.startswith(b"/team%2Fa/llm/"), path
        body = answers.get(path.removeprefix(b"/team%2Fa/llm"), b"{}")
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), body)

    client = EngineClient()
    links = DistServeClient(client, Migration("RDMA", "RoCE", with_gdr=True))
    async with ScriptedServer(script) as server:
        url = server.url + "/team%2Fa/llm"
        assert (await client.health(url, None)).verdict is Verdict.OK
        assert await client.models(url, None) == ("m",)
        await client.terminate(url, None)
        assert (await client.profile(url, "/start_profile", None, b""))[0] == 200
        info = await links.engine_info(url, None)
        endpoint = await links.p2p_initialize((url, info), ("http://d", info), None)
        await links.p2p_connect(url, "http://d", endpoint, None)
        await links.p2p_drop_connect(url, "http://d", None)
        await links.free_cache(url, 7, None)
    await client.close()
    assert [line.split(b" ")[0] for line in lines] == [b"GET"] * 3 + [b"POST"] + [b"GET"] + [b"POST"] * 4
