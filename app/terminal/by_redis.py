"""A deployment straight from its Redis, without any worker: also where none runs.

Owns the bridge from the asynchronous view to a command that waits. It must not know HTTP. Touches no key itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from app.errors import EvenhandError, ModelNotFound
from app.redis_url import RedisPlace
from app.store.view import View, explain_over_redis, over_redis, view_over_redis
from app.terminal.failures import CommandError, UnknownModel
from app.terminal.listed import listed
from app.terminal.words import printable

WATCH_EVERY_S = 1.0


class ByRedis:
    """One deployment. A password never enters its name or repr."""

    def __init__(self, redis_url: str, namespace: str) -> None:
        self.name = place_name(RedisPlace.parse(redis_url), namespace)
        self._redis_url = redis_url
        self._namespace = namespace

    def __repr__(self) -> str:
        return f"<ByRedis {self.name}>"

    def state(self) -> dict[str, Any]:
        with self._told():
            return asyncio.run(view_over_redis(self._redis_url, self._namespace))

    def explain(self, model: str) -> dict[str, Any]:
        with self._told():
            return asyncio.run(explain_over_redis(self._redis_url, self._namespace, model))

    def nodes(self, *, gone: bool) -> dict[str, dict[str, Any]]:
        """What `/nodes/status` says of them, as far as the view has it."""
        return listed(self.state(), gone=gone)

    def watch(self, interval_s: float) -> Iterator[tuple[str, Any]]:
        # One loop and one connection for all looks; between two of them nothing has to run.
        with asyncio.Runner() as runner, self._told():
            context = over_redis(self._redis_url, self._namespace)
            view = runner.run(context.__aenter__())
            try:
                seen = ""
                while True:
                    runner.run(view.watch())
                    yield "state", runner.run(view.state())
                    new = runner.run(view.decisions(seen))
                    if new:
                        seen = new[-1]["id"]
                        yield "decisions", new
                    runner.run(_pause(view, interval_s))
            finally:
                runner.run(context.__aexit__(None, None, None))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except ModelNotFound as e:
            raise UnknownModel(printable(e.message)) from e
        except EvenhandError as e:
            raise CommandError(f"{self.name}: {printable(e.message)}") from e


async def _pause(view: View, seconds: float) -> None:
    """Workers tell of decisions for a few seconds after somebody said that he looks: he says it all along."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while (left := until - loop.time()) > WATCH_EVERY_S:
        await asyncio.sleep(WATCH_EVERY_S)
        await view.watch()
    await asyncio.sleep(left)


def place_name(place: RedisPlace, namespace: str) -> str:
    """Where Redis is, in words and without a password."""
    where = ",".join(address.name for address in place.asked) or place.redis.name
    kind = f"{place.kind.value} " if place.asked else ""
    master = f"/{place.master}" if place.master else ""
    return f"Redis at {kind}{where}{master}, namespace {namespace}"
