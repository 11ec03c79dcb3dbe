"""The configuration file: TOML whose names are those of the flags, without their dashes in front.

Owns how it is read: which names there may be, how they may be written, on which line each stands. It must not know
what values are right: `app.settings` checks them, as it does those of flags and variables.

Not pydantic-settings' own source for TOML: it takes field names only, passes unknown ones as values to be refused, and
knows no lines.
"""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.looked_at import opened
from app.nearest import nearest

_MEMBER = re.compile(r"""\s*("[^"]*"|'[^']*'|[\w-]+)\s*[=.]""").match
_OTHERS_READ = stat.S_IROTH


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file says. `values`: by field name; `lines`: where each stands, from 1; `faults`: a line for each."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict, repr=False)
    lines: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def place(self, name: str) -> str:
        """`/etc/evenhand.toml:3`, of a field that it has."""
        line = self.lines.get(name)
        return f"{self.path}:{line}" if line else str(self.path)


def read_config(path: Path, names: Collection[str], tables: Mapping[str, str]) -> ConfigFile:
    """Read the file.

    Args:
        names: the fields that it may have.
        tables: of those that are written as a table, the table's name -> the field.
    """
    try:
        with opened(path) as file:
            text = file.read().decode("utf-8-sig")
    except OSError as e:
        return ConfigFile(path, faults=[f"{path}: can't be read: {e.strerror}"])
    except UnicodeDecodeError:
        return ConfigFile(path, faults=[f"{path}: is no UTF-8 text"])
    try:
        members = tomllib.loads(text)
    except (ValueError, RecursionError) as e:  # not only the library's own errors come out of it
        return ConfigFile(path, faults=[f"{path}: is no TOML: {e}"])
    found = ConfigFile(path)
    places = _places(text)
    for written, value in members.items():
        line = places.get(written)
        place = f"{path}:{line}" if line else str(path)
        name = tables.get(written) or written.replace("-", "_")
        shown = written.replace("_", "-")
        if written in tables and not isinstance(value, dict):
            found.faults.append(f"{place}: {written}: must be a table, [{written}]")
        elif name not in names:
            found.faults.append(f"{place}: {written} is no setting{_hint(written, names, tables)}")
        elif written not in tables and isinstance(value, dict):
            found.faults.append(f"{place}: {shown}: must be a value, not a table")
        elif name in found.values:
            found.faults.append(f"{place}: {shown}: is given twice, in two spellings")
        else:
            found.values[name] = value
            if line:
                found.lines[name] = line
    return found


def others_can_read(path: Path) -> bool:
    """Whether every user of the host can."""
    try:
        return bool(path.stat().st_mode & _OTHERS_READ)
    except OSError:
        return False


def _hint(written: str, names: Collection[str], tables: Collection[str]) -> str:
    if written == "keys":
        return "; [[keys]] belongs into the file that api-keys-file, admin-keys-file or reader-keys-file names"
    near = nearest(written.replace("_", "-"), [*(name.replace("_", "-") for name in names), *tables])
    return f"; did you mean {near}?" if near else ""


def _places(text: str) -> dict[str, int]:
    """The line of each top-level member: tomllib does not say. What stands in a text of several lines may mislead."""
    places: dict[str, int] = {}
    in_table = False
    for number, line in enumerate(text.splitlines(), 1):
        try:
            header = tomllib.loads(line) if line.lstrip().startswith("[") else {}
        except (ValueError, RecursionError):  # a line of a list
            header = {}
        if header:
            in_table = True
            places.setdefault(next(iter(header)), number)
        elif not in_table and (found := _MEMBER(line)):
            places.setdefault(found[1].strip("\"'"), number)
    return places
