"""The Lua scripts: read once from `lua/`, checked against their own headers, addressed by SHA-1.

A header's KEYS[n] and ARGV[n] lines are the contract; `Script.evalsha` and `Prepared` hold every call to it. The
acquire scripts are composed: one policy of `lua/policies/` before the frame `lua/acquire.lua`, one of
`lua/policies/encoders/` before `lua/acquire_encoders.lua`. What several scripts have in common stands before them too,
`PARTS`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import hiredis

Argument = str | bytes | int

PARTS = {"acquire": "give_back", "release": "give_back"}
"""Script or frame -> the file of `lua/parts/` before it."""


class Code(IntEnum):
    """First element of every script's reply. `lua/README.md` says which script gives which."""

    DONE = 0
    NOT_MEMBER = 1
    STALE = 2
    NONE_COUNTED = 3
    SUPERSEDED = 4
    LEASE_RUNS = 5
    ABSENT = 6
    REFUSED = 7
    UNCHANGED = 8
    UPDATED = 9
    HELD = 10


class Arity(NamedTuple):
    """How many KEYS or ARGV a script takes: exactly `fixed`, or at least that where `open_ended`."""

    fixed: int
    open_ended: bool

    def admits(self, count: int) -> bool:
        return count >= self.fixed if self.open_ended else count == self.fixed

    @classmethod
    def parse(cls, header: str, word: str) -> Arity:
        found = re.findall(rf"^-- {word}\[(\d+)(\+?)\]", header, re.MULTILINE)
        numbers = [int(number) for number, _ in found]
        if numbers != list(range(1, len(numbers) + 1)) or any(plus for _, plus in found[:-1]):
            raise ValueError(f"the header's {word} lines must count from 1, only the last may be open-ended")
        open_ended = bool(found and found[-1][1])
        return cls(len(numbers) - open_ended, open_ended)


class Script:
    """One Lua script with the arity that its header states."""

    def __init__(self, name: str, text: str, header: str) -> None:
        self.name = name
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self.keys = Arity.parse(header, "KEYS")
        self.args = Arity.parse(header, "ARGV")

    def evalsha(self, keys: Sequence[str], args: Sequence[Argument]) -> tuple[Argument, ...]:
        """The EVALSHA command. Raises ValueError where the counts don't fit the header."""
        if not (self.keys.admits(len(keys)) and self.args.admits(len(args))):
            raise ValueError(f"{self.name}.lua takes {self.keys} and {self.args}, got {len(keys)} and {len(args)}")
        return ("EVALSHA", self.sha, len(keys), *keys, *args)

    def __repr__(self) -> str:
        return f"<Script {self.name} keys={self.keys} args={self.args}>"


def packed_command(words: tuple[Argument, ...]) -> bytes:
    """A command as it goes over the wire."""
    command: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]  # its stub says 1-tuple
    return command


def packed(*words: Argument) -> bytes:
    """Words of a command as they go over the wire (RESP bulk strings), without the count that a command begins with."""
    command = packed_command(words)
    return command[command.index(b"\r\n") + 2 :]


class Prepared:
    """Calls of a script of which most stays the same: what every call has is put into bytes once."""

    def __init__(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> None:
        if not script.keys.admits(len(keys)):
            raise ValueError(f"{script.name}.lua takes {script.keys}, got {len(keys)}")
        self.script = script
        self._args = len(args)
        self._words = 3 + len(keys) + len(args)
        self._begun = packed("EVALSHA", script.sha, len(keys), *keys, *args)

    def __repr__(self) -> str:
        return f"<Prepared {self.script.name}>"

    def command(self, count: int, tail: bytes) -> bytes:
        """The whole EVALSHA command with `tail`, which is `count` more arguments, packed."""
        if not self.script.args.admits(self._args + count):
            raise ValueError(f"{self.script.name}.lua takes {self.script.args}, got {self._args + count}")
        return b"*%d\r\n%b%b" % (self._words + count, self._begun, tail)


def lua_directory() -> Path:
    """Where the scripts are: beside `app/` in a checkout and the image, inside it in a wheel."""
    inside = Path(__file__).parent.parent / "lua"
    return inside if inside.is_dir() else Path(__file__).parent.parent.parent / "lua"


def load_scripts(directory: Path | None = None) -> dict[str, Script]:
    """All scripts by name; one `acquire_<policy>` and `acquire_encoders_<policy>` for each policy."""
    directory = directory or lua_directory()
    texts = {path.stem: path.read_text() for path in sorted(directory.glob("*.lua"))}
    parts = {name: (directory / "parts" / f"{part}.lua").read_text() for name, part in PARTS.items()}
    frames = {"acquire": directory / "policies", "acquire_encoders": directory / "policies" / "encoders"}
    composed = {name: (texts.pop(name), policies) for name, policies in frames.items()}
    scripts = {name: Script(name, parts.get(name, "") + text, header=text) for name, text in texts.items()}
    for frame_name, (frame, policies) in composed.items():
        for path in sorted(policies.glob("*.lua")):
            name = f"{frame_name}_{path.stem}"
            text = parts.get(frame_name, "") + path.read_text() + frame
            scripts[name] = Script(name, text, header=frame)
    return scripts
