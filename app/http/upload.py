"""A form on its way from a client to an engine, of which only the beginning is held.

Owns what has come and has not gone on. It must not know engines; `app.upstream` asks it for pieces
(`app.upstream.transport.Upload`).

Nothing can go on before the form has named its model, and that field may stand behind the file. What comes before it
is held in memory up to `HELD_BYTES`, beyond that in a temporary file: clients that put the model last are rare, and
their uploads must not fill the memory of all others. Even where the model comes first, the first `AT_ONCE_BYTES` are
held: a form that is no longer than that goes as one piece, like any other request, and can be sent to another engine.

So the model is in what is held when it is known, and another one can be put in its place on the way out (`rename`).
"""

from __future__ import annotations

import tempfile

from starlette.types import Receive

from app.http.body import ClientLeft, too_large
from app.http.form import Form

AT_ONCE_BYTES = 512 * 1024
HELD_BYTES = 2 * AT_ONCE_BYTES
"""More than AT_ONCE_BYTES and the longest piece that comes: a form with its model first needs no file."""
PIECE_BYTES = 64 * 1024


class Upload:
    """One request's. `begin` first; then `whole` if all has come, else `read` to the end.

    Args:
        length: what Content-Length says; None: the form comes in chunks. `length` is what goes out.
        setting: the flag that changes the bound, for the message.
    """

    def __init__(
        self, receive: Receive, form: Form, *, length: int | None, limit_bytes: int, setting: str = ""
    ) -> None:
        self.length = length
        self.spent = False
        self.ended = False
        self.received_bytes = 0
        self.whole: bytes | None = None
        self._receive = receive
        self._form = form
        self._declared = length
        self._limit_bytes = limit_bytes
        self._setting = setting
        self._held = tempfile.SpooledTemporaryFile(max_size=HELD_BYTES)  # noqa: SIM115  # closed with the request
        self._swap: tuple[int, int, bytes] | None = None  # (start, end, instead) in what is held
        self._due: tuple[int, int, bytes] | None = None  # the same until it has been given out

    def __repr__(self) -> str:
        return f"<Upload received_bytes={self.received_bytes} ended={self.ended} spent={self.spent}>"

    async def begin(self) -> str:
        """Read until the model is known. Returns it; "" where the form may name none and does.

        Raises:
            BodyTooLarge, BadRequest: it is too large, or no form that names a model.
            ClientLeft: the client disconnected first.
        """
        if self._declared is not None and self._declared > self._limit_bytes:
            raise too_large(self._limit_bytes, self._setting)
        while not self.ended and (self._form.model is None or self.received_bytes < AT_ONCE_BYTES):
            self._held.write(await self._next())
        self._held.seek(0)
        if self.ended and self.received_bytes <= HELD_BYTES:
            self.whole = self._held.read()
        assert self._form.model is not None  # or its end would have been refused
        return self._form.model

    def rename(self, model: str) -> None:
        """The form goes out with another model, or gets one. Between `begin` and the first `read`; once."""
        start, end, instead = self._swap = self._due = self._form.swap(model)
        if self.length is not None:
            self.length += len(instead) - (end - start)
        if self.whole is not None:
            self.whole = b"%b%b%b" % (self.whole[:start], instead, self.whole[end:])

    async def read(self) -> bytes:
        """As `transport.Upload.read`; raises as `begin`."""
        if piece := self._read_held():
            return piece
        if self.ended:
            return b""
        self.spent = True
        return await self._next()

    def rewind(self) -> None:
        self._held.seek(0)
        self._due = self._swap

    def close(self) -> None:
        self._held.close()

    def _read_held(self) -> bytes:
        if self._due is None:
            return self._held.read(PIECE_BYTES)
        start, end, instead = self._due
        left = start - self._held.tell()
        if left > PIECE_BYTES:
            return self._held.read(PIECE_BYTES)
        piece = self._held.read(left) + instead
        self._held.seek(end)
        self._due = None
        return piece

    async def _next(self) -> bytes:
        """What comes next; b"" only at the end. The end counts with its last byte: after that nothing can be kept
        from the engine."""
        while not self.ended:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            piece: bytes = message.get("body", b"")
            self.received_bytes += len(piece)
            if self.received_bytes > self._limit_bytes:
                raise too_large(self._limit_bytes, self._setting)
            self._form.feed(piece)
            if not message.get("more_body", False) or self.received_bytes == self._declared:
                self.ended = True
                self._form.end()
            if piece:
                return piece
        return b""
