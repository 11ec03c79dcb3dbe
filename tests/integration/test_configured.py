"""A deployment that has all from files: its settings, and the keys of its clients, which change while it runs."""

from __future__ import annotations

import hashlib
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.serving import Factory, openai_error
from tests.support.deployment import Deployment
from tests.support.wait import eventually

WITHIN_S = 2.0
ASKED = 12
"""New connections a look: of two workers one is left out by 1 in 2,000 of them."""
KEYS = """
[[keys]]
name = "team-a"
hash = "sha256:{a}"

[[keys]]
name = "team-b"
key = "sk-team-b"
models = ["small"]
"""

MODELS = """
default-model = "large"
cors-origins = ["https://chat.example"]
[aliases]
gpt-4o = "large"
[models."small"]
routing-strategy = "random"
"""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def replace(path: Path, text: str) -> None:
    """At once, as `mv` does it."""
    other = path.with_suffix(".new")
    other.write_text(text)
    other.rename(path)


def chat(deployment: Deployment, model: str, key: str, **more: Any) -> Any:
    value = {"messages": [], "model": model, **more}
    return deployment.post("/v1/chat/completions", value, headers=bearer(key))


def models(deployment: Deployment, key: str) -> list[str]:
    return [card["id"] for card in deployment.get("/v1/models", headers=bearer(key)).json()["data"]]


def statuses(deployment: Deployment, key: str) -> set[int]:
    """What the workers say to a key."""
    return {deployment.get("/v1/models", headers=bearer(key)).status for _ in range(ASKED)}


def test_from_start_to_revocation(
    deployment_factory: Callable[..., Deployment], engine_factory: Factory, tmp_path: Path
) -> None:
    keys, config = tmp_path / "keys.toml", tmp_path / "evenhand.toml"
    keys.write_text(KEYS.format(a=hashlib.sha256(b"sk-team-a").hexdigest()))
    config.write_text(f'api-keys-file = "{keys}"\nlog-requests = "all"\nlog-level = "INFO"\nretries = 1\n' + MODELS)
    deployment = deployment_factory(workers=2, settings={"config": str(config), "api_keys": ["sk-given"]})
    small, large = engine_factory(models=("small",)), engine_factory(models=("large",))
    deployment.add(small, large)

    # Keys of a flag and of the file, with and without models.
    assert chat(deployment, "large", "sk-team-a").status == chat(deployment, "large", "sk-given").status == 200
    assert chat(deployment, "small", "sk-team-b").status == 200
    for model in ("large", "absent"):
        error = openai_error(chat(deployment, model, "sk-team-b"), 404)
        assert error["message"] == f"The model {model!r} does not exist, or this key may not use it."
    assert sorted(models(deployment, "sk-team-a")) == ["gpt-4o", "large", "small"]
    assert models(deployment, "sk-team-b") == ["small"]
    assert deployment.get("/v1/models/large", headers=bearer("sk-team-b")).status == 404
    eventually(lambda: len(re.findall(r"request ended .* key=team-[ab]\b", deployment.log())) >= 4)
    assert "sk-team" not in deployment.log()

    # Other names, and a page: the engine gets the model, and all other bytes as they were.
    body = b'{ "messages":[],\t"model" : "gpt-4o", "n": 1.0}'
    page = bearer("sk-team-a") | {"content-type": "application/json", "origin": "https://chat.example"}
    reply = deployment.request("POST", "/v1/chat/completions", body=body, headers=page)
    assert reply.status == 200 and reply.headers["access-control-allow-origin"] == "https://chat.example"
    assert large.requests[-1].body == body.replace(b"gpt-4o", b"large")
    assert deployment.post("/v1/chat/completions", {"messages": []}, headers=bearer("sk-team-a")).status == 200
    assert deployment.get("/nodes/explain?model=small").json()["strategy"] == "random"

    # Rotation: both keys for a while, then the new one only.
    replace(keys, "sk-new\nsk-team-b\n")
    since_s = time.monotonic()
    eventually(lambda: statuses(deployment, "sk-team-a") == {401}, within_s=WITHIN_S + 3)
    assert time.monotonic() - since_s < WITHIN_S + 1, "the looks took some of it"
    eventually(lambda: statuses(deployment, "sk-new") == {200}, within_s=WITHIN_S)  # also by who was not asked before
    assert statuses(deployment, "sk-given") == {200}
    # Broken, emptied: what was in force stays.
    replace(keys, "")
    eventually(lambda: deployment.log().count("the keys stay as they were") == 2)
    assert statuses(deployment, "sk-new") == {200} and statuses(deployment, "sk-team-a") == {401}
    # A worker that starts meanwhile does not serve without them.
    killed = deployment.kill_worker()
    deployment.wait_for_workers(without=[killed])
    eventually(lambda: deployment.log().count("the keys stay as they were") == 3)
    assert statuses(deployment, "sk-new") == {200}
    replace(keys, "sk-new\n")
    eventually(lambda: statuses(deployment, "sk-team-b") == {401}, within_s=5)

    # A reload reads the file again; one that is wrong is refused.
    before = deployment.worker_pids()
    config.write_text("rounting-strategy = 1\n" + config.read_text())
    deployment.process.send(signal.SIGHUP)
    eventually(lambda: "the reload is refused" in deployment.log(), within_s=15)
    assert "rounting-strategy is no setting; did you mean routing-strategy?" in deployment.log()
    assert sorted(deployment.worker_pids()) == sorted(before)
    config.write_text(
        config.read_text().replace("rounting-strategy = 1\n", "retries = 3\n").replace("retries = 1\n", "")
    )
    deployment.process.send(signal.SIGHUP)
    eventually(lambda: not set(deployment.worker_pids()) & set(before), within_s=20)
    said = deployment.log().rpartition("settings in force")[2]
    assert re.search(rf"--retries +3 +{config}:1\b", said)
    assert statuses(deployment, "sk-new") == {200}

    # A worker that waits for its keys has nothing to end: nobody waits out the grace time for it.
    told = deployment.log().count("the keys stay as they were")
    replace(keys, "")
    eventually(lambda: deployment.log().count("the keys stay as they were") == told + 2)
    deployment.kill_worker()
    eventually(lambda: deployment.log().count("the keys stay as they were") == told + 3)
    assert deployment.stop(within_s=10) == 0
    assert "Traceback" not in deployment.log() and "Exception in" not in deployment.log()
