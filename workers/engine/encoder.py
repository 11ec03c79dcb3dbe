"""A simulated vLLM encoder: it answers a chat with what it would have encoded, for embeddings that are pulled (NIXL).

Owns the report alone; all else, keys and faults included, is the simulated engine's. No embedding is made, and no
side channel listens: what consumes it must be simulated too.

Source: `ec_transfer_params` of vLLM's chat protocol, as docs/epd.md shows it.
"""

from __future__ import annotations

import hashlib
from urllib.parse import urlsplit

import msgspec

from workers.engine import answers
from workers.engine.answers import Answer
from workers.engine.http import Record
from workers.engine.server import Engine

PATH = "/v1/chat/completions"
SIDE_CHANNEL_PORT = 5601
SIZE_BYTES = 4505600  # 1,100 tokens of 2,048 numbers of 2 bytes
FRAMES = {"image_url": 1, "video_url": 8}
GRID = (16, 16)  # patches, down and across


class Message(msgspec.Struct):
    content: list[dict[str, object]]


class AskedToEncode(msgspec.Struct):
    messages: list[Message]


encode_of = msgspec.json.Decoder(AskedToEncode).decode


class EncoderEngine(Engine):
    known_as = ""
    """The address by which others know it, where that is not the one it listens on."""

    def answer(self, record: Record) -> Answer:
        answer = super().answer(record)
        if record.path.partition("?")[0] != self.knobs.prefix + PATH or answer.status != 200 or answer.stream:
            return answer
        try:
            asked = encode_of(record.body)
        except msgspec.DecodeError as e:
            return answers.error(400, f"nothing to encode: {e}", "invalid_request")
        parts = [part for message in asked.messages for part in message.content]
        said = msgspec.json.decode(answer.pieces[0])
        said["ec_transfer_params"] = dict(self._entry(part, index) for index, part in enumerate(parts))
        answer.pieces = [msgspec.json.encode(said)]
        return answer

    def _entry(self, part: dict[str, object], index: int) -> tuple[str, dict[str, object]]:
        """The hash under which the embedding is kept, and what is told of it."""
        known = part.get("uuid") or msgspec.json.encode(part, order="sorted").hex()
        kept_as = hashlib.sha256(f"encoded {known}".encode()).hexdigest()
        return kept_as, {
            "metadata": metadata_of(str(part.get("type"))),
            "item_indices": [index],
            "peer_host": urlsplit(self.known_as or self.url).hostname,
            "peer_port": SIDE_CHANNEL_PORT,
            "size_bytes": SIZE_BYTES,
        }


def metadata_of(kind: str) -> dict[str, object]:
    """The grid of an image or a film; of sound how long it is."""
    if kind in FRAMES:
        return {kind.replace("_url", "_grid_thw"): [[FRAMES[kind], *GRID]]}
    return {"audio_feature_lengths": [100]}
