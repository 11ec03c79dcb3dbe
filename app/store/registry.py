"""The node registry: read as snapshots, changed through scripts, restored when Redis loses it.

Owns the management connection (the client library's pool, never the hot one) and the pub/sub
listener. It must not know HTTP. Keys: nodes, node:*, engine_keys, version, events;
reads unfinished and latency:* for the status.

A snapshot is good for one registry version. Every hot-path reply carries the current one, so a
worker that is behind learns it from its next request; the pub/sub event only makes idle workers
prompt. A version *below* the snapshot's means that Redis lost its data or went back to an older
copy: then the worker's snapshot is the better truth and is written back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgpack
from redis.exceptions import NoScriptError, RedisError, ResponseError

from app.errors import StoreUnavailable
from app.metrics.families import BREAKER_CHANGES
from app.metrics.figures import Figures
from app.nodes import Breaker, Node, Role, State
from app.store.fields import node_from_fields, node_to_fields
from app.store.healing import heal
from app.store.keys import LAYOUT, Keys, of_node_removed
from app.store.last_known import LastKnown
from app.store.locator import Locator
from app.store.scripts import Argument, Code, Script
from app.store.snapshot import Snapshot

log = logging.getLogger("evenhand.store")

CALLS_AT_ONCE = 32
"""Of this module's calls; more wait for their turn. The client library's own limit raises instead."""
EVENTS_LOOK_S = 5.0
READ_TRIES = 5
"""How often a read follows a registry that changes under it."""
LAST_WORDS_S = 0.5
"""For what a worker that leaves still tells the others; they would find out without it."""

BECOMES = {
    "half_open": Breaker.HALF_OPEN,
    "close": Breaker.CLOSED,
    "close on probation": Breaker.CLOSED,
}
"""What a breaker is after a move; the other moves leave it as it is."""
HOLDS = (Code.DONE, Code.UPDATED, Code.UNCHANGED)
"""Of a state that was to be set: the registration is the one that was meant."""
CLOSING = ("close", "close on probation")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """From settings. `threshold`: failures in a row, over all workers, that open a breaker; `open_s`: for how
    long the first time, each time in a row twice as long, at most `longest_s`."""

    threshold: int
    open_s: float
    longest_s: float = 60.0


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node with its shared counts, as Redis has them now. `latency_s`: newest first; `stages`: mean seconds
    of each stage of split requests at the node, and how many there were."""

    node: Node
    unfinished: int
    latency_s: list[float]
    stages: dict[str, dict[str, float]] = field(default_factory=dict)


def seconds(window: Iterable[str]) -> list[float]:
    """The latencies of a window; what somebody else put there is left out."""
    found = []
    for text in window:
        with contextlib.suppress(ValueError):
            found.append(float(text))
    return found


def means(sums: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Mean and count of each stage, from HASH stages:<url>."""
    found = {}
    for name in sums:
        stage = name.removesuffix("_s")
        if stage != name:
            with contextlib.suppress(ValueError, KeyError, ZeroDivisionError):
                count = int(sums[f"{stage}_count"])
                found[stage] = {"mean_s": round(float(sums[name]) / count, 6), "count": count}
    return found


def number(text: str | None) -> int:
    """A count or a version; 0 where it is missing or not as INCR writes it: lost, what is true is written back."""
    return int(text) if text and re.fullmatch(r"0|[1-9][0-9]{0,14}", text) else 0


class Registry:
    """See the module. `snapshot` is the last known state and never waits."""

    def __init__(
        self,
        *,
        locator: Locator,
        keys: Keys,
        scripts: dict[str, Script],
        worker: str,
        timeout_s: float,
        last_known: LastKnown | None = None,
        figures: Figures | None = None,
    ) -> None:
        self.snapshot = Snapshot()
        self._last_known = last_known
        self._figures = figures or Figures()
        self._assumed: Snapshot | None = None  # what was known before this worker, until Redis is reached
        self.on_change: list[Callable[[], None]] = []
        self.leases: list[str] = []  # keys that this worker takes turns by: healed with all others
        self._keys = keys
        self._scripts = scripts
        self._worker = worker
        self.redis = locator.client(
            decode_responses=True,
            encoding_errors="surrogateescape",  # what is no text must be readable too, else it could not be healed
            socket_timeout=timeout_s * 2,
            socket_connect_timeout=timeout_s * 2,
            retries=1,  # for a pooled connection that Redis had closed meanwhile: these calls may run twice
            max_connections=8 * CALLS_AT_ONCE,  # not only for this module: 64 probes ask beside it
        )
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(CALLS_AT_ONCE)
        self.foreign = ""  # why the keys are none that this code may touch
        self._events = locator.client(socket_connect_timeout=timeout_s * 2)
        self._refused: set[str] = set()
        self._refreshing: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Registry {self.snapshot!r}>"

    async def start(self) -> None:
        """Read the registry if Redis answers, else what the host last knew; listen for changes from now on."""
        found = self._last_known.load() if self._last_known is not None else None
        self._assumed, age_s = found or (Snapshot(), 0.0)
        self._show(self._assumed)
        try:
            await self.refresh()
        except StoreUnavailable as e:
            if found is not None:
                log.warning(
                    "started without Redis: it serves the %d nodes that this host knew %.0f s ago (%s)",
                    len(self.snapshot.nodes),
                    age_s,
                    e.message,
                )
        self._listener = asyncio.create_task(self._listen(), name="registry-events")

    async def close(self) -> None:
        await _end(self._listener)  # first: it may begin to look once more
        await _end(self._refreshing)  # then this: a look that writes the registry back tells of it
        if self._background:
            # A connection that the client library is just making, cancelled, would stay open.
            await asyncio.wait(self._background, timeout=LAST_WORDS_S)
        for task in [*self._background]:
            await _end(task)
        for client in (self.redis, self._events):
            with contextlib.suppress(RedisError, OSError):
                await client.aclose()
        if self._last_known is not None:
            await self._last_known.close()

    # --- without Redis ----------------------------------------------------------------------------

    @property
    def assuming(self) -> bool:
        """Whether Redis has not been reached since the start: the snapshot is what was known before, or assumed."""
        return self._assumed is not None

    def assume(self, node: Node) -> None:
        """Have a node that a setting names in the snapshot for as long as Redis has not been reached."""
        if self._assumed is not None:
            mine = self.snapshot
            self._show(Snapshot(0, {**mine.nodes, node.url: node}, mine.engine_keys))

    def _check_layout(self, found: str | None) -> None:
        """Raises StoreUnavailable: the keys have another layout than ours."""
        self.foreign = ""
        if number(found) not in (0, LAYOUT):
            self.foreign = (
                f"the keys in Redis have layout {found}, this version of Evenhand knows layout {LAYOUT}: run the "
                "same version everywhere, or give this one a --namespace of its own"
            )
            raise StoreUnavailable(self.foreign)

    # --- reading ----------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """See all that was there when this was called. Raises StoreUnavailable."""
        under_way = self._refreshing
        if under_way is not None and not under_way.done():
            # It may have read before the change that the caller has heard of.
            with contextlib.suppress(StoreUnavailable):
                await asyncio.shield(under_way)
        await self.catch_up()

    async def catch_up(self) -> None:
        """Wait for a look, one that is under way too: for who asks again where that has seen too little. Raises
        StoreUnavailable."""
        await asyncio.shield(self._look())

    def refresh_soon(self) -> None:
        """The same in the background; a failure is tried again when the next reply shows the version."""
        self._look()

    def _look(self) -> asyncio.Task[None]:
        """The look that is under way, or a new one. One that is over saw the past, called back yet or not."""
        task = self._refreshing
        if task is None or task.done():
            task = self._refreshing = asyncio.create_task(self._refresh(), name="registry-refresh")
            task.add_done_callback(self._refreshed)
        return task

    def _refreshed(self, task: asyncio.Task[None]) -> None:
        if self._refreshing is task:
            self._refreshing = None
        if not task.cancelled() and task.exception() is not None:
            log.debug("the registry could not be read: %s", task.exception())

    async def _refresh(self) -> None:
        for _ in range(READ_TRIES):
            version, nodes, damaged, engine_keys = await self._read()
            if version < self.snapshot.version:
                await self._restore(repair=False)
            elif version == self.snapshot.version == 0 and nodes:
                # The version was lost while nobody was there who knew it: what is there is all that is known.
                await self.guarded(lambda: self.redis.incr(self._keys.version))
            elif self._assumed is not None and version == 0 and not damaged:
                # It is empty, and nobody else has written back what was there: then what the host knew is.
                assumed, self._assumed = self._assumed, None
                self._show(assumed)
                if assumed.nodes:
                    await self._restore(repair=True)
            elif version == self.snapshot.version and not damaged:
                return
            elif damaged and version == self.snapshot.version:
                await self._restore(repair=True)
            else:
                self._adopt(Snapshot(version, nodes, engine_keys))
                return

    async def verify(self) -> None:
        """Repair what somebody deleted or edited behind the version's back. Raises StoreUnavailable."""
        version, nodes, damaged, engine_keys = await self._read()
        mine = self.snapshot
        if version != mine.version or (version == 0 and nodes) or self._assumed is not None:
            await self.refresh()
        elif (damaged or nodes != mine.nodes or engine_keys != mine.engine_keys) and self.snapshot is mine:
            log.warning("the registry was damaged; it is written back as it was")
            await self._restore(repair=True)
            if self.snapshot is mine:  # another worker was faster: take what it wrote
                await self.refresh()

    def _adopt(self, snapshot: Snapshot) -> None:
        # A slow read must not undo a newer one.
        if snapshot.version >= self.snapshot.version:
            self._assumed = None
            self._show(snapshot)
            if self._last_known is not None:
                self._last_known.keep(snapshot)

    def _show(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        for tell in self.on_change:
            tell()

    async def _read(self) -> tuple[int, dict[str, Node], bool, dict[str, str]]:
        """(version, nodes, whether one is damaged, engine keys), all of one version."""
        keys = self._keys

        async def read() -> tuple[int, dict[str, Node], bool, dict[str, str]]:
            for _ in range(READ_TRIES):
                async with self.redis.pipeline(transaction=True) as pipe:
                    pipe.get(keys.version)
                    pipe.smembers(keys.nodes)
                    version, urls = await pipe.execute()
                async with self.redis.pipeline(transaction=True) as pipe:
                    pipe.get(keys.layout)
                    pipe.get(keys.version)
                    pipe.hgetall(keys.engine_keys)
                    for url in urls:
                        pipe.hgetall(keys.node(url))
                    layout, again, engine_keys, *hashes = await pipe.execute()
                self._check_layout(layout)
                if layout is None:
                    await self.redis.set(keys.layout, LAYOUT, nx=True)
                if version is not None and str(number(version)) != version:
                    await self._heal()
                elif again == version:
                    found = {url: node_from_fields(url, fields) for url, fields in zip(urls, hashes, strict=True)}
                    nodes = {url: node for url, node in found.items() if node is not None}
                    return number(version), nodes, len(nodes) != len(found), engine_keys
            raise StoreUnavailable("the registry changes faster than it can be read")

        return await self.guarded(read)

    async def status(self) -> dict[str, NodeStatus]:
        """Every node, gone ones too, with its shared counts now. Raises StoreUnavailable."""
        keys = self._keys
        await self.refresh()
        nodes = self.snapshot.nodes

        async def read() -> dict[str, NodeStatus]:
            async with self.redis.pipeline(transaction=False) as pipe:
                pipe.hgetall(keys.unfinished)
                for url in nodes:
                    pipe.lrange(keys.latency(url), 0, -1)
                    pipe.hgetall(keys.stages(url))
                counts, *history = await pipe.execute()
            return {
                url: NodeStatus(node, number(counts.get(url)), seconds(window), means(sums))
                for (url, node), window, sums in zip(nodes.items(), history[::2], history[1::2], strict=True)
            }

        return await self.guarded(read)

    # --- changing ---------------------------------------------------------------------------------

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
        source: str = "",
    ) -> bool:
        """Register or update a node; pending until its next good probe. Raises StoreUnavailable.

        Args:
            source: the `--discover` that lists it: nothing is done where the node is another's. Empty: whoever had
                it, it is the caller's from now on.

        Returns:
            Whether it was done.
        """
        node = Node(
            url,
            role=role,
            models=models,
            speed=speed,
            asked=asked,
            static=static,
            bootstrap_port=bootstrap_port,
            host_header=host_header,
            source=source,
        )
        return await self._change("add", url, "add_node", *self._addition(node, key)) != Code.REFUSED

    async def add_all(self, nodes: Sequence[tuple[Node, str | None]]) -> list[bool]:
        """As `add`, of many with their keys."""
        calls = [(node.url, *self._addition(node, key)) for node, key in nodes]
        return [code != Code.REFUSED for code in await self._change_all("add", "add_node", calls)]

    def _addition(self, node: Node, key: str | None) -> tuple[tuple[str, ...], list[Argument]]:
        """Keys and arguments of add_node.lua."""
        fields = node_to_fields(node)
        for given_by_script in ("order", "incarnation", "registered_at_ms", "state_since_ms", "life"):
            del fields[given_by_script]
        keys = self._keys
        names = (keys.nodes, keys.node(node.url), keys.version, keys.engine_keys, keys.failures)
        return names, [node.url, key or "", node.source, *_flat(fields)]

    async def remove(self, url: str, *, when: str = "now") -> bool:
        """Take a node out; `when` as in remove_node.lua. Returns whether it was taken out."""
        names = of_node_removed(self._keys, url)
        return await self._change("remove", url, "remove_node", names, [url, when]) == Code.DONE

    async def remove_drained(self, urls: Iterable[str]) -> None:
        """Take out those of these nodes whose drain is over."""
        await self._change_all(
            "remove", "remove_node", [(url, of_node_removed(self._keys, url), [url, "drained"]) for url in urls]
        )

    async def drain(self, url: str, timeout_s: float) -> bool:
        """No new requests for the node; removed when the last has ended or after `timeout_s`."""
        return await self._set_state(url, State.DRAINING, drain_ms=round(timeout_s * 1000)) in HOLDS

    async def drain_all(self, nodes: Iterable[tuple[str, str]], timeout_s: float, *, reason: str) -> list[bool]:
        """As `drain`, of many (url, incarnation of the registration that is meant)."""
        drain_ms, fields = round(timeout_s * 1000), {"reason": reason}
        calls = [
            (url, *self._new_state(url, State.DRAINING, incarnation=incarnation, drain_ms=drain_ms, fields=fields))
            for url, incarnation in nodes
        ]
        codes = await self._change_all("state", "set_node_state", calls)
        return [code in HOLDS for code in codes]

    async def set_state(
        self, node: Node, state: State, *, reason: str = "", models: tuple[str, ...] | None = None
    ) -> bool:
        """What a probe found of this incarnation of `node`. Returns whether it still holds.

        Whoever changes the state says so in the log, so that it is there once in the deployment.
        """
        fields = {"reason": reason}
        if models is not None:
            fields["models"] = json.dumps(list(models), ensure_ascii=False)
        if state is State.READY and node.state is not State.READY:
            await self._to_show_its_speed(node.url)
        code = await self._set_state(node.url, state, incarnation=str(node.incarnation), fields=fields)
        if code == Code.DONE:
            bad = State.GONE in (node.state, state) or State.DOWN in (node.state, state)
            words = f": {reason}" if reason else ""
            log.log(logging.WARNING if bad else logging.INFO, "node %s: %s -> %s%s", node.url, node.state, state, words)
        return code in HOLDS

    async def record_failure(self, url: str, rules: BreakerRules) -> None:
        """The node failed a request. Raises StoreUnavailable."""
        arguments: list[Argument] = [url, rules.threshold, round(rules.open_s * 1000), round(rules.longest_s * 1000)]
        keys = self._keys
        if await self._breaker("record_failure", url, arguments, keys.learned, keys.learned_since, keys.load_index):
            self._figures.count(BREAKER_CHANGES, url, Breaker.OPEN)
            log.warning("node %s: its breaker is open: too many requests failed there in a row", url)

    async def move_breaker(self, url: str, move: str, number: int = 0) -> bool:
        """As move_breaker.lua; whether it was moved. Raises StoreUnavailable."""
        if move in CLOSING:
            await self._to_show_its_speed(url)
        moved = await self._breaker("move_breaker", url, [url, move, number])
        if moved and move in BECOMES:
            self._figures.count(BREAKER_CHANGES, url, BECOMES[move])
        return moved

    async def _to_show_its_speed(self, url: str) -> None:
        """Before it gets requests again: who comes back starts slowly, at the speed that it had (`learning:<url>`)."""
        keys = self._keys

        async def forget() -> None:
            async with self.redis.pipeline(transaction=True) as pipe:
                pipe.hdel(keys.learned, url)
                pipe.delete(keys.learned_since, keys.load_index)
                await pipe.execute()

        await self.guarded(forget)

    async def _breaker(self, script: str, url: str, arguments: list[Argument], *more: str) -> bool:
        keys = self._keys
        names = (keys.node(url), keys.version, keys.failures, *more)
        before = self.snapshot.version
        code, version = await self.guarded(lambda: self.run(script, names, arguments))
        if code == Code.DONE and version != before:
            await self.refresh()
            self._tell("breaker", url, version)
        return bool(code == Code.DONE)

    async def renew_life(self, url: str) -> None:
        """The process at `url` is another one than before: what was held of it is void, on all workers."""
        node = self.snapshot.nodes.get(url)
        if node is not None:
            fields = {"life": str(self.snapshot.version + 1)}
            await self._set_state(url, None, incarnation=str(node.incarnation), fields=fields)

    def refused(self, url: str) -> None:
        """Real traffic was refused: proof that nobody listens there. Says so in the background."""
        node = self.snapshot.nodes.get(url)
        if node is None or node.state != State.READY or url in self._refused:
            return
        self._refused.add(url)

        async def take_down() -> None:
            try:
                with contextlib.suppress(StoreUnavailable):
                    await self.set_state(node, State.DOWN, reason="connection refused")
            finally:
                self._refused.discard(url)

        self._run_in_background(take_down())

    async def _set_state(
        self,
        url: str,
        state: State | None,
        *,
        incarnation: str = "",
        drain_ms: int | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> Code:
        call = self._new_state(url, state, incarnation=incarnation, drain_ms=drain_ms, fields=fields or {})
        return await self._change("state", url, "set_node_state", *call)

    def _new_state(
        self, url: str, state: State | None, *, incarnation: str, drain_ms: int | None, fields: Mapping[str, str]
    ) -> tuple[tuple[str, ...], list[Argument]]:
        """Keys and arguments of set_node_state.lua."""
        keys = self._keys
        drain = "" if drain_ms is None else str(drain_ms)
        said: list[Argument] = [url, incarnation, state.value if state else "", drain, *_flat(fields)]
        return (keys.nodes, keys.node(url), keys.version), said

    async def _change(
        self, change: str, url: str, script: str, names: tuple[str, ...], arguments: list[Argument]
    ) -> Code:
        for _ in range(READ_TRIES):
            # First mend what was lost or edited: a change on top of it would carry the damage on as the newest.
            await self.verify()
            before = self.snapshot.version
            code, version = await self.guarded(lambda: self.run(script, names, arguments))
            if version > before or (version == before and code not in (Code.DONE, Code.UPDATED)):
                break
            # Redis lost the registry in between, so the change was made to an empty one.
            if version == before:
                await self._restore(repair=True)
        if version != self.snapshot.version:
            await self.refresh()
        if code in (Code.DONE, Code.UPDATED):
            self._tell(change, url, version)
        return Code(code)

    async def _change_all(
        self, change: str, script: str, calls: Sequence[tuple[str, tuple[str, ...], list[Argument]]]
    ) -> list[Code]:
        """As `_change`, of many (url, keys, arguments): the registry is read twice for all of them, not for each."""
        await self.verify()
        version, codes = self.snapshot.version, []
        for url, names, arguments in calls:
            before = version
            code, version = await self.guarded(partial(self.run, script, names, arguments))
            if version < before or (version == before and code in (Code.DONE, Code.UPDATED)):
                # Redis lost the registry in between.
                code = await self._change(change, url, script, names, arguments)
                version = self.snapshot.version
            codes.append(Code(code))
        if version != self.snapshot.version:
            await self.refresh()
        if Code.DONE in codes or Code.UPDATED in codes:
            self._tell(change, "", version)
        return codes

    async def _restore(self, *, repair: bool) -> None:
        snapshot, keys = self.snapshot, self._keys

        async def write() -> None:
            there = [str(url) for url in await self.redis.smembers(keys.nodes)]
            extra = [url for url in there if url not in snapshot.nodes]
            urls = [*snapshot.nodes, *extra]
            names = [keys.nodes, keys.version, keys.engine_keys, *map(keys.node, urls)]
            arguments: list[Argument] = [snapshot.version, "1" if repair else "0", len(snapshot.nodes)]
            for url, node in snapshot.nodes.items():
                fields = _flat(node_to_fields(node))
                arguments += [url, snapshot.engine_keys.get(url, ""), len(fields) // 2, *fields]
            code, version = await self.run("restore_registry", names, [*arguments, *extra])
            if code == Code.DONE:
                log.warning("Redis had lost the registry: %d nodes are written back", len(snapshot.nodes))
                self._adopt(Snapshot(version, snapshot.nodes, snapshot.engine_keys))
                self._tell("restore", "", version)

        await self.guarded(write)

    # --- the wire ---------------------------------------------------------------------------------

    async def run(self, name: str, names: tuple[str, ...] | list[str], arguments: list[Argument]) -> Any:
        """Run one script over the management connection. Raises RedisError; StoreUnavailable with foreign keys."""
        if self.foreign:
            raise StoreUnavailable(self.foreign)
        return await self._mended(lambda: self._execute(self._scripts[name], names, arguments))

    async def _execute(self, script: Script, names: tuple[str, ...] | list[str], arguments: list[Argument]) -> Any:
        command = script.evalsha(names, arguments)
        execute: Callable[..., Awaitable[Any]] = self.redis.execute_command
        try:
            return await execute(*command)
        except NoScriptError:
            return await execute("EVAL", script.text, *command[2:])

    async def heal(self) -> bool:
        """Take away what somebody wrote over any key; returns whether there was something. Raises StoreUnavailable."""
        return await self.guarded(self._heal)

    async def _heal(self) -> bool:
        with contextlib.suppress(ResponseError):  # it is damaged itself
            self._check_layout(str(await self.redis.get(self._keys.layout)))
        script, urls = self._scripts["heal_keys"], self.snapshot.nodes
        return await heal(self.redis, self._execute, script, self._keys, urls, self.leases)

    async def _mended(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of `call`; where a damaged key made it fail, that of a second one, after healing."""
        try:
            return await call()
        except ResponseError:
            # Not by its text: Redis has one for each way in which a value can be wrong. And again even if nothing
            # was found: another worker may have been faster.
            await self._heal()
            return await call()

    async def guarded(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of `call` to Redis, after healing where it met a damaged key. Raises StoreUnavailable."""
        with as_unavailable():
            async with asyncio.timeout(self._timeout_s * 2):
                await self._turns.acquire()
            try:
                return await self._mended(call)
            finally:
                self._turns.release()

    def _tell(self, change: str, url: str, version: int) -> None:
        event = {"change": change, "url": url, "version": version, "worker": self._worker}

        async def publish() -> None:
            with contextlib.suppress(RedisError, OSError):
                await self.redis.publish(self._keys.events, msgpack.packb(event))

        self._run_in_background(publish())

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="registry-background")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _listen(self) -> None:
        """Follow the events until cancelled; their loss costs promptness only, never correctness."""
        task = asyncio.current_task()
        assert task is not None
        # Not `while True`: the client library uses asyncio.wait_for, which on Python 3.11 loses a
        # cancellation that comes in the same turn as the result.
        while not task.cancelling():
            pubsub = self._events.pubsub(ignore_subscribe_messages=True)
            try:
                await pubsub.subscribe(self._keys.events)
                self.refresh_soon()
                while not task.cancelling():
                    # A look each time whether Redis is elsewhere by now: a frozen master says no more, nor good-bye.
                    message = await pubsub.get_message(timeout=EVENTS_LOOK_S)
                    if message is not None:
                        self.refresh_soon()
            except (RedisError, OSError, TimeoutError):
                await asyncio.sleep(0.5)
            finally:
                with contextlib.suppress(RedisError, OSError):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def as_unavailable() -> Iterator[None]:
    """The client library's errors as StoreUnavailable, the cause kept."""
    try:
        yield
    except (RedisError, OSError, TimeoutError) as e:
        raise StoreUnavailable(f"Redis can't be used: {e or type(e).__name__}") from e


def _flat(fields: Mapping[str, str]) -> list[Argument]:
    return [part for item in fields.items() for part in item]


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
