"""How log lines look, in every process of ours, and how they leave a worker.

Owns the `logging` configuration made from `log_level` and `log_format`; gunicorn applies it (gunicorn.conf.py).
All loggers end in one handler on stderr, so a line's origin is in the line and not in its place.

A worker serves on though nobody reads its stderr: there a thread writes, and what it is behind with is bounded.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from app.lines import ProcessorFormatter, structlog
from workers.processes import write_unless_full

if TYPE_CHECKING:
    from structlog.typing import EventDict, WrappedLogger

STDERR = 2
WAITING_LINES = 1_000
"""Of a worker whose stderr nobody reads; further ones are lost, and counted."""
LAST_LINES_S = 1.0
"""How long the end of a process waits until its last lines are written."""

_logfmt = structlog.processors.LogfmtRenderer()


def formatter(style: str) -> logging.Formatter:
    """`style`: text or json. A line's own fields follow its message."""
    render = _as_json if style == "json" else _as_text
    return ProcessorFormatter(
        processors=[
            _where_from,
            structlog.processors.format_exc_info,
            ProcessorFormatter.remove_processors_meta,
            render,
        ]
    )


def _where_from(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    record: logging.LogRecord = event["_record"]
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return {
        "time": f"{moment}.{int(record.msecs):03d}Z",
        "level": record.levelname,
        "pid": record.process,
        "logger": record.name,
        "message": event.pop("event"),
        **event,
    }


def _as_text(logger: WrappedLogger, method: str, event: EventDict) -> str:
    """`2026-01-31T12:00:00.123Z WARNING [4711] app.http: message field=value`."""
    head = (
        f"{event.pop('time')} {event.pop('level')} [{event.pop('pid')}] {event.pop('logger')}: {event.pop('message')}"
    )
    exception = event.pop("exception", None)
    fields = {name: value for name, value in event.items() if value is not None}
    line = f"{head} {_logfmt(logger, method, fields)}" if fields else head
    return line if exception is None else f"{line}\n{exception}"


def _as_json(logger: WrappedLogger, method: str, event: EventDict) -> str:
    """One JSON object, whatever the message holds."""
    return json.dumps(event, ensure_ascii=False, default=str)


class Stderr(logging.Handler):
    """Lines to stderr, never waited for. Before `write_behind` they are written at once or lost: the master, which has
    no thread, must go on replacing workers whoever reads what it says. From then on a thread writes them."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[bytes] | None = None
        self._lost = 0

    def __repr__(self) -> str:
        return f"<Stderr waiting={self._lines.qsize() if self._lines is not None else 0} lost={self._lost}>"

    def write_behind(self) -> None:
        # Not before the fork of the process that this is for: threads don't live through one.
        self._lines = queue.Queue(WAITING_LINES)
        threading.Thread(target=self._write_on, args=(self._lines,), name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._bytes_of(record)
        except Exception:
            self.handleError(record)
            return
        if self._lines is None:
            # The last one may have been cut short.
            if self._lost and write_unless_full(STDERR, b"\n" + self._told_lost()):
                self._lost = 0
            if self._lost or not write_unless_full(STDERR, line):
                self._lost += 1
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def flush(self) -> None:
        """Wait for what waits, but not for long. `logging` calls it at the end of the process."""
        deadline_s = time.monotonic() + LAST_LINES_S
        while self._lines is not None and self._lines.unfinished_tasks and time.monotonic() < deadline_s:
            time.sleep(0.005)

    def _write_on(self, lines: queue.Queue[bytes]) -> None:
        while True:
            _write(lines.get())
            lines.task_done()
            if self._lost:
                told, self._lost = self._told_lost(), 0
                _write(told)

    def _told_lost(self) -> bytes:
        return self._bytes_of(_words("%d log lines were lost: nobody read stderr", self._lost))

    def _bytes_of(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode("utf-8", "backslashreplace")


def _words(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("evenhand", logging.WARNING, __file__, 0, message, args, None)


def _write(line: bytes) -> None:
    try:
        while line:
            line = line[os.write(STDERR, line) :]
    except OSError:
        pass  # closed: there is no other place to say it


def write_behind() -> None:
    """A worker's lines are written by a thread from now on."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, Stderr):
            handler.write_behind()


def logging_config(level: str, style: str) -> dict[str, Any]:
    """A `logging.config.dictConfig` for all our processes; `style` is text or json."""
    ours = {"handlers": ["stderr"], "level": level, "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"ours": {"()": formatter, "style": style}},
        "handlers": {"stderr": {"()": Stderr, "formatter": "ours"}},
        "root": {"handlers": ["stderr"], "level": level},
        "loggers": {
            # The worker class hands gunicorn's handlers to uvicorn, so they must be here and not only in the root.
            "gunicorn.error": ours,
            "gunicorn.access": {"handlers": [], "propagate": False},
            # Which requests it tells of is `--log-requests`' business.
            "evenhand.request": {"level": "INFO"},
        },
    }
