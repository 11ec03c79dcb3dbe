"""How a command fails: one line for the person who gave it, and exit code 1."""

from __future__ import annotations


class CommandError(Exception):
    """It could not be done; the message is one line that may be shown as it is."""


class UnknownModel(CommandError):
    """No node was ever registered with that model."""
