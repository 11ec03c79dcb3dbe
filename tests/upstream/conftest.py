"""Async tests here run twice: on asyncio's own loop and on uvloop, which the workers use.

A module whose subject is not a loop's behaviour names the ones it wants in `LOOPS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import pytest_asyncio
import uvloop

from app.upstream.http1 import Http1Transport
from tests.upstream.scripted import turns, until


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Function
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    factories = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {name: factories[name] for name in getattr(item.module, "LOOPS", factories)}


@pytest_asyncio.fixture
async def transport() -> AsyncIterator[Http1Transport]:
    transport = Http1Transport()
    yield transport
    await turns()
    assert transport.in_use == 0, f"a connection is still in use: {transport!r}"
    await transport.close()
    await until(lambda: transport.open == 0)
