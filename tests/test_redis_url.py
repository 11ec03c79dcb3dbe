"""--redis-url: sentinels and cluster nodes. (One server: tests/store/test_pipeline.py.)"""

from __future__ import annotations

import pytest

from app.errors import ConfigurationError
from app.redis_url import Kind, RedisPlace

SENTINEL, CLUSTER = Kind.SENTINEL, Kind.CLUSTER


@pytest.mark.parametrize(
    ("url", "kind", "hosts", "master", "tls", "user", "password", "database"),
    [
        ("redis+sentinel://h/m", SENTINEL, [("h", 26379)], "m", False, None, None, 0),
        ("redis+sentinel://a:1,b,c:3/my%20m/4", SENTINEL, [("a", 1), ("b", 26379), ("c", 3)], "my m", False)
        + (None, None, 4),
        ("rediss+sentinel://me:p%40%2C@[::1]:5,h/m/", SENTINEL, [("::1", 5), ("h", 26379)], "m", True)
        + ("me", "p@,", 0),
        ("redis+sentinel://:a@b@h/m/0", SENTINEL, [("h", 26379)], "m", False, None, "a@b", 0),
        ("redis+cluster://h:7000,i:7001/", CLUSTER, [("h", 7000), ("i", 7001)], "", False, None, None, 0),
        ("rediss+cluster://u:p@h", CLUSTER, [("h", 6379)], "", True, "u", "p", 0),
    ],
)
def test_a_place_is_read_from_its_url(
    url: str,
    kind: Kind,
    hosts: list[tuple[str, int]],
    master: str,
    tls: bool,
    user: str | None,
    password: str | None,
    database: int,
) -> None:
    place = RedisPlace.parse(url)
    assert (place.kind, place.master) == (kind, master)
    assert [(address.host, address.port) for address in place.asked] == hosts
    assert all(address.tls == tls for address in (*place.asked, place.redis))
    assert (place.redis.username, place.redis.password, place.redis.database) == (user, password, database)
    assert password is None or password not in repr(place)


def test_a_server_is_asked_for_by_itself() -> None:
    place = RedisPlace.parse("redis://h:1/2")
    assert (place.kind, place.asked) == (Kind.FIXED, ())
    assert (place.redis.host, place.redis.port, place.redis.database) == ("h", 1, 2)


def test_sentinels_have_credentials_and_a_database_of_their_own() -> None:
    place = RedisPlace.parse("redis+sentinel://u:p@h/m/3?sentinel_username=su&sentinel_password=s%2Bp")
    assert (place.redis.username, place.redis.password, place.redis.database) == ("u", "p", 3)
    assert [(a.username, a.password, a.database) for a in place.asked] == [("su", "s+p", 0)]
    # Most sentinels have none, and say no to a password then.
    assert RedisPlace.parse("redis+sentinel://u:p@h/m").asked[0].password is None
    assert RedisPlace.parse("redis+cluster://u:p@h").asked[0].password == "p"


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("redis+sentinel://h", "needs the name of the master"),
        ("redis+sentinel://h/", "needs the name of the master"),
        ("redis+sentinel://h/m/x", "needs the name of the master"),
        ("redis+sentinel://h/m/1/2", "needs the name of the master"),
        ("redis+sentinel:///m", "needs hosts"),
        ("redis+sentinel://h,/m", "needs hosts"),
        ("redis+sentinel://h:x/m", "needs hosts"),
        ("redis+sentinel://h:0/m", "needs hosts"),
        ("redis+sentinel://h:65536/m", "needs hosts"),
        ("redis+sentinel://::1/m", "needs hosts"),
        ("redis+sentinel://:hush@h/m?db=1", "no option db; there are sentinel_username and sentinel_password"),
        ("redis+cluster://:hush@h/1", "a cluster has database 0 only"),
        ("redis+cluster://h?x=hush", "no option x"),
    ],
)
def test_what_is_no_such_url_is_one_line_without_the_password(url: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match="^--redis-url: ") as caught:
        RedisPlace.parse(url)
    assert complaint in caught.value.message
    assert "hush" not in caught.value.message
    assert "\n" not in caught.value.message
