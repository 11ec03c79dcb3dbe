"""Media items of a chat request: finding them, asking an encoder for them, using what it reports.

Pure: bodies in, bodies out. It must not know encoders' states, HTTP or Redis.

Source: vLLM's encoder-disaggregation proxy (examples/disaggregated/disaggregated_encoder) and the
`ec_transfer_params` of its chat protocol; docs/epd.md shows the bodies.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from app.dispatch.bodies import encoded, members_of, value_of
from app.errors import BadRequest, EngineBroke

EMBEDS = {
    "image_url": "image_embeds",
    "video_url": "video_embeds",
    "audio_url": "audio_embeds",
    "input_audio": "audio_embeds",
}
"""Kind of a media part -> kind of the part that stands for its embedding."""
AUDIO_KINDS = frozenset(("audio_url", "input_audio"))
COPIED_OPTIONS = ("mm_processor_kwargs", "media_io_kwargs", "priority", "session_id")
"""What changes how an item is encoded, or how urgent it is: the encoder gets it as sent."""
MOST_ITEMS = 1000
"""In one request: they are assigned in one step of Redis, where all others wait meanwhile (5 ms for as many;
100,000, which fit in 7 MB, took 1.8 s). vLLM's own limit is 999 of a kind (`limit_mm_per_prompt`)."""

MOST_NUMBERS = 100_000
"""In the metadata of a report: a grid has 3, a film some for each frame. A million would stop the worker for 0.7 s."""
NO_METADATA = "its metadata must be arrays of numbers"
TOO_MANY_NUMBERS = f"its metadata has more than {MOST_NUMBERS} numbers"


class ReportError(EngineBroke):
    """An encoder answered, but what it reports can't be used: no other encoder would mend that."""


Json = dict[str, Any]
Key = tuple[str, str]
"""Kind and uuid: items that share it are one item."""


@dataclass(frozen=True, slots=True)
class Item:
    """One media part: where it stands, and under which key both sides keep its embedding."""

    index: int
    message: int
    part: int
    kind: str
    content: Json = field(repr=False)
    uuid: str

    @property
    def key(self) -> Key:
        return self.kind, self.uuid


@dataclass(frozen=True, slots=True)
class Group:
    """Items that one encoder gets in one call; `transfer_ids` go with them, one each."""

    url: str
    items: tuple[Item, ...]
    transfer_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What an encoder said of one item: the whole entry, and the hash it stands under."""

    hash: str
    entry: Json = field(repr=False)
    transfer_id: str

    @property
    def metadata(self) -> Json:
        metadata = self.entry.get("metadata")
        return metadata if metadata else {}


class MediaRequest:
    """A chat request taken apart as far as its media need it; the rest stays bytes."""

    def __init__(self, body: bytes) -> None:
        """Raises BadRequest where `messages` is no list, a media part is none, or either can't be read."""
        self._fields = members_of(body)
        self._messages = self._decoded("messages")
        self.items = tuple(find_items(self._messages))
        options = self._decoded("mm_processor_kwargs") if self.items else None
        self.audio_in_video = isinstance(options, dict) and bool(options.get("use_audio_in_video"))

    def __repr__(self) -> str:
        return f"<MediaRequest items={len(self.items)}>"

    def _decoded(self, name: str) -> Any:
        raw = self._fields.get(name)
        return None if raw is None else value_of(raw, name)

    @property
    def distinct_items(self) -> list[Item]:
        """Each item once, where it comes first: what is encoded."""
        first: dict[Key, Item] = {}
        for item in self.items:
            first.setdefault(item.key, item)
        return list(first.values())

    def sub_request(self, group: Group, *, pin_uuids: bool, consumer_zmq: str | None) -> bytes:
        """The body of one call to an encoder; no token limit, since nothing is generated."""
        content = [item.content | {"uuid": item.uuid} if pin_uuids else item.content for item in group.items]
        body: dict[str, Any] = {
            "model": self._fields.get("model"),
            "messages": [{"role": "user", "content": content}],
            "stream": False,
        }
        body |= {name: self._fields[name] for name in COPIED_OPTIONS if name in self._fields}
        if consumer_zmq is not None:
            ids = [{"transfer_id": transfer_id} for transfer_id in group.transfer_ids]
            body["ec_transfer_params"] = {"consumer_zmq": consumer_zmq, "ec_items": ids}
        return encoded(body)

    def with_reports(self, reports: Mapping[Key, Report], *, rewrite: bool, to_consumer: bool) -> bytes:
        """The request for prefill or decode.

        Args:
            reports: by item key; an item without one keeps its media.
            rewrite: replace media by their metadata.
            to_consumer: a Mooncake consumer takes pushed embeddings, so transfer ids go along.
        """
        fields: dict[str, Any] = dict(self._fields)
        if rewrite:
            fields["messages"] = self._rewritten(reports)
        handles: dict[str, Any] = {}
        ids = []
        for item in self.items:
            report = reports.get(item.key)
            if report is not None:
                handles[report.hash] = report.entry
                ids.append({"mm_hash": report.hash, "transfer_id": report.transfer_id})
        if handles:
            with_ids = {"ec_items": ids} if rewrite or to_consumer else {}
            fields["ec_transfer_params"] = handles | with_ids
        return encoded(fields)

    def _rewritten(self, reports: Mapping[Key, Report]) -> Any:
        # vLLM lines audio features up with what is left of them: a mixture of embeddings and raw media
        # in a request with audio would be counted wrongly, so there it is all or nothing.
        bare = any(item.key not in reports or not reports[item.key].metadata for item in self.items)
        keep_all = bare and any(item.kind in AUDIO_KINDS for item in self.items)
        messages = [
            message | {"content": list(message["content"])} if _has_parts(message) else message
            for message in self._messages
        ]
        for item in self.items:
            report = reports.get(item.key)
            if report is None or not report.metadata or keep_all:
                part = item.content | {"uuid": item.uuid}
            else:
                embeds = EMBEDS[item.kind]
                values = {name: _flat(value) for name, value in report.metadata.items()}
                part = {"type": embeds, embeds: values, "uuid": item.uuid}
            messages[item.message]["content"][item.part] = part
        return messages


def may_have_media(body: bytes) -> bool:
    """A cheap look at bytes: whether it is worth taking the request apart. Never wrong when it says no.

    A key or value that is written with escapes could hide a kind, so any backslash-u says yes too.
    """
    return any(kind in body for kind in (b"image_url", b"video_url", b"audio_url", b"input_audio", b"\\u"))


def find_items(messages: Any) -> Iterable[Item]:
    """The media parts of all messages, in reading order.

    Raises:
        BadRequest: naming the part that is wrong.
    """
    if not isinstance(messages, list):
        raise BadRequest("messages must be a list", param="messages")
    index = 0
    for m, message in enumerate(messages):
        if not _has_parts(message):
            continue
        for p, part in enumerate(message["content"]):
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(kind, str) or kind not in EMBEDS:
                continue
            if index == MOST_ITEMS:
                raise BadRequest(f"A request can have at most {MOST_ITEMS} images, videos and audios", param="messages")
            uuid = part.get("uuid")
            yield Item(
                index=index,
                message=m,
                part=p,
                kind=kind,
                content=part,
                uuid=uuid if isinstance(uuid, str) and uuid else derived_uuid(part, f"messages[{m}].content[{p}]"),
            )
            index += 1


def _has_parts(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("content"), list)


def derived_uuid(part: Json, where: str) -> str:
    """SHA-256 of the item's URL, or of its canonical JSON where it has none: by content, never by request.

    Raises:
        BadRequest: a *_url part without a URL.
    """
    kind = part["type"]
    value = part.get(kind)
    url = value.get("url") if isinstance(value, dict) else value
    if kind != "input_audio":
        if not isinstance(url, str) or not url:
            raise BadRequest(f"{where}: {kind}.url must be a non-empty string", param="messages")
        return hashlib.sha256(url.encode(errors="surrogatepass")).hexdigest()
    # Python's default separators and ASCII escapes: engines and other proxies hash the same text.
    try:
        return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()
    except RecursionError as e:
        raise BadRequest(f"{where} is nested too deeply", param="messages") from e


def group_items(items: Sequence[Item], urls: Sequence[str], *, batch_limit: int) -> list[Group]:
    """Calls for items of which `items[i]` goes to `urls[i]`: images on one encoder go together.

    Args:
        batch_limit: images in one call; 0 = no limit. Audio and video always go alone.
    """
    groups: list[tuple[str, list[Item]]] = []
    open_group: dict[str, list[Item]] = {}
    for item, url in zip(items, urls, strict=True):
        together = open_group.get(url) if item.kind == "image_url" else None
        if together is not None and (batch_limit == 0 or len(together) < batch_limit):
            together.append(item)
            continue
        groups.append((url, [item]))
        if item.kind == "image_url":
            open_group[url] = groups[-1][1]
    return [Group(url, tuple(members), tuple(secrets.token_hex(16) for _ in members)) for url, members in groups]


def read_reports(group: Group, answer: bytes, *, audio_in_video: bool, to_consumer: bool) -> dict[Key, Report]:
    """What an encoder's answer says of each item, by item key; nothing where it reports nothing.

    Raises:
        ReportError: it is no JSON object, or what it reports can't be matched with what was sent.
    """
    try:
        entries = _entries(msgspec.json.decode(answer))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ReportError(f"encoder {group.url}: its answer is no JSON") from e
    except ValueError as e:
        raise ReportError(f"encoder {group.url}: {e}") from e
    if not entries:
        return {}
    by_index = _by_index(group, entries) if len(group.items) > 1 else {}
    reports: dict[Key, Report] = {}
    numbers = 0
    for position, item in enumerate(group.items):
        if position in by_index:
            found = by_index[position]
        elif item.uuid in entries:
            found = item.uuid
        elif len(group.items) == 1 and len(entries) == 1:
            found = next(iter(entries))
        elif item.kind == "video_url" and audio_in_video and not to_consumer and _plain_pair(entries):
            continue  # a video and its own sound: two features of one part, which nothing here can tell apart
        else:
            raise ReportError(f"encoder {group.url}: its metadata can't be matched with the items it got")
        reports[item.key] = report = Report(found, entries[found], group.transfer_ids[position])
        numbers += sum(map(_size, report.metadata.values()))  # one entry may stand for many items
        if numbers > MOST_NUMBERS:
            raise ReportError(f"encoder {group.url}: {TOO_MANY_NUMBERS}")
    return reports


def _entries(answer: Any) -> dict[str, Json]:
    """`ec_transfer_params` of an answer, checked. Raises ValueError."""
    if not isinstance(answer, dict):
        raise ValueError("its answer is no JSON object")
    entries = answer.get("ec_transfer_params")
    if entries is None:
        return {}
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ValueError("its ec_transfer_params is no object of objects")
    numbers = 0
    for entry in entries.values():
        metadata = entry.get("metadata")
        if metadata is None:
            continue
        if not isinstance(metadata, dict) or not all(isinstance(values, list) for values in metadata.values()):
            raise ValueError(NO_METADATA)
        numbers += sum(map(_size, metadata.values()))
        if numbers > MOST_NUMBERS:
            raise ValueError(TOO_MANY_NUMBERS)
        if not all(map(_is_numeric, metadata.values())):
            raise ValueError(NO_METADATA)
    return entries


def _by_index(group: Group, entries: Mapping[str, Json]) -> dict[int, str]:
    found: dict[int, str] = {}
    for name, entry in entries.items():
        indices = entry.get("item_indices", [])
        if not isinstance(indices, list):
            raise ReportError(f"encoder {group.url}: item_indices is no list")
        for index in indices:
            if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(group.items):
                raise ReportError(f"encoder {group.url}: an item index is not one of the items it got")
            if index in found:
                raise ReportError(f"encoder {group.url}: an item index is reported twice")
            found[index] = name
    return found


def _plain_pair(entries: Mapping[str, Json]) -> bool:
    return len(entries) == 2 and all(entry.keys() <= {"metadata", "item_indices"} for entry in entries.values())


def _size(values: list[Any]) -> int:
    """How many numbers there may be; a list of too many is not looked into."""
    if len(values) > MOST_NUMBERS:
        return len(values)
    return sum(len(element) if isinstance(element, list) else 1 for element in values)


def _is_numeric(values: list[Any]) -> bool:
    return all(
        isinstance(number, (int, float)) and not isinstance(number, bool)
        for element in values
        for number in (element if isinstance(element, list) else [element])
    )


def _flat(values: list[Any]) -> list[Any]:
    """Lists in the list are spliced in, one level."""
    return [number for value in values for number in (value if isinstance(value, list) else [value])]
