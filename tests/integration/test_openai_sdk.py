"""The real `openai` package against a deployment: answers, streams, errors, retries, leaving."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.integration.serving import LIMIT_BYTES, TIGHT, Factory, SharedDeployment, on_every_worker
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.wait import eventually

DEPLOYMENT = SharedDeployment(workers=2, settings=TIGHT)

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    """At its defaults: it retries twice."""
    with openai.OpenAI(base_url=deployment.url + "/v1", api_key="sk-anything") as client:
        yield client


@pytest.fixture
def once(client: openai.OpenAI) -> Iterator[openai.OpenAI]:
    return client.with_options(max_retries=0)


# --- answers


def test_a_chat(client: openai.OpenAI, engine: SimulatedEngine) -> None:
    answer = client.chat.completions.create(model="sim", messages=HELLO, max_tokens=3)
    assert answer.choices[0].message.content == "token0 token1 token2 "
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert answer.id == f"chatcmpl-{engine.requests[0].id}"


def test_a_completion(client: openai.OpenAI, engine: SimulatedEngine) -> None:
    answer = client.completions.create(model="sim", prompt="hello", max_tokens=2)
    assert answer.choices[0].text == "token0 token1 "


def test_a_chat_as_a_stream(client: openai.OpenAI, engine: SimulatedEngine) -> None:
    engine.set(text="日本語😀", frag_bytes=3, chunks=5)
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(model="sim", messages=HELLO, stream=True, stream_options=options))  # type: ignore[call-overload]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == "".join(f"日本語😀{i} " for i in range(5))
    assert chunks[-1].usage.completion_tokens == 5


def test_a_completion_as_a_stream(client: openai.OpenAI, engine: SimulatedEngine) -> None:
    chunks = client.completions.create(model="sim", prompt="hello", stream=True, max_tokens=2)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "token0 token1 "


def test_embeddings(client: openai.OpenAI, engine: SimulatedEngine) -> None:
    answer = client.embeddings.create(model="sim", input=["a", "b"], encoding_format="float")
    assert [row.embedding for row in answer.data] == [[(i + j) / 8 for j in range(8)] for i in range(2)]


def test_models(client: openai.OpenAI, engine: SimulatedEngine) -> None:
    assert [(model.id, model.object) for model in client.models.list()] == [("sim", "model")]


def test_the_async_client_runs_many_streams(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(gap_s=0.01)

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=deployment.url + "/v1", api_key="sk") as client:

            async def one() -> str:
                stream = await client.chat.completions.create(model="sim", messages=HELLO, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one() for _ in range(30)))

    assert set(asyncio.run(ask())) == {"".join(f"token{i} " for i in range(16))}


# --- errors

FAULTS: list[tuple[dict[str, Any], dict[str, Any], type[openai.APIStatusError], int]] = [
    ({"status": 400}, {}, openai.BadRequestError, 400),
    ({"status": 401}, {}, openai.AuthenticationError, 401),
    ({"status": 403}, {}, openai.PermissionDeniedError, 403),
    ({"status": 404}, {}, openai.NotFoundError, 404),
    ({"status": 422}, {}, openai.UnprocessableEntityError, 422),
    ({"status": 429}, {}, openai.RateLimitError, 429),
    ({"status": 500}, {}, openai.InternalServerError, 500),
    ({"status": 503}, {}, openai.InternalServerError, 503),
    ({"cut_after": -1}, {}, openai.InternalServerError, 502),
    ({"ttft_s": 30.0}, {}, openai.InternalServerError, 504),
    ({}, {"model": "never-seen"}, openai.NotFoundError, 404),
    ({}, {"model": ""}, openai.BadRequestError, 400),
    ({}, {"user": "u" * LIMIT_BYTES}, openai.APIStatusError, 413),
    ({}, {"user": "u" * 8 * LIMIT_BYTES}, openai.APIStatusError, 413),
    ({}, {"extra_body": {"migration_request": {"a": 1}}}, openai.BadRequestError, 400),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("knobs", "asked", "kind", "status"), FAULTS, ids=[f"{f[2].__name__} {f[3]} {i}" for i, f in enumerate(FAULTS)]
)
def test_r89_errors_raise_the_matching_class(
    engine: SimulatedEngine,
    once: openai.OpenAI,
    knobs: dict[str, Any],
    asked: dict[str, Any],
    kind: type[openai.APIStatusError],
    status: int,
    stream: bool,
) -> None:
    engine.crash()  # so that no pooled connection stands between the fault and the client
    engine.set(**knobs)
    engine.start()
    with pytest.raises(kind) as raised:
        once.chat.completions.create(**{"model": "sim", "messages": HELLO, "stream": stream, **asked})
    assert type(raised.value) is kind
    assert raised.value.status_code == status
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["message"]


def test_r89_no_node_alive_raises_internal_server_error_with_retry_after(
    deployment: Deployment, once: openai.OpenAI, engine_factory: Factory
) -> None:
    encoder = engine_factory(models=("encoder-only",))
    deployment.add(encoder, role="Encode")
    on_every_worker(deployment, lambda: "encoder-only" in deployment.get("/v1/models").text)
    with pytest.raises(openai.InternalServerError) as raised:
        once.chat.completions.create(model="encoder-only", messages=HELLO)
    assert raised.value.status_code == 503
    assert 1 <= int(raised.value.response.headers["retry-after"]) <= 60


@pytest.mark.parametrize("fault", [{"cut_after": 5}, {"eof_after": 5}, {"stall_after": 5}], ids=lambda f: next(iter(f)))
def test_r46_a_broken_stream_raises_after_what_had_come(
    engine: SimulatedEngine, once: openai.OpenAI, fault: dict[str, int]
) -> None:
    engine.set(gap_s=0.005, **fault)
    came: list[str | None] = []
    stream = once.chat.completions.create(model="sim", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError) as raised:
        came.extend(chunk.choices[0].delta.content for chunk in stream)
    assert came == [f"token{i} " for i in range(5)]
    assert raised.value.message
    assert isinstance(raised.value.body, dict)


# --- retries


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_r89_mistakes_are_not_sent_again(client: openai.OpenAI, engine: SimulatedEngine, status: int) -> None:
    engine.set(status=status)
    with pytest.raises(openai.APIStatusError):
        client.chat.completions.create(model="sim", messages=HELLO)
    assert len(engine.requests) == 1


def test_r90_an_outage_that_the_engine_tells_of_is_waited_for(client: openai.OpenAI, engine: SimulatedEngine) -> None:
    engine.set(status=503, error_headers=(("Retry-After", "1"),))
    begun_s = time.monotonic()
    timer = threading.Timer(1.5, engine.set, kwargs={"status": 200})
    timer.start()
    answer = client.chat.completions.create(model="sim", messages=HELLO)
    timer.join()
    assert answer.choices[0].message.content
    assert time.monotonic() - begun_s > 1.9, "the engine's Retry-After was obeyed twice"
    assert len(engine.requests) == 3


# --- leaving


def test_r39_a_stream_that_is_closed_is_aborted_at_the_engine(client: openai.OpenAI, engine: SimulatedEngine) -> None:
    engine.set(chunks=1000, gap_s=0.05)
    stream = client.chat.completions.create(model="sim", messages=HELLO, stream=True)
    for _, _ in zip(stream, range(3), strict=False):
        pass
    left_s = time.monotonic()
    stream.close()
    (record,) = eventually(lambda: engine.aborts, within_s=1.5)
    assert record.aborted_s is not None
    assert 0 < record.aborted_s - left_s < 1


def test_r39_a_request_whose_task_is_cancelled_is_aborted_at_the_engine(
    deployment: Deployment, engine: SimulatedEngine
) -> None:
    engine.set(ttft_s=0.55)

    async def cancel() -> float:
        async with openai.AsyncOpenAI(base_url=deployment.url + "/v1", api_key="sk", max_retries=0) as client:
            asked = asyncio.create_task(client.chat.completions.create(model="sim", messages=HELLO))
            while not engine.in_flight:
                await asyncio.sleep(0.005)
            left_s = time.monotonic()
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            return left_s

    left_s = asyncio.run(cancel())
    (record,) = eventually(lambda: engine.aborts, within_s=1.5)
    assert record.aborted_s is not None
    assert 0 < record.aborted_s - left_s < 0.4


def test_r89_a_clients_own_timeout_is_an_abort_at_the_engine(once: openai.OpenAI, engine: SimulatedEngine) -> None:
    engine.set(ttft_s=0.55)
    with pytest.raises(openai.APITimeoutError):
        once.with_options(timeout=0.2).chat.completions.create(model="sim", messages=HELLO)
    eventually(lambda: len(engine.aborts) == 1, within_s=1)
