"""The worker class under real gunicorn: how it drains, what it refuses, what it tells the master."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.wait import eventually
from tests.workers.real_gunicorn import Connect, Gunicorn, Start, listening_workers


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gunicorn]:
    """One that the tests which do not stop it share."""
    gunicorn = Gunicorn(tmp_path_factory.mktemp("gunicorn") / "log")
    yield gunicorn
    gunicorn.process.kill()


def test_r54_a_stream_within_the_grace_time_ends_properly(start: Start, connect: Connect) -> None:
    gunicorn = start(EVENHAND_GRACE_S="10")
    client = connect(gunicorn)
    client.send("/stream?n=5&gap_s=0.1")
    client.read_until(b"data: 0\n\n\r\n")
    assert gunicorn.stop() < 6
    assert client.read_to_end().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_r54_a_longer_one_is_told_and_no_worker_times_out(start: Start, connect: Connect) -> None:
    # The master would call a worker stuck after 1 s without a heartbeat; the drain takes 3.
    gunicorn = start("--timeout", "1", EVENHAND_GRACE_S="3")
    client = connect(gunicorn)
    client.send("/stream?n=1000&gap_s=0.1")
    client.read_until(b"data: 0\n\n\r\n")
    assert 2.5 < gunicorn.stop() < 8
    assert client.read_to_end().endswith(b'data: {"error": "shutting down"}\n\n\r\n0\r\n\r\n')


def test_a_request_that_ignores_the_deadline_is_cancelled_and_the_worker_ends_by_itself(
    start: Start, connect: Connect
) -> None:
    gunicorn = start(EVENHAND_GRACE_S="0.5")
    client = connect(gunicorn)
    client.send("/stuck")
    client.read_until(b"data: stuck\n\n\r\n")
    assert gunicorn.stop() < 6
    assert "1 request(s) did not end within the grace time" in gunicorn.log()
    assert "Application shutdown complete" in gunicorn.log()


@pytest.mark.parametrize("while_draining", [False, True])
def test_sigint_ends_streams_at_once_with_an_error_event(start: Start, connect: Connect, while_draining: bool) -> None:
    gunicorn = start(EVENHAND_GRACE_S="60")
    client = connect(gunicorn)
    client.send("/stream?n=1000&gap_s=0.1")
    client.read_until(b"data: 0\n\n\r\n")
    if while_draining:
        gunicorn.process.send(signal.SIGTERM)
        client.read_until(b"data: 5\n\n\r\n")
    assert gunicorn.stop(signal.SIGINT) < 6
    assert client.read_to_end().endswith(b'data: {"error": "shutting down"}\n\n\r\n0\r\n\r\n')


def test_r54_a_reload_replaces_workers_under_running_streams(start: Start, connect: Connect) -> None:
    gunicorn = start(EVENHAND_GRACE_S="10")
    (old,) = gunicorn.workers()
    client = connect(gunicorn)
    client.send("/stream?n=10&gap_s=0.1")
    client.read_until(b"data: 0\n\n\r\n")
    gunicorn.process.send(signal.SIGHUP)
    assert client.read_to_end().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    eventually(lambda: len(gunicorn.workers()) == 1 and old not in gunicorn.workers(), within_s=5)
    assert connect(gunicorn).ask("/")[1]["pid"] != old
    gunicorn.stop()


def test_r54_recycled_workers_lose_no_request(start: Start, connect: Connect) -> None:
    gunicorn = start(workers=2, EVENHAND_MAX_REQUESTS="25", EVENHAND_GRACE_S="10")
    deadline = time.monotonic() + 2.5
    pids: set[int] = set()
    lost: list[Exception] = []

    def keep_asking(stream: bool) -> None:
        client = None
        try:
            while time.monotonic() < deadline:
                client = client or connect(gunicorn)
                if stream:
                    client.send("/stream?n=5&gap_s=0.05")
                    head = client.read_until(b"data: [DONE]\n\n\r\n0\r\n\r\n")
                else:
                    head, answer = client.ask("/")
                    pids.add(answer["pid"])
                if b"connection: close" in head:
                    client = None
        except Exception as e:
            lost.append(e)

    threads = [threading.Thread(target=keep_asking, args=(i % 3 == 0,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost == []
    assert len(pids) > 2
    gunicorn.stop()


def test_a_request_on_an_idle_connection_is_answered_while_the_worker_stops(start: Start, connect: Connect) -> None:
    gunicorn = start()
    client = connect(gunicorn)
    head, _ = client.ask("/")
    assert b"connection: close" not in head
    os.kill(gunicorn.workers()[0], signal.SIGTERM)
    eventually(lambda: listening_workers(gunicorn) == 0)
    head, _ = client.ask("/")
    assert b"connection: close" in head
    assert client.read_to_end() == b""


def test_half_a_head_has_time_for_its_rest_while_the_worker_stops(start: Start, connect: Connect) -> None:
    gunicorn = start()
    slow, stuck, first = connect(gunicorn), connect(gunicorn), connect(gunicorn)
    for client in (slow, stuck):
        client.ask("/")
    for client in (slow, stuck, first):
        client.sock.sendall(b"GET / HT")
    os.kill(gunicorn.workers()[0], signal.SIGTERM)
    time.sleep(1.5)  # three times as long as an idle connection is kept
    for client in (slow, first):
        client.sock.sendall(b"TP/1.1\r\nHost: x\r\n\r\n")
        answer = client.read_to_end()
        assert answer.startswith(b"HTTP/1.1 200 ") and b"connection: close" in answer
    refusal = stuck.read_to_end()
    assert refusal.startswith(b"HTTP/1.1 503 ") and b"connection: close" in refusal


def test_who_has_connected_and_asked_nothing_yet_is_answered_while_the_worker_stops(
    start: Start, connect: Connect
) -> None:
    gunicorn = start()
    late, silent = connect(gunicorn), connect(gunicorn)
    connect(gunicorn).ask("/")  # those before it have been taken too
    os.kill(gunicorn.workers()[0], signal.SIGTERM)
    time.sleep(1.5)
    head, _ = late.ask("/")
    assert b"connection: close" in head
    assert silent.read_to_end() == b""


def test_sigint_refuses_half_a_head_at_once(start: Start, connect: Connect) -> None:
    gunicorn = start()
    client = connect(gunicorn)
    client.ask("/")
    client.sock.sendall(b"GET / HT")
    assert gunicorn.stop(signal.SIGINT) < 4
    assert client.read_to_end().startswith(b"HTTP/1.1 503 ")


def _accepts(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_workers_of_a_killed_master_drain_and_free_the_port(start: Start, connect: Connect) -> None:
    gunicorn = start(EVENHAND_GRACE_S="10")
    client = connect(gunicorn)
    client.send("/stream?n=5&gap_s=0.1")
    client.read_until(b"data: 0\n\n\r\n")
    gunicorn.process.send(signal.SIGKILL)
    assert client.read_to_end().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    eventually(lambda: not _accepts(gunicorn.port))


def test_a_low_limit_on_open_files_is_raised_and_told_in_the_log_format_asked_for(start: Start) -> None:
    gunicorn = start(prefix=("bash", "-c", 'ulimit -Sn 1000; exec "$@"', "bash"), EVENHAND_LOG_FORMAT="json")
    limits = Path(f"/proc/{gunicorn.workers()[0]}/limits").read_text()
    soft, hard = re.search(r"Max open files\s+(\d+)\s+(\d+)", limits).groups()  # type: ignore[union-attr]
    assert int(soft) == min(int(hard), 2**20) > 1000
    gunicorn.stop()
    lines = [json.loads(line) for line in gunicorn.log().splitlines()]
    assert all({"time", "level", "pid", "logger", "message"} <= set(line) for line in lines)
    (warning,) = (line for line in lines if "limit on open files" in line["message"])
    assert warning["level"] == "WARNING"
    assert warning["message"].startswith(f"the limit on open files was 1000, now {soft};")


def test_gunicorn_alone_tells_of_a_variable_that_is_no_setting_once(start: Start) -> None:
    gunicorn = start(workers=2, EVENHAND_API_KEY="hush")
    gunicorn.stop()
    assert gunicorn.log().count("EVENHAND_API_KEY is no setting and is ignored; did you mean EVENHAND_API_KEYS?") == 1
    assert "hush" not in gunicorn.log()


def test_a_dead_workers_counts_are_given_back_or_that_it_failed_is_logged(start: Start, connect: Connect) -> None:
    gunicorn = start()
    (pid,) = gunicorn.workers()
    worker_id = connect(gunicorn).ask("/")[1]["worker"]
    assert re.fullmatch(rf"{re.escape(socket.gethostname())}-{pid}-[0-9a-f]{{8}}", worker_id)
    os.kill(pid, signal.SIGKILL)
    # There is no Redis here: what counts is that the master asked for the right worker, and lived on.
    eventually(lambda: f"counts of worker {worker_id} are given back when its lease ends" in gunicorn.log(), within_s=5)
    eventually(lambda: _accepts(gunicorn.port) and connect(gunicorn).ask("/")[1]["pid"] != pid, within_s=5)


# --- what one connection sees -----------------------------------------------------------------------


def test_the_peer_is_the_connections_address_whatever_a_header_says(standing: Gunicorn, connect: Connect) -> None:
    head, answer = connect(standing).ask("/", "X-Forwarded-For: 10.9.9.9", "Forwarded: for=10.9.9.9")
    assert answer["client"] == "127.0.0.1"
    assert b"\nserver:" not in head.lower() and b"\ndate:" not in head.lower()


def test_a_head_without_end_is_refused(standing: Gunicorn, connect: Connect) -> None:
    client = connect(standing)
    client.send("/")
    client.read_until(b"}")
    for piece in (b"GET /" + b"x" * 30_000, b"x" * 30_000, b"x" * 30_000):
        client.sock.sendall(piece)
        time.sleep(0.02)  # each to be read by itself
    answer = client.read_to_end()
    assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "head_too_large"


def test_large_bodies_on_one_connection_do_not_count_as_heads(standing: Gunicorn, connect: Connect) -> None:
    client = connect(standing)
    for length in (300_000, 70_000, 1_000_000):
        assert client.ask("/body", method="POST", body=b"b" * length)[1] == {"length": length}


def test_what_is_not_http_is_refused_with_an_error_object(standing: Gunicorn, connect: Connect) -> None:
    client = connect(standing)
    client.sock.sendall(b"hello\r\n\r\n")
    head, _, body = client.read_to_end().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_an_offer_of_h2c_is_passed_over_and_the_body_read(standing: Gunicorn, connect: Connect) -> None:
    client = connect(standing)
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    head, answer = client.ask("/body", *offer, method="POST", body=b"12345")
    assert head.startswith(b"HTTP/1.1 200 ") and answer == {"length": 5}
    assert client.ask("/body", method="POST", body=b"123")[1] == {"length": 3}


def test_an_offer_of_h2c_with_a_body_that_comes_later(standing: Gunicorn, connect: Connect) -> None:
    client = connect(standing)
    client.sock.sendall(
        b"POST /body HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 8\r\n\r\nhalf"
    )
    time.sleep(0.05)
    client.sock.sendall(b"half")
    assert client.read_until(b"}").endswith(b'{"length": 8}')


def test_connect_is_refused(standing: Gunicorn, connect: Connect) -> None:
    client = connect(standing)
    client.sock.sendall(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n")
    assert client.read_to_end().startswith(b"HTTP/1.1 400 ")


# --- a client that ends its side --------------------------------------------------------------------


def _left(gunicorn: Gunicorn, connect: Connect) -> list[float]:
    found: list[float] = connect(gunicorn).ask("/left")[1]["left"]
    return found


def test_a_client_that_ends_its_side_after_the_request_gets_its_answer(standing: Gunicorn, connect: Connect) -> None:
    client = connect(standing)
    client.send("/wait?s=0.7", method="POST", body=b"{}")
    client.sock.shutdown(socket.SHUT_WR)
    *interim, head, body = client.read_to_end().split(b"\r\n\r\n")
    assert interim and set(interim) == {b"HTTP/1.1 100 Continue"}  # what a client of HTTP/1.1 passes over
    assert head.startswith(b"HTTP/1.1 200 ") and b"connection: close" in head.lower()
    assert json.loads(body) == {"waited": 0.7}


def test_pipelined_requests_before_the_end_of_the_clients_side_are_all_answered(
    standing: Gunicorn, connect: Connect
) -> None:
    client = connect(standing)
    client.sock.sendall(b"".join(b"GET /wait?s=0.%d HTTP/1.1\r\nHost: x\r\n\r\n" % n for n in (3, 2, 1)))
    client.sock.shutdown(socket.SHUT_WR)
    answers = re.findall(rb'\{"waited": 0\.(\d)\}', client.read_to_end())
    assert answers == [b"3", b"2", b"1"]


@pytest.mark.parametrize(
    "broken", [b"?", b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"]
)
def test_what_is_wrong_behind_a_request_is_told_to_a_client_that_has_ended_its_side(
    standing: Gunicorn, connect: Connect, broken: bytes
) -> None:
    client = connect(standing)
    client.sock.sendall(b"GET /wait?s=0.6 HTTP/1.1\r\nHost: x\r\n\r\n" + broken)
    client.sock.shutdown(socket.SHUT_WR)
    said = re.findall(rb"HTTP/1.1 (\d+)", client.read_to_end())
    assert said == [*[b"100"] * (len(said) - 2), b"200", b"400"]
    assert "Traceback" not in standing.log()


@pytest.mark.parametrize("half_closed_for_s", [None, 0.0, 0.6])
def test_r39_a_client_that_leaves_before_the_head_is_noticed_within_a_second(
    standing: Gunicorn, connect: Connect, half_closed_for_s: float | None
) -> None:
    before = len(_left(standing, connect))
    client = connect(standing)
    client.send("/wait?s=30")
    if half_closed_for_s is not None:
        client.sock.shutdown(socket.SHUT_WR)
        time.sleep(half_closed_for_s)  # its own behaviour, nothing is waited for
        assert len(_left(standing, connect)) == before
    client.sock.close()
    eventually(lambda: len(_left(standing, connect)) == before + 1, within_s=1)


@pytest.mark.parametrize(
    "said",
    [
        b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhal",
        b"GET /wait?s=30 HTTP/1.0\r\n\r\n",  # it could not be told from one that left
    ],
    ids=["in its body", "HTTP/1.0"],
)
def test_a_client_that_ends_its_side_elsewhere_counts_as_gone(
    standing: Gunicorn, connect: Connect, said: bytes
) -> None:
    client = connect(standing)
    client.sock.sendall(said)
    client.sock.shutdown(socket.SHUT_WR)
    client.sock.settimeout(1)
    assert b"200" not in client.read_to_end()
