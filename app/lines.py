"""Log lines that have fields: structlog, as all processes of ours import it.

Owns how such a logger is made. It must not know what lines look like (workers/logs.py), nor who writes any.
"""

from __future__ import annotations

import logging
import sys

# structlog imports rich for its colours wherever that is installed, which takes longer than all the rest of a start.
_colours = [name for name in ("rich", "better_exceptions") if name not in sys.modules]
sys.modules |= dict.fromkeys(_colours)  # type: ignore[arg-type]
try:
    import structlog
    from structlog.stdlib import BoundLogger, ProcessorFormatter
finally:
    for _name in _colours:
        del sys.modules[_name]

__all__ = ["BoundLogger", "ProcessorFormatter", "structlog", "structured"]


def structured(log: logging.Logger) -> BoundLogger:
    """`log` for lines with fields: `structured(log).info("message", field=value)`."""
    # Not structlog's own configuration: that is the process's, and who runs us may have one.
    bound: BoundLogger = structlog.wrap_logger(
        log, processors=[ProcessorFormatter.wrap_for_formatter], wrapper_class=BoundLogger
    ).bind()
    return bound
