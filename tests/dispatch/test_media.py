"""Media items of a request: what is found, what an encoder gets, what of its answer is used, and how.

The uuids and the group sizes are the vectors of vLLM's own proxy tests; bodies are compared whole, so that a
field too many fails as one that is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.dispatch.media import (
    Group,
    Item,
    Key,
    MediaRequest,
    Report,
    ReportError,
    derived_uuid,
    find_items,
    group_items,
    may_have_media,
    read_reports,
)
from app.errors import BadRequest

Json = dict[str, Any]

E0, E1 = "http://e0:1", "http://e1:1"
KINDS = ("image_url", "video_url", "audio_url", "input_audio")


def image(n: int, **more: Any) -> Json:
    return {"type": "image_url", "image_url": {"url": f"http://img/{n}.png"}, **more}


def video(n: int, **more: Any) -> Json:
    return {"type": "video_url", "video_url": {"url": f"http://vid/{n}.mp4"}, **more}


def audio(n: int, **more: Any) -> Json:
    return {"type": "audio_url", "audio_url": {"url": f"http://aud/{n}.wav"}, **more}


def sound(data: str = "UklGRg==", **more: Any) -> Json:
    return {"type": "input_audio", "input_audio": {"format": "wav", "data": data}, **more}


def text(words: str = "words") -> Json:
    return {"type": "text", "text": words}


def body_of(*parts: Json, **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": list(parts)}], **more}).encode()


def media_of(*parts: Json, **more: Any) -> MediaRequest:
    return MediaRequest(body_of(*parts, **more))


def sha(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()


def group_of(request: MediaRequest, url: str = E0) -> Group:
    """All items in one group, as the distributor would only make it of images."""
    items = tuple(request.distinct_items)
    return Group(url, items, tuple(f"{n:032x}" for n in range(len(items))))


def read(group: Group, entries: Any, *, audio_in_video: bool = False, to_consumer: bool = False) -> dict[Key, Report]:
    answer = json.dumps({"id": "x", "choices": [], "ec_transfer_params": entries}).encode()
    return read_reports(group, answer, audio_in_video=audio_in_video, to_consumer=to_consumer)


def reports_for(request: MediaRequest, metadata: Json | list[Json]) -> dict[Key, Report]:
    """A report for each distinct item, under another hash than the uuid that was sent."""
    items = request.distinct_items
    each = metadata if isinstance(metadata, list) else [metadata] * len(items)
    return {
        item.key: Report(f"hash-{n}", {"metadata": values, "peer_port": n}, f"{n:032x}")
        for n, (item, values) in enumerate(zip(items, each, strict=True))
    }


def rewritten(request: MediaRequest, reports: dict[Key, Report], *, to_consumer: bool = False) -> Json:
    found: Json = json.loads(request.with_reports(reports, rewrite=True, to_consumer=to_consumer))
    return found


def parts_of(body: Json) -> list[Json]:
    parts: list[Json] = body["messages"][0]["content"]
    return parts


# --- finding items ----------------------------------------------------------------------------------


def test_items_are_found_in_messages_of_any_role_in_reading_order_and_numbered_over_the_request() -> None:
    messages = [
        {"role": "system", "content": "image_url"},
        {"role": "user", "content": [text(), image(0), text(), sound()]},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": [video(0)]},
        {"role": "user", "content": [audio(0), image(1)]},
    ]
    found = [(item.index, item.message, item.part, item.kind) for item in find_items(messages)]
    assert found == [
        (0, 1, 1, "image_url"),
        (1, 1, 3, "input_audio"),
        (2, 3, 0, "video_url"),
        (3, 4, 0, "audio_url"),
        (4, 4, 1, "image_url"),
    ]


@pytest.mark.parametrize(
    "part",
    [
        text(),
        "a bare string",
        None,
        7,
        [],
        {},
        {"type": "refusal", "refusal": "no"},
        {"type": "thinking", "thinking": "hm"},
        {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 2, 3]}, "uuid": "known"},
        {"type": "video_embeds", "video_embeds": None, "uuid": "known"},
        {"type": "audio_embeds", "audio_embeds": "UklGRg=="},
        {"type": "prompt_embeds", "prompt_embeds": "UklGRg=="},
        {"type": ["image_url"], "image_url": {"url": "http://img/0.png"}},
        {"image_url": {"url": "http://img/0.png"}},
    ],
)
def test_what_is_no_item_gets_no_number_and_stays_as_it_is(part: Any) -> None:
    request = media_of(part, image(0))
    assert [(item.index, item.part) for item in request.items] == [(0, 1)]
    body = rewritten(request, reports_for(request, {"image_grid_thw": [1, 2, 2]}))
    assert parts_of(body)[0] == part


@pytest.mark.parametrize(
    "message", [None, 7, "text", [], {}, {"content": None}, {"content": "image_url"}, {"content": {"type": "text"}}]
)
def test_messages_without_a_list_of_parts_hold_no_items_and_stay_as_they_are(message: Any) -> None:
    messages = [message, {"role": "user", "content": [image(0)]}]
    request = MediaRequest(json.dumps({"model": "m", "messages": messages}).encode())
    assert [item.message for item in request.items] == [1]
    assert rewritten(request, {})["messages"][0] == message


@pytest.mark.parametrize("value", [None, "text", 7, True, {"role": "user"}])
def test_messages_that_are_no_list_are_refused(value: Any) -> None:
    with pytest.raises(BadRequest, match="messages must be a list") as caught:
        MediaRequest(json.dumps({"model": "m", "messages": value, "x": "image_url"}).encode())
    assert caught.value.param == "messages"


def test_a_request_without_messages_is_refused() -> None:
    with pytest.raises(BadRequest, match="messages must be a list"):
        MediaRequest(b'{"model":"m"}')


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
@pytest.mark.parametrize("value", [{}, {"url": ""}, {"url": None}, {"url": 7}, {"uri": "http://x"}, "", 7, [], None])
def test_a_url_item_needs_a_url_and_the_refusal_says_which_part(kind: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=rf"messages\[0\].content\[1\]: {kind}.url must be") as caught:
        media_of(text(), {"type": kind, kind: value})
    assert caught.value.param == "messages"
    with pytest.raises(BadRequest, match=f"{kind}.url must be"):
        media_of({"type": kind})


def test_a_request_has_a_bounded_number_of_items() -> None:
    """All of them are assigned in one step of Redis, and all other workers wait for its end."""
    assert len(media_of(*(image(n) for n in range(1000)), text()).items) == 1000
    with pytest.raises(BadRequest, match="at most 1000 images") as caught:
        media_of(*(image(n % 7) for n in range(999)), sound(), video(0))
    assert caught.value.param == "messages"


# --- uuids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "uuid"),
    [
        (
            {"type": "image_url", "image_url": {"url": "http://img/0.png"}},
            "9c7c3a2f77b0394facb14718fae03f35b78a4030f335dff1311d06419ef24245",
        ),
        (
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJj"}},
            "763b16475bf5f6c9bd2c79335ec790cd368103c61e6f4f21db6d1125d27a57d3",
        ),
        (
            {"type": "input_audio", "input_audio": {"format": "wav", "data": "UklGRg=="}},
            "2c1a06fba6798ff1747045dfbed9190fff67ed1cfe66496825f87250cf6e47b0",
        ),
        # What stands beside the URL is no part of it, and nor is the kind or the way the URL is given.
        (
            {"type": "video_url", "video_url": {"url": "http://img/0.png", "detail": "low"}, "x": 1},
            "9c7c3a2f77b0394facb14718fae03f35b78a4030f335dff1311d06419ef24245",
        ),
        (
            {"type": "image_url", "image_url": "http://img/0.png"},
            "9c7c3a2f77b0394facb14718fae03f35b78a4030f335dff1311d06419ef24245",
        ),
    ],
)
def test_derived_uuids_are_those_of_vllms_proxy(part: Json, uuid: str) -> None:
    assert derived_uuid(part, "here") == uuid
    (item,) = media_of(part).items
    assert item.uuid == uuid


def test_input_audio_is_hashed_as_the_whole_part_in_pythons_canonical_json() -> None:
    part = {"type": "input_audio", "z": 0.5, "input_audio": {"format": "wäv", "data": "Uk"}, "a": [True, None]}
    # Sorted keys at every level, separators with spaces, everything beyond ASCII escaped.
    canonical = (
        r'{"a": [true, null], "input_audio": {"data": "Uk", "format": "w\u00e4v"}, "type": "input_audio", "z": 0.5}'
    )
    assert derived_uuid(part, "here") == sha(canonical)


def test_a_url_is_hashed_as_its_utf8_bytes_after_unescaping() -> None:
    raw = rb'{"model":"m","messages":[{"content":[{"type":"image_url","image_url":{"url":"http:\/\/img\/\u00e4"}}]}]}'
    (item,) = MediaRequest(raw).items
    assert item.uuid == sha("http://img/ä")


def test_the_callers_uuid_wins() -> None:
    request = media_of(image(0, uuid="mine"), sound(uuid="too"))
    assert [item.uuid for item in request.items] == ["mine", "too"]


@pytest.mark.parametrize("uuid", ["", None, 7, True, [], {"a": 1}])
def test_a_uuid_that_is_no_name_is_replaced_by_the_derived_one(uuid: Any) -> None:
    request = media_of(image(0, uuid=uuid))
    (item,) = request.items
    assert item.uuid == sha("http://img/0.png")
    sent = json.loads(request.sub_request(group_of(request), pin_uuids=True, consumer_zmq=None))
    assert parts_of(sent)[0]["uuid"] == item.uuid


def test_a_reference_to_a_cached_item_needs_no_url() -> None:
    (item,) = media_of({"type": "image_url", "image_url": None, "uuid": "cached"}).items
    assert item.uuid == "cached"


# --- distinct items ---------------------------------------------------------------------------------


def test_the_same_item_is_taken_once_where_it_comes_first() -> None:
    request = media_of(image(0), image(1), image(0, detail="x"), image(2, uuid="u"), image(3, uuid="u"), image(1))
    assert [item.index for item in request.items] == [0, 1, 2, 3, 4, 5]
    assert [item.index for item in request.distinct_items] == [0, 1, 3]


def test_items_of_another_kind_are_other_items_even_under_the_same_uuid() -> None:
    request = media_of(image(0, uuid="u"), video(0, uuid="u"), sound(uuid="u"), audio(0, uuid="u"))
    assert [item.kind for item in request.distinct_items] == ["image_url", "video_url", "input_audio", "audio_url"]


# --- grouping ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "sizes"), [(0, [3, 3]), (1, [1] * 6), (2, [2, 2, 1, 1]), (3, [3, 3]), (6, [3, 3])])
def test_six_images_on_two_encoders(limit: int, sizes: list[int]) -> None:
    items = media_of(*(image(n) for n in range(6))).distinct_items
    groups = group_items(items, [E0, E1] * 3, batch_limit=limit)
    assert [len(group.items) for group in groups] == sizes
    # In the order of their first items, each item at the encoder that it was given.
    assert [item.index for group in groups for item in group.items if group.url == E0] == [0, 2, 4]
    assert [item.index for group in groups for item in group.items if group.url == E1] == [1, 3, 5]
    firsts = [group.items[0].index for group in groups]
    assert firsts == sorted(firsts)


def test_audio_and_video_always_go_alone_and_do_not_part_the_images() -> None:
    items = media_of(image(0), video(0), audio(0), image(1), sound(), video(1)).distinct_items
    groups = group_items(items, [E0] * 6, batch_limit=0)
    assert [[item.index for item in group.items] for group in groups] == [[0, 3], [1], [2], [4], [5]]
    assert {group.url for group in groups} == {E0}


def test_every_item_has_a_transfer_id_of_its_own_and_each_time_another() -> None:
    items = media_of(*(image(n) for n in range(5))).distinct_items
    ids = [
        transfer_id
        for _ in range(2)
        for group in group_items(items, [E0, E1, E0, E1, E0], batch_limit=2)
        for transfer_id in group.transfer_ids
    ]
    assert len(set(ids)) == 10
    assert all(re.fullmatch("[0-9a-f]{32}", transfer_id) for transfer_id in ids)


def test_as_many_urls_as_items_are_needed() -> None:
    with pytest.raises(ValueError, match="zip"):
        group_items(media_of(image(0), image(1)).distinct_items, [E0], batch_limit=0)


# --- sub-requests -----------------------------------------------------------------------------------

OPTIONS = {
    "mm_processor_kwargs": {"max_pixels": 262144},
    "media_io_kwargs": {"image": {"image_mode": "RGB"}},
    "priority": -3,
    "session_id": "s1",
}
NOT_FOR_ENCODERS = {
    "max_tokens": 7,
    "max_completion_tokens": 7,
    "temperature": 0.5,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function"}],
    "chat_template_kwargs": {"a": 1},
    "cache_salt": "salt",
    "user": "u",
    "n": 2,
}


def test_r75_a_sub_request_has_every_field_of_the_protocol_and_no_other() -> None:
    kept = {"type": "image_url", "image_url": {"url": "http://a/0.png", "detail": "auto"}, "min_pixels": 3}
    request = media_of(text("what is"), kept, text("and"), image(2), **OPTIONS, **NOT_FOR_ENCODERS)
    group = group_of(request)
    assert json.loads(request.sub_request(group, pin_uuids=True, consumer_zmq="tcp://pd0:14579")) == {
        "model": "m",
        "messages": [
            {
                "role": "user",
                "content": [
                    {**kept, "uuid": sha("http://a/0.png")},
                    {**image(2), "uuid": sha("http://img/2.png")},
                ],
            }
        ],
        "stream": False,
        **OPTIONS,
        "ec_transfer_params": {
            "consumer_zmq": "tcp://pd0:14579",
            "ec_items": [{"transfer_id": "0" * 32}, {"transfer_id": "0" * 31 + "1"}],
        },
    }


def test_a_sub_request_without_options_and_consumer_has_three_fields() -> None:
    request = media_of(image(0, uuid="mine"), **NOT_FOR_ENCODERS)
    assert json.loads(request.sub_request(group_of(request), pin_uuids=True, consumer_zmq=None)) == {
        "model": "m",
        "messages": [{"role": "user", "content": [image(0, uuid="mine")]}],
        "stream": False,
    }


def test_options_are_passed_byte_for_byte_and_null_ones_too() -> None:
    written = b'"mm_processor_kwargs": {"max_pixels" : 2.50e3, "a":[ ]},"priority":null'
    request = MediaRequest(b'{"model":"m",' + written + b',"messages":' + json.dumps(content(image(0))).encode() + b"}")
    sent = request.sub_request(group_of(request), pin_uuids=True, consumer_zmq=None)
    assert b'"mm_processor_kwargs":{"max_pixels" : 2.50e3, "a":[ ]},"priority":null' in sent


def content(*parts: Json) -> list[Json]:
    return [{"role": "user", "content": list(parts)}]


def test_without_a_model_the_field_is_null() -> None:
    request = MediaRequest(json.dumps({"messages": content(image(0))}).encode())
    sent = json.loads(request.sub_request(group_of(request), pin_uuids=True, consumer_zmq=None))
    assert sent["model"] is None


def test_without_rewriting_encoders_get_the_parts_as_they_are() -> None:
    request = media_of(image(0), image(1, uuid="mine"))
    sent = json.loads(request.sub_request(group_of(request), pin_uuids=False, consumer_zmq=None))
    assert parts_of(sent) == [image(0), image(1, uuid="mine")]


def test_each_group_holds_its_own_items_only() -> None:
    request = media_of(image(0), image(1), image(2))
    first, second = group_items(request.distinct_items, [E0, E1, E0], batch_limit=0)
    for group, numbers in ((first, [0, 2]), (second, [1])):
        sent = json.loads(request.sub_request(group, pin_uuids=False, consumer_zmq="tcp://c"))
        assert parts_of(sent) == [image(n) for n in numbers]
        assert [ids["transfer_id"] for ids in sent["ec_transfer_params"]["ec_items"]] == list(group.transfer_ids)


# --- matching what an encoder reports ---------------------------------------------------------------

THREE = media_of(image(0, uuid="u0"), image(1, uuid="u1"), image(2, uuid="u2"))
PAIR = media_of(image(0, uuid="u0"), image(1, uuid="u1"))
ONE = media_of(image(0, uuid="u0"))


def hashes(request: MediaRequest, entries: Json) -> list[str | None]:
    """For each item the hash under which it was found."""
    found = read(group_of(request), entries)
    return [found[item.key].hash if item.key in found else None for item in request.distinct_items]


@pytest.mark.parametrize(
    ("request_", "entries", "expected"),
    [
        (THREE, {"A": {"item_indices": [0, 2]}, "B": {"item_indices": [1]}}, ["A", "B", "A"]),
        (THREE, {"A": {"item_indices": [2, 0, 1]}}, ["A", "A", "A"]),
        (THREE, {"u0": {}, "u1": {}, "u2": {}}, ["u0", "u1", "u2"]),
        (THREE, {"A": {"item_indices": [1]}, "u0": {}, "u2": {"item_indices": []}}, ["u0", "A", "u2"]),
        # The position counts before the name.
        (PAIR, {"u1": {"item_indices": [0]}, "u0": {"item_indices": [1]}}, ["u1", "u0"]),
        (PAIR, {"u0": {}, "u1": {}, "more": {}}, ["u0", "u1"]),
        # One item: whatever its indices say.
        (ONE, {"A": {"item_indices": [0]}}, ["A"]),
        (ONE, {"A": {"item_indices": [7, 7, "x"]}}, ["A"]),
        (ONE, {"A": {"item_indices": None}}, ["A"]),
        (ONE, {"A": {}, "u0": {}}, ["u0"]),
        (ONE, {"A": {"item_indices": [0]}, "u0": {"item_indices": [1]}}, ["u0"]),
        # Nothing reported is no fault.
        (THREE, {}, [None, None, None]),
        (THREE, None, [None, None, None]),
        (ONE, {}, [None]),
    ],
)
def test_items_are_matched_by_index_then_by_uuid_then_as_the_only_one(
    request_: MediaRequest, entries: Json, expected: list[str | None]
) -> None:
    assert hashes(request_, entries) == expected


@pytest.mark.parametrize(
    ("request_", "entries", "words"),
    [
        (PAIR, {"A": {"item_indices": [0, 2]}, "B": {"item_indices": [1]}}, "not one of the items"),
        (PAIR, {"A": {"item_indices": [-1]}, "B": {"item_indices": [1]}}, "not one of the items"),
        (PAIR, {"A": {"item_indices": [True]}, "B": {"item_indices": [0]}}, "not one of the items"),
        (PAIR, {"A": {"item_indices": [1.0]}, "B": {"item_indices": [0]}}, "not one of the items"),
        (PAIR, {"A": {"item_indices": ["0"]}, "B": {"item_indices": [1]}}, "not one of the items"),
        (PAIR, {"A": {"item_indices": [None]}, "B": {"item_indices": [1]}}, "not one of the items"),
        (PAIR, {"A": {"item_indices": [[0]]}, "B": {"item_indices": [1]}}, "not one of the items"),
        (PAIR, {"A": {"item_indices": [0, 0]}, "B": {"item_indices": [1]}}, "twice"),
        (PAIR, {"A": {"item_indices": [0]}, "B": {"item_indices": [1, 0]}}, "twice"),
        (PAIR, {"A": {"item_indices": 0}, "B": {"item_indices": [1]}}, "no list"),
        (PAIR, {"A": {"item_indices": {"0": 1}}, "B": {"item_indices": [1]}}, "no list"),
        (PAIR, {"A": {"item_indices": [0]}}, "can't be matched"),
        (PAIR, {"A": {}, "B": {}}, "can't be matched"),
        (PAIR, {"A": {}}, "can't be matched"),
        (PAIR, {"u0": {}, "A": {}}, "can't be matched"),
        (ONE, {"A": {}, "B": {}}, "can't be matched"),
        (ONE, {"A": {}, "B": {}, "C": {}}, "can't be matched"),
    ],
)
def test_indices_and_names_that_fit_nothing_are_a_502(request_: MediaRequest, entries: Json, words: str) -> None:
    with pytest.raises(ReportError, match=words) as caught:
        read(group_of(request_), entries)
    assert (caught.value.status, E0 in caught.value.message) == (502, True)


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [{"mm_hash": "A"}],
        "A",
        7,
        True,
        {"A": None},
        {"A": []},
        {"A": "x"},
        {"ec_items": [{"mm_hash": "A", "image_grid_thw": [1, 2, 2]}]},  # as old branches of the engine said it
        {"A": {"metadata": []}},
        {"A": {"metadata": "x"}},
        {"A": {"metadata": 7}},
        {"A": {"metadata": {"grid": 7}}},
        {"A": {"metadata": {"grid": "x"}}},
        {"A": {"metadata": {"grid": None}}},
        {"A": {"metadata": {"grid": {"0": 1}}}},
        {"A": {"metadata": {"grid": [True]}}},
        {"A": {"metadata": {"grid": [1, "2"]}}},
        {"A": {"metadata": {"grid": [None]}}},
        {"A": {"metadata": {"grid": [[1, [2]]]}}},
        {"A": {"metadata": {"grid": [[False]]}}},
        {"A": {"metadata": {"fine": [1], "grid": [{}]}}},
    ],
)
def test_entries_of_another_shape_are_a_502(entries: Any) -> None:
    with pytest.raises(ReportError) as caught:
        read(group_of(ONE), entries)
    assert (caught.value.status, E0 in caught.value.message) == (502, True)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"7",
        b"<html>",
        b'{"ec_transfer_params":',
        b'{"ec_transfer_params":{"A":{"metadata":{"x":[NaN]}}}}',
        b'{"ec_transfer_params":{"A":{"metadata":{"x":[1e999]}}}}',
        b'{"ec_transfer_params":{"A":{"x":"\\ud800"}}}',
        b'{"ec_transfer_params":{"A":{"x":"\xff"}}}',
        b'{"ec_transfer_params":' + b"[" * 100_000,
        b'{"ec_transfer_params":{"A":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}}",
        b'{"n":' + b"1" * 5_000 + b"}",
    ],
)
def test_an_answer_that_is_no_json_object_is_a_502(answer: bytes) -> None:
    with pytest.raises(ReportError) as caught:
        read_reports(group_of(ONE), answer, audio_in_video=False, to_consumer=False)
    assert (caught.value.status, E0 in caught.value.message) == (502, True)


@pytest.mark.parametrize(
    ("request_", "values", "taken"),
    [
        (ONE, [0] * 100_000, True),
        (ONE, [0] * 100_001, False),
        (ONE, [[0] * 60_000, [0] * 40_001], False),
        (PAIR, [0] * 50_000, True),
        (PAIR, [0] * 50_001, False),  # it stands for both
    ],
)
def test_metadata_that_is_no_description_any_more_is_a_502(request_: MediaRequest, values: Any, taken: bool) -> None:
    group = group_of(request_)
    entries = {"A": {"metadata": {"x": values}, "item_indices": list(range(len(group.items)))}}
    if taken:
        assert len(read(group, entries)) == len(group.items)
    else:
        with pytest.raises(ReportError, match="more than 100000 numbers"):
            read(group, entries)


@pytest.mark.parametrize("answer", [b"{}", b'{"ec_transfer_params":null}', b' {"id":"x","ec_transfer_params": {} } '])
def test_an_answer_that_reports_nothing_is_fine(answer: bytes) -> None:
    assert read_reports(group_of(PAIR), answer, audio_in_video=False, to_consumer=False) == {}


def test_a_report_holds_the_whole_entry_and_the_items_own_transfer_id() -> None:
    entry = {"metadata": {"g": [1]}, "item_indices": [1, 0], "peer_host": "10.0.0.5", "size_bytes": 4505600, "x": None}
    group = group_of(PAIR)
    found = read(group, {"A": entry})
    assert found == {
        ("image_url", "u0"): Report("A", entry, "0" * 32),
        ("image_url", "u1"): Report("A", entry, "0" * 31 + "1"),
    }


@pytest.mark.parametrize(
    ("metadata", "expected"), [(None, {}), ({}, {}), ({"g": []}, {"g": []}), ({"g": [1]}, {"g": [1]})]
)
def test_metadata_may_be_missing(metadata: Any, expected: Json) -> None:
    (report,) = read(group_of(ONE), {"A": {"metadata": metadata}}).values()
    assert report.metadata == expected
    (report,) = read(group_of(ONE), {"A": {"peer_port": 1}}).values()
    assert report.metadata == {}


# --- a video whose own sound is encoded with it -----------------------------------------------------

FILM = media_of(video(0, uuid="v"))
TWO_FEATURES = {
    "A": {"metadata": {"grid": [1]}, "item_indices": [0]},
    "B": {"metadata": {"lengths": [7]}, "item_indices": [1]},
}


def test_a_video_with_its_sound_keeps_its_media_and_leaves_no_handle() -> None:
    assert read(group_of(FILM), TWO_FEATURES, audio_in_video=True) == {}


@pytest.mark.parametrize(
    ("request_", "entries", "audio_in_video", "to_consumer"),
    [
        (FILM, TWO_FEATURES, False, False),
        (FILM, TWO_FEATURES, True, True),
        (FILM, TWO_FEATURES | {"C": {}}, True, False),
        (FILM, TWO_FEATURES | {"B": {"metadata": {}, "transfer_id": "t"}}, True, False),
        (FILM, TWO_FEATURES | {"B": {"metadata": {}, "peer_host": "10.0.0.5"}}, True, False),
        (ONE, TWO_FEATURES, True, False),
        (media_of(sound(uuid="a")), TWO_FEATURES, True, False),
    ],
)
def test_any_other_pair_that_fits_nothing_is_a_502(
    request_: MediaRequest, entries: Json, audio_in_video: bool, to_consumer: bool
) -> None:
    with pytest.raises(ReportError, match="can't be matched"):
        read(group_of(request_), entries, audio_in_video=audio_in_video, to_consumer=to_consumer)


def test_a_video_whose_uuid_is_reported_is_matched_whatever_stands_beside_it() -> None:
    found = read(group_of(FILM), {"v": {"metadata": {"grid": [1]}}, "B": {}}, audio_in_video=True)
    assert found[("video_url", "v")].hash == "v"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"use_audio_in_video": True}, True),
        ({"use_audio_in_video": 1}, True),
        ({"use_audio_in_video": False}, False),
        ({}, False),
        (None, False),
        ([], False),
        ("use_audio_in_video", False),
    ],
)
def test_whether_a_videos_sound_is_wanted(options: Any, expected: bool) -> None:
    assert media_of(video(0), mm_processor_kwargs=options).audio_in_video is expected
    assert media_of(video(0)).audio_in_video is False


def test_a_raw_video_beside_images_leaves_those_rewritten() -> None:
    request = media_of(image(0), video(0), mm_processor_kwargs={"use_audio_in_video": True})
    first, film = request.distinct_items
    reports = {first.key: Report("A", {"metadata": {"grid": [1]}}, "t0")}
    body = rewritten(request, reports)
    assert [part["type"] for part in parts_of(body)] == ["image_embeds", "video_url"]
    assert parts_of(body)[1] == video(0, uuid=film.uuid)
    assert body["ec_transfer_params"]["ec_items"] == [{"mm_hash": "A", "transfer_id": "t0"}]


# --- the request that goes on -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "kind"),
    [(image(0), "image_embeds"), (video(0), "video_embeds"), (audio(0), "audio_embeds"), (sound(), "audio_embeds")],
)
def test_media_become_their_metadata_and_nothing_of_the_old_part_is_left(part: Json, kind: str) -> None:
    request = media_of(text(), {**part, "detail": "high"}, text("after"))
    (item,) = request.items
    entry = {"metadata": {"grid": [1, 44, 80], "seconds": [0.5]}, "item_indices": [0], "peer_host": "10.0.0.5"}
    body = rewritten(request, {item.key: Report("reported", entry, "t0")})
    assert body == {
        "model": "m",
        "messages": content(
            text(),
            {"type": kind, kind: {"grid": [1, 44, 80], "seconds": [0.5]}, "uuid": item.uuid},
            text("after"),
        ),
        "ec_transfer_params": {"reported": entry, "ec_items": [{"mm_hash": "reported", "transfer_id": "t0"}]},
    }


@pytest.mark.parametrize(
    ("values", "flat"),
    [
        ([1, 2, 2], [1, 2, 2]),
        ([[1, 2, 2]], [1, 2, 2]),
        ([[1, 2], [3, 4]], [1, 2, 3, 4]),
        ([1, [2, 3], 4], [1, 2, 3, 4]),
        ([0.5], [0.5]),
        ([[], [7]], [7]),
        ([], []),
        ([1, 2.0, -3], [1, 2.0, -3]),
    ],
)
def test_metadata_is_flattened_by_one_level_and_its_numbers_stay_what_they_are(values: Any, flat: Any) -> None:
    request = media_of(image(0))
    body = rewritten(request, reports_for(request, {"g": values}))
    found = parts_of(body)[0]["image_embeds"]["g"]
    assert found == flat
    assert [type(number) for number in found] == [type(number) for number in flat]
    # What goes on as a handle is the engine's own, unflattened.
    assert body["ec_transfer_params"]["hash-0"]["metadata"]["g"] == values


@pytest.mark.parametrize("metadata", [{}, None])
def test_an_item_without_metadata_keeps_its_media_with_the_uuid_pinned_and_its_handle_goes_on(metadata: Any) -> None:
    request = media_of(image(0, detail="low"), image(1))
    first, second = request.items
    reports = {
        first.key: Report("A", {"metadata": metadata, "item_indices": [0]}, "t0"),
        second.key: Report("B", {"metadata": {"g": [1]}}, "t1"),
    }
    body = rewritten(request, reports)
    assert parts_of(body) == [
        image(0, detail="low", uuid=first.uuid),
        {"type": "image_embeds", "image_embeds": {"g": [1]}, "uuid": second.uuid},
    ]
    assert body["ec_transfer_params"] == {
        "A": {"metadata": metadata, "item_indices": [0]},
        "B": {"metadata": {"g": [1]}},
        "ec_items": [{"mm_hash": "A", "transfer_id": "t0"}, {"mm_hash": "B", "transfer_id": "t1"}],
    }


def test_where_nothing_is_reported_there_are_no_transfer_params_and_uuids_are_pinned() -> None:
    request = media_of(image(0), sound())
    body = rewritten(request, {}, to_consumer=True)
    assert "ec_transfer_params" not in body
    assert parts_of(body) == [image(0, uuid=request.items[0].uuid), sound(uuid=request.items[1].uuid)]


def test_one_item_that_stands_twice_is_replaced_twice_under_one_transfer_id() -> None:
    request = media_of(image(0), image(1), image(0, detail="x"))
    body = rewritten(request, reports_for(request, {"g": [1]}), to_consumer=True)
    assert [part["uuid"] for part in parts_of(body)] == [sha(f"http://img/{n}.png") for n in (0, 1, 0)]
    assert {part["type"] for part in parts_of(body)} == {"image_embeds"}
    assert body["ec_transfer_params"]["ec_items"] == [
        {"mm_hash": "hash-0", "transfer_id": f"{0:032x}"},
        {"mm_hash": "hash-1", "transfer_id": f"{1:032x}"},
        {"mm_hash": "hash-0", "transfer_id": f"{0:032x}"},
    ]


def test_transfer_ids_stand_in_the_order_of_the_content_and_not_of_the_groups() -> None:
    request = media_of(image(0), video(0), image(1), image(2))
    groups = group_items(request.distinct_items, [E0, E1, E1, E0], batch_limit=0)
    assert [[item.index for item in group.items] for group in groups] == [[0, 3], [1], [2]]
    reports: dict[Key, Report] = {}
    for group in reversed(groups):
        entries = {f"h{item.index}": {"item_indices": [n]} for n, item in enumerate(group.items)}
        reports |= read(group, entries)
    sent = {item.index: transfer_id for g in groups for item, transfer_id in zip(g.items, g.transfer_ids, strict=True)}
    assert rewritten(request, reports)["ec_transfer_params"]["ec_items"] == [
        {"mm_hash": f"h{n}", "transfer_id": sent[n]} for n in range(4)
    ]


# --- audio: all or nothing --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "metadata", "kept"),
    [
        ([image(0), sound()], [{"g": [1]}, {}], True),
        ([image(0), sound()], [{}, {"g": [1]}], True),
        ([image(0), audio(0), video(0)], [{"g": [1]}, {"g": [1]}, {}], True),
        ([image(0), sound()], [{"g": [1]}, {"g": [1]}], False),
        ([sound()], [{"g": [1]}], False),
        ([image(0), video(0)], [{"g": [1]}, {}], None),
    ],
)
def test_a_request_with_audio_is_rewritten_wholly_or_not_at_all(
    parts: list[Json], metadata: list[Json], kept: bool | None
) -> None:
    request = media_of(*parts)
    body = rewritten(request, reports_for(request, metadata))
    raw = [{**part, "uuid": item.uuid} for part, item in zip(parts, request.items, strict=True)]
    if kept is None:
        assert [part["type"] for part in parts_of(body)] == ["image_embeds", "video_url"]
    elif kept:
        assert parts_of(body) == raw
    else:
        assert all(part["type"].endswith("_embeds") for part in parts_of(body))
    # What was encoded can be fetched in any case.
    ids = [entry["mm_hash"] for entry in body["ec_transfer_params"]["ec_items"]]
    assert ids == [f"hash-{n}" for n in range(len(parts))]


def test_audio_beside_an_item_that_nobody_reported_keeps_all_media() -> None:
    request = media_of(image(0), sound())
    reports = {request.items[1].key: Report("A", {"metadata": {"g": [1]}}, "t1")}
    body = rewritten(request, reports)
    assert [part["type"] for part in parts_of(body)] == ["image_url", "input_audio"]
    assert body["ec_transfer_params"] == {
        "A": {"metadata": {"g": [1]}},
        "ec_items": [{"mm_hash": "A", "transfer_id": "t1"}],
    }


# --- without rewriting, and what is not touched -----------------------------------------------------

WRITTEN = (
    b'{ "model":"m", "temperature" : 0.70,"tools":[ {"a" : 1e2} ], "messages" :'
    b'[ {"role":"user", "content":[{"type":"image_url","image_url":{"url":"http:\\/\\/img\\/0.png"}} ,'
    b' {"type":"text","text":"\\u00e4"}]} ] ,"seed":12345678901234567890123,"logit_bias":{"1":-1.0}}'
)


@pytest.mark.parametrize(("to_consumer", "ids"), [(False, False), (True, True)])
def test_without_rewriting_the_messages_are_the_clients_bytes_and_handles_are_added(
    to_consumer: bool, ids: bool
) -> None:
    request = MediaRequest(WRITTEN)
    reports = reports_for(request, {"g": [1]})
    out = request.with_reports(reports, rewrite=False, to_consumer=to_consumer)
    fields = msgspec.json.decode(out, type=dict[str, msgspec.Raw])
    before = msgspec.json.decode(WRITTEN, type=dict[str, msgspec.Raw])
    params = json.loads(bytes(fields.pop("ec_transfer_params")))
    assert {name: bytes(raw) for name, raw in fields.items()} == {name: bytes(raw) for name, raw in before.items()}
    assert params.pop("ec_items", None) == ([{"mm_hash": "hash-0", "transfer_id": f"{0:032x}"}] if ids else None)
    assert params == {"hash-0": {"metadata": {"g": [1]}, "peer_port": 0}}


def test_without_rewriting_and_without_reports_every_field_is_the_clients() -> None:
    out = MediaRequest(WRITTEN).with_reports({}, rewrite=False, to_consumer=True)
    before, after = (msgspec.json.decode(b, type=dict[str, msgspec.Raw]) for b in (WRITTEN, out))
    assert {name: bytes(raw) for name, raw in after.items()} == {name: bytes(raw) for name, raw in before.items()}


def test_rewriting_leaves_every_other_field_byte_for_byte() -> None:
    request = MediaRequest(WRITTEN)
    out = request.with_reports(reports_for(request, {"g": [1]}), rewrite=True, to_consumer=False)
    before, after = (msgspec.json.decode(b, type=dict[str, msgspec.Raw]) for b in (WRITTEN, out))
    assert list(after) == [*before, "ec_transfer_params"]
    for name in ("model", "temperature", "tools", "seed", "logit_bias"):
        assert bytes(after[name]) == bytes(before[name])
    assert json.loads(bytes(after["messages"]))[0]["content"][1] == {"type": "text", "text": "ä"}


def test_a_request_can_be_made_up_again_and_again_and_nothing_of_the_last_time_is_left() -> None:
    request = media_of(image(0), image(1))
    plain = request.with_reports({}, rewrite=True, to_consumer=False)
    request.with_reports(reports_for(request, {"g": [1]}), rewrite=True, to_consumer=True)
    request.sub_request(group_of(request), pin_uuids=True, consumer_zmq="tcp://c")
    assert request.with_reports({}, rewrite=True, to_consumer=False) == plain
    assert [item.content for item in request.items] == [image(0), image(1)]


def test_repr_shows_no_media() -> None:
    request = media_of(image(0, secret="secret-word"))
    (item,) = request.items
    report = Report("A", {"metadata": {"secret-word": [1]}}, "t")
    assert "secret-word" not in repr((request, item, group_of(request), report))
    assert repr(request) == "<MediaRequest items=1>"


# --- whether to look at all -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_look_at_the_bytes_sees_every_kind_also_where_it_is_hidden_behind_escapes(kind: str) -> None:
    escaped = kind.replace("_", r"\u005f")
    for name in (kind, escaped):
        for hidden in (name, kind):
            raw = b'{"messages":[{"content":[{"type":"%s","%s":{"url":"u"}}]}]}' % (name.encode(), hidden.encode())
            assert may_have_media(raw)
            assert len(MediaRequest(raw).items) == 1


@pytest.mark.parametrize(
    "body", [body_of(text("no media, only words")), body_of({"type": "image_embeds", "image_embeds": {}}), b"", b"{}"]
)
def test_a_look_at_the_bytes_says_no_for_text_and_for_embeds(body: bytes) -> None:
    assert not may_have_media(body)


# --- malformed input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{",
        b'{"messages":[{"content":[{"type":"image_url","image_url":{"url":"\xff"}}]}]}',
        b'{"messages":[{"content":[{"type":"image_url","image_url":{"url":"u","n":1e999}}]}]}',
        b'{"messages":[{"content":[{"type":"image_url","image_url":{"url":"u","n":%s}}]}]}' % (b"1" * 5000),
        b'{"messages":[{"content":[{"type":"image_url","image_url":{"url":"u"}}]}],"mm_processor_kwargs":{"a":1e999}}',
        b'{"messages":[{"content":[{"type":"image_url","image_url":{"url":"u"}}]}],"mm_processor_kwargs":"\xff"}',
        b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_a_body_that_the_peek_let_pass_but_nobody_can_read_is_a_400(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        MediaRequest(raw)


LONE = "cut \ud83d"  # what JavaScript's slice makes of an emoji; json.dumps writes it as an escape


@pytest.mark.parametrize("where", ["text", "url", "option", "key"])
def test_a_lone_surrogate_goes_on_as_it_came(where: str) -> None:
    """The engines' own parser takes it (json.loads, as FastAPI has it), so what they get must mean the same."""
    url = "http://img/" + (LONE if where == "url" else "0")
    parts = [text(LONE if where == "text" else "hi"), {"type": "image_url", "image_url": {"url": url}}]
    more = {"option": {"user": LONE}, "key": {LONE: 1}}.get(where, {})
    raw = body_of(*parts, **more, seed=7)
    request = MediaRequest(raw)
    (item,) = request.items
    assert item.uuid == hashlib.sha256(url.encode(errors="surrogatepass")).hexdigest()
    sent = json.loads(request.sub_request(group_of(request), pin_uuids=False, consumer_zmq=None))
    assert parts_of(sent) == parts[1:]
    assert json.loads(request.with_reports({}, rewrite=False, to_consumer=False)) == json.loads(raw)
    embeds = {"type": "image_embeds", "image_embeds": {"g": [1, 2]}, "uuid": item.uuid}
    found = rewritten(request, reports_for(request, {"g": [[1, 2]]}))
    assert parts_of(found) == [parts[0], embeds]
    assert {name: found[name] for name in more} == more and found["seed"] == 7


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_beside_a_lone_surrogate_a_number_that_is_none_is_still_refused(number: str) -> None:
    with pytest.raises(BadRequest, match="is not valid JSON"):
        MediaRequest(body_of(text(LONE), image(0)).replace(b'"m"', number.encode()))


def test_nesting_at_any_depth_is_a_400_or_is_served() -> None:
    """The limit is on the whole stack of calls, so what can be read here may be too deep there."""
    refused = 0
    limit = _deepest_readable()
    for depth in range(limit - 298, limit + 2):
        deep = b"[" * depth + b"]" * depth
        for part in (
            b'{"type":"image_url","image_url":{"url":"u"},"x":%s}' % deep,
            b'{"type":"input_audio","input_audio":%s}' % deep,
        ):
            try:
                request = MediaRequest(b'{"messages":[{"content":[%s]}]}' % part)
                _deeper(60, lambda r=request: r.sub_request(group_of(r), pin_uuids=True, consumer_zmq="t"))
                _deeper(60, lambda r=request: r.with_reports({}, rewrite=True, to_consumer=True))
            except BadRequest:
                refused += 1
    assert 0 < refused < 600


def _deepest_readable() -> int:
    """How deep a list can be here: Python 3.11 counts Python's calls and C's together, later ones apart."""
    low, high = 1, 200_000
    while low < high:
        depth = (low + high + 1) // 2
        try:
            MediaRequest(b'{"messages":[{"content":[{"type":"text","x":%s}]}]}' % (b"[" * depth + b"]" * depth))
            low = depth
        except BadRequest:
            high = depth - 1
    return low


def _deeper(frames: int, call: Any) -> None:
    if frames:
        _deeper(frames - 1, call)
    else:
        call()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
KIND = st.sampled_from([*KINDS, "text", "image_embeds"])
URL = st.sampled_from(["http://a", "http://b", "data:x"]) | JSON
PART = JSON | st.fixed_dictionaries(
    {"type": KIND | JSON},
    optional={
        **{kind: URL | st.fixed_dictionaries({}, optional={"url": URL, "detail": JSON}) for kind in KINDS},
        "uuid": st.sampled_from(["u0", "u1", ""]) | JSON,
        "more": JSON,
    },
)
MESSAGE = JSON | st.fixed_dictionaries({"role": JSON}, optional={"content": st.lists(PART, max_size=5) | JSON})
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=4) | JSON},
    optional={"model": JSON, "mm_processor_kwargs": JSON, "priority": JSON, "ec_transfer_params": JSON},
)
QUICK = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(body=BODY, limit=st.integers(0, 3))
@example(body={"messages": content(image(0), image(0), sound(), video(1))}, limit=2)
@example(body={"messages": content(image(0)), "model": float("inf")}, limit=0)
def test_any_messages_are_refused_or_can_be_taken_apart_and_put_together(body: Json, limit: int) -> None:
    raw = json.dumps(body).encode()
    try:
        request = MediaRequest(raw)
    except BadRequest:
        return
    items = request.distinct_items
    assert len({item.key for item in items}) == len(items) <= len(request.items)
    assert may_have_media(raw) or not request.items
    groups = group_items(items, [(E0, E1)[n % 2] for n in range(len(items))], batch_limit=limit)
    sent = [
        part
        for group in groups
        for part in parts_of(json.loads(request.sub_request(group, pin_uuids=False, consumer_zmq=None)))
    ]
    by_index = sorted(item.index for group in groups for item in group.items)
    assert by_index == [item.index for item in items]
    assert len(sent) == len(items)
    # Nothing but the media parts is touched, and those only by the uuid.
    expected = json.loads(raw)
    for item in request.items:
        expected["messages"][item.message]["content"][item.part]["uuid"] = item.uuid
    assert rewritten(request, {}) == expected
    assert json.loads(request.with_reports({}, rewrite=False, to_consumer=True)) == json.loads(raw)


@QUICK
@given(raw=st.binary(max_size=80) | st.builds(lambda b: b'{"messages":[{"content":[' + b, st.binary(max_size=40)))
def test_any_bytes_are_refused_or_taken(raw: bytes) -> None:
    with contextlib.suppress(BadRequest):
        MediaRequest(raw)
    with contextlib.suppress(ReportError):
        read_reports(group_of(PAIR), raw, audio_in_video=True, to_consumer=False)


INDEX = st.integers(-1, 3) | JSON
ENTRY = JSON | st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.dictionaries(
            st.text(max_size=3), st.lists(st.integers() | st.lists(st.integers() | JSON, max_size=3), max_size=3) | JSON
        )
        | JSON,
        "item_indices": st.lists(INDEX, max_size=3) | JSON,
        "peer_host": JSON,
    },
)
ENTRIES = st.dictionaries(st.sampled_from(["u0", "u1", "A", "B"]) | st.text(max_size=3), ENTRY, max_size=4) | JSON
GROUPS = [
    group_of(request)
    for request in (ONE, PAIR, THREE, FILM, media_of(sound(uuid="u0")), media_of(image(0, uuid="u0"), image(1)))
]


@QUICK
@given(group=st.sampled_from(GROUPS), entries=ENTRIES, audio_in_video=st.booleans(), to_consumer=st.booleans())
def test_any_answer_is_refused_or_gives_every_item_an_entry_of_it(
    group: Group, entries: Any, audio_in_video: bool, to_consumer: bool
) -> None:
    try:
        found = read(group, entries, audio_in_video=audio_in_video, to_consumer=to_consumer)
    except ReportError:
        return
    assert not found or set(found) == {item.key for item in group.items}
    if entries and not found:
        assert group.items[0].kind == "video_url" and audio_in_video and not to_consumer
    for item, transfer_id in zip(group.items, group.transfer_ids, strict=True):
        if item.key in found:
            report = found[item.key]
            assert report.entry == entries[report.hash]
            assert report.transfer_id == transfer_id
    # Whatever was let through can be passed on.
    request = media_of(*(replace_uuid(item) for item in group.items))
    out = rewritten(request, found, to_consumer=to_consumer)
    for part in parts_of(out):
        if part["type"].endswith("_embeds"):
            for values in part[part["type"]].values():
                assert all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in values)


def replace_uuid(item: Item) -> Json:
    return replace(item, content=item.content | {"uuid": item.uuid}).content
