"""What `make` says to somebody who does not know its targets yet."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()


def make(*words: str) -> subprocess.CompletedProcess[str]:
    # Not as a part of the `make test` that may have started this.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=30)


def test_help_is_the_head_of_the_makefile() -> None:
    said = make("help")
    assert (said.returncode, said.stderr) == (0, "")
    head = [line for line in MAKEFILE.split("\n\n")[0].splitlines() if line != "#"]
    assert [line.split() for line in said.stdout.splitlines()] == [line.removeprefix("#").split() for line in head]
    assert said.stdout.startswith("What a fresh machine needs") and "\nmake run " in said.stdout


def test_help_has_every_target() -> None:
    (targets,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    listed = re.findall(r"^make ([a-z-]+)", make("help").stdout, re.MULTILINE)
    assert set(listed) == set(targets.split())


def test_make_alone_runs_and_says_where_the_others_are() -> None:
    hint = "make help says what else there is"
    assert hint in make("-n").stdout and "app.cli serve" in make("-n").stdout
    assert hint not in make("-n", "run").stdout


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["run", "--", "--workers", "4"], 'make run ARGS="--workers 4"'),
        (["--", "--workers", "4"], 'make run ARGS="--workers 4"'),
        (["test", "--", "-k", "name"], 'make test ARGS="-k name"'),
    ],
)
def test_flags_that_are_taken_for_targets_are_told_where_they_go(words: list[str], instead: str) -> None:
    said = make("-n", *words)
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr.endswith(f"flags go into ARGS: {instead}.  Stop.\n")
