"""What takes its time: probes and what they decide, draining. These scenarios run at the same time."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import openai

from tests.integration.serving import Factory, Together, chat, chat_body, on_every_worker, streams
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.wait import eventually

NOBODY = "http://127.0.0.1:9"  # discard: nobody listens there
INTERVAL_S, TIMEOUT_S, EXPIRATION_S, FORGET_S = 1.0, 0.3, 3.0, 0.5

together = Together(
    settings={
        "probe_interval_s": INTERVAL_S,
        "probe_timeout_s": TIMEOUT_S,
        "forget_after_s": FORGET_S,
        "nodes": [NOBODY],
    },
    env={"LMDEPLOY_CONTROLLER_HEART_BEAT_EXPIRATION": str(int(EXPIRATION_S))},
    own_python=False,  # nothing reads it but the settings
)
running = together.fixture()


def _state(deployment: Deployment, engine: SimulatedEngine) -> str | None:
    state: str | None = deployment.nodes("?all=1").get(engine.url, {}).get("state")
    return state


# --- down and up


@together
def test_three_misses_make_a_node_down_and_two_hits_ready_again(deployment: Deployment, make: Factory) -> None:
    one = make(models=("counted",))
    deployment.add(one)
    for status, state, wanted in ((500, "down", 3), (200, "ready", 2)):
        one.set(health_status=status)
        one.forget()
        deployment.wait_for_state(state, one, within_s=8)
        assert sum(probe.path == "/health" for probe in one.probes) == wanted


@together
def test_one_refused_connection_makes_a_node_down(deployment: Deployment, make: Factory) -> None:
    refusing, unwell = make(models=("two-ways",)), make(models=("two-ways",))
    deployment.add(refusing, unwell)
    refusing.set(refuse=True)
    unwell.set(health_status=500)
    deployment.wait_for_state("down", refusing)
    assert _state(deployment, unwell) == "ready", "a miss alone is not enough"
    on_every_worker(deployment, lambda: chat(deployment, chat_body("two-ways")).status == 200)


@together
def test_r26_busy_is_not_dead_but_a_bad_answer_is_a_miss(deployment: Deployment, make: Factory) -> None:
    busy, sick = make(models=("busy",)), make(models=("sick",))
    deployment.add(busy, sick)
    busy.set(health_delay_s=30.0)
    sick.set(health_status=500)
    busy.forget()
    deadline_s = time.monotonic() + 15
    seen = {"ready"}  # of the sick one; on a loaded machine it may be gone and forgotten before the loop ends
    while len(busy.probes) < 5 or "down" not in seen:
        statuses = [chat(deployment, chat_body(model)).status for model in ("busy", "sick")]
        assert statuses[0] == 200
        assert _state(deployment, busy) == "ready"
        seen.add(_state(deployment, sick) or "")
        time.sleep(0.05)
        assert time.monotonic() < deadline_s
    assert _state(deployment, sick) != "ready"


@together
def test_r29_configured_nodes_are_never_forgotten_and_others_are(deployment: Deployment, make: Factory) -> None:
    added = make(models=("forgotten",))
    deployment.add(added)
    added.set(refuse=True)
    begun_s = time.monotonic()
    deployment.wait_for_state("gone", added, within_s=EXPIRATION_S + 4)
    assert time.monotonic() - begun_s > EXPIRATION_S
    assert added.url not in deployment.nodes()
    assert added.url in deployment.nodes("?all=1")
    eventually(lambda: added.url not in deployment.nodes("?all=1"), within_s=FORGET_S + 14, every_s=0.1)
    assert NOBODY in deployment.nodes("?all=1")


@together
def test_r90_the_sdk_at_its_defaults_gets_over_an_outage_of_2_s(deployment: Deployment, make: Factory) -> None:
    engine = make(models=("outage",))
    deployment.add(engine)
    on_every_worker(deployment, lambda: chat(deployment, chat_body("outage")).status == 200)
    engine.forget()
    # Probes come each second. None is to fall on the moment at which it is back: on a loaded machine the next one,
    # and the second look after it, would come later than the SDK's last try.
    eventually(lambda: engine.probes and 0.6 < time.monotonic() - engine.probes[-1].started_s < 0.8, within_s=10)
    engine.crash()
    with ThreadPoolExecutor(1) as pool, openai.OpenAI(base_url=deployment.url + "/v1", api_key="sk") as client:
        asked = pool.submit(client.chat.completions.create, model="outage", messages=[])
        begun_s = time.monotonic()
        eventually(lambda: time.monotonic() - begun_s > 2, within_s=3)
        engine.start()
        assert asked.result(60).choices[0].message.content
    assert len(engine.requests) == 1


# --- the first probes


@together
def test_the_first_probe_comes_within_1_s_and_then_one_every_second(deployment: Deployment, make: Factory) -> None:
    unwell = make(models=("unwell",), health_status=500, health_word="")
    deployment.add(unwell, ready=False)
    added_s = time.monotonic()
    assert _state(deployment, unwell) == "pending"
    eventually(lambda: len(unwell.probes) >= 3, within_s=10)
    at_s = [probe.started_s for probe in unwell.probes]
    gaps_s = [b - a for a, b in itertools.pairwise(at_s)]
    # Another registration moves the moment at which all are probed: so up to 2 s, and a loaded machine is late.
    assert all(0.5 < gap_s < 3 for gap_s in gaps_s), at_s
    # What is more than a second between two probes is how late this machine is.
    assert at_s[0] - added_s < max(1.0, *gaps_s) + 0.5


@together
def test_an_asked_engine_that_comes_back_with_other_models_serves_those(deployment: Deployment, make: Factory) -> None:
    asked = make(models=("before",))
    assert deployment.post("/nodes/add", {"url": asked.url}).status == 200
    deployment.wait_for_state("ready", asked)
    asked.crash()
    deployment.wait_for_state("down", asked)
    asked.set(models=("after",))
    asked.start()
    deployment.wait_for_state("ready", asked, within_s=10)
    # What it serves now decides, whatever it was registered with.
    on_every_worker(deployment, lambda: chat(deployment, chat_body("after")).status == 200, within_s=2)
    asked.forget()
    assert chat(deployment, chat_body("before")).status in (404, 503)
    assert not asked.requests


# --- draining


@together
def test_drain_answers_at_once_and_lets_running_requests_finish(deployment: Deployment, make: Factory) -> None:
    leaving, staying = make(models=("d1",), chunks=60, gap_s=0.08), make(models=("d1",))
    deployment.add(leaving)
    on_every_worker(deployment, lambda: chat(deployment, chat_body("d1", max_tokens=0)).status == 200)
    running = streams(deployment, 6, "d1")
    eventually(lambda: deployment.unfinished()[leaving.url] == 6)
    deployment.add(staying)
    begun_s = time.monotonic()
    reply = deployment.post(f"/nodes/remove?node_url={leaving.url}&drain=true&timeout_s=20")
    assert reply.status == 200
    assert isinstance(reply.json(), str)
    assert time.monotonic() - begun_s < 0.5
    assert deployment.nodes()[leaving.url]["state"] == "draining"
    on_every_worker(deployment, lambda: chat(deployment, chat_body("d1")).status == 200)
    seen = len(leaving.requests)
    assert all(chat(deployment, chat_body("d1")).status == 200 for _ in range(20))
    assert len(leaving.requests) == seen, "a draining node gets nothing new"
    assert not running.done()
    assert all(answer.done and len(answer.chunks()) == 60 for answer in running.result(15))
    eventually(lambda: leaving.url not in deployment.nodes("?all=1"), within_s=2, every_s=0.1)


@together
def test_drain_by_body_ends_at_its_deadline(deployment: Deployment, make: Factory) -> None:
    leaving = make(models=("d2",), chunks=20, gap_s=0.15)
    deployment.add(leaving)
    on_every_worker(deployment, lambda: chat(deployment, chat_body("d2", max_tokens=0)).status == 200)
    running = streams(deployment, 2, "d2")
    eventually(lambda: deployment.unfinished()[leaving.url] == 2)
    begun_s = time.monotonic()
    reply = deployment.post("/nodes/remove?drain=true&timeout_s=0.5", {"url": leaving.url})
    assert reply.status == 200
    eventually(lambda: leaving.url not in deployment.nodes("?all=1"), within_s=2, every_s=0.1)
    assert time.monotonic() - begun_s > 0.4
    assert not running.done(), "gone at the deadline, not at the end of its streams"
    running.result(10)


@together
def test_an_idle_node_is_drained_at_once(deployment: Deployment, make: Factory) -> None:
    idle = make(models=("idle",))
    deployment.add(idle)
    deployment.post("/nodes/remove?drain=true&timeout_s=30", {"url": idle.url})
    eventually(lambda: idle.url not in deployment.nodes("?all=1"), within_s=2, every_s=0.1)
