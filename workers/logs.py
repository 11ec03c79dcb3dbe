"""How log lines look, in every process of ours.

Owns the `logging` configuration made from `log_level` and `log_format`; gunicorn applies it (gunicorn.conf.py).
All loggers end in one handler on stderr, so a line's origin is in the line and not in its place.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z WARNING [4711] app.http: message`."""

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s [%(process)d] %(name)s: %(message)s")
        self.datefmt = "%Y-%m-%dT%H:%M:%S"


class JsonFormatter(TextFormatter):
    """One JSON object a line, whatever the message holds."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def logging_config(level: str, style: str) -> dict[str, Any]:
    """A `logging.config.dictConfig` for all our processes; `style` is text or json."""
    ours = {"handlers": ["stderr"], "level": level, "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"ours": {"()": JsonFormatter if style == "json" else TextFormatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "ours", "stream": "ext://sys.stderr"}},
        "root": {"handlers": ["stderr"], "level": level},
        # The worker class hands gunicorn's handlers to uvicorn, so they must be here and not only in the root.
        "loggers": {"gunicorn.error": ours, "gunicorn.access": {"handlers": [], "propagate": False}},
    }
