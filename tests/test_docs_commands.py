"""What README and docs tell a reader to type does what they say it does.

`<!-- run -->` before a block marks it. A block of `sh` is commands that have to end with 0. One of `console` has
commands behind `$ `, with what they print below them: that must agree, as `agrees` says, and the exit code must be 0
unless `$ echo $?` comes next. All marked blocks of a page run one after the other in one shell, on the deployment that
`make run` starts: two workers, three simulated engines, a Redis of its own in the default place below $HOME.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.deployment import Deployment
from tests.support.wait import eventually

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"^<!-- run -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "lua" / "README.md")
    if MARKED.search(page.read_text())
]
NEEDED = {"curl": ("curl",), "redis-cli": ("redis-cli", "valkey-cli")}
"""What commands of the pages need beside bash: command -> what serves as it."""

# Ports, moments, latencies, versions and addresses differ from run to run; a number below 1,000 is a count.
VARYING = re.compile(
    r"[\w.-]+-\d+-[0-9a-f]{8}\b|\b[0-9a-f]{22,64}\b|\d+(?:\.\d+)+|\d{1,3}(?:,\d{3})+|\d{4,}|\d\d:\d\d:\d\d"
)


@dataclass(frozen=True, slots=True)
class Command:
    text: str
    shown: str | None
    """What the page shows as its output; None: the block shows none."""


def commands_of(page: Path) -> list[Command]:
    found: list[Command] = []
    for kind, text in MARKED.findall(page.read_text()):
        if kind == "sh":
            found.append(Command(text, None))
            continue
        assert kind == "console", f"{page.name}: a block that is run is sh or console, not {kind}"
        assert text.startswith("$ "), f"{page.name}: a console block begins with a command"
        for each in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            typed = re.match(r"(?:.*\\\n)*.*\n", each)
            assert typed is not None
            found.append(Command(typed[0], each[typed.end() :]))
    return found


def plain(text: str) -> list[str]:
    lines = [re.sub(r"\s+", " ", VARYING.sub("#", line)).strip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def agrees(shown: str, said: str) -> bool:
    """Whether the output is what the page shows: apart from what `VARYING` finds, and from the width of gaps.

    `...` stands for anything within a line, a line of nothing else for any lines.
    """
    pattern = ""
    for line in plain(shown):
        inner = ".*".join(map(re.escape, line.split("...")))
        pattern += "(?:.*\n)*" if line == "..." else f"{inner}\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in plain(said))) is not None


def test_outputs_agree_where_only_figures_differ() -> None:
    shown = "http://127.0.0.1:41299  ready  2  0.353\nvm-1-0a1b2c3d  x\n...\nend {...}\n"
    assert agrees(shown, "http://127.0.0.1:9001   ready  2   1.2\nhost-77-ffffffff x\nmore\nmore\nend {1: 2}\n\n")
    assert not agrees(shown, "http://127.0.0.1:9001 ready 3 1.2\nhost-77-ffffffff x\nend {}\n")  # another count
    assert not agrees(shown, "http://127.0.0.1:9001 down 2 1.2\nhost-77-ffffffff x\nend {}\n")
    assert not agrees("a\n", "a\nb\n")


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    for command, tools in NEEDED.items():
        if not any(map(shutil.which, tools)):
            assert "EVENHAND_CI_RUN" not in os.environ, f"{command} is missing (.ci/run installs it)"
            pytest.skip(f"{command} is not installed")
    with Deployment(2, namespace="default", settings={"simulate": 3}) as made:
        eventually(lambda: made.get("/ready").status == 200)
        home = made.directory / "home" / ".local" / "state"
        home.mkdir(parents=True)
        (home / "evenhand").symlink_to(made.directory / "state")
        programs = made.directory / "bin"
        programs.mkdir()
        # Port 8000 may be somebody else's, so the commands that reach it by default are told another.
        (programs / "evenhand").write_text(
            f"#!/bin/sh\ncase $1 in nodes | top | explain) export EVENHAND_URL={made.url} ;; esac\n"
            f'exec {sys.executable} -m app.cli "$@"\n'
        )
        (programs / "evenhand").chmod(0o755)
        if not shutil.which("redis-cli"):
            (programs / "redis-cli").symlink_to(str(shutil.which("valkey-cli")))
        yield made


@pytest.mark.wide
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_a_page_do_what_it_says(page: Path, deployment: Deployment, tmp_path: Path) -> None:
    commands = commands_of(page)
    mark = "==== ended with"
    script = "".join(
        f"{command.text}\nended=$?; printf '\\n{mark} %d\\n' $ended; (exit $ended)\n" for command in commands
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("EVENHAND_", "XDG_"))}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # each `evenhand` would compile all that it imports
    env |= {
        "HOME": str(deployment.directory / "home"),
        "PATH": f"{deployment.directory / 'bin'}:{env['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "80",
        "NO_COLOR": "1",
    }
    here = "127.0.0.1:8000"
    ran = subprocess.run(
        ["bash", "-c", script.replace(here, f"127.0.0.1:{deployment.port}")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        cwd=tmp_path,
        timeout=50,
    )
    said = re.split(rf"\n{mark} (\d+)\n", ran.stdout)
    assert len(said) == 2 * len(commands) + 1, ran.stdout
    for command, following, output, code in zip(commands, [*commands[1:], None], said[0:-1:2], said[1::2], strict=True):
        asked = following is not None and following.text == "echo $?\n"
        assert code == "0" or asked, f"{command.text}ended with {code}:\n{output}"
        if command.shown is not None:
            assert agrees(command.shown, output), f"{command.text}is shown with\n{command.shown}\nbut said\n{output}"
    # The next page begins as this one did.
    eventually(lambda: [node["state"] for node in deployment.nodes("?all=1").values()] == ["ready"] * 3)


def test_every_page_that_is_for_running_has_commands_that_are_run() -> None:
    names = {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert names >= {"README.md", "docs/start.md", "docs/configuration.md", "docs/redis.md", "docs/watching.md"}
