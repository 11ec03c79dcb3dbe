"""Node management: LMDeploy's `/nodes/*` requests and answers, and what they lack.

Owns what these routes take and say. LMDeploy engines register here by themselves, before they listen
and without looking at the answer's body; scripts written for LMDeploy's proxy read its literal
success strings. Failures are told with a status of their own, where LMDeploy says 200.
It must not know Redis.

Source: lmdeploy/serve/proxy/proxy.py (0.18.0).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.dispatch.topology import Topology
from app.errors import (
    BadRequest,
    EngineAnswered,
    EngineTimeout,
    EvenhandError,
    NoNodeAvailable,
    NotFound,
    UpstreamError,
)
from app.http.answers import json_object
from app.http.ports import Engines, NodeRegistry
from app.nodes import (
    Node,
    Role,
    State,
    normalise_url,
    parse_host_header,
    parse_key,
    parse_models,
    parse_port,
    parse_role,
    parse_speed,
)

CALLS_AT_ONCE = 16
"""Bound on engines that are being terminated, or profiled, at the same time."""
MAX_DRAIN_S = 7 * 86400

T = TypeVar("T")

_YES = frozenset(("1", "true", "yes", "on"))
_NO = frozenset(("0", "false", "no", "off"))


@dataclass(frozen=True, slots=True)
class Registration:
    """What a `/nodes/add` says. `models` is None where the engine has to be asked."""

    url: str
    role: Role
    models: tuple[str, ...] | None
    speed: float | None
    key: str | None
    bootstrap_port: int | None
    host_header: str


def parse_registration(body: dict[str, Any], known: Node | None) -> Registration:
    """Read a registration; what it does not give, of role, speed, port and host header, stays as it is `known`.

    So an engine that registers again after a restart does not wipe out the speed that its operator
    gave, and a change of speed alone does not turn a prefill node into a hybrid one.

    Raises:
        BadRequest: naming the field.
    """
    url = normalise_url(body.get("url"))
    status = body.get("status")
    if status is None:
        status = {}
    if not isinstance(status, dict):
        raise BadRequest("status must be an object", param="status")
    role, models, speed = status.get("role"), status.get("models"), status.get("speed")
    given_models = parse_models(models, field="status.models")
    given_speed = parse_speed(speed, field="status.speed")
    given_port = parse_port(status.get("bootstrap_port"), field="status.bootstrap_port")
    given_host = parse_host_header(status.get("host_header"), field="status.host_header")
    return Registration(
        url=url,
        role=parse_role(role, field="status.role") if role is not None else known.role if known else Role.Hybrid,
        models=given_models or None,
        speed=given_speed if given_speed is not None else known.speed if known else None,
        key=parse_key(body.get("key")),
        bootstrap_port=given_port if given_port is not None or known is None else known.bootstrap_port,
        host_header=given_host if status.get("host_header") is not None or known is None else known.host_header,
    )


def parse_flag(value: object, *, field: str) -> bool:
    word = str(value).lower() if isinstance(value, (str, bool, int)) else ""
    if word not in _YES | _NO:
        raise BadRequest(f"{field} must be true or false", param=field)
    return word in _YES


def parse_timeout_s(value: object, *, field: str) -> float:
    try:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            timeout_s = float(value)
            if 0 <= timeout_s <= MAX_DRAIN_S:  # not for NaN either
                return timeout_s
    except (ValueError, OverflowError):
        pass
    raise BadRequest(f"{field} must be a number of seconds from 0 to {MAX_DRAIN_S}", param=field)


def plain_number(value: float | None) -> float | int | None:
    """A speed as LMDeploy's clients expect it: an integer where it is one."""
    return int(value) if value is not None and value.is_integer() else value


class Admin:
    """The endpoints; who may call them is decided before (`app.http.auth`).

    Args:
        engine_key: sent to engines that have no key of their own.
        drain_timeout_s: of a drain that does not give one.
    """

    def __init__(
        self,
        *,
        registry: NodeRegistry,
        engines: Engines,
        engine_key: str | None,
        drain_timeout_s: float,
        topology: Topology,
    ) -> None:
        self._topology = topology
        self._registry = registry
        self._engines = engines
        self._engine_key = engine_key
        self._drain_timeout_s = drain_timeout_s

    async def status(self, request: Request) -> Response:
        """GET /nodes/status: LMDeploy's five fields first, ours beside them."""
        show_gone = parse_flag(request.query_params.get("all", "0"), field="all")
        found = await self._registry.status()
        return JSONResponse(
            {
                url: {
                    "role": int(entry.node.role),
                    "models": list(entry.node.models),
                    "unfinished": entry.unfinished,
                    "latency": entry.latency_s,
                    "speed": plain_number(entry.node.speed),
                    "state": entry.node.state.value,
                    "reason": entry.node.reason,
                    "role_name": entry.node.role.name,
                    "static": entry.node.static,
                    "bootstrap_port": entry.node.bootstrap_port,
                    "host_header": entry.node.host_header or None,
                    "source": entry.node.source or None,
                    "stages": entry.stages,
                    "registered_at_ms": entry.node.registered_at_ms,
                    "state_since_ms": entry.node.state_since_ms,
                    "drain_until_ms": entry.node.drain_until_ms or None,
                }
                for url, entry in found.items()
                if show_gone or entry.node.state != State.GONE
            }
        )

    async def add(self, request: Request) -> Response:
        """POST /nodes/add. A node that tells its models is never called: it does not listen yet."""
        body = await json_object(request)
        known = self._registry.snapshot.nodes.get(normalise_url(body.get("url")))
        wanted = parse_registration(body, known)
        self._topology.check(wanted.role)
        models, asked = wanted.models, False
        if models is None and body.get("status") is None and known is not None:
            models, asked = known.models, known.asked  # nothing new but perhaps a key; LMDeploy does not ask either
        if models is None:
            models, asked = await self._ask_models(wanted), True
        await self._registry.add(
            wanted.url,
            role=wanted.role,
            models=models,
            speed=wanted.speed,
            key=wanted.key,
            asked=asked,
            bootstrap_port=wanted.bootstrap_port,
            host_header=wanted.host_header,
        )
        return JSONResponse("Added successfully")

    async def remove(self, request: Request) -> Response:
        """POST /nodes/remove, at once or after a drain. An unknown node is no error, as at LMDeploy."""
        given = {**await json_object(request), **request.query_params}
        field = "node_url" if "node_url" in given else "url"
        url = normalise_url(given.get(field), field=field)
        drain = parse_flag(given.get("drain", False), field="drain")
        timeout_s = parse_timeout_s(given.get("timeout_s", self._drain_timeout_s), field="timeout_s")
        if drain and await self._registry.drain(url, timeout_s):
            return JSONResponse("Draining started")
        if not drain:
            await self._registry.remove(url)
        return JSONResponse("Deleted successfully")

    async def terminate(self, request: Request) -> Response:
        """POST /nodes/terminate: the engine ends itself, then it is removed.

        Only then: LMDeploy's proxy forgets an engine that refused, which goes on running unused.
        """
        url = normalise_url((await json_object(request)).get("url"))
        if url not in self._registry.snapshot.nodes:
            raise NotFound(f"Failed to terminate node {url}: it is not registered", param="url")
        await self._terminate(url)
        return JSONResponse("Terminated successfully")

    async def terminate_all(self, request: Request) -> Response:
        """GET /nodes/terminate_all: all engines that are not gone, side by side."""

        async def one(url: str) -> str | None:
            try:
                await self._terminate(url)
            except EvenhandError as e:
                return e.message
            return None

        failures = [failure for failure in (await self._of_all(one)).values() if failure]
        if failures:
            raise UpstreamError("Failed to terminate all nodes. " + "; ".join(failures))
        return JSONResponse("All nodes terminated successfully")

    async def profile(self, request: Request) -> Response:
        """POST /start_profile, /stop_profile: to every node of every role, with each one's answer.

        Engines have options of their own there (SGLang's `num_steps`), so a body goes along.
        """
        path = request.url.path
        options = await json_object(request)
        body = json.dumps(options).encode() if options else b""
        nodes = self._registry.snapshot.nodes  # as they are now: one may be removed while others are asked

        async def one(url: str) -> dict[str, Any]:
            role = nodes[url].role.name
            try:
                status, text = await self._engines.profile(url, path, self._key_of(url), body)
            except UpstreamError as e:
                return {"role": role, "status": None, "answer": e.message}
            return {"role": role, "status": status, "answer": text}

        answers = await self._of_all(one)
        if not answers:
            raise NoNodeAvailable("no node is registered")
        if not any(answer["status"] is not None and answer["status"] < 400 for answer in answers.values()):
            raise UpstreamError(f"No node took {path}: " + "; ".join(f"{u}: {a['answer']}" for u, a in answers.items()))
        return JSONResponse(answers)

    async def _of_all(self, ask: Callable[[str], Awaitable[T]]) -> dict[str, T]:
        """The answers of all nodes that are not gone, asked side by side."""
        slots = asyncio.Semaphore(CALLS_AT_ONCE)

        async def one(url: str) -> T:
            async with slots:
                return await ask(url)

        urls = [url for url, node in self._registry.snapshot.nodes.items() if node.state != State.GONE]
        return dict(zip(urls, await asyncio.gather(*map(one, urls)), strict=True))

    async def _ask_models(self, wanted: Registration) -> tuple[str, ...]:
        key = wanted.key or self._key_of(wanted.url)
        try:
            return await self._engines.models(wanted.url, key, host_header=wanted.host_header)
        except UpstreamError as e:
            # One status and code for every way to fail, as LMDeploy has. Its words stand behind what happened, as
            # the code's name: the engine may well have answered at once.
            text = f"{e.message}{_hint(wanted.url, e)} (10402: Failed to get response after a period of time)"
            raise EngineTimeout(text, stage="models") from e

    async def _terminate(self, url: str) -> None:
        try:
            await self._engines.terminate(url, self._key_of(url))
        except UpstreamError as e:
            e.message = f"Failed to terminate node {url}: {e.message}"
            raise
        await self._registry.remove(url)

    def _key_of(self, url: str) -> str | None:
        return self._registry.snapshot.engine_keys.get(url) or self._engine_key


def _hint(url: str, failure: UpstreamError) -> str:
    """What is mostly wrong where an engine does not list its models."""
    answered = failure.answered if isinstance(failure, EngineAnswered) else None
    if answered in (401, 403):
        return "; its API key is given as `key` (`evenhand nodes add --key`)"
    path = urlsplit(url).path
    if answered == 404 and path:
        return f"; is {path} at the end of its address needless?"
    return "; is it an OpenAI-compatible engine?" if answered == 404 else ""
