"""The end of an answer that is still on its way out when the connection has to be closed."""

from __future__ import annotations

import asyncio

import pytest

from tests.http.fakes import until
from tests.http.in_process import ClientSide, Face
from tests.support.loop import LoopThread

LIMIT_S = 0.2


@pytest.mark.parametrize("stuck_bytes", [0, 100])
def test_a_client_that_does_not_read_the_end_is_given_up(engine_loop: LoopThread, stuck_bytes: int) -> None:
    # All has been written and the engine is through: no request waits any more, only a closing socket that, with
    # bytes in its buffer, would wait for its client for ever.
    face = Face("http://127.0.0.1:9", engine_loop, client_timeout_s=LIMIT_S)

    async def ask() -> ClientSide:
        transport = ClientSide(stuck_bytes)
        protocol = face.connect(transport)
        protocol.data_received(b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        await until(lambda: transport.closing)
        assert not transport.aborted
        if stuck_bytes:
            await until(lambda: transport.aborted)
        else:
            await asyncio.sleep(2 * LIMIT_S)  # nothing may happen
            assert not transport.aborted
        protocol.connection_lost(None)
        return transport

    assert engine_loop.run(ask()).written.startswith(b"HTTP/1.1 200 ")
    face.close()
