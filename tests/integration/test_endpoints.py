"""The calls beside chat on a real deployment: SDKs, large uploads, and every way in which one ends early."""

from __future__ import annotations

import contextlib
import io
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.serving import TIGHT, SharedDeployment, connected, on_every_worker, read_reply
from tests.integration.stage import each_once_and_all_wide
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.http import request
from tests.support.wait import eventually

DEPLOYMENT = SharedDeployment(workers=2, settings=TIGHT)
TRANSCRIPTIONS = "/v1/audio/transcriptions"
MB = 1_000_000

PART = b'--XX\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n'
FILE = PART % (b"file", b'; filename="a.wav"\r\nContent-Type: audio/wav')
END = b"\r\n--XX--\r\n"


def model_part(model: str) -> bytes:
    return PART % (b"model", b"") + model.encode() + b"\r\n"


def head(length: int | None, *more: str) -> bytes:
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = [f"POST {TRANSCRIPTIONS} HTTP/1.1", "Host: x", "Content-Type: multipart/form-data; boundary=XX", framing]
    return "\r\n".join([*lines, *more, "", ""]).encode()


@pytest.fixture
def roomy(deployments_of_session: Any, engine_factory: Callable[..., SimulatedEngine]) -> Iterator[Any]:
    """A deployment with the default limit of a body, and a transcriber."""
    deployment = deployments_of_session.get(1, settings={"first_byte_timeout_s": 3, "retries": 2})
    engine = engine_factory(models=("whisper",), chunks=2)
    deployment.add(engine)
    yield deployment, engine
    eventually(lambda: not any(deployment.unfinished().values()), within_s=2)
    assert engine.in_flight == 0
    for url in deployment.nodes("?all=1"):
        deployment.post("/nodes/remove", {"url": url})


# --- SDKs


@pytest.fixture
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=deployment.url + "/v1", api_key="sk", max_retries=0) as client:
        yield client


def test_sdk_embeddings(client: openai.OpenAI, engine: SimulatedEngine) -> None:
    answer = client.embeddings.create(model="sim", input=["a", "b", "c"], encoding_format="float")
    assert [row.index for row in answer.data] == [0, 1, 2] and len(answer.data[0].embedding) == 8


@pytest.mark.parametrize("size", [1000, 700_000])
def test_sdk_transcriptions(client: openai.OpenAI, engine: SimulatedEngine, size: int) -> None:
    engine.set(chunks=2)
    sound = bytes(range(256)) * (size // 256)
    answer = client.audio.transcriptions.create(model="sim", file=("a.wav", io.BytesIO(sound)), language="en")
    assert answer.text == "token0 token1 "
    (record,) = engine.requests
    assert record.path == TRANSCRIPTIONS and sound in record.body


def test_sdk_responses_as_a_stream(client: openai.OpenAI, engine: SimulatedEngine) -> None:
    engine.set(chunks=3)
    with client.responses.create(model="sim", input="hello", stream=True) as events:
        seen = list(events)
    assert "".join(e.delta for e in seen if e.type == "response.output_text.delta") == "token0 token1 token2 "
    assert seen[-1].type == "response.completed"
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.retrieve("resp_sim")
    assert caught.value.status_code == 501


def test_sdk_hears_of_a_stream_of_responses_that_is_cut(client: openai.OpenAI, engine: SimulatedEngine) -> None:
    engine.set(chunks=5, gap_s=0.05, cut_after=2)
    with pytest.raises(openai.APIError, match="broke off"):
        list(client.responses.create(model="sim", input="hello", stream=True))


# --- byte for byte


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v2/rerank", {"query": "a", "documents": ["b"]}),
        ("/classify", {"input": "a"}),
        ("/pooling", {"input": "a"}),
        ("/v1/messages", {"model": "sim", "messages": []}),
    ],
)
def test_an_answer_is_the_engines(deployment: Deployment, engine: SimulatedEngine, path: str, body: Any) -> None:
    raw = json.dumps(body, indent=1).encode()
    sent = {"content-type": "application/json", "x-request-id": "same"}
    through = request("POST", deployment.url + path, body=raw, headers=sent)
    direct = request("POST", engine.url + path, body=raw, headers=sent)
    assert (through.status, through.body) == (200, direct.body)
    assert [(r.path, r.body) for r in engine.requests] == [(path, raw)] * 2


def test_without_a_name_the_only_model_is_meant_until_there_are_two(
    deployment: Deployment, engine: SimulatedEngine, engine_factory: Callable[..., SimulatedEngine]
) -> None:
    def ask() -> int:
        return request("POST", deployment.url + "/generate", body=b'{"text":"a"}').status

    assert ask() == 200
    deployment.add(engine_factory(models=("second",)))
    on_every_worker(deployment, lambda: ask() == 400)


# --- large uploads


def rss_bytes(pid: int, what: str = "VmHWM") -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(what)]
    return int(line.split()[1]) * 1024


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@pytest.mark.parametrize("order", [pytest.param("model first", marks=pytest.mark.wide), "model last"])
def test_100_mb_pass_through_a_worker_that_does_not_grow(roomy: Any, order: str) -> None:
    deployment, engine = roomy
    (pid,) = deployment.worker_pids()
    name = model_part("whisper")
    first, last = (name + FILE, END) if order == "model first" else (FILE, b"\r\n" + name + END[2:])
    piece, count = bytes(range(256)) * 3906 + b"\r\n--X", 100
    with connected(deployment.url) as s:
        s.settimeout(30)
        s.sendall(head(len(first) + len(last) + len(piece) * count) + first)
        reset_peak(pid)
        before = rss_bytes(pid)
        for _ in range(count):
            s.sendall(piece)
        s.sendall(last)
        reply = read_reply(s)
    assert (reply.status, reply.json()["text"]) == (200, "token0 token1 ")
    assert engine.requests[0].body == first + piece * count + last
    assert rss_bytes(pid) - before < 30 * MB


def test_in_chunks_a_form_passes_in_chunks(roomy: Any) -> None:
    deployment, engine = roomy
    body = model_part("whisper") + FILE + b"x" * (3 * MB) + END
    with connected(deployment.url) as s:
        s.sendall(head(None))
        for at in range(0, len(body), 100_000):
            piece = body[at : at + 100_000]
            s.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        s.sendall(b"0\r\n\r\n")
        assert read_reply(s).status == 200
        s.sendall(head(None))  # the connection serves on
        s.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert read_reply(s).status == 200
    assert [record.body for record in engine.requests] == [body, body]
    assert engine.requests[0].header(b"transfer-encoding") == b"chunked"


class SlowReader:
    """An engine that takes what `take` allows of each request and then does what the test says."""

    def __init__(self, answer: bytes = b"") -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.answer = answer
        self.began = threading.Event()
        self.go_on = threading.Event()
        self.gone_s: float | None = None
        self.got_bytes = 0
        self.posts = 0
        self.breaks_off = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                taken, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=(taken,), daemon=True).start()

    def _serve(self, s: socket.socket) -> None:
        with s, contextlib.suppress(OSError):
            s.settimeout(20)
            asked = s.recv(65536)
            if asked.startswith(b"GET"):
                s.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
                return
            self.posts += 1
            self.got_bytes = len(asked)
            if self.answer:
                s.sendall(self.answer)
            self.began.set()
            self.go_on.wait(20)
            while not self.breaks_off and (data := s.recv(65536)):
                self.got_bytes += len(data)
        self.gone_s = time.monotonic()

    def __enter__(self) -> SlowReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self.listener.close()


def register(deployment: Deployment, engine: SlowReader, model: str) -> None:
    """The one worker knows it at once; while no other has the model it is served unprobed."""
    assert deployment.post("/nodes/add", {"url": engine.url, "status": {"models": [model]}}).status == 200


def test_an_engine_that_takes_nothing_holds_its_client_back(roomy: Any) -> None:
    deployment, _ = roomy
    (pid,) = deployment.worker_pids()
    with SlowReader() as slow, connected(deployment.url) as s:
        register(deployment, slow, "slow")
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        s.sendall(head(200 * MB) + model_part("slow") + FILE)
        before = rss_bytes(pid, "VmRSS")
        s.settimeout(1.0)
        sent = 0
        with contextlib.suppress(TimeoutError):
            # An answer that comes so soon, on a busy machine, takes the rest of the body out of the way.
            while sent < 100 * MB and not select.select([s], [], [], 0)[0]:
                sent += s.send(b"x" * MB)
        assert sent < 30 * MB  # what the sockets and half a megabyte hold
        assert rss_bytes(pid, "VmRSS") - before < 10 * MB
        # And where it stays so, it is the engine that was too slow.
        s.settimeout(10)
        assert read_reply(s).status == 504


STAGES = {
    "in the part's head": b"--XX\r\nContent-Disp",
    "before the model": FILE + b"x" * 1000,
    "before it goes on": model_part("whisper") + FILE + b"x" * 100_000,
    "while it goes on": model_part("whisper") + FILE + b"x" * (5 * MB),
    "before the last byte": model_part("whisper") + FILE + b"x" * (5 * MB) + END[:-1],
}


@pytest.mark.parametrize(("stage", "how"), each_once_and_all_wide(STAGES, ["fin", "rst"]))
def test_a_client_that_leaves_in_mid_upload_leaves_nothing(roomy: Any, stage: str, how: str) -> None:
    deployment, engine = roomy
    with connected(deployment.url) as s:
        s.sendall(head(10 * MB) + STAGES[stage])
        if len(STAGES[stage]) > MB:
            eventually(lambda: any(deployment.unfinished().values()), within_s=3)
        if how == "rst":
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    eventually(lambda: not any(deployment.unfinished().values()), within_s=1)
    eventually(lambda: engine.stats.connections == 0, within_s=1)
    assert not engine.requests  # none was complete


@pytest.mark.parametrize("how", ["fin", "rst"])
def test_a_client_that_leaves_a_stuck_engine_is_noticed(roomy: Any, how: str) -> None:
    """Behind what nobody reads a departure shows only to those who look."""
    deployment, _ = roomy
    with SlowReader() as slow:
        register(deployment, slow, "slow")
        with connected(deployment.url) as s:
            s.sendall(head(200 * MB) + model_part("slow") + FILE)
            s.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                while True:
                    s.send(b"x" * 10_000)
            if how == "rst":
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        left_s = time.monotonic()
        if how == "rst":
            eventually(lambda: not any(deployment.unfinished().values()), within_s=1)
        else:  # its last bytes wait for room: then the engine's own time ends it
            eventually(lambda: not any(deployment.unfinished().values()), within_s=5)
        slow.go_on.set()
        eventually(lambda: slow.gone_s is not None, within_s=1)
        assert time.monotonic() - left_s < 6


EARLY = b'HTTP/1.1 413 Content Too Large\r\nContent-Type: application/json\r\nContent-Length: 13\r\n\r\n{"own":"big"}'


def test_an_early_refusal_of_the_engine_is_passed_on_and_the_connection_goes_on(roomy: Any) -> None:
    deployment, engine = roomy
    with SlowReader(EARLY) as slow, connected(deployment.url) as s:
        register(deployment, slow, "slow")
        body = model_part("slow") + FILE + b"x" * (5 * MB) + END
        s.sendall(head(len(body)) + body[: 3 * MB])
        reply = read_reply(s)
        assert (reply.status, reply.body) == (413, b'{"own":"big"}')
        slow.go_on.set()
        eventually(lambda: slow.gone_s is not None, within_s=1)
        assert slow.got_bytes < len(body)
        s.sendall(body[3 * MB :])  # what was to come is dropped
        small = model_part("whisper") + FILE + b"x" + END
        s.sendall(head(len(small)) + small)
        assert read_reply(s).status == 200
    assert [record.body for record in engine.requests] == [small]


def test_expect_100_continue(roomy: Any) -> None:
    deployment, engine = roomy
    body = model_part("whisper") + FILE + b"x" * (2 * MB) + END
    with connected(deployment.url) as s:
        s.sendall(head(len(body), "Expect: 100-continue"))
        assert s.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        s.sendall(body)
        assert read_reply(s).status == 200
    assert engine.requests[0].body == body


def test_what_has_gone_out_is_not_sent_to_another_engine(roomy: Any) -> None:
    deployment, _ = roomy
    body = model_part("twice") + FILE + b"x" * (5 * MB) + END
    with SlowReader() as one, SlowReader() as other, connected(deployment.url) as s:
        for engine in (one, other):
            engine.breaks_off = True
            register(deployment, engine, "twice")
        s.sendall(head(len(body)) + body[: 3 * MB])
        eventually(lambda: one.began.is_set() or other.began.is_set())
        one.go_on.set()
        other.go_on.set()
        s.settimeout(10)
        reply = read_reply(s)
        assert (reply.status, reply.json()["error"]["code"]) == (502, "engine_broke_off")
        assert one.posts + other.posts == 1


def test_a_form_that_is_held_whole_goes_to_another_engine(
    roomy: Any, engine_factory: Callable[..., SimulatedEngine]
) -> None:
    deployment, _ = roomy
    bad = engine_factory(models=("pair",), status=503)
    good = engine_factory(models=("pair",))
    deployment.add(bad)
    deployment.add(good)
    for size in (1000, 3 * MB):  # the second has its model last, so that all of it was held
        body = FILE + b"x" * size + b"\r\n" + model_part("pair") + END[2:]
        for _ in range(2):
            with connected(deployment.url) as s:
                s.sendall(head(len(body)) + body)
                assert read_reply(s).status == 200
    assert {record.body for record in good.requests} >= {body}
