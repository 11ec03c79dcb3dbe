"""What a start says of its settings: which are in force, and where each came from. Once a start, by the master.

Owns the words, and what of a value is hidden. `evenhand serve` hands its settings on as variables, so it hands on
where they came from too.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from app.lines import structured
from app.settings import Settings, flag_of, source_of
from workers.agreed import SOURCES_VARIABLE

log = logging.getLogger("evenhand")

HIDDEN = "***"
DEFAULT = "default"


def sources_of(flags: Mapping[str, object]) -> dict[str, str]:
    """Where each setting that is not left to its default comes from, by field."""
    found = {name: source_of(name, flags) for name in Settings.model_fields}
    return {name: source for name, source in found.items() if source is not None}


def read_sources(environment: Mapping[str, str]) -> dict[str, str]:
    """The same, as whoever started us found it; gunicorn by itself finds it here."""
    try:
        said = json.loads(environment.get(SOURCES_VARIABLE, ""))
    except ValueError:
        said = None
    return {str(name): str(source) for name, source in said.items()} if isinstance(said, dict) else sources_of({})


def say_in_force(settings: Settings, sources: Mapping[str, str]) -> None:
    """At INFO those that were given, at DEBUG all."""
    if not log.isEnabledFor(logging.INFO):
        return
    everything = log.isEnabledFor(logging.DEBUG)
    told = [name for name in Settings.model_fields if everything or name in sources]
    untold = len(Settings.model_fields) - len(told)
    shown = {name: (shown_value(getattr(settings, name)), sources.get(name, DEFAULT)) for name in told}
    if settings.log_format == "json":
        event: dict[str, Any] = {name: {"value": value, "from": source} for name, (value, source) in shown.items()}
        structured(log).info("settings in force", settings=event, by_default=untold)
        return
    rest = f"; {untold} more by default (--log-level DEBUG names them)" if untold else ""
    log.info("settings in force: %d%s%s", len(told), rest, "".join(_aligned(shown)))


def _aligned(shown: Mapping[str, tuple[str, str]]) -> list[str]:
    rows = [(flag_of(name), value, source) for name, (value, source) in shown.items()]
    names = max((len(flag) for flag, _, _ in rows), default=0)
    values = max((min(len(value), 60) for _, value, _ in rows), default=0)
    return [f"\n  {flag:<{names}}  {value:<{values}}  {source}" for flag, value, source in rows]


def shown_value(value: object) -> str:
    """A setting's value for people, without what must not be shown."""
    if isinstance(value, tuple):
        return " ".join(map(shown_value, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if value is None:
        return "none"
    text = str(value)  # of a key: asterisks
    if text.startswith(("dns:", "dns+srv:")):
        return text  # its options are no secret, and there is no user
    return without_credentials(text) if "://" in text else text


def without_credentials(url: str) -> str:
    """A URL less its user and password, and less its options, unless that is the number of a database only."""
    scheme, _, rest = url.partition("://")
    credentials, at, place = rest.rpartition("@")  # the last one: a password may hold one too
    place, mark, options = re.fullmatch(r"([^?#]*)([?#]?)(.*)", place, re.DOTALL).groups()  # type: ignore[union-attr]
    options = options if re.fullmatch(r"db=\d+", options) else HIDDEN if options else ""
    return f"{scheme}://{HIDDEN if credentials else ''}{at}{place}{mark}{options}"
