"""What `mkdocs build` does beside its own: pages from outside docs/, links that lead there, the list of decisions.

Pages are written to be read in the repository: links to code are relative and lead out of docs/. In the site those
to a page that is part of it lead there, all others become plain text, after a look whether the file is there. A link
that is named like its file gets that page's title.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.scripts.sequence import drawn

ROOT = Path(__file__).resolve().parents[2]
TAKEN_IN = {"lua/README.md": "redis-keys.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the site that lie outside docs/: their path in the repository -> in the site."""
LESS = 0.3
"""Weight in the search of what is no guide: inner parts, and how it came to be so."""
DIAGRAM = re.compile(r"(?ms)^```mermaid\n(.*?)^```$")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(([^()\s]+)\)")

log = get_plugin_logger("site")


def on_config(config: MkDocsConfig) -> None:
    """`decisions/` in the navigation: its pages, in their order."""
    decisions = sorted(f"decisions/{path.name}" for path in Path(config.docs_dir, "decisions").glob("*.md"))
    config.nav = _expanded(config.nav, decisions)


def _expanded(item: Any, decisions: list[str]) -> Any:
    if isinstance(item, list):
        return [_expanded(each, decisions) for each in item]
    if isinstance(item, dict):
        return {name: _expanded(each, decisions) for name, each in item.items()}
    return decisions if item == "decisions/" else item


def on_files(files: Files, config: MkDocsConfig) -> None:
    for path, name in TAKEN_IN.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    name = page.file.src_uri
    if name.startswith("decisions/") or name in TAKEN_IN.values():
        page.meta["search"] = {"boost": LESS}
    source = next((path for path, taken in TAKEN_IN.items() if taken == name), f"docs/{name}")

    def resolved(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, mark, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return match[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        site_place = TAKEN_IN.get(place) or (place.removeprefix("docs/") if place.startswith("docs/") else None)
        if site_place is not None:
            if text == posixpath.basename(path) and path.endswith(".md") and (ROOT / place).exists():
                text = _title(place)
            return f"[{text}]({posixpath.relpath(site_place, posixpath.dirname(name) or '.')}{mark}{anchor})"
        if not (ROOT / place).exists():
            log.warning("%s links to %s, which is not there", source, target)
        return text

    # Not in fences. Code within a line may be a link's text, so it is no border.
    parts = re.split(r"(?ms)(^```.*?^```$)", DIAGRAM.sub(lambda match: drawn(match[1]), markdown))
    return "".join(part if part.startswith("```") else LINK.sub(resolved, part) for part in parts)


def _title(path: str) -> str:
    """Of a page: what its first heading says."""
    return (ROOT / path).read_text().partition("\n")[0].removeprefix("# ")
