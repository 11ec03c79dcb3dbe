"""Single keys from a terminal, without Enter and without an echo.

Owns the terminal's mode while it is open, and gives it back as it was, however the command ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import time
from collections.abc import Iterator

_SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|O.)?")


@contextlib.contextmanager
def keyboard() -> Iterator[Keyboard]:
    fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
    if fd < 0:
        yield Keyboard(-1)
        return
    before = termios.tcgetattr(fd)
    try:
        # Ctrl-C stays a signal. Ctrl-Z is none: it would leave the shell with a screen that is drawn over.
        mode = termios.tcgetattr(fd)
        mode[3] &= ~(termios.ICANON | termios.ECHO)
        mode[6][termios.VSUSP] = os.fpathconf(fd, "PC_VDISABLE").to_bytes()
        termios.tcsetattr(fd, termios.TCSADRAIN, mode)
        yield Keyboard(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


class Keyboard:
    """`fd`: -1 where there is nobody to press a key."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __repr__(self) -> str:
        return f"<Keyboard fd={self._fd}>"

    def key(self, within_s: float) -> str:
        """The next key in lower case; empty where none came in time, `q` where the terminal is gone."""
        if self._fd < 0:
            time.sleep(within_s)
            return ""
        readable, _, _ = select.select([self._fd], [], [], within_s)
        if not readable:
            return ""
        try:
            pressed = os.read(self._fd, 64).decode(errors="replace")
        except OSError:
            pressed = ""
        if not pressed:
            return "q"
        # Several at once, where somebody is fast. Arrows and the like are sequences that mean nothing here.
        letters = _SEQUENCE.sub("", pressed).lower()
        return "q" if "q" in letters else letters[-1:]
