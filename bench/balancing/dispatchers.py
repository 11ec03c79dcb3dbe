"""Who decides in the simulation: the perfect dispatcher, yardsticks, and Evenhand's own scripts on a real Redis."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from app.balancing import DECIDE_BY_LEARNED, POLICIES, Candidate
from app.balancing.learning import Learned, learn
from app.dispatch.work import TOKEN_BYTES, work_of
from app.store.keys import Keys
from app.store.scripts import load_scripts
from app.store.soon import NOTE_AFTER_S
from bench.balancing.simulation import Request, Scenario

if TYPE_CHECKING:
    from tests.support.redis import PrivateRedis

SCRIPTS = load_scripts()


class Knowing:
    """The least `score(unfinished, speed)` by true speeds, ties at random."""

    def __init__(self, scenario: Scenario, seed: int, score: Callable[[int, float], float]) -> None:
        self._speeds = list(scenario.speeds)
        self._score = score
        self._draws = random.Random(seed)

    def choose(self, request: Request, counts: Sequence[int], now_s: float) -> int:
        scores = [self._score(count, speed) for count, speed in zip(counts, self._speeds, strict=True)]
        least = min(scores)
        return self._draws.choice([node for node, score in enumerate(scores) if score == least])

    def finished(self, request: Request, now_s: float) -> None:
        pass

    def changed(self, node: int, speed: float) -> None:
        self._speeds[node] = speed


class Told(Knowing):
    """The same by the speeds that it was told once."""

    def changed(self, node: int, speed: float) -> None:
        pass


class TwoChoices(Told):
    """The less busy one of two: what the Rust routers call power_of_two."""

    def choose(self, request: Request, counts: Sequence[int], now_s: float) -> int:
        two = self._draws.sample(range(len(counts)), 2)
        return min(two, key=lambda node: counts[node])


class InTurn(Told):
    """One after the other."""

    _next = -1

    def choose(self, request: Request, counts: Sequence[int], now_s: float) -> int:
        self._next = (self._next + 1) % len(counts)
        return self._next


class Shared:
    """A strategy of Evenhand: its acquire, release and learning scripts on a real Redis, on the virtual clock.

    Args:
        workers: requests come to them at random; each tells what it has seen a quarter of a second together, as real
            ones do. Workers of one host and of several differ in nothing that a decision sees.
        told: whether the nodes have their true speeds; else all have the same.
    """

    def __init__(
        self,
        server: PrivateRedis,
        scenario: Scenario,
        seed: int,
        strategy: str,
        *,
        workers: int = 1,
        told: bool = False,
    ) -> None:
        self._run: Callable[..., Any] = server.client.execute_command
        self._draws = random.Random(seed)
        self.keys = keys = Keys("balance")
        server.client.flushall()
        self.urls = [f"http://node-{node}:8000" for node in range(len(scenario.speeds))]
        self._speeds = [repr(speed if told else 1.0) for speed in scenario.speeds]
        self._workers = [f"w{number}" for number in range(workers)]
        server.client.sadd(keys.nodes, *self.urls)
        server.client.set(keys.version, 1)
        server.client.hset(keys.sessions, mapping=dict.fromkeys(self._workers, 1))
        self._scripts = [SCRIPTS[name] for name in (f"acquire_{strategy}", "release", "learn_speeds", "note_latencies")]
        for script in self._scripts:
            server.client.script_load(script.text)
        self._learns = strategy in DECIDE_BY_LEARNED
        self._told: dict[str, list[Any]] = {}  # worker -> since when, and the speeds, as a reply said
        self.acquires, self.reads = 0, 0  # reads: those for which Redis had to read what was learned
        self._samples: dict[str, dict[str, list[float]]] = {worker: {} for worker in self._workers}
        self._due_s: dict[str, float] = {}

    def choose(self, request: Request, counts: Sequence[int], now_s: float) -> int:
        self._tell(now_s)
        request.worker = self._draws.choice(self._workers)
        code, *reply = self._run(*self.acquire_command(request.worker))
        if code == 7:  # who was told of all and finds one unlearned begins anew
            del self._told[request.worker]
            code, *reply = self._run(*self.acquire_command(request.worker))
        assert code == 0
        self.acquires += 1
        if len(reply) > 2:
            self._told[request.worker] = reply[2]
            self.reads += 1
        return int(reply[1]) - 1

    def hear(self, worker: str, *, told: bool) -> None:
        """Whether the worker's next acquires come with what is learned by now, if the strategy wants it."""
        self._told.pop(worker, None)
        if told and self._learns:
            *_, self._told[worker] = self._run(*self.acquire_command(worker))

    def acquire_command(self, worker: str) -> Sequence[Any]:
        keys, draws = self.keys, self._draws
        names = [keys.unfinished, keys.ledger(worker), keys.sessions, keys.version]
        names += [keys.latency_mean, keys.explored, keys.load_index]
        since, *speeds = self._told.get(worker, ["", *self._speeds])
        learned = [since] if self._learns else []
        if self._learns:
            names += [keys.learned, keys.learned_since]
        two = repr(draws.random()), repr(draws.random())
        words = [worker, 1, 1, *learned, len(self.urls), *self.urls, *speeds, *two]
        return self._scripts[0].evalsha(names, words)

    def finished(self, request: Request, now_s: float) -> None:
        self._tell(now_s)
        keys, url = self.keys, self.urls[request.node]
        worker = request.worker
        names = [keys.unfinished, keys.ledger(worker), keys.sessions, keys.version, keys.failures, keys.load_index]
        self._run(*self._scripts[1].evalsha(names, [worker, 1, url, "0" if request.failed else "1", ""]))
        if not self._learns:
            return
        if request.failed:
            names = [keys.node(url), keys.version, keys.failures, keys.learned, keys.learned_since, keys.load_index]
            self._run("HSET", keys.node(url), "state", "ready")
            failed = SCRIPTS["record_failure"]
            self._run("EVAL", failed.text, *failed.evalsha(names, [url, 1_000_000, 1, 1])[2:])
            return
        tokens: float = request.tokens
        if self._draws.random() < 0.5:  # no stream, and without usage: by its size
            tokens *= self._draws.uniform(0.8, 1.25)
        work = work_of(round(request.prompt_tokens * TOKEN_BYTES), tokens)
        self._samples[worker].setdefault(url, []).append(work / (now_s - request.at_s))
        self._due_s.setdefault(worker, now_s + NOTE_AFTER_S)

    def changed(self, node: int, speed: float) -> None:
        pass

    def _tell(self, now_s: float) -> None:
        keys = self.keys
        for worker in [one for one, due_s in self._due_s.items() if due_s <= now_s]:
            due_s = self._due_s.pop(worker)
            samples, self._samples[worker] = self._samples[worker], {}
            names = [keys.nodes, keys.unfinished, keys.learned, keys.learned_since, keys.load_index, keys.load_sums]
            words: list[Any] = [round(due_s * 1000), ""]
            for url, rates in samples.items():
                names += [keys.learning(url), keys.load(0)]
                words += [url, "", len(rates), *(f"{rate:.6g}" for rate in rates)]
            self._run(*self._scripts[2].evalsha(names, words))


class Twin:
    """least_expected_delay by its Python twins alone, as one worker would without Redis.

    Args:
        absent: node -> second from which on it is there.
    """

    def __init__(self, scenario: Scenario, seed: int, *, absent: dict[int, float] | None = None) -> None:
        self.learned: dict[int, Learned] = {}
        self.halved: dict[int, int] = {}
        self.chosen: list[tuple[float, int, list[int]]] = []  # second, node, counts before
        self._absent = absent or {}
        self._rates: dict[int, list[float]] = {}
        self._due_s = 0.0
        self._counts: Sequence[int] = [0] * len(scenario.speeds)
        self._draws = random.Random(seed)

    def choose(self, request: Request, counts: Sequence[int], now_s: float) -> int:
        self._tell(now_s)
        there = [node for node in range(len(counts)) if self._absent.get(node, 0.0) <= now_s]
        candidates = [Candidate(1.0, counts[node], learned=self._counted(node)) for node in there]
        index, _ = POLICIES["least_expected_delay"](candidates, (self._draws.random(), self._draws.random()))
        self.chosen.append((now_s, there[index], list(counts)))
        self._counts = counts
        return there[index]

    def finished(self, request: Request, now_s: float) -> None:
        node = request.node
        if request.failed:
            self.halved[node] = min(self.halved.get(node, 0) + 1, 4)
            return
        self.halved.pop(node, None)
        self._rates.setdefault(node, []).append(request.tokens / (now_s - request.at_s))
        self._tell(now_s)

    def changed(self, node: int, speed: float) -> None:
        pass

    def _counted(self, node: int) -> float | None:
        learned = self.learned.get(node)
        return learned.counted / 2 ** self.halved.get(node, 0) if learned else None

    def _tell(self, now_s: float) -> None:
        if now_s >= self._due_s:
            self._due_s = now_s + NOTE_AFTER_S
            rates, self._rates = self._rates, {}
            for node, some in rates.items():
                self.learned[node] = learn(self.learned.get(node), some, self._counts[node], now_s)
