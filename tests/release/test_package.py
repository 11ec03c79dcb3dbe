"""sdist and wheel: what they hold, and a wheel that runs where there is no source tree."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from app import __version__
from tests.release.scripts import ROOT
from tests.support.process import Process
from tests.support.wait import eventually

# Each of the fixtures is seconds of computing, and other tests run at the same time.
pytestmark = [pytest.mark.wide, pytest.mark.timeout(180)]

SERVES = re.compile(rf"^Evenhand {re.escape(__version__)} serves (http://\S+) with 2 workers", re.MULTILINE)


@dataclass
class Built:
    sdist: Path
    wheel: Path


def run(*words: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist of the tree, and the wheel that is built from that sdist: what `make dist` makes."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return Built(sdist, wheel)


@dataclass
class Elsewhere:
    """An environment of its own, and an empty working directory; nothing there leads to the source tree."""

    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "venv" / "bin"

    @property
    def cwd(self) -> Path:
        return self.folder / "cwd"

    @property
    def env(self) -> dict[str, str]:
        # The state directory holds a socket, whose path must be short.
        state = {"XDG_STATE_HOME": str(self.folder), "HOME": str(self.folder)}
        return {"PATH": f"{self.bin}:/usr/bin:/bin", "LANG": "C.UTF-8", **state}

    def run(self, *words: str) -> str:
        return run(self.bin / words[0], *words[1:], cwd=self.cwd, env=self.env)

    def fails(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            [self.bin / words[0], *words[1:]], cwd=self.cwd, env=self.env, capture_output=True, text=True, timeout=30
        )
        return done.returncode, done.stderr

    @classmethod
    def make(cls, folder: Path) -> Elsewhere:
        made = cls(folder)
        made.cwd.mkdir()
        run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=made.cwd)
        return made


@pytest.fixture(scope="module")
def elsewhere(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    """The wheel, installed beside links to the locked runtime dependencies and nothing else."""
    made = Elsewhere.make(tmp_path_factory.mktemp("w"))
    link_runtime_dependencies(Path(made.run("python", "-c", "import site; print(site.getsitepackages()[0])").strip()))
    code, said = made.fails("python", "-c", "import app")
    assert code == 1 and "No module named 'app'" in said
    # Without --no-deps: pip holds what is linked against what the wheel asks for.
    pip = [sys.executable, "-m", "pip", "--python", str(made.bin / "python"), "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--no-index", built.wheel, cwd=made.cwd)
    yield made
    shutil.rmtree(made.folder)


def link_runtime_dependencies(site_packages: Path) -> None:
    """Into `site_packages`, from where the tests have them: what requirements.lock names, and is installed here."""
    here = Path(sysconfig.get_path("purelib"))
    for name in re.findall(r"^(\S+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE):
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:  # of other versions of Python
            continue
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (site_packages / top).symlink_to(here / top)


def on_disk(*folders: str) -> set[str]:
    """The files below, from the root of the source tree; not what Python and tools leave there."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts and path.suffix != ".pyc"}


def test_the_wheel_holds_the_packages_lua_and_the_pages_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == on_disk("app", "workers") | {f"app/{name}" for name in on_disk("lua")}
    assert held >= {"app/lua/acquire.lua", "app/lua/policies/random.lua", "app/http/pages/dashboard.html"}


def test_the_sdist_holds_what_building_and_testing_take(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        held = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    folders = [".ci", "app", "bench", "deploy", "docs", "lua", "tests", "workers"]
    assert {name for name in held if name.partition("/")[0] in folders} == on_disk(*folders)
    files = {"pyproject.toml", "Makefile", "README.md", "CHANGELOG.md", "LICENSE", "Dockerfile", "docker-compose.yml"}
    assert held >= files | {"requirements.lock", "requirements-dev.lock", ".env.example", "PKG-INFO"}
    assert not [name for name in held if re.match(r"\.git($|/)|\.venv|dist/|build/|\.\w+_cache", name)]


def test_the_wheel_is_the_same_from_the_sdist_and_from_the_tree(built: Built, tmp_path: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT)
    (from_tree,) = tmp_path.glob("*.whl")
    assert from_tree.name == built.wheel.name
    with zipfile.ZipFile(from_tree) as one, zipfile.ZipFile(built.wheel) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
        assert {info.filename: info.CRC for info in one.infolist()} == {i.filename: i.CRC for i in other.infolist()}


def test_the_packages_come_from_the_wheel_alone(elsewhere: Elsewhere) -> None:
    code = "import app, workers, sys; print(app.__file__, workers.__file__, *sys.path, sep='\\n')"
    app, workers, *path = elsewhere.run("python", "-P", "-c", code).splitlines()
    assert Path(app).is_relative_to(elsewhere.bin.parent) and Path(workers).is_relative_to(elsewhere.bin.parent)
    assert not [place for place in path if Path(place).is_relative_to(ROOT)]
    assert "No module named 'tests'" in elsewhere.fails("python", "-c", "import tests")[1]


def test_version_and_metadata_are_those_of_the_project(elsewhere: Elsewhere) -> None:
    assert elsewhere.run("evenhand", "--version") == f"evenhand {__version__}\n"
    code = "import importlib.metadata as m, json; print(json.dumps(m.metadata('evenhand').items()))"
    metadata = [tuple(pair) for pair in json.loads(elsewhere.run("python", "-c", code))]
    assert {("Name", "evenhand"), ("Version", __version__), ("License-Expression", "Apache-2.0")} <= set(metadata)
    assert [value for name, value in metadata if name == "Provides-Extra"] == ["otel"]
    needs = [value for name, value in metadata if name == "Requires-Dist"]
    assert any(re.match(r"opentelemetry-sdk.*extra == 'otel'", need) for need in needs)


def test_traces_without_their_extra_say_what_to_install(elsewhere: Elsewhere) -> None:
    code, said = elsewhere.fails("evenhand", "serve", "--trace-endpoint", "http://127.0.0.1:4318")
    assert code == 2
    assert said == (
        "evenhand serve: --trace-endpoint: can't be used without the extra otel: pip install '.[otel]' where "
        "`pip install .` was, 'FILE.whl[otel]' after a wheel\n"
    )


def get(url: str, body: dict[str, object] | None = None) -> str:
    request = urllib.request.Request(url, data=None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200
        text: str = answer.read().decode("utf-8", errors="replace")
        return text


def url_of(log: str) -> str:
    found = SERVES.search(log)
    assert found is not None, log
    return found[1]


def serves_and_ends(elsewhere: Elsewhere) -> None:
    """`evenhand serve` with its own Redis and a simulated engine: pages, a chat, and an end that leaves nothing."""
    command = [str(elsewhere.bin / "evenhand"), "serve", "--server-name", "127.0.0.1", "--server-port", "0"]
    log_file = elsewhere.folder / "log"
    served = Process(
        [*command, "--workers", "2", "--simulate", "1"], log_file=log_file, env=elsewhere.env, cwd=elsewhere.cwd
    )
    try:
        url = eventually(lambda: url_of(served.log()), within_s=40)
        assert json.loads(get(f"{url}/health"))["status"] == "healthy"
        assert json.loads(get(f"{url}/openapi.json"))["info"]["version"] == __version__
        for page, title in ((f"{url}/", "Evenhand"), (f"{url}/dashboard", "Evenhand")):
            text = get(page)
            assert f"<title>{title}" in text
            parts = re.findall(r'(?:src|href)="([^"#]+)"', text)
            assert len(parts) >= 2
            for part in parts:
                assert get(f"{url}/{part}")
        models = eventually(lambda: json.loads(get(f"{url}/v1/models"))["data"], within_s=10)
        chat = {"model": models[0]["id"], "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
        answer = json.loads(get(f"{url}/v1/chat/completions", chat))
        assert answer["choices"][0]["message"]["content"]
        assert served.stop(within_s=20) == 0
    finally:
        if served.exit_code is None:
            served.kill()
    assert served.left_behind == []
    assert os.listdir(elsewhere.cwd) == []


def test_the_installed_command_serves_from_any_directory_and_leaves_nothing_behind(elsewhere: Elsewhere) -> None:
    serves_and_ends(elsewhere)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_true_installation_with_dependencies_from_the_index(
    built: Built, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = Elsewhere.make(tmp_path_factory.mktemp("w"))
    pip = [sys.executable, "-m", "pip", "--python", str(made.bin / "python"), "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", built.wheel, cwd=made.cwd)
    assert made.run("evenhand", "--version") == f"evenhand {__version__}\n"
    serves_and_ends(made)
    run(*pip, "install", "--quiet", f"{built.wheel}[otel]", cwd=made.cwd)
    assert made.run("evenhand", "config", "check", "--trace-endpoint", "http://127.0.0.1:4318")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_tests_run_from_the_sdist(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as sdist:
        sdist.extraction_filter = getattr(tarfile, "data_filter", None)  # there from 3.11.4 on
        sdist.extractall(tmp_path)
    (tree,) = tmp_path.iterdir()
    some = ["tests/test_cli.py", "tests/test_deploy.py", "tests/test_bench.py", "tests/release"]
    said = run(sys.executable, "-m", "pytest", "-q", "-m", "not long", *some, cwd=tree)
    assert re.search(r"^\d+ passed", said, re.MULTILINE)
