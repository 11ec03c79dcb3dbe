"""What the simulated engine answers beside chat."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.serving import Factory
from tests.support.http import request

ASKED: dict[str, dict[str, Any]] = {
    "/score": {"text_1": "a", "text_2": ["b", "c"]},
    "/v1/rerank": {"query": "a", "documents": ["b", "c", "d"], "top_n": 2},
    "/classify": {"input": ["a", "b"]},
    "/pooling": {"input": "a"},
    "/detokenize": {"tokens": [104, 105]},
    "/generate": {"text": "a"},
    "/v1/messages": {"messages": []},
    "/v1/messages/count_tokens": {"messages": []},
    "/v1/responses": {"input": "a"},
}


def ask(url: str, path: str, body: dict[str, Any]) -> Any:
    return request("POST", url + path, body=json.dumps(body).encode(), headers={"content-type": "application/json"})


def test_each_call_has_its_shape(engine_factory: Factory) -> None:
    url = engine_factory(chunks=2).url
    said = {path: ask(url, path, body).json() for path, body in ASKED.items()}
    assert [row["score"] for row in said["/score"]["data"]] == [1 / 2, 1 / 3]
    assert [row["document"]["text"] for row in said["/v1/rerank"]["results"]] == ["b", "c"]
    assert len(said["/classify"]["data"]) == 2 and len(said["/pooling"]["data"]) == 1
    assert said["/detokenize"] == {"prompt": "hi"}
    assert said["/generate"]["text"] == "token0 token1 "
    assert said["/v1/messages"]["content"] == [{"type": "text", "text": "token0 token1 "}]
    assert said["/v1/messages/count_tokens"] == {"input_tokens": 5}
    assert said["/v1/responses"]["output"][0]["content"][0]["text"] == "token0 token1 "
    assert ask(url, "/tokenize", {"prompt": "hi"}).json()["tokens"] == [104, 105]


@pytest.mark.parametrize(
    ("path", "last"),
    [("/generate", "data: [DONE]"), ("/v1/messages", "event: message_stop"), ("/v1/responses", "response.completed")],
)
def test_streams_end_in_their_own_way(engine_factory: Factory, path: str, last: str) -> None:
    reply = ask(engine_factory(chunks=3).url, path, ASKED[path] | {"stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert last in reply.text.strip().split("\n\n")[-1]


@pytest.mark.parametrize(
    ("limit", "text", "reason"),
    [
        (2, "token0 token1 ", "max_tokens"),
        (0, "", "max_tokens"),
        (3, "token0 token1 token2 ", "end_turn"),
        (9, "token0 token1 token2 ", "end_turn"),
        (None, "token0 token1 token2 ", "end_turn"),
    ],
)
def test_a_message_has_as_many_tokens_as_it_may(
    engine_factory: Factory, limit: int | None, text: str, reason: str
) -> None:
    url = engine_factory(chunks=3).url
    body = {"messages": [], "max_tokens": limit}
    whole = ask(url, "/v1/messages", body).json()
    assert (whole["content"][0]["text"], whole["stop_reason"]) == (text, reason)
    assert whole["usage"] == {"input_tokens": 5, "output_tokens": text.count("token")}
    lines = ask(url, "/v1/messages", body | {"stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    said = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(said) == text and len(said) == text.count("token")
    (end,) = [event for event in events if event["type"] == "message_delta"]
    assert (end["delta"]["stop_reason"], end["usage"]["output_tokens"]) == (reason, len(said))


@pytest.mark.parametrize(("limit", "count"), [(2, 2), (0, 0), (3, 3), (9, 3), (None, 3)])
def test_a_response_has_as_many_tokens_as_it_may(engine_factory: Factory, limit: int | None, count: int) -> None:
    url, text = engine_factory(chunks=3).url, "token0 token1 token2 "[: 7 * count]
    status, details = ("completed", None) if count == 3 else ("incomplete", {"reason": "max_output_tokens"})
    body = {"input": "a", "max_output_tokens": limit}
    whole = ask(url, "/v1/responses", body).json()
    assert whole["output"][0]["content"][0]["text"] == text
    assert (whole["status"], whole["incomplete_details"]) == (status, details)
    assert whole["usage"]["total_tokens"] == 5 + count
    lines = ask(url, "/v1/responses", body | {"stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    said = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(said) == text and len(said) == count
    assert (events[-1]["type"], events[-1]["response"]) == (f"response.{status}", whole)


def test_a_form_is_transcribed(engine_factory: Factory) -> None:
    url = engine_factory(chunks=1).url + "/v1/audio/transcriptions"
    sent = {"content-type": "multipart/form-data; boundary=x"}
    assert request("POST", url, body=b"--x--", headers=sent).json()["text"] == "token0 "


def test_what_it_cannot_read_it_refuses(engine_factory: Factory) -> None:
    url = engine_factory().url
    assert ask(url, "/score", {"model": "other"}).status == 404
    assert ask(url, "/detokenize", {"tokens": 3}).status == 400
    assert request("POST", url + "/rerank", body=b"[]").status == 400
