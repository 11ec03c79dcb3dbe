"""`evenhand top` as a person sees it: in a terminal, and without one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.contract import Scripted, decision, many, node, state
from tests.support.wait import eventually

ROOT = Path(__file__).resolve().parents[2]
TOP = [sys.executable, "-m", "app.cli", "top"]
STYLE = re.compile(r"\x1b\[[0-9;]*m")
LEAVES = "\x1b[?1049l"  # the alternate screen
WITHIN_S = 15.0
Run = Callable[..., int]


def _take_the_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored by what a shell has started in the background


class Terminal:
    """A pseudo-terminal with `evenhand top` in it."""

    def __init__(self, *words: str, columns: int = 80, lines: int = 24, env: dict[str, str] | None = None) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(theirs)
        self.text = ""
        environment = {"TERM": "xterm-256color", "PATH": os.environ["PATH"], "LANG": "C.UTF-8", **(env or {})}
        self.process = subprocess.Popen(
            [*TOP, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
            preexec_fn=_take_the_terminal,
        )
        self._theirs = theirs  # kept open: the last words of who ended must not be lost

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self) -> str:
        """All that was drawn until now."""
        while select.select([self._ours], [], [], 0)[0]:
            self.text += os.read(self._ours, 65536).decode(errors="replace")
        return self.text

    def shows(self, text: str, *, after: int = 0) -> None:
        """Wait until it is drawn."""

        def look() -> bool:
            drawn = STYLE.sub("", self.read()[after:])
            assert text in drawn, f"no {text!r} in {drawn[-3000:]!r}"
            return True

        eventually(look, within_s=WITHIN_S)

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def ends(self) -> int:
        """The exit code, once the terminal is as it was."""
        code = self.process.wait(WITHIN_S)
        drawn = self.read()
        assert drawn.count("\x1b[?1049h") == drawn.count(LEAVES)
        assert drawn.count("\x1b[?25l") <= drawn.count("\x1b[?25h")  # the cursor
        assert termios.tcgetattr(self._theirs) == self.before
        return code

    @property
    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self._theirs)[3] & termios.ECHO)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def terminal(deployment: Scripted) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(*words: str, **options: object) -> Terminal:
        made.append(Terminal("--url", deployment.url, *words, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_it_draws_follows_and_q_ends_it(deployment: Scripted, terminal: Callable[..., Terminal]) -> None:
    deployment.decisions = [decision(1)]
    top = terminal()
    top.shows("2/2 nodes ready")
    top.shows("200 done 0.250 s  m → a:1")
    assert not top.echoes
    deployment.state = state(node("http://fresh:1", state="down", reason="refused"))
    top.shows("fresh:1: refused")
    top.press("q")
    assert top.ends() == 0


@pytest.mark.parametrize("by", ["ctrl-c", "sigterm"])
def test_the_terminal_is_given_back_when_it_is_interrupted(terminal: Callable[..., Terminal], by: str) -> None:
    top = terminal()
    top.shows("nodes ready")
    if by == "ctrl-c":
        top.press("\x03")
    else:
        top.process.send_signal(signal.SIGTERM)
    assert top.ends() == 130
    assert "Traceback" not in top.read()


def test_s_sorts_the_nodes_another_way(deployment: Scripted, terminal: Callable[..., Terminal]) -> None:
    top = terminal()
    top.shows("s sorts: trouble")
    for sort in ("load", "name", "trouble"):
        before = len(top.read())
        top.press("s")
        top.shows(f"s sorts: {sort}", after=before)
    top.press("\x1b[A")  # an arrow means nothing
    top.press("Q")
    assert top.ends() == 0


def test_it_outlives_the_deployment_and_says_how_old_its_picture_is(
    deployment: Scripted, terminal: Callable[..., Terminal]
) -> None:
    top = terminal()
    top.shows("nodes ready")
    deployment.refusal = (503, "This worker is stopping")
    deployment.hang_up()
    top.shows("s old: 503 This worker is stopping; it is tried again")
    deployment.refusal = None
    deployment.state = state(node("http://again:1"))
    top.shows("again:1")
    top.press("q")
    assert top.ends() == 0


def test_it_fits_the_terminal_and_follows_its_size(deployment: Scripted, terminal: Callable[..., Terminal]) -> None:
    deployment.state = many(100)
    top = terminal(lines=20)
    top.shows("more nodes")
    before = len(top.read())
    top.resize(140, 40)
    top.shows("REASON", after=before)
    top.press("q")
    assert top.ends() == 0


def test_ctrl_z_is_no_signal(terminal: Callable[..., Terminal]) -> None:
    top = terminal()
    top.shows("nodes ready")
    top.press("\x1a")
    top.press("q")
    assert top.ends() == 0


def test_no_color_is_respected(terminal: Callable[..., Terminal]) -> None:
    top = terminal(env={"NO_COLOR": "1"})
    top.shows("nodes ready")
    top.press("q")
    assert top.ends() == 0
    colours = {code for style in STYLE.findall(top.read()) for code in style[2:-1].split(";") if code}
    assert not colours & {str(n) for n in [*range(30, 50), *range(90, 108)]}


def test_a_wrong_key_ends_at_once_and_leaves_the_screen_alone(
    deployment: Scripted, terminal: Callable[..., Terminal]
) -> None:
    deployment.refusal = (401, "The admin key is wrong.")
    top = terminal("--admin-key", "wrong")
    assert top.process.wait(WITHIN_S) == 1
    assert top.read() == "evenhand top: 401 The admin key is wrong.\r\n"


@pytest.mark.parametrize("words", [["--once"], []])
def test_without_a_terminal_it_prints_one_picture_and_ends(deployment: Scripted, words: list[str]) -> None:
    deployment.state = many(60)
    done = subprocess.run(
        [*TOP, "--url", deployment.url, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
        timeout=WITHIN_S,
        check=True,
    )
    assert done.stderr == "" and "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert sum(line.startswith("ready") for line in lines) == 60  # a pipe has no height
    assert max(map(len, lines)) <= 80


def test_a_terminal_without_blocks_and_a_pipe_that_is_closed(deployment: Scripted) -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHONIOENCODING": "ascii", "COLUMNS": "100"}
    done = subprocess.run(
        f"{' '.join(TOP)} --url {deployment.url} | head -1",
        shell=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=WITHIN_S,
        check=True,
    )
    assert done.stdout.startswith("Evenhand") and done.stderr == ""


def test_a_dumb_terminal_gets_one_picture(terminal: Callable[..., Terminal]) -> None:
    top = terminal(env={"TERM": "dumb"})
    assert top.process.wait(WITHIN_S) == 0
    assert "nodes ready" in top.read() and "\x1b" not in top.read()


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "x", "1e9"])
def test_an_interval_that_is_none(run: Run, capsys: pytest.CaptureFixture[str], interval: str) -> None:
    assert run("top", f"--interval-s={interval}") == 2
    assert "must be a number of seconds from 0.2 to 3600" in capsys.readouterr().err


def test_the_other_commands_load_neither_rich_nor_redis_nor_the_settings() -> None:
    for words in (["nodes", "list"], ["explain", "--model", "m"], ["check"]):
        program = (
            "import sys; from app import cli\n"
            f"cli.main({[*words, '--url', 'http://127.0.0.1:1']!r})\n"
            "print([m for m in ('rich', 'redis', 'pydantic_settings', 'aiohttp') if m in sys.modules])"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=WITHIN_S, check=True
        )
        assert done.stdout.splitlines()[-1] == "[]", words
