"""What the HTTP face needs from the parts behind it, as narrow interfaces.

The real ones are `app.store.registry.Registry`, `app.dispatch.hybrid.Hybrid` and
`app.upstream.management.EngineClient`; tests bring plain fakes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from app.dispatch.answer import Answer, EngineRequest
from app.errors import Headers
from app.nodes import Node, Role

if TYPE_CHECKING:
    from app.store.registry import NodeStatus


WIRE = "evenhand.wire"
"""Where a scope's `extensions` have a `Wire`, if the server offers one."""


class Wire(Protocol):
    """What our own server offers beyond ASGI: the client's connection without tasks and messages in between.

    Nothing of it raises because the client has left: what is written then is dropped.
    """

    def when_gone(self, callback: Callable[[], None] | None) -> None:
        """Call back once when the client leaves before its answer is complete; None: no more."""
        ...

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The one that serves the request."""
        ...

    def whole_body(self) -> bytes | None:
        """The request's body if all of it has come and none was taken; it is taken with this. None: `receive` it."""
        ...

    def gather(self, limit_bytes: int) -> None:
        """From now on `receive` gives the whole body at once, or as soon as more than `limit_bytes` of it have come."""
        ...

    def start(self, status: int, headers: Headers, length: int | None) -> None:
        """As `http.response.start`; the head leaves with the first bytes of the body, or a moment later.

        Args:
            headers: names in lower case, without Transfer-Encoding.
            length: as Content-Length among them says; None: there is none.
        """
        ...

    def write(self, data: bytes, *, more: bool) -> bool:
        """As `http.response.body`. False: the client is behind, `drain` before the next one."""
        ...

    def answer(self, status: int, lines: bytes, body: bytes) -> None:
        """A whole answer at once.

        Args:
            lines: its headers as they are written, each with its line end; Content-Length, which is right, among them.
        """
        ...

    def break_off(self) -> None:
        """The answer has no proper end, and that is meant: its connection is to end with it."""
        ...

    async def drain(self) -> None:
        """Return once the client has taken most of what was written, or has left."""
        ...


class Dispatcher(Protocol):
    """A serving mode: chooses an engine for a request and opens its answer."""

    async def open(self, request: EngineRequest) -> Answer: ...


class LinkKeeper(Protocol):
    """Links between prefill and decode engines; every coroutine may raise StoreUnavailable."""

    async def warm_up(self) -> dict[str, Any]: ...

    async def collect(self) -> dict[str, Any]: ...

    async def table(self) -> dict[str, Any]: ...


class SnapshotView(Protocol):
    """The registry as this worker last read it; never waits."""

    @property
    def nodes(self) -> Mapping[str, Node]: ...

    @property
    def engine_keys(self) -> Mapping[str, str]: ...

    def models(self, *roles: Role) -> list[str]: ...

    def knows(self, model: str) -> bool: ...


class NodeRegistry(Protocol):
    """The shared registry; every coroutine may raise StoreUnavailable."""

    @property
    def snapshot(self) -> SnapshotView: ...

    async def add(
        self,
        url: str,
        *,
        role: Role,
        models: tuple[str, ...],
        speed: float | None,
        key: str | None,
        asked: bool = False,
        static: bool = False,
        bootstrap_port: int | None = None,
        host_header: str = "",
    ) -> bool: ...

    async def remove(self, url: str) -> bool: ...

    async def drain(self, url: str, timeout_s: float) -> bool: ...

    async def status(self) -> dict[str, NodeStatus]: ...


class Engines(Protocol):
    """Calls to an engine's own management routes; all raise UpstreamError."""

    async def models(self, url: str, key: str | None, *, host_header: str | None = None) -> tuple[str, ...]: ...

    async def terminate(self, url: str, key: str | None) -> None: ...

    async def profile(self, url: str, path: str, key: str | None, body: bytes) -> tuple[int, str]: ...
