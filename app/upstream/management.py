"""`EngineClient`: the few questions that are asked of an engine beside its work.

Which models it has, how it feels, and to please end itself. Rare and small, so it is built on aiohttp, with a
new connection for each: a probe that rides on an old connection does not show that a new one is accepted.
It must not know the registry, or what is made of an answer.

Sources: `serve/core/health.py` and `serve/openai/endpoints/` of LMDeploy 0.18; vLLM and SGLang answer
`/health` with an empty 200 or 503.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

import aiohttp
import msgspec
from yarl import URL

from app.errors import EngineAnswered, EngineBroke, EngineTimeout, EngineUnreachable, UpstreamError
from app.upstream.failures import connect_failure
from app.upstream.transport import server_name

_HEALTH_LIMIT_BYTES = 64 * 1024
_MODELS_LIMIT_BYTES = 4 * 1024 * 1024  # an engine with thousands of adapters lists some hundred bytes for each
_JSON_LIMIT_BYTES = 4 * 1024 * 1024  # transfer endpoints of an engine with many ranks
_PROFILE_TIMEOUT_S = 1800.0  # vLLM writes its traces before it answers: 10 minutes after 100 requests, say its docs
_WORD_LIMIT = 40  # letters of an engine's own word that are worth keeping
_ASLEEP = frozenset({"sleeping", "initializing"})  # LMDeploy: the first comes with 200, the second with 503
_SICK = frozenset({"unhealthy"})


class Verdict(StrEnum):
    OK = "ok"
    ASLEEP = "asleep"  # alive, not to be routed to
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Health:
    """What an engine that answered said of itself. `word` is its own, or "HTTP <status>" where it had none."""

    verdict: Verdict
    word: str


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


class _HealthBody(msgspec.Struct):
    status: str


class EngineClient:
    """Belongs to the event loop of its first call.

    Args:
        probe_timeout_s: for `health` as a whole, its fall-back included.
        timeout_s: for `models` and `terminate`.
        profile_timeout_s: for `profile`.
        tls: for https engines; None verifies against the system's certificates.
        host_header: the one of an engine's URL; empty: what stands in the URL.
    """

    def __init__(
        self,
        *,
        probe_timeout_s: float = 3.0,
        timeout_s: float = 10.0,
        profile_timeout_s: float = _PROFILE_TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
        host_header: Callable[[str], str] = lambda url: "",
    ) -> None:
        self._probe_timeout_s = probe_timeout_s
        self._timeout_s = timeout_s
        self._profile_timeout_s = profile_timeout_s
        self._tls = tls
        self._host_header = host_header
        self._session: aiohttp.ClientSession | None = None

    async def models(self, url: str, key: str | None, *, host_header: str | None = None) -> tuple[str, ...]:
        """The ids of the engine's `/v1/models`, each once, in its order; () where it has none yet.

        Args:
            host_header: of an engine that is not known yet.

        Raises:
            UpstreamError: it can't be reached (EngineUnreachable, EngineTimeout), or what it answers is no list.
        """
        status, body = await self._ask(
            "GET", url, "/v1/models", key, self._timeout_s, _MODELS_LIMIT_BYTES, named=host_header
        )
        if status != 200:
            raise EngineAnswered(f"engine {url} answered {status} to /v1/models", answered=status)
        try:
            models = msgspec.json.decode(body, type=_ModelList).data
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise EngineBroke(f"engine {url}: its /v1/models is no list of models") from e
        return tuple(dict.fromkeys(model.id for model in models if model.id))

    async def health(self, url: str, key: str | None) -> Health:
        """How the engine says it is.

        An engine without `/health` is well if it lists its models.

        Raises:
            EngineRefused: nobody listens. EngineTimeout: no answer within the probe's time.
            EngineUnreachable, EngineBroke: no connection, or no whole answer.
        """
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                status, body = await self._get(url, "/health", key, 0, _HEALTH_LIMIT_BYTES)
                if status == 404:
                    status, _ = await self._get(url, "/v1/models", key, 0, _MODELS_LIMIT_BYTES)
                    body = b""
        except TimeoutError as e:
            raise _too_slow(url, self._probe_timeout_s) from e
        return judge(status, body)

    async def terminate(self, url: str, key: str | None) -> None:
        """Ask the engine to end itself.

        Raises:
            UpstreamError: it can't be reached, or it won't.
        """
        status, _ = await self._get(url, "/terminate", key, self._timeout_s, _HEALTH_LIMIT_BYTES)
        if not 200 <= status < 300:
            hint = " (LMDeploy allows it with --allow-terminate-by-client only)" if status == 400 else ""
            raise UpstreamError(f"engine {url} answered {status} to /terminate{hint}")

    async def profile(self, url: str, path: str, key: str | None, body: bytes) -> tuple[int, str]:
        """Status and text of the engine's answer to /start_profile or /stop_profile.

        Args:
            body: JSON with the engine's own options, or empty.

        Raises:
            UpstreamError: it can't be reached.
        """
        status, answer = await self._ask("POST", url, path, key, self._profile_timeout_s, _HEALTH_LIMIT_BYTES, body)
        return status, answer.decode(errors="replace")

    async def ask_json(
        self, method: str, url: str, path: str, key: str | None, payload: object = None, *, timeout_s: float
    ) -> object:
        """The JSON value that the engine answers with; `payload` is sent as JSON where it is given.

        Raises:
            UpstreamError: it can't be reached, answers with another status than 200, or with no JSON.
        """
        body = b"" if payload is None else msgspec.json.encode(payload)
        status, answer = await self._ask(method, url, path, key, timeout_s, _JSON_LIMIT_BYTES, body)
        if status != 200:
            words = answer[:200].decode(errors="replace")
            raise EngineAnswered(f"engine {url} answered {status} to {path}: {words}", answered=status)
        try:
            return msgspec.json.decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise EngineBroke(f"engine {url}: its answer to {path} is no JSON") from e

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _get(self, url: str, path: str, key: str | None, timeout_s: float, limit: int) -> tuple[int, bytes]:
        return await self._ask("GET", url, path, key, timeout_s, limit)

    async def _ask(
        self,
        method: str,
        url: str,
        path: str,
        key: str | None,
        timeout_s: float,
        limit: int,
        content: bytes = b"",
        named: str | None = None,
    ) -> tuple[int, bytes]:
        """Status and body of one request; at most `limit` bytes of a body are taken in.

        Raises:
            EngineBroke: also where the body is longer than `limit`.
        """
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        if content:
            headers["Content-Type"] = "application/json"
        named = self._host_header(url) if named is None else named
        if named:
            headers["Host"] = named
        async with (
            _mapped(url, timeout_s),
            self._opened().request(
                method,
                URL(url + path, encoded=True),
                headers=headers,
                data=content or None,
                server_hostname=server_name(named) or None,
                allow_redirects=False,  # the key is for this engine and no other address
                timeout=aiohttp.ClientTimeout(total=timeout_s or None),
            ) as answer,
        ):
            body = bytearray()
            async for piece in answer.content.iter_any():
                body += piece
                if len(body) > limit:
                    raise EngineBroke(f"engine {url}: its answer to {path} is longer than {limit} bytes")
            return answer.status, bytes(body)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, force_close=True, ssl=self._tls if self._tls is not None else True
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "evenhand"},
            )
        return self._session


def judge(status: int, body: bytes) -> Health:
    """What an answer to `/health` means.

    LMDeploy's own words count whatever the status: sleeping comes with 200, initializing with 503.
    """
    word = _word(body)
    if word in _ASLEEP:
        return Health(Verdict.ASLEEP, word)
    if 200 <= status < 300 and word not in _SICK:
        return Health(Verdict.OK, word or f"HTTP {status}")
    return Health(Verdict.BAD, word or f"HTTP {status}")


def _word(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_HealthBody).status.strip().lower()[:_WORD_LIMIT]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""  # most engines answer with an empty body, some with plain text


@asynccontextmanager
async def _mapped(url: str, timeout_s: float) -> AsyncIterator[None]:
    """aiohttp's exceptions as ours."""
    try:
        yield
    except TimeoutError as e:
        raise _too_slow(url, timeout_s) from e
    except aiohttp.ClientConnectorError as e:  # DNS and TLS errors are of this class too
        raise connect_failure(url, e.os_error) from e
    except aiohttp.ClientError as e:
        raise EngineBroke(f"engine {url} broke off: {type(e).__name__}") from e
    except ValueError:  # a header that can't be written; its message might show the key, so it is no cause to keep
        raise EngineUnreachable(f"engine {url}: the key for it can't be sent in a header") from None


def _too_slow(url: str, timeout_s: float) -> EngineTimeout:
    return EngineTimeout(f"engine {url} did not answer within {timeout_s:g} s", stage="total")
