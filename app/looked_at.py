"""A file that others write while we look at it: when it is to be read, and how it is opened.

Owns that rule: at the first look, and after a change once it has been the same for one look, so that one that is
written in place is not taken half-way. Files that are read once only are opened in the same way. It must not know what
a file holds.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

SETTLED_S = 2.0
"""A file that was written less than that before it was read is read once more: file systems count time in steps, so
what is written right after looks the same from outside."""

Stamp = tuple[int, ...]


class LookedAt:
    """See the module. A look is one `stat`, through symbolic links: Kubernetes swaps one in the middle of the path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: Stamp | None = None
        self._taken: Stamp | None = None

    @property
    def is_taken(self) -> bool:
        """Whether the last look found what was taken."""
        return self._taken is not None and self._seen == self._taken

    def is_due(self) -> bool:
        """Look; whether it is to be read now. Raises OSError."""
        try:
            stamp = _stamp(os.stat(self._path))
        except OSError:
            self._taken = None
            raise
        still = self._seen in (None, stamp)
        self._seen = stamp
        return still and stamp != self._taken

    def take(self, read: os.stat_result) -> bool:
        """It was read, as `read`. False: that is not what the look found, so it is for the next one."""
        stamp = _stamp(read)
        if stamp != self._seen:
            return False
        self._taken = stamp if time.time() - read.st_mtime >= SETTLED_S else None
        return True


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Without blocking: a pipe in its place must not hold a thread, and with it a start or a worker's end.

    Raises:
        OSError: also where it is no regular file, which could be read once only, or without an end.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        yield file


def _stamp(found: os.stat_result) -> Stamp:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
