"""The keys that callers send: their digests, what each may ask for, and the files that hold them.

Owns what a key is, how a file of keys is read and read again. It must not know HTTP, nor what a key opens.

Only SHA-256 digests are kept. That is no way to keep passwords, which can be guessed; a key is long and random, and
what can't be guessed can't be found from its digest.

A file that is broken, empty or gone changes nothing: the keys of before stay in force, so that a slip while it is
edited neither opens the door nor shuts everybody out.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.looked_at import LookedAt, opened
from app.nearest import nearest

log = logging.getLogger("evenhand.keys")

LOOK_EVERY_S = 0.5
"""A key that is taken out of the file is refused by every worker within three of these: a change is read when it has
been the same for one look."""
LIMIT_BYTES = 2**24
"""Some hundred thousand keys. Whatever else it is was named by mistake."""
_HASHED = re.compile(r"sha256:([0-9A-Fa-f]{64})").fullmatch
_VISIBLE = re.compile(r"[!-~]+").fullmatch
_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII).fullmatch
_TABLE = re.compile(r"^\s*(?:\[|keys\s*=)", re.MULTILINE).search
_MEMBERS = ("name", "key", "hash", "models")

ONE_A_LINE = (
    "must be one key and nothing behind it; a comment has a line of its own, and what there is to say of a key stands "
    "in TOML, below [[keys]]"
)


class KeysFileError(ValueError):
    """A file of keys can't be used. The text names the file and the place, never a key."""


@dataclass(frozen=True, slots=True)
class AccessKey:
    """`models`: those that it may ask for; None: all. `plain`: the key itself was written, not its digest."""

    digest: bytes = field(repr=False)
    name: str = ""
    models: frozenset[str] | None = None
    plain: bool = True

    def may_use(self, *models: str) -> bool:
        """Whether it may ask for a model that has these names."""
        return self.models is None or not self.models.isdisjoint(models)


def access_key(text: str, *, name: str = "", models: frozenset[str] | None = None) -> AccessKey:
    """A key as it is written, plain or as `sha256:<hex>`.

    Raises:
        ValueError: it is no key; the text ends "must be ..." or "needs ...".
    """
    hashed = _HASHED(text)
    if hashed is None and text.startswith("sha256:"):
        raise ValueError("needs 64 hexadecimal digits after sha256:")
    if not _VISIBLE(text):
        raise ValueError("must be visible ASCII characters: a key travels in an HTTP header")
    return AccessKey(bytes.fromhex(hashed[1]) if hashed else digest_of(text.encode()), name, models, hashed is None)


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_keys(path: Path, *, of_clients: bool = True) -> tuple[AccessKey, ...]:
    """The keys of a file: one a line, or TOML with a `[[keys]]` for each.

    Args:
        of_clients: API keys, which may be limited to some models; others ask for none.

    Raises:
        KeysFileError: it can't be read, has no key, or anything in it is wrong.
    """
    text = _text(path)
    found = _tables(path, text) if _TABLE(text) else _lines(path, text)
    if not found:
        raise KeysFileError(f"{path}: has no key")
    if len({key.digest for key in found}) < len(found):
        raise KeysFileError(f"{path}: has a key twice")
    if not of_clients and any(key.models is not None for key in found):
        raise KeysFileError(f"{path}: only an API key has models")
    return tuple(found)


def _text(path: Path) -> str:
    try:
        with opened(path) as file:
            text = file.read(LIMIT_BYTES + 1)
    except OSError as e:
        raise KeysFileError(f"{path}: can't be read: {e.strerror}") from e
    if len(text) > LIMIT_BYTES:
        raise KeysFileError(f"{path}: is longer than {LIMIT_BYTES} bytes")
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise KeysFileError(f"{path}: is no UTF-8 text") from e


def _lines(path: Path, text: str) -> list[AccessKey]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        word = line.strip()
        if word and not word.startswith("#"):
            if len(word.split()) > 1:
                raise KeysFileError(f"{path}:{number}: {ONE_A_LINE}")
            try:
                found.append(access_key(word))
            except ValueError as e:
                raise KeysFileError(f"{path}:{number}: {e}") from None
    return found


def _tables(path: Path, text: str) -> list[AccessKey]:
    try:
        members = tomllib.loads(text)
    except (ValueError, RecursionError) as e:  # not only the library's own errors come out of it
        raise KeysFileError(f"{path}: is no TOML: {e}") from None
    keys = members.pop("keys", [])
    if members or not isinstance(keys, list):
        raise KeysFileError(f"{path}: must have a [[keys]] for each key, and nothing else")
    return [_of_table(f"{path}: key {number}", given) for number, given in enumerate(keys, 1)]


def _of_table(place: str, given: Any) -> AccessKey:
    if not isinstance(given, dict):
        raise KeysFileError(f"{place}: must be a table")
    for member in given:
        if member not in _MEMBERS:
            near = nearest(member, _MEMBERS)
            raise KeysFileError(f"{place}: {member} is unknown; " + (f"did you mean {near}?" if near else "no such"))
    name, models, key, hashed = given.get("name", ""), given.get("models"), given.get("key"), given.get("hash")
    if not isinstance(name, str) or (name and not _NAME(name)):
        raise KeysFileError(f"{place}: name must be 1 to 64 letters, digits, dots, dashes, underscores or @")
    if models is not None and not (_texts(models) and models):
        raise KeysFileError(f"{place}: models must be a list of at least one text; without it, all may be asked for")
    text = key if hashed is None else hashed
    if (key is None) == (hashed is None) or not isinstance(text, str):
        raise KeysFileError(f"{place}: needs key or hash, one of them, a text")
    if hashed is not None and not _HASHED(hashed):
        raise KeysFileError(f"{place}: hash must be sha256: and 64 hexadecimal digits")
    try:
        return access_key(text, name=name, models=None if models is None else frozenset(models))
    except ValueError as e:
        raise KeysFileError(f"{place}: key {e}") from None


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)


class KeysFile:
    """A file of keys as it was when it was last right. `keys` is empty until `look` has once returned True."""

    def __init__(self, path: Path, *, of_clients: bool = True) -> None:
        self.path = path
        self._of_clients = of_clients
        self.keys: tuple[AccessKey, ...] = ()
        self._file = LookedAt(path)
        self._told = ""

    def __repr__(self) -> str:
        return f"<KeysFile {self.path} keys={len(self.keys)}>"

    def look(self) -> bool:
        """Read it if it has changed; whether `keys` are others now. What is wrong with it is logged once."""
        try:
            if not self._file.is_due():
                return False
            keys = read_keys(self.path, of_clients=self._of_clients)
            if not self._file.take(os.stat(self.path)):
                return False
        except OSError as e:
            return self._complain(f"{self.path}: can't be read: {e.strerror}")
        except KeysFileError as e:
            return self._complain(str(e))
        if self._told:
            self._told = ""
            log.warning("%s is right again", self.path)
        if keys == self.keys:
            return False
        self.keys = keys
        log.info("%s: %d keys are in force", self.path, len(keys))
        return True

    def _complain(self, reason: str) -> bool:
        if reason != self._told:
            self._told = reason
            log.error("the keys stay as they were: %s", reason)
        return False


class KeyRing:
    """All keys of a worker: those of its settings, and those of the files as they are now.

    Args:
        api, admin, reader: keys as they are written.
        api_file, admin_file, reader_file: looked at by `start` and, twice a second, by `run`.
    """

    def __init__(
        self,
        *,
        api: Iterable[str] = (),
        admin: Iterable[str] = (),
        reader: Iterable[str] = (),
        api_file: Path | None = None,
        admin_file: Path | None = None,
        reader_file: Path | None = None,
    ) -> None:
        self._given = [tuple(map(access_key, given)) for given in (api, admin, reader)]
        self._files = (
            None if api_file is None else KeysFile(api_file),
            None if admin_file is None else KeysFile(admin_file, of_clients=False),
            None if reader_file is None else KeysFile(reader_file, of_clients=False),
        )
        self.api: tuple[AccessKey, ...] = ()
        self.admin: tuple[AccessKey, ...] = ()
        self.reader: tuple[AccessKey, ...] = ()
        self._collect()

    def __repr__(self) -> str:
        return f"<KeyRing api={len(self.api)} admin={len(self.admin)} reader={len(self.reader)}>"

    @property
    def asks_for_keys(self) -> bool:
        """Whether clients need one; also while a file has none yet."""
        return bool(self.api) or self._files[0] is not None

    async def start(self) -> None:
        """Have the keys of the files. A worker whose file is broken waits here until it is right, and serves nobody."""
        while await asyncio.to_thread(self._look):
            await asyncio.sleep(LOOK_EVERY_S)

    async def run(self) -> None:
        while any(self._files):
            await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.to_thread(self._look)  # the disk may be a network's

    def _look(self) -> bool:
        """Whether a file has no keys yet."""
        files = [file for file in self._files if file is not None]
        changed = [file.look() for file in files]
        if any(changed):
            self._collect()
        return not all(file.keys for file in files)

    def _collect(self) -> None:
        # Those of a file last: they may say more of a key that is given twice, and then only that counts.
        self.api, self.admin, self.reader = (
            tuple({key.digest: key for key in (*given, *(file.keys if file is not None else ()))}.values())
            for given, file in zip(self._given, self._files, strict=True)
        )
