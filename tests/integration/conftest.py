"""Fixtures of the integration tests, by what a module says of itself.

`DEPLOYMENT = SharedDeployment(...)`: `deployment`, one that may live as long as the session, with one `engine`.
`FLEET = {...}`, options of `Fleet`: `fleet`, deployments of the module, and on them a `stage` or a `floor`.
`BENCHES_AT_ONCE = n`: the scenarios run beside each other on benches of their own, n at a time, not on the fleet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest

from tests.conftest import group_of
from tests.integration.serving import Deployments, Factory, SharedDeployment, on_every_worker, remove_nodes
from tests.integration.stage import EngineFactory, Fleet, Fleets, Outcomes, Stage, benches, run_beside, staged, stages
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.epd import EpdEngine
from tests.support.epd_floor import Floor, floor_on
from tests.support.loop import LoopThread
from tests.support.quiet import quiet_check
from tests.support.redis import PrivateRedis
from workers.engine.answers import Knobs

# --- one deployment for many modules


@pytest.fixture(scope="session")
def deployments_of_session(redis_server: PrivateRedis) -> Iterator[Deployments]:
    deployments = Deployments(redis_server)
    yield deployments
    deployments.close()


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest) -> SharedDeployment:
    found: SharedDeployment = request.module.DEPLOYMENT
    return found


@pytest.fixture(scope="module")
def deployment_of_module(shared: SharedDeployment, deployments_of_session: Deployments) -> Iterator[Deployment]:
    deployment = deployments_of_session.get(shared.workers, **shared.options)
    yield deployment
    remove_nodes(deployment, headers=shared.admin)


@pytest.fixture(scope="module")
def engine_of_module(engine_loop: LoopThread) -> Iterator[SimulatedEngine]:
    with SimulatedEngine(loop=engine_loop) as engine:
        yield engine


@pytest.fixture
def deployment(
    shared: SharedDeployment,
    deployment_of_module: Deployment,
    engine_of_module: SimulatedEngine,
    engine_factory: Factory,
) -> Iterator[Deployment]:
    """It has seen other tests and will see more: after each comes the quiet check, and its nodes are removed."""
    yield deployment_of_module
    assert deployment_of_module.space is not None
    try:
        made: list[SimulatedEngine] = engine_factory.made  # type: ignore[attr-defined]
        quiet_check(deployment_of_module.space, engines=[engine_of_module, *made])
    finally:
        remove_nodes(deployment_of_module, but=engine_of_module.url, headers=shared.admin)


@pytest.fixture
def engine(shared: SharedDeployment, deployment: Deployment, engine_of_module: SimulatedEngine) -> SimulatedEngine:
    """The node with the model "sim": ready, its knobs at their defaults, nothing recorded.

    Engines of its own a test gives models of their own.
    """
    engine = engine_of_module
    engine.set(**asdict(Knobs()))
    engine.forget()
    if deployment.nodes("?all=1", headers=shared.admin).get(engine.url, {}).get("state") != "ready":
        deployment.add(engine, within_s=20, headers=shared.admin)
        on_every_worker(deployment, lambda: "sim" in deployment.get("/v1/models", headers=shared.client).text)
    return engine


# --- deployments of one module, or of a few


@pytest.fixture(scope="module")
def fleet_server(redis_server: PrivateRedis) -> PrivateRedis:
    """The Redis of the fleet; a module that breaks it has its own fixture of this name."""
    return redis_server


@pytest.fixture(scope="session")
def fleets_of_session(redis_server: PrivateRedis) -> Iterator[Fleets]:
    fleets = Fleets()
    yield fleets
    fleets.close()


@pytest.fixture(scope="module")
def fleet_of(
    request: pytest.FixtureRequest, fleet_server: PrivateRedis, fleets_of_session: Fleets
) -> Iterator[Callable[..., Fleet]]:
    """`fleet_of(workers=2, settings={...})`: a fleet that ends with the module, or with its group if it has one."""
    file = request.node.nodeid
    yield functools.partial(fleets_of_session.get, group_of(file), fleet_server)
    if group_of(file) == file:
        fleets_of_session.close()


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, fleet_of: Callable[..., Fleet]) -> Fleet:
    return fleet_of(**request.module.FLEET)


@pytest.fixture
def stage(fleet: Fleet, engine_factory: EngineFactory) -> Iterator[Stage]:
    with staged(*fleet.get(), engine_factory) as one:
        yield one


@pytest.fixture
def floor(fleet: Fleet, engine_loop: LoopThread) -> Iterator[Floor]:
    with floor_on(*fleet.get(), engine_loop) as one:
        yield one


@pytest.fixture
def both(floor: Floor) -> EpdEngine:
    """One engine for prefill and decode."""
    return floor.one("both", chunks=2)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, redis_server: PrivateRedis, engine_loop: LoopThread) -> Iterator[Outcomes]:
    at_once = getattr(request.module, "BENCHES_AT_ONCE", None)
    if at_once is not None:
        yield from run_beside(request, benches(redis_server, engine_loop), at_once=at_once)
    else:
        yield from run_beside(request, stages(request.getfixturevalue("fleet").get, engine_loop))
