"""What `evenhand serve` says once it serves: the address, a request to try, how to add engines, where to look.

Owns the words. Every command works as it stands; a key or password that one needs is named as a variable.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from ipaddress import ip_address, ip_network
from urllib.parse import unquote, urlsplit

from app import __version__
from app.dispatch.topology import Topology
from app.redis_url import Kind, RedisPlace
from app.settings import Settings


def greeting(
    url: str,
    settings: Settings,
    models: list[str],
    trouble: str | None,
    *,
    embedded: bool,
    unused: Sequence[str] = (),
) -> str:
    """The text.

    Args:
        unused: registered nodes that this serving strategy never calls.
        models: those served now; one of them is in the request to try.
        trouble: why the deployment is not ready, if it is not.
    """
    command = own_command()
    curl = "curl" + (f" --cacert {shlex.quote(str(settings.ssl_certfile))}" if settings.ssl else "")
    for_clients = settings.api_keys or settings.api_keys_file
    key = ' -H "Authorization: Bearer $API_KEY"' if for_clients else ""
    if models:
        body = {"model": models[0], "messages": [{"role": "user", "content": "Hello"}], "stream": True}
        attempt = [
            f"  {curl} -N {shlex.quote(url + '/v1/chat/completions')} -H 'Content-Type: application/json'{key} \\",
            f"    -d {shlex.quote(json.dumps(body))}",
        ]
    else:
        attempt = [f"  {curl} {shlex.quote(url + '/v1/models')}{key}"]
    to_us = "" if url == "http://127.0.0.1:8000" else f" --url {shlex.quote(url)}"
    to_us += " --admin-key KEY" if has_keys(settings) and not trusts(url, settings) else ""
    lines = [
        f"Evenhand {__version__} serves {url} with {settings.workers} worker"
        f"{'' if settings.workers == 1 else 's'} (docs page: {url}/)",
        *([f"Not ready yet: {trouble}"] if trouble else []),
        *([f"Never called with this serving strategy, and registered: {', '.join(unused)}"] if unused else []),
        "",
        "Try it:",
        *attempt,
        "Add engines:",
        *_adding(f"{command} nodes add http://HOST:PORT", to_us, url, settings),
        "Look at the state:",
        f"  {command} nodes list{to_us}",
        f"  {command} top{to_us}    # in a browser: {url}/dashboard",
        f"  {redis_command(settings)} hgetall 'evenhand:{{{settings.namespace}}}:unfinished'",
    ]
    if embedded:
        socket = unquote(urlsplit(settings.redis_url or "").path)
        lines.append(f"Embedded Redis: socket {socket}, data in {settings.state_dir / 'redis'}")
    return "\n".join([*lines, "Ctrl-C stops all that this command has started.", ""])


def _adding(add: str, to_us: str, url: str, settings: Settings) -> list[str]:
    topology = Topology.of(settings)
    register = "  lmdeploy serve api_server MODEL --server-name HOST --proxy-url"
    all_trusted = _is_on_loopback(settings) and trusts(url, settings)
    needs_trust = has_keys(settings) and not all_trusted
    keyless = "    # it sends no key: its network must be in --trusted-nodes" if needs_trust else ""
    if not topology.split:
        return [f"{register} {url}{keyless}", f"  {add}{to_us}    # any OpenAI-compatible engine that runs"]
    roles = ["Prefill", "Decode"]
    by_itself = [f"{register} {url} --backend pytorch --role {role}{keyless}" for role in roles]
    return [
        *(by_itself if topology.protocol == "lmdeploy" else []),
        *(f"  {add} --role {role}{to_us}    # one that runs" for role in roles),
    ]


def has_keys(settings: Settings) -> bool:
    """Whether some calls need one."""
    kinds = (settings.api_keys, settings.admin_keys, settings.reader_keys)
    files = (settings.api_keys_file, settings.admin_keys_file, settings.reader_keys_file)
    return any((*kinds, *files))


def _is_on_loopback(settings: Settings) -> bool:
    """Whether nobody but this host can call."""
    try:
        return ip_address(settings.server_name).is_loopback
    except ValueError:
        return settings.server_name == "localhost"


def trusts(url: str, settings: Settings) -> bool:
    """Whether who calls `url` from this host needs no key."""
    try:
        address = ip_address(urlsplit(url).hostname or "")
    except ValueError:  # a name of this host: most likely localhost
        address = ip_address("127.0.0.1")
    return any(address in ip_network(network) for network in settings.trusted_nodes)


def redis_command(settings: Settings) -> str:
    """A redis-cli that reaches the deployment's Redis. A password stays out: redis-cli reads REDISCLI_AUTH."""
    place = RedisPlace.parse(settings.redis_url or "")
    parts = urlsplit(settings.redis_url or "")
    program = "redis-cli" if shutil.which("redis-cli") or not shutil.which("valkey-cli") else "valkey-cli"
    if parts.scheme == "unix":
        return f"{program} -s {shlex.quote(unquote(parts.path))}"
    if place.asked:
        tls = " --tls" if place.redis.tls else ""
        ask = f"{program}{tls} -h {place.asked[0].host} -p {place.asked[0].port}"
        if place.kind is Kind.CLUSTER:
            return f"{ask} -c"
        database = f" -n {place.redis.database}" if place.redis.database else ""
        master = f"{ask} sentinel get-master-addr-by-name {shlex.quote(place.master)}"
        return f"{program}{tls}{database} $({master} | xargs printf -- '-h %s -p %s')"
    authority = parts.netloc.rpartition("@")[2]
    return f"{program} -u {parts.scheme}://{authority}{parts.path}"


def own_command() -> str:
    """How the person at the terminal calls us."""
    if os.path.basename(sys.argv[0]) == "evenhand":
        return "evenhand"
    # As it was typed: relative where it lies below the working directory, so that it can be read and copied.
    python = os.path.relpath(sys.executable)
    return f"{sys.executable if python.startswith('..') else python} -m app.cli"
