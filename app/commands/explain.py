"""`evenhand explain --model M`: what the next decision would weigh, and why it passes over the others.

Owns how an `explain` document is told. It must not know how it came about.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from app.nearest import nearest
from app.nodes import about_itself
from app.terminal.failures import CommandError, UnknownModel, readable
from app.terminal.reach import Deployment, Misused, add_redis_options, add_url_options, reached
from app.terminal.words import columns, count, printable, shortened

EXAMPLE = """\
example:
  evenhand explain --model llama
  evenhand explain --model llama --redis-url redis://10.0.0.2:6379/0      without any worker

SCORE is what the strategy compares, less is better; CHANCE is that of being the next one. A SPEED in brackets was
given by nobody: it is the others' average. Ends with 1 where a role has nobody, so that a request would fail.
"""
MODELS_NAMED = 20
HEAD = ("CHANCE", "SCORE", "NODE", "ROLE", "UNFINISHED", "SPEED", "LATENCY_S")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EXAMPLE, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, metavar="MODEL", help="the model that a request would name")
    add_url_options(parser)
    add_redis_options(parser)
    parser.add_argument("--json", action="store_true", help="print the document as JSON")


def run(args: argparse.Namespace) -> int:
    try:
        deployment = reached(args)
        document = _ask(deployment, args.model)
        with readable(deployment.name):
            lines = list(told(document))
    except (CommandError, Misused) as e:
        print(f"evenhand explain: {e}", file=sys.stderr)
        return 2 if isinstance(e, Misused) else 1
    if args.json:
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        print("\n".join(lines))
    return 0 if all(choice["candidates"] for choice in document["choices"]) else 1


def _ask(deployment: Deployment, model: str) -> dict[str, Any]:
    try:
        return deployment.explain(model)
    except UnknownModel as e:
        state = deployment.state()
        known = [*map(str, state["models"]), *map(str, state.get("aliases", ()))]
        if not known:
            raise CommandError(f"no node is registered with the model {printable(model)}, nor any other") from e
        near = nearest(model, known)
        raise CommandError(
            f"no node is registered with the model {printable(model)}; "
            + (f"did you mean {printable(near)}? " if near else "")
            + f"there {'is' if len(known) == 1 else 'are'} {_named(known)}"
        ) from e


def _named(models: list[str]) -> str:
    more = len(models) - MODELS_NAMED
    return printable(", ".join(models[:MODELS_NAMED]) + (f" and {more} more" if more > 0 else ""))


def told(document: dict[str, Any]) -> Iterator[str]:
    """The document in lines."""
    if alias := document.get("alias"):  # an older deployment does not say it
        yield f"{printable(alias)} is an alias of {printable(document['model'])}"
    strategy = document["strategy"] or "not known: no worker has said it yet"
    yield f"model {printable(document['model'])}, strategy {printable(strategy)}"
    if document["rule"]:
        yield printable(document["rule"])
    redis = document.get("redis")  # an older deployment does not say it
    if redis and not redis["up"]:
        yield f"Redis is away ({printable(redis['reason'])}): the counts are of the answering worker only"
    for choice in document["choices"]:
        candidates = sorted(choice["candidates"], key=lambda one: -one["chance"])
        yield ""
        yield f"{' or '.join(map(printable, choice['roles']))}: {count(len(candidates), 'candidate')}"
        if candidates:
            rows = [HEAD, *map(_row, candidates)]
            yield from (f"  {line}" for line in columns(rows, right={0, 1, 4, 5, 6}))
        else:
            yield f"  nobody: a request{' with media' if choice['roles'] == ['Encode'] else ''} would get a 503"
        if choice["passed_over"]:
            yield "  passed over:"
            rows = [(shortened(one["node"]), about_itself(one["why"], one["node"])) for one in choice["passed_over"]]
            yield from (f"    {line}" for line in columns(rows))


def _row(one: dict[str, Any]) -> tuple[object, ...]:
    speed = f"{one['speed']:g}"
    return (
        f"{one['chance']:.0%}" if one["chance"] in (0, 1) else f"{one['chance']:.1%}",
        "-" if one["score"] is None else f"{one['score']:.3g}",
        shortened(one["node"]),
        one["role"],
        one["unfinished"],
        speed if one["given_speed"] is not None else f"({speed})",
        "-" if one["mean_latency_s"] is None else f"{one['mean_latency_s']:.3f}",
    )
