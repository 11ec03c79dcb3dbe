"""A DNS server of the tests' own on loopback, UDP and TCP on one port: answers byte by byte (RFC 1035, 2782)."""

from __future__ import annotations

import contextlib
import ipaddress
import socketserver
import struct
import threading
from types import TracebackType
from typing import Any, Self

TYPES = {1: "A", 28: "AAAA", 33: "SRV"}
CODES = {"SERVFAIL": 2, "NXDOMAIN": 3, "REFUSED": 5}
TRUNCATED = 0x0200
ANSWER = 0x8180  # a response, recursion desired and available

Records = list[Any]


class NameServer:
    """`server.say(("engine.test", "A"), ["10.0.0.1"])`; a context manager.

    What is said of a name and a type is a list (of addresses, or of (port, target) for SRV; empty: no such records), or
    one of SERVFAIL, NXDOMAIN, REFUSED, silent. Of a name of which nothing is said there is none: NXDOMAIN; of another
    type of a known name there are no records.
    """

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], Records | str] = {}
        self.only_over_tcp = False  # over UDP the first record, and the flag
        self.asked: list[tuple[str, str, str]] = []
        server = self

        class Udp(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                data, sock = self.request
                if (reply := server.reply(data, "udp")) is not None:
                    sock.sendto(reply, self.client_address)

        class Tcp(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, struct.error):
                    (length,) = struct.unpack("!H", self.request.recv(2))
                    if (reply := server.reply(self.request.recv(length), "tcp")) is not None:
                        self.request.sendall(struct.pack("!H", len(reply)) + reply)

        self._tcp = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Tcp)
        self.port: int = self._tcp.server_address[1]
        self._udp = socketserver.ThreadingUDPServer(("127.0.0.1", self.port), Udp)
        self._threads = [threading.Thread(target=one.serve_forever, args=(0.02,)) for one in (self._udp, self._tcp)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for server in (self._udp, self._tcp):
            server.shutdown()
            server.server_close()
        for thread in self._threads:
            thread.join()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def say(self, name: str, kind: str, what: Records | str) -> None:
        self._said[name, kind] = what

    def forget(self, name: str) -> None:
        for key in [key for key in self._said if key[0] == name]:
            del self._said[key]

    def reply(self, query: bytes, over: str) -> bytes | None:
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode())
            at += 1 + query[at]
        name = ".".join(labels).lower()
        kind = TYPES.get(struct.unpack("!H", query[at + 1 : at + 3])[0], "?")
        question = query[12 : at + 5]
        self.asked.append((name, kind, over))
        known = any(key[0] == name for key in self._said)
        said = self._said.get((name, kind), [] if known else "NXDOMAIN")
        if said == "silent":
            return None
        if isinstance(said, str):
            return self._message(query, question, CODES[said], [])
        if self.only_over_tcp and over == "udp":
            # As real servers do: the first records fit, the flag says that there are more.
            return self._message(query, question, TRUNCATED, [_record(kind, one) for one in said[:1]])
        return self._message(query, question, 0, [_record(kind, one) for one in said])

    @staticmethod
    def _message(query: bytes, question: bytes, flags: int, records: list[bytes]) -> bytes:
        return query[:2] + struct.pack("!HHHHH", ANSWER | flags, 1, len(records), 0, 0) + question + b"".join(records)


def _record(kind: str, value: Any) -> bytes:
    if kind == "SRV":
        port, target = value
        labels = [label.encode() for label in target.split(".") if label]
        data = struct.pack("!HHH", 10, 5, port) + b"".join(bytes([len(x)]) + x for x in labels) + b"\0"
    else:
        data = ipaddress.ip_address(value).packed
    number = next(n for n, name in TYPES.items() if name == kind)
    return b"\xc0\x0c" + struct.pack("!HHIH", number, 1, 5, len(data)) + data
