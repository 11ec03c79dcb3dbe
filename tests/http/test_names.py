"""Aliases and the default model: what is routed, what the engine gets, what is listed, and who may."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import BadRequest, ConfigurationError
from app.http.form import renamed_form
from app.http.peek import peek, renamed
from app.http.upload import AT_ONCE_BYTES, HELD_BYTES
from app.nodes import Node, State
from app.settings import SOURCES_VARIABLE, Settings
from tests.http.fakes import World

A = "http://10.0.0.1:1"
FORM = "multipart/form-data; boundary=XX"


def world(*nodes: Node, **settings: Any) -> World:
    return World(nodes=nodes or [Node(A, models=("internlm2",), registered_at_ms=5_000)], **settings)


# --- the body


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b'{"model":"a","n":1}', b'{"model":"M","n":1}'),
        (b' { "n" : 1.50,\t"model" :\n "a" } ', b' { "n" : 1.50,\t"model" :\n "M" } '),
        # Not those inside of others, nor what a text says.
        (b'{"tools":[{"model":"a"}],"model":"a"}', b'{"tools":[{"model":"a"}],"model":"M"}'),
        (b'{"x":"\\"model\\":\\"a\\"","model":"a","y":{"model":"a"}}',
         b'{"x":"\\"model\\":\\"a\\"","model":"M","y":{"model":"a"}}'),
        # Of repeated members the last is read.
        (b'{"model":"b","model":"a"}', b'{"model":"b","model":"M"}'),
        (b'{"model":"a\\"b\\\\","n":1}', b'{"model":"M","n":1}'),
        (b'{"model":"","n":1}', b'{"model":"M","n":1}'),
        (b'\n{"n":1}', b'\n{"model":"M","n":1}'),
        (b'{ }', b'{"model":"M" }'),
        (b'{"tools":[{"model":"a"}]}', b'{"model":"M","tools":[{"model":"a"}]}'),
        # A lone surrogate, which strict parsers refuse.
        (b'{"model":"a","x":"\\ud800"}', b'{"model":"M","x":"\\ud800"}'),
    ],
)  # fmt: skip
def test_only_the_models_value_is_replaced(body: bytes, wanted: bytes) -> None:
    assert renamed(body, "M") == wanted


@pytest.mark.parametrize(
    "body",
    [
        b'{"\\u006dodel":"a","n":1.50}',
        b'{"x":[' + b'{"model":"a"},' * 9 + b'{}],"model":"a","n":1.50}',
    ],
)
def test_where_it_is_not_found_at_once_the_other_values_stay(body: bytes) -> None:
    made = renamed(body, "M")
    assert json.loads(made) == {**json.loads(body), "model": "M"} and b":1.50" in made


@settings(deadline=None, max_examples=20)
@given(
    st.recursive(
        st.none() | st.text() | st.floats(allow_nan=False, allow_infinity=False) | st.just("model"),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("model"), inner),
    ),
    st.text(min_size=1),
    st.booleans(),
)
def test_as_pythons_own_parser_reads_it(other: Any, model: str, first: bool) -> None:
    members = [("model", "alias"), ("other", other)]
    body = json.dumps(dict(members if first else members[::-1]))
    try:
        wanted = {**json.loads(body), "model": model}
        made = renamed(body.encode(), model)
    except UnicodeEncodeError:
        return
    assert json.loads(made) == wanted
    assert list(json.loads(made)) == list(json.loads(body))


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b'--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\na\r\n--XX--\r\n',
         b'--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\nM\r\n--XX--\r\n'),
        (b'\r\n--XX\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\na\r\n--XX--',
         b'\r\n--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\nM\r\n'
         b'--XX\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\na\r\n--XX--'),
    ],
)  # fmt: skip
def test_of_a_form_only_the_models_field_is_replaced(body: bytes, wanted: bytes) -> None:
    assert renamed_form(FORM.encode(), body, "M") == wanted


# --- requests


async def test_a_request_for_an_alias_is_one_for_its_model() -> None:
    one = world(alias=["gpt-4o=internlm2", "o1=internlm2"])
    reply = await one.post(b'{"n":1.0, "model": "gpt-4o"}')
    (request,) = one.hybrid.requests
    assert (reply.status, request.model, request.body) == (200, "internlm2", b'{"n":1.0, "model": "internlm2"}')


async def test_of_a_form_too() -> None:
    one = world(alias=["gpt-4o=internlm2"])
    body = b'--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n--XX--\r\n'
    await one.post(body % b"gpt-4o", headers=[(b"content-type", FORM.encode())])
    assert one.hybrid.requests[0].body == body % b"internlm2"


async def test_other_names_are_the_very_body_that_came() -> None:
    one = world(alias=["gpt-4o=internlm2"], default_model="internlm2")
    body = b'{"model":"internlm2"}'
    await one.post(body)
    assert one.hybrid.requests[0].body == body


async def test_a_model_that_a_node_has_is_itself_also_while_the_node_is_away() -> None:
    for state in (State.READY, State.DOWN, State.GONE):
        both = Node(A, models=("gpt-4o", "internlm2"), state=state)
        one = world(both, alias=["gpt-4o=internlm2"])
        await one.post(b'{"model":"gpt-4o"}')
        assert one.hybrid.requests[0].model == "gpt-4o"
        listed = (await one.ask("GET", "/v1/models")).json()["data"]
        assert all(card["root"] == card["id"] for card in listed)


@pytest.mark.parametrize("body", [b'{"messages":[]}', b'{"model":"","messages":[]}'])
async def test_the_default_model_is_for_requests_that_name_none(body: bytes) -> None:
    one = world(default_model="gpt-4o", alias=["gpt-4o=internlm2"])
    assert (await one.post(body)).status == 200
    assert one.hybrid.requests[0].model == "internlm2"
    assert json.loads(one.hybrid.requests[0].body) == {"model": "internlm2", "messages": []}
    assert (await world(alias=["gpt-4o=internlm2"]).post(body)).status == 400, "without a default"


async def test_internal_fields_are_refused_in_a_body_without_a_model_too() -> None:
    assert (await world(default_model="internlm2").post(b'{"with_cache":true}')).status == 400


async def test_what_is_no_name_stays_an_error() -> None:
    with pytest.raises(BadRequest):
        peek(b'{"model":5}', allow_transfer_params=False, nameless=True)


# --- the list


async def test_aliases_are_listed_after_the_models_while_their_model_is_there() -> None:
    one = world(alias=["gpt-4o=internlm2", "other=absent"])
    cards = (await one.ask("GET", "/v1/models")).json()["data"]
    assert [(card["id"], card["root"], card["created"]) for card in cards] == [
        ("internlm2", "internlm2", 5),
        ("gpt-4o", "internlm2", 5),
    ]
    assert len({card["permission"][0]["id"] for card in cards}) == 2
    assert (await one.ask("GET", "/v1/models/gpt-4o")).json() == cards[1]
    assert (await one.ask("GET", "/v1/models/other")).status == 404


# --- keys for some models


@pytest.mark.parametrize(
    ("models", "asked", "listed"),
    [
        (["internlm2"], {"internlm2": 200, "gpt-4o": 200, "": 200}, ["internlm2", "gpt-4o"]),
        (["gpt-4o"], {"internlm2": 404, "gpt-4o": 200, "": 404}, ["gpt-4o"]),
        (["absent"], {"internlm2": 404, "gpt-4o": 404, "": 404}, []),
    ],
)
async def test_a_key_for_a_model_is_one_for_its_aliases_and_one_for_an_alias_not_for_the_model(
    models: list[str], asked: dict[str, int], listed: list[str], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f'[[keys]]\nkey = "k"\nmodels = {json.dumps(models)}\n')
    one = world(alias=["gpt-4o=internlm2"], default_model="internlm2", api_keys_file=str(keys))
    await one.app._proxy._authority._keys.start()
    key = [(b"authorization", b"Bearer k")]
    for name, status in asked.items():
        body = json.dumps({"model": name} if name else {}).encode()
        assert (await one.post(body, headers=key)).status == status, name
    cards = (await one.ask("GET", "/v1/models", headers=key)).json()["data"]
    assert [card["id"] for card in cards] == listed


# --- the settings


@pytest.mark.parametrize(
    ("aliases", "line"),
    [
        (["gpt-4o"], "--alias: must be NAME=MODEL, not 'gpt-4o'"),
        (["=m"], "--alias: must be NAME=MODEL, not '=m'"),
        (["a=m", "a=n"], "--alias: a is an alias of two models"),
        (["a=b", "b=m"], "--alias: b is an alias itself; name the model"),
    ],
)
def test_a_wrong_alias_is_told(aliases: list[str], line: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Settings.load({"alias": aliases})
    assert caught.value.message == line


def test_aliases_are_a_table_of_the_file_and_are_handed_on_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "evenhand.toml"
    path.write_text('default-model = "a b"\n[aliases]\ngpt-4o = "internlm2"\n"gpt 4, o" = "a b"\n')
    found = Settings.load({"config": str(path)})
    assert found.aliases == {"gpt-4o": "internlm2", "gpt 4, o": "a b"} and found.default_model == "a b"
    assert Settings.load({"alias": ["a=x,b=y", "c=z=1"]}).aliases == {"a": "x", "b": "y", "c": "z=1"}
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(SOURCES_VARIABLE, "{}")
    assert Settings.load() == found


# --- forms that stream, the only model, and who may

AUDIO = "/v1/audio/transcriptions"
TYPED = [(b"content-type", FORM.encode())]
LARGE = 3_000_000


def part(name: str, content: bytes) -> bytes:
    return b'--XX\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), content)


def form(name: str | None, *, size: int = 10, order: str = "first", preamble: bytes = b"") -> bytes:
    model = part("model", name.encode()) if name is not None else b""
    sound = part("file", (b"\r\n--X\0" * (size // 6 + 1))[:size])
    return preamble + (model + sound if order == "first" else sound + model) + b"--XX--\r\n"


async def sent(one: World, body: bytes, *, told: bool = True, piece: int = 50_000, **more: Any) -> tuple[int, Any]:
    """The answer's status, and what an engine gets: (model, body, Content-Length), or None."""
    headers = [*TYPED, *more.pop("headers", ())]
    if told:
        headers.append((b"content-length", b"%d" % len(body)))
    got: list[Any] = []
    opened = one.hybrid.open

    async def read(request: Any) -> Any:
        if (upload := request.upload) is None:
            got.append((request.model, request.body, len(request.body)))
        else:
            await upload.read()
            assert not upload.spent
            upload.rewind()  # as for a second engine
            data = b""
            while piece := await upload.read():
                data += piece
            got.append((request.model, data, upload.length))
        return await opened(request)

    one.hybrid.open = read  # type: ignore[method-assign, assignment]
    pieces = [body[at : at + piece] for at in range(0, len(body), piece)]
    reply = await one.ask("POST", AUDIO, pieces, headers=headers)
    return reply.status, got[0] if got else None


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("size", [10, 100_000, 800_000, LARGE])
@pytest.mark.parametrize("model", ["internlm2", "m", "a-much-longer-name/than-the-alias"])
async def test_an_alias_is_replaced_in_forms_of_every_size(model: str, size: int, order: str, told: bool) -> None:
    one = world(Node(A, models=(model,)), alias=[f"gpt-4o={model}"])
    came, goes = (form(name, size=size, order=order, preamble=b"\r\n") for name in ("gpt-4o", model))
    status, (routed, body, length) = await sent(one, came, told=told)
    assert (status, routed) == (200, model)
    assert body == goes
    assert length == (len(goes) if told or size < (AT_ONCE_BYTES if order == "first" else HELD_BYTES) else None)


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("name", [None, ""])
@pytest.mark.parametrize("preamble", [b"", b"\r\n"])
async def test_the_default_model_is_put_into_forms(preamble: bytes, name: str | None, size: int) -> None:
    one = world(default_model="gpt-4o", alias=["gpt-4o=internlm2"])
    status, (routed, body, length) = await sent(one, form(name, size=size, preamble=preamble))
    assert (status, routed) == (200, "internlm2")
    assert body == form("internlm2", size=size, preamble=preamble)
    assert length == len(body)


@pytest.mark.parametrize("size", [10, LARGE])
async def test_a_form_that_names_nothing_is_refused_without_a_default_also_where_there_is_one_model(size: int) -> None:
    assert await sent(world(), form(None, size=size)) == (400, None)


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("names", [("gpt-4o", "gpt-4o"), ("internlm2", "gpt-4o"), ("", "internlm2")])
async def test_a_form_with_two_models_is_refused_with_aliases_and_a_default_too(
    names: tuple[str, str], size: int
) -> None:
    one = world(default_model="internlm2", alias=["gpt-4o=internlm2"])
    body = b"".join(part("model", name.encode()) for name in names) + form(None, size=size)
    assert await sent(one, body) == (400, None)


async def test_a_form_byte_by_byte() -> None:
    one = world(alias=["gpt-4o=internlm2"])
    for order in ("first", "last"):
        _, (_, body, _) = await sent(one, form("gpt-4o", order=order), piece=1)
        assert body == form("internlm2", order=order)


async def keyed(tmp_path: Path, models: list[str], *nodes: Node, **settings: Any) -> World:
    keys = tmp_path / "keys"
    keys.write_text(f'[[keys]]\nkey = "k"\nmodels = {json.dumps(models)}\n')
    one = world(*nodes, api_keys_file=str(keys), **settings)
    await one.app._proxy._authority._keys.start()
    return one


KEY = [(b"authorization", b"Bearer k")]


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize(
    ("models", "name", "status"),
    [
        (["internlm2"], "internlm2", 200),
        (["internlm2"], "gpt-4o", 200),
        (["internlm2"], None, 200),
        (["gpt-4o"], "gpt-4o", 200),
        (["gpt-4o"], "internlm2", 404),
        (["gpt-4o"], None, 404),
        (["other"], "gpt-4o", 404),
        (["other"], "internlm2", 404),
    ],
)
async def test_a_keys_models_are_checked_before_an_engine_hears_of_a_form(
    tmp_path: Path, models: list[str], name: str | None, status: int, size: int, order: str
) -> None:
    one = await keyed(tmp_path, models, alias=["gpt-4o=internlm2"], default_model="internlm2")
    found, got = await sent(one, form(name, size=size, order=order), headers=KEY)
    assert found == status
    assert (got is not None) is (status == 200)
    assert bool(one.hybrid.requests) is (status == 200)


@pytest.mark.parametrize(("models", "status"), [(["internlm2"], 200), (["other"], 404)])
@pytest.mark.parametrize("path", ["/tokenize", "/v1/rerank"])
async def test_a_keys_models_are_checked_for_the_only_model(
    tmp_path: Path, path: str, models: list[str], status: int
) -> None:
    one = await keyed(tmp_path, models, alias=["gpt-4o=internlm2"])
    body = b'{ "prompt":"a" }'
    reply = await one.ask("POST", path, body, headers=KEY)
    assert reply.status == status
    assert [(r.model, r.body) for r in one.hybrid.requests] == ([("internlm2", body)] if status == 200 else [])
    assert status == 200 or b"internlm2" not in reply.body  # a name that the key may not learn


async def test_a_key_for_an_alias_may_leave_it_out_where_it_is_the_default(tmp_path: Path) -> None:
    one = await keyed(tmp_path, ["gpt-4o"], alias=["gpt-4o=internlm2"], default_model="gpt-4o")
    assert (await one.post(b"{}", headers=KEY)).status == 200
    assert (await one.post(b'{"model":"internlm2"}', headers=KEY)).status == 404


@pytest.mark.parametrize("body", [b'{"prompt":"a"}', b'{"model":null,"prompt":"a"}', b'{"model":"","prompt":"a"}'])
async def test_the_default_model_comes_before_the_only_one(body: bytes) -> None:
    both = [Node(A, models=("internlm2",)), Node("http://10.0.0.2:1", models=("other",))]
    for nodes in (both, both[1:]):
        one = world(*nodes, default_model="internlm2")
        await one.ask("POST", "/tokenize", body)
        (request,) = one.hybrid.requests
        assert request.model == "internlm2"
        assert json.loads(request.body) == {"model": "internlm2", "prompt": "a"}


async def test_an_alias_counts_beside_v1_too() -> None:
    one = world(alias=["gpt-4o=internlm2"])
    await one.ask("POST", "/tokenize", b'{"prompt":"a","model":"gpt-4o"}')
    assert one.hybrid.requests[0].body == b'{"prompt":"a","model":"internlm2"}'
    assert (await one.ask("POST", "/tokenize", b'{"prompt":"a","model":""}')).status == 400
