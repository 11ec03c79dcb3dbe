"""When a file that others write is to be read: both its readers, keys and nodes, go by this."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.looked_at import LookedAt


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def write(path: Path, text: str, *, old: bool = True) -> None:
    path.write_text(text)
    if old:
        found = path.stat()
        os.utime(path, (found.st_atime - 60, found.st_mtime - 60))


def take(file: LookedAt, path: Path) -> bool:
    """It is due, and read as it is now."""
    return file.is_due() and file.take(path.stat())


def test_it_is_due_at_first_and_after_a_change_once_it_has_been_the_same_for_one_look(path: Path) -> None:
    write(path, "1")
    file = LookedAt(path)
    assert take(file, path) and not file.is_due()
    write(path, "2")  # of the same size
    assert not file.is_due(), "it may be written still"
    write(path, "3")
    assert not file.is_due(), "it was"
    assert take(file, path) and file.is_taken
    assert not file.is_due()


def test_what_is_so_young_that_the_next_change_may_look_the_same_is_read_again(path: Path) -> None:
    write(path, "1", old=False)
    file = LookedAt(path)
    assert take(file, path) and take(file, path)
    write(path, "1")
    assert not file.is_due()
    assert take(file, path) and not file.is_due()


def test_what_changed_while_it_was_read_is_not_taken(path: Path) -> None:
    write(path, "1")
    file = LookedAt(path)
    assert file.is_due()
    write(path, "12")
    assert not file.take(path.stat()) and not file.is_taken
    assert not file.is_due()
    assert take(file, path)


def test_what_was_gone_and_is_back_as_it_was_is_read_again(path: Path) -> None:
    write(path, "1")
    file, away = LookedAt(path), path.with_name("away")
    assert take(file, path)
    path.rename(away)
    with pytest.raises(FileNotFoundError):
        file.is_due()
    os.link(away, path)
    assert not file.is_due(), "its ctime is another"
    assert take(file, path)
