"""The pages that are made from the code: docs/settings.md, docs/api.md and the table of settings in README.md.

`make docs` writes them; `tests/test_docs.py` and `tests/test_readme.py` hold what is committed to what the code says.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from app.commands.serve import METAVARS
from app.http.openapi import document
from app.settings import Settings, allowed, choices_of, flag_of, is_list, variables_of

ROOT = Path(__file__).resolve().parents[2]

GROUPS = {
    "config": "The file, and LMDeploy's flags",
    "ssl_keyfile": "TLS files",
    "workers": "Processes and shared state",
    "log_format": "Log and traces",
    "nodes": "Nodes",
    "engine_key": "Calls to engines",
    "heartbeat_expiration_s": "Health of nodes",
    "retries": "Retries and breakers",
    "alias": "Models",
    "encode_servers_urls": "Encoders, prefill and decode",
    "admin_keys": "Who may do what",
    "max_body_size": "Limits and timeouts",
}
"""Field with which a group of settings.md begins -> its heading."""

SETTINGS_HEAD = """\
# Settings

Made from `app/settings.py` by `make docs`. Each setting is a flag of `evenhand serve`, an environment variable and a
name in the [configuration file](configuration.md); here it stands under its name in the file. The flag wins over the
variable, the variable over the file, the file over the default. Where there are two variables, the first wins.

A list is several words after its flag, a variable with spaces or commas between its items, or a list in the file. A
switch takes no value as a flag; as a variable and in the file it is `true` or `false`. Names that end in `-s` are
seconds.
"""

API_HEAD = """\
# API

Made from the OpenAPI document by `make docs`. Every worker serves that document at `/openapi.json`, with all fields of
all answers, and Swagger UI at `/`. [Endpoints](endpoints.md) says how the forwarded calls behave,
[security](security.md) who may call what.

Errors are OpenAI's error objects, `{"error": {"message", "type", "param", "code"}}`; some carry LMDeploy's `error_code`
and `text` beside it. Every answer has an `X-Request-Id`: the client's own, or one that was made.

An API key is sent as `Authorization: Bearer KEY` or `x-api-key: KEY`, reader keys and admin keys as
`Authorization: Bearer KEY` only.
"""

CALLERS = {
    "apiKey": "Needs an API key, where there are any.",
    "readerKey": "Needs a reader key, an admin key, or a connection from a trusted network.",
    "adminKey": "Needs an admin key, or a connection from a trusted network.",
}


# --- settings


def default_of(name: str) -> str:
    default = Settings.model_fields[name].default
    if default is None or default is PydanticUndefined or default == ():
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return " ".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def readme_table() -> str:
    """What stands between the markers of README.md."""
    rows = ["| flag | environment | default | what |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        variables = ", ".join(f"`{variable}`" for variable in variables_of(name))
        choices = f" One of {', '.join(choices_of(field))}." if choices_of(field) else ""
        rows.append(
            f"| `{flag_of(name)}` | {variables} | {default_of(name)} | {_linked(field.description, 'docs/')}{choices} |"
        )
    return "\n".join(rows)


def _linked(text: str | None, folder: str = "") -> str:
    """Pages that a help text names, as links; `folder`: where they are from the page that has the text."""
    return re.sub(r"\bdocs/([\w-]+\.md)", rf"[\1]({folder}\1)", text or "")


def settings_page() -> str:
    parts = [SETTINGS_HEAD]
    for name, field in Settings.model_fields.items():
        if name in GROUPS:
            parts.append(f"## {GROUPS[name]}\n")
        variables = " ".join(f"`{variable}`" for variable in variables_of(name))
        facts = [f"`{_usage(name)}`", variables, _unit(name)]
        if default_of(name):
            facts.append(f"default `{default_of(name)}`")
        parts.append(f"### {name.replace('_', '-')}\n\n{' · '.join(facts)}\n\n{_linked(field.description)}\n")
    return "\n".join(parts)


def _usage(name: str) -> str:
    """The flag as one types it."""
    field = Settings.model_fields[name]
    if field.annotation is bool:
        return flag_of(name)
    value = METAVARS.get(name) or ("SECONDS" if name.endswith("_s") else "VALUE")
    return f"{flag_of(name)} {value}{' ...' if is_list(field) else ''}"


def _unit(name: str) -> str:
    field = Settings.model_fields[name]
    if choices_of(field):
        return "one of " + ", ".join(f"`{choice}`" for choice in choices_of(field))
    if field.annotation is bool:
        return "switch"
    if is_list(field):
        return "list"
    if name == "max_body_size":
        return "bytes, or a number with a suffix"
    if name.endswith("_s"):
        return allowed(field).replace("a number", "seconds")
    return allowed(field) or "text"


# --- API


def api_page() -> str:
    openapi = document()
    errors = _errors(openapi)
    parts = [API_HEAD, "| status | |", "|---|---|", *(f"| {status} | {text} |" for status, text in errors.items()), ""]
    for tag in openapi["tags"]:
        parts.append(f"## {tag['name']}\n\n{tag['description']}\n")
        alike: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        for path, methods in openapi["paths"].items():
            for method, operation in methods.items():
                if operation["tags"] == [tag["name"]]:
                    rest = {key: value for key, value in operation.items() if key not in ("summary", "operationId")}
                    alike.setdefault(repr(rest), []).append((f"{method.upper()} {path}", operation))
        parts += [_section(openapi, errors, calls) for calls in alike.values()]
    return "\n".join(parts)


def _errors(openapi: dict[str, Any]) -> dict[str, str]:
    """Statuses that mean the same wherever they come: what most operations say of them."""
    texts: dict[str, Counter[str]] = {}
    for methods in openapi["paths"].values():
        for operation in methods.values():
            for status, answer in operation["responses"].items():
                if status.startswith(("4", "5")):
                    texts.setdefault(status, Counter())[_resolved(openapi, answer)["description"]] += 1
    return {status: found.most_common(1)[0][0] for status, found in sorted(texts.items()) if found.total() > 1}


def _section(openapi: dict[str, Any], errors: dict[str, str], calls: list[tuple[str, dict[str, Any]]]) -> str:
    """One operation, or those that differ by nothing but path and summary."""
    operation = calls[0][1]
    caller = next((CALLERS[name] for way in operation["security"] for name in way), "Open to all.")
    if len(calls) == 1:
        lines = [f"### {calls[0][0]}", "", f"{operation['summary']}. {caller}", ""]
    else:
        lines = [f"### {calls[0][0]} and its like", "", caller, "", "| call | |", "|---|---|"]
        lines += [*(f"| `{call}` | {each['summary']} |" for call, each in calls), ""]
    if operation.get("description"):
        lines += [operation["description"], ""]
    rows = [(f"`{each['name']}`", each) for each in operation.get("parameters", [])]
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        suffix = "" if kind == "application/json" else f" of a {kind.rpartition('/')[2].partition('-')[0]}"
        rows += [(name + suffix, each) for name, each in _fields(openapi, content["schema"])]
    if rows:
        lines += ["| field | type | what |", "|---|---|---|"]
        lines += [f"| {name} | {_type(openapi, each)} | {_text(openapi, each)} |" for name, each in rows]
        lines.append("")
    answers = {status: _resolved(openapi, answer)["description"] for status, answer in operation["responses"].items()}
    own = [f"{status}: {text}" for status, text in answers.items() if errors.get(status) != text]
    usual = [status for status, text in answers.items() if errors.get(status) == text]
    lines += [f"- {text}" for text in own] + ([f"- {', '.join(usual)}: as above."] if usual else [])
    return "\n".join([*lines, ""])


def _fields(openapi: dict[str, Any], schema: dict[str, Any], before: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Those of a body, and of objects in it."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name, each in _resolved(openapi, schema).get("properties", {}).items():
        inner = _fields(openapi, each, f"{before}{name}.")
        found += inner or [(f"`{before}{name}`", each)]
    return found


def _resolved(openapi: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in value:
        found: Any = openapi
        for step in value["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        value = found
    return value


def _type(openapi: dict[str, Any], value: dict[str, Any]) -> str:
    schema = _resolved(openapi, value.get("schema", value))
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(openapi, schema['items'])}s"
    several = schema.get("oneOf") or schema.get("anyOf") or []
    return " or ".join(_type(openapi, each) for each in several) or str(schema.get("type", "any"))


def _text(openapi: dict[str, Any], value: dict[str, Any]) -> str:
    text = value.get("description") or _resolved(openapi, value.get("schema", value)).get("description", "")
    return str(text).replace("\n", " ").replace("|", "\\|")


def write() -> None:
    (ROOT / "docs" / "settings.md").write_text(settings_page())
    (ROOT / "docs" / "api.md").write_text(api_page())
    readme = ROOT / "README.md"
    begin, end = "<!-- settings: begin -->\n", "\n<!-- settings: end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    readme.write_text(pattern.sub(lambda _: begin + readme_table() + end, readme.read_text()))


if __name__ == "__main__":
    write()
