"""What the client reads of both legs in one answer: figures put right, every other byte as it came."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.dispatch.handover import merge
from app.dispatch.handover.bodies import Prefilled
from app.dispatch.handover.merge import merged, merged_logprobs, merged_usage, put_right
from app.errors import EngineBroke, Headers
from tests.dispatch.fakes import D0, FakeResponse, Json

JSON: Headers = [(b"content-type", b"application/json")]
SSE: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]

OF_PREFILL: Json = {
    "prompt_tokens": 11,
    "completion_tokens": 1,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 4},
}
OF_DECODE: Json = {
    "prompt_tokens": 11,
    "completion_tokens": 7,
    "total_tokens": 18,
    "prompt_tokens_details": {"cached_tokens": 10},
}
RIGHT: Json = {
    "prompt_tokens": 11,
    "completion_tokens": 7,
    "total_tokens": 18,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def prefilled(usage: Json | None = OF_PREFILL, **members: Any) -> Prefilled:
    return Prefilled({name: msgspec.Raw(json.dumps(value).encode()) for name, value in members.items()}, usage, False)


def text_of(usage: Json) -> bytes:
    """As msgspec writes what is put in."""
    return json.dumps(usage, separators=(",", ":")).encode()


async def through(
    chunks: Iterable[bytes], headers: Headers = SSE, *, status: int = 200, known: Prefilled | None = None
) -> bytes:
    response = FakeResponse(status, headers=headers)
    response.body = [chunk for chunk in chunks if chunk]
    found = await merged(response, lambda: known, url=D0)
    body = b""
    while chunk := await found.read():
        body += chunk
    found.close()
    assert response.closed
    return body


# --- the figures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "of_prefill", "right"),
    [
        (OF_DECODE, OF_PREFILL, RIGHT),
        # Decode counts a token of prefill's to the prompt: prefill knows.
        ({"prompt_tokens": 12, "completion_tokens": 7, "total_tokens": 19}, {"prompt_tokens": 11},
         {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}),
        # What decode calls cached is the transferred cache, and prefill found nothing.
        (OF_DECODE, {"prompt_tokens": 11}, {**RIGHT, "prompt_tokens_details": None}),
        (OF_DECODE, {"prompt_tokens": 11, "prompt_tokens_details": None}, {**RIGHT, "prompt_tokens_details": None}),
        ({"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}, OF_PREFILL, RIGHT),
        # /v1/responses
        (
            {"input_tokens": 11, "input_tokens_details": {"cached_tokens": 10}, "output_tokens": 7, "total_tokens": 18,
             "output_tokens_details": {"reasoning_tokens": 3}},
            {"input_tokens": 11, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 4}},
            {"input_tokens": 11, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 7, "total_tokens": 18,
             "output_tokens_details": {"reasoning_tokens": 3}},
        ),
        # Nobody knows better.
        (OF_DECODE, {}, OF_DECODE),
        (OF_DECODE, {"prompt_tokens": "11"}, OF_DECODE),
        # No completion figure to add up.
        ({"prompt_tokens": 9, "total_tokens": 9}, {"prompt_tokens": 11}, {"prompt_tokens": 11, "total_tokens": 9}),
    ],
)  # fmt: skip
def test_prompt_figures_are_prefills_and_completion_figures_decodes(usage: Json, of_prefill: Json, right: Json) -> None:
    before = json.dumps(usage)
    assert merged_usage(usage, of_prefill) == right
    assert json.dumps(usage) == before


def test_the_prompts_logprobs_come_first_and_only_what_both_have_is_joined() -> None:
    # Source: sglang's mini_lb: prefill's input_token_logprobs + decode's.
    info = {
        "id": "d",
        "input_token_logprobs": [[-2.0, 2]],
        "input_top_logprobs": [3],
        "output_token_logprobs": [[-3.0, 3]],
    }
    of_prompt = {"id": "p", "input_token_logprobs": [[-1.0, 1]], "output_token_logprobs": [[-9.0, 9]]}
    assert merged_logprobs(info, of_prompt) == {**info, "input_token_logprobs": [[-1.0, 1], [-2.0, 2]]}


# --- one JSON object --------------------------------------------------------------------------------


def test_all_but_the_usage_is_byte_for_byte() -> None:
    before, after = (
        b'{ "id" : "x\\u00e4", "n":1.0e2,\n"usage" : ',
        b' , "choices":[{"text":"\xc3\xa4 \\"usage\\": {}"}] }',
    )
    usage = (
        b'{"prompt_tokens": 11 ,"completion_tokens":7, "total_tokens":18,"prompt_tokens_details":{"cached_tokens":10}}'
    )
    assert put_right(before + usage + after, prefilled()) == before + text_of(RIGHT) + after


@pytest.mark.parametrize(
    "text",
    [
        b"", b" ", b"[DONE]", b"null", b"[]", b'"usage"', b"{", b'{"usage":', b"\xff", b'{"usage":{"prompt_tokens":1',
        b'{"usage":null}', b'{ "usage" : [1] }', b'{"usage":"x"}', b'{"choices":[{"usage":{"prompt_tokens":9}}]}',
        b'{"meta_info":{"input_token_logprobs":[1]}}', b'{"response":null}', b'{"response":{"id":"x"}}',
        b'{"usage":' + b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_has_no_figures_passes_as_it_is(text: bytes) -> None:
    assert put_right(text, prefilled()) == text


def test_without_figures_of_prefill_all_passes_as_it_is() -> None:
    text = b'{"usage": {"prompt_tokens":1} }'
    assert put_right(text, prefilled(None)) == text
    assert put_right(text, prefilled({})) == text or json.loads(put_right(text, prefilled({}))) == json.loads(text)


def test_an_inner_object_that_looks_the_same_is_left_alone() -> None:
    text = json.dumps({"choices": [{"usage": OF_DECODE}], "usage": OF_DECODE}).encode()
    assert json.loads(put_right(text, prefilled())) == {"choices": [{"usage": OF_DECODE}], "usage": RIGHT}


def test_an_inner_object_that_looks_the_same_is_left_alone_however_the_name_is_written() -> None:
    text = b'{"choices": [{"usage": %b}], "us\\u0061ge": %b}' % (text_of(OF_DECODE), text_of(OF_DECODE))
    assert json.loads(put_right(text, prefilled())) == {"choices": [{"usage": OF_DECODE}], "usage": RIGHT}


def test_the_usage_within_the_response_of_an_event_is_put_right() -> None:
    usage = {"input_tokens": 11, "input_tokens_details": {"cached_tokens": 10}, "output_tokens": 7, "total_tokens": 18}
    right = {**usage, "input_tokens_details": {"cached_tokens": 4}}
    known = prefilled({"input_tokens": 11, "input_tokens_details": {"cached_tokens": 4}})
    text = b'{"type":"response.completed", "response": {"id" : "r", "usage":' + text_of(usage) + b', "x": 1.0} }'
    assert put_right(text, known) == text.replace(text_of(usage), text_of(right))


def test_figures_and_logprobs_are_both_put_right() -> None:
    known = prefilled(meta_info={"input_token_logprobs": [1]})
    text = json.dumps({"usage": OF_DECODE, "meta_info": {"input_token_logprobs": [2], "e2e_latency": 0.5}}).encode()
    assert json.loads(put_right(text, known)) == {
        "usage": RIGHT,
        "meta_info": {"input_token_logprobs": [1, 2], "e2e_latency": 0.5},
    }


def test_one_change_does_not_undo_another() -> None:
    # The same bytes once more within: then the object is written anew, with all that was put right before.
    info = {"input_token_logprobs": [2]}
    text = json.dumps({"usage": OF_DECODE, "choices": [{"meta_info": info}], "meta_info": info}).encode()
    assert json.loads(put_right(text, prefilled(meta_info={"input_token_logprobs": [1]}))) == {
        "usage": RIGHT,
        "choices": [{"meta_info": info}],
        "meta_info": {"input_token_logprobs": [1, 2]},
    }


# --- answers that are read whole --------------------------------------------------------------------


async def test_an_answer_without_a_stream_has_its_own_length() -> None:
    usage = text_of(OF_DECODE)
    headers = [*JSON, (b"content-length", b"%d" % (10 + len(usage))), (b"x-a", b"1"), (b"x-a", b"2")]
    response = FakeResponse(200, b'{"usage":' + usage + b"}", headers)
    found = await merged(response, prefilled, url=D0)
    body = await found.read()
    assert body == b'{"usage":' + text_of(RIGHT) + b"}"
    assert found.headers == [*JSON, (b"x-a", b"1"), (b"x-a", b"2"), (b"content-length", b"%d" % len(body))]
    assert (found.status, await found.read()) == (200, b"")
    assert response.closed


async def test_a_chunked_answer_becomes_one_with_a_length() -> None:
    response = FakeResponse(200, b"{}", [*JSON, (b"transfer-encoding", b"chunked")])
    found = await merged(response, prefilled, url=D0)
    assert found.headers == [*JSON, (b"content-length", b"2")]


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (400, JSON), (500, JSON), (204, JSON), (200, [(b"content-type", b"text/plain")]), (200, [(b"x", b"y")]),
        (200, [*JSON, (b"content-encoding", b"gzip")]), (200, [*SSE, (b"content-encoding", b"zstd")]), (400, SSE),
    ],
)  # fmt: skip
async def test_what_can_not_be_read_passes_as_it_is(status: int, headers: Headers) -> None:
    text = b'data: {"usage":' + text_of(OF_DECODE) + b"}\n\n"
    response = FakeResponse(status, text, headers)
    assert await merged(response, prefilled, url=D0) is response
    assert not response.closed and response.body == [text]


async def test_an_answer_over_the_limit_passes_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "LIMIT_BYTES", 64)
    text = b'{"choices":"' + b"x" * 100 + b'","usage":' + text_of(OF_DECODE) + b"}"
    assert await through([text[:50], text[50:120], text[120:]], JSON, known=prefilled()) == text


async def test_an_answer_that_breaks_off_is_an_error() -> None:
    class Breaking(FakeResponse):
        async def read(self) -> bytes:
            raise EngineBroke("reset")

    with pytest.raises(EngineBroke):
        await merged(Breaking(200, headers=JSON), prefilled, url=D0)


# --- streams ----------------------------------------------------------------------------------------


def event(value: object, end: bytes = b"\n\n", space: bytes = b" ") -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode()
    return b"data:" + space + text + end


def a_stream(usage: Json, end: bytes, space: bytes = b" ") -> bytes:
    """Chat events, words beside them, a usage event, the end mark."""
    delta = {"choices": [{"delta": {"content": 'ä "usage": {} \n'}}], "usage": None}
    head = b"event: message.delta" + end[: len(end) // 2] + b": a comment" + end
    return (
        head
        + event(delta, end, space) * 2
        + event(b'{ "choices" : [] , "usage" : %s }' % text_of(usage), end, space)
        + event(b"[DONE]", end, space)
    )


ENDS = [b"\n\n", b"\r\n\r\n", b"\r\r"]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("space", [b" ", b"", b"  "])
async def test_only_the_figures_of_a_stream_are_changed(end: bytes, space: bytes) -> None:
    found = await through([a_stream(OF_DECODE, end, space)], known=prefilled())
    assert found == a_stream(RIGHT, end, space)


@settings(max_examples=100, deadline=None)
@given(
    end=st.sampled_from(ENDS),
    cuts=st.lists(st.integers(0, 600), max_size=40),
    known=st.sampled_from([None, prefilled(), prefilled(None)]),
)
async def test_any_fragmentation_gives_the_same_bytes(end: bytes, cuts: list[int], known: Prefilled | None) -> None:
    stream = a_stream(OF_DECODE, end)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[a:b] for a, b in itertools.pairwise(edges)]
    right = RIGHT if known is not None and known.usage else OF_DECODE
    assert await through(chunks, known=known) == a_stream(right, end)


@pytest.mark.parametrize("end", ENDS)
async def test_byte_by_byte_too(end: bytes) -> None:
    stream = a_stream(OF_DECODE, end)
    assert await through([stream[i : i + 1] for i in range(len(stream))], known=prefilled()) == a_stream(RIGHT, end)


async def test_an_event_is_passed_on_when_its_line_is_complete_and_not_later() -> None:
    """Nobody waits for a later event, or for the empty line behind this one."""
    response = FakeResponse(200, headers=SSE)
    first, second = event({"choices": [1]}, b"\n"), event({"usage": OF_DECODE}, b"\n")
    response.body = [first, second[:30], second[30:], b"\n"]
    found = await merged(response, prefilled, url=D0)
    assert await found.read() == first
    assert len(response.body) == 3
    assert await found.read() == event({"usage": RIGHT}, b"\n")
    assert response.body == [b"\n"]
    assert [await found.read(), await found.read(), await found.read()] == [b"\n", b"", b""]


async def test_what_prefill_says_late_is_asked_for_when_the_figures_come() -> None:
    response = FakeResponse(200, headers=SSE)
    response.body = [event({"choices": []}), event({"usage": OF_DECODE})]
    known: list[Prefilled | None] = [None]
    found = await merged(response, lambda: known[0], url=D0)
    assert await found.read() == event({"choices": []})
    known[0] = prefilled()
    assert await found.read() == event({"usage": RIGHT})


async def test_every_event_with_figures_is_put_right() -> None:
    # vLLM's continuous_usage_stats: figures in each event.
    usages = [{**OF_DECODE, "completion_tokens": n, "total_tokens": 11 + n} for n in range(1, 4)]
    rights = [{**RIGHT, "completion_tokens": n, "total_tokens": 11 + n} for n in range(1, 4)]
    found = await through([b"".join(event({"usage": usage}) for usage in usages)], known=prefilled())
    assert found == b"".join(event({"usage": usage}) for usage in rights)


async def test_the_responses_api_is_put_right_in_a_stream() -> None:
    usage = {"input_tokens": 11, "input_tokens_details": {"cached_tokens": 10}, "output_tokens": 7, "total_tokens": 18}
    right = {**usage, "input_tokens_details": {"cached_tokens": 4}}
    known = prefilled({"input_tokens": 11, "input_tokens_details": {"cached_tokens": 4}})

    def stream(usage: Json) -> bytes:
        created = b"event: response.created\n" + event({"type": "response.created", "response": {"usage": None}})
        done = {"type": "response.completed", "response": {"id": "r", "usage": usage}}
        return created + b"event: response.completed\n" + event(done)

    assert await through([stream(usage)], known=known) == stream(right)


@pytest.mark.parametrize("size", [200_000, 600_000])
async def test_r44_long_lines_are_put_right_however_they_come(size: int) -> None:
    def stream(usage: Json) -> bytes:
        return event({"choices": ["x" * size], "usage": usage}) + event(b"[DONE]")

    text = stream(OF_DECODE)
    for step in (len(text), 65_536, 1000):
        chunks = [text[i : i + step] for i in range(0, len(text), step)]
        assert await through(chunks, known=prefilled()) == stream(RIGHT)


async def test_of_a_line_over_the_limit_nothing_is_held_back_and_the_next_is_put_right() -> None:
    long = event(b'{"usage": {}, "choices":["' + b"x" * (3 * merge.LINE_LIMIT_BYTES) + b'"]}')
    response = FakeResponse(200, headers=SSE)
    response.body = [long[i : i + 65_536] for i in range(0, len(long), 65_536)] + [event({"usage": OF_DECODE})]
    found = await merged(response, prefilled, url=D0)
    body, most = b"", 0
    while chunk := await found.read():
        body, most = body + chunk, max(most, len(chunk))
    assert body == long + event({"usage": RIGHT})
    assert most <= merge.LINE_LIMIT_BYTES + 2 * 65_536, "its beginning goes on before its end is here"


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
async def test_the_rest_of_a_long_line_may_come_with_the_next_ones(monkeypatch: pytest.MonkeyPatch, end: bytes) -> None:
    monkeypatch.setattr(merge, "LINE_LIMIT_BYTES", 100)
    long = event(b'{"usage":{"prompt_tokens":1},"x":"' + b"x" * 300 + b'"}', end)
    after = event({"usage": OF_DECODE}, end)
    for cut in range(150, len(long) - len(end) + 1):
        body = await through([long[:cut], long[cut:] + after + after], known=prefilled())
        assert body == long + event({"usage": RIGHT}, end) * 2, cut


@pytest.mark.parametrize("rest", [b"", b"data: ", b'data: {"usage":' + text_of(OF_DECODE), b"\r", b"x"])
async def test_a_stream_that_ends_in_mid_line_passes_what_came(rest: bytes) -> None:
    assert await through([event({"choices": []}), rest], known=prefilled()) == event({"choices": []}) + rest


async def test_a_stream_that_breaks_off_is_told() -> None:
    class Breaking(FakeResponse):
        async def read(self) -> bytes:
            if self.body:
                return self.body.pop(0)
            raise EngineBroke("reset")

    response = Breaking(200, b"data: x\n", SSE)
    found = await merged(response, prefilled, url=D0)
    assert await found.read() == b"data: x\n"
    with pytest.raises(EngineBroke):
        await found.read()
    found.close()
    assert response.closed == 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["usage", "meta_info", "response", "x", "prompt_tokens"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(value=st.dictionaries(st.sampled_from(["usage", "meta_info", "response", "x"]), VALUES, max_size=4))
def test_whatever_stands_there_only_figures_are_changed(value: Json) -> None:
    known = prefilled({"prompt_tokens": 11}, meta_info={})
    right = dict(value)

    def put(inside: Json) -> None:
        usage = inside.get("usage")
        if isinstance(usage, dict):
            prompt = "prompt_tokens" if "prompt_tokens" in usage else "input_tokens"
            inside["usage"] = usage | ({"prompt_tokens": 11} if prompt == "prompt_tokens" else {})
        if isinstance(inside.get("response"), dict):
            inside["response"] = dict(inside["response"])
            put(inside["response"])

    put(right)
    assert json.loads(put_right(json.dumps(value).encode(), known)) == right
