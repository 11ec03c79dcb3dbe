"""How lines look, and that nobody who writes one waits for who reads them."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.wait import eventually
from workers.logs import WAITING_LINES, formatter

ROOT = Path(__file__).parents[2]


def record(message: str, *args: object, fault: BaseException | None = None) -> logging.LogRecord:
    info = (type(fault), fault, fault.__traceback__) if fault is not None else None
    return logging.LogRecord("app.http", logging.WARNING, __file__, 1, message, args, info)


def caught() -> ZeroDivisionError:
    try:
        raise ZeroDivisionError("bug")
    except ZeroDivisionError as e:
        return e


def test_a_line_of_text() -> None:
    one = record("node %s is %d", "a", 7)
    one.created, one.msecs, one.process = 1769860800.123, 123.0, 4711
    assert formatter("text").format(one) == "2026-01-31T12:00:00.123Z WARNING [4711] app.http: node a is 7"
    with_fault = formatter("text").format(record("failed", fault=caught())).splitlines()
    assert with_fault[0].endswith("app.http: failed")
    assert with_fault[1] == "Traceback (most recent call last):" and with_fault[-1] == "ZeroDivisionError: bug"


def test_a_line_of_json() -> None:
    one = record("several\nlines \u00e9 %s", "x", fault=caught())
    one.created, one.msecs, one.process = 1769860800.0, 4.9, 1
    (line,) = formatter("json").format(one).splitlines()
    found = json.loads(line)
    assert found.pop("exception").startswith("Traceback (most recent call last):\n")
    assert found == {
        "time": "2026-01-31T12:00:00.004Z",
        "level": "WARNING",
        "pid": 1,
        "logger": "app.http",
        "message": "several\nlines \u00e9 x",
    }


PROGRAM = f"""
import logging, logging.config, sys, time
sys.path.insert(0, {str(ROOT)!r})
from workers.logs import logging_config, write_behind
logging.config.dictConfig(logging_config("WARNING", "text"))
write_behind()
log = logging.getLogger("x")
logging.getLogger("evenhand.request").info("whatever the level")
began_s = time.monotonic()
for n in range(5000):
    log.warning("line %d %s \\ud800", n, "x" * 100)
print(f"{{time.monotonic() - began_s:.3f}}", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def unread() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=write_end
    )
    os.close(write_end)
    yield process, read_end
    process.kill()
    with process:
        pass


def test_a_stderr_that_nobody_reads_stops_nobody_and_what_was_lost_is_counted(
    unread: tuple[subprocess.Popen[bytes], int],
) -> None:
    process, read_end = unread
    assert process.stdout is not None and process.stdin is not None
    assert float(process.stdout.readline()) < 5
    with os.fdopen(read_end, "rb") as pipe:  # somebody comes to read after all
        process.stdin.close()
        lines = pipe.read().decode().splitlines()
    assert process.wait(10) == 0
    assert lines[0].endswith("evenhand.request: whatever the level")
    numbers = [int(found[1]) for line in lines if (found := re.search(r"x: line (\d+) x+ \\ud800$", line))]
    assert numbers == sorted(set(numbers)) and WAITING_LINES <= len(numbers) < 5000
    lost = [int(found[1]) for line in lines if (found := re.search(r"WARNING \[\d+\] evenhand: (\d+) log lines", line))]
    assert len(lines) == 1 + len(numbers) + len(lost)
    assert sum(lost) == 5000 - len(numbers)


def test_a_process_whose_stderr_nobody_reads_can_end(unread: tuple[subprocess.Popen[bytes], int]) -> None:
    process, read_end = unread
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    began_s = time.monotonic()
    process.stdin.close()
    eventually(lambda: process.poll() == 0, within_s=10)
    assert time.monotonic() - began_s < 8
    os.close(read_end)


SILENT = """
import logging, logging.config, os, sys
from workers.logs import logging_config
logging.config.dictConfig(logging_config("INFO", "text"))
log = logging.getLogger("evenhand")
for number in range(20_000):
    log.info("line %d %s", number, "x" * 50)
log.info("long %s", "y" * 300_000)
print("went on", flush=True)
sys.stdin.readline()
log.info("the last")
"""


def test_a_process_without_a_thread_goes_on_though_nobody_reads_its_stderr() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SILENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        assert select.select([process.stdout], [], [], 20)[0], "it waits for who reads"
        assert process.stdout.readline() == b"went on\n"
        waiting = os.read(process.stderr.fileno(), 2**20)  # what the pipe holds
        process.stdin.write(b"\n")
        process.stdin.close()
        lines = (waiting + process.stderr.read()).decode().splitlines()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    kept = [line for line in lines if ": line " in line and line.endswith("x" * 50)]
    lost = next(int(found[1]) for line in lines if (found := re.search(r"(\d+) log lines were lost", line)))
    assert 100 < len(kept) < 20_000 and lost == 20_001 - len(kept)
    assert lines[-1].endswith("the last")
