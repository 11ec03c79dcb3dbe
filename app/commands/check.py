"""`evenhand check`: looks at a deployment and its host, says what is wrong and how to mend it.

Owns the options, the order of the looks and what becomes of one that fails. What is looked at, and what is right, is in
`app.checks`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import stat
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from app.checks.finding import Level, bad, warn
from app.checks.report import Report, document_of, told
from app.terminal.by_url import Refused
from app.terminal.failures import CommandError, readable
from app.terminal.reach import (
    REDIS_VARIABLE,
    URL_VARIABLE,
    Misused,
    add_redis_options,
    add_url_options,
    by_url,
    redis_named,
)

if TYPE_CHECKING:
    from app.settings import Settings

EXAMPLE = """\
example:
  evenhand check                                     on a host of `evenhand serve`, with its environment
  evenhand check --redis-url redis://10.0.0.2:6379/0
  evenhand check --url http://10.0.0.1:8000 --admin-key KEY          less: what the deployment itself can tell

Without --url it looks at Redis: --redis-url, else EVENHAND_REDIS_URL, else redis-url in the file that --config or
EVENHAND_CONFIG names, else the embedded one in --state-dir.
ok: it is well. warn: it works, and will not in some case that is to be expected. bad: requests fail or state is lost.
Ends with 0 when nothing is bad, with 1 when something is, with 2 when it does not know what to look at.
"""
CONNECT_S = 2.0
KEYS_MEND = "mend the file: running workers go by what it said before, one that starts serves nobody until it is right"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EXAMPLE, argparse.RawDescriptionHelpFormatter
    add_url_options(parser)
    add_redis_options(parser)
    parser.add_argument(
        "--config", metavar="FILE", help="settings file of `serve`, which may name Redis too; env EVENHAND_CONFIG"
    )
    parser.add_argument("--state-dir", metavar="DIR", help="that of `serve`, where its embedded Redis is")
    parser.add_argument(
        "--engine-key", metavar="KEY", help="API key sent to engines, as of `serve`; env EVENHAND_ENGINE_KEY"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    try:
        report = _over_http(args) if _http_named(args) else _over_redis(args)
    except Misused as e:
        print(f"evenhand check: {e}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(document_of(report), indent=2, ensure_ascii=False))
    else:
        print("\n".join(told(report, colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))))
    return 1 if report.tally[Level.BAD] else 0


def _http_named(args: argparse.Namespace) -> bool:
    """Over HTTP only where that is asked for: Redis tells more, and is found as `serve` finds it. Raises Misused."""
    if args.deployment:
        redis_named(args)
        if args.config or args.state_dir or args.engine_key:
            raise Misused(
                "--config, --state-dir and --engine-key go without --url: over HTTP neither Redis nor nodes are asked"
            )
        return True
    if args.redis_url or args.config or args.state_dir or os.environ.get(REDIS_VARIABLE):
        return False
    return bool(os.environ.get(URL_VARIABLE))


# --- over HTTP --------------------------------------------------------------------------------------


def _over_http(args: argparse.Namespace) -> Report:
    from app.checks import nodes, over_http, workers

    deployment = by_url(args)
    report = Report(deployment.name)
    try:
        report.add([over_http.ready(deployment)])
    except CommandError as e:
        mend = "start `evenhand serve`, or name it: --url (EVENHAND_URL)"
        if isinstance(e, Refused):
            mend = "it is reached; --admin-keys and --reader-keys of its `evenhand serve` say which keys it takes"
        report.add([bad("http.reach", str(e), mend)])
        return report
    try:
        state = deployment.state()
        with readable(deployment.name):
            found = [*over_http.judge(state), *workers.judge(state), *nodes.judge(state)]
    except CommandError as e:
        report.add(
            [
                over_http.health(deployment),
                bad("http.state", str(e), "its nodes and workers can't be looked at without"),
            ]
        )
    else:
        report.add(found)
    report.not_checked = [(what, "needs --redis-url") for what in over_http.NEEDS_REDIS]
    return report


# --- over Redis -------------------------------------------------------------------------------------


def _over_redis(args: argparse.Namespace) -> Report:
    from app.checks import host
    from app.dispatch.topology import Topology
    from app.errors import ConfigurationError
    from app.redis_url import RedisPlace
    from app.settings import misspelt_variables
    from app.terminal.by_redis import place_name

    names = ("config", "redis_url", "namespace", "state_dir", "engine_key")
    flags = {name: getattr(args, name) for name in names}
    try:
        settings, faults = _without_keys(flags)
        url = settings.redis_url or _embedded(settings)
        place = RedisPlace.parse(url)
        Topology.of(settings)
    except ConfigurationError as e:
        raise Misused(e.message) from e
    report = Report(place_name(place, settings.namespace))
    mend = "name it as `evenhand serve --help` does, or unset it"
    report.add(bad("host.keys", line, KEYS_MEND) for line in faults)
    report.add(warn("host.variables", line, mend) for line in misspelt_variables(os.environ))
    workers = _look_at_redis(report, settings, url)
    found = host.look(workers)
    report.add(host.judge(found))
    if workers and not found.processes:
        report.not_checked.append(("open files of the workers", "none of them runs on this host"))
    return report


def _without_keys(flags: Mapping[str, object]) -> tuple[Settings, list[str]]:
    """The settings, and what is wrong with files of keys: no key is asked for here. Raises ConfigurationError."""
    from app.errors import ConfigurationError
    from app.settings import Settings

    try:
        return Settings.load(flags), []
    except ConfigurationError as e:
        return Settings.load(flags, but=("api_keys_file", "admin_keys_file", "reader_keys_file")), e.lines


def _embedded(settings: Any) -> str:
    """The URL of the embedded Redis. Raises Misused where there is none."""
    from workers.embedded_redis import EmbeddedRedis

    embedded = EmbeddedRedis(settings.state_dir)
    try:
        if stat.S_ISSOCK(embedded.socket.stat().st_mode):
            return embedded.url
    except OSError:
        pass
    raise Misused(
        f"no Redis is named, and there is no embedded one in {settings.state_dir}; start `evenhand serve`, or say "
        "where it is: --state-dir as of `serve` (EVENHAND_STATE_DIR), --redis-url or --url"
    )


def _look_at_redis(report: Report, settings: Any, url: str) -> list[str]:
    """Everything that Redis can tell; the ids of the workers."""
    from redis.exceptions import RedisError

    from app.checks import keyspace, nodes, redis_server, workers
    from app.errors import EvenhandError
    from app.redis_url import RedisPlace
    from app.store.keys import Keys
    from app.store.locator import Locator
    from app.terminal.by_redis import ByRedis

    keys, place = Keys(settings.namespace), RedisPlace.parse(url)
    try:
        silent = redis_server.silent(place, timeout_s=CONNECT_S)
        locator = Locator(place, keys=keys, timeout_s=CONNECT_S)
        with locator.client_now(
            decode_responses=True,
            encoding_errors="surrogateescape",
            socket_timeout=CONNECT_S,
            socket_connect_timeout=CONNECT_S,
        ) as client:
            server = redis_server.look(client, place, patience_s=settings.redis_timeout_s, silent=silent)
            report.add(redis_server.judge(server))
            report.not_checked += redis_server.not_checked(server)
            if not server.stores:
                return []
            space = keyspace.look(client, keys)
            report.add(keyspace.judge(space, keys))
            report.not_checked += keyspace.not_checked(space)
            engine_keys = _engine_keys(client, keys, space)
            host_headers = _host_headers(client, keys, space)
    except (RedisError, EvenhandError, OSError) as e:
        text = _words_of(e)
        report.add([bad("redis.reach", text, _how_to_reach(text))])
        report.not_checked.append(("keys, workers and nodes", "Redis did not answer"))
        return []
    try:
        state = ByRedis(url, settings.namespace).state()
    except CommandError as e:
        if not report.tally[Level.BAD]:  # else that is why
            report.add([bad("nodes.state", str(e), _how_to_reach(str(e)))])
        report.not_checked.append(("nodes and workers", str(e)))
        return []
    report.add(workers.judge(state))
    report.add(nodes.judge(state, asyncio.run(_ask(state, engine_keys, host_headers, settings))))
    return [str(worker["id"]) for worker in state["workers"]]


def _engine_keys(client: Any, keys: Any, space: Any) -> dict[str, str]:
    return dict(client.hgetall(keys.engine_keys)) if space.types.get(keys.engine_keys) == "hash" else {}


def _host_headers(client: Any, keys: Any, space: Any) -> dict[str, str]:
    nodes = [str(url) for url in client.smembers(keys.nodes)] if space.types.get(keys.nodes) == "set" else []
    found = {
        url: client.hget(keys.node(url), "host_header") for url in nodes if space.types.get(keys.node(url)) == "hash"
    }
    return {url: str(named) for url, named in found.items() if named}


async def _ask(
    state: dict[str, Any], engine_keys: dict[str, str], host_headers: dict[str, str], settings: Any
) -> dict[str, str]:
    from app.checks import engines
    from app.settings import tls_towards_engines

    own = settings.engine_key.get_secret_value() if settings.engine_key is not None else None
    keys = {str(node["url"]): engine_keys.get(node["url"]) or own for node in state["nodes"]}
    return await engines.ask(
        keys, timeout_s=settings.probe_timeout_s, tls=tls_towards_engines(settings), host_headers=host_headers
    )


def _words_of(e: Exception) -> str:
    """What a failure says; of Redis's own answers with the code that they begin with (WRONGPASS, NOPERM, ...)."""
    code = getattr(e, "status_code", None)
    return f"{code} {e}" if code and not str(e).startswith(code) else str(e) or type(e).__name__


def _how_to_reach(text: str) -> str:
    if any(
        word in text for word in ("WRONGPASS", "NOAUTH", "invalid username", "Authentication", "without any password")
    ):
        return "name user and password: redis://USER:PASSWORD@HOST:PORT (percent-encode what is special in them)"
    if "NOPERM" in text:
        return "give this user the commands and the keys evenhand:* (ACL SETUSER)"
    if "Timeout reading" in text or "did not answer" in text:
        return "it accepts connections but does not answer: is its process stopped, or its host overloaded?"
    if "loading" in text:
        return "it reads its data from disk; wait"
    if "MOVED" in text:
        return "this is a node of a cluster: --redis-url redis+cluster://HOST:PORT,HOST:PORT"
    return "start it, or name another: --redis-url (EVENHAND_REDIS_URL)"
