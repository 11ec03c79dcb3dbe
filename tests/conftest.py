"""Fixtures: one private Redis for the session, a namespace of its own for each test, engines, deployments.

After each test that used a deployment the quiet check runs, while the deployment still does; then every
deployment is stopped and must leave no process behind.
"""

from __future__ import annotations

import gc
import secrets
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.loop import LoopThread
from tests.support.quiet import quiet_check
from tests.support.redis import PrivateRedis, Space, TcpProxy
from tests.support.wait import eventually

# The files that take longest, the longest first: with several at a time none of them may be the last to begin.
FIRST = [
    "integration/test_redis_faults.py",
    "browser/test_page.py",
    "integration/test_pd_common.py",
    "store/test_healing.py",
    "integration/test_two_masters.py",
    "integration/test_discovery.py",
    "integration/test_distserve_links.py",
    "integration/test_pd_failures.py",
    "integration/test_serving.py",
    "integration/test_crash_safety.py",
    "integration/test_breaker_trials.py",
    "store/test_failover.py",
    "workers/test_server.py",
    "workers/test_master.py",
    "integration/test_failover.py",
    "release/test_package.py",
    "store/test_outages.py",
    "integration/test_distserve_failures.py",
    "integration/test_strategies.py",
    "workers/test_prober.py",
    "integration/test_serve_command.py",
    "integration/test_openai_sdk.py",
    "test_docs_commands.py",
    "integration/test_health.py",
    "integration/test_distserve_lmdeploy.py",
    "integration/test_epd_topologies.py",
    "http/test_site.py",
    "store/test_encoders.py",
    "integration/test_serving_one_worker.py",
    "integration/test_distserve_leaving.py",
    "workers/test_engine.py",
    "support/test_support.py",
    "test_cli.py",
    "dispatch/test_links.py",
    "store/test_ledger.py",
    "dispatch/test_media.py",
    "integration/test_epd_failures.py",
    "integration/test_serving_recycling.py",
    "integration/test_tls.py",
    "store/test_registry.py",
    "balancing/test_twins.py",
    "store/test_budget.py",
]

# Files of one line share deployments, so one job runs all of them.
SHARING = [
    ["test_serving.py", "test_streaming.py", "test_node_management.py", "test_docs_page.py", "test_looking.py"],
    ["test_errors.py", "test_openai_sdk.py", "test_endpoints.py"],
    ["test_request_shapes.py", "test_pipelining.py"],
    ["test_breaker_trials.py", "test_breaker.py"],
    ["test_two_masters.py", "test_epd_fanout.py", "test_drain_streams.py", "test_watch.py"],
    ["test_pd_common.py", "test_pd_failures.py", "test_pd_mooncake.py", "test_pd_nixl.py", "test_pd_sglang.py"],
]
GROUPS = {f"tests/integration/{file}": f"{files[0]} and those it shares with" for files in SHARING for file in files}
BROWSER = "tests/browser/"  # all files there share one, so one job runs them


def group_of(nodeid: str) -> str:
    """What one job runs as a whole: a file, or those that share deployments."""
    file = nodeid.partition("::")[0]
    if file.startswith(BROWSER):
        return f"{BROWSER}test_page.py"
    return GROUPS.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadGroupsOfFiles(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return LoadGroupsOfFiles(config, log)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "not_quiet(reason): the quiet check can't hold after this test; say why")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays to the end: the garbage collector need not look at it, now and at each of its turns."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """After all others have shuffled and grouped; the order within a file stays. A group goes with its longest file."""
    places = {group_of(f"tests/{name}"): place for place, name in reversed([*enumerate(FIRST)])}
    items.sort(key=lambda item: places.get(group_of(item.nodeid), len(places)))


@pytest.fixture(scope="session")
def engine_loop() -> Iterator[LoopThread]:
    """The loop that all simulated engines share, in a thread of its own."""
    loop = LoopThread()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[PrivateRedis]:
    with PrivateRedis(tcp=True) as server:
        yield server


@pytest.fixture
def redis(redis_server: PrivateRedis) -> Iterator[Space]:
    """A fresh namespace on a Redis that answers, whatever the test before did to it."""
    redis_server.ensure_running()
    space = Space(redis_server, f"t{secrets.token_hex(6)}")
    yield space
    redis_server.ensure_running()
    space.clear()


@pytest.fixture
def own_redis() -> Iterator[Space]:
    """A Redis of the test's own, for those that break it."""
    with PrivateRedis() as server:
        yield Space(server, "own")


@pytest.fixture
def slow_road(redis_server: PrivateRedis, engine_loop: LoopThread) -> Iterator[TcpProxy]:
    """A TCP road to the Redis of the session; `.url`, `.delay_s`."""
    with TcpProxy(redis_server.socket, loop=engine_loop) as proxy:
        yield proxy


@pytest.fixture
def engine_factory(engine_loop: LoopThread) -> Iterator[Callable[..., SimulatedEngine]]:
    """`engine_factory(ttft_s=0.1)`: a started engine that ends with the test; `.made` lists them."""
    made: list[SimulatedEngine] = []

    def make(**options: Any) -> SimulatedEngine:
        made.append(SimulatedEngine(loop=engine_loop, **options))
        return made[-1]

    make.made = made  # type: ignore[attr-defined]
    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def deployment_factory(
    redis: Space, engine_factory: Callable[..., SimulatedEngine], request: pytest.FixtureRequest
) -> Iterator[Callable[..., Deployment]]:
    """`deployment_factory(workers=2, settings={...})`: a started deployment on the test's namespace.

    `redis=None` takes the embedded Redis. Masters made by `second_master` end with it.
    """
    made: list[Deployment] = []

    def make(workers: int = 2, **options: Any) -> Deployment:
        options.setdefault("redis", redis)
        made.append(Deployment(workers, **options))
        return made[-1]

    yield make
    made += [other for deployment in made for other in deployment.others]
    try:
        if made and request.node.get_closest_marker("not_quiet") is None:
            _quiet(made, engine_factory.made)  # type: ignore[attr-defined]
        _stop(made)
    finally:
        for deployment in made:
            deployment.close()


def _quiet(made: list[Deployment], engines: list[SimulatedEngine]) -> None:
    spaces = {(s.url, s.namespace): s for d in made if (s := d.space) is not None}
    for space in spaces.values():
        space.server.resume()
        quiet_check(space, engines=engines)
    for deployment in made:
        if deployment.space is None and deployment.process is not None and deployment.process.running:
            eventually(lambda d=deployment: not any(d.unfinished().values()))  # type: ignore[misc]
            eventually(lambda: not any(engine.in_flight for engine in engines))


def _stop(made: list[Deployment]) -> None:
    for deployment in made:
        if deployment.process is not None and deployment.process.running:
            deployment.stop()
    left = [line for deployment in made for line in deployment.left_behind]
    assert not left, f"processes left behind: {left}"
