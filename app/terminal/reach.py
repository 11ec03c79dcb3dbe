"""How a command reaches a deployment: over HTTP, or straight from its Redis.

Owns the options, their environment variables and which of them wins; the documents come from `by_url` and
`by_redis`. It must not know what a command makes of them. Light: Redis and the settings are loaded only where Redis
is asked.

A flag wins over any variable. Between the variables EVENHAND_URL wins: EVENHAND_REDIS_URL is `evenhand serve`'s own,
and stands in its environment anyhow.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from app.errors import BadRequest
from app.nodes import normalise_url
from app.terminal.by_url import ByUrl

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE, KEY_VARIABLE = "EVENHAND_URL", "EVENHAND_ADMIN_KEY"
REDIS_VARIABLE = "EVENHAND_REDIS_URL"


class Deployment(Protocol):
    """What a command asks of a running deployment. The documents are those of docs/decisions/0022.

    Everything may raise CommandError.
    """

    @property
    def name(self) -> str:
        """For messages; holds no password."""

    def state(self) -> dict[str, Any]:
        """The state as it is now."""

    def explain(self, model: str) -> dict[str, Any]:
        """What the next decision would weigh. Raises UnknownModel."""

    def nodes(self, *, gone: bool) -> dict[str, dict[str, Any]]:
        """The nodes as `/nodes/status` answers."""

    def watch(self, interval_s: float) -> Iterator[tuple[str, Any]]:
        """("state", a state) and ("decisions", new ones), as they come, until something fails."""


class Misused(Exception):
    """The options contradict each other or can't be read: exit code 2 and one line."""


def add_url_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        dest="deployment",
        type=_deployment,
        metavar="URL",
        default=parser.argument_default,
        help=f"the deployment; env {URL_VARIABLE}, default {DEFAULT_URL}",
    )
    # The key from the environment is read when it is used: a default would be in every help text's reach.
    parser.add_argument(
        "--admin-key",
        metavar="KEY",
        default=parser.argument_default,
        help=f"its admin key, or a reader key to look only, where it asks for one; env {KEY_VARIABLE}",
    )


def add_redis_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--redis-url",
        metavar="URL",
        default=parser.argument_default,
        help=f"its Redis instead: redis://, unix://, redis+sentinel://, redis+cluster://; env {REDIS_VARIABLE}",
    )
    parser.add_argument(
        "--namespace",
        metavar="NAME",
        default=parser.argument_default,
        help='with --redis-url: which deployment of that Redis; env EVENHAND_NAMESPACE, default "default"',
    )


def by_url(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> ByUrl:
    """The deployment over HTTP. Raises Misused."""
    url = getattr(args, "deployment", None) or environ.get(URL_VARIABLE) or DEFAULT_URL
    try:
        url = normalise_url(url, field="a deployment's URL")
    except BadRequest as e:
        raise Misused(f"{URL_VARIABLE}: {_fault(e, url)}") from e
    return ByUrl(url, getattr(args, "admin_key", None) or environ.get(KEY_VARIABLE))


def redis_named(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether it is Redis that is to be asked. Raises Misused where both are named by flags, or parts of both."""
    url, redis_url = getattr(args, "deployment", None), getattr(args, "redis_url", None)
    if url and redis_url:
        raise Misused("give --url or --redis-url, not both: one says how the deployment is reached")
    if redis_url or (not (url or environ.get(URL_VARIABLE)) and environ.get(REDIS_VARIABLE)):
        return True
    if getattr(args, "namespace", None):
        raise Misused("--namespace goes with --redis-url: a URL leads to one deployment")
    return False


def reached(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Deployment:
    """The deployment by whichever is named, over HTTP where none is. Raises Misused."""
    if not redis_named(args, environ):
        return by_url(args, environ)
    from app.errors import ConfigurationError
    from app.settings import Settings
    from app.terminal.by_redis import ByRedis

    try:
        settings = Settings.load({"redis_url": args.redis_url, "namespace": args.namespace})
    except ConfigurationError as e:
        raise Misused(e.message) from e
    assert settings.redis_url is not None
    return ByRedis(settings.redis_url, settings.namespace)


def _fault(error: BadRequest, text: str) -> str:
    # What has a password in it is not said again.
    if "@" in text:
        return "a deployment's URL must not hold a user or password; the key goes in --admin-key"
    return f"{error.message}, not {text!r}"


def _deployment(text: str) -> str:
    try:
        return normalise_url(text, field="a deployment's URL")
    except BadRequest as e:
        raise argparse.ArgumentTypeError(f"{_fault(e, text)} ({URL_VARIABLE} holds it too)") from e
