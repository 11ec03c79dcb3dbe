"""Known vulnerabilities of the locked runtime dependencies: the last step of `make lint`.

    python .ci/audit.py [FLAG ...]     flags of pip-audit beside ours: `-s osv` asks another database

Ends with 1 where a vulnerability is known, or where the lock file can't be read. A database that can't be reached is
no fault of what is checked: one line on stderr says what was not audited, and the code is 0.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

LOCK = Path(__file__).resolve().parent.parent / "requirements.lock"

# False alarms: the vulnerability's id, and why it does not concern us. For `--ignore-vuln`; the only place to pass one.
IGNORED: dict[str, str] = {}

TIMEOUT_S = 5  # of one connection
WITHIN_S = 120  # all of it: a database may answer, and take seconds for each package

# How the last line begins that pip-audit leaves where the database does not answer, or answers with something else.
_UNREACHED = re.compile(
    r"(?:requests|urllib3)\.exceptions\.\w+|pip_audit\._service\.interface\.\w+|ERROR:pip_audit\._cli:Tip: your network"
)


class Verdict(NamedTuple):
    exit_code: int
    lines: list[str]


def verdict(answer: str, complaints: str) -> Verdict:
    """What pip-audit's JSON (`answer`) means, or its stderr where there is none."""
    try:
        packages: list[dict[str, Any]] = json.loads(answer)["dependencies"]
    except ValueError:
        last = (complaints.strip().splitlines() or ["it said nothing"])[-1]
        if unreached := _UNREACHED.match(last):
            return Verdict(0, [f"not audited: no answer from the database of vulnerabilities ({unreached[0]})"])
        return Verdict(1, [f"pip-audit failed: {last}"])
    if not packages:
        return Verdict(1, ["pip-audit failed: there is no package in the lock file"])
    missing = [package["name"] for package in packages if "skip_reason" in package]
    if len(missing) == len(packages):
        return Verdict(0, [f"not audited: none of {len(packages)} packages is in the database that answered"])
    found = [_told(package, vuln) for package in packages for vuln in package.get("vulns", [])]
    if missing:
        found.append(f"not audited: not in the database: {', '.join(missing)}")
    return Verdict(int(any(package.get("vulns") for package in packages)), found)


def audit(lock: Path, flags: Iterable[str]) -> Verdict:
    ignored = [word for vuln in IGNORED for word in ("--ignore-vuln", vuln)]
    ours = ["--require-hashes", "--disable-pip", "--progress-spinner=off", f"--timeout={TIMEOUT_S}", "--format=json"]
    words = [sys.executable, "-m", "pip_audit", "-r", str(lock), *ours, *ignored, *flags]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=WITHIN_S)
    except subprocess.TimeoutExpired:
        return Verdict(0, [f"not audited: the database of vulnerabilities took more than {WITHIN_S} s"])
    return verdict(done.stdout, done.stderr)


def _told(package: dict[str, Any], vuln: dict[str, Any]) -> str:
    names = ", ".join([vuln["id"], *vuln["aliases"]])
    mended = f"mended in {', '.join(vuln['fix_versions'])}" if vuln["fix_versions"] else "not mended yet"
    return f"{package['name']} {package['version']}: {names}, {mended}: {vuln['description'][:300]}"


if __name__ == "__main__":
    exit_code, lines = audit(LOCK, sys.argv[1:])
    for line in lines:
        print(line, file=sys.stderr)
    sys.exit(exit_code)
