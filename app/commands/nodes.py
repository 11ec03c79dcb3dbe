"""`evenhand nodes list | add | remove | drain`: the management calls of a running deployment, from a shell.

Owns their options, the calls and what they print. It changes nodes over HTTP only, as anybody may; a list may also
come from Redis. Only the standard library, so that it answers before a person notices.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from app.errors import BadRequest
from app.nodes import Role, about_itself, normalise_url, parse_host_header
from app.terminal import arguments
from app.terminal.by_url import Refused
from app.terminal.failures import CommandError, readable
from app.terminal.listed import listed
from app.terminal.reach import REDIS_VARIABLE, Deployment, Misused, add_redis_options, add_url_options, by_url, reached
from app.terminal.words import columns, printable

HEAD = ("URL", "ROLE", "STATE", "UNFINISHED", "LATENCY_S", "SPEED", "MODELS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Both before and after the verb, as people type it; after it nothing is a default, or it would win.
    _add_shared(parser)
    add_redis_options(parser)
    shared = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    _add_shared(shared)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=text, description=text, parents=[shared])

    shown = verb("list", "show all nodes")
    shown.add_argument("--all", action="store_true", help="also nodes that are gone")
    shown.argument_default = argparse.SUPPRESS
    add_redis_options(shown)
    add = verb("add", "add a node, or change one; running counts stay")
    add.add_argument("node", metavar="NODE_URL", type=_node)
    add.add_argument(
        "--role",
        type=arguments.role,
        help=f"one of {', '.join(role.name for role in Role)}; default: as registered, else Hybrid",
    )
    add.add_argument(
        "--models", nargs="+", metavar="MODEL", help="models that it serves; not given: the engine is asked"
    )
    add.add_argument(
        "--speed", type=arguments.speed, help="any unit, the same for all nodes; default: the others' average"
    )
    add.add_argument(
        "--bootstrap-port",
        type=arguments.whole_number(1, 65535),
        help="prefill nodes of mooncake and sglang: port of their bootstrap server",
    )
    add.add_argument(
        "--host-header",
        type=_host,
        metavar="HOST",
        help="name that it is asked under, and that its certificate has; default: that of its URL",
    )
    add.add_argument("--key", help="API key of this engine, where it differs from --engine-key of `serve`")
    remove = verb("remove", "remove a node at once; its running requests go on to their end")
    remove.add_argument("node", metavar="NODE_URL", type=_node)
    drain = verb("drain", "send a node no new requests, and remove it when its running ones have ended")
    drain.add_argument("node", metavar="NODE_URL", type=_node)
    drain.add_argument(
        "--timeout-s",
        type=arguments.seconds(),
        metavar="SECONDS",
        help="remove it after this long in any case; default: --grace-s of `serve`",
    )


def _add_shared(parser: argparse.ArgumentParser) -> None:
    add_url_options(parser)
    parser.add_argument("--json", action="store_true", help="print the deployment's answer as JSON")


def run(args: argparse.Namespace) -> int:
    try:
        answer = _call(args)
    except (CommandError, Misused) as e:
        print(f"evenhand nodes {args.verb}: {e}", file=sys.stderr)
        return 2 if isinstance(e, Misused) else 1
    if args.json:
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    elif args.verb == "list":
        print(table(answer))
    else:
        print(printable(answer))
    return 0


def _call(args: argparse.Namespace) -> Any:
    if args.verb == "list":
        # The variable alone changes nothing: scripts read what `/nodes/status` has and the view of Redis has not.
        environ = {name: value for name, value in os.environ.items() if name != REDIS_VARIABLE}
        return _listed(reached(args, environ), gone=args.all)
    if args.redis_url:
        raise Misused("--redis-url is for `nodes list`; nodes are changed over HTTP: --url")
    deployment = by_url(args)
    if args.verb == "add":
        names = ("role", "models", "speed", "bootstrap_port", "host_header")
        status = {name: getattr(args, name) for name in names}
        body: dict[str, Any] = {"url": args.node}
        if given := {name: value for name, value in status.items() if value is not None}:
            body["status"] = given
        if args.key:
            body["key"] = args.key
        return deployment.ask("POST", "/nodes/add", body)
    # The answer to a removal is LMDeploy's, the same for a node that was never there.
    known = deployment.nodes(gone=True)
    if args.node not in known:
        raise CommandError(f"{printable(args.node)} is not registered; `evenhand nodes list --all` shows what is")
    query = {"drain": "true"} if args.verb == "drain" else {}
    if query and args.timeout_s is not None:
        query["timeout_s"] = f"{args.timeout_s:g}"
    answer = deployment.ask("POST", "/nodes/remove" + (f"?{urlencode(query)}" if query else ""), {"url": args.node})
    if source := known[args.node].get("source"):
        again = "registers it again as long as it lists it; take it out there"
        print(f"evenhand nodes {args.verb}: {printable(source)} {again}", file=sys.stderr)
    return answer


def _listed(deployment: Deployment, *, gone: bool) -> dict[str, dict[str, Any]]:
    """As it is now; while Redis is away as it was last known, which is said."""
    try:
        return deployment.nodes(gone=gone)
    except Refused as e:
        if e.status != HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        try:
            state = deployment.state()
            with readable(deployment.name):
                nodes = listed(state, gone=gone)
        except CommandError:
            raise e from None
        why = str(e).rstrip(". ")
        print(f"evenhand nodes list: {why}; these are the last known nodes, with counts of one worker", file=sys.stderr)
        return nodes


def table(nodes: dict[str, dict[str, Any]]) -> str:
    """All nodes of a `/nodes/status` answer, one a line, in columns."""
    if not nodes:
        return "no nodes"
    # A column that says something, or none.
    sourced = any(node.get("source") for node in nodes.values())
    rows: list[tuple[object, ...]] = [(*HEAD, "SOURCE", "REASON") if sourced else (*HEAD, "REASON")]
    for url, node in nodes.items():
        window = node.get("latency") or []
        speed = node.get("speed")
        rows.append(
            (
                url,
                Role(node["role"]).name if node.get("role") in Role._value2member_map_ else node.get("role", "-"),
                node.get("state", "-"),
                node.get("unfinished", "-"),
                f"{sum(window) / len(window):.3f}" if window else "-",
                f"{speed:g}" if isinstance(speed, (int, float)) else "-",
                ",".join(node.get("models") or []) or "-",
                *((node.get("source") or "-",) if sourced else ()),
                about_itself(node.get("reason") or "", url),
            )
        )
    return "\n".join(columns(rows, right={3, 4, 5}))


def _node(text: str) -> str:
    try:
        return normalise_url(text, field="NODE_URL")
    except BadRequest as e:
        # What has a password in it is not said again.
        raise argparse.ArgumentTypeError(e.message if "@" in text else f"{e.message}, not {text!r}") from e


def _host(text: str) -> str:
    try:
        return parse_host_header(text, field="--host-header")
    except BadRequest as e:
        raise argparse.ArgumentTypeError(f"{e.message}, not {text!r}") from e
