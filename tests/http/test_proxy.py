"""The hot endpoint, up to the moment an engine answers: what reaches it, and what is refused before."""

from __future__ import annotations

import gc
import logging
import sys
from typing import Any
from urllib.parse import unquote

import pytest

from app.dispatch.epd import PATH as EPD_PATH
from app.dispatch.handover.lmdeploy import Lmdeploy
from app.dispatch.handover.mooncake import Mooncake
from app.dispatch.handover.nixl import Nixl
from app.dispatch.handover.sglang import Sglang
from app.errors import EngineBroke, EngineRefused, EngineTimeout, ModelNotFound, NoNodeAvailable, StoreUnavailable
from app.http.proxy import GENERATING
from app.http.relay import DONE_PATHS
from tests.http.fakes import CHAT, HANG, SSE, Call, FakeAnswer, Reply, World, both_ways, until
from tests.http.test_form import form


def assert_error(reply: Reply, status: int, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    assert reply.status == status and reply.complete
    assert reply.header(b"content-type") == b"application/json"
    assert reply.header(b"x-request-id")
    assert set(reply.error) == {"message", "type", "param", "code"}
    if code is not None:
        assert reply.error["code"] == code
    assert reply.error["param"] == param
    return reply.json()  # type: ignore[no-any-return]


async def test_body_path_and_query_reach_the_engine_byte_for_byte() -> None:
    world = World()
    body = b'\n{ "model":"m",\t"x": "\\u00e9\xc3\xa9" , "n":1.0e3 }  '
    await world.ask("POST", "/v1/a b/c", body, raw_path=b"/v1/a%20b%2Fc", query=b"x=%2E%2e&y=+&&")
    (request,) = world.hybrid.requests
    assert (request.method, request.path) == (b"POST", b"/v1/a%20b%2Fc?x=%2E%2e&y=+&&")
    assert request.body == body and request.model == "m"


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/audio/x/y", "/v1/modelsx"]
)
async def test_R91_any_post_under_v1_is_forwarded(path: str) -> None:
    world = World()
    assert (await world.post(path=path)).status == 200
    assert world.hybrid.requests[0].path == path.encode()


async def test_R91_multipart_form_is_forwarded_unparsed() -> None:
    world = World()
    body = form(('name="file"; filename="a.wav"', b"\x00\xff" * 1000), ('name="model"', b"whisper"))
    reply = await world.post(
        body, path="/v1/audio/transcriptions", headers=[(b"content-type", b"multipart/form-data; boundary=XX")]
    )
    assert reply.status == 200
    assert world.hybrid.requests[0].body == body and world.hybrid.requests[0].model == "whisper"


async def test_body_in_many_chunks_is_joined() -> None:
    world = World()
    await world.post([b"", b'{"mod', b"", b'el":"m"', b"}", b""])
    assert world.hybrid.requests[0].body == b'{"model":"m"}'


async def test_headers_to_the_engine() -> None:
    world = World()
    headers = [
        (b"content-length", b"27"),
        (b"authorization", b"Bearer client"),
        (b"x-api-key", b"client"),
        (b"connection", b"keep-alive, x-hop"),
        (b"x-hop", b"1"),
        (b"x-own", b"1"),
        (b"x-forwarded-for", b"9.9.9.9"),
    ]
    await world.post(headers=headers, client=("10.0.0.7", 1), scheme="https")
    sent = world.hybrid.requests[0].headers
    assert sent[:4] == [
        (b"x-own", b"1"),
        (b"x-forwarded-for", b"9.9.9.9, 10.0.0.7"),
        (b"x-forwarded-host", b"evenhand.test"),
        (b"x-forwarded-proto", b"https"),
    ]
    assert len(sent) == 5 and sent[4][0] == b"x-request-id"


async def test_R85_client_key_reaches_an_engine_only_where_it_is_switched_on() -> None:
    for key in ((b"authorization", b"Bearer k"), (b"x-api-key", b"k")):
        for switch in (False, True):
            world = World(api_keys=["k"], forward_client_key=switch)
            assert (await world.post(headers=[key])).status == 200
            assert (key in world.hybrid.requests[0].headers) is switch


async def test_request_id_is_kept_and_returned() -> None:
    world = World()
    reply = await world.post(headers=[(b"x-request-id", b"mine-1")])
    assert reply.header(b"x-request-id") == b"mine-1"
    assert (b"x-request-id", b"mine-1") in world.hybrid.requests[0].headers


async def test_request_id_is_made_and_is_the_engines_too() -> None:
    world = World()
    made = (await world.post(headers=[(b"x-request-id", b"not sane")])).header(b"x-request-id")
    assert made is not None and len(made) == 32
    assert (b"x-request-id", made) in world.hybrid.requests[0].headers


# --- refused at the door ----------------------------------------------------------------------------


async def test_api_key_is_checked_before_the_body_is_read() -> None:
    world = World(api_keys=["k1", "k2"])
    call = Call(world.app, "POST", "/v1/chat/completions", CHAT)
    await call.run()
    assert_error(call.reply(), 401, "invalid_api_key")
    assert call.reply().header(b"www-authenticate") == b"Bearer"
    assert call.receives == 0 and not world.hybrid.requests
    assert (await world.post(headers=[(b"authorization", b"Bearer k2")])).status == 200


async def test_R65_internal_field_is_refused_by_name() -> None:
    world = World()
    reply = await world.post(b'{"model":"m","kv_transfer_params":{"x":1}}')
    assert_error(reply, 400, "invalid_request", "kv_transfer_params")
    assert not world.hybrid.requests


async def test_R65_null_internal_field_never_reaches_an_engine() -> None:
    world = World()
    assert (await world.post(b'{"model":"m", "migration_request": null}')).status == 200
    assert world.hybrid.requests[0].body == b'{"model":"m"}'


async def test_R65_in_a_form_too_and_allowed_where_it_is_switched_on() -> None:
    body = form(('name="model"', b"m"), ('name="with_cache"', b"1"))
    headers = [(b"content-type", b"multipart/form-data; boundary=XX")]
    assert_error(await World().post(body, headers=headers), 400, param="with_cache")
    world = World(allow_transfer_params=True)
    assert (await world.post(body, headers=headers)).status == 200
    assert (await world.post(b'{"model":"m","with_cache":true}')).status == 200
    assert world.hybrid.requests[1].body == b'{"model":"m","with_cache":true}'


@pytest.mark.parametrize(
    ("body", "param"),
    [(b"", None), (b"{", None), (b"[]", None), (b"{}", "model"), (b'{"model":7}', "model"), (b'{"model":""}', "model")],
)
async def test_R89_bad_body_is_a_400(body: bytes, param: str | None) -> None:
    world = World()
    assert_error(await world.post(body), 400, "invalid_request", param)
    assert not world.hybrid.requests


@pytest.mark.parametrize(
    "raw",
    [
        b"/v1/../nodes/add",
        b"/v1/%2e%2e/nodes/add",
        b"/v1/.%2E/x",
        b"/v1/%2e%2e%2fx",
        b"/v1/..%5cx",
        b"/v1/x/..",
        b"/v1/%252e%252e/x",
        b"/v1/%25252e./x",
    ],
)
async def test_path_that_climbs_is_refused(raw: bytes) -> None:
    world = World()
    assert_error(await world.ask("POST", unquote(raw.decode()), CHAT, raw_path=raw), 400)
    assert not world.hybrid.requests


@pytest.mark.parametrize("raw", [b"/v1/..x", b"/v1/x..y/z", b"/v1/...", b"/v1/%2e/x", b"/v1/a%2Fb", b"/v1/%25"])
async def test_dots_that_do_not_climb_pass(raw: bytes) -> None:
    world = World()
    assert (await world.ask("POST", unquote(raw.decode()), CHAT, raw_path=raw)).status == 200
    assert world.hybrid.requests[0].path == raw


SPELLINGS = [
    b"/v1/chat/completion%73",
    b"/v1/chat%2Fcompletions",
    b"/%76%31/chat/%63ompletions",
    b"/v1/chat/completions/",
    b"/v1/chat/completions%2f/",
]


@pytest.mark.parametrize("raw", SPELLINGS)
async def test_what_engines_route_to_a_path_is_that_path_to_everybody(raw: bytes) -> None:
    # Source: RFC 3986, 6.2.2.2; Starlette's Router, `redirect_slashes`.
    world = World()
    assert (await world.ask("POST", unquote(raw.decode()), CHAT, raw_path=raw, query=b"x=%73/")).status == 200
    assert world.hybrid.requests[0].path == b"/v1/chat/completions?x=%73/"


@pytest.mark.parametrize("raw", SPELLINGS)
async def test_no_spelling_of_a_path_lets_internal_fields_pass(raw: bytes) -> None:
    world = World()
    body = CHAT[:-1] + b',"migration_request":{}}'
    assert_error(await world.ask("POST", unquote(raw.decode()), body, raw_path=raw), 400, param="migration_request")
    assert not world.hybrid.requests


@pytest.mark.parametrize(
    "raw",
    [
        b"/v1//chat/completions",
        b"/v1/chat/completions/x",
        b"/v1/chat/completion%2573",
        b"/v1/chat/Completions",
        b"/v1/completions%20",
        b"/v1/embedding%73",
        b"/v1/embeddings/",
    ],
)
async def test_other_paths_stay_as_they_were_spelt(raw: bytes) -> None:
    world = World()
    assert (await world.ask("POST", unquote(raw.decode()), CHAT, raw_path=raw)).status == 200
    assert world.hybrid.requests[0].path == raw


def test_all_that_is_chosen_by_its_path_has_one_spelling() -> None:
    chosen = {EPD_PATH}.union(*(protocol.paths for protocol in (Lmdeploy, Mooncake, Nixl, Sglang)))
    assert {path.decode() for path in chosen} | DONE_PATHS == GENERATING


async def test_a_stream_at_another_spelling_ends_as_at_the_usual_one() -> None:
    world = World(FakeAnswer(b"data: x\n\n", headers=SSE))
    reply = await world.ask("POST", "/v1/chat/completions/", CHAT)
    assert b"before it was complete" in reply.body


async def test_R58_too_large_by_its_length_is_refused_unread() -> None:
    world = World(max_body_size=100)
    call = Call(world.app, "POST", "/v1/chat/completions", CHAT, headers=[(b"content-length", b"101")])
    await call.run()
    assert "100 bytes" in assert_error(call.reply(), 413, "body_too_large")["error"]["message"]
    assert call.receives == 0 and not world.hybrid.requests


async def test_R58_too_large_in_one_piece_without_a_length_is_refused() -> None:
    world = World(max_body_size=100)
    call = Call(world.app, "POST", "/v1/chat/completions", b"x" * 101)
    await call.run()
    assert "100 bytes" in assert_error(call.reply(), 413, "body_too_large")["error"]["message"]
    assert not world.hybrid.requests


async def test_R58_too_large_in_chunks_is_refused_when_the_bound_is_crossed() -> None:
    world = World(max_body_size=100)
    call = Call(world.app, "POST", "/v1/chat/completions", [b"x" * 60, b"x" * 41, b"x" * 60])
    await call.run()
    assert_error(call.reply(), 413, "body_too_large")
    assert call.receives == 2 and not world.hybrid.requests


async def test_body_of_just_the_bound_passes() -> None:
    world = World(max_body_size=100)
    body = CHAT + b" " * (100 - len(CHAT))
    assert (await world.post([body[:50], body[50:]], headers=[(b"content-length", b"100")])).status == 200


async def test_a_client_that_waits_for_100_and_is_refused_loses_its_connection() -> None:
    expect = (b"expect", b"100-continue")
    reply = await World(max_body_size=10).post(headers=[(b"content-length", b"11"), expect])
    assert reply.status == 413 and reply.header(b"connection") == b"close"
    assert (await World(max_body_size=10).post(headers=[(b"content-length", b"11")])).header(b"connection") is None


# --- errors of the dispatcher -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "code", "lmdeploy"),
    [
        (ModelNotFound("no such model", param="model"), 404, "model_not_found", 10400),
        (NoNodeAvailable("nobody"), 503, "no_node_available", 10401),
        (EngineRefused("refused"), 502, "engine_unreachable", 10402),
        (EngineBroke("broke"), 502, "engine_broke_off", 10402),
        (EngineTimeout("slow", stage="first_byte"), 504, "engine_timeout", 10402),
        (StoreUnavailable("Redis"), 503, "store_unavailable", 10401),
    ],
)
async def test_R89_error_of_the_dispatcher_is_told_as_it_is(error: Any, status: int, code: str, lmdeploy: int) -> None:
    reply = await World(error).post()
    body = assert_error(reply, status, code, error.param)
    assert body["error_code"] == lmdeploy and body["text"] == error.message
    assert (reply.header(b"retry-after") is not None) is (status == 503 or code == "engine_unreachable")


async def test_fault_of_ours_is_a_500_in_the_same_shape_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    reply = await World(ZeroDivisionError("bug")).post(headers=[(b"x-request-id", b"r7")])
    assert "bug" not in assert_error(reply, 500, "internal_error")["error"]["message"]
    assert "request r7 failed" in caplog.text and "ZeroDivisionError" in caplog.text


async def test_keys_and_bodies_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    world = World(ZeroDivisionError("bug"), FakeAnswer(EngineBroke("broke")), api_keys=["the-key"])
    headers = [(b"authorization", b"Bearer the-key")]
    for body in (b'{"model":"m","p":"private"}', b'{"model":"m","p":"private"}', b'{"p":"private"'):
        await world.post(body, headers=headers)
    await world.post(headers=[(b"authorization", b"Bearer wrong-key")])
    assert caplog.text and not any(word in caplog.text for word in ("the-key", "wrong-key", "private"))


async def test_the_body_is_not_kept_while_a_stream_runs() -> None:
    world = World(FakeAnswer(b"x", HANG, headers=[(b"content-type", b"text/event-stream")]))
    body = bytes(bytearray(CHAT))
    call = Call(world.app, "POST", "/v1/chat/completions", body).start()
    await until(lambda: len(call.sent) == 2)
    world.hybrid.requests.clear()
    gc.collect()
    mine = bytes(bytearray(CHAT))
    assert sys.getrefcount(body) == sys.getrefcount(mine)  # which nobody else has
    call.leave()
    assert call.task is not None
    await call.task
