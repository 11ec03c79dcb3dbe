"""`deploy/systemd/evenhand.service`: systemd takes the unit, and it agrees with the program."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from app import cli
from app.settings import Settings, variables_of

UNIT = Path(__file__).resolve().parent.parent / "deploy" / "systemd" / "evenhand.service"


def read_unit() -> dict[str, dict[str, list[str]]]:
    """Section -> name -> its values; a name may stand several times, which configparser does not know."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    section = ""
    for line in UNIT.read_text().splitlines():
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            section = heading[1]
        elif line and not line.startswith("#"):
            name, sign, value = line.partition("=")
            assert sign and section, line
            found[section][name].append(value)
    return found


SERVICE = read_unit()["Service"]


def one(name: str) -> str:
    (value,) = SERVICE[name]
    return value


def words() -> list[str]:
    return shlex.split(one("ExecStart"))


def test_systemd_finds_no_fault_in_it(tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed (Debian's package systemd)")
    # The program is looked for, and is not where the unit has it.
    text = UNIT.read_text()
    assert text.count(words()[0]) == 1
    unit = tmp_path / UNIT.name
    for content, right in ((text, True), (text.replace("KillMode=", "KilMode="), False)):
        unit.write_text(content.replace(words()[0], "/bin/true"))
        done = subprocess.run([tool, "verify", "--man=no", unit], capture_output=True, text=True, timeout=30)
        faults = [line for line in done.stderr.splitlines() if UNIT.name in line]
        assert (not faults) is right, faults


def test_it_starts_the_program_with_settings_that_there_are() -> None:
    program, *arguments = words()
    assert program.endswith("/bin/evenhand")
    args = cli.build_parser("serve").parse_args(arguments)
    assert args.command == "serve" and Path(args.config).is_absolute()
    known = {variable for name in Settings.model_fields for variable in variables_of(name)}
    named = {pair.partition("=")[0] for value in SERVICE["Environment"] for pair in shlex.split(value)}
    assert named - {"PYTHONDONTWRITEBYTECODE"} <= known
    assert set(re.findall(r"EVENHAND_\w+", UNIT.read_text())) <= known


def test_its_state_is_where_it_may_write() -> None:
    (variables,) = SERVICE["Environment"]
    assert f"EVENHAND_STATE_DIR=%S/{one('StateDirectory')}" in shlex.split(variables)
    assert one("ProtectSystem") == "strict" and one("DynamicUser") == "yes"


def test_signals_reach_who_knows_what_to_do() -> None:
    """SIGTERM at workers too would be a second one to gunicorn's children; SIGHUP reloads."""
    assert one("KillMode") == "mixed" and "KillSignal" not in SERVICE
    assert one("ExecReload") == "/bin/kill -HUP $MAINPID"
    assert one("Type") == "exec", "nothing of it speaks sd_notify"
    assert one("OOMPolicy") == "continue", "a worker that is killed is replaced"


def test_a_drain_ends_before_it_is_killed() -> None:
    assert float(one("TimeoutStopSec")) >= 2 * Settings.model_fields["grace_s"].default + 20


def test_what_it_may_not_do_leaves_what_it_needs() -> None:
    """Netlink is asked by the system's look-up of names; unix is the embedded Redis."""
    assert set(one("RestrictAddressFamilies").split()) == {"AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"}
    assert one("CapabilityBoundingSet") == "" and one("NoNewPrivileges") == "yes"
    allowed, denied = SERVICE["SystemCallFilter"]
    assert allowed == "@system-service" and denied.startswith("~")
    assert int(one("LimitNOFILE")) >= 65536
