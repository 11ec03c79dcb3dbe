"""What the simulated engine says: knobs and a request in, a status, headers and pieces of body out.

Pure and deterministic: the same knobs, body and request id give the same bytes. No socket, no clock.
The shapes are OpenAI's; the words of `/health` are LMDeploy's (healthy, sleeping, initializing).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

Headers = list[tuple[bytes, bytes]]
Pairs = tuple[tuple[str, str], ...]

CREATED = 1_700_000_000  # a constant: an answer must not depend on the clock


@dataclass(slots=True)
class Knobs:
    """How the engine behaves. All can be changed while it runs.

    The scripted faults (`status`, `cut_after`, `eof_after`, `stall_after`, `blackhole`) touch `POST /v1/*`
    only; `blackhole` without `only_for` swallows every request, `/health` included.
    For an answer that is no stream, `*_after` 0 means after the head, more means after half of the body.
    """

    models: tuple[str, ...] = ("sim",)
    ttft_s: float = 0.0  # request to first byte; an answer without stream takes gap_s * (chunks - 1) longer
    gap_s: float = 0.0  # between two chunks
    chunks: int = 16  # content events of an answer; a request's max_tokens may ask for fewer
    text: str = "token"  # content of chunk i is `<text><i> `
    own_id: bool = True  # the request's x-request-id is part of the answer's id; without, it is always the same
    key: str = ""  # 401 on every path without `Authorization: Bearer <key>`
    prefix: str = ""  # a path in front of every path, such as /engine/a
    headers: Pairs = ()  # added to every answer to POST /v1/*
    only_for: str = ""  # the scripted faults apply to requests whose body holds this

    status: int = 200  # anything else: that answer, after ttft_s
    body: bytes | str | None = None  # of the scripted answer; None: an OpenAI error object
    error_headers: Pairs = ()  # of the scripted answer, such as Retry-After
    cut_after: int | None = None  # TCP reset after k chunks; -1: before the head
    eof_after: int | None = None  # end without [DONE] after k chunks; -1: before the head
    eof_how: Literal["proper", "close"] = "proper"  # with the framing's own end, or by closing the socket
    stall_after: int | None = None  # silence after k chunks, connection open; -1: before the head

    refuse: bool = False  # nobody listens; idle connections are closed, running answers go on
    blackhole: bool = False  # accepts, reads, never answers
    reset_on_accept: bool = False
    idle_close_s: float | None = None  # closes a connection that idles for so long after an answer
    close_on_request: bool | Literal["rst"] = False  # closes a reused connection just as a request arrives

    frag_bytes: int = 0  # writes so many bytes at a time, head and framing included
    frag_gap_s: float = 0.0  # between two such writes
    framing: Literal["", "chunked", "close"] = ""  # "": streams chunked, others with Content-Length
    head_first: bool = False  # the head goes out at once, before ttft_s
    crlf: bool = False  # line endings of the stream
    comments: bool = False  # a `: keep-alive` comment before each event
    line_kb: int = 0  # pads the first event's line to this size
    body_mb: float = 0.0  # pads an answer that is no stream to this size

    health_status: int = 200
    health_word: str = "healthy"  # "": an empty body, as vLLM has it
    health_delay_s: float = 0.0


class Gate:
    """What an answer waits for before its first piece, such as another engine's work. It may never open."""

    def __init__(self) -> None:
        self.is_open = False
        self._waiting: list[Callable[[], object]] = []

    def open(self) -> None:
        self.is_open = True
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def when_open(self, call: Callable[[], object]) -> None:
        call() if self.is_open else self._waiting.append(call)


@dataclass(slots=True)
class Answer:
    """`pieces` are paced by `gap_s`; what follows the last of them (`tail`) comes without a gap.

    Behind a `gate`, `first_s` counts from its opening; the answer's head does not wait for it with `head_first`.
    """

    status: int
    headers: Headers
    pieces: list[bytes]
    tail: list[bytes] = field(default_factory=list)
    stream: bool = False
    first_s: float = 0.0
    gap_s: float = 0.0
    gate: Gate | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Asked(msgspec.Struct):
    """The fields of a request body that matter here; the rest is skipped, not decoded."""

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class AskedToEmbed(msgspec.Struct):
    model: str = ""
    input: object = None


asked_of = msgspec.json.Decoder(Asked).decode
embed_of = msgspec.json.Decoder(AskedToEmbed).decode


def json_answer(status: int, value: object, headers: Headers | None = None, *, first_s: float = 0.0) -> Answer:
    body = msgspec.json.encode(value)
    return Answer(status, [(b"content-type", b"application/json"), *(headers or [])], [body], first_s=first_s)


def error(status: int, message: str, code: str | None = None) -> Answer:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json_answer(status, {"error": {"message": message, "type": kind, "param": None, "code": code}})


def scripted(knobs: Knobs) -> Answer:
    """The answer that `status`, `body` and `error_headers` describe."""
    if knobs.body is None:
        answer = error(knobs.status, f"scripted {knobs.status}", "scripted")
    else:
        raw = knobs.body.encode() if isinstance(knobs.body, str) else knobs.body
        answer = Answer(knobs.status, [(b"content-type", b"application/json")], [raw])
    answer.headers += as_bytes(knobs.error_headers)
    answer.first_s = knobs.ttft_s
    return answer


def as_bytes(pairs: Pairs) -> Headers:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]


def health(knobs: Knobs) -> Answer:
    word = knobs.health_word
    if not word:
        return Answer(knobs.health_status, [], [b""], first_s=knobs.health_delay_s)
    value = {"status": word, "message": f"Engine is {word}."}
    return json_answer(knobs.health_status, value, first_s=knobs.health_delay_s)


def model_list(knobs: Knobs) -> Answer:
    def card(name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": CREATED, "owned_by": "sim", "root": name, "parent": None}

    return json_answer(200, {"object": "list", "data": [card(name) for name in knobs.models]})


def inference(knobs: Knobs, path: str, content_type: bytes, body: bytes, request_id: str) -> Answer:
    """The answer to `POST /v1/*`."""
    chat = path == "/v1/chat/completions"
    completion = chat or path == "/v1/completions"
    try:
        asked = asked_of(body)
    except msgspec.DecodeError as e:
        # Multipart forms and the like are none of our business, but a chat request must be JSON.
        if completion or path == "/v1/embeddings":
            return error(400, f"bad request body: {e}", "invalid_request")
        asked = Asked()
    if asked.model not in knobs.models and (asked.model or completion):
        return error(404, f"The model `{asked.model}` does not exist.", "model_not_found")
    if completion:
        answer = completed(knobs, asked, request_id, chat=chat)
    elif path == "/v1/embeddings":
        answer = embedded(knobs, body)
    else:
        echo = {"object": "echo", "path": path, "model": asked.model, "bytes": len(body)}
        answer = json_answer(200, echo | {"content_type": content_type.decode("latin-1")}, first_s=knobs.ttft_s)
    answer.headers += as_bytes(knobs.headers)
    return answer


def embedded(knobs: Knobs, body: bytes) -> Answer:
    asked = embed_of(body)
    count = len(asked.input) if isinstance(asked.input, list) else 1
    rows = [{"object": "embedding", "index": i, "embedding": [(i + j) / 8 for j in range(8)]} for i in range(count)]
    usage = {"prompt_tokens": count, "total_tokens": count}
    value = {"object": "list", "data": rows, "model": asked.model, "usage": usage}
    return json_answer(200, value, first_s=knobs.ttft_s)


def chunks_of(knobs: Knobs, limit: int | None) -> int:
    """How many chunks an answer has where the request asks for so many tokens at most."""
    return knobs.chunks if limit is None else max(min(knobs.chunks, limit), 0)


def completed(knobs: Knobs, asked: Asked, request_id: str, *, chat: bool) -> Answer:
    limit = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    count = chunks_of(knobs, limit)
    finish = "stop" if count == knobs.chunks else "length"
    usage = {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}
    base: dict[str, object] = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id if knobs.own_id and request_id else 'sim'}",
        "object": ("chat.completion" if chat else "text_completion") + (".chunk" if chat and asked.stream else ""),
        "created": CREATED,
        "model": asked.model,
    }
    if asked.stream:
        return streamed(knobs, asked, base, count, finish, usage, chat=chat)
    text = "".join(f"{knobs.text}{i} " for i in range(count))
    text += "x" * (int(knobs.body_mb * 1_000_000) - len(text.encode()))
    content: dict[str, object] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
    took_s = knobs.ttft_s + knobs.gap_s * max(count - 1, 0)
    return json_answer(200, base | {"choices": [choice], "usage": usage}, first_s=took_s)


def streamed(
    knobs: Knobs,
    asked: Asked,
    base: dict[str, object],
    count: int,
    finish: str,
    usage: dict[str, int],
    *,
    chat: bool,
) -> Answer:
    end = b"\r\n" if knobs.crlf else b"\n"

    def event(data: bytes) -> bytes:
        return b"data: " + data + end + end

    def chunk(i: int) -> bytes:
        text = f"{knobs.text}{i} "
        if i == 0 and knobs.line_kb:
            text += "x" * (knobs.line_kb * 1000)
        role = {"role": "assistant"} if i == 0 else {}
        content: dict[str, object] = {"delta": role | {"content": text}} if chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish if i == count - 1 else None}
        comment = b": keep-alive" + end + end if knobs.comments else b""
        return comment + event(msgspec.json.encode(base | {"choices": [choice]}))

    pieces = [chunk(i) for i in range(count)]
    tail = [event(b"[DONE]")]
    if asked.stream_options is not None and asked.stream_options.include_usage:
        tail.insert(0, event(msgspec.json.encode(base | {"choices": [], "usage": usage})))
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    return Answer(200, headers, pieces, tail, stream=True, first_s=knobs.ttft_s, gap_s=knobs.gap_s)
