"""The quiet check: rule Q of the field reports.

Soon after the last client left, every node's unfinished is 0 and was never seen below 0, every engine's
in-flight is 0, and the namespace holds no key but those that are meant to stay.

The key names are written out here on purpose: a test must not take them from the code under test.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from tests.support.engine import SimulatedEngine
from tests.support.redis import PrivateRedis, Space

MAY_STAY = re.compile(
    r"nodes|node:.+|engine_keys|version|unfinished|unfinished:.+|workers|sessions"
    r"|layout|latency:.+|latency_mean|explored|learned|learned_since|learning:.+|last_success|prober|discovering:.+|encoder_cursor|encoder_credit|links|handovers|stages:.+"
    r"|failures|retries|requests|restating|dispatched|watched|decisions|arrangement|load_index|load:.+"
)


def quiet_check(
    redis: PrivateRedis | Space,
    namespace: str | None = None,
    engines: Iterable[SimulatedEngine] = (),
    within_s: float = 2.0,
) -> None:
    """Wait until all is quiet.

    Raises:
        AssertionError: something counts still after `within_s`, or, at once, a count below 0.
    """
    space = redis if isinstance(redis, Space) else Space(redis, namespace or "")
    assert namespace in (None, space.namespace) and space.namespace, "which namespace?"
    engines = list(engines)
    deadline_s = time.monotonic() + within_s
    while True:
        noise = _noise(space, engines)
        if not noise:
            return
        if time.monotonic() >= deadline_s:
            raise AssertionError(f"not quiet {within_s} s after the end of the test:\n  " + "\n  ".join(noise))
        time.sleep(0.02)


def counts(space: Space) -> dict[str, dict[str, int]]:
    """{hash's name without prefix: {url: count}}: the totals (`unfinished`) and every ledger.

    Raises:
        AssertionError: one is no whole number, or below 0.
    """
    found: dict[str, dict[str, int]] = {}
    for name in space.key_names():
        if name == "unfinished" or name.startswith("unfinished:"):
            values: dict[str, str] = space.cli("HGETALL", space.key(name))
            for url, value in values.items():
                assert re.fullmatch(r"\d+", value), f"{name} {url} is {value}: a count is never below 0"
            found[name] = {url: int(value) for url, value in values.items()}
    return found


def _noise(space: Space, engines: list[SimulatedEngine]) -> list[str]:
    noise = [f"{name} {url} is {n}" for name, held in counts(space).items() for url, n in held.items() if n]
    noise += [f"engine {engine.url} has {engine.in_flight} in flight" for engine in engines if engine.in_flight]
    noise += [f"a key that should not be there: {name}" for name in space.key_names() if not MAY_STAY.fullmatch(name)]
    return noise
