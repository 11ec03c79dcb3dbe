"""Requests that two readers could read in two ways: refused or made harmless, and the engine's bytes are the judge.

Source of the shapes: RFC 9112 (3.2, 5.1, 5.2, 6.1, 6.3, 7.1, 9.3.2), RFC 9110 (7.2, 7.6.1, 10.1.1), and what request
smuggling is made of: Content-Length against Transfer-Encoding, spellings of either, line ends, folds, upgrades.
"""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

import pytest

from tests.integration.serving import SharedDeployment, chat_body, connected, raw, read_reply
from tests.support.deployment import Deployment
from tests.support.loop import LoopThread
from tests.support.recorder import Received, Recorder
from tests.support.wait import eventually

DEPLOYMENT = SharedDeployment(workers=1)  # one worker has one pool: what one request leaves in it shows in the next

BODY = chat_body("recorded")
N = len(BODY)
PATH = b"/v1/chat/completions"
CL = b"Content-Length: %d" % N
TE = b"Transfer-Encoding: chunked"
SENTINEL = b"sentinel"


def post(
    *lines: bytes,
    body: bytes = BODY,
    target: bytes = PATH,
    version: bytes = b"HTTP/1.1",
    method: bytes = b"POST",
    host: bytes = b"Host: h",
) -> bytes:
    return b"\r\n".join([b"%b %b %b" % (method, target, version), host, *lines, b"", b""]) + body


def chunked(extension: bytes = b"", end: bytes = b"0\r\n\r\n", size: bytes = b"%x" % N) -> bytes:
    return size + extension + b"\r\n" + BODY + b"\r\n" + end


def at(target: bytes) -> bytes:
    return post(CL, target=target)


def coded(*values: bytes) -> bytes:
    return post(*(b"Transfer-Encoding: " + value for value in values), body=chunked())


def offering(*lines: bytes, body: bytes = BODY, upgrade: bytes = b"h2c") -> bytes:
    return post(
        b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + upgrade, b"HTTP2-Settings: AAMA", *lines, body=body
    )


HIDDEN = post(CL, target=b"/v1/hidden")
PLAIN = post(CL)
AFTER = post(CL, b"X-Request-Id: " + SENTINEL)

NOT_IN_NAMES = [b"\0", b"\1", b"\x7f", b"\xff", b"(", b"/", b'"', b"@", b"{", b"[", b"\\", b",", b";", b"="]

# What is refused with this status, by a connection that is closed.
REFUSED: dict[str, tuple[int, bytes]] = {
    # --- size
    "a header of 70 kB in one read": (431, post(b"X: " + b"a" * 70_000, CL)),
    "many headers of 8 kB": (431, post(*(b"X-%d: " % i + b"a" * 8000 for i in range(20)), CL)),
    "101 headers": (431, post(*[b"a: b"] * 99, CL)),  # with Host
    "5000 headers": (431, post(*[b"a: b"] * 5000, CL)),
    "a request line of 70 kB": (431, at(b"/v1/x?" + b"a" * 70_000)),
    "200 kB of empty lines": (431, b"\r\n" * 100_000 + PLAIN),
    "a Content-Length beyond 64 bits": (400, post(b"Content-Length: 99999999999999999999999")),
    # --- chunks
    "chunk size zz": (400, post(TE, body=chunked(size=b"zz"))),
    "chunk size with 0x": (400, post(TE, body=chunked(size=b"0x%x" % N))),
    "chunk size below 0": (400, post(TE, body=chunked(size=b"-1"))),
    "chunk size with +": (400, post(TE, body=chunked(size=b"+%x" % N))),
    "chunk size with _": (400, post(TE, body=chunked(size=b"2_2"))),
    "chunk size empty": (400, post(TE, body=chunked(size=b""))),
    "chunk size with a space behind": (400, post(TE, body=chunked(size=b"%x " % N))),
    "chunk size with a space before": (400, post(TE, body=chunked(size=b" %x" % N))),
    "chunk size with a tab": (400, post(TE, body=chunked(size=b"%x\t" % N))),
    "chunk size that overflows 64 bits": (400, post(TE, body=chunked(size=b"1%016x" % N))),
    "no line end behind a chunk": (400, post(TE, body=b"%x\r\n%b0\r\n\r\n" % (N, BODY))),
    "bare LF in chunks": (400, post(TE, body=b"%x\n%b\n0\n\n" % (N, BODY))),
    "bare LF behind a chunk": (400, post(TE, body=b"%x\r\n%b\n0\r\n\r\n" % (N, BODY))),
    "bare CR in chunks": (400, post(TE, body=b"%x\r%b\r0\r\r" % (N, BODY))),
    "LF in an extension": (400, post(TE, body=chunked(b";a\nb"))),
    "CR in an extension": (400, post(TE, body=chunked(b";a\rb"))),
    "NUL in an extension": (400, post(TE, body=chunked(b";a\0b"))),
    "an extension of 400 kB": (400, post(TE, body=chunked(b";a=" + b"b" * 400_000))),
    "trailers of 800 kB": (400, post(TE, body=chunked(end=b"0\r\n" + b"X-T: 1\r\n" * 100_000 + b"\r\n"))),
    "a trailer without colon": (400, post(TE, body=chunked(end=b"0\r\ngarbage\r\n\r\n"))),
    "a trailer that frames": (400, post(TE, body=chunked(end=b"0\r\nContent-Length: 4\r\n\r\n"))),
    # --- Content-Length
    "Content-Length twice, the same": (400, post(CL, CL)),
    "Content-Length twice, different": (400, post(CL, b"Content-Length: 3")),
    "Content-Length as a list": (400, post(b"Content-Length: %d, %d" % (N, N))),
    "Content-Length with +": (400, post(b"Content-Length: +%d" % N)),
    "Content-Length below 0": (400, post(b"Content-Length: -%d" % N)),
    "Content-Length in hex": (400, post(b"Content-Length: 0x22")),
    "Content-Length empty": (400, post(b"Content-Length: ")),
    "Content-Length with a space inside": (400, post(b"Content-Length: 3 4")),
    "Content-Length with _": (400, post(b"Content-Length: 3_4")),
    # --- Transfer-Encoding
    "Content-Length, then chunked": (400, post(CL, TE, body=chunked())),
    "chunked, then Content-Length": (400, post(TE, CL, body=chunked())),
    "chunked against Content-Length, with a request hidden": (
        400,
        post(TE, b"Content-Length: 5", body=b"0\r\n\r\n" + HIDDEN),
    ),
    "Content-Length against chunked, with a request hidden": (
        400,
        post(b"Content-Length: %d" % (5 + len(HIDDEN)), TE, body=b"0\r\n\r\n" + HIDDEN),
    ),
    "chunked twice": (400, coded(b"chunked", b"chunked")),
    "chunked twice in one line": (400, coded(b"chunked, chunked")),
    "identity": (400, post(b"Transfer-Encoding: identity", CL)),
    "chunked, identity": (400, coded(b"chunked, identity")),
    "identity, chunked": (400, coded(b"identity, chunked")),
    "gzip, chunked": (400, coded(b"gzip, chunked")),
    "chunked, then identity in a line of its own": (400, coded(b"chunked", b"identity")),
    "identity, then chunked in a line of its own": (400, coded(b"identity", b"chunked")),
    "xchunked": (400, coded(b"xchunked")),
    "xchunked with Content-Length": (400, post(b"Transfer-Encoding: xchunked", CL)),
    "chunked with a tab behind": (400, coded(b"chunked\t")),
    "chunked in quotes": (400, coded(b'"chunked"')),
    "chunked with a parameter": (400, coded(b"chunked;a=b")),
    "chunked behind a comma": (400, coded(b",chunked")),
    "chunked before a comma": (400, coded(b"chunked,")),
    "chunked behind a vertical tab": (400, coded(b"\x0bchunked")),
    "an empty coding": (400, post(b"Transfer-Encoding: ", CL)),
    "chunked in HTTP/1.0": (400, post(TE, body=chunked(), version=b"HTTP/1.0")),
    "chunked behind a space before the colon": (400, post(b"Transfer-Encoding : chunked", CL, body=chunked())),
    "chunked in a folded line": (400, post(b"Transfer-Encoding:\r\n chunked", body=chunked())),
    # --- lines
    "a line without colon": (400, post(b"garbage", CL)),
    "a folded line": (400, post(b"X: a\r\n b", CL)),
    "a line folded with a tab": (400, post(b"X: a\r\n\tb", CL)),
    "a folded first line": (400, post(CL, host=b" X: y\r\nHost: h")),
    "a folded Content-Length": (400, post(b"Content-Length:\r\n %d" % N)),
    "bare LF for all line ends": (400, PLAIN.replace(b"\r\n", b"\n")),
    "bare LF in a value": (400, post(b"X: a\nY: b", CL)),
    "bare LF at the end of the head": (400, PLAIN.replace(b"\r\n\r\n", b"\r\n\n")),
    "bare CR for all line ends": (400, PLAIN.replace(b"\r\n", b"\r")),
    "bare CR in a value": (400, post(b"X: a\rY: b", CL)),
    "bare CR before the line's end": (400, post(b"X: a\r", CL)),
    "a space before the colon": (400, post(b"X : a", CL)),
    "a space before Content-Length's colon": (400, post(b"Content-Length : 5", CL)),
    "a tab before the colon": (400, post(b"X\t: a", CL)),
    "a space before the name": (400, post(b"A: b", b" X: a", CL)),
    "an empty name": (400, post(b": a", CL)),
    **{
        f"{c!r} in a name": (400, post(b"X%bY: a" % c, CL))
        for c in (b"\0", b"\1", b"\x7f", b"\xff", *b'(/"@{ '.split())
    },
    "a space in a name": (400, post(b"X y: a", CL)),
    **{f"{c!r} in a value": (400, post(b"X: a%bb" % c, CL)) for c in (b"\0", b"\1", b"\x0b", b"\x1b", b"\x7f")},
    # --- request line
    **{f"{c!r} in the path": (400, at(b"/v1/a%bb" % c)) for c in (b"\0", b"\1", b"\t", b" ", b"\x7f", b"\xff")},
    "a control character in the query": (400, at(b"/v1/x?\1")),
    "a path without slash": (400, at(b"v1/chat/completions")),
    "a path that begins with a backslash": (400, at(b"\\v1/x")),
    "an authority for a target": (400, at(b"evil:80")),
    "an absolute target without path": (400, at(b"http://evil")),
    "an absolute target of another scheme": (400, at(b"ftp://evil/v1/x")),
    "CONNECT": (400, post(CL, method=b"CONNECT", target=b"h:80")),
    "a method in lower case": (400, post(CL, method=b"post")),
    "an unknown method": (400, post(CL, method=b"EVIL")),
    "a tab for a space": (400, PLAIN.replace(b"POST ", b"POST\t")),
    "a space behind the version": (400, post(CL, version=b"HTTP/1.1 ")),
    "a version in lower case": (400, post(CL, version=b"http/1.1")),
    "HTTP/1.2": (400, post(CL, version=b"HTTP/1.2")),
    "HTTP/1": (400, post(CL, version=b"HTTP/1")),
    "HTTP/2.0 in text": (505, post(CL, version=b"HTTP/2.0")),
    "HTTP/0.9 with a version": (505, post(CL, version=b"HTTP/0.9")),
    "HTTP/0.9": (505, b"POST /v1/chat/completions\r\n\r\n"),
    "HTTP/0.9 by GET": (505, b"GET /v1/models\r\n\r\n"),
    "the preface of HTTP/2": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    # --- Host
    "no Host": (400, post(CL, host=b"X: y")),
    "two Hosts": (400, post(b"Host: evil", CL)),
    "two Hosts in HTTP/1.0": (400, post(b"Host: evil", CL, version=b"HTTP/1.0")),
    "a Host with a space": (400, post(CL, host=b"Host: a b")),
    "a Host with a path": (400, post(CL, host=b"Host: a/b@c")),
    # --- an upgrade is offered, so the head is read twice
    "h2c, chunked and Content-Length": (400, offering(CL, TE, body=chunked())),
    "h2c and Content-Length twice": (400, offering(CL, b"Content-Length: 3")),
    "h2c and xchunked": (400, offering(b"Transfer-Encoding: xchunked")),
    "h2c and identity, then chunked": (
        400,
        offering(b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked", body=chunked()),
    ),
    "h2c and a folded line": (400, offering(b"X: a\r\n b", CL)),
    "h2c and two Hosts": (400, offering(b"Host: evil", CL)),
}

# What is answered with this status and goes to no engine; where the message ends is clear, so the connection stays.
ANSWERED: dict[str, tuple[int, bytes]] = {
    **{
        f"{target!r}": (400, at(target))
        for target in (
            b"/v1/../admin",
            b"/v1/x/..",
            b"/v1/x/..?a",
            b"/v1/x/..#a",
            b"/v1/%2e%2e/admin",
            b"/v1/.%2E/admin",
            b"/v1/..%2fadmin",
            b"/v1/%252e%252e/admin",
            b"/v1/%25252e%25252e/admin",
            b"/v1/..\\admin",
            b"/v1/%2e%2e%5cadmin",
            b"/v1/..;/admin",
            b"/v1/..;a=b/admin",
            b"/v1/..%3b/admin",
            b"/v1/..%00/admin",
            b"/v1/..%09/admin",
            b"/v1/.%0a./admin",
            b"/v1/%c0%ae%c0%ae/admin",
            b"/v1/x%0d%0aX-Evil:%20y",
            b"/v1/x%250d%250aX-Evil:%20y",
            b"http://evil/v1/../admin",
        )
    },
    **{
        f"{target!r}": (404, at(target))
        for target in (
            b"*",
            b"//v1/chat/completions",
            b"//evil/v1/chat/completions",
            b"/x/../v1/x",
            b"/v1\\x",
            b"/V1/x",
        )
    },
    "PUT": (405, post(CL, method=b"PUT")),
    "GET with a request for its body": (405, post(b"Content-Length: %d" % len(HIDDEN), body=HIDDEN, method=b"GET")),
    "a request behind a body of JSON": (400, post(b"Content-Length: %d" % (N + len(HIDDEN)), body=BODY + HIDDEN)),
    "a body that is a request": (400, post(b"Content-Length: %d" % len(HIDDEN), body=HIDDEN)),
    "a chunk that is a request": (
        400,
        post(TE, body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)),
    ),
}

HOPS = (b"Keep-Alive: timeout=5", b"TE: trailers", b"Trailer: X", b"Upgrade: h2c", b"HTTP2-Settings: AAMA")
A, B = (b"x-a", b"1"), (b"x-b", b"2")

# What goes to the engine with these headers beside ours, and this target.
Harmless = tuple[bytes, list[tuple[bytes, bytes]], bytes]
HARMLESS: dict[str, Harmless] = {
    "nothing odd": (PLAIN, [], PATH),
    "a chunk with an extension": (post(TE, body=chunked(b';a="x;y"')), [], PATH),
    "zeros before a chunk's size": (post(TE, body=chunked(size=b"0" * 40 + b"%x" % N)), [], PATH),
    "trailers": (post(TE, body=chunked(end=b"0\r\nX-A: 1\r\nAuthorization: x\r\n\r\n")), [], PATH),
    "zeros before Content-Length": (post(b"Content-Length: 000%d" % N), [], PATH),
    "chunked behind a tab": (coded(b"\tchunked"), [], PATH),
    "CHUNKED": (coded(b"CHUNKED"), [], PATH),
    "empty lines before the request": (b"\r\n\r\n" + PLAIN, [], PATH),
    "two spaces": (PLAIN.replace(b"POST ", b"POST  "), [], PATH),
    "99 headers": (post(*[b"X-A: 1"] * 97, CL), [A] * 97, PATH),
    "framing spelt with underscores": (post(b"Transfer_Encoding: chunked", b"Content_Length: 5", CL), [], PATH),
    "ours spelt with underscores": (
        post(b"X_Forwarded_For: 6.6.6.6", b"X_Request_Id: 1", b"X_Api_Key: k", b"Proxy_Foo: 1", CL),
        [],
        PATH,
    ),
    "other names with underscores": (post(b"X_a: 1", CL), [(b"x_a", b"1")], PATH),
    "bytes above 127 in a value": (post(b"X-A: \xff\x85", CL), [(b"x-a", b"\xff\x85")], PATH),
    "an encoded line end in a value": (post(b"X-A: %0d%0aEvil: 1", CL), [(b"x-a", b"%0d%0aEvil: 1")], PATH),
    # --- targets
    "an absolute target": (at(b"http://evil" + PATH), [], PATH),
    "an absolute target with a user and a port": (at(b"HTTPS://evil@x:80" + PATH + b"?a"), [], PATH + b"?a"),
    "an encoded letter": (at(b"/v1/chat/completion%73"), [], PATH),
    "a final slash": (at(b"/v1/chat/completions/?a"), [], PATH + b"?a"),
    "a slash twice": (at(b"/v1//chat/completions"), [], b"/v1//chat/completions"),
    "a backslash": (at(b"/v1/x\\y"), [], b"/v1/x\\y"),
    "a fragment": (at(b"/v1/x#y"), [], b"/v1/x"),
    "a query and a fragment": (at(b"/v1/x?q#y"), [], b"/v1/x?q"),
    "dots in the query": (at(b"/v1/x?a=../../b"), [], b"/v1/x?a=../../b"),
    "three dots": (at(b"/v1/.../x"), [], b"/v1/.../x"),
    "an encoded question mark": (at(b"/v1/x%3fy"), [], b"/v1/x%3fy"),
    "an encoded space": (at(b"/v1/x%20HTTP/1.1"), [], b"/v1/x%20HTTP/1.1"),
    "a query of 60 kB": (at(b"/v1/x?" + b"a" * 60_000), [], b"/v1/x?" + b"a" * 60_000),
    # --- hop by hop
    "all that belongs to one hop": (post(*HOPS, CL), [], PATH),
    "what belongs to one hop, in chunks": (post(*HOPS, TE, body=chunked()), [], PATH),
    "named in Connection": (post(b"Connection: X-A, keep-alive", b"X-A: 1", b"X-B: 2", CL), [B], PATH),
    "named in two Connections": (post(b"Connection: X-A", b"Connection:\tx-b\t,", b"X-A: 1", b"X-B: 2", CL), [], PATH),
    "keep-alive named": (post(b"Connection: keep-alive", b"Keep-Alive: timeout=9", CL), [], PATH),
    "ours named": (post(b"Connection: host, content-length, x-forwarded-for, x-request-id", CL), [], PATH),
    "framing named": (post(b"Connection: transfer-encoding, te", b"TE: trailers", TE, body=chunked()), [], PATH),
    "authorization named": (post(b"Connection: authorization", b"Authorization: Bearer x", CL), [], PATH),
    "Proxy-Connection": (post(b"Proxy-Connection: keep-alive", b"Proxy-Authorization: x", CL), [], PATH),
    # --- upgrades
    "h2c": (offering(CL), [], PATH),
    "h2c with chunks": (offering(TE, body=chunked()), [], PATH),
    "websocket": (offering(CL, upgrade=b"websocket"), [], PATH),
    "h2c with another name in Connection": (
        post(b"Connection: Upgrade, X-A", b"X-A: 1", b"Upgrade: h2c", CL),
        [],
        PATH,
    ),
    "h2c with another Connection": (
        post(b"Connection: Upgrade", b"Connection: X-A", b"X-A: 1", b"Upgrade: h2c", CL),
        [],
        PATH,
    ),
    "h2c with an absolute target": (
        post(b"Connection: Upgrade", b"Upgrade: h2c", CL, target=b"http://evil" + PATH),
        [],
        PATH,
    ),
    "another Expect": (post(b"Expect: 200-ok", CL), [], PATH),
}


@pytest.fixture(scope="module")
def recorder_of_module(deployment_of_module: Deployment, engine_loop: LoopThread) -> Iterator[Recorder]:
    with Recorder(engine_loop) as recorder:
        node = {"url": recorder.url, "status": {"models": [recorder.model]}}
        assert deployment_of_module.post("/nodes/add", node).status == 200
        eventually(lambda: deployment_of_module.nodes()[recorder.url]["state"] == "ready")
        yield recorder


@pytest.fixture
def recorder(recorder_of_module: Recorder) -> Recorder:
    recorder_of_module.forget()
    return recorder_of_module


@pytest.fixture
def url(deployment_of_module: Deployment) -> str:
    return deployment_of_module.url


def check_sentinel(client: socket.socket, recorder: Recorder, before: list[Received]) -> None:
    """A plain request goes through as itself, and nothing but it came after `before`."""
    client.sendall(AFTER)
    reply = read_reply(client)
    assert (reply.status, reply.values("x-request-id")) == (200, [SENTINEL.decode()])
    *others, last = recorder.posts
    assert others == before
    assert (last.target, last.body, last.values(b"x-request-id")) == (PATH, BODY, [SENTINEL])


def statuses(data: bytes) -> list[int]:
    """Of all answers in `data`, one after the other, each with a Content-Length."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        found.append(int(first.split()[1]))
        length = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        data = data[int(length.get("content-length", 0)) :]
    return found


def read_to_end(client: socket.socket) -> bytes:
    data = b""
    while more := client.recv(65536):
        data += more
    return data


@pytest.mark.parametrize("name", REFUSED)
def test_a_shape_is_refused_and_its_connection_closed(name: str, url: str, recorder: Recorder) -> None:
    status, data = REFUSED[name]
    with connected(url, timeout_s=3) as client:
        client.sendall(data)
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert answer.status == status
        assert answer.getheader("connection") == "close"
        assert b'"invalid_request_error"' in answer.read()
        assert client.recv(1) == b"", "closed, and nothing more is said"
        answer.close()
    with connected(url) as other:
        check_sentinel(other, recorder, [])


@pytest.mark.parametrize("name", ANSWERED)
def test_a_shape_is_answered_and_reaches_no_engine(name: str, url: str, recorder: Recorder) -> None:
    status, data = ANSWERED[name]
    with connected(url) as client:
        client.sendall(data)
        assert read_reply(client).status == status
        check_sentinel(client, recorder, [])


@pytest.mark.parametrize("name", HARMLESS)
def test_a_shape_is_made_harmless(name: str, url: str, recorder: Recorder) -> None:
    data, headers, target = HARMLESS[name]
    with connected(url) as client:
        client.sendall(data)
        assert read_reply(client).status == 200
        (received,) = recorder.posts
        identifier = received.values(b"x-request-id")
        assert received.headers == [
            (b"host", recorder.url.removeprefix("http://").encode()),
            *headers,
            (b"x-forwarded-for", b"127.0.0.1"),
            (b"x-forwarded-host", b"h"),
            (b"x-forwarded-proto", b"http"),
            (b"x-request-id", identifier[0]),
            (b"content-length", b"%d" % N),
        ]
        assert (received.target, received.body) == (target, BODY)
        check_sentinel(client, recorder, [received])


# --- more than one message


def test_pipelined_requests_are_requests_of_their_own(url: str, recorder: Recorder) -> None:
    with connected(url) as client:
        # Read as one: several answers may come in one packet.
        client.sendall(post(b"Content-Length: 0", body=b"") + HIDDEN + post(CL, b"Connection: close"))
        assert statuses(read_to_end(client)) == [400, 200, 200]
        assert [received.target for received in recorder.posts] == [b"/v1/hidden", PATH]


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
def test_nothing_is_served_behind_the_last_request_of_a_connection(
    version: bytes, url: str, recorder: Recorder
) -> None:
    with connected(url) as client:
        client.sendall(post(CL, b"Connection: close", version=version) + HIDDEN)
        assert statuses(read_to_end(client))[:1] == [200]
    with connected(url) as other:
        (received,) = recorder.posts
        check_sentinel(other, recorder, [received])
    assert received.target == PATH


def test_answers_before_a_refusal_are_whole(url: str, recorder: Recorder) -> None:
    with connected(url) as client:
        client.sendall(PLAIN * 3 + post(TE, body=chunked(size=b"zz")))
        assert statuses(read_to_end(client)) == [200, 200, 200, 400]
    assert len(recorder.posts) == 3


def test_a_refusal_is_read_by_a_client_that_goes_on_sending(url: str) -> None:
    # A close over unread bytes is a reset, and that takes the refusal away from the client.
    with connected(url) as client:
        client.sendall(post(b"X: " + b"a" * 70_000, CL))
        for _ in range(20):
            client.sendall(b"b" * 65536)
        assert read_reply(client).status == 431


def test_a_broken_body_reaches_no_engine_whatever_came_of_it(url: str, recorder: Recorder) -> None:
    with connected(url) as client:
        client.sendall(post(TE, body=b"%x\r\n%b\r\n" % (N, BODY)))
        client.sendall(b"zz\r\n")
        assert statuses(read_to_end(client)) == [400]
    assert recorder.posts == []


def test_too_many_requests_in_one_read_stop_nobody(deployment_of_module: Deployment) -> None:
    url = deployment_of_module.url
    with connected(url, timeout_s=20) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 8000)
        assert deployment_of_module.get("/health", timeout_s=1).status == 200
        found = statuses(read_to_end(client))
    assert found[-1] == 400 and set(found[:-1]) == {200} and 200 < len(found) < 400


# --- Expect


def test_the_body_is_asked_for_where_the_client_waits_to_be(url: str, recorder: Recorder) -> None:
    with connected(url) as client:
        client.sendall(post(b"Expect: 100-Continue", CL, body=b""))
        assert client.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert recorder.posts == []
        client.sendall(BODY)
        assert read_reply(client).status == 200
        check_sentinel(client, recorder, recorder.posts)


def test_a_refusal_that_did_not_ask_for_the_body_closes_the_connection(url: str, recorder: Recorder) -> None:
    # Else the client's next request, sent in place of the body that nobody wanted, would be read as that body.
    with connected(url) as client:
        client.sendall(post(b"Expect: 100-continue", b"Content-Length: 300000000", body=b"") + HIDDEN)
        assert statuses(read_to_end(client)) == [413]
    assert recorder.posts == []


def test_expect_without_a_body_hides_nothing(url: str, recorder: Recorder) -> None:
    with connected(url) as client:
        client.sendall(post(b"Expect: 100-continue", b"Content-Length: 0", body=b"") + HIDDEN)
        assert statuses(read_to_end(client)) == [400]  # there is nothing to ask for
    assert recorder.posts == []


# --- the judge itself


@pytest.mark.parametrize(
    "sent",
    [
        post(b"Content-Length: 2", body=b"{}{}"),
        post(b"Content-Length: 2", b"Content-Length: 2", body=b"{}"),
        post(TE, body=b"0\r\n\r\n"),
        post(b"X: a\n b", b"Content-Length: 2", body=b"{}"),
        post(b"X: a\rb", b"Content-Length: 2", body=b"{}"),
    ],
)
def test_the_recorder_sees_what_is_no_single_request(sent: bytes, engine_loop: LoopThread) -> None:
    with Recorder(engine_loop) as recorder:
        with connected(recorder.url) as client:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            read_to_end(client)
        with pytest.raises(AssertionError):
            _ = recorder.posts


def test_the_recorder_answers_what_is_one(engine_loop: LoopThread) -> None:
    with Recorder(engine_loop) as recorder:
        assert raw(recorder.url, PLAIN).status == 200
        assert [received.raw for received in recorder.posts] == [PLAIN]
