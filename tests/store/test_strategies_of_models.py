"""A model with a routing strategy of its own, beside others that go by the deployment's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.errors import ConfigurationError
from app.settings import SOURCES_VARIABLE, Settings
from app.store.load_index import LARGE
from app.store.view import read_arrangement
from tests.store.harness import Worker, exact, give_back
from tests.support.redis import Space
from tests.support.wait import aeventually

FAST, SLOW = "http://10.0.0.1:23333", "http://10.0.0.2:23333"
OWN = {"by-latency": "min_observed_latency"}
MODELS = ("m", "by-latency")


async def prepared(worker: Worker, redis: Space) -> None:
    """Two nodes with history: FAST answers in 0.1 s, SLOW in 9 s."""
    for url in (FAST, SLOW):
        await worker.add_ready(url, models=MODELS)
    redis.client.hset(redis.key("latency_mean"), mapping={FAST: "0.1", SLOW: "9"})


async def test_each_model_is_routed_by_its_own_strategy_on_the_same_counts(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategies=OWN) as worker:
        await prepared(worker, redis)
        by_latency = await worker.take(6, "by-latency")
        assert [ticket.url for ticket in by_latency] == [FAST] * 6
        by_load = await worker.take(8, "m")  # until both have 7
        assert sorted(ticket.url for ticket in by_load) == [FAST] * 1 + [SLOW] * 7
        await aeventually(lambda: exact(redis, [worker]))
        give_back([*by_latency, *by_load])


async def test_while_redis_is_away_too_and_of_what_is_left_of_a_pool(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategies=OWN) as worker:
        await prepared(worker, redis)
        snapshot = worker.registry.snapshot
        pools = {model: snapshot.pool(model, snapshot.nodes[FAST].role) for model in MODELS}
        for url, latency_s in ((FAST, 0.1), (SLOW, 9.0)):
            worker.ledger.latencies.add(url, latency_s, snapshot.nodes)
        worker.ledger.counts = {FAST: 3}
        assert worker.ledger._choose([pools["by-latency"]]) == [FAST]
        assert worker.ledger._choose([pools["m"]]) == [SLOW]
        left = snapshot.without(pools["by-latency"], [SLOW])
        assert left is not None and left.model == "by-latency"
        worker.ledger.counts = {}


async def test_latencies_are_noted_at_once_where_any_model_goes_by_them(redis: Space) -> None:
    for strategies, noted in ((OWN, True), ({"x": "random"}, False)):
        async with Worker(redis.url, redis.namespace, "w1", strategies=strategies) as worker:
            await prepared(worker, redis)
            redis.client.delete(worker.keys.latency(FAST), worker.keys.latency(SLOW))
            (ticket,) = await worker.take(1, "m")
            ticket.release(succeeded=True)
            await worker.take_nothing()
            assert bool(redis.client.llen(worker.keys.latency(ticket.url))) is noted


@pytest.mark.parametrize(("strategies", "ordered"), [(None, True), ({"m": "min_expected_latency"}, True), (OWN, False)])
async def test_the_order_of_loads_is_for_fleets_that_go_by_load_alone(
    redis: Space, strategies: dict[str, str] | None, ordered: bool
) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategies=strategies) as worker:
        for number in range(LARGE):
            await worker.add_ready(f"http://10.0.1.{number}:1", models=MODELS)
        assert bool(len(worker.ledger._load_index())) is ordered
        tickets = await worker.take(5, "by-latency") + await worker.take(LARGE, "m")
        await aeventually(lambda: exact(redis, [worker]))
        give_back(tickets)


async def test_explain_goes_by_the_models_own(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategies=OWN) as worker:
        await prepared(worker, redis)
        for model, strategy, chance in (
            ("by-latency", "min_observed_latency", 1.0),
            ("m", "min_expected_latency", 0.5),
        ):
            found = await worker.view.explain(model)
            assert found["strategy"] == strategy
            chances = {one["node"]: one["chance"] for one in found["choices"][0]["candidates"]}
            assert chances[FAST] == chance


@pytest.mark.parametrize("text", ["", "no json", "[]", json.dumps({"by-latency": "unknown"})])
def test_what_redis_says_of_strategies_may_be_rubbish(text: str) -> None:
    said = {"strategy": "random", "encoder_policy": "weighted", "serving": "Hybrid", "strategies": text}
    found = read_arrangement(said)
    assert found is not None and found.strategy_of("by-latency") == "random"


# --- the settings


def test_flags_and_the_files_tables_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "evenhand.toml"
    path.write_text('[models."org/m 1"]\nrouting-strategy = "random"\n[models.n]\nrouting_strategy = "random"\n')
    found = Settings.load({"config": str(path)})
    assert found.strategies == {"org/m 1": "random", "n": "random"}
    assert Settings.load({"model_routing": ["a=b=random", "n=random"]}).strategies == {"a=b": "random", "n": "random"}
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(SOURCES_VARIABLE, "{}")
    assert Settings.load() == found


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[models.m]\nrouting-strategy = "fastest"\n', "m: must be one of min_expected_latency, "),
        ('[models.m]\nrouting-stategy = "random"\n', "m: routing-stategy is no setting of a model; did you mean rout"),
        ('[models]\nm = "random"\n', 'must have a table for each model, [models."m"]'),
        ('model-routing = ["m"]\n', "must be MODEL=STRATEGY, not 'm'"),
    ],
)
def test_a_wrong_one_is_told(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "evenhand.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        Settings.load({"config": str(path)})
    assert caught.value.message.startswith(f"{path}:1: model-routing: {line}")
