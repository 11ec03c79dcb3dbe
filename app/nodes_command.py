"""`evenhand nodes list | add | remove | drain`: the management calls of a running deployment, from a shell.

Owns their options, the calls and what they print. It must not know Redis: it speaks to `/nodes/*` as anybody may.
Only the standard library, so that it answers before a person notices.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from app.errors import BadRequest
from app.nodes import Role, normalise_url, parse_role, parse_speed

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 30.0  # an add without models waits for the engine's own answer


class CommandError(Exception):
    """The call failed; one line for the person who made it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Both before and after the verb, as people type it; after it nothing is a default, or it would win.
    _add_shared(parser, default_url=os.environ.get("EVENHAND_URL") or DEFAULT_URL)
    shared = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    _add_shared(shared, default_url=argparse.SUPPRESS)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=text, description=text, parents=[shared])

    verb("list", "show all nodes").add_argument("--all", action="store_true", help="also nodes that are gone")
    add = verb("add", "add a node, or change one; running counts stay")
    add.add_argument("node", metavar="NODE_URL", type=_node)
    add.add_argument(
        "--role",
        type=_role,
        help=f"one of {', '.join(role.name for role in Role)}; default: as registered, else Hybrid",
    )
    add.add_argument(
        "--models", nargs="+", metavar="MODEL", help="models that it serves; not given: the engine is asked"
    )
    add.add_argument("--speed", type=_speed, help="any unit, the same for all nodes; default: the others' average")
    add.add_argument(
        "--bootstrap-port", type=int, help="prefill nodes of mooncake and sglang: port of their bootstrap server"
    )
    add.add_argument("--key", help="API key of this engine, where it differs from --engine-key of `serve`")
    remove = verb("remove", "remove a node at once; its running requests go on to their end")
    remove.add_argument("node", metavar="NODE_URL", type=_node)
    drain = verb("drain", "send a node no new requests, and remove it when its running ones have ended")
    drain.add_argument("node", metavar="NODE_URL", type=_node)
    drain.add_argument(
        "--timeout-s",
        type=_seconds,
        metavar="SECONDS",
        help="remove it after this long in any case; default: --grace-s of `serve`",
    )


def _add_shared(parser: argparse.ArgumentParser, *, default_url: str) -> None:
    parser.add_argument(
        "--url",
        dest="deployment",
        type=_deployment,
        metavar="URL",
        default=default_url,
        help=f"the deployment; env EVENHAND_URL, default {DEFAULT_URL}",
    )
    # The key from the environment is read when it is used: a default would be in every help text's reach.
    parser.add_argument(
        "--admin-key", metavar="KEY", help="its admin key, where it asks for one; env EVENHAND_ADMIN_KEY"
    )
    parser.add_argument("--json", action="store_true", help="print the deployment's answer as JSON")


def run(args: argparse.Namespace) -> int:
    try:
        answer = _call(args)
    except CommandError as e:
        print(f"evenhand nodes {args.verb}: {e}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    elif args.verb == "list":
        print(table(answer))
    else:
        print(_printable(answer))
    return 0


def _call(args: argparse.Namespace) -> Any:
    if args.verb == "list":
        return _ask(args, "GET", "/nodes/status" + ("?all=1" if args.all else ""))
    if args.verb == "add":
        names = ("role", "models", "speed", "bootstrap_port")
        status = {name: getattr(args, name) for name in names}
        body: dict[str, Any] = {"url": args.node}
        if given := {name: value for name, value in status.items() if value is not None}:
            body["status"] = given
        if args.key:
            body["key"] = args.key
        return _ask(args, "POST", "/nodes/add", body)
    # The answer to a removal is LMDeploy's, the same for a node that was never there.
    if args.node not in _ask(args, "GET", "/nodes/status?all=1"):
        raise CommandError(f"{_printable(args.node)} is not registered; `evenhand nodes list --all` shows what is")
    query = {"drain": "true"} if args.verb == "drain" else {}
    if query and args.timeout_s is not None:
        query["timeout_s"] = f"{args.timeout_s:g}"
    return _ask(args, "POST", "/nodes/remove" + (f"?{urlencode(query)}" if query else ""), {"url": args.node})


def _ask(args: argparse.Namespace, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    base = args.deployment
    request = urllib.request.Request(base + path, method=method)
    request.add_header("Accept", "application/json")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    if key := args.admin_key or os.environ.get("EVENHAND_ADMIN_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    # No proxy from the environment: a deployment is near, and http_proxy is about what is far.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as e:
        raise CommandError(f"{e.code} {_message(e)}") from e
    except urllib.error.URLError as e:
        raise CommandError(f"can't reach {base}: {_reason(e.reason)}; is it another --url (EVENHAND_URL)?") from e
    except (OSError, ValueError) as e:
        raise CommandError(f"{base} did not answer as Evenhand does: {_reason(e)}") from e


def _message(error: urllib.error.HTTPError) -> str:
    try:
        text = json.loads(error.read())["error"]["message"]
    except (OSError, ValueError, LookupError, TypeError):
        text = error.reason
    hint = "; give --admin-key (EVENHAND_ADMIN_KEY)" if error.code in (401, 403) else ""
    return _printable(text) + hint


def _reason(reason: object) -> str:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"{reason.verify_message} (SSL_CERT_FILE names further certificates to trust)"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return _printable(reason) or type(reason).__name__


def table(nodes: dict[str, dict[str, Any]]) -> str:
    """All nodes of a `/nodes/status` answer, one a line, in columns."""
    if not nodes:
        return "no nodes"
    rows: list[Sequence[str]] = [("URL", "ROLE", "STATE", "UNFINISHED", "LATENCY_S", "SPEED", "MODELS", "REASON")]
    for url, node in nodes.items():
        window = node.get("latency") or []
        speed = node.get("speed")
        row = (
            url,
            Role(node["role"]).name if node.get("role") in Role._value2member_map_ else node.get("role", "-"),
            node.get("state", "-"),
            node.get("unfinished", "-"),
            f"{sum(window) / len(window):.3f}" if window else "-",
            f"{speed:g}" if isinstance(speed, (int, float)) else "-",
            ",".join(node.get("models") or []) or "-",
            node.get("reason") or "",
        )
        rows.append([_printable(cell) for cell in row])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = {3, 4, 5}
    lines = (
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _printable(value: object) -> str:
    """One line without control characters: model names and messages come from elsewhere."""
    return "".join(c if c.isprintable() else "?" for c in str(value))


def _deployment(text: str) -> str:
    try:
        return normalise_url(text, field="a deployment's URL")
    except BadRequest as e:
        raise argparse.ArgumentTypeError(f"{e.message} (EVENHAND_URL holds it too), not {text!r}") from e


def _node(text: str) -> str:
    try:
        return normalise_url(text, field="NODE_URL")
    except BadRequest as e:
        raise argparse.ArgumentTypeError(f"{e.message}, not {text!r}") from e


def _role(text: str) -> int:
    try:
        return int(parse_role(text))
    except BadRequest as e:
        raise argparse.ArgumentTypeError(f"{e.message}, not {text!r}") from e


def _speed(text: str) -> float:
    try:
        speed = parse_speed(float(text))
        if speed is not None:
            return speed
    except (ValueError, BadRequest):
        pass
    raise argparse.ArgumentTypeError(f"must be a finite number greater than 0, not {text!r}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
        if 0 <= seconds < float("inf"):
            return seconds
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be a number of seconds of at least 0, not {text!r}")
