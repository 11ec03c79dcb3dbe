"""A Redis of the test's own, for those that break it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.redis import PrivateRedis, Space


@pytest.fixture
def own_redis() -> Iterator[Space]:
    with PrivateRedis() as server:
        yield Space(server, "own")
