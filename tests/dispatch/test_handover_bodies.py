"""What each leg is sent, protocol by protocol, field by field, and how prefill's answers are read."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from app.dispatch.answer import EngineRequest, Whole
from app.dispatch.bodies import members_of
from app.dispatch.handover.bodies import for_prefill, read_prefilled, with_values
from app.dispatch.handover.bootstrap import Bootstrap
from app.dispatch.handover.lmdeploy import Kept, Lmdeploy, read_kept
from app.dispatch.handover.mooncake import Mooncake
from app.dispatch.handover.nixl import Nixl
from app.dispatch.handover.protocol import Legs
from app.dispatch.handover.sglang import Sglang
from app.errors import BadRequest, EngineProtocolError, EngineRefused
from app.nodes import Node, Role
from app.store.migrations import Session
from tests.dispatch.fakes import D0, D1, HEADERS, MODEL, P0, FakeCaller, FakeFigures, FakeRegistry, Json

CHAT, COMPLETIONS, RESPONSES = b"/v1/chat/completions", b"/v1/completions", b"/v1/responses"
CLIENT: Json = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 100,
    "max_completion_tokens": 100,
    "min_tokens": 5,
    "min_completion_tokens": 5,
    "min_new_tokens": 5,
    "n": 1,
    "best_of": 3,
    "stop": ["x"],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "response_format": {"type": "json_object"},
    "temperature": 0.5,
    "seed": 7,
    "logprobs": True,
    "ec_transfer_params": {"hash": {"metadata": {}}, "ec_items": []},
}
TAKEN_AWAY = {"stream_options", "min_tokens", "min_completion_tokens", "min_new_tokens", "n", "best_of"}
KEPT = {
    name: value
    for name, value in CLIENT.items()
    if name not in TAKEN_AWAY | {"stream", "max_tokens", "max_completion_tokens"}
}


def members(value: Json) -> dict[str, msgspec.Raw]:
    return members_of(json.dumps(value).encode())


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


# --- prefill's body ---------------------------------------------------------------------------------


def test_r66_prefill_gets_one_token_to_make_and_nothing_that_one_token_can_not_honour() -> None:
    made = json.loads(for_prefill(members(CLIENT), {"x": 1}))
    assert made == {**KEPT, "stream": False, "max_tokens": 1, "max_completion_tokens": 1, "x": 1}


@pytest.mark.parametrize(
    ("given", "limits", "made"),
    [
        ({}, ("max_tokens",), {"max_tokens": 1}),
        ({}, ("max_output_tokens",), {"max_output_tokens": 1}),
        ({"max_completion_tokens": 9}, ("max_tokens",), {"max_tokens": 1, "max_completion_tokens": 1}),
        ({"max_output_tokens": 9}, ("max_output_tokens",), {"max_output_tokens": 1}),
        ({}, ("max_tokens", "max_completion_tokens"), {"max_tokens": 1, "max_completion_tokens": 1}),
        ({"max_tokens": None, "min_tokens": None, "stream": None}, ("max_tokens",), {"max_tokens": 1}),
    ],
)
def test_r66_limits_that_were_given_are_lowered_and_no_others_are_added(
    given: Json, limits: tuple[str, ...], made: Json
) -> None:
    found = json.loads(for_prefill(members({"model": "m", **given}), {}, limits=limits))
    assert found == {"model": "m", "stream": False, **made}


def test_prefills_own_words_overrule_a_clients() -> None:
    found = json.loads(
        for_prefill(members({"model": "m", "kv_transfer_params": {"evil": 1}}), {"kv_transfer_params": 2})
    )
    assert found["kv_transfer_params"] == 2


WRITTEN = (
    b'{ "model" : "m", "messages":[ {"content" : "\\u00e4 \\ud83d", "n":1e2} ],"temperature": 0.70,"max_tokens":5}'
)


@pytest.mark.parametrize("make", [lambda m: for_prefill(m, {"x": 1}), lambda m: with_values(m, {"x": 1})])
def test_what_is_not_changed_stays_byte_for_byte(make: Callable[[Any], bytes]) -> None:
    text = WRITTEN.replace(b" \\ud83d", b"")
    before = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    after = msgspec.json.decode(make(members_of(text)), type=dict[str, msgspec.Raw])
    for name in ("model", "messages", "temperature"):
        assert bytes(after[name]) == bytes(before[name])
    assert bytes(after["x"]) == b"1"


def test_a_lone_surrogate_goes_on_as_it_came() -> None:
    assert json.loads(with_values(members_of(WRITTEN), {"x": 1})) == {**json.loads(WRITTEN), "x": 1}
    assert json.loads(for_prefill(members_of(WRITTEN), {}))["messages"] == json.loads(WRITTEN)["messages"]


# --- prefill's answer -------------------------------------------------------------------------------


def whole(body: bytes, kind: bytes = b"application/json") -> Whole:
    return Whole(P0, 200, [(b"content-type", kind)], body)


def test_an_answer_is_read_as_far_as_it_is_looked_at() -> None:
    found = read_prefilled(
        whole(b'{"usage":{"prompt_tokens":3},"choices":[{"finish_reason":"length"}],"k": {"a":1.50} }')
    )
    assert (found.usage, found.aborted, bytes(found.members["k"])) == ({"prompt_tokens": 3}, False, b'{"a":1.50}')


def test_a_stream_is_read_as_the_sum_of_its_events() -> None:
    # An engine that streams though it was asked not to; SGLang's prefill leg does what the client asked for.
    body = (
        b': hi\r\n\r\ndata: {"id":"a","choices":[{"finish_reason":null}],"usage":null}\r\n\r\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":3}}\r\n\r\ndata: [DONE]\r\n\r\n'
    )
    found = read_prefilled(whole(body, b"text/event-stream; charset=utf-8"))
    assert (found.usage, found.aborted, bytes(found.members["id"])) == ({"prompt_tokens": 3}, False, b'"a"')


@pytest.mark.parametrize(
    ("choices", "aborted"),
    [
        ([{"finish_reason": "abort"}], True),
        ([{"finish_reason": "error"}], True),
        ([{}, {"finish_reason": "abort"}], True),
        ([{"finish_reason": "length"}], False),
        ([], False),
        (None, False),
        ([1, None], False),
        ("abort", False),
    ],
)
def test_r60_an_engine_says_that_it_gave_up(choices: object, aborted: bool) -> None:
    assert read_prefilled(whole(json.dumps({"choices": choices}).encode())).aborted is aborted
    events = b"data: " + json.dumps({"choices": choices}).encode() + b'\n\ndata: {"choices":[]}\n\n'
    assert read_prefilled(whole(events, b"text/event-stream")).aborted is aborted


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"<html>", b"\xff", b'{"usage":' + b"[" * 100_000])
def test_an_answer_that_is_no_object_is_an_error_that_names_the_engine(body: bytes) -> None:
    with pytest.raises(EngineProtocolError, match=P0):
        read_prefilled(whole(body))
    if body:
        with pytest.raises(EngineProtocolError, match=P0):
            read_prefilled(whole(b"data: " + body + b"\n\n", b"text/event-stream"))


# --- NIXL -------------------------------------------------------------------------------------------


class World:
    def __init__(self, *nodes: Node) -> None:
        self.registry = FakeRegistry(*nodes)
        self.parts: Any = {"caller": FakeCaller(), "figures": FakeFigures()}
        self.bootstrap = Bootstrap(registry=self.registry, default_port=8998)  # type: ignore[arg-type]


class FakePair:
    """As much of a pair as the bodies look at."""

    def __init__(self, prefill: str = P0, decode: str = D0) -> None:
        self.prefill = SimpleNamespace(url=prefill)
        self.decode = SimpleNamespace(url=decode)


ASK: Json = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.mark.parametrize(
    ("path", "limit"), [(CHAT, "max_tokens"), (COMPLETIONS, "max_tokens"), (RESPONSES, "max_output_tokens")]
)
def test_nixl_asks_prefill_for_a_place(path: bytes, limit: str) -> None:
    # Source: vLLM's toy_proxy_server.py.
    made = Nixl(**World().parts, lease_s=30, recompute=True).prefill_body(members({"model": "m"}), path)
    assert json.loads(made) == {"model": "m", "stream": False, limit: 1, "kv_transfer_params": ASK}


def test_nixl_decode_gets_the_clients_request_with_the_whole_object_that_prefill_named() -> None:
    named = (
        b'{"do_remote_prefill":true, "remote_block_ids" : [[1,2]], "remote_engine_id":"e","remote_host":"h", '
        b'"remote_port":5600 , "new_field": {"a":1.50}}'
    )
    protocol = Nixl(**World().parts, lease_s=30, recompute=True)
    prefilled = read_prefilled(whole(b'{"kv_transfer_params": ' + named + b"}"))
    client = {**CLIENT, "kv_transfer_params": {"remote_host": "evil"}}
    handed = protocol.hand(FakePair(), 0, members(client), prefilled)  # type: ignore[arg-type]
    assert json.loads(handed.body) == {**CLIENT, "kv_transfer_params": json.loads(named)}
    assert named in handed.body


# --- LMDeploy ---------------------------------------------------------------------------------------


def lmdeploy(**parts: Any) -> Lmdeploy:
    made: Any = {**World().parts, "links": None, "sessions": None, "protocol_number": 2, "recompute": True, **parts}
    return Lmdeploy(**made)


@pytest.mark.parametrize(
    ("path", "limits"),
    [(CHAT, {"max_tokens": 1, "max_completion_tokens": 1}), (COMPLETIONS, {"max_tokens": 1})],
)
def test_lmdeploys_prefill_keeps_its_cache(path: bytes, limits: Json) -> None:
    # Source: lmdeploy/serve/proxy/proxy.py; chat has max_completion_tokens too.
    made = json.loads(lmdeploy().prefill_body(members({"model": "m", "session_id": 5}), path))
    assert made == {"model": "m", "stream": False, **limits, "with_cache": True, "preserve_cache": True}


@pytest.mark.parametrize(
    ("n", "refused"), [(1, False), (1.0, False), (None, False), (2, True), (99, True), (2.0, True), ("2", True)]
)
def test_lmdeploy_migrates_one_choice(n: object, refused: bool) -> None:
    if refused:
        with pytest.raises(BadRequest, match="n must be 1") as caught:
            lmdeploy().check(members({"n": n}))
        assert caught.value.param == "n"
    else:
        lmdeploy().check(members({"n": n}))
        lmdeploy().check(members({}))


@pytest.mark.parametrize(
    ("prompt", "several"),
    [
        ("one", False),
        (["one"], False),
        ([1, 2, 3], False),
        ([[1, 2, 3]], False),
        ([], False),
        (["one", "two"], True),
        ([[1], [2]], True),
        (["one", [2]], True),
    ],
)
def test_a_hand_over_is_the_cache_of_one_prompt(prompt: object, several: bool) -> None:
    body = members({"model": "m", "prompt": prompt})
    world = World()
    for one_prompt in (lmdeploy(), Nixl(**world.parts, lease_s=30, recompute=True), mooncake(Engines())[0]):
        if several:
            with pytest.raises(BadRequest, match="one prompt") as caught:
                one_prompt.check(body)
            assert caught.value.param == "prompt"
        else:
            one_prompt.check(body)
    Sglang(**world.parts, bootstrap=world.bootstrap).check(body)  # which has a room for each


@pytest.mark.parametrize(
    "raw", [b'{"id": "\xff"}', b'{"id": 1e400}', b'{"id": "%s"}' % (b"7" * 5000), b'{"cache_block_ids": [1e999]}']
)
def test_what_can_not_be_read_in_prefills_answer_is_missing(raw: bytes) -> None:
    assert read_kept(msgspec.json.decode(raw, type=dict[str, msgspec.Raw])) == Kept(0, False, None, None)


@pytest.mark.parametrize(
    ("answer", "session", "sure"),
    [
        ({"cache_session_id": 7, "id": 8}, 7, True),
        ({"cache_session_id": 7, "id": "chatcmpl-8"}, 7, True),
        ({"cache_session_id": 0}, 0, True),
        ({"id": 8}, 8, True),
        ({"id": "8"}, 8, True),
        ({"id": "chatcmpl-8"}, 0, False),
        ({"id": "cmpl-8", "cache_session_id": None}, 0, False),
        ({"cache_session_id": "7", "id": 8}, 8, True),
        ({"cache_session_id": True, "id": False}, 0, False),
        ({"id": -1}, -1, False),
        ({"id": "-1"}, -1, False),
        ({"id": "\u0665"}, 0, False),
        ({"id": ""}, 0, False),
        ({"id": 1.0}, 0, False),
        ({}, 0, False),
    ],
)
def test_a_session_is_known_by_its_own_number_or_not_at_all(answer: Json, session: int, sure: bool) -> None:
    kept = read_kept(members(answer))
    assert (kept.session, kept.sure) == (session, sure)


@pytest.mark.parametrize(
    ("blocks", "tokens", "kept_blocks", "token"),
    [
        ([3, 4], [11, 12], [3, 4], 12),
        ([], [12], [], 12),
        ([0], [0], [0], 0),
        (None, [12], None, 12),
        ([3], [], [3], None),
        ([3], None, [3], None),
        ([3, "4"], [12], None, 12),
        ([3, None], [12], None, 12),
        ([True], [12], None, 12),
        ("34", "12", None, None),
        ([3], ["12"], [3], None),
        ([[3]], [[12]], None, None),
    ],
)
def test_blocks_and_the_last_token_are_read_or_missing(
    blocks: object, tokens: object, kept_blocks: list[int] | None, token: int | None
) -> None:
    answer = {"cache_session_id": 7, "cache_block_ids": blocks, "remote_token_ids": tokens}
    assert read_kept(members(answer)) == Kept(7, True, kept_blocks, token)


class FakeLinks:
    def __init__(self) -> None:
        self.lives = "1|2"
        self.doubts: list[tuple[str, str]] = []

    def lives_of(self, prefill: str, decode: str) -> str:
        return self.lives

    def doubt(self, prefill: str, decode: str) -> None:
        self.doubts.append((prefill, decode))


class FakeSessions:
    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

        self.moves: set[Any] = set()
        self.life = LIFE
        self.begin, self.done = self.moves.add, self.moves.discard

    def life_of(self, url: str) -> int:
        return self.life

    def hold(self, session: Session) -> None:
        assert session.life == LIFE
        self.log.append(("hold", session.prefill, session.number, session.decode))

    def clear(self, session: Session) -> None:
        self.log.append(("clear", session.prefill, session.number))

    def free_soon(self, session: Session) -> None:
        self.log.append(("free", session.prefill, session.number))


LIFE = 3
"""Of the prefill node when it was asked."""
GOOD: Json = {"id": "chatcmpl-1", "cache_session_id": 7, "cache_block_ids": [3, 4], "remote_token_ids": [11, 12]}


def handed_by(answer: Json, **parts: Any) -> tuple[Any, FakeLinks, FakeSessions, FakeFigures]:
    links, sessions, figures = FakeLinks(), FakeSessions(), FakeFigures()
    protocol = lmdeploy(links=links, sessions=sessions, figures=figures, **parts)
    try:
        pair: Any = FakePair()
        handed: Any = protocol.hand(pair, LIFE, members(CLIENT), read_prefilled(whole(json.dumps(answer).encode())))
    except EngineProtocolError as e:
        handed = e
    return handed, links, sessions, figures


def test_lmdeploys_decode_is_told_of_the_migration() -> None:
    handed, _, sessions, figures = handed_by(GOOD)
    # Source: lmdeploy/pytorch/disagg/conn/protocol.py, MigrationRequest.
    migration = {
        "protocol": 2,
        "remote_engine_id": P0,
        "remote_session_id": 7,
        "remote_token_id": 12,
        "remote_block_ids": [3, 4],
        "is_dummy_prefill": False,
    }
    assert json.loads(handed.body) == {**CLIENT, "migration_request": migration}
    assert sessions.log == [("hold", P0, 7, D0)] and figures.counts == {}


def test_a_session_is_noted_before_decode_is_called_and_struck_off_once_it_has_it() -> None:
    handed, links, sessions, figures = handed_by(GOOD)
    assert sessions.log == [("hold", P0, 7, D0)], "before a link that has still to be made"
    handed.goes_to(D0)
    assert sessions.moves == {handed}
    handed.taken()
    assert sessions.moves == set()
    assert sessions.log == [("hold", P0, 7, D0), ("clear", P0, 7)]
    assert links.doubts == [] and figures.counts == {}


def test_r62_what_decode_does_not_take_is_freed_and_the_link_doubted() -> None:
    handed, links, sessions, _ = handed_by(GOOD)
    handed.goes_to(D0)
    handed.abandon()
    assert sessions.log == [("hold", P0, 7, D0), ("free", P0, 7)] and links.doubts == [(P0, D0)]
    assert sessions.moves == set()


def test_what_never_went_out_is_freed_and_no_link_is_doubted() -> None:
    handed, links, sessions, _ = handed_by(GOOD)
    handed.abandon()
    assert sessions.log == [("hold", P0, 7, D0), ("free", P0, 7)] and links.doubts == []


def test_a_session_is_noted_anew_with_another_decode_node() -> None:
    handed, _, sessions, _ = handed_by(GOOD)
    for url in (D0, D1):
        handed.goes_to(url)
    assert sessions.log == [("hold", P0, 7, D0), ("hold", P0, 7, D1)] and handed.decode == D1


def test_r62_a_session_whose_number_is_not_sure_is_never_freed_by_guessing() -> None:
    handed, _, sessions, figures = handed_by({**GOOD, "cache_session_id": None})
    assert json.loads(handed.body)["migration_request"]["remote_session_id"] == 0
    handed.goes_to(D0)
    handed.abandon()
    assert sessions.log == [] and figures.counts == {"sessions_lost": 1}


def test_a_refusal_proves_nothing_once_the_engines_have_other_lives() -> None:
    handed, links, _, _ = handed_by(GOOD)
    handed.goes_to(D0)
    assert not handed.voided()
    links.lives = "1|5"
    assert handed.voided()


@pytest.mark.parametrize("life", [LIFE + 1, 0])
def test_what_another_process_or_a_node_that_was_taken_out_handed_over_is_void_before_it_goes_out(life: int) -> None:
    handed, _, sessions, _ = handed_by(GOOD)
    assert not handed.voided()
    sessions.life = life
    assert handed.voided()


@pytest.mark.parametrize("missing", [{"cache_block_ids": None}, {"remote_token_ids": []}])
def test_where_blocks_are_missing_decode_computes_again_and_what_is_kept_is_freed(
    missing: Json, caplog: pytest.LogCaptureFixture
) -> None:
    handed, _, sessions, figures = handed_by({**GOOD, **missing})
    assert json.loads(handed.body) == CLIENT
    assert figures.counts == {"missing_params": 1}
    assert sessions.log == [("hold", P0, 7, ""), ("free", P0, 7)]
    assert f"engine {P0} handed nothing over: no cache_block_ids in its answer; decode computes" in caplog.text


@pytest.mark.parametrize(("session", "freed"), [(7, True), (None, False)])
def test_where_blocks_are_missing_it_can_be_a_502_and_what_is_kept_is_freed_all_the_same(
    session: int | None, freed: bool
) -> None:
    error, _, sessions, figures = handed_by(
        {**GOOD, "cache_session_id": session, "cache_block_ids": None}, recompute=False
    )
    assert isinstance(error, EngineProtocolError) and P0 in error.message and error.status == 502
    assert (("free", P0, 7) in sessions.log) is freed and figures.counts == {"missing_params": 1}


# --- where a bootstrap server is ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "port", "host", "address"),
    [
        ("http://10.0.0.7:30000", None, "10.0.0.7", "http://10.0.0.7:8998"),
        ("http://10.0.0.7:30000", 9001, "10.0.0.7", "http://10.0.0.7:9001"),
        ("https://engine/base", 9001, "engine", "http://engine:9001"),
        ("http://[fd00::1]:30000", 9001, "[fd00::1]", "http://[fd00::1]:9001"),
    ],
)
def test_a_bootstrap_server_is_at_the_nodes_host_and_port(url: str, port: int | None, host: str, address: str) -> None:
    bootstrap = World(Node(url, role=Role.Prefill, bootstrap_port=port)).bootstrap
    assert (bootstrap.host_of(url), bootstrap.port_of(url), bootstrap.address_of(url)) == (host, port or 8998, address)


# --- SGLang -----------------------------------------------------------------------------------------


async def legs_of(protocol: Any, body: Json, path: bytes = CHAT, headers: Any = HEADERS) -> Legs:
    request = EngineRequest(b"POST", path, list(headers), json.dumps(body).encode(), MODEL)
    legs: Legs = await protocol.legs(FakePair(), request, members_of(request.body))
    return legs


async def test_sglangs_legs_get_the_same_body_and_meet_in_a_room() -> None:
    world = World(Node(P0, role=Role.Prefill, bootstrap_port=9001))
    protocol = Sglang(**world.parts, bootstrap=world.bootstrap)
    legs = await legs_of(protocol, CLIENT)
    assert legs.prefill == legs.decode
    made = json.loads(legs.prefill.body)
    room = made.pop("bootstrap_room")
    assert made == {**CLIENT, "bootstrap_host": "p0", "bootstrap_port": 9001}
    assert type(room) is int and 0 <= room < 2**63
    assert json.loads((await legs_of(protocol, CLIENT)).decode.body)["bootstrap_room"] != room


@pytest.mark.parametrize(
    ("path", "prompt", "batch"),
    [
        (COMPLETIONS, "hi", None),
        (COMPLETIONS, ["hi"], 1),
        (COMPLETIONS, ["a", "b", "c"], 3),
        (COMPLETIONS, [1, 2, 3], None),
        (COMPLETIONS, [[1, 2], [3]], 2),
        (COMPLETIONS, [], None),
        (COMPLETIONS, None, None),
        (CHAT, ["a", "b"], None),
        (COMPLETIONS + b"?x=1", ["a", "b"], 2),
    ],
)
async def test_sglangs_prompts_get_a_room_each(path: bytes, prompt: object, batch: int | None) -> None:
    world = World(Node(P0, role=Role.Prefill))
    legs = await legs_of(Sglang(**world.parts, bootstrap=world.bootstrap), {"model": "m", "prompt": prompt}, path)
    made = json.loads(legs.decode.body)
    if batch is None:
        assert (made["bootstrap_host"], made["bootstrap_port"]) == ("p0", 8998)
        assert isinstance(made["bootstrap_room"], int)
    else:
        assert (made["bootstrap_host"], made["bootstrap_port"]) == (["p0"] * batch, [8998] * batch)
        assert len(set(made["bootstrap_room"])) == batch


# --- Mooncake ---------------------------------------------------------------------------------------


class Engines:
    """Bootstrap servers: an answer or an exception, or a gate before it."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, ...]] = []
        self.gate: asyncio.Event | None = None

    async def ask_json(self, method: str, url: str, path: str, key: str | None, *, timeout_s: float) -> object:
        self.asked.append((method, url, path))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if self.gate is not None:
            await self.gate.wait()
        if isinstance(answer, BaseException):
            raise answer
        return answer


ONE: Json = {"0": {"engine_id": "e-0", "worker_addr": {"0": {"0": "tcp://10.0.0.7:1"}}}}


def mooncake(engines: Engines, *nodes: Node) -> tuple[Mooncake, World]:
    world = World(*(nodes or (Node(P0, role=Role.Prefill, life=1),)))
    return Mooncake(**world.parts, bootstrap=world.bootstrap, engines=engines), world  # type: ignore[arg-type]


@pytest.mark.parametrize(("path", "limit"), [(CHAT, "max_tokens"), (RESPONSES, "max_output_tokens")])
async def test_mooncakes_legs_meet_by_a_transfer_id(path: bytes, limit: str) -> None:
    # Source: vLLM's mooncake_connector_proxy.py.
    engines = Engines(ONE)
    protocol, _ = mooncake(engines, Node(P0, role=Role.Prefill, bootstrap_port=9001))
    legs = await legs_of(
        protocol, {"model": "m", "stream": True, "n": 2}, path, [*HEADERS, (b"x-data-parallel-rank", b"5")]
    )
    prefill, decode = json.loads(legs.prefill.body), json.loads(legs.decode.body)
    transfer = prefill["kv_transfer_params"]["transfer_id"]
    assert transfer.startswith("xfer-") and len(transfer) > 20
    assert prefill == {
        "model": "m",
        "stream": False,
        limit: 1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer},
    }
    assert decode == {
        "model": "m",
        "stream": True,
        "n": 2,
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": "http://p0:9001",
            "remote_engine_id": "e-0",
            "transfer_id": transfer,
        },
    }
    ranks = [
        [value for name, value in leg.headers if name == b"x-data-parallel-rank"] for leg in (legs.prefill, legs.decode)
    ]
    assert ranks == [[b"0"], [b"5"]]
    assert engines.asked == [("GET", "http://p0:9001", "/query")]
    assert (
        json.loads((await legs_of(protocol, {"model": "m"})).decode.body)["kv_transfer_params"]["transfer_id"]
        != transfer
    )


async def test_mooncakes_rank_and_engine_belong_together() -> None:
    protocol, _ = mooncake(Engines({str(n): {"engine_id": f"e-{n}"} for n in range(4)}))
    seen = set()
    for _ in range(60):
        legs = await legs_of(protocol, {"model": "m"})
        (rank,) = (value for name, value in legs.prefill.headers if name == b"x-data-parallel-rank")
        assert json.loads(legs.decode.body)["kv_transfer_params"]["remote_engine_id"] == f"e-{rank.decode()}"
        seen.add(rank)
    assert seen == {b"0", b"1", b"2", b"3"}  # missed with a chance of 4 * 0.75**60


async def test_mooncakes_server_is_asked_once_for_all_and_again_after_a_restart_or_a_failure() -> None:
    engines = Engines(ONE)
    engines.gate = asyncio.Event()
    protocol, world = mooncake(engines)
    tasks = [asyncio.create_task(legs_of(protocol, {"model": "m"})) for _ in range(5)]
    await asyncio.sleep(0.01)
    assert len(engines.asked) == 1
    tasks[0].cancel()  # whoever asked first leaves; the question stays
    engines.gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [task.cancelled() for task in tasks] == [True, False, False, False, False]
    await legs_of(protocol, {"model": "m"})
    assert len(engines.asked) == 1

    world.registry.set(Node(P0, role=Role.Prefill, life=2))
    await legs_of(protocol, {"model": "m"})
    await legs_of(protocol, {"model": "m"})
    assert len(engines.asked) == 2

    protocol.failed(P0)
    await legs_of(protocol, {"model": "m"})
    assert len(engines.asked) == 3
    protocol.failed("http://unknown:1")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        real = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + self.ahead_s)


async def engine_told(protocol: Mooncake) -> str:
    await asyncio.sleep(0.01)  # for what runs in the background
    told: str = json.loads((await legs_of(protocol, {"model": "m"})).decode.body)["kv_transfer_params"][
        "remote_engine_id"
    ]
    return told


async def test_after_a_refusal_mooncakes_server_is_asked_beside_the_requests_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    engines = Engines(ONE, {"0": {"engine_id": "e-new"}}, EngineRefused("refused"), {"0": {"engine_id": "e-newer"}})
    protocol, _ = mooncake(engines)
    protocol.refused(P0)  # of which nothing is known yet
    assert await engine_told(protocol) == "e-0"
    clock.ahead_s += 0.9
    protocol.refused(P0)
    assert await engine_told(protocol) == "e-0" and len(engines.asked) == 1
    clock.ahead_s += 0.2
    engines.gate = asyncio.Event()
    for _ in range(5):
        protocol.refused(P0)
    assert await engine_told(protocol) == "e-0" and len(engines.asked) == 2, "nobody waits for it"
    clock.ahead_s += 1.1
    protocol.refused(P0)
    assert await engine_told(protocol) == "e-0" and len(engines.asked) == 2, "it is being asked"
    engines.gate.set()
    assert await engine_told(protocol) == "e-new"
    protocol.refused(P0)
    assert await engine_told(protocol) == "e-new" and len(engines.asked) == 3, "where there is no answer"
    clock.ahead_s += 1.1
    protocol.refused(P0)
    await asyncio.sleep(0.01)
    assert await engine_told(protocol) == "e-newer" and len(engines.asked) == 4


@pytest.mark.parametrize("fault", [EngineRefused("refused"), asyncio.CancelledError()], ids=["fails", "is cancelled"])
async def test_mooncakes_question_that_fails_after_all_have_left_is_asked_again(fault: BaseException) -> None:
    engines = Engines(fault, ONE)
    engines.gate = asyncio.Event()
    protocol, _ = mooncake(engines)
    task = asyncio.create_task(legs_of(protocol, {"model": "m"}))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    engines.gate.set()
    await asyncio.sleep(0.01)
    assert await engine_told(protocol) == "e-0"


async def test_mooncakes_failed_question_is_asked_again_by_the_next() -> None:
    engines = Engines(EngineRefused("refused"), ONE)
    protocol, _ = mooncake(engines)
    with pytest.raises(EngineRefused):
        await legs_of(protocol, {"model": "m"})
    await legs_of(protocol, {"model": "m"})
    assert len(engines.asked) == 2


async def test_a_bootstrap_server_that_fails_is_told_from_an_engine() -> None:
    protocol, _ = mooncake(Engines(EngineRefused("engine http://p0:8998 refused the connection")))
    with pytest.raises(EngineRefused) as caught:
        await legs_of(protocol, {"model": "m"})
    assert caught.value.message == (
        f"the bootstrap server http://p0:8998 of prefill node {P0} refused the connection (its port: --bootstrap-port)"
    )


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"x": {"engine_id": "e"}},
        {"0": {}},
        {"0": {"engine_id": 7}},
        {"0": None},
        {"-1": {"engine_id": "e"}},
        "e",
    ],
)
async def test_a_bootstrap_server_that_names_no_engine_is_a_502(answer: object) -> None:
    protocol, _ = mooncake(Engines(answer))
    with pytest.raises(EngineProtocolError, match=f"http://p0:8998 of prefill node {P0} names no engine") as caught:
        await legs_of(protocol, {"model": "m"})
    assert caught.value.status == 502
