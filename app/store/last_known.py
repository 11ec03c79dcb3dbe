"""The registry as this host last knew it, in a file: for a worker that starts while Redis is away.

Owns that file. It must not know Redis, nor decide what the nodes in it are good for.

All workers of the host write the same, each about a second after a change: the newest stands in the end, and
whoever finds it there already writes nothing. It holds the engines' keys, so it is for its owner alone.

Files of other deployments beside it stay, however old: from here one that is given up looks like one whose Redis has
been away for long, which is when it is needed. Half-written ones that a kill has left are removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgpack

from app.nodes import Node
from app.store.fields import node_from_fields, node_to_fields
from app.store.snapshot import Snapshot

log = logging.getLogger("evenhand.store")

WRITE_AFTER_S = 1.0
"""After a change: a fleet that changes state at once is written once."""
LEFT_OVER_AFTER_S = 3600.0
"""A write takes milliseconds, and on a disk that stalls minutes: what is older has nobody who writes it."""
FORMAT = 1


class LastKnown:
    """One per worker; `path` is the same for all workers of a deployment on this host."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._newest: Snapshot | None = None
        self._writing: asyncio.Task[None] | None = None
        self._turn = threading.Lock()
        self._told = False

    @classmethod
    def of(cls, state_dir: Path, deployment: str) -> LastKnown:
        """`deployment` tells those of one host apart."""
        digest = hashlib.blake2b(deployment.encode(), digest_size=8).hexdigest()
        return cls(state_dir / f"nodes-{digest}.msgpack")

    def __repr__(self) -> str:
        return f"<LastKnown {self._path}>"

    def load(self) -> tuple[Snapshot, float] | None:
        """What stands there, with version 0, and its age in seconds; None where nothing does that can be read."""
        self._remove_left_over()
        try:
            packed = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as e:
            log.warning("the last known nodes can't be read: %s", e)
            return None
        try:
            return self._unpack(packed)
        except Exception as e:  # whatever somebody put there
            log.warning("the last known nodes in %s are damaged and passed over: %s", self._path, e or type(e).__name__)
            return None

    def keep(self, snapshot: Snapshot) -> None:
        """Write it down soon, in the background. Never fails."""
        self._newest = snapshot
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_soon(), name="last-known")

    def forget(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _remove_left_over(self) -> None:
        with contextlib.suppress(OSError):  # another worker may be faster, and then has done it
            for beside in self._path.parent.glob("nodes-*.msgpack.[0-9]*-????????"):
                if time.time() - beside.stat().st_mtime > LEFT_OVER_AFTER_S:
                    beside.unlink()

    async def close(self) -> None:
        """Write what is not written yet."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        # What is being written, or was to be when that was cancelled, is not written yet.
        if self._newest is not None:
            await asyncio.to_thread(self._write, self._newest)

    async def _write_soon(self) -> None:
        await asyncio.sleep(WRITE_AFTER_S)
        while (newest := self._newest) is not None:
            await asyncio.to_thread(self._write, newest)
            if self._newest is newest:
                self._newest = None

    def _write(self, snapshot: Snapshot) -> None:
        with self._turn:
            if self._newest is snapshot:  # a thread that was given up goes on, and what it has may be older
                self._write_now(snapshot)

    def _write_now(self, snapshot: Snapshot) -> None:
        nodes = {url: node_to_fields(node) for url, node in snapshot.nodes.items()}
        body: bytes = msgpack.packb({"nodes": nodes, "engine_keys": dict(snapshot.engine_keys)})
        digest = hashlib.blake2b(body).digest()
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}-{secrets.token_hex(4)}")
        try:
            with contextlib.suppress(Exception):  # not there, or no file of ours
                head = msgpack.unpackb(self._path.read_bytes())
                if head["format"] == FORMAT and head["digest"] == digest:
                    os.utime(self._path)  # it is as true now as it was then
                    return
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            packed = msgpack.packb({"format": FORMAT, "digest": digest, "body": body})
            fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(packed)
                beside.replace(self._path)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
        except OSError as e:
            if not self._told:
                self._told = True
                log.warning(
                    "the nodes can't be written to --state-dir, so a worker that starts while Redis is away "
                    "will not know them: %s",
                    e,
                )

    def _unpack(self, packed: bytes) -> tuple[Snapshot, float]:
        head = msgpack.unpackb(packed)
        if head["format"] != FORMAT or hashlib.blake2b(head["body"]).digest() != head["digest"]:
            raise ValueError("it is of another version, or cut short")
        body = msgpack.unpackb(head["body"])
        found: Mapping[str, Node | None] = {url: node_from_fields(url, fields) for url, fields in body["nodes"].items()}
        nodes = {url: node for url, node in found.items() if node is not None}
        age_s = max(0.0, time.time() - self._path.stat().st_mtime)
        return Snapshot(0, nodes, body["engine_keys"]), age_s
