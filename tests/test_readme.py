"""The README's settings table says what `app/settings.py` says."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic_core import PydanticUndefined

from app.settings import Settings, choices_of, flag_of, variables_of

README = Path(__file__).parent.parent / "README.md"


def rendered_table() -> str:
    """The table as it should stand between the markers; paste it there when a setting has changed."""
    rows = ["| flag | environment | default | what |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        variables = ", ".join(f"`{variable}`" for variable in variables_of(name))
        choices = f" One of {', '.join(choices_of(field))}." if choices_of(field) else ""
        rows.append(f"| `{flag_of(name)}` | {variables} | {default_of(name)} | {field.description}{choices} |")
    return "\n".join(rows)


def default_of(name: str) -> str:
    default = Settings.model_fields[name].default
    if default is None or default is PydanticUndefined or default == ():
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return " ".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_the_settings_table_is_the_settings() -> None:
    found = re.search(r"<!-- settings: begin -->\n(.*)\n?<!-- settings: end -->", README.read_text(), re.DOTALL)
    assert found is not None
    assert found[1].strip() == rendered_table()
