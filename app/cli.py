"""The command `evenhand`: `serve`, `nodes ...`, `engine`.

Owns the parsing and the exit codes: 0 done, 1 failed, 2 used wrongly, with one line on stderr that says what
is wrong. The flags of `serve` are made from the fields of `Settings`, so that each option exists once.
What the commands do is elsewhere, and imported only when it is needed: `--help` should not load a server.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from app import __version__, nodes_command
from app.errors import ConfigurationError
from app.settings import Settings, choices_of, flag_of, is_list, is_secret, variables_of

METAVARS = {
    "server_name": "HOST",
    "server_port": "PORT",
    "api_keys": "KEY",
    "admin_keys": "KEY",
    "engine_key": "KEY",
    "nodes": "URL",
    "redis_url": "URL",
    "trusted_nodes": "CIDR",
    "max_body_size": "SIZE",
    "state_dir": "DIR",
    "ssl_keyfile": "FILE",
    "ssl_certfile": "FILE",
    "namespace": "NAME",
}


class Parser(argparse.ArgumentParser):
    """argparse's, with a usage line that stays one line however many flags there are."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})  # a typo must not become another flag

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"usage: {self.prog} [options] (all of them: {self.prog} --help)\n{self.prog}: {message}\n")


def build_parser(*, engine: bool) -> argparse.ArgumentParser:
    """The parser of all commands. `engine`: with the options of the simulated engine, which load its code."""
    parser = Parser(prog="evenhand", description="A request distributor for LLM engines.")
    parser.add_argument("--version", action="version", version=f"evenhand {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    serve = commands.add_parser(
        "serve",
        help="serve one OpenAI-compatible endpoint in front of all nodes",
        description="Serve one OpenAI-compatible endpoint in front of all nodes. A flag wins over its environment "
        "variable, the variable over the default.",
    )
    for name, field in Settings.model_fields.items():
        _add_flag(serve, name, field)
    serve.add_argument(
        "--simulate",
        type=_count,
        default=0,
        metavar="N",
        help="Start N simulated engines too, which register themselves: to try things out without a GPU. Default 0.",
    )

    nodes = commands.add_parser(
        "nodes", help="list, add, remove or drain the nodes of a running deployment", description="Manage nodes."
    )
    nodes_command.add_arguments(nodes)
    engine_parser = commands.add_parser(
        "engine",
        help="a simulated engine that streams",
        description="A simulated engine: OpenAI-compatible, without a model. For trying out and for tests.",
    )
    if engine:
        from workers.engine import add_arguments

        add_arguments(engine_parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(engine=arguments[:1] == ["engine"])
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.prog = f"evenhand {args.command}"  # whose flags they were meant to be
        parser.error(f"unknown: {' '.join(unknown)}")
    try:
        if args.command == "nodes":
            return nodes_command.run(args)
        if args.command == "engine":
            from workers.engine import run

            return run(args)
        return _serve(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `evenhand nodes list | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _serve(args: argparse.Namespace) -> int:
    flags = {name: getattr(args, name) for name in Settings.model_fields}
    try:
        settings = Settings.load(flags)
        from workers.supervisor import serve

        return serve(settings, simulate=args.simulate)
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
    if field.annotation is not bool and "efault" not in text and not (is_secret(name) or field.default is None):
        text += f"Default {_default(field)}. "
    return (text + f"Env {' or '.join(variables_of(name))}.").replace("%", "%%")


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "none"
    if isinstance(field.default, tuple):
        return " ".join(field.default) or "none"
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


def _count(text: str) -> int:
    if text.isdecimal() and int(text) <= 100:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 100, not {text!r}")


if __name__ == "__main__":
    sys.exit(main())
