"""`.ci/audit.py`: a known vulnerability fails, a database that is not there is said, and never taken for a pass."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.release.scripts import script

audit = script("audit")

LOCK = "".join(f"{pinned} \\\n    --hash=sha256:{'0' * 64}\n" for pinned in ("aaa==1.0", "bbb==2"))


def vulnerability(number: int) -> dict[str, Any]:
    """As OSV has one of aaa, mended in 1.1."""
    ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "1.1"}]}]
    affected = [{"package": {"name": "aaa", "ecosystem": "PyPI"}, "ranges": ranges}]
    return {"id": f"PYSEC-{number}", "aliases": [f"CVE-{number}"], "summary": "it bursts", "affected": affected}


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "requirements.lock"
    path.write_text(LOCK)
    return path


class Database(BaseHTTPRequestHandler):
    """One of OSV's kind that knows of two vulnerabilities, both of aaa."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        ill = asked == {"package": {"name": "aaa", "ecosystem": "PyPI"}, "version": "1.0"}
        answer = {"vulns": [vulnerability(1), vulnerability(2)]} if ill else {}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def database() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Database) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
        server.shutdown()
        thread.join()


def flags(url: str, cache: Path) -> list[str]:
    return ["-s", "osv", "--osv-url", url, "--cache-dir", str(cache)]


@pytest.mark.wide
def test_a_known_vulnerability_fails_and_is_named_unless_it_is_a_false_alarm(
    lock: Path, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(audit.IGNORED, "CVE-1", "nothing of ours calls it")
    assert audit.audit(lock, flags(database, tmp_path)) == (1, ["aaa 1.0: PYSEC-2, CVE-2, mended in 1.1: it bursts"])


@pytest.mark.wide
def test_a_database_that_cannot_be_reached_is_said_and_fails_nothing(lock: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound and not listening: refuses
        taken.bind(("127.0.0.1", 0))
        code, lines = audit.audit(lock, flags(f"http://127.0.0.1:{taken.getsockname()[1]}", tmp_path))
    assert code == 0
    assert lines == [
        "not audited: no answer from the database of vulnerabilities (requests.exceptions.ConnectionError)"
    ]


def answer(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


SOUND = {"name": "aaa", "version": "1.0", "vulns": []}
UNKNOWN = {"name": "bbb", "skip_reason": "Dependency not found on PyPI and could not be audited: bbb (2)"}
ILL = {"name": "ccc", "version": "3", "vulns": [{"id": "X", "aliases": [], "fix_versions": [], "description": "leaks"}]}


def test_an_index_that_knows_none_of_the_packages_is_not_a_pass() -> None:
    assert audit.verdict(answer(UNKNOWN, UNKNOWN), "No known vulnerabilities found") == (
        0,
        ["not audited: none of 2 packages is in the database that answered"],
    )


def test_packages_that_are_not_found_are_named_beside_what_was_audited() -> None:
    assert audit.verdict(answer(SOUND), "") == (0, [])
    assert audit.verdict(answer(SOUND, UNKNOWN), "") == (0, ["not audited: not in the database: bbb"])
    assert audit.verdict(answer(UNKNOWN, ILL), "") == (
        1,
        ["ccc 3: X, not mended yet: leaks", "not audited: not in the database: bbb"],
    )


@pytest.mark.parametrize(
    ("last_line", "said"),
    [
        ("requests.exceptions.ReadTimeout: Read timed out.", "requests.exceptions.ReadTimeout"),
        ("requests.exceptions.JSONDecodeError: Expecting value", "requests.exceptions.JSONDecodeError"),
        ("pip_audit._service.interface.ServiceError", "pip_audit._service.interface.ServiceError"),
        (
            "ERROR:pip_audit._cli:Tip: your network may be blocking this service. Try another",
            "ERROR:pip_audit._cli:Tip: your network",
        ),
    ],
)
def test_each_way_of_not_answering_is_known(last_line: str, said: str) -> None:
    line = f"not audited: no answer from the database of vulnerabilities ({said})"
    assert audit.verdict("", f"Traceback (most recent call last):\n  ...\n{last_line}\n") == (0, [line])


def test_a_lock_file_that_cannot_be_audited_fails() -> None:
    complaint = "ERROR:pip_audit._cli:requirement foo>=1 does not contain a hash"
    assert audit.verdict("", complaint) == (1, [f"pip-audit failed: {complaint}"])
    assert audit.verdict("", "") == (1, ["pip-audit failed: it said nothing"])
    assert audit.verdict(answer(), "") == (1, ["pip-audit failed: there is no package in the lock file"])


def test_a_database_that_takes_too_long_is_said(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(words: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr(audit.subprocess, "run", run)
    assert audit.audit(lock, []) == (0, ["not audited: the database of vulnerabilities took more than 120 s"])
