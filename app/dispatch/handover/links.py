"""Making the links between LMDeploy's prefill and decode engines: once a pair for the whole deployment.

Owns the order of the calls and how often they are tried. Who makes a link is decided in Redis (`LinkTable`);
a worker that finds another one at it looks every few milliseconds what becomes of it. While Redis is away a
worker links for itself: both ends take that twice. It must not know what the link is wanted for.

Source: lmdeploy/pytorch/disagg/conn/proxy_conn.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from app.dispatch.handover.protocol import LinkFailed
from app.dispatch.seldom import Seldom
from app.errors import EngineAnswered, StoreUnavailable, UpstreamError
from app.store.handovers import Handovers
from app.store.links import Claim, Link, LinkTable, ends_of, lives_of, pair_of
from app.store.registry import Registry
from app.store.scripts import Code
from app.upstream.distserve import DistServeClient, Json

log = logging.getLogger("evenhand.dispatch")

T = TypeVar("T")

LOOK_EVERY_S = 0.02
"""At a link that another worker makes: one look for all requests of this worker."""
PAUSES_S = (0.1, 2.0)
"""First and longest pause between two tries."""
HOLD_OFF_S = (0.2, 30.0)
"""After a failure nobody tries for so long, so that all who waited for it are told its reason; four times as
long after each further one, so that a node that can't be linked does not cost every request all tries."""
DOUBT_EVERY_S = 1.0
"""Of one pair, however many migrations fail."""
DOUBT_WITHIN_S = 10.0
LAST_WORD_S = 0.05
"""Before the end of the time for a link, so that a call that hangs is named and not only the time."""
LINKING_AT_ONCE = 64
"""Links that one worker makes at the same time."""
OWN_KEYS = 4096
"""Keys of engines that are kept, removed ones among them."""


@dataclass(frozen=True, slots=True)
class LinkRules:
    """From settings. `timeout_s`: from the first request for a link until it fails, all tries included."""

    timeout_s: float
    tries: int


class Links:
    """One per worker."""

    def __init__(
        self,
        *,
        table: LinkTable,
        registry: Registry,
        engines: DistServeClient,
        figures: Handovers,
        rules: LinkRules,
        engine_key: str | None,
    ) -> None:
        self._table = table
        self._registry = registry
        self._engines = engines
        self._figures = figures
        self._rules = rules
        self._engine_key = engine_key
        self._made: dict[str, str] = {}  # pair -> lives
        self._unlike: defaultdict[str, set[str]] = defaultdict(set)  # url -> those that it could not be linked to
        self._making: dict[str, asyncio.Task[None]] = {}
        self._own_keys: dict[str, str] = {}
        self._doubted: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(LINKING_AT_ONCE)
        self._failing = Seldom(log)

    def __repr__(self) -> str:
        return f"<Links made={len(self._made)} making={len(self._making)}>"

    async def ensure(self, prefill: str, decode: str) -> None:
        """Return once the two are linked in their present lives. Raises LinkFailed."""
        pair = pair_of(prefill, decode)
        while not self.made(prefill, decode):  # again where it was made for lives that are over by now
            task = self._making.get(pair)
            if task is None:
                task = self._making[pair] = asyncio.create_task(self._make(prefill, decode), name="link")
                task.add_done_callback(lambda done: self._finished(pair, done))
            # Shielded: others wait for the same link, and half a link is worse than one that nobody uses.
            await asyncio.shield(task)

    def made(self, prefill: str, decode: str) -> bool:
        """Whether this worker knows that the two are linked."""
        return self._made.get(pair_of(prefill, decode)) == self.lives_of(prefill, decode)

    def _note(self, pair: str, lives: str) -> None:
        nodes = self._registry.snapshot.nodes
        for known in (self._made, self._table.stands):
            for gone in [made for made in known if not all(url in nodes for url in ends_of(made))]:
                del known[gone]
        self._made[pair] = lives

    def lives_of(self, prefill: str, decode: str) -> str:
        return lives_of(self._registry.snapshot.nodes, prefill, decode)

    def _odd_one(self, prefill: str, decode: str) -> str:
        """Which of two engines that don't match is to blame: the one that matches with fewer; prefill where that
        can't be told."""
        for gone in [url for url in self._unlike if url not in self._registry.snapshot.nodes]:
            del self._unlike[gone]
        self._unlike[prefill].add(decode)
        self._unlike[decode].add(prefill)
        return max((prefill, decode), key=lambda url: len(self._unlike[url]))

    async def undo(self, prefill: str, decode: str, claim: str) -> None:
        """Let both engines drop their link, as long as that is this worker's `claim`. Raises StoreUnavailable."""
        for url, other in ((prefill, decode), (decode, prefill)):
            if not await self._table.holds(pair_of(prefill, decode), claim):
                return
            try:
                await self._engines.p2p_drop_connect(url, other, self.key_of(url))
            except UpstreamError as e:
                log.info("%s did not drop its link to %s: %s", url, other, e.message)

    def doubt(self, prefill: str, decode: str) -> None:
        """A migration over the link failed: see, in the background, whether the engines are still the same."""
        pair = pair_of(prefill, decode)
        if pair not in self._doubted:
            self._doubted[pair] = asyncio.create_task(self._look_at(prefill, decode), name="link doubt")
            self._doubted[pair].add_done_callback(lambda _: self._doubted.pop(pair, None))

    async def _look_at(self, prefill: str, decode: str) -> None:
        """Give a new life to engines that answer with another identity than when they were linked."""
        with contextlib.suppress(StoreUnavailable, UpstreamError):
            link = await self._table.one(pair_of(prefill, decode))
            if link.state != "connected" or link.lives != self.lives_of(prefill, decode):
                return
            deadline_s = asyncio.get_running_loop().time() + DOUBT_WITHIN_S
            now = identity_of(*await _Try(self._engines, self.key_of, prefill, decode, deadline_s).ask()).split("|")
            for url, before, after in zip((prefill, decode), link.identity.split("|"), now, strict=True):
                if before != after:
                    log.warning("%s is another process than the one that was linked: its links are void", url)
                    await self._registry.renew_life(url)
        await asyncio.sleep(DOUBT_EVERY_S)

    async def close(self) -> None:
        tasks = [*self._making.values(), *self._doubted.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def key_of(self, url: str) -> str | None:
        """The API key of an engine, that of a removed one too: its links are still to be undone."""
        key = self._registry.snapshot.engine_keys.get(url)
        if key is not None:
            self._own_keys[url] = key
            if len(self._own_keys) > OWN_KEYS:  # the first is the one that was noted first
                del self._own_keys[next(iter(self._own_keys))]
        return key or self._own_keys.get(url) or self._engine_key

    def _finished(self, pair: str, task: asyncio.Task[None]) -> None:
        self._making.pop(pair, None)
        if not task.cancelled():
            task.exception()  # whoever waits has it; nobody may wait any more

    async def _make(self, prefill: str, decode: str) -> None:
        """Link, or wait for the worker that does."""
        deadline_s = time.monotonic() + self._rules.timeout_s
        while True:
            for url in (prefill, decode):
                if url not in self._registry.snapshot.nodes:
                    raise LinkFailed(f"{url} was taken out before it was linked", url=url)
            pair, lives = pair_of(prefill, decode), self.lives_of(prefill, decode)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise LinkFailed(
                    f"no link between {prefill} and {decode} within {self._rules.timeout_s:g} s", url=prefill
                )
            try:
                claim = await self._table.claim(pair, lives, self._registry.snapshot.version, wait_s=left_s)
                if claim.code == Code.STALE:
                    await self._registry.refresh()
            except StoreUnavailable:
                with contextlib.suppress(_Outdated):
                    await self._link(prefill, decode, lives, left_s, None)
                    self._note(pair, lives)
                    return
                continue
            if claim.code == Code.DONE:
                if await self._link_and_settle(prefill, decode, claim, left_s):
                    self._note(pair, lives)
                    return
                continue
            if claim.code == Code.UNCHANGED:
                self._note(pair, lives)
                return
            if claim.code == Code.REFUSED:
                raise LinkFailed(claim.link.error, url=claim.link.blame or prefill)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _link_and_settle(self, prefill: str, decode: str, claim: Claim, left_s: float) -> bool:
        """False: an engine got another life meanwhile, and the claim is given up; or it is another worker's by now."""
        begun_s, now_ms = time.monotonic(), claim.link.since_ms
        try:
            identity = await self._link(prefill, decode, claim.link.lives, left_s, claim.text)
        except _Outdated:
            with contextlib.suppress(StoreUnavailable):
                await self._table.drop(pair_of(prefill, decode), claim.text)
            return False
        except BaseException as e:
            why = e.message if isinstance(e, LinkFailed) else "the worker that made it stopped"
            blame = e.url if isinstance(e, LinkFailed) else ""
            failures = claim.link.failures + isinstance(e, LinkFailed)
            first_s, longest_s = HOLD_OFF_S
            hold_off_s = min(first_s * 4 ** min(failures - 1, 9), longest_s) if failures else 0.0
            until_ms = now_ms + round((time.monotonic() - begun_s + hold_off_s) * 1000)
            await self._settle(
                prefill, decode, claim, "failed", until_ms=until_ms, error=why, blame=blame, failures=failures
            )
            self._figures.count("links_failed")
            if isinstance(e, LinkFailed):
                self._failing.warn(e.url, f"no link between {prefill} and {decode}: {e.message}")
            raise
        took_s = time.monotonic() - begun_s
        if not await self._settle(prefill, decode, claim, "connected", took_ms=round(took_s * 1000), identity=identity):
            return False
        self._figures.count("links_made")
        self._figures.took(decode, "link", took_s)
        log.info("linked %s and %s in %.3f s", prefill, decode, took_s)
        return True

    async def _settle(self, prefill: str, decode: str, claim: Claim, state: str, **more: int | str) -> bool:
        known = claim.link
        link = Link(state, known.lives, known.version, since_ms=known.since_ms, owner=known.owner)
        for name, value in more.items():
            setattr(link, name, value)
        try:
            return await self._table.settle(pair_of(prefill, decode), claim.text, link)
        except StoreUnavailable:  # the others see the claim run out, and link once more
            return True

    async def _link(self, prefill: str, decode: str, lives: str, left_s: float, claim: str | None) -> str:
        """All tries; what tells the two engines from others. Raises LinkFailed, _Outdated.

        `claim`: looked at before each step, since a worker that was stopped for long may have lost it.
        """
        pair = pair_of(prefill, decode)

        async def check() -> None:
            with contextlib.suppress(StoreUnavailable):
                if claim is not None and not await self._table.holds(pair, claim):
                    raise _Outdated

        deadline_s = asyncio.get_running_loop().time() + left_s
        pause_s, error = PAUSES_S[0], LinkFailed("too many links are being made", url=prefill)
        try:
            async with asyncio.timeout_at(deadline_s), self._slots:
                for left in reversed(range(self._rules.tries)):
                    if self.lives_of(prefill, decode) != lives:
                        raise _Outdated
                    try:
                        return await _Try(self._engines, self.key_of, prefill, decode, deadline_s).make(check)
                    except _Unlike as e:
                        raise LinkFailed(str(e), url=self._odd_one(prefill, decode)) from e
                    except LinkFailed as e:
                        if isinstance(e.__cause__, EngineAnswered) and e.__cause__.lacking:
                            raise
                        error = e
                    if left:
                        await asyncio.sleep(pause_s)
                        pause_s = min(2 * pause_s, PAUSES_S[1])
        except TimeoutError:
            pass
        raise error


class _Try:
    """One run through all calls that link two engines."""

    def __init__(
        self,
        engines: DistServeClient,
        key_of: Callable[[str], str | None],
        prefill: str,
        decode: str,
        deadline_s: float,
    ) -> None:
        self._engines = engines
        self._key_of = key_of
        self._prefill = prefill
        self._decode = decode
        self._deadline_s = deadline_s

    async def make(self, check: Callable[[], Awaitable[None]]) -> str:
        """What tells the two engines from others. Raises LinkFailed, _Unlike, and what `check` does before a step."""
        engines, key_of, prefill, decode = self._engines, self._key_of, self._prefill, self._decode
        ours, theirs = await self.ask()
        if ours["tp_size"] != theirs["tp_size"]:
            raise _Unlike(
                f"{prefill} has tp_size {ours['tp_size']} and {decode} has {theirs['tp_size']}: "
                "LMDeploy links engines of the same tp_size only"
            )
        await check()
        of_prefill = await self._at(prefill, engines.p2p_initialize((prefill, ours), (decode, theirs), key_of(prefill)))
        await check()
        of_decode = await self._at(decode, engines.p2p_initialize((decode, theirs), (prefill, ours), key_of(decode)))
        await check()
        await self._at(prefill, engines.p2p_connect(prefill, decode, of_decode, key_of(prefill)))
        await check()
        await self._at(decode, engines.p2p_connect(decode, prefill, of_prefill, key_of(decode)))
        return identity_of(ours, theirs)

    async def ask(self) -> tuple[Json, Json]:
        """What the two say of themselves. Raises LinkFailed."""
        return (
            await self._at(self._prefill, self._engines.engine_info(self._prefill, self._key_of(self._prefill))),
            await self._at(self._decode, self._engines.engine_info(self._decode, self._key_of(self._decode))),
        )

    async def _at(self, url: str, call: Awaitable[T]) -> T:
        """The call's result; its failure as that of the link, with the engine to blame."""
        try:
            async with asyncio.timeout_at(self._deadline_s - LAST_WORD_S):
                return await call
        except UpstreamError as e:
            raise LinkFailed(f"the link could not be made: {e.message}", url=url) from e
        except TimeoutError as e:
            raise LinkFailed(f"the link could not be made: engine {url} does not answer", url=url) from e


def identity_of(prefill: Json, decode: Json) -> str:
    """What tells two engines from others at the same addresses: digests of all that they say of themselves."""
    return "|".join(
        hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()[:16] for info in (prefill, decode)
    )


class _Outdated(Exception):
    """An engine was registered anew since the claim: it is another process, and this link would not be its. Or the
    claim is another worker's."""


class _Unlike(Exception):
    """Two engines that can never be linked as they are: trying again is no use."""
