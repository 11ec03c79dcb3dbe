"""Keys and the files that hold them: what a file may say, and when it is read again."""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import os
from pathlib import Path

import pytest

from app import cli
from app.access_keys import KeyRing, KeysFile, KeysFileError, access_key, read_keys
from app.errors import ConfigurationError, Forbidden, ModelNotFound, Unauthorized
from app.http.auth import Authority, check_model
from app.settings import Settings

HASH_A = "sha256:" + hashlib.sha256(b"sk-team-a").hexdigest()
STRANGER = "203.0.113.9"


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + key.encode())]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def age(path: Path, seconds: float = 60) -> None:
    """As if it had been written some time ago."""
    found = path.stat()
    os.utime(path, (found.st_atime - seconds, found.st_mtime - seconds))


def test_lines_are_keys_or_digests_with_comments_between(file: Path) -> None:
    file.write_text(f"# ours\n\nsk-team-b\n  {HASH_A}  \n")
    plain, hashed = read_keys(file)
    assert plain.digest == hashlib.sha256(b"sk-team-b").digest() and plain.plain
    assert hashed.digest == hashlib.sha256(b"sk-team-a").digest() and not hashed.plain
    assert plain.models is hashed.models is None and plain.name == hashed.name == ""


def test_tables_have_names_and_models(file: Path) -> None:
    file.write_text(
        f'[[keys]]\nname = "team-a"\nhash = "{HASH_A}"\nmodels = ["m1", "m2"]\n[[keys]]\nkey = "sk-team-b"\n'
    )
    first, second = read_keys(file)
    assert (first.name, first.models) == ("team-a", {"m1", "m2"})
    assert (second.name, second.models) == ("", None)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "FILE: has no key"),
        ("# nobody\n", "FILE: has no key"),
        ("keys = []\n", "FILE: has no key"),
        ("sk-1\nhush\x07\n", "FILE:2: must be visible ASCII characters: a key travels in an HTTP header"),
        ("sk-1\nhush # team a\n", "FILE:2: must be one key and nothing behind it; a comment has a line of its own"),
        ('name = "team-a"\nkey = "hush"\n', "FILE:1: must be one key and nothing behind it; "),
        ("sha256:hush\n", "FILE:1: needs 64 hexadecimal digits after sha256:"),
        ("sk-1\nsk-2\nsk-1\n", "FILE: has a key twice"),
        (f"sk-team-a\n{HASH_A}\n", "FILE: has a key twice"),
        ("[[keys]\n", "FILE: is no TOML: "),
        ("keys = " + "[" * 5000, "FILE: is no TOML: "),
        ("keys = 1" + "0" * 5000, "FILE: is no TOML: "),
        ("sk-1\n" * 4_000_000, "FILE: is longer than 16777216 bytes"),
        ('[[keys]]\nname = "a"\n', "FILE: key 1: needs key or hash, one of them, a text"),
        (f'[[keys]]\nkey = "hush"\nhash = "{HASH_A}"\n', "FILE: key 1: needs key or hash, one of them, a text"),
        (
            '[[keys]]\nkey = "a"\n[[keys]]\nhash = "hush"\n',
            "FILE: key 2: hash must be sha256: and 64 hexadecimal digits",
        ),
        ('[[keys]]\nkey = "a"\nmodel = "m"\n', "FILE: key 1: model is unknown; did you mean models?"),
        ('[[keys]]\nkey = "a"\nmodels = []\n', "FILE: key 1: models must be a list of at least one text"),
        ('[[keys]]\nkey = "a"\nmodels = "m"\n', "FILE: key 1: models must be a list of at least one text"),
        ('[[keys]]\nkey = "a"\nname = "a b"\n', "FILE: key 1: name must be 1 to 64 letters"),
        ('[[keys]]\nkey = "a"\n[other]\nx = 1\n', "FILE: must have a [[keys]] for each key, and nothing else"),
    ],
)
def test_a_wrong_file_is_told_without_its_keys(file: Path, text: str, line: str) -> None:
    file.write_text(text)
    with pytest.raises(KeysFileError) as caught:
        read_keys(file)
    told = str(caught.value).replace(str(file), "FILE")
    assert told.startswith(line) and "hush" not in told


def test_a_wrong_or_absent_file_is_an_error_at_start(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("api_keys_file", "admin_keys_file", "reader_keys_file"):
        flag = "--" + name.replace("_", "-")
        with pytest.raises(ConfigurationError) as caught:
            Settings.load({name: str(file)})
        assert caught.value.message == f"{flag}: {file}: can't be read: No such file or directory"
    file.write_text('[[keys]]\nkey = "a"\nmodels = ["m"]\n')
    assert Settings.load({"api_keys_file": str(file)}).api_keys_file == file
    for name in ("admin_keys_file", "reader_keys_file"):
        with pytest.raises(ConfigurationError, match="only an API key has models"):
            Settings.load({name: str(file)})


@pytest.mark.timeout(5)
def test_what_is_no_file_is_an_error_and_holds_nobody_up(file: Path, tmp_path: Path) -> None:
    os.mkfifo(file)
    for path in (file, Path("/dev/zero")):
        with pytest.raises(KeysFileError, match="is no regular file"):
            read_keys(path)
    with pytest.raises(KeysFileError, match="Is a directory"):
        read_keys(tmp_path)


@pytest.mark.parametrize("text", ["sk-1\r\nsk-2\r\n", '[[keys]]\r\nkey = "sk-1"\r\n[[keys]]\r\nkey = "sk-2"\r\n'])
def test_a_file_may_be_written_as_windows_does(file: Path, text: str) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_keys(file) == (access_key("sk-1"), access_key("sk-2"))


# --- read again


def changed(watched: KeysFile) -> bool:
    """Whether its keys are others after the look that sees it and the one that finds it the same."""
    assert not watched.look(), "it may be written still"
    return watched.look()


@pytest.mark.parametrize("kind", ["admin", "reader"])
def test_a_file_of_other_keys_has_no_models_when_it_is_read_again_either(file: Path, kind: str) -> None:
    file.write_text("sk-admin\n")
    age(file)
    watched = KeysFile(file, of_clients=False)
    assert watched.look()
    file.write_text('[[keys]]\nkey = "sk-team"\nmodels = ["m"]\n')
    assert not changed(watched) and watched.keys == (access_key("sk-admin"),)
    ring = KeyRing(**{f"{kind}_file": file})  # type: ignore[arg-type]
    assert ring._look() and not getattr(ring, kind)  # nor does a worker that starts now take it


def test_a_file_is_read_again_when_it_changes_and_only_then(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("sk-1\n")
    age(file)
    watched = KeysFile(file)
    assert watched.look() and watched.keys == (access_key("sk-1"),)
    monkeypatch.setattr("app.access_keys.read_keys", lambda path: pytest.fail("read for nothing"))
    assert not watched.look()
    monkeypatch.undo()
    file.write_text("sk-2\n")  # in place, of the same size
    age(file)
    assert changed(watched) and watched.keys == (access_key("sk-2"),)


def test_a_replaced_file_and_a_swapped_link_are_seen(tmp_path: Path, file: Path) -> None:
    for name, key in (("one", "sk-1"), ("two", "sk-2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys").write_text(key)
        age(tmp_path / name / "keys")
    data = tmp_path / "..data"
    data.symlink_to("one")
    file.symlink_to("..data/keys")  # as Kubernetes mounts a secret
    watched = KeysFile(file)
    assert watched.look() and watched.keys == (access_key("sk-1"),)
    (tmp_path / "..data_tmp").symlink_to("two")
    (tmp_path / "..data_tmp").rename(data)
    assert changed(watched) and watched.keys == (access_key("sk-2"),)
    (tmp_path / "new").write_text("sk-3")
    age(tmp_path / "new")
    (tmp_path / "new").rename(file)
    assert changed(watched) and watched.keys == (access_key("sk-3"),)


@pytest.mark.parametrize("broken", [None, "", "# emptied\n", "sk 1\n", "[[keys]\n", "\ud800", "keys = " + "[" * 5000])
def test_a_broken_file_changes_nothing_and_is_told_once(
    file: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    file.write_text("sk-1\n")
    watched = KeysFile(file)
    assert watched.look()
    if broken is None:
        file.unlink()
    else:
        file.write_bytes(broken.encode("utf-8", "surrogatepass"))
    for _ in range(3):
        assert not watched.look()
    assert watched.keys == (access_key("sk-1"),)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"the keys stay as they were: {file}")
    file.write_text("sk-2\n")
    assert changed(watched) and watched.keys == (access_key("sk-2"),)
    assert caplog.records[-1].getMessage() == f"{file} is right again"


def test_a_worker_waits_for_a_file_that_is_broken_when_it_starts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.access_keys.LOOK_EVERY_S", 0.01)
    file.write_text("# none\n")
    ring = KeyRing(api_file=file)
    who = Authority(ring, trusted_networks=())
    looks = 0
    look = ring._look

    def looked() -> bool:
        nonlocal looks
        looks += 1
        if looks == 3:  # seen by this look, read by the next
            file.write_text("sk-1\n")
        return look()

    monkeypatch.setattr(ring, "_look", looked)
    with pytest.raises(Unauthorized):
        who.check_client(bearer("sk-1"))
    asyncio.run(ring.start())
    assert looks == 4 and who.check_client(bearer("sk-1")) is not None


# --- what they open


def test_keys_of_settings_and_of_a_file_add_up_and_a_digest_opens_as_its_key_does(file: Path) -> None:
    file.write_text(f'[[keys]]\nname = "team-a"\nhash = "{HASH_A}"\n')
    ring = KeyRing(api=["sk-given", "sha256:" + hashlib.sha256(b"sk-hashed").hexdigest()], api_file=file)
    asyncio.run(ring.start())
    who = Authority(ring, trusted_networks=())
    for key, name in (("sk-given", ""), ("sk-hashed", ""), ("sk-team-a", "team-a")):
        found = who.check_client(bearer(key))
        assert found is not None and found.name == name
    for key in (HASH_A, HASH_A.removeprefix("sha256:"), "sk-team-b"):
        with pytest.raises(Unauthorized):
            who.check_client(bearer(key))
    assert "team-a" not in repr(who) and "sk-" not in repr(ring)


def test_a_key_for_some_models_is_no_admin_key_and_opens_no_door_to_others(file: Path) -> None:
    file.write_text('[[keys]]\nkey = "sk-few"\nmodels = ["m"]\n')
    ring = KeyRing(api_file=file)
    asyncio.run(ring.start())
    who = Authority(ring, trusted_networks=())
    for headers in (bearer("sk-few"), []):
        with pytest.raises((Forbidden, Unauthorized)):
            who.check_viewer(headers, STRANGER)
        with pytest.raises((Forbidden, Unauthorized)):
            who.check_admin(headers, STRANGER)
    file.write_text('[[keys]]\nkey = "sk-few"\nmodels = ["m"]\n[[keys]]\nkey = "sk-all"\n')
    ring._look()
    ring._look()
    who.check_admin(bearer("sk-all"), STRANGER)
    with pytest.raises(Forbidden):
        who.check_admin(bearer("sk-few"), STRANGER)


def test_a_reader_key_that_is_taken_out_of_its_file_opens_nothing_any_more(file: Path) -> None:
    file.write_text("sk-old\nsk-new\n")
    ring = KeyRing(admin=["sk-admin"], reader=["sk-given"], reader_file=file)
    asyncio.run(ring.start())
    who = Authority(ring, trusted_networks=())
    for key in ("sk-given", "sk-old", "sk-new"):
        who.check_reader(bearer(key), STRANGER)
    file.write_text("sk-new\n")
    ring._look()
    ring._look()
    for key in ("sk-given", "sk-new"):
        who.check_reader(bearer(key), STRANGER)
    with pytest.raises(Unauthorized):
        who.check_reader(bearer("sk-old"), STRANGER)
    assert "sk-" not in repr(ring)


def test_a_key_that_a_file_limits_is_no_admin_key_though_a_setting_has_it_too(file: Path) -> None:
    file.write_text('[[keys]]\nkey = "sk-1"\nmodels = ["m"]\n')
    ring = KeyRing(api=["sk-1"], api_file=file)
    asyncio.run(ring.start())
    with pytest.raises(Forbidden):
        Authority(ring, trusted_networks=()).check_admin(bearer("sk-1"), STRANGER)


def test_a_key_for_some_models_is_told_the_same_of_all_others() -> None:
    key = access_key("k", models=frozenset({"m"}))
    check_model(key, "m")
    check_model(key, "alias", "m")
    check_model(access_key("k"), "whatever")
    with pytest.raises(ModelNotFound) as caught:
        check_model(key, "other")
    assert caught.value.message == "The model 'other' does not exist, or this key may not use it."


# --- evenhand config hash-key


def test_hash_key_is_what_sha256sum_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n"))
    assert cli.main(["config", "hash-key"]) == 0
    # FIPS 180-2, appendix B.1
    assert capsys.readouterr().out == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("hu sh"))
    assert cli.main(["config", "hash-key"]) == 2
    assert "hu sh" not in capsys.readouterr().err
