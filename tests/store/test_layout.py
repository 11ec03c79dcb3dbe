"""Old code and new code on one Redis: keys of another layout are left alone, and the reason is said."""

from __future__ import annotations

import logging

import pytest

from app.errors import StoreUnavailable
from tests.store.harness import Worker
from tests.support.redis import Space
from tests.support.wait import aeventually

A = "http://a:1"


async def test_the_first_says_which_layout_the_keys_have_and_it_comes_back(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w") as worker:
        assert redis.cli("GET", redis.key("layout")) == "1"
        await worker.add_ready(A, models=("m",))
        redis.cli("DEL", redis.key("layout"))
        await worker.registry.verify()
        assert redis.cli("GET", redis.key("layout")) == "1"
        redis.cli("SET", redis.key("layout"), "rubbish")
        await worker.registry.heal()
        await worker.registry.verify()
        assert redis.cli("GET", redis.key("layout")) == "1"


async def test_a_worker_touches_no_key_of_another_layout_and_says_why(
    redis: Space, caplog: pytest.LogCaptureFixture
) -> None:
    redis.cli("SET", redis.key("layout"), "2")
    # Of the layout to come: other types under names that are ours too.
    redis.cli("SET", redis.key("unfinished"), "not a hash")
    redis.cli("RPUSH", redis.key("version"), "not a string")
    before = redis.key_names()
    with caplog.at_level(logging.WARNING):
        async with Worker(redis.url, redis.namespace, "w") as worker:
            assert not worker.shared
            assert "layout 2" in (worker.ledger.trouble or "")
            for change in (worker.registry.heal, worker.registry.verify, worker.registry.refresh):
                with pytest.raises(StoreUnavailable):
                    await change()
            with pytest.raises(StoreUnavailable, match="layout 2"):
                await worker.registry.run("remove_node", (), [])
            with pytest.raises(StoreUnavailable):
                await worker.add_ready(A, models=("m",))
            assert redis.key_names() == before
            assert redis.cli("TYPE", redis.key("unfinished")) == "string"
            assert redis.cli("TYPE", redis.key("version")) == "list"
            assert "run the same version everywhere, or give this one a --namespace of its own" in caplog.text
            # Once it is right the worker joins by itself.
            redis.cli("FLUSHALL")
            await aeventually(lambda: worker.shared and redis.cli("GET", redis.key("layout")) == "1", within_s=5)
