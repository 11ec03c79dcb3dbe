"""`evenhand config`: what `serve` would go by with the same flags, variables and file, and whether it is right; the
digest of a key."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import sys

from app.access_keys import access_key
from app.commands.serve import add_settings, notes_on, settings_among
from app.dispatch.topology import Topology
from app.errors import ConfigurationError
from app.settings import Settings, misspelt_variables

Found = tuple[Settings, dict[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    show = verbs.add_parser(
        "show",
        help="the settings in force, and where each comes from",
        description="Print the settings that `serve` would have with these flags, and where each comes from; "
        "no key and no password.",
    )
    show.add_argument("--json", action="store_true", help="One JSON object: setting -> value, from.")
    check = verbs.add_parser(
        "check",
        help="whether the settings are right",
        description="Look at the settings that `serve` would have with these flags. Ends with 0, or with 2 and a "
        "line for each fault.",
    )
    for made in (show, check):
        add_settings(made)
    hash_key = verbs.add_parser(
        "hash-key",
        help="a key's digest, as it may stand in place of the key",
        description="Read a key from stdin and print its digest, which may stand in place of the key wherever callers' "
        "keys are set. Without this command: printf %s KEY | sha256sum.",
    )
    hash_key.add_argument("key", nargs="*", help=argparse.SUPPRESS)  # to be refused with the way that is right


def run(args: argparse.Namespace) -> int:
    if args.verb == "hash-key":
        if args.key:
            print(
                "evenhand config hash-key: the key comes on stdin, where no other user of this host sees it: "
                "printf %s KEY | evenhand config hash-key",
                file=sys.stderr,
            )
            return 2
        return _hash_key()
    found, faults = look(settings_among(args))
    for line in faults:
        print(line, file=sys.stderr)
    if found is None:
        return 2
    settings, sources = found
    for line in (*misspelt_variables(os.environ), *notes_on(settings, sources)):
        print(f"note: {line}", file=sys.stderr)
    if args.verb == "show":
        _show(settings, sources, as_json=args.json)
    else:
        print(f"the settings are right{f', those of {settings.config} too' if settings.config else ''}")
    return 0


def _hash_key() -> int:
    key = (getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.read()).strip()
    try:
        digest = access_key(key).digest
    except ValueError as e:
        print(f"evenhand config hash-key: a key {e}", file=sys.stderr)
        return 2
    print(f"sha256:{digest.hex()}")
    return 0


def look(flags: dict[str, object]) -> tuple[Found | None, list[str]]:
    """The settings and where they come from, or a line for each fault."""
    try:
        found = Settings.load_with_sources(flags)
        Topology.of(found[0])
    except ConfigurationError as e:
        return None, e.lines
    return found, []


def _show(settings: Settings, sources: dict[str, str], *, as_json: bool) -> None:
    from workers.in_force import aligned, as_objects, rows_of

    shown = rows_of(settings, sources, Settings.model_fields)
    print(json.dumps(as_objects(shown), indent=2, ensure_ascii=False) if as_json else "\n".join(aligned(shown)))
