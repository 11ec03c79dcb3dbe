"""`evenhand serve`: its flags, made from the fields of `Settings` so that each option exists once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from app.dispatch.topology import Topology
from app.errors import ConfigurationError
from app.settings import (
    Settings,
    choices_of,
    flag_of,
    is_list,
    is_secret,
    misspelt_variables,
    variables_of,
    warnings_of,
)
from app.terminal import arguments

METAVARS = {
    "config": "FILE",
    "server_name": "HOST",
    "server_port": "PORT",
    "api_keys": "KEY",
    "admin_keys": "KEY",
    "reader_keys": "KEY",
    "api_keys_file": "FILE",
    "admin_keys_file": "FILE",
    "reader_keys_file": "FILE",
    "engine_key": "KEY",
    "nodes": "URL",
    "alias": "NAME=MODEL",
    "model_routing": "MODEL=STRATEGY",
    "default_model": "MODEL",
    "encode_servers_urls": "URL",
    "prefill_servers_urls": "URL",
    "decode_servers_urls": "URL",
    "ec_consumer_zmq_addrs": "ADDRESS",
    "redis_url": "URL",
    "trusted_nodes": "CIDR",
    "cors_origins": "ORIGIN",
    "max_body_size": "SIZE",
    "state_dir": "DIR",
    "ssl_keyfile": "FILE",
    "ssl_certfile": "FILE",
    "engine_ca_file": "FILE",
    "engine_cert_file": "FILE",
    "engine_key_file": "FILE",
    "discover": "URL",
    "namespace": "NAME",
    "trace_endpoint": "URL",
    "log_sample": "RATIO",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    parser.add_argument(
        "--simulate",
        type=arguments.whole_number(0, 100),
        default=0,
        metavar="N",
        help="Start N simulated engines too, which register themselves: to try things out without a GPU. Default 0.",
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """A flag for each setting; `settings_among` has them back."""
    for name, field in Settings.model_fields.items():
        _add_flag(parser, name, field)


def settings_among(args: argparse.Namespace) -> dict[str, object]:
    return {name: getattr(args, name) for name in Settings.model_fields}


def notes_on(settings: Settings, sources: Mapping[str, str]) -> Iterator[str]:
    """What is allowed and most likely not meant. Raises ConfigurationError: settings that contradict each other."""
    yield from warnings_of(settings, sources)
    # A contradiction is one line here, and a traceback in every worker.
    idle = Topology.of(settings).without_effect(settings)
    if idle is not None:
        yield idle


def run(args: argparse.Namespace) -> int:
    doubts = [*misspelt_variables(os.environ)]
    try:
        settings, sources = Settings.load_with_sources(settings_among(args))
        doubts.extend(notes_on(settings, sources))
        # After the check: a wrong flag should not wait for a server's imports.
        from workers.processes import warn
        from workers.supervisor import serve

        while doubts:
            warn(doubts.pop(0), settings.log_format)
        return serve(settings, sources=sources, simulate=args.simulate)
    except ConfigurationError as e:
        for line in (*doubts, *e.lines):
            print(f"evenhand serve: {line}", file=sys.stderr)
        return 2


def _add_flag(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    """One flag from one field. Values stay text: `Settings` checks them, so a variable is checked alike."""
    options: dict[str, Any] = {"dest": name, "default": None, "help": _help(name, field)}
    if field.annotation is bool:
        options |= {"action": "store_const", "const": True}
    elif is_list(field):
        options |= {"nargs": "+", "action": "extend", "metavar": METAVARS[name]}
    elif choices_of(field):
        options |= {"metavar": "{" + ",".join(choices_of(field)) + "}"}
    else:
        unit = "SECONDS" if name.endswith("_s") else "N"
        options |= {"metavar": METAVARS.get(name, unit)}
    parser.add_argument(flag_of(name), **options)


def _help(name: str, field: FieldInfo) -> str:
    text = f"{field.description} "
    told = "default" in str(field.description).lower()
    if field.annotation is not bool and not told and not is_secret(name) and field.default is not None:
        text += f"Default {_default(field)}. "
    return (text + f"Env {' or '.join(variables_of(name))}.").replace("%", "%%")


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "none"
    if isinstance(field.default, tuple):
        return " ".join(field.default) or "none"
    if field.default == "default":
        return '"default"'
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
