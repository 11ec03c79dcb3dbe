"""A deployment over HTTP, as anybody may reach it.

Owns the calls and what is said where one fails. It must not know Redis. Only the standard library, so that a command
answers before a person notices.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from app.terminal.failures import CommandError, UnknownModel
from app.terminal.words import printable

TIMEOUT_S = 30.0  # an add without models waits for the engine's own answer
LOOK_TIMEOUT_S = 10.0
SILENCE_S = 15.0
"""Events: a state comes each second, and a comment at least each 10 s; who says nothing for longer is gone."""
LINE_BYTES = 64 * 2**20
"""A state of a fleet of 100,000 nodes; more is none."""
LMDEPLOY_TEXT = re.compile(r" \(104\d\d: [^()]*\)$")
"""What LMDeploy's own callers look for at the end of a message; people have read the reason before it."""
NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
"""OpenSSL's words, of its versions 1.1 to 3.5, for an answer that is no TLS."""
TLS_ALERT = "\x15\x03"
"""How it begins, type and version (RFC 8446, 5.1)."""


class Refused(CommandError):
    """It answered with an error. `status` and `code` are those of the answer."""

    def __init__(self, message: str, status: int, code: object) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class ByUrl:
    """One deployment. The key never enters its repr."""

    def __init__(self, url: str, admin_key: str | None) -> None:
        self.name = url
        self._key = admin_key
        # No proxy from the environment: a deployment is near, and http_proxy is about what is far.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __repr__(self) -> str:
        return f"<ByUrl {self.name}>"

    def state(self) -> dict[str, Any]:
        return self._document("/dashboard/state", "nodes")

    def explain(self, model: str) -> dict[str, Any]:
        try:
            return self._document(f"/nodes/explain?model={quote(model, safe='')}", "choices")
        except Refused as e:
            if e.code == "model_not_found":
                raise UnknownModel(str(e)) from e
            raise

    def nodes(self, *, gone: bool) -> dict[str, dict[str, Any]]:
        found = self.ask("GET", "/nodes/status" + ("?all=1" if gone else ""))
        if not isinstance(found, dict):
            raise CommandError(f"{self.name} did not answer as Evenhand does: no nodes in /nodes/status")
        return found

    def watch(self, interval_s: float) -> Iterator[tuple[str, Any]]:
        """As they come: the deployment has an interval of its own."""
        with self._open("GET", "/dashboard/events", None, SILENCE_S, accept="text/event-stream") as answer:
            try:
                for kind, text in events(iter(lambda: answer.readline(LINE_BYTES), b"")):
                    yield kind, json.loads(text)
            except (OSError, ValueError) as e:
                raise CommandError(f"{self.name} is silent: {_reason(e)}") from e
        raise CommandError(f"{self.name} ended the connection")

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = TIMEOUT_S) -> Any:
        """The answer as JSON. Raises Refused, CommandError."""
        with self._open(method, path, body, timeout_s) as answer:
            try:
                return json.loads(answer.read())
            except (OSError, ValueError) as e:
                raise CommandError(f"{self.name} did not answer as Evenhand does: {_reason(e)}") from e

    def _document(self, path: str, field: str) -> dict[str, Any]:
        """One of the documents; `field` is one that it has."""
        try:
            document = self.ask("GET", path, timeout_s=LOOK_TIMEOUT_S)
        except Refused as e:
            if e.status == 404 and e.code != "model_not_found":
                raise CommandError(f"{self.name} has no {path.partition('?')[0]}: its Evenhand is an older one") from e
            raise
        if not isinstance(document, dict) or field not in document:
            raise CommandError(f"{self.name} did not answer as Evenhand does: no {field} in {path}")
        return document

    def _open(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float, accept: str = "application/json"
    ) -> Any:
        request = urllib.request.Request(self.name + path, method=method)
        request.add_header("Accept", accept)
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        try:
            return self._opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as e:
            with e:
                raise _refusal(e, with_key=bool(self._key)) from e
        except urllib.error.URLError as e:
            reason = _reason(e.reason)
            hint = self._other_scheme(e.reason) or "is it another --url (EVENHAND_URL)?"
            raise CommandError(f"can't reach {self.name}: {reason}; {hint}") from e
        except (OSError, ValueError, http.client.HTTPException) as e:
            hint = self._other_scheme(e)
            text = f"{self.name} did not answer as Evenhand does: {_reason(e)}"
            raise CommandError(f"{text}; {hint}" if hint else text) from e

    def _other_scheme(self, e: object) -> str:
        """A question, where http was spoken to who speaks TLS, or the other way round."""
        scheme, _, rest = self.name.partition("://")
        alert = isinstance(e, http.client.BadStatusLine) and str(e).startswith(TLS_ALERT)
        if scheme == "http" and (alert or isinstance(e, ConnectionResetError)):
            return f"is it https://{rest}?"
        if scheme == "https" and isinstance(e, ssl.SSLError) and e.reason in NOT_TLS:
            return f"is it http://{rest}?"
        return ""


def events(lines: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """(event, data) of each event of a text/event-stream; comments and what has no data are passed over."""
    kind, data = "message", list[str]()
    for raw in lines:
        line = raw.decode(errors="replace").rstrip("\r\n")
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                yield kind, "\n".join(data)
            kind, data = "message", []
        elif name == "event":
            kind = value
        elif name == "data":
            data.append(value)


def _refusal(e: urllib.error.HTTPError, *, with_key: bool) -> Refused:
    text, code = str(e.reason), None
    try:
        error = json.loads(e.read())["error"]
        text, code = error["message"], error.get("code")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    text = LMDEPLOY_TEXT.sub("", text)
    if e.code == HTTPStatus.UNAUTHORIZED and not with_key:
        # How a header is sent is no matter of who types a command.
        text = text.partition(": send `")[0].rstrip(". ") + "; give --admin-key (EVENHAND_ADMIN_KEY)"
    return Refused(f"{e.code} {printable(text)}", e.code, code)


def _reason(reason: object) -> str:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"{reason.verify_message} (SSL_CERT_FILE names further certificates to trust)"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return printable(reason) or type(reason).__name__
