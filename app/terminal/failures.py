"""How a command fails: one line for the person who gave it, and exit code 1."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class CommandError(Exception):
    """It could not be done; the message is one line that may be shown as it is."""


class UnknownModel(CommandError):
    """No node is registered with that model."""


@contextlib.contextmanager
def readable(name: str) -> Iterator[None]:
    """CommandError for a document that lacks what is read in it; `name`: of the deployment that gave it."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        what = f"{type(e).__name__}: {e}"
        raise CommandError(f"{name}: its answer can't be read ({what}); is it of another version?") from e
