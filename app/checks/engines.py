"""Each node asked for its health from this host, as the prober asks it.

Owns how many at a time and for how long. It must not know what is made of the answers.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

from app.checks.nodes import ANSWERS
from app.errors import UpstreamError
from app.nodes import about_itself
from app.upstream.management import EngineClient, Verdict

ASKED_AT_ONCE = 32
ASKING_S = 30.0
"""For all nodes together; whoever was not asked by then is said not to have been."""


async def ask(
    keys: Mapping[str, str | None],
    *,
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
    host_headers: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """What is wrong with each node as this host sees it, ANSWERS where nothing is.

    Args:
        keys: url -> its API key.
        host_headers: url -> under which name it is asked, where that is not its URL's.
    """
    named = host_headers or {}
    engines = EngineClient(probe_timeout_s=timeout_s, tls=tls, host_header=lambda url: named.get(url, ""))
    turns = asyncio.Semaphore(ASKED_AT_ONCE)
    found = dict.fromkeys(keys, f"not asked within {ASKING_S:g} s")

    async def one(url: str) -> None:
        async with turns:
            try:
                health = await engines.health(url, keys[url])
                found[url] = ANSWERS if health.verdict is Verdict.OK else f"it says {health.word}"
            except UpstreamError as e:
                found[url] = about_itself(e.message, url)

    try:
        async with asyncio.timeout(ASKING_S):
            await asyncio.gather(*map(one, keys))
    except TimeoutError:
        pass
    finally:
        await engines.close()
    return found
