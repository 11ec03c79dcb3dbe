"""`evenhand top`: a running deployment in the terminal, over HTTP or straight from its Redis.

Owns the options, the loop of drawing and keys, and the end, which leaves the terminal as it was. What is drawn is
`app.terminal.picture`'s business, where it comes from the feed's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live

from app.terminal import arguments
from app.terminal.failures import CommandError, readable
from app.terminal.feed import Feed, Seen
from app.terminal.keyboard import keyboard
from app.terminal.node_table import SORTS
from app.terminal.picture import OLD_S, draw
from app.terminal.reach import Deployment, Misused, add_redis_options, add_url_options, reached

EXAMPLE = """\
example:
  evenhand top
  evenhand top --url http://10.0.0.1:8000 --admin-key KEY
  evenhand top --redis-url redis://10.0.0.2:6379/0      without any worker
  evenhand top --once | head -20                        one picture, as where stdout is no terminal

LOAD is unfinished against speed, the longest bar is the most loaded node's; a split request counts as unfinished on
each of its nodes. LATENCY is the last 15 answers, each against the slowest of them; 1MIN a node's share of what was
given to its role in the last minute, retries too; given/min counts a split request where it ends. Decisions are a
sample: at most 5 a second of each worker. NO_COLOR is respected.
keys: q quits, s sorts the nodes by trouble, load, name
"""
TICK_S = 0.2
"""Keys are felt at once, and the age of what is shown goes on."""
DEFAULT_INTERVAL_S = 1.0
SHORTEST_S = 0.2
LONGEST_S = 3600.0
DUMB = ("dumb", "unknown")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EXAMPLE, argparse.RawDescriptionHelpFormatter
    add_url_options(parser)
    add_redis_options(parser)
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument(
        "--interval-s",
        type=arguments.seconds(SHORTEST_S, LONGEST_S),
        default=DEFAULT_INTERVAL_S,
        metavar="SECONDS",
        help=f"between two looks at Redis, and two pictures; default {DEFAULT_INTERVAL_S:g}",
    )


def run(args: argparse.Namespace) -> int:
    try:
        deployment = reached(args)
        if args.once or not sys.stdout.isatty() or os.environ.get("TERM") in DUMB:
            once(deployment)
        else:
            live(deployment, args.interval_s)
    except (CommandError, Misused) as e:
        print(f"evenhand top: {e}", file=sys.stderr)
        return 2 if isinstance(e, Misused) else 1
    return 0


def once(deployment: Deployment) -> None:
    """One picture, as long as it is."""
    console = Console(highlight=False)
    state = deployment.state()
    with readable(deployment.name):
        lines = draw(Seen(state), width=console.width)
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def live(deployment: Deployment, interval_s: float) -> None:
    feed = Feed(deployment, interval_s)
    feed.start()
    console = Console(highlight=False)
    sort, drawn_at_s, size = 0, float("-inf"), console.size
    try:
        with (
            _ended_in_order(),
            keyboard() as keys,
            Live(
                console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            ) as show,
        ):
            while True:
                now_s = time.monotonic()
                if now_s - drawn_at_s >= interval_s or console.size != size:
                    drawn_at_s, size = now_s, console.size
                    show.update(_picture(feed.seen, console, SORTS[sort], OLD_S + 2 * interval_s), refresh=True)
                key = keys.key(min(TICK_S, interval_s))
                if key == "q":
                    return
                if key == "s":
                    sort, drawn_at_s = (sort + 1) % len(SORTS), float("-inf")
    finally:
        feed.close()


def _picture(seen: Seen, console: Console, sort: str, old_after_s: float) -> Group:
    keys = f"q quits  s sorts: {sort}"
    size = {"width": console.width, "height": console.height}
    return Group(*draw(seen, sort=sort, keys=keys, old_after_s=old_after_s, **size))


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does: the terminal gets its screen back."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
