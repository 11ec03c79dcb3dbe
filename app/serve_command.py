"""`evenhand serve`: its flags, made from the fields of `Settings` so that each option exists once."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from app.dispatch.topology import Topology
from app.errors import ConfigurationError
from app.settings import Settings, choices_of, flag_of, is_list, is_secret, misspelt_variables, variables_of

METAVARS = {
    "server_name": "HOST",
    "server_port": "PORT",
    "api_keys": "KEY",
    "admin_keys": "KEY",
    "engine_key": "KEY",
    "nodes": "URL",
    "encode_servers_urls": "URL",
    "prefill_servers_urls": "URL",
    "decode_servers_urls": "URL",
    "ec_consumer_zmq_addrs": "ADDRESS",
    "redis_url": "URL",
    "trusted_nodes": "CIDR",
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
    for name, field in Settings.model_fields.items():
        _add_flag(parser, name, field)
    parser.add_argument(
        "--simulate",
        type=_count,
        default=0,
        metavar="N",
        help="Start N simulated engines too, which register themselves: to try things out without a GPU. Default 0.",
    )


def run(args: argparse.Namespace) -> int:
    for line in misspelt_variables(os.environ):
        print(f"evenhand serve: {line}", file=sys.stderr)
    try:
        flags = {name: getattr(args, name) for name in Settings.model_fields}
        settings = Settings.load(flags)
        # A contradiction is one line here, and a traceback in every worker.
        idle = Topology.of(settings).without_effect(settings)
        if idle is not None:
            print(f"evenhand serve: {idle}", file=sys.stderr)
        # After the check: a wrong flag should not wait for a server's imports.
        from workers.in_force import sources_of
        from workers.supervisor import serve

        return serve(settings, sources=sources_of(flags), simulate=args.simulate)
    except ConfigurationError as e:
        print(f"evenhand serve: {e.message}", file=sys.stderr)
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


def _count(text: str) -> int:
    if text.isdecimal() and int(text) <= 100:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 100, not {text!r}")
