"""The command `evenhand`: `serve`, `config ...`, `nodes ...`, `top`, `explain`, `check`, `engine`.

Owns the choice of the command and the exit codes: 0 done, 1 failed, 2 used wrongly, with one line on stderr that
says what is wrong. Each command is a module with `add_arguments(parser)` and `run(args)`, loaded only when it is
the one: a look at the nodes should not wait for a server's imports.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from app import __version__
from app.nearest import nearest

AddArguments = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int]

COMMANDS = {
    "serve": (
        "serve one OpenAI-compatible endpoint in front of all nodes",
        "Serve one OpenAI-compatible endpoint in front of all nodes. A flag wins over its environment variable, "
        "the variable over the file that --config names, the file over the default. A list is several words after its "
        "flag, or a variable with spaces or commas between its items.",
    ),
    "config": (
        "show or check the settings that serve would have",
        "Show or check the settings that `serve` would have with the same flags, variables and file.",
    ),
    "nodes": ("list, add, remove or drain the nodes of a running deployment", "Manage the nodes of a deployment."),
    "top": (
        "watch a running deployment in the terminal",
        "Watch a running deployment: its nodes, workers, encoders, links and the latest decisions. "
        "q ends it, s sorts the nodes another way.",
    ),
    "explain": (
        "what the next decision for a model would weigh",
        "Say what the next decision for a model would weigh: the candidates with their scores, who is passed over and "
        "why, and the rule.",
    ),
    "check": (
        "look at a deployment, say what is wrong and how to mend it",
        "Look at a deployment, its Redis, its nodes and this host; say what is wrong and how to mend it.",
    ),
    "engine": (
        "a simulated engine that streams",
        "A simulated engine: OpenAI-compatible, without a model. For trying out and for tests.",
    ),
}


class Parser(argparse.ArgumentParser):
    """argparse's, with a usage line that stays one line however many flags there are."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})  # a typo must not become another flag

    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    def below(self, name: str) -> Parser | None:
        """The parser of a command, or of its verb, where there is one."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found: Parser | None = action.choices.get(name)
                return found
        return None

    def refuse(self, words: Sequence[str], flags: Iterable[str] = ()) -> NoReturn:
        """End because of words that nobody knows; `flags`: what could have been meant beside its own."""
        flag = next((word.partition("=")[0] for word in words if word.startswith("-")), "")
        near = nearest(flag, [*self.flags(), *flags])
        self.error(f"unknown: {' '.join(words)}" + (f"; did you mean {near}?" if near else ""))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            near = nearest(value, action.choices)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(action.choices)}"
            self.error(f"unknown {str(action.metavar).lower()}: {value}; {hint}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"usage: {self.prog} [options] (all of them: {self.prog} --help)\n{self.prog}: {message}\n")


def load(command: str) -> tuple[AddArguments, Run]:
    # Each by its own import: so the import rules see it.
    if command == "serve":
        from app.commands import serve

        return serve.add_arguments, serve.run
    if command == "config":
        from app.commands import config

        return config.add_arguments, config.run
    if command == "nodes":
        from app.commands import nodes

        return nodes.add_arguments, nodes.run
    if command == "top":
        from app.commands import top

        return top.add_arguments, top.run
    if command == "explain":
        from app.commands import explain

        return explain.add_arguments, explain.run
    if command == "check":
        from app.commands import check

        return check.add_arguments, check.run
    from workers.engine import command as engine

    return engine.add_arguments, engine.run


def build_parser(command: str | None) -> Parser:
    """The parser of all commands, with the options of `command` only."""
    parser = Parser(prog="evenhand", description="A request distributor for LLM engines.")
    parser.add_argument("--version", action="version", version=f"evenhand {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (short, long) in COMMANDS.items():
        made = commands.add_parser(name, help=short, description=long)
        if name == command:
            add_arguments, _ = load(name)
            add_arguments(made)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(arguments[0] if arguments else None)
    if arguments and arguments[0].startswith("-") and arguments[0] not in parser.flags():
        parser.refuse(arguments[:1])  # argparse would say no more than that the command is missing
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        used = parser.below(args.command)
        assert used is not None
        verb = used.below(getattr(args, "verb", ""))
        used.refuse(unknown, verb.flags() if verb else ())
    _, run = load(args.command)
    # A terminal that can't show a character shows something else in its place.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        return run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `evenhand nodes list | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
