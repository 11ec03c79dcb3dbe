"""A client that sends the same head again is asked again for all that may have changed, and is taken for itself.

The real app behind our protocol, on as many connections as a test makes; its engines are a script.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import app.access_keys
from app.access_keys import KeyRing
from app.metrics.figures import Figures
from tests.http.fakes import CHAT, World, until
from tests.upstream.scripted import cut
from tests.workers.same_head import Client

LINES = [b"Host: h", b"Content-Type: application/json", b"Authorization: Bearer key-1"]


def post(body: bytes, lines: list[bytes], path: bytes = b"/v1/chat/completions") -> bytes:
    return b"\r\n".join([b"POST %b HTTP/1.1" % path, *lines, b"Content-Length: %d" % len(body), b"", b""]) + body


def chat(*more: bytes, body: bytes = CHAT, lines: list[bytes] = LINES) -> bytes:
    return post(body, [*lines, *more])


def of_model(model: str) -> bytes:
    return chat(body=b'{"model":"%b","messages":[]}' % model.encode())


async def ask(client: Client, *pieces: bytes) -> tuple[int, dict[bytes, bytes]]:
    """Status and headers of the answer."""
    line, *lines = (await client.ask(*pieces)).partition(b"\r\n\r\n")[0].split(b"\r\n")
    return int(line.split(b" ")[1]), dict(tuple(one.split(b": ", 1)) for one in lines)  # type: ignore[misc]


async def statuses(client: Client, *requests: bytes) -> list[int]:
    return [(await ask(client, request))[0] for request in requests]


# --- keys


async def test_a_key_that_differs_in_its_last_byte_is_refused() -> None:
    world = World(api_keys=["key-1"])
    client = Client(world.app)
    wrong = chat(lines=[*LINES[:2], b"Authorization: Bearer key-2"])
    assert await statuses(client, chat(), chat(), wrong, wrong, chat()) == [200, 200, 401, 401, 200]
    assert len(world.hybrid.requests) == 3
    client.leave()


async def test_a_key_that_is_taken_away_opens_no_more_for_the_same_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.access_keys, "LOOK_EVERY_S", 0.01)
    file = tmp_path / "keys"
    file.write_text("key-1\nkey-2\n")
    keys = KeyRing(api_file=file)
    await keys.start()
    watching = asyncio.create_task(keys.run())
    client = Client(World(keys=keys).app)
    assert await statuses(client, chat(), chat()) == [200, 200]
    file.write_text("key-2\n")
    await until(lambda: len(keys.api) == 1)
    assert await statuses(client, chat(), chat()) == [401, 401]
    file.write_text("key-1\n")
    await until(lambda: [key.digest for key in keys.api] == [app.access_keys.digest_of(b"key-1")])
    assert await statuses(client, chat()) == [200]
    watching.cancel()
    client.leave()


async def test_a_key_opens_its_models_of_now_and_is_noted_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.access_keys, "LOOK_EVERY_S", 0.01)
    file, entry = tmp_path / "keys.toml", '[[keys]]\nname = "{}"\nkey = "key-1"\nmodels = ["{}"]\n'
    file.write_text(entry.format("anna", "a"))
    keys = KeyRing(api_file=file)
    await keys.start()
    watching = asyncio.create_task(keys.run())
    figures = Figures()
    client = Client(World(keys=keys, figures=figures).app)
    assert await statuses(client, of_model("a"), of_model("a"), of_model("b")) == [200, 200, 404]
    file.write_text(entry.format("bert", "b"))
    await until(lambda: keys.api[0].models == frozenset("b"))
    assert await statuses(client, of_model("a"), of_model("b")) == [404, 200]
    assert [one.key for one in figures.ended] == ["anna"] * 3 + ["bert"] * 2
    watching.cancel()
    client.leave()


# --- who asks


async def test_clients_that_send_the_same_head_are_each_told_of_as_itself() -> None:
    figures = Figures()
    world = World(figures=figures)
    asking = [("127.0.0.1", False), ("203.0.113.9", False), ("203.0.113.9", True), ("2001:db8::9", True)]
    clients = [Client(world.app, host, tls=tls) for host, tls in asking] * 3  # in turns
    for client in clients:
        assert (await ask(client, chat()))[0] == 200
    names = (b"x-forwarded-for", b"x-forwarded-proto")
    told = [[value for name, value in one.headers if name in names] for one in world.hybrid.requests]
    assert told == [[host.encode(), b"https" if tls else b"http"] for host, tls in asking] * 3
    assert [one.client for one in figures.ended] == [(host, 5) for host, _ in asking] * 3
    for client in clients[: len(asking)]:
        client.leave()


async def test_a_request_has_the_id_that_it_brought_or_one_of_its_own() -> None:
    world = World()
    client = Client(world.app)
    own = [(await ask(client, chat(b"X-Request-Id: mine")))[1][b"x-request-id"] for _ in range(3)]
    assert own == [b"mine"] * 3
    new = [(await ask(client, chat()))[1][b"x-request-id"] for _ in range(4)]
    assert len({*new, b"mine"}) == 5
    assert [dict(one.headers)[b"x-request-id"] for one in world.hybrid.requests] == own + new
    client.leave()


# --- what is asked


async def test_an_engine_gets_of_the_same_head_what_it_got_the_first_time() -> None:
    world = World()
    client = Client(world.app)
    lines = [b"X-Forwarded-For: 9.9.9.9", b"Connection: X-Hop, keep-alive", b"X-Hop: 1", b"Accept: a/b"]
    bodies = [CHAT, CHAT + b" ", CHAT]
    for body in bodies:
        assert (await ask(client, chat(b"X-Request-Id: mine", *lines, body=body)))[0] == 200
    got = [(one.method, one.path, one.headers, one.model) for one in world.hybrid.requests]
    assert got[0] == got[1] == got[2]
    assert got[0][:2] == (b"POST", b"/v1/chat/completions")
    assert dict(got[0][2]) == {
        b"content-type": b"application/json",
        b"accept": b"a/b",
        b"x-forwarded-for": b"9.9.9.9, 127.0.0.1",
        b"x-forwarded-host": b"h",
        b"x-forwarded-proto": b"http",
        b"x-request-id": b"mine",
    }
    assert [one.body for one in world.hybrid.requests] == bodies
    client.leave()


async def test_what_one_request_of_a_head_did_does_not_show_in_the_next() -> None:
    """Model, body, path: all of it is read anew."""
    world = World()
    client = Client(world.app)
    for n in (1, 22, 333):
        await client.ask(of_model(f"m{n}"))
        await client.ask(b"\r\n".join([b"GET /health HTTP/1.1", *LINES, b"", b""]))
    assert [one.model for one in world.hybrid.requests] == ["m1", "m22", "m333"]
    client.leave()


@pytest.mark.parametrize("over", ["whole", "cut", "only said"])
async def test_a_body_may_be_no_longer_with_the_same_head(over: str) -> None:
    world = World(max_body_size=1000)
    client = Client(world.app)
    fits, longer = chat(body=CHAT + b" " * (1000 - len(CHAT))), chat(body=CHAT + b" " * (1001 - len(CHAT)))
    pieces = {"whole": [longer], "cut": cut(longer, [400]), "only said": [longer[:300]]}[over]
    assert await statuses(client, chat(), chat(), fits) == [200] * 3
    assert (await ask(client, *pieces))[0] == 413
    assert len(world.hybrid.requests) == 3
    client.leave()


async def test_a_form_with_the_same_head_goes_on_as_it_comes() -> None:
    """Its engine is chosen once its model is known, long before its end."""
    world = World()
    client = Client(world.app)
    top = [LINES[0], b"Content-Type: multipart/form-data; boundary=XX"]
    part = b'--XX\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'

    def form(model: bytes, size: int) -> bytes:
        body = part % (b"model", model) + part % (b"file", b"x" * size) + b"--XX--\r\n"
        return post(body, top, b"/v1/audio/transcriptions")

    for n, model in enumerate((b"a", b"bb", b"ccc")):
        long = form(model, 600_000)
        assert (await ask(client, form(model, n)))[0] == 200
        assert (await ask(client, long[:550_000]))[0] == 200  # this engine does not wait for the rest
        client.protocol.data_received(long[550_000:])
    assert [one.model for one in world.hybrid.requests] == ["a", "a", "bb", "bb", "ccc", "ccc"]
    assert [one.upload is None for one in world.hybrid.requests] == [True, False] * 3
    client.leave()


# --- a worker that stops


async def test_a_face_that_shuts_down_closes_behind_the_same_head() -> None:
    world = World()
    client = Client(world.app)
    for _ in range(2):
        assert b"connection" not in (await ask(client, chat()))[1]
    world.app.begin_shutdown(asyncio.get_running_loop().time() + 1000)
    assert (await ask(client, chat()))[1][b"connection"] == b"close" and client.side.closing
    client.leave()
