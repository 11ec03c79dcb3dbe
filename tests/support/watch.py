"""Somebody who looks at `/dashboard/events`, in a thread of its own."""

from __future__ import annotations

import http.client
import json
import threading
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from tests.support.wait import eventually

DOCUMENT = dict[str, Any]


class Viewer:
    """A context manager; `states` and `decisions` as they come, `ended` once the stream is over.

    Args:
        connection: one that is there already, and stays open.
    """

    def __init__(self, url: str, *, connection: http.client.HTTPConnection | None = None) -> None:
        self.states: list[DOCUMENT] = []
        self.decisions: list[DOCUMENT] = []
        self.ended = False
        self._connection = connection or http.client.HTTPConnection(urlsplit(url).netloc, timeout=15)
        self._connection.request("GET", "/dashboard/events")
        self._answer = self._connection.getresponse()
        self.status = self._answer.status
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        if self.status != 200:
            said = self._answer.read()
            self._connection.close()
            raise AssertionError(f"{self.status}: {said!r}")
        self._thread.start()
        eventually(lambda: self.states, within_s=5)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.leave()

    def leave(self) -> None:
        # Not close: that would wait for the reader.
        if self._connection.sock is not None:
            self._connection.sock.shutdown(2)
        elif self._answer.fp is not None and not self.ended:
            self._answer.fp.raw._sock.shutdown(2)  # type: ignore[attr-defined]
        self._thread.join(5)
        self._answer.close()
        self._connection.close()

    def decided(self, model: str, count: int, *, within_s: float = 5.0) -> list[DOCUMENT]:
        """The decisions for a model, once there are that many."""

        def look() -> list[DOCUMENT]:
            found = [one for one in self.decisions if one["model"] == model]
            assert len(found) >= count, f"{len(found)} decisions"
            return found

        return eventually(look, within_s=within_s)

    def _read(self) -> None:
        name = ""
        try:
            for line in self._answer:
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    found = json.loads(line[6:])
                    if name == "state":
                        self.states.append(found)
                    else:
                        self.decisions += found
        except (OSError, ValueError, http.client.HTTPException):
            pass
        self.ended = True
