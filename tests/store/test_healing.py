"""What somebody writes over a key is healed by the workers themselves: of every key, whatever stands there instead.

Two workers with all that an app has: registry, ledger, prober, reaper. What must stand in Redis again is written out
in `healed`, by hand. The loops go at ten times their pace, but for the tests that say otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import redis as redis_client

import app.store.ledger as ledger_module
import app.store.registry as registry_module
from app.nodes import Role
from app.store.keys import Keys, shapes, shapes_of
from app.store.ledger import Ticket
from app.upstream.management import Health, Verdict
from tests.store.harness import Load, Worker, give_back, held_by, ledger_of, of, totals
from tests.store.test_scripts import KEY_ROWS
from tests.support.redis import Space
from tests.support.wait import aeventually
from workers import prober as prober_module
from workers import reaper as reaper_module
from workers.prober import Prober, Rules
from workers.reaper import Reaper

A, B, E1, E2 = "http://a:1", "http://b:1", "http://e:1", "http://e:2"
SECRET = "sk-of-the-engine-a"
LEASE_S = 8.0
PACE = 10
RULES = Rules(
    interval_s=5.0, down_after=3, up_after=2, busy_grace_s=10.0, heartbeat_expiration_s=90.0, forget_after_s=86_400.0
)

KEYS = sorted(
    name.replace("<url>", A).replace("<worker>", "w1")
    for name, row in KEY_ROWS.items()
    # Made anew whenever they are not right: test_load_index.py, test_speeds.py. Overwritten, or expires:
    # tests/dispatch/test_links.py.
    if row[0] != "channel"
    and not name.startswith("load")
    and name not in ("restating", "learned_since")
    # Healed for who wants it: tests/workers/test_discoverer.py.
    and not name.startswith("discovering:")
)
WRITE: dict[str, tuple[str, ...]] = {
    "string": ("SET", "x"),
    "list": ("RPUSH", "x"),
    "set": ("SADD", "x"),
    "zset": ("ZADD", "1", "x"),
    "hash": ("HSET", "f", "x"),
    "stream": ("XADD", "*", "f", "x"),
}
"""Type -> a command that makes a key of it."""


def type_of(name: str) -> str:
    """What the page says that a key is."""
    kind = name.replace(A, "<url>").replace(":w1", ":<worker>")
    return str(KEY_ROWS[kind][0]).lower()


NUMBERS = ["abc", "", "-5", "1.5", "1e400", "nan", "inf", "0x10", "007", "9223372036854775807", b"\xff\xfe"]
DAY_MS = 86_400_000

RUBBISH: list[tuple[Any, ...]] = [
    *[("SET", "version", value) for value in NUMBERS],
    *[("HSET", "unfinished", A, value) for value in NUMBERS],
    ("HSET", "unfinished", b"\xff", "1"),
    *[("HSET", "unfinished:w1", A, value) for value in NUMBERS],
    *[("HSET", "sessions", "w1", value) for value in NUMBERS],
    ("HSET", "sessions", "w1", "+in an hour"),
    ("HSET", "sessions", "w1", "+in two days"),
    ("ZADD", "workers", "+inf", "w1"),
    ("ZADD", "workers", "-inf", "w1"),
    ("ZADD", "workers", "+inf", "nobody"),
    ("ZADD", "workers", "0", b"\xff"),
    *[("RPUSH", f"latency:{A}", value) for value in ("abc", "", "-5", "1e400", "nan", "inf", b"\xff")],
    *[("HSET", "latency_mean", A, value) for value in ("abc", "", "-5", "1e400", "nan", "inf", b"\xff")],
    *[("HSET", "learned", A, value) for value in ("abc", "", "-5", "1e400", "nan", "inf", b"\xff")],
    *[("HSET", f"learning:{A}", "weight", value) for value in ("abc", "", "-5", "1e400", "nan", "inf", b"\xff")],
    *[("HSET", "explored", B, value) for value in NUMBERS],
    *[("HSET", "last_success", A, value) for value in NUMBERS],
    *[("HSET", "failures", A, value) for value in NUMBERS],
    *[("HSET", "retries", "1", value) for value in NUMBERS],
    *[("HSET", "requests", "1", value) for value in NUMBERS],
    *[("HSET", "dispatched", f"1 {A}", value) for value in NUMBERS],
    ("XADD", "decisions", "*", "decision", b"\xff"),
    ("HSET", "last_success", A, "+in two days"),
    ("SET", "prober", "nobody"),
    ("SET", "prober", "nobody", "PX", "99999999"),
    ("SET", "prober", b"\xff"),
    *[("SET", "encoder_cursor", value) for value in NUMBERS],
    *[("HSET", "encoder_credit", E1, value) for value in ("abc", "", "1e300", "1e400", "nan", "inf", b"\xff")],
    *[("HSET", f"node:{A}", "role", value) for value in ("9", "abc", "", "1e400")],
    *[("HSET", f"node:{A}", "models", value) for value in ("5", '"am"', "[1]", "[[1]]", '[""]', "{", "[" * 9999)],
    *[("HSET", f"node:{A}", "speed", value) for value in ("0", "-1", "-2", "nan", "inf", "1e400", "abc")],
    *[("HSET", f"node:{A}", "state", value) for value in ("merry", "", "down")],
    *[("HSET", f"node:{A}", field, "abc") for field in ("order", "incarnation", "drain_until_ms", "state_since_ms")],
    *[("HSET", f"node:{A}", field, "abc") for field in ("breaker", "breaker_until_ms", "breaker_opens")],
    ("HSET", f"node:{A}", "reason", b"\xff"),
    ("HSET", f"node:{A}", "static", "1"),
    ("SADD", "nodes", "x"),
    ("SADD", "nodes", b"\xff\xfe"),
    ("HSET", "engine_keys", A, "another"),
    ("HSET", "engine_keys", b"\xff", b"\xff"),
]


class Engines:
    """Stands for the EngineClient: all are well."""

    async def health(self, url: str, key: str | None) -> Health:
        return Health(Verdict.OK, "HTTP 200")

    async def models(self, url: str, key: str | None) -> tuple[str, ...]:
        return ("m",)


class Scene:
    """The two workers, and what they hold: 3 requests on A, 3 on B."""

    def __init__(self, space: Space, made: list[Worker]) -> None:
        self.space = space
        self.made = made
        self.tickets: list[Ticket] = []
        self.before: dict[str, Any] = {}

    async def begin(self) -> None:
        w1, w2 = self.made
        await w1.add_ready(A, models=("a", "m"), speed=2.0, key=SECRET)
        await w1.add_ready(B, models=("b", "m"))
        await w1.add_ready(E1, role=Role.Encode)
        await w1.add_ready(E2, role=Role.Encode)
        await w2.registry.refresh()
        await w1.leave_traces(A, B)
        give_back(await w1.take(1, "a"), succeeded=True)
        self.tickets = [*await w1.take(2, "a"), *await w2.take(1, "a"), *await w2.take(3, "b")]
        for worker in self.made:  # round robin, then weighted
            give_back(await self.encode(worker, 1))
        # As under least_expected_delay; nobody here writes it again.
        self.space.cli("HSET", self.key("learned"), A, "41.25")
        self.space.cli("HSET", self.key(f"learning:{A}"), "speed", "41.25", "weight", "3", "shown", "4", "at_ms", "1")
        self.space.cli("HINCRBY", self.key("requests"), self.space.client.time()[0], 7)  # type: ignore[index]
        await aeventually(self.healed)
        assert self.remembered()
        assert all(self.before.values()), "there is a key of every name"
        assert self.space.cli("GET", self.key("version")) == "8"

    def remembered(self) -> bool:
        """False while there is rubbish that can't be read."""
        with contextlib.suppress(UnicodeDecodeError):
            self.before = {name: self.dump(name) for name in KEYS}
            return True
        return False

    def key(self, name: str) -> str:
        return self.space.key(name)

    async def encode(self, worker: Worker, items: int) -> list[Ticket]:
        return await worker.ledger.acquire_encoders(lambda snapshot: snapshot.pool("m", Role.Encode), items)

    def dump(self, name: str) -> Any:
        read = {"string": "GET", "list": "LRANGE", "set": "SMEMBERS", "zset": "ZRANGE", "hash": "HGETALL"}
        read["stream"] = "XRANGE"
        more = {"list": (0, -1), "zset": (0, -1), "stream": ("-", "+")}.get(type_of(name), ())
        return self.space.cli(read[type_of(name)], self.key(name), *more)

    def write_over(self, name: str, type_: str) -> None:
        command, *values = WRITE[type_]
        with self.space.client.pipeline(transaction=True) as pipe:
            pipe.delete(self.key(name))
            pipe.execute_command(command, self.key(name), *values)  # type: ignore[no-untyped-call]
            pipe.execute()

    def damage(self, command: str, name: str, *values: Any) -> None:
        seconds, _ = self.space.client.time()  # type: ignore[misc]
        words = {"+in an hour": 3_600_000, "+in two days": 2 * DAY_MS}
        values = tuple(str(seconds * 1000 + words[v]) if v in words else v for v in values)
        self.space.cli(command, self.key(name), *values)

    def healed(self) -> bool:
        """All that must be there, whatever was damaged, nothing of another type, and no rubbish."""
        try:
            self._look()
            self._look_at_history()
        except (ValueError, TypeError, LookupError, redis_client.ResponseError) as e:
            raise AssertionError(f"not yet: {e}") from e
        return all(worker.shared for worker in self.made)

    def _look(self) -> None:
        key = self.key
        urls = (A, B, E1, E2)
        # In one go: this is asked again and again, and meanwhile the workers wait.
        with self.space.client.pipeline(transaction=False) as pipe:
            for name in KEYS:
                pipe.type(key(name))
            pipe.smembers(key("nodes"))
            for url in urls:
                pipe.hgetall(key(f"node:{url}"))
            for name in ("engine_keys", "unfinished", "unfinished:w1", "unfinished:w2", "sessions"):
                pipe.hgetall(key(name))
            pipe.time()
            pipe.zrange(key("workers"), 0, -1, withscores=True)
            pipe.get(key("prober"))
            pipe.pttl(key("prober"))
            pipe.get(key("version"))
            found = pipe.execute()
        types, (nodes, *found) = found[: len(KEYS)], found[len(KEYS) :]
        for name, type_ in zip(KEYS, types, strict=True):
            assert type_ in (type_of(name), "none"), name
        assert nodes == {A, B, E1, E2}
        fields = dict(zip(urls, found, strict=False))
        said = {url: [f[name] for name in ("role", "models", "speed", "state", "order")] for url, f in fields.items()}
        assert said == {
            A: ["1", '["a", "m"]', "2.0", "ready", "1"],
            B: ["1", '["b", "m"]', "", "ready", "3"],
            E1: ["4", '["m"]', "", "ready", "5"],
            E2: ["4", '["m"]', "", "ready", "7"],
        }
        engine_keys, unfinished, of_w1, of_w2, sessions, (seconds, _), leases, prober, left_ms, version = found[4:]
        assert engine_keys == {A: SECRET}
        assert unfinished == {A: "3", B: "3"}
        assert of_w1 == {A: "2"}
        assert of_w2 == {A: "1", B: "3"}
        assert {worker for worker, _ in leases} == {"w1", "w2"}
        assert all(0 < expiry - seconds * 1000 < (LEASE_S + 2) * 1000 for _, expiry in leases), leases
        assert set(sessions) == {"w1", "w2"}
        assert prober in ("w1", "w2")
        assert 0 < left_ms <= prober_module.LEASE_MS
        version = int(version)
        assert [worker.registry.snapshot.version for worker in self.made] == [version, version]
        assert version >= 8

    def _look_at_history(self) -> None:
        assert all(re.fullmatch(r"\d\.\d{6}", latency) for latency in self.dump(f"latency:{A}"))
        assert all(re.fullmatch(r"\d\.\d{9}", mean) for mean in self.dump("latency_mean").values())
        assert all(re.fullmatch(r"[1-9]\d{,4}", times) for times in self.dump("explored").values())
        assert all(float(speed) > 0 for speed in self.dump("learned").values())
        assert all(0 < float(value) < 1e15 for value in self.dump(f"learning:{A}").values())
        now_ms = self.space.client.time()[0] * 1000  # type: ignore[index]
        assert all(now_ms - 60_000 < int(at_ms) < now_ms + 2000 for at_ms in self.dump("last_success").values())
        assert self.dump("encoder_cursor") in (None, "0", "1")
        assert all(-4 <= float(credit) <= 4 for credit in self.dump("encoder_credit").values())

    def counted(self) -> bool:
        with contextlib.suppress(redis_client.ResponseError):
            return totals(self.space) == held_by(self.made) == {A: 3, B: 3}
        return False

    def changed_but(self, damaged: str) -> list[str]:
        """What was lost beside what was written over. (Versions and instants move, `watched` ends.)"""
        moving = ["version", "workers", "sessions", "prober", "migrations", "requests", f"node:{A}", damaged]
        moving += ["dispatched", "watched", "arrangement"]
        return [name for name in KEYS if name not in moving and self.dump(name) != self.before[name]]

    @asynccontextmanager
    async def damaged(self, name: str, how: str) -> AsyncIterator[None]:
        """What is done in the block is told with its errors; behind it all goes on, and what was lost is put back."""
        kept = f"kept:{self.space.namespace}"
        self.space.cli("COPY", self.key(name), kept, "REPLACE")
        try:
            yield
            await self.goes_on()
        except AssertionError as e:
            raise AssertionError(f"{name}, {how}: {e}") from e
        finally:
            # Over what is there only where rubbish stays, and who reads passes over it.
            self.space.cli("COPY", kept, self.key(name), *["REPLACE"] * (name in ("decisions", "dispatched")))
            self.space.cli("DEL", kept)
        await aeventually(self.remembered)

    async def goes_on(self) -> None:
        """Everything works as ever: each reads and writes what was healed."""
        for worker in self.made:
            assert sorted((await worker.registry.status()).keys()) == [A, B, E1, E2]
            give_back(await worker.take(1, "a"), succeeded=True)
            give_back(await worker.take(1, "b"))
            give_back(await self.encode(worker, 3))
        await aeventually(self.healed)
        status = await self.made[1].registry.status()
        assert {url: one.unfinished for url, one in status.items()} == {A: 3, B: 3, E1: 0, E2: 0}
        for name in (f"latency:{A}", "latency_mean", "last_success", "encoder_cursor"):
            assert self.dump(name), name
        assert A in self.dump("latency_mean") and A in self.dump("last_success")
        assert set(self.dump("encoder_credit")) == {E1, E2}


@asynccontextmanager
async def running(space: Space, *, pace: int = PACE) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for module, name in ((ledger_module, "RENEW_S"), (prober_module, "TURN_S"), (reaper_module, "LOOK_EVERY_S")):
            patch.setattr(module, name, 1.0 / pace)
        made = []
        for name, policy in (("w1", "round_robin"), ("w2", "weighted")):
            worker = Worker(
                space.url,
                space.namespace,
                name,
                strategy="min_observed_latency",
                encoder_policy=policy,
                lease_s=LEASE_S,
            )
            made.append(await stack.enter_async_context(worker))
            prober = Prober(
                registry=worker.registry,
                engines=Engines(),  # type: ignore[arg-type]
                keys=worker.keys,
                worker=name,
                rules=RULES,
                engine_key=None,
                counts_are_whole=lambda worker=worker: worker.ledger.counts_are_whole,  # type: ignore[misc]
            )
            for loop in (prober.run, Reaper(worker.registry, worker.keys).run):
                stack.push_async_callback(ended, asyncio.create_task(loop()))
        scene = Scene(space, made)
        await scene.begin()
        yield scene
        give_back(scene.tickets)
        await aeventually(lambda: totals(space) == {})


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


HOT = ["version", "sessions", "unfinished", "unfinished:w1", "workers", "explored", "latency_mean"]


# --- the promise ----------------------------------------------------------------------------------


def test_every_key_of_the_page_has_its_shape() -> None:
    keys = Keys("ns")
    found = shapes(keys) | shapes_of(keys, [A], ["w1"])
    assert {name.removeprefix(keys.prefix): shape.type for name, shape in found.items()} == {
        name: type_of(name) for name in KEYS
    }


OTHERS = {name: sorted(WRITE.keys() - {type_of(name)}) for name in KEYS}
EACH_ONCE = [(name, others[i % len(others)]) for i, (name, others) in enumerate(OTHERS.items())]
PARTS = 4
"""What is damaged by turns has one scene for so many parts: to begin one takes longer than to heal a key."""


@pytest.mark.parametrize(
    "damages",
    [
        # One other type each, every type by turns; all of all in the long run.
        *[pytest.param(EACH_ONCE[i::PARTS], id=f"part{i}") for i in range(PARTS)],
        *[
            pytest.param([(name, type_) for type_ in others], marks=pytest.mark.long, id=f"{name}-all")
            for name, others in OTHERS.items()
        ],
    ],
)
async def test_a_key_of_any_other_type_is_healed_while_all_is_idle(
    redis: Space, damages: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    async with running(redis) as scene:
        lines: list[str] = []
        for name, type_ in damages:
            caplog.clear()
            line = f"'{redis.key(name)}' was a {type_} and no {type_of(name)}; it is replaced"
            async with scene.damaged(name, f"a {type_}"):
                scene.write_over(name, type_)
                await aeventually(scene.healed)
                # Restating, recounting and the next note mend these too, and may be first.
                if not name.startswith(("unfinished", "requests", "dispatched")):
                    await aeventually(lambda line=line: line in caplog.text)
                said = [record.getMessage() for record in caplog.records if "is replaced" in record.getMessage()]
                # That of the one before may come late, where nobody waits for the line.
                assert [text for text in said if text not in lines] in ([line], []), "once, by whoever was first"
                # Who was given up because `workers` was lost tells all its own again a moment later.
                await aeventually(lambda name=name: not scene.changed_but(name))
                version = redis.cli("GET", redis.key("version"))
                assert version == "8", "the newest snapshot came back, as after a flush"
            lines.append(line)


DAMAGES = {name: [damage for damage in RUBBISH if damage[1] == name] for name in sorted({d[1] for d in RUBBISH})}
LAST_OF_EACH = [damages[-1] for damages in DAMAGES.values()]


@pytest.mark.parametrize(
    "damages",
    [
        # One each; all of all in the long run.
        *[pytest.param(LAST_OF_EACH[i::PARTS], id=f"part{i}") for i in range(PARTS)],
        *[pytest.param(damages, marks=pytest.mark.long, id=f"{name}-all") for name, damages in DAMAGES.items()],
    ],
)
async def test_rubbish_is_healed_while_all_is_idle(redis: Space, damages: list[tuple[Any, ...]]) -> None:
    async with running(redis) as scene:
        for damage in damages:
            async with scene.damaged(damage[1], str(damage)):
                scene.damage(*damage)
                await aeventually(scene.healed)
                await aeventually(lambda name=damage[1]: not scene.changed_but(name))


# Those that each request reads or writes, and one that none does; all in the long run.
UNDER_TRAFFIC = [*HOT, "engine_keys", f"node:{A}"]


@pytest.mark.parametrize(
    "names",
    [
        *[pytest.param(UNDER_TRAFFIC[i::2], id=f"part{i}") for i in range(2)],
        *[pytest.param([name], marks=pytest.mark.long) for name in KEYS if name not in UNDER_TRAFFIC],
    ],
)
async def test_damage_is_healed_under_traffic_and_no_request_fails(redis: Space, names: list[str]) -> None:
    async with running(redis) as scene:
        for name in names:
            async with scene.damaged(name, "under traffic"), Load(scene.made) as load:
                scene.write_over(name, "list" if type_of(name) == "string" else "string")
                await load.more(50)
                await aeventually(lambda name=name: redis.cli("TYPE", redis.key(name)) in (type_of(name), "none"))
                for damage in DAMAGES.get(name, []):
                    scene.damage(*damage)
                    await load.more(20)
                await load.stop()
                assert load.failures == []
                await aeventually(scene.healed)


@pytest.mark.parametrize(
    "type_", [pytest.param(type_, marks=[] if type_ in ("hash", "string") else pytest.mark.wide) for type_ in WRITE]
)
async def test_all_keys_at_once_at_the_pace_of_a_real_worker(redis: Space, type_: str) -> None:
    async with running(redis, pace=1) as scene:
        for name in KEYS:
            if type_of(name) != type_:
                scene.write_over(name, type_)
        since_s = time.monotonic()
        await aeventually(scene.counted, within_s=2.0)
        await aeventually(scene.healed, within_s=5.0 - (time.monotonic() - since_s))


MEND_THEMSELVES = ("unfinished", "unfinished:w1")


# --- that it is this what heals -------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in KEYS if name not in MEND_THEMSELVES])
async def test_without_the_mechanism_it_is_not_healed(redis: Space, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(redis) as scene:

        async def look_away(*_: object) -> bool:
            return False

        with monkeypatch.context() as patch:
            patch.setattr(registry_module, "heal", look_away)
            scene.write_over(name, "list" if type_of(name) == "stream" else "stream")
            for _ in range(3):
                await asyncio.sleep(1.0 / PACE)
                with pytest.raises(AssertionError):
                    scene.healed()
        await aeventually(scene.healed)
        await scene.goes_on()


READ = ["version", "nodes", "engine_keys", f"node:{A}", "unfinished", f"latency:{A}"]


@pytest.mark.parametrize("name", HOT)
async def test_a_request_that_meets_damage_is_counted_and_heals_without_a_prober(redis: Space, name: str) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy="min_observed_latency") as worker:
        await worker.add_ready(A)
        redis.cli("DEL", redis.key(name))
        redis.cli("XADD", redis.key(name), "*", "f", "x")
        tickets = await worker.take(3)

        def counted() -> bool:
            assert redis.cli("TYPE", redis.key(name)) in (type_of(name), "none")
            return worker.shared and ledger_of(redis, "w1") == {A: 3}

        await aeventually(counted)
        # What a ledger said before it was lost is still in the total: the one thing that takes a recount.
        keys = worker.keys
        _, corrected = await worker.registry.run(
            "recount_unfinished", [keys.unfinished, keys.workers, keys.load_index, keys.ledger("w1")], ["w1"]
        )
        assert corrected == (name == "unfinished:w1")
        assert totals(redis) == {A: 3}
        give_back(tickets, succeeded=True)
        await aeventually(lambda: worker.shared and totals(redis) == {})


@pytest.mark.parametrize("name", READ)
async def test_a_look_at_the_nodes_that_meets_damage_is_answered_without_a_prober(redis: Space, name: str) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A, key=SECRET)
        tickets = await worker.take(2)
        redis.cli("DEL", redis.key(name))
        redis.cli("XADD", redis.key(name), "*", "f", "x")
        await worker.registry.verify()
        status = await worker.registry.status()
        assert list(status) == [A]
        assert worker.registry.snapshot.engine_keys == {A: SECRET}
        give_back(tickets)


# --- one by one -----------------------------------------------------------------------------------


async def test_no_value_is_ever_logged(redis: Space, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with running(redis) as scene:
            redis.cli("DEL", redis.key("engine_keys"))
            redis.cli("RPUSH", redis.key("engine_keys"), SECRET)
            await aeventually(scene.healed)
            redis.cli("HSET", redis.key("unfinished"), A, SECRET)
            await aeventually(scene.healed)
    assert "engine_keys' was a list and no hash; it is replaced" in caplog.text
    assert SECRET not in caplog.text


async def test_the_counts_of_a_dead_worker_with_an_endless_lease_are_given_back(redis: Space) -> None:
    async with running(redis) as scene:
        redis.cli("HSET", redis.key("sessions"), "dead", "1")
        redis.cli("HSET", redis.key("unfinished:dead"), A, "5")
        redis.cli("ZADD", redis.key("workers"), "+inf", "dead")
        await aeventually(scene.healed)
        assert not redis.cli("EXISTS", redis.key("unfinished:dead"))


async def test_a_worker_that_finds_a_newer_generation_when_it_joins_goes_beyond_it(redis: Space) -> None:
    in_an_hour_ms = round((time.time() + 3600) * 1000)
    redis.cli("HSET", redis.key("sessions"), "w1", in_an_hour_ms)
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await aeventually(lambda: worker.shared)
        assert redis.cli("HGET", redis.key("sessions"), "w1") == str(in_an_hour_ms + 1)


async def test_a_lease_on_probing_that_is_longer_than_any_is_nobodys_but_is_not_given_back_by_others(
    redis: Space,
) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:

        async def hold(holder: str, lease_ms: int) -> list[int]:
            code: list[int] = await worker.registry.run("hold_lease", [worker.keys.prober], [holder, lease_ms])
            return code

        assert await hold("w1", 3000) == [0]
        assert await hold("w2", 3000) == [10]
        assert await hold("w2", 0) == [10]
        assert redis.cli("GET", worker.keys.prober) == "w1"
        redis.cli("SET", worker.keys.prober, "nobody", "PX", "3600000")
        assert await hold("w2", 0) == [10]
        assert await hold("w2", 3000) == [0]
        assert redis.cli("GET", worker.keys.prober) == "w2"
        assert redis.cli("PTTL", worker.keys.prober) <= 3000


@pytest.mark.parametrize("version", [None, "0", "abc"])
async def test_a_registry_whose_version_was_lost_while_nobody_ran_is_taken_as_it_is(
    redis: Space, version: str | None
) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A, key=SECRET)
    redis.cli("DEL", worker.keys.version)
    redis.cli("SADD", worker.keys.nodes, B)  # without a hash: damaged
    if version is not None:
        redis.cli("SET", worker.keys.version, version)
    async with Worker(redis.url, redis.namespace, "w2") as worker:
        await worker.registry.verify()
        await worker.registry.verify()
        assert list(worker.registry.snapshot.nodes) == [A]
        assert redis.cli("SMEMBERS", worker.keys.nodes) == {A}
        assert worker.registry.snapshot.engine_keys == {A: SECRET}
        give_back(await worker.take(1))


async def test_a_call_that_met_what_another_worker_had_just_healed_is_made_again(
    redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        redis.cli("DEL", worker.keys.last_success)
        redis.cli("SET", worker.keys.last_success, "x")
        heal: Callable[..., Any] = registry_module.heal

        async def too_late(*arguments: Any) -> bool:
            assert await heal(*arguments)
            found: bool = await heal(*arguments)
            assert not found
            return found

        monkeypatch.setattr(registry_module, "heal", too_late)
        assert await worker.registry.remove(A)
        assert worker.registry.snapshot.nodes == {}
        assert not redis.cli("EXISTS", worker.keys.last_success)
        with pytest.raises(Exception, match="no node"):
            of()(worker.registry.snapshot)
