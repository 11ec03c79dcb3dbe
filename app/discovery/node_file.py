"""A file of nodes: YAML (and so JSON), taken as a whole or not at all.

Owns its form and the looks at it; when it is read is `app.looked_at`'s. It must not know what becomes of the nodes. No
message holds a value of the file: some are keys.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from app.discovery.listing import Listed, ReadFailed, Reading
from app.discovery.sources import FileSource
from app.errors import BadRequest
from app.looked_at import LookedAt, opened
from app.nearest import nearest
from app.nodes import (
    Role,
    normalise_url,
    parse_host_header,
    parse_key,
    parse_models,
    parse_port,
    parse_role,
    parse_speed,
)

LOOK_EVERY_S = 1.0
LIMIT_BYTES = 2**20
"""Some thousand nodes."""
# libyaml's, four times as fast: with the other, some thousand nodes take a busy host longer than the lease of who
# reads them, and each reader in turn would read in vain.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
FIELDS = ("url", "role", "models", "speed", "key", "host_header", "bootstrap_port")


class Wrong(ReadFailed):
    def __init__(self, mark: Any, text: str) -> None:
        super().__init__(f"line {mark.line + 1}: {text}" if mark is not None else text)


class FileReader:
    """See the module. Its looks are cheap: one `stat`, through symbolic links.

    Args:
        check_role: raises BadRequest for a role that the deployment can't use.
    """

    every_s = LOOK_EVERY_S
    patience_s = 0.0

    def __init__(self, source: FileSource, check_role: Callable[[Role], None]) -> None:
        self.name = source.name
        self._path = Path(source.path)
        self._check_role = check_role
        self.forget()

    def __repr__(self) -> str:
        return f"<FileReader {self.name}>"

    def forget(self) -> None:
        self._file = LookedAt(self._path)
        self._wrong = ""

    async def look(self) -> Reading | None:
        try:
            if not self._file.is_due():
                if self._wrong and self._file.is_taken:
                    raise ReadFailed(self._wrong)
                return None
            text, read = await asyncio.to_thread(self._read)
        except OSError as e:
            raise ReadFailed(f"can't be read: {e.strerror or type(e).__name__}") from e
        if not self._file.take(read):
            return None
        self._wrong = ""
        try:
            nodes = await asyncio.to_thread(parse_nodes, text, self._check_role)
        except ReadFailed as e:
            self._wrong = str(e)
            raise
        return Reading({node.url: node for node in nodes})

    def _read(self) -> tuple[bytes, os.stat_result]:
        with opened(self._path) as file:
            text = file.read(LIMIT_BYTES + 1)
            return text, os.fstat(file.fileno())


def parse_nodes(text: bytes, check_role: Callable[[Role], None] = lambda role: None) -> list[Listed]:
    """The nodes of a file, in its order. Raises ReadFailed, which names the line and the field."""
    if len(text) > LIMIT_BYTES:
        raise Wrong(None, f"is longer than {LIMIT_BYTES} bytes")
    try:
        loader = _LOADER(text)
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise Wrong(root and root.start_mark, "must be a mapping with the field nodes")
        fields = _fields(loader, root, "", ("nodes",))
        if "nodes" not in fields:
            raise Wrong(root.start_mark, "must have the field nodes")
        listed = fields["nodes"]
        if not isinstance(listed, yaml.SequenceNode):
            raise Wrong(listed.start_mark, "nodes must be a list; one without nodes is written []")
        found: dict[str, Listed] = {}
        for i, item in enumerate(listed.value):
            node = _node(loader, item, f"nodes[{i}]", check_role)
            if node.url in found:
                raise Wrong(item.start_mark, f"nodes[{i}].url is there already")
            found[node.url] = node
        return list(found.values())
    except yaml.MarkedYAMLError as e:
        if "nesting depth" in (e.problem or ""):
            raise Wrong(None, "is nested too deeply") from e
        problem = re.sub(r"'[^']{2,}'", "'...'", e.problem or "")  # an alias or a tag: a key may look like one
        raise Wrong(e.problem_mark or e.context_mark, f"is no YAML: {problem}") from e
    except (yaml.YAMLError, ValueError) as e:
        raise Wrong(None, "is no YAML: it holds bytes that are no text") from e
    except RecursionError as e:
        raise Wrong(None, "is nested too deeply") from e


_WORD = re.compile(r"[A-Za-z]+(_[A-Za-z]+)*").fullmatch
"""What may be said of a file again: a key that stands in the place of a field has more than letters."""


def _fields(loader: Any, node: Any, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    """The nodes of the document below a mapping, by field."""
    found: dict[str, Any] = {}
    for name_node, value in node.value:
        name = name_node.value if isinstance(name_node, yaml.ScalarNode) else None
        if name not in known:
            named = f"the unknown field {name}" if name and _WORD(name) else "a field that is not known"
            near = nearest(name or "", known)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
            raise Wrong(name_node.start_mark, f"{where} has {named}; {hint}".lstrip())
        if name in found:
            raise Wrong(name_node.start_mark, f"{where + '.' if where else ''}{name} is there twice")
        found[name] = value
    return found


def _node(loader: Any, item: Any, where: str, check_role: Callable[[Role], None]) -> Listed:
    if not isinstance(item, yaml.MappingNode):
        raise Wrong(item.start_mark, f"{where} must be a mapping with the field url")
    fields = _fields(loader, item, where, FIELDS)
    at = item.start_mark

    def value(name: str) -> Any:
        nonlocal at
        node = fields.get(name)
        at = node.start_mark if node is not None else item.start_mark
        try:
            return loader.construct_object(node, deep=True) if node is not None else None
        except (ValueError, LookupError, AttributeError, TypeError) as e:  # as the library says that a tag does not fit
            raise Wrong(at, f"{where}.{name} is written as what it can't be") from e

    def parsed(name: str, parse: Callable[..., Any]) -> Any:
        return parse(value(name), field=f"{where}.{name}")

    try:
        url = parsed("url", normalise_url)
        given = value("role")
        role = Role.Hybrid if given is None else parse_role(given, field=f"{where}.role")
        check_role(role)
        return Listed(
            url=url,
            role=role,
            models=parsed("models", parse_models) or None,
            speed=parsed("speed", parse_speed),
            key=parsed("key", parse_key),
            host_header=parsed("host_header", parse_host_header),
            bootstrap_port=parsed("bootstrap_port", parse_port),
        )
    except BadRequest as e:
        text = e.message if e.message.startswith(where) else f"{where}.role: {e.message}"
        raise Wrong(at, text) from e
