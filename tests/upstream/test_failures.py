"""How an engine can fail, told as what it is: refused, unreachable, too slow, broken off."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence

import pytest
from aiohappyeyeballs import AddrInfoType

from app.errors import EngineBroke, EngineRefused, EngineTimeout, EngineUnreachable, UpstreamError
from app.upstream.failures import connect_failure
from app.upstream.http1 import Http1Transport
from app.upstream.transport import Target
from tests.upstream.client import ask, limits, whole
from tests.upstream.scripted import Peer, Script, ScriptedServer, always, black_hole, free_port, until

OK = b"HTTP/1.1 200 OK\r\n"
HI = OK + b"Content-Length: 2\r\n\r\nhi"
KEY = b"sk-never-in-a-message"


class Resolved(Http1Transport):
    """Every host name has these addresses."""

    def __init__(self, *addresses: tuple[str, int]) -> None:
        super().__init__()
        self._fixed = addresses

    async def _addresses(self, target: Target) -> Sequence[AddrInfoType]:
        return [
            (socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))
            for host, port in self._fixed
        ]


async def test_refused(transport: Http1Transport) -> None:
    with free_port() as port, pytest.raises(EngineRefused) as caught:
        await ask(transport, f"http://127.0.0.1:{port}")
    assert caught.value.message == f"engine http://127.0.0.1:{port} refused the connection"
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    assert transport.open == 0


async def test_refused_needs_every_address() -> None:
    async with ScriptedServer(always(HI)) as server:
        with free_port() as closed, free_port("::1") as closed6:
            url = f"http://engine.test:{closed}"
            with pytest.raises(EngineRefused):
                await ask(Resolved(("127.0.0.1", closed)), url)
            with pytest.raises(EngineRefused) as caught:
                await ask(Resolved(("::1", closed6), ("127.0.0.1", closed)), url)
            assert isinstance(caught.value.__cause__, OSError)
            # One address is not there at all: no proof that the engine is not.
            with pytest.raises(EngineUnreachable) as unreachable:
                await ask(Resolved(("127.0.0.1", closed), ("255.255.255.255", closed)), url)
            assert not isinstance(unreachable.value, EngineRefused)
            good = Resolved(("::1", closed6), ("127.0.0.1", closed), ("127.0.0.1", server.port))
            assert await whole(await ask(good, url)) == b"hi"
            await good.close()


@pytest.mark.parametrize(
    ("cause", "error", "words"),
    [
        (OSError(errno.EMFILE, "x"), EngineUnreachable, "this worker has no file descriptors left"),
        (OSError(errno.EADDRNOTAVAIL, "x"), EngineUnreachable, "no local address or port"),
        (OSError(errno.ENETUNREACH, "x"), EngineUnreachable, "ENETUNREACH"),
        (OSError("Multiple exceptions: x, y"), EngineUnreachable, "OSError"),
        (OSError(errno.ETIMEDOUT, "x"), EngineTimeout, "the network gave up"),
        (ConnectionResetError(errno.ECONNRESET, "x"), EngineUnreachable, "while it was being made"),
        (OSError(errno.ECONNREFUSED, "Multiple exceptions: x, y"), EngineRefused, "refused the connection"),
    ],
)
def test_causes_have_their_words(cause: OSError, error: type[UpstreamError], words: str) -> None:
    told = connect_failure("http://e:1", cause)
    assert type(told) is error
    assert told.message.startswith("engine http://e:1")
    assert words in told.message


async def test_second_address_does_not_wait_for_the_first_to_time_out() -> None:
    async with ScriptedServer(always(HI)) as server:
        with black_hole() as dark:
            transport = Resolved(("127.0.0.1", dark), ("127.0.0.1", server.port))
            response = await ask(transport, "http://engine.test:1", timeouts=limits(connect=3))
            assert await whole(response) == b"hi"
            await transport.close()


async def test_name_and_ipv6_are_reached(transport: Http1Transport) -> None:
    async with ScriptedServer(always(HI)) as server, ScriptedServer(always(HI), host="::1") as six:
        assert await whole(await ask(transport, f"http://localhost:{server.port}")) == b"hi"
        assert await whole(await ask(transport, f"http://[::1]:{six.port}")) == b"hi"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70 + ".test"])
async def test_unknown_name(transport: Http1Transport, host: str) -> None:
    with pytest.raises(EngineUnreachable, match=f"engine http://{host}:1: its host name can't be resolved") as caught:
        await ask(transport, f"http://{host}:1")
    assert not isinstance(caught.value, EngineRefused)
    assert caught.value.__cause__ is not None


async def test_connect_timeout(transport: Http1Transport) -> None:
    with black_hole() as port:
        with pytest.raises(EngineTimeout) as caught:
            await ask(transport, f"http://127.0.0.1:{port}", timeouts=limits(connect=0.05))
        assert caught.value.stage == "connect"
        assert caught.value.message == f"engine http://127.0.0.1:{port} did not accept a connection within 0.05 s"
        with pytest.raises(EngineTimeout) as caught:
            await ask(transport, f"http://127.0.0.1:{port}", timeouts=limits(connect=9, total=0.05))
        assert caught.value.stage == "total"
        assert transport.open == 0


async def test_timeouts_on_a_real_clock(transport: Http1Transport) -> None:
    async def script(peer: Peer) -> None:
        request = await peer.request()
        if request.body != b"silent":
            await peer.send(OK + b"Content-Length: 9\r\n\r\nabc")
        await peer.gone()

    headers = [(b"authorization", b"Bearer " + KEY)]
    async with ScriptedServer(script) as server:
        with pytest.raises(EngineTimeout) as caught:
            await ask(transport, server.url, body=b"silent", headers=headers, timeouts=limits(first_byte=0.05))
        assert caught.value.stage == "first_byte"
        assert caught.value.message == f"engine {server.url} did not begin its answer within 0.05 s"
        for timeouts, stage in [(limits(idle=0.05), "idle"), (limits(total=0.1), "total")]:
            response = await ask(transport, server.url, headers=headers, timeouts=timeouts)
            assert await response.read() == b"abc"
            with pytest.raises(EngineTimeout) as caught:
                await response.read()
            assert caught.value.stage == stage
            assert server.url in caught.value.message
            assert KEY.decode() not in repr(caught.value)
        await until(lambda: server.done == 3)  # the engine has seen all of them go
        assert transport.open == 0


def breaking(*pieces: bytes, reset: bool) -> Script:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(*pieces)
        if reset:
            peer.reset()

    return script


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("pieces", [(), (b"HTTP/1.1 200",), (OK + b"Content-Length: 2\r\n",)])
async def test_end_before_the_head_breaks(transport: Http1Transport, pieces: tuple[bytes, ...], reset: bool) -> None:
    async with ScriptedServer(breaking(*pieces, reset=reset)) as server:
        with pytest.raises(
            EngineBroke, match=f"engine {server.url} broke off: it closed the connection before it answ"
        ):
            await ask(transport, server.url)
        assert transport.open == 0


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize(
    "wire",
    [
        OK + b"Content-Length: 9\r\n\r\nabc",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",  # a whole chunk, and no last one
        OK + b"Transfer-Encoding: chunked\r\n\r\n9\r\nabc",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n",  # all but the last line end
    ],
)
async def test_end_in_the_body_breaks_after_what_came(transport: Http1Transport, wire: bytes, reset: bool) -> None:
    async with ScriptedServer(breaking(wire, reset=reset)) as server:
        response = await ask(transport, server.url)
        assert await response.read() == b"abc"
        for _ in range(2):
            with pytest.raises(EngineBroke, match="before its answer was complete"):
                await response.read()
        assert transport.open == 0


async def test_reset_is_no_end_of_a_close_delimited_body(transport: Http1Transport) -> None:
    async with ScriptedServer(breaking(OK + b"\r\nabc", reset=True)) as server:
        response = await ask(transport, server.url)
        assert await response.read() == b"abc"
        with pytest.raises(EngineBroke) as caught:
            await response.read()
        assert isinstance(caught.value.__cause__, ConnectionResetError)


async def test_half_closed_engine_may_still_have_answered(transport: Http1Transport) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(HI)
        peer.eof()
        assert await peer.gone() == b""  # and the client closes its half too

    async with ScriptedServer(script) as server:
        assert await whole(await ask(transport, server.url)) == b"hi"
        await until(lambda: server.done == 1)
        assert transport.open == 0


async def test_close_right_after_accept_breaks(transport: Http1Transport) -> None:
    async def script(peer: Peer) -> None:
        peer.reset()

    async with ScriptedServer(script) as server:
        for _ in range(20):  # before or after the request was written, as it happens
            with pytest.raises(EngineBroke):
                await ask(transport, server.url)
        assert transport.open == 0


async def test_words_before_the_request_break(transport: Http1Transport) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(b"220 smtp.example ESMTP\r\n")
        await peer.gone()

    async with ScriptedServer(script) as server:
        with pytest.raises(EngineBroke):
            await ask(transport, server.url)
        assert transport.open == 0


async def test_reading_has_one_reader(transport: Http1Transport) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK + b"Content-Length: 2\r\n\r\n")
        await peer.gone()

    async with ScriptedServer(script) as server:
        response = await ask(transport, server.url)
        first = asyncio.ensure_future(response.read())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError):
            await response.read()
        response.close()
        with pytest.raises(EngineBroke, match="was closed before its end"):
            await first
