"""A plain-Python model of the shared state beside the real one: after every step, whatever it was, both are the same.

The model is written from what the headers of the scripts promise. The machine knows besides, for each worker, what
is true of it (what it would restate); `heal` checks that this is what Redis says once everybody has spoken.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis as redis_client
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from app.balancing import DECIDE_BY_LEARNED, POLICIES, Candidate
from app.store.keys import Keys
from app.store.load_index import BY, By
from app.store.scripts import load_scripts
from tests.support.redis import PrivateRedis

SCRIPTS = load_scripts()
URLS = ("http://a", "http://b", "http://c")
WORKERS = ("w1", "w2", "w3")
WINDOW = 3
THRESHOLD = 2
"""Failures in a row that open a breaker."""
SPEEDS = {"http://a": 1.0, "http://b": 2.0, "http://c": 1.0}
GROUPS = (("http://a", "http://b"), ("http://c",))
GROUP_OF = {url: number for number, group in enumerate(GROUPS) for url in group}
MEMBERS = {url: f"{speed!r} {url}" for url, speed in SPEEDS.items()}


def order_of(version: int) -> str:
    """The name of the groups at a version."""
    return f"{version}:ab12"


urls = st.sampled_from(URLS)
names = st.sampled_from(WORKERS)
draws = st.tuples(st.sampled_from([0.0, 0.4, 0.7, 0.99]), st.sampled_from([0.001, 0.05, 0.5]))
pools = st.lists(urls, min_size=1, max_size=3, unique=True)


@dataclass
class Shared:
    """What Redis holds, by key."""

    unfinished: dict[str, int] = field(default_factory=dict)
    ledgers: dict[str, dict[str, int]] = field(default_factory=dict)
    sessions: dict[str, int] = field(default_factory=dict)
    leases: dict[str, bool] = field(default_factory=dict)  # worker -> whether it still runs
    version: int = 0
    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    engine_keys: dict[str, str] = field(default_factory=dict)
    latency: dict[str, list[float]] = field(default_factory=dict)
    latency_mean: dict[str, float] = field(default_factory=dict)
    explored: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    last_success: set[str] = field(default_factory=set)

    def count(self, url: str, by: int) -> None:
        total = self.unfinished.get(url, 0) + by
        self.unfinished[url] = total
        if by < 0 and total <= 0:
            del self.unfinished[url]

    def mean(self, url: str) -> float | None:
        return self.latency_mean.get(url)

    def forget_history(self, url: str) -> None:
        for history in (self.latency, self.latency_mean, self.explored, self.failures):
            history.pop(url, None)  # type: ignore[attr-defined]
        self.last_success.discard(url)


@dataclass
class Truth:
    """One worker as it knows itself."""

    generation: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    snapshot: tuple[int, dict[str, dict[str, str]], dict[str, str]] = (0, {}, {})
    alive: bool = True


class Machine(RuleBasedStateMachine):
    def __init__(self, client: redis_client.Redis) -> None:
        super().__init__()
        self.client = client
        self.keys = Keys("model")
        self.model = Shared()
        self.truth = {name: Truth() for name in WORKERS}
        self.generations = 0
        self.damaged = False  # somebody deleted or edited what counts
        self.misplaced = False  # the same, since the loads were last ordered
        self.by = By.GIVEN  # what they are ordered by
        self.copy: tuple[Shared, dict[str, bytes]] | None = None
        self.copy_damaged = False
        client.flushall()

    # --- calling ----------------------------------------------------------------------------------

    def run(self, script: str, keys: list[str], args: list[Any]) -> list[int]:
        command = SCRIPTS[script].evalsha(keys, args)
        reply: list[int] = self.client.execute_command("EVAL", SCRIPTS[script].text, *command[2:])
        return reply

    def counting_keys(self, worker: str) -> list[str]:
        return [self.keys.unfinished, self.keys.ledger(worker), self.keys.sessions]

    def restate(self, worker: str, generation: int, counts: dict[str, int]) -> int:
        """The script and the model's idea of it; the code."""
        flat = [part for item in counts.items() for part in item]
        keys = [*self.counting_keys(worker), self.keys.workers, self.keys.version, self.keys.load_index]
        keys.append(self.keys.restating)
        reply = self.run("restate", keys, [worker, generation, 60_000, 3000, *flat])
        model = self.model
        registered = model.sessions.get(worker)
        if registered is not None and registered > generation:
            assert reply == [4, model.version, registered, 0]
            return 4
        before = model.ledgers.pop(worker, {})
        for url in before.keys() | counts.keys():
            by = counts.get(url, 0) - before.get(url, 0)
            if by:
                model.count(url, by)
                if model.unfinished.get(url, 0) <= 0:
                    model.unfinished.pop(url, None)
        if counts:
            model.ledgers[worker] = dict(counts)
        model.leases[worker] = True
        model.sessions[worker] = generation
        assert reply == [0, model.version, int(registered == generation), len(model.leases)]
        return 0

    def new_generation(self, worker: str) -> int:
        self.generations += 1
        self.truth[worker].generation = self.generations
        return self.generations

    def acquire_as(
        self, worker: str, generation: int, policy: str, pool: list[str], two: tuple[float, float], version: str
    ) -> str | None:
        """The node it was counted on, None where it was refused."""
        keys = [*self.counting_keys(worker), self.keys.version, self.keys.latency_mean, self.keys.explored]
        keys += [self.keys.load_index, self.keys.learned, self.keys.learned_since]
        since, learned = [""] if policy in DECIDE_BY_LEARNED else [], self.learned()
        said = [*since, len(pool), *pool, *(repr(SPEEDS[url]) for url in pool), *map(repr, two)]
        reply = self.run(f"acquire_{policy}", keys, [worker, generation, version, *said])
        model = self.model
        if model.sessions.get(worker) != generation:
            assert reply == [1, model.version]
            return None
        if version not in ("", str(model.version)):
            assert reply == [2, model.version]
            return None
        candidates = [
            Candidate(
                SPEEDS[url], model.unfinished.get(url, 0), model.mean(url), model.explored.get(url, 0), learned.get(url)
            )
            for url in pool
        ]
        index, exploring = POLICIES[policy](candidates, two)
        assert reply[:3] == [0, model.version, index + 1]
        url = pool[index]
        model.count(url, 1)
        ledger = model.ledgers.setdefault(worker, {})
        ledger[url] = ledger.get(url, 0) + 1
        if exploring:
            model.explored[url] = model.explored.get(url, 0) + 1
        return url

    def release_as(
        self, worker: str, generation: int, url: str, latency_s: float | None, off_by: int | None = None
    ) -> int:
        """`off_by`: of the registry version in which it looked for the node's group; None: it did not look."""
        keys = [*self.counting_keys(worker), self.keys.version, self.keys.failures, self.keys.load_index]
        words: list[Any] = [worker, generation, url, int(latency_s is not None)]
        if off_by is None:
            words.append("")
        else:
            keys += [self.keys.load(GROUP_OF[url]), *self.more_keys]
            words += [order_of(self.model.version + off_by), repr(SPEEDS[url]), MEMBERS[url]]
        code, version = self.run("release", keys, words)
        model = self.model
        assert version == model.version
        if model.sessions.get(worker) != generation:
            assert code == 1
            return code
        if latency_s is not None:
            model.failures.pop(url, None)
        ledger = model.ledgers.get(worker, {})
        if ledger.get(url, 0) <= 0:
            assert code == 3
            return code
        ledger[url] -= 1
        if not ledger[url]:
            del ledger[url]
        if not ledger:
            model.ledgers.pop(worker)
        model.count(url, -1)
        assert code == 0
        return code

    def note_latencies(self, fresh: dict[str, list[float]]) -> None:
        """url -> latencies, oldest first: the script and the model's idea of it."""
        keys = [self.keys.nodes, self.keys.latency_mean, self.keys.explored, self.keys.last_success]
        flat = [part for url, some in fresh.items() for part in (url, len(some), *map(repr, some))]
        assert self.run("note_latencies", [*keys, *map(self.keys.latency, fresh)], [WINDOW, *flat]) == [0]
        model = self.model
        for url in fresh.keys() & model.nodes.keys():
            model.latency[url] = [*reversed(fresh[url]), *model.latency.get(url, [])][:WINDOW]
            model.latency_mean[url] = sum(model.latency[url]) / len(model.latency[url])
            model.explored.pop(url, None)
            model.last_success.add(url)

    def learned(self) -> dict[str, float]:
        """What they are is tested elsewhere; here, that decisions go by those of the moment."""
        return {url: float(speed) for url, speed in texts(self.client.hgetall(self.keys.learned)).items()}

    @property
    def more_keys(self) -> list[str]:
        """Behind those of the groups."""
        return [self.keys.learned, self.keys.load_sums] if self.by == By.LEARNED else []

    @rule(
        fresh=st.dictionaries(urls, st.sampled_from([1.0, 3.0, 700.0]), min_size=1), off_by=st.sampled_from([0, 0, 1])
    )
    def learn(self, fresh: dict[str, float], off_by: int) -> None:
        """`off_by`: of the registry version in which the nodes' groups were looked for."""
        keys = self.keys
        off_by = off_by or int(self.by == By.GIVEN)  # who learns knows no order by given speeds
        names = [keys.nodes, keys.unfinished, keys.learned, keys.learned_since, keys.load_index, keys.load_sums]
        words: list[Any] = ["", order_of(self.model.version + off_by)]
        for url, rate in fresh.items():
            names += [keys.learning(url), keys.load(GROUP_OF[url])]
            words += [url, repr(SPEEDS[url]), 1, repr(rate)]
        assert self.run("learn_speeds", names, words) == [0]
        assert fresh.keys() & self.model.nodes.keys() <= self.learned().keys()

    # --- requests ---------------------------------------------------------------------------------

    @initialize(by=st.sampled_from(By))
    def begin(self, by: By = By.GIVEN) -> None:
        self.by = by
        for worker in WORKERS[:2]:
            self.join(worker)
        for url in URLS[:2]:
            self.add_node(url, key="", speed="")

    @rule(worker=names)
    def join(self, worker: str) -> None:
        """A new connection: after an error, a lost reply, a restart of Redis."""
        self.truth[worker].alive = True
        assert self.restate(worker, self.new_generation(worker), self.truth[worker].counts) == 0

    @rule(worker=names)
    def renew(self, worker: str) -> None:
        truth = self.truth[worker]
        if truth.alive and truth.generation:
            self.restate(worker, truth.generation, truth.counts)

    @rule(worker=names, policy=st.sampled_from(sorted(POLICIES)), pool=pools, two=draws, lost=st.booleans())
    def acquire(self, worker: str, policy: str, pool: list[str], two: tuple[float, float], lost: bool) -> None:
        truth = self.truth[worker]
        if not truth.alive:
            return
        url = self.acquire_as(worker, truth.generation, policy, pool, two, str(self.model.version))
        if url is not None and not lost:
            truth.counts[url] = truth.counts.get(url, 0) + 1
        if lost:  # nobody knows what ran: what follows such an error is a new connection
            self.join(worker)

    @rule(off_by=st.sampled_from([0, 0, 0, -1, 1]))
    def order_loads(self, off_by: int) -> None:
        ordered = self.ordered()
        names = [
            self.keys.unfinished,
            self.keys.version,
            self.keys.load_index,
            *map(self.keys.load, range(len(GROUPS))),
            *self.more_keys,
        ]
        words = [word for group in GROUPS for word in (len(group), *map(MEMBERS.__getitem__, group))]
        version = self.model.version + off_by
        reply = self.run("index_loads", names, [version, order_of(version), 600_000, self.by, *words])
        assert reply == [2 if off_by else 8 if ordered else 0, self.model.version]
        assert self.ordered() or off_by

    def ordered(self) -> bool:
        return bool(self.client.get(self.keys.load_index) == order_of(self.model.version).encode())

    @rule(
        worker=names,
        wanted=st.lists(st.sampled_from([(0,), (1,), (0, 1)]), min_size=1, max_size=2),
        two=draws,
        off_by=st.sampled_from([0, 0, 0, 1]),
    )
    def acquire_least_loaded(
        self, worker: str, wanted: list[tuple[int, ...]], two: tuple[float, float], off_by: int
    ) -> None:
        """One pool for each of `wanted`, which is some groups."""
        model, truth, ordered = self.model, self.truth[worker], self.ordered()
        if not truth.alive:
            return
        flat = [number for groups in wanted for number in groups]
        names = [*self.counting_keys(worker), self.keys.version, self.keys.load_index, *map(self.keys.load, flat)]
        names += self.more_keys
        words = [
            word for groups in wanted for word in (len(groups), *map(repr, two if self.by == By.LEARNED else two[:1]))
        ]
        placed, learned = self.placed(), self.learned()
        (policy,) = [name for name, by in BY.items() if by == self.by]
        reply: list[Any] = self.run(
            "acquire_least_loaded",
            names,
            [worker, truth.generation, model.version + off_by, order_of(model.version), self.by, *words],
        )
        if model.sessions.get(worker) != truth.generation:
            assert reply == [1, model.version]
        elif off_by:
            assert reply == [2, model.version]
        elif not ordered or reply[0] == 6:
            assert reply == [6, model.version]
            assert not ordered or (self.misplaced and not self.ordered())
        else:
            assert reply[:2] == [0, model.version]
            chosen = [member.decode().split(" ")[1] for member in reply[2:]]
            for groups, url in zip(wanted, chosen, strict=True):
                # As the policy, to which they are given as they stand: so is their order among equals.
                in_order = sorted(
                    (u for number in groups for u in GROUPS[number]), key=lambda u: (GROUP_OF[u], placed[u], MEMBERS[u])
                )
                candidates = [
                    Candidate(SPEEDS[u], model.unfinished.get(u, 0), learned=learned.get(u)) for u in in_order
                ]
                if not self.misplaced:
                    assert url == in_order[POLICIES[policy](candidates, two)[0]]
            for url in chosen:
                model.count(url, 1)
                ledger = model.ledgers.setdefault(worker, {})
                ledger[url] = ledger.get(url, 0) + 1
                truth.counts[url] = truth.counts.get(url, 0) + 1

    def placed(self) -> dict[str, float]:
        """Where each node must stand: by learned speeds those that are not learned before all others."""
        counts, learned = self.model.unfinished, self.learned()
        if self.by == By.GIVEN:
            return {url: counts.get(url, 0) / speed for url, speed in SPEEDS.items()}
        return {
            url: (counts.get(url, 0) + 1) / learned[url] if url in learned else -speed / (counts.get(url, 0) + 1)
            for url, speed in SPEEDS.items()
        }

    @invariant()
    def compare_order(self) -> None:
        """As long as the index says so, every node stands where its load is."""
        if not self.ordered():
            self.misplaced = self.misplaced and self.client.exists(self.keys.load_index) == 1
        elif not self.misplaced:
            placed, learned = self.placed(), self.learned()
            for number, group in enumerate(GROUPS):
                found = self.client.zrange(self.keys.load(number), 0, -1, withscores=True)
                assert {member.decode(): score for member, score in found} == {
                    MEMBERS[url]: placed[url] for url in group
                }
                if self.by == By.LEARNED:
                    total = sum(learned[url] / SPEEDS[url] for url in group if url in learned)
                    kept = float(self.client.hget(self.keys.load_sums, self.keys.load(number)))
                    assert kept == pytest.approx(total, rel=1e-9)

    @rule(worker=names, pool=pools, two=draws, off_by=st.sampled_from([-1, 1]))
    def acquire_with_another_version(self, worker: str, pool: list[str], two: tuple[float, float], off_by: int) -> None:
        truth = self.truth[worker]
        version = str(self.model.version + off_by)
        assert self.acquire_as(worker, truth.generation, "random", pool, two, version) is None

    @rule(worker=names, pool=pools, two=draws)
    def acquire_with_any_version(self, worker: str, pool: list[str], two: tuple[float, float]) -> None:
        truth = self.truth[worker]
        url = self.acquire_as(worker, truth.generation, "min_expected_latency", pool, two, "") if truth.alive else None
        if url is not None:
            truth.counts[url] = truth.counts.get(url, 0) + 1

    @rule(
        worker=names,
        latency_s=st.sampled_from([None, 0.25, 0.5, 1.0]),
        off_by=st.sampled_from([0, 0, 0, 0, None, -1, 1]),
        sent=st.booleans(),
        data=st.data(),
    )
    def release(self, worker: str, latency_s: float | None, off_by: int | None, sent: bool, data: Any) -> None:
        truth = self.truth[worker]
        if not truth.alive or not truth.counts:
            return
        url = data.draw(st.sampled_from(sorted(truth.counts)))
        truth.counts[url] -= 1
        if not truth.counts[url]:
            del truth.counts[url]
        if not sent:  # Redis was away
            self.join(worker)
        elif self.release_as(worker, truth.generation, url, latency_s, off_by) != 0:
            self.renew(worker)

    @rule(fresh=st.dictionaries(urls, st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=1, max_size=WINDOW)))
    def latencies(self, fresh: dict[str, list[float]]) -> None:
        self.note_latencies(fresh)

    @rule(worker=names, url=urls)
    def release_what_was_never_counted(self, worker: str, url: str) -> None:
        if url not in self.model.ledgers.get(worker, {}):
            assert self.release_as(worker, self.truth[worker].generation, url, None) in (1, 3)

    @rule(worker=names, what=st.sampled_from(["acquire", "release", "restate"]), url=urls)
    def zombie(self, worker: str, what: str, url: str) -> None:
        """What an older connection of the worker left in a socket runs now."""
        older = self.truth[worker].generation - 1
        if older < 1:
            return
        known = self.model.sessions.get(worker) == self.truth[worker].generation
        if what == "acquire":
            assert self.acquire_as(worker, older, "random", [url], (0.0, 0.0), "") is None or not known
        elif what == "release":
            assert self.release_as(worker, older, url, 0.5) == 1 or not known
        elif known:
            assert self.restate(worker, older, {url: 7}) == 4

    # --- workers die ------------------------------------------------------------------------------

    @rule(worker=names)
    def crash(self, worker: str) -> None:
        self.truth[worker].alive = False
        self.truth[worker].counts = {}

    @rule(worker=names)
    def lease_ends(self, worker: str) -> None:
        if worker in self.model.leases:
            self.client.zadd(self.keys.workers, {worker: 1})
            self.model.leases[worker] = False

    @rule(worker=names, certain=st.booleans())
    def give_up(self, worker: str, certain: bool) -> None:
        model = self.model
        if certain and self.truth[worker].alive:
            return  # who is known to have died is dead
        names = [*self.counting_keys(worker), self.keys.workers, self.keys.handing(worker), self.keys.load_index]
        reply = self.run("give_up_worker", names, [worker, "1" if certain else "0"])
        if not certain and model.leases.get(worker, False):
            assert reply == [5, 0]
            return
        share = model.ledgers.pop(worker, {})
        for url, count in share.items():
            model.count(url, -count)
        model.leases.pop(worker, None)
        model.sessions.pop(worker, None)
        assert reply == [0, sum(share.values())]

    # --- Redis is damaged, and mended -------------------------------------------------------------

    @rule()
    def flushall(self) -> None:
        self.client.flushall()
        self.model = Shared()
        self.damaged = False

    @rule(data=st.data())
    def delete_any_key(self, data: Any) -> None:
        model, keys = self.model, self.keys
        there = sorted(key.decode() for key in self.client.keys(keys.prefix + "*"))
        if not there:
            return
        key = data.draw(st.sampled_from(there))
        self.client.delete(key)
        name = key.removeprefix(keys.prefix)
        if name.startswith("unfinished:"):
            model.ledgers.pop(name.removeprefix("unfinished:"))
        elif name.startswith("latency:"):
            del model.latency[name.removeprefix("latency:")]
        elif name.startswith("node:"):
            model.nodes[name.removeprefix("node:")].clear()
        elif name == "workers":
            model.leases.clear()
        elif name == "version":
            model.version = 0
        elif name == "nodes":
            self.forget_the_set_of_nodes()
        elif name.startswith(("load", "learn")) or name == "restating":
            pass
        else:
            getattr(model, name).clear()
        self.damaged |= name in ("unfinished", "workers") or name.startswith("unfinished:")
        self.misplaced |= name in ("unfinished", "learned", "load_sums") or name.startswith("load:")

    def forget_the_set_of_nodes(self) -> None:
        # Hashes without their member in the set are nobody's: away with them, here and there.
        for url in self.model.nodes:
            self.client.delete(self.keys.node(url))
        self.model.nodes.clear()

    @rule(url=urls, count=st.integers(1, 9))
    def edit_a_total(self, url: str, count: int) -> None:
        self.client.hset(self.keys.unfinished, url, count)
        self.model.unfinished[url] = count
        self.damaged = self.misplaced = True

    @rule(worker=names, url=urls, count=st.integers(1, 9))
    def edit_a_ledger(self, worker: str, url: str, count: int) -> None:
        self.client.hset(self.keys.ledger(worker), url, count)
        self.model.ledgers.setdefault(worker, {})[url] = count
        self.damaged = True

    @rule()
    def recount(self) -> None:
        model = self.model
        members = sorted(model.leases)
        keys = [self.keys.unfinished, self.keys.workers, self.keys.load_index]
        reply = self.run("recount_unfinished", [*keys, *map(self.keys.ledger, members)], members)
        sums: dict[str, int] = {}
        for worker in members:
            for url, count in model.ledgers.get(worker, {}).items():
                sums[url] = sums.get(url, 0) + count
        wrong = {url for url in sums.keys() | model.unfinished.keys() if sums.get(url) != model.unfinished.get(url)}
        assert reply == [0, len(wrong)]
        model.unfinished = sums

    @precondition(lambda self: self.model.leases)
    @rule()
    def recount_of_other_workers_than_there_are(self) -> None:
        others = sorted(self.model.leases)[:-1]
        keys = [self.keys.unfinished, self.keys.workers, self.keys.load_index]
        assert self.run("recount_unfinished", [*keys, *map(self.keys.ledger, others)], others) == [2, 0]
        assert self.run("recount_unfinished", [*keys, *map(self.keys.ledger, [*others, "x"])], [*others, "x"]) == [2, 0]

    @rule()
    def heal(self) -> None:
        """Everybody restates, the dead are given up, one recount: then all is as it truly is."""
        for worker, truth in self.truth.items():
            if truth.alive:
                self.join(worker)
            else:
                self.give_up(worker, certain=True)
        self.recount()
        self.damaged = False
        true: dict[str, int] = {}
        for worker, truth in self.truth.items():
            assert self.model.ledgers.get(worker, {}) == truth.counts
            for url, count in truth.counts.items():
                true[url] = true.get(url, 0) + count
        assert self.model.unfinished == true
        self.compare_counts()

    # --- the registry -----------------------------------------------------------------------------

    def node_keys(self, url: str) -> list[str]:
        return [self.keys.nodes, self.keys.node(url), self.keys.version]

    @rule(url=urls, key=st.sampled_from(["", "k1", "k2"]), speed=st.sampled_from(["", "2.0"]))
    def add_node(self, url: str, key: str, speed: str) -> None:
        model = self.model
        said = {"state": "pending", "speed": speed, "static": "0", "drain_until_ms": "0"}
        flat = [part for item in said.items() for part in item]
        keys = [*self.node_keys(url), self.keys.engine_keys, self.keys.failures]
        reply = self.run("add_node", keys, [url, key, "", *flat])
        model.failures.pop(url, None)
        before = model.nodes.get(url)
        model.version += 1
        version = str(model.version)
        order = before.get("order", version) if before else version
        model.nodes[url] = {**said, "order": order, "incarnation": version, "life": version}
        if key:
            model.engine_keys[url] = key
        assert reply == [9 if before else 0, model.version]

    @rule(url=urls, state=st.sampled_from(["ready", "down", "asleep"]), stale=st.booleans())
    def set_state(self, url: str, state: str, stale: bool) -> None:
        model = self.model
        node = model.nodes.get(url, {})
        incarnation = "none" if stale else node.get("incarnation", "")
        reply = self.run("set_node_state", self.node_keys(url), [url, incarnation, state, "", "reason", "words"])
        if url not in model.nodes:
            assert reply == [6, model.version]
        elif stale or node.get("state") == "draining":
            assert reply == [7, model.version]
        elif node.get("state") == state and node.get("reason") == "words":
            assert reply == [8, model.version]
        else:
            model.version += 1
            code = 9 if node.get("state") == state else 0
            node.update(state=state, reason="words")
            assert reply == [code, model.version]

    @rule(url=urls, drain_ms=st.sampled_from([0, 3_600_000]))
    def drain(self, url: str, drain_ms: int) -> None:
        model = self.model
        reply = self.run("set_node_state", self.node_keys(url), [url, "", "draining", drain_ms])
        if url not in model.nodes:
            assert reply == [6, model.version]
            return
        code = 9 if model.nodes[url].get("state") == "draining" else 0
        model.nodes[url].update(state="draining", drain_until_ms=str(drain_ms))
        model.version += 1
        assert reply == [code, model.version]

    @rule(url=urls, when=st.sampled_from(["now", "drained", "this one", "another one"]))
    def remove_node(self, url: str, when: str) -> None:
        model = self.model
        node = model.nodes.get(url, {})
        said = {"this one": node.get("incarnation", "0"), "another one": "999999"}.get(when, when)
        keys = [*self.node_keys(url), self.keys.engine_keys, self.keys.latency(url), self.keys.latency_mean]
        keys += [self.keys.explored, self.keys.last_success, self.keys.unfinished, self.keys.stages(url)]
        keys += [self.keys.failures, self.keys.learned, self.keys.learning(url)]
        reply = self.run("remove_node", keys, [url, said])
        if url not in model.nodes:
            assert reply == [6, model.version]
            return
        late = node.get("drain_until_ms") == "0" or not model.unfinished.get(url)
        may = {
            "now": True,
            "drained": node.get("state") == "draining" and late,
            "this one": "incarnation" in node,
            "another one": False,
        }
        if not may[when]:
            assert reply == [7, model.version]
            return
        del model.nodes[url]
        model.engine_keys.pop(url, None)
        model.forget_history(url)
        model.version += 1
        assert reply == [0, model.version]

    # --- breakers: how long one stays open is left out, that is the clock's --------------------------

    @property
    def breaker_keys(self) -> list[str]:
        return [self.keys.version, self.keys.failures]

    @rule(url=urls)
    def fail_a_connection(self, url: str) -> None:
        model = self.model
        arguments = [url, THRESHOLD, 0, 60_000]
        names = [self.keys.node(url), *self.breaker_keys, self.keys.learned, self.keys.learned_since]
        names.append(self.keys.load_index)
        reply = self.run("record_failure", names, arguments)
        node = model.nodes.get(url)
        if not node:  # a deleted hash is no node
            assert reply == [6, model.version]
            return
        count = model.failures[url] = model.failures.get(url, 0) + 1
        breaker = node.get("breaker", "closed")
        if breaker == "open" or (breaker == "closed" and count < THRESHOLD):
            assert reply == [8, model.version]
            return
        in_a_row = breaker == "half_open" or count > THRESHOLD
        opens = int(node.get("breaker_opens", "0")) + 1 if in_a_row else 1
        node.update(breaker="open", breaker_opens=str(opens))
        model.version += 1
        assert reply == [0, model.version]

    @rule(url=urls, move=st.sampled_from(["half_open", "trial", "close", "close on probation"]))
    def move_breaker(self, url: str, move: str) -> None:
        model = self.model
        reply = self.run("move_breaker", [self.keys.node(url), *self.breaker_keys], [url, move, THRESHOLD])
        node = model.nodes.get(url, {})
        breaker = node.get("breaker", "closed")
        froms = {"half_open": ["open"], "close": ["open", "half_open"]}.get(move, ["half_open"])
        if breaker not in froms or (move == "trial" and reply[0] == 7):  # of trials: test_breakers.py
            assert reply == [7, model.version]
            return
        if move == "trial":
            assert reply == [0, model.version]
            return
        model.version += 1
        assert reply == [0, model.version]
        node["breaker"] = "half_open" if move == "half_open" else "closed"
        if move == "close":
            model.failures.pop(url, None)
            node.pop("breaker_opens", None)
        elif move == "close on probation":
            model.failures[url] = THRESHOLD

    def restore(self, worker: str, *, repair: bool) -> None:
        model = self.model
        version, nodes, engine_keys = self.truth[worker].snapshot
        extra = sorted(url for url in model.nodes if url not in nodes)
        names = [self.keys.nodes, self.keys.version, self.keys.engine_keys]
        arguments: list[Any] = [version, "1" if repair else "0", len(nodes)]
        for url, fields in nodes.items():
            arguments += [url, engine_keys.get(url, ""), len(fields), *(p for item in fields.items() for p in item)]
        reply = self.run("restore_registry", [*names, *map(self.keys.node, [*nodes, *extra])], [*arguments, *extra])
        newer = version > model.version
        if not newer and not (repair and version == model.version):
            assert reply == [8, model.version]
            return
        for url in extra:
            del model.nodes[url]
        model.nodes.update(copy.deepcopy(nodes))
        model.engine_keys = {url: engine_keys[url] for url in nodes if url in engine_keys}
        model.version = version if newer else version + 1
        assert reply == [0, model.version]

    def look(self, worker: str) -> None:
        """What a worker does at a look at the registry: take it if it is newer, restore it if it is older."""
        model, truth = self.model, self.truth[worker]
        if model.version < truth.snapshot[0]:
            self.restore(worker, repair=False)
        else:
            truth.snapshot = (model.version, copy.deepcopy(model.nodes), dict(model.engine_keys))

    @rule(worker=names)
    def one_looks(self, worker: str) -> None:
        if all(self.model.nodes.values()):  # a damaged hash is no node; test_registry has those
            self.look(worker)

    @rule(worker=names)
    def one_repairs(self, worker: str) -> None:
        self.restore(worker, repair=True)

    @rule()
    def save(self) -> None:
        keys = self.client.keys(self.keys.prefix + "*")
        self.copy = (copy.deepcopy(self.model), {key: self.client.dump(key) for key in keys})
        self.copy_damaged = self.damaged

    @rule(older_copy=st.booleans(), order=st.permutations(WORKERS))
    def redis_falls_back_and_all_look(self, older_copy: bool, order: list[str]) -> None:
        """A failover to an older replica, or to nothing; the workers come in any order."""
        for worker in WORKERS:  # one lineage: no two snapshots of one version that differ
            if self.truth[worker].snapshot[0] > self.model.version:
                return
        if self.copy is not None and self.copy[0].version > self.model.version:
            return
        held = [self.truth[worker].snapshot[:2] for worker in WORKERS]
        held += [(model.version, model.nodes) for model in (self.model, *([self.copy[0]] if self.copy else []))]
        if any(a[0] == b[0] and a[1] != b[1] for a in held for b in held):
            return  # a key was deleted behind the version's back, and not repaired yet
        newest = max((self.truth[worker].snapshot for worker in WORKERS), key=lambda snapshot: snapshot[0])
        self.flushall()
        if older_copy and self.copy is not None:
            self.model = copy.deepcopy(self.copy[0])
            self.damaged = self.copy_damaged
            for key, dump in self.copy[1].items():
                self.client.restore(key, 0, dump)
        if self.model.version > newest[0]:
            newest = (self.model.version, copy.deepcopy(self.model.nodes), {})
        for worker in [*order, *order]:
            self.look(worker)
        assert self.model.version == newest[0]
        assert self.model.nodes == newest[1]
        assert {self.truth[worker].snapshot[0] for worker in WORKERS} == {newest[0]}

    # --- after every step -------------------------------------------------------------------------

    @invariant()
    def compare_counts(self) -> None:
        keys, model = self.keys, self.model
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.unfinished)
            pipe.hgetall(keys.sessions)
            pipe.zrange(keys.workers, 0, -1)
            for worker in WORKERS:
                pipe.hgetall(keys.ledger(worker))
            total, sessions, leases, *ledgers = pipe.execute()
        counted = numbers(total)
        assert counted == model.unfinished
        shares = {worker: numbers(ledger) for worker, ledger in zip(WORKERS, ledgers, strict=True) if ledger}
        assert shares == model.ledgers
        assert numbers(sessions) == model.sessions
        assert {worker.decode() for worker in leases} == set(model.leases)
        assert all(count > 0 for hash_ in (counted, *shares.values()) for count in hash_.values())
        if not self.damaged:
            sums: dict[str, int] = {}
            for share in shares.values():
                for url, count in share.items():
                    sums[url] = sums.get(url, 0) + count
            assert counted == sums

    @invariant()
    def compare_registry(self) -> None:
        keys, model = self.keys, self.model
        with self.client.pipeline(transaction=False) as pipe:
            pipe.get(keys.version)
            pipe.smembers(keys.nodes)
            pipe.hgetall(keys.engine_keys)
            for url in URLS:
                pipe.hgetall(keys.node(url))
            version, members, engine_keys, *hashes = pipe.execute()
        assert int(version or 0) == model.version
        assert {url.decode() for url in members} == set(model.nodes)
        assert texts(engine_keys) == model.engine_keys
        for url, fields in zip(URLS, map(texts, hashes), strict=True):
            for by_the_clock in ("registered_at_ms", "state_since_ms", "breaker_until_ms", "trial_until_ms"):
                fields.pop(by_the_clock, None)
            expected = model.nodes.get(url, {})
            if fields.get("drain_until_ms", "0") != "0" and expected.get("state") == "draining":
                fields["drain_until_ms"] = expected["drain_until_ms"]  # a moment there, a duration here
            assert fields == expected

    @invariant()
    def compare_history(self) -> None:
        keys, model = self.keys, self.model
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.latency_mean)
            pipe.hgetall(keys.explored)
            pipe.hgetall(keys.failures)
            pipe.hkeys(keys.last_success)
            for url in URLS:
                pipe.lrange(keys.latency(url), 0, -1)
            means, explored, failures, successes, *windows = pipe.execute()
        assert {url: float(mean) for url, mean in texts(means).items()} == pytest.approx(model.latency_mean)
        assert numbers(explored) == model.explored
        assert numbers(failures) == model.failures
        assert {url.decode() for url in successes} == model.last_success
        kept = {url: [float(x) for x in window] for url, window in zip(URLS, windows, strict=True) if window}
        assert kept == model.latency

    def teardown(self) -> None:
        self.heal()


def texts(reply: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in reply.items()}


def numbers(reply: dict[bytes, bytes]) -> dict[str, int]:
    return {name.decode(): int(value) for name, value in reply.items()}


@pytest.fixture
def raw_client() -> Iterator[redis_client.Redis]:
    with PrivateRedis() as server, redis_client.Redis(unix_socket_path=str(server.socket)) as client:
        yield client


def test_the_shared_state_is_what_the_model_says_after_every_step(raw_client: redis_client.Redis) -> None:
    run_state_machine_as_test(
        lambda: Machine(raw_client),
        settings=settings(
            max_examples=15,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            # A failure is told at once, in up to 40 steps; Phase.shrink makes it short, in minutes.
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
        ),
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))])
@pytest.mark.parametrize("by", By)
def test_the_order_of_loads_is_right_whatever_changes_counts(raw_client: redis_client.Redis, by: By, seed: int) -> None:
    """Steps that concern it only: among all others it would be made too seldom."""
    machine, rng = Machine(raw_client), random.Random(seed)
    machine.begin(by)

    def release(off_by: int | None = 0) -> None:
        worker = rng.choice(WORKERS)
        truth = machine.truth[worker]
        if not truth.alive or not truth.counts:
            return
        url = rng.choice(sorted(truth.counts))
        truth.counts[url] -= 1
        truth.counts = {url: count for url, count in truth.counts.items() if count}
        if machine.release_as(worker, truth.generation, url, None, off_by):
            machine.renew(worker)

    def acquire() -> None:
        wanted = rng.choice([[(0,)], [(1,)], [(0, 1)], [(0,), (1,)]])
        two = rng.choice([0.0, 0.4, 0.7, 0.99]), rng.choice([0.001, 0.05, 0.5, 0.9])
        machine.acquire_least_loaded(rng.choice(WORKERS), wanted, two, 0)

    def learn(off_by: int = 0) -> None:
        machine.learn({rng.choice(URLS): 100 * rng.random()}, off_by)

    def come_back() -> None:
        """As `Registry._to_show_its_speed`."""
        machine.client.hdel(machine.keys.learned, rng.choice(URLS))
        machine.client.delete(machine.keys.learned_since, machine.keys.load_index)

    def acquire_by_arguments() -> None:
        two = (rng.random(), 0.5)
        machine.acquire(rng.choice(WORKERS), "min_expected_latency", rng.sample(URLS, 2), two, rng.random() < 0.2)

    def die() -> None:
        worker = rng.choice(WORKERS)
        machine.crash(worker)
        machine.give_up(worker, certain=True)

    def lose_the_version_and_get_it_again() -> None:
        """Meanwhile counts change."""
        version = machine.model.version
        machine.client.delete(machine.keys.version)
        machine.model.version = 0
        release(version)
        machine.client.set(machine.keys.version, version)
        machine.model.version = version

    def change_the_registry() -> None:
        machine.model.version = machine.client.incr(machine.keys.version)

    seldom = [
        change_the_registry,
        lambda: release(rng.choice([None, -1, 1])),
        acquire_by_arguments,
        die,
        lose_the_version_and_get_it_again,
        lambda: machine.edit_a_total(rng.choice(URLS), rng.randint(1, 9)),
        machine.recount,
        lambda: machine.edit_a_ledger(rng.choice(WORKERS), rng.choice(URLS), rng.randint(1, 9)),
        lambda: machine.renew(rng.choice(WORKERS)),
        lambda: machine.join(rng.choice(WORKERS)),
        lambda: machine.client.delete(machine.keys.load(0)) and setattr(machine, "misplaced", True),
    ]
    often = [acquire, release]
    if by == By.LEARNED:
        seldom += [come_back, come_back, lambda: learn(1), lambda: machine.fail_a_connection(rng.choice(URLS))]
        often = [acquire, acquire, release, release, learn]
    chosen = 0
    for _ in range(700):
        if not machine.ordered() and rng.random() < 0.5:
            machine.order_loads(0)
        (rng.choice(seldom) if rng.random() < 0.15 else rng.choice(often))()
        machine.compare_counts()
        machine.compare_order()
        chosen += machine.ordered() and not machine.misplaced
    assert chosen > 350
    machine.heal()
