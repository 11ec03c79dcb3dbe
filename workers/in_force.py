"""What a start says of its settings: which are in force, and where each came from. Once a start, by the master.

Owns the words, what of a value is hidden, and what a reload may change. `evenhand serve` hands its settings on as
variables, so it hands on where they came from too: by that a master knows what is to be looked for anew.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

from app.lines import structured
from app.settings import ENV_PREFIX, SOURCES_VARIABLE, Settings, flag_of, is_of_file, sources_of

log = logging.getLogger("evenhand")

HIDDEN = "***"
DEFAULT = "default"


FIXED = ("config", "server_name", "server_port", "ssl", "redis_url", "namespace", "state_dir", "grace_s")
"""What a reload leaves as it is: the listener is open, others go by it, or old and new workers would be strangers."""


def read_sources(environment: Mapping[str, str]) -> dict[str, str]:
    """Where settings come from, as whoever started us found it; gunicorn by itself finds it here."""
    try:
        said = json.loads(environment.get(SOURCES_VARIABLE, ""))
    except ValueError:
        said = None
    return {str(name): str(source) for name, source in said.items()} if isinstance(said, dict) else sources_of({})


class Load(NamedTuple):
    """The settings of a master from now on. `ignored`: a line for each change that takes a new start."""

    settings: Settings
    sources: dict[str, str]
    ignored: list[str]


def load_for_master(environment: MutableMapping[str, str]) -> Load:
    """Settle this process's settings, at its start and at each reload, in `environment`, which is os.environ.

    What flags and variables said stays. All else was the file's or a default, and is looked for anew.

    Raises:
        ConfigurationError: they are wrong; the environment is half done then.
    """
    if SOURCES_VARIABLE not in environment:
        return _settle(environment, Load(*Settings.load_with_sources(), []))
    before, sources = Settings.load(), read_sources(environment)
    given = {name: source for name, source in sources.items() if not is_of_file(source)}
    del environment[SOURCES_VARIABLE]
    for name in Settings.model_fields:
        if name not in given:
            environment.pop(f"{ENV_PREFIX}{name.upper()}", None)
    if before.config is not None:
        environment[f"{ENV_PREFIX}CONFIG"] = str(before.config)
    settings, found = Settings.load_with_sources()
    found |= given
    changed = [name for name in FIXED if getattr(settings, name) != getattr(before, name)]
    for name in changed:
        found.pop(name, None)
        if name in sources:
            found[name] = sources[name]
    # 0 was, and is, whatever port was free.
    ignored = [name for name in changed if (name, getattr(settings, name)) != ("server_port", 0)]
    settings = settings.model_copy(update={name: getattr(before, name) for name in changed})
    return _settle(
        environment, Load(settings, found, [f"{flag_of(n)} changes at the next start only" for n in ignored])
    )


def _settle(environment: MutableMapping[str, str], load: Load) -> Load:
    # Paths become absolute before gunicorn changes the directory, and the workers read the same again.
    environment.update(load.settings.environment())
    environment[SOURCES_VARIABLE] = json.dumps(load.sources)
    return load


def say_in_force(settings: Settings, sources: Mapping[str, str]) -> None:
    """At INFO those that were given, at DEBUG all."""
    if not log.isEnabledFor(logging.INFO):
        return
    everything = log.isEnabledFor(logging.DEBUG)
    told = [name for name in Settings.model_fields if everything or name in sources]
    untold = len(Settings.model_fields) - len(told)
    shown = rows_of(settings, sources, told)
    if settings.log_format == "json":
        structured(log).info("settings in force", settings=as_objects(shown), by_default=untold)
        return
    rest = f"; {untold} more by default (--log-level DEBUG names them)" if untold else ""
    log.info("settings in force: %d%s%s", len(told), rest, "".join(f"\n  {row}" for row in aligned(shown)))


Rows = Mapping[str, tuple[str, str]]
"""By field: the value as it may be shown, and where it came from."""


def rows_of(settings: Settings, sources: Mapping[str, str], names: Iterable[str]) -> Rows:
    return {name: (shown_value(getattr(settings, name)), sources.get(name, DEFAULT)) for name in names}


def as_objects(shown: Rows) -> dict[str, Any]:
    return {name: {"value": value, "from": source} for name, (value, source) in shown.items()}


def aligned(shown: Rows) -> list[str]:
    rows = [(flag_of(name), value, source) for name, (value, source) in shown.items()]
    names = max((len(flag) for flag, _, _ in rows), default=0)
    values = max((min(len(value), 60) for _, value, _ in rows), default=0)
    return [f"{flag:<{names}}  {value:<{values}}  {source}" for flag, value, source in rows]


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
