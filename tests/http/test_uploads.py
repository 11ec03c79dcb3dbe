"""Forms that are not all here when they go on: what is held, what is refused, what the engine and the client see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from app.errors import BadRequest, BodyTooLarge
from app.http.body import ClientLeft
from app.http.form import Form
from app.http.upload import AT_ONCE_BYTES, HELD_BYTES, Upload
from tests.http.fakes import HANG, Call, World, until
from tests.http.in_process import Face
from tests.support.engine import SimulatedEngine
from tests.support.loop import LoopThread

TYPE = (b"content-type", b"multipart/form-data; boundary=XX")
PATH = "/v1/audio/transcriptions"


def part(disposition: str, content: bytes) -> bytes:
    return b"--XX\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % (disposition.encode(), content)


MODEL = part('name="model"', b"whisper")
END = b"--XX--\r\n"


def audio(size: int) -> bytes:
    # A beginning of the boundary, at every place in what is read at once.
    return part('name="file"; filename="a.wav"', (b"\r\n--X\r\n\0" * (size // 9 + 1))[:size])


def cut(body: bytes, size: int) -> list[bytes]:
    return [body[at : at + size] for at in range(0, len(body), size)]


class Feed:
    """`receive` of a script; counts what was asked for. The last one ends the body."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = list(pieces)
        self.asked = 0

    async def __call__(self) -> dict[str, Any]:
        self.asked += 1
        if not self.pieces:
            return {"type": "http.disconnect"}
        piece = self.pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self.pieces)}


def upload_of(feed: Feed, length: int | None = None, limit_bytes: int = 10**9) -> Upload:
    form = Form(TYPE[1], allow_transfer_params=False)
    return Upload(feed, form, length=length, limit_bytes=limit_bytes)  # type: ignore[arg-type]


async def rest_of(upload: Upload) -> bytes:
    body = b""
    while piece := await upload.read():
        body += piece
    return body


@pytest.mark.parametrize("size", [100, AT_ONCE_BYTES // 2])
@pytest.mark.parametrize("order", ["first", "last"])
async def test_a_small_form_goes_in_one_piece(size: int, order: str) -> None:
    body = (MODEL + audio(size) if order == "first" else audio(size) + MODEL) + END
    upload = upload_of(Feed(cut(body, 1000)))
    assert await upload.begin() == "whisper"
    assert upload.whole == body and not upload.spent
    upload.close()


async def test_with_the_model_first_only_the_beginning_is_held() -> None:
    body = MODEL + audio(5_000_000) + END
    feed = Feed(cut(body, 50_000))
    upload = upload_of(feed, len(body))
    assert await upload.begin() == "whisper"
    assert (upload.whole, upload.spent, upload.ended) == (None, False, False)
    assert upload.received_bytes < AT_ONCE_BYTES + 50_000
    assert not upload._held._rolled  # type: ignore[attr-defined]
    assert await rest_of(upload) == body
    assert upload.spent and upload.ended
    upload.close()


async def test_before_anything_new_is_given_out_it_can_begin_again() -> None:
    body = MODEL + audio(2_000_000) + END
    upload = upload_of(Feed(cut(body, 50_000)), len(body))
    await upload.begin()
    held = upload.received_bytes
    first = b""
    while len(first) < held:
        first += await upload.read()
    assert not upload.spent and first == body[:held]
    upload.rewind()
    assert await rest_of(upload) == body
    upload.close()


async def test_with_the_model_last_a_file_holds_what_memory_should_not() -> None:
    body = audio(HELD_BYTES * 3) + MODEL + END
    upload = upload_of(Feed(cut(body, 50_000)))
    assert await upload.begin() == "whisper"
    assert upload.whole is None and upload.ended
    assert upload._held._rolled  # type: ignore[attr-defined]
    for _ in range(2):
        upload.rewind()
        assert await rest_of(upload) == body
    assert not upload.spent  # so another engine may be tried
    upload.close()


async def test_a_length_that_is_reached_is_the_end() -> None:
    """Else an incomplete form would be all with the engine before it is found out."""
    body = MODEL + audio(1_000_000)
    feed = Feed([*cut(body, 50_000), b""])
    upload = upload_of(feed, len(body))
    await upload.begin()
    got: list[bytes] = []

    async def read_on() -> None:
        while piece := await upload.read():
            got.append(piece)

    with pytest.raises(BadRequest, match="is not complete"):
        await read_on()
    assert len(b"".join(got)) < len(body)
    upload.close()


async def test_too_large_is_found_while_it_goes_on() -> None:
    upload = upload_of(Feed(cut(MODEL + audio(2_000_000) + END, 50_000)), limit_bytes=1_500_000)
    await upload.begin()
    with pytest.raises(BodyTooLarge):
        await rest_of(upload)
    assert upload.received_bytes <= 1_550_000
    upload.close()


@pytest.mark.parametrize("size", [10_000, 2_000_000])
async def test_a_client_that_leaves_ends_it(size: int) -> None:
    feed = Feed(cut(MODEL + audio(size), 5_000))
    upload = upload_of(feed)
    leaves = len(feed.pieces)

    async def receive() -> dict[str, Any]:
        if feed.asked == leaves:
            return {"type": "http.disconnect"}
        return await feed() | {"more_body": True}

    upload._receive = receive  # type: ignore[assignment]

    async def read_all() -> None:
        await upload.begin()
        await rest_of(upload)

    with pytest.raises(ClientLeft):
        await read_all()
    upload.close()


# --- with the face


@pytest.mark.parametrize("wired", [False, True])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (audio(10) + END, "model"),
        (MODEL + audio(10) + MODEL + END, "model"),
        (part('name="model"', b"m" * 9000) + END, "model"),
        (part(f'name="{"n" * 9000}"', b"") + MODEL + END, None),
        (MODEL + audio(10), None),
        (MODEL + audio(10) + END[:-4], None),
        (MODEL + part('name="bootstrap_room"', b"1") + END, "bootstrap_room"),
        (b"nothing of the kind", None),
    ],
)
async def test_a_hostile_form_is_a_400_and_reaches_nobody(
    body: bytes, param: str | None, wired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.http.fakes.Call.wired", wired)
    world = World()
    for pieces in ([body], cut(body, 3), cut(body, 4000)):
        reply = await world.ask("POST", PATH, pieces, headers=[TYPE])
        assert (reply.status, reply.error["param"]) == (400, param)
    assert not world.hybrid.requests


@pytest.mark.parametrize("first", [TYPE, (b"content-type", b"application/json")])
@pytest.mark.parametrize("wired", [False, True])
async def test_a_form_with_two_content_types_is_a_400(
    first: tuple[bytes, bytes], wired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.http.fakes.Call.wired", wired)
    world = World()
    headers = [first, (b"content-type", b"multipart/form-data; boundary=YY")]
    reply = await world.ask("POST", PATH, [MODEL + audio(10) + END], headers=headers)
    assert (reply.status, reply.error["message"]) == (400, "A form must have one Content-Type")
    assert not world.hybrid.requests


@pytest.mark.parametrize("wired", [False, True])
async def test_too_large_is_a_413_before_or_while_it_comes(wired: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.http.fakes.Call.wired", wired)
    world = World(max_body_size=10_000)
    body = MODEL + audio(20_000) + END
    told = [TYPE, (b"content-length", b"%d" % len(body))]
    assert (await world.ask("POST", PATH, cut(body, 100), headers=told)).status == 413
    assert (await world.ask("POST", PATH, cut(body, 100), headers=[TYPE])).status == 413
    assert not world.hybrid.requests


@pytest.mark.parametrize("wired", [False, True])
async def test_a_client_that_leaves_while_the_engine_is_chosen(wired: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.http.fakes.Call.wired", wired)
    world = World(HANG)
    body = MODEL + audio(100) + END
    call = Call(world.app, "POST", PATH, cut(body, 10), headers=[TYPE]).start()
    await until(lambda: world.hybrid.waiting == 1)
    call.leave()
    await until(lambda: call.task is not None and call.task.done())
    assert not call.sent and not world.app.running


async def test_a_form_for_a_path_that_may_be_split_is_read_whole() -> None:
    world = World()
    body = MODEL + audio(HELD_BYTES * 2) + END
    await world.ask("POST", "/v1/chat/completions", cut(body, 50_000), headers=[TYPE])
    (request,) = world.hybrid.requests
    assert request.upload is None and request.body == body


# --- with our server and our transport


@pytest.fixture
def engine(engine_factory: Any) -> SimulatedEngine:
    engine: SimulatedEngine = engine_factory(models=("whisper",))
    return engine


@pytest.fixture
def face(engine: SimulatedEngine, engine_loop: LoopThread) -> Iterator[Face]:
    face = Face(engine.url, engine_loop)
    yield face
    face.close()


def request(body: bytes, *more: bytes, path: str = PATH) -> bytes:
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"host: a", b": ".join(TYPE), *more]
    if not any(b"chunked" in line for line in more):
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join([*lines, b"", b""]) + body


SMALL = b"\r\n" + part('name="file"; filename="a"', b"\r\n--X\r\n--XY"[:7] + b"\0") + MODEL + END


@pytest.mark.parametrize("at", range(0, len(request(SMALL)) + 1, 7))
def test_wherever_a_form_is_cut_the_engine_gets_it_as_it_is(face: Face, engine: SimulatedEngine, at: int) -> None:
    whole = request(SMALL)
    said = face.say([whole[:at], whole[at:]] if at else [whole])
    assert said.written.startswith(b"HTTP/1.1 200 ")
    assert [r.body for r in engine.requests] == [SMALL]


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_form_passes_byte_for_byte(face: Face, engine: SimulatedEngine, order: str, chunked: bool) -> None:
    body = (MODEL + audio(3_000_000) if order == "first" else audio(3_000_000) + MODEL) + END
    if chunked:
        pieces = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in cut(body, 40_000)]
        stream = [request(b"", b"transfer-encoding: chunked"), *pieces, b"0\r\n\r\n"]
    else:
        stream = cut(request(body), 40_000)
    said = face.say(stream)
    assert said.written.startswith(b"HTTP/1.1 200 ")
    (record,) = engine.requests
    assert record.body == body
    assert record.header(b"content-length") == (None if chunked else b"%d" % len(body))


def test_expect_is_answered_before_the_body_and_not_passed_on(face: Face, engine: SimulatedEngine) -> None:
    whole = request(SMALL, b"expect: 100-continue")
    at = len(whole) - len(SMALL)
    said = face.say([whole[:at], whole[at:]])
    assert said.written.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")
    assert engine.requests[0].header(b"expect") is None


def test_a_field_that_is_refused_behind_the_model_cuts_the_engine_off(face: Face, engine: SimulatedEngine) -> None:
    body = MODEL + audio(3_000_000) + part('name="with_cache"', b"1") + END
    said = face.say(cut(request(body), 40_000))
    assert said.written.startswith(b"HTTP/1.1 400 ") and b"with_cache" in said.written
    assert not engine.requests  # which are noted when they are complete


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [1000, 3_000_000])
def test_an_alias_or_the_default_model_is_put_into_a_form_on_its_way(
    engine: SimulatedEngine, engine_loop: LoopThread, order: str, chunked: bool, named: bool, size: int
) -> None:
    face = Face(engine.url, engine_loop, alias=["a=whisper"], default_model="a")
    came, goes = (
        (model + audio(size) if order == "first" else audio(size) + model) + END
        for model in (part('name="model"', b"a" if named else b""), MODEL)
    )
    if chunked:
        pieces = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in cut(came, 40_000)]
        stream = [request(b"", b"transfer-encoding: chunked"), *pieces, b"0\r\n\r\n"]
    else:
        stream = cut(request(came), 40_000)
    said = face.say(stream)
    face.close()
    assert said.written.startswith(b"HTTP/1.1 200 ")
    (record,) = engine.requests
    assert record.body == goes
    assert record.header(b"content-length") == (None if chunked and size > 10_000 else b"%d" % len(goes))
