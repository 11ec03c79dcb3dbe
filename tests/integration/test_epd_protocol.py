"""What goes over the wire between encoders and the node that decodes, field by field: E+PD, default settings.

The strict engines (`tests.support.epd`) refuse what is not in the protocol, and every test ends with none of them
having refused anything. Here stands what they can't know: what must be there, and exact bodies.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.collector import TRACEPARENT
from tests.support.epd import EpdEngine
from tests.support.epd_floor import Floor, audio, image, pictures, spoken, text, user, video
from tests.support.epd_rules import CHILD_ID

# Worked out with Python's hashlib and json alone: SHA-256 of the URL; of the sorted part where it has none.
HASH_OF_URL = "9c7c3a2f77b0394facb14718fae03f35b78a4030f335dff1311d06419ef24245"
HASH_OF_DATA_URL = "763b16475bf5f6c9bd2c79335ec790cd368103c61e6f4f21db6d1125d27a57d3"
HASH_OF_SOUND = "2c1a06fba6798ff1747045dfbed9190fff67ed1cfe66496825f87250cf6e47b0"
GRID = {"image_grid_thw": [[1, 44, 80]]}


FLEET = {"workers": 1, "settings": {"probe_interval_s": 1, "lease_s": 2}}


def reporting(**entry: Any) -> Any:
    """A script for an encoder: every item has this entry, under `hash-of-<first letters of its uuid>`."""

    def report(proper: dict[str, Any]) -> dict[str, Any]:
        return {
            f"hash-of-{key.removeprefix('processed-')[:4]}": {"item_indices": old["item_indices"], **entry}
            for key, old in proper.items()
        }

    return report


def content(body: dict[str, Any]) -> list[dict[str, Any]]:
    (message,) = body["messages"]
    found: list[dict[str, Any]] = message["content"]
    return found


# --- to the encoder


def test_encoders_and_the_node_that_answers_carry_the_clients_trace(floor: Floor, both: EpdEngine) -> None:
    (encoder,) = floor.encoders(1)
    answer = floor.chat(user(image("a")), headers={"traceparent": TRACEPARENT, "tracestate": "a=1"})
    assert answer.ok
    for engine in (encoder, both):
        (record,) = engine.requests
        assert (record.header(b"traceparent"), record.header(b"tracestate")) == (TRACEPARENT.encode(), b"a=1")


def test_r75_options_reach_the_encoder_as_sent_and_nothing_else_does(floor: Floor, both: EpdEngine) -> None:
    (encoder,) = floor.encoders(1)
    options = {
        "mm_processor_kwargs": {"max_pixels": 262144, "nested": {"a": [1, 2.5, None]}},
        "media_io_kwargs": {"image": {"image_mode": "RGB"}},
        "priority": -3,
        "session_id": "s1",
    }
    others = {"max_tokens": 5, "temperature": 0.5, "seed": 1, "stop": ["x"], "user": "u", "cache_salt": "c", "n": 1}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [text(), image("a", detail="high"), text("and this")]},
    ]
    assert floor.chat(messages, **options, **others).ok
    (sent,) = encoder.bodies
    (item,) = content(sent)
    assert sent == {
        "model": floor.model,
        "messages": [{"role": "user", "content": [image("a", detail="high", uuid=item["uuid"])]}],
        "stream": False,
        **options,
    }
    (body,) = both.bodies
    assert {key: body[key] for key in options | others} == options | others
    assert set(body) == {"model", "messages", "stream", "ec_transfer_params"} | set(options) | set(others)
    assert body["messages"][0] == messages[0]


def test_r75_the_hash_that_the_encoder_reports_is_the_key_passed_on(floor: Floor, both: EpdEngine) -> None:
    (encoder,) = floor.encoders(1)
    assert floor.chat(user(image("a"), image("b")), mm_processor_kwargs={"max_pixels": 1}).ok
    (sent,) = encoder.bodies
    uuids = [part["uuid"] for part in content(sent)]
    (body,) = both.bodies
    assert set(body["ec_transfer_params"]) == {f"processed-{uuid}" for uuid in uuids} | {"ec_items"}
    assert [part["uuid"] for part in content(body)] == uuids, "the part keeps the uuid that was sent"


UUIDS: list[tuple[dict[str, Any], str]] = [
    ({"type": "image_url", "image_url": {"url": "http://img/0.png"}}, HASH_OF_URL),
    ({"type": "image_url", "image_url": {"url": "http://img/0.png", "detail": "low"}}, HASH_OF_URL),
    ({"type": "image_url", "image_url": "http://img/0.png"}, HASH_OF_URL),  # a short form that vLLM takes
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJj"}}, HASH_OF_DATA_URL),
    ({"input_audio": {"format": "wav", "data": "UklGRg=="}, "type": "input_audio"}, HASH_OF_SOUND),
    ({"type": "video_url", "video_url": {"url": "http://img/0.png"}, "uuid": "own-1"}, "own-1"),
]


def test_uuid_comes_from_the_content_or_the_caller(floor: Floor, both: EpdEngine) -> None:
    (encoder,) = floor.encoders(1)
    for part, uuid in UUIDS:
        assert floor.chat(user(text(), part)).ok, part
        assert content(encoder.bodies[-1]) == [part | {"uuid": uuid}]
        assert content(both.bodies[-1])[1]["uuid"] == uuid


def test_images_of_one_encoder_go_in_one_call_and_sound_and_film_alone(floor: Floor, both: EpdEngine) -> None:
    first, second = floor.encoders(2)
    floor.turn_to(0)
    # To the first: image 0, image 2, film 4, image 6. To the second: sound 1, image 3, image 5, sound 7.
    items = [image(0), audio(1), image(2), image(3), video(4), image(5), image(6), spoken("7777")]
    assert floor.chat(user(*items)).ok

    def calls(encoder: EpdEngine) -> list[list[dict[str, Any]]]:
        bare = [[{k: v for k, v in part.items() if k != "uuid"} for part in content(b)] for b in encoder.bodies]
        return sorted(bare, key=lambda call: -len(call))

    assert calls(first) == [[image(0), image(2), image(6)], [video(4)]]
    assert calls(second)[0] == [image(3), image(5)]
    assert [call for call in calls(second)[1:] if call not in ([audio(1)], [spoken("7777")])] == []
    assert len(calls(second)) == 3


def test_items_of_all_messages_count_in_reading_order(floor: Floor, both: EpdEngine) -> None:
    encoders = floor.encoders(1)
    messages = [
        {"role": "system", "content": [text("look"), image("s")]},
        {"role": "user", "content": "just words"},
        {"role": "assistant", "content": [text("I see")]},
        {"role": "tool", "tool_call_id": "1", "content": [video("t")]},
        {"role": "user", "content": [image("u"), text("well?")]},
    ]
    assert floor.chat(messages).ok
    indices = sorted(encode.index for encode in floor.fabric.encodes)
    assert indices == [0, 1], "both images in one call, the film is item 1"
    assert encoders[0].items == 3
    (body,) = both.bodies
    kinds = [[part["type"] for part in m["content"]] for m in body["messages"] if isinstance(m["content"], list)]
    assert kinds == [["text", "image_embeds"], ["text"], ["video_embeds"], ["image_embeds", "text"]]
    assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "tool", "user"]


def test_the_same_item_twice_is_encoded_once_and_stands_twice(floor: Floor, both: EpdEngine) -> None:
    encoders = floor.encoders(3)
    assert floor.chat(user(image("a"), image("b"), image("a"), text(), image("a"))).ok
    assert sum(encoder.items for encoder in encoders) == 2
    (body,) = both.bodies
    first, second, third, _, last = content(body)
    assert first == third == last != second
    assert len(body["ec_transfer_params"]) == 2 + 1


# --- to the node that decodes


def test_reported_items_become_flat_embeds_of_their_kind(floor: Floor, both: EpdEngine) -> None:
    (encoder,) = floor.encoders(1)
    kinds = {"image_url": "image_embeds", "video_url": "video_embeds"}
    kinds |= {"audio_url": "audio_embeds", "input_audio": "audio_embeds"}
    encoder.script(
        lambda proper: {key: e | {"metadata": {"f": [[1, 2], 3, [4]], "g": [0.5]}} for key, e in proper.items()}
    )
    items = [image("a", detail="low"), video("b"), audio("c"), spoken("dddd")]
    assert floor.chat(user(text(), *items), stream=True, temperature=0.25).ok
    uuids = {part["type"]: part["uuid"] for body in encoder.bodies for part in content(body)}
    (body,) = both.bodies
    assert content(body) == [
        text(),
        *(
            {
                "type": kinds[item["type"]],
                kinds[item["type"]]: {"f": [1, 2, 3, 4], "g": [0.5]},
                "uuid": uuids[item["type"]],
            }
            for item in items
        ),
    ]
    assert (body["stream"], body["temperature"]) == (True, 0.25)


def test_reported_handles_are_passed_on_whole(floor: Floor, both: EpdEngine) -> None:
    (encoder,) = floor.encoders(1)
    handle = {"metadata": GRID, "peer_host": "10.9.8.7", "peer_port": 8610, "size_bytes": 4505600, "new": {"x": [1]}}
    encoder.script(reporting(**handle))
    assert floor.chat(user(image("a"))).ok
    (body,) = both.bodies
    (uuid,) = [part["uuid"] for part in content(body)]
    params = body["ec_transfer_params"]
    assert params == {f"hash-of-{uuid[:4]}": handle | {"item_indices": [0]}, "ec_items": params["ec_items"]}
    assert [item["mm_hash"] for item in params["ec_items"]] == [f"hash-of-{uuid[:4]}"]


def test_an_item_without_metadata_keeps_its_media_with_the_uuid_pinned(floor: Floor, both: EpdEngine) -> None:
    floor.encoders(2)
    assert floor.chat(user(image("a"), image("bare-b", detail="low"), video("bare-c"), image("d"))).ok
    (body,) = both.bodies
    parts = content(body)
    assert [part["type"] for part in parts] == ["image_embeds", "image_url", "video_url", "image_embeds"]
    assert parts[1] == image("bare-b", detail="low", uuid=parts[1]["uuid"])
    assert len(body["ec_transfer_params"]) == 4 + 1, "its handle goes along"


def test_beside_sound_one_item_without_metadata_leaves_all_media_as_they_are(floor: Floor, both: EpdEngine) -> None:
    floor.encoders(2)
    items = [image("a"), audio("b"), video("bare-c")]
    assert floor.chat(user(*items)).ok
    (body,) = both.bodies
    assert [{k: v for k, v in part.items() if k != "uuid"} for part in content(body)] == items
    assert all(len(part["uuid"]) == 64 for part in content(body))


def test_an_encoder_that_reports_nothing_leaves_the_media_and_no_handles(floor: Floor, both: EpdEngine) -> None:
    (encoder,) = floor.encoders(1)
    for reported in (None, {}):
        encoder.script(lambda proper, reported=reported: reported)
        assert floor.chat(user(image("a"), video("b"))).ok
        body = both.bodies[-1]
        assert [part["type"] for part in content(body)] == ["image_url", "video_url"]
        assert all(len(part["uuid"]) == 64 for part in content(body))
        assert "ec_transfer_params" not in body


def test_a_film_whose_sound_is_a_second_feature_stays_raw_without_handles(floor: Floor, both: EpdEngine) -> None:
    """vLLM's exception: with use_audio_in_video one part is two features, which no embeds part can stand for."""
    (encoder,) = floor.encoders(1)
    picture = {"metadata": GRID, "item_indices": [0]}
    sound = {"metadata": {"audio_feature_lengths": [7]}, "item_indices": [1]}
    encoder.script(lambda proper: {next(iter(proper)): picture, "sound": sound})
    assert floor.chat(user(video("a")), mm_processor_kwargs={"use_audio_in_video": True}).ok
    (body,) = both.bodies
    assert [part["type"] for part in content(body)] == ["video_url"]
    assert "ec_transfer_params" not in body
    assert floor.chat(user(video("a"))).status == 502, "without the option it can't be matched"


# --- requests that encoders have no part in


@pytest.mark.parametrize("stream", [False, True])
def test_r77_a_request_without_media_goes_to_the_node_byte_for_byte(
    floor: Floor, both: EpdEngine, stream: bool
) -> None:
    encoders = floor.encoders(2)
    for asked in ("hello", [text(), {"type": "refusal", "refusal": "no"}]):
        body = json.dumps(
            {"model": floor.model, "stream": stream, "messages": [{"role": "user", "content": asked}]}, indent=3
        )
        assert floor.chat([], body=body.encode()).ok
        assert both.requests[-1].body == body.encode()
    assert not any(encoder.requests for encoder in encoders)


def test_embeds_of_the_client_stay_and_only_raw_items_are_encoded(floor: Floor, both: EpdEngine) -> None:
    encoders = floor.encoders(2)
    before = floor.cursor()
    known = [
        {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 2, 3]}, "uuid": "client-1"},
        {"type": "video_embeds", "video_embeds": "QUJD", "uuid": "client-2"},
        {"type": "audio_embeds", "audio_embeds": None, "uuid": "client-3"},
    ]
    assert floor.chat(user(text(), *known)).ok
    assert content(both.bodies[-1]) == [text(), *known]
    assert floor.cursor() == before
    assert not any(encoder.requests for encoder in encoders)

    assert floor.chat(user(known[0], image("a"), known[1])).ok
    first, encoded, last = content(both.bodies[-1])
    assert [first, last] == known[:2]
    assert encoded["type"] == "image_embeds"
    assert sum(encoder.items for encoder in encoders) == 1


# --- what clients may not say


@pytest.mark.parametrize("messages", [user(image("a")), user(text())], ids=["media", "text"])
@pytest.mark.parametrize("field", ["ec_transfer_params", "kv_transfer_params"])
def test_r65_a_clients_own_transfer_params_are_refused(
    floor: Floor, both: EpdEngine, messages: list[dict[str, Any]], field: str
) -> None:
    encoders = floor.encoders(1)
    own = {"hash": {"peer_host": "10.6.6.6"}, "ec_items": [{"mm_hash": "hash", "transfer_id": "0" * 32}]}
    answer = floor.chat(messages, **{field: own})
    assert answer.status == 400
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    assert not any(engine.requests for engine in [both, *encoders])
    assert floor.chat(messages, **{field: None}).ok, "null says nothing: it is taken out"
    assert "10.6.6.6" not in str(both.bodies)


def test_a_key_twice_in_the_request_does_not_smuggle_handles_in(floor: Floor, both: EpdEngine) -> None:
    floor.encoders(1)
    rest = json.dumps({"model": floor.model, "messages": user(image("a"))})[1:]
    for own in ('"ec_transfer_params": null, "ec_transfer_params": {"h": {"peer_host": "10.6.6.6"}}, ',
                '"ec_transfer_params": {"h": {"peer_host": "10.6.6.6"}}, "ec_transfer_params": null, ',
                '"ec_transfer\\u005fparams": {"h": {"peer_host": "10.6.6.6"}}, '):  # fmt: skip
        answer = floor.chat([], body=("{" + own + rest).encode())
        assert answer.status in (200, 400)
        assert "10.6.6.6" not in str(both.bodies)


ODD: list[Any] = [
    "hello", {"role": "user"}, [user(image("a"))], ["hello"], [{"role": "user", "content": [["x"]]}],
    user({"type": "image_url"}), user({"type": "image_url", "image_url": {"url": 7}}),
    user({"type": "image_url", "image_url": [1]}), user(image("a", uuid=7)), user(image("a"), "words"),  # type: ignore[arg-type]
]  # fmt: skip


def test_odd_messages_are_never_a_fault_of_the_distributor(floor: Floor, both: EpdEngine) -> None:
    floor.encoders(1)
    told = [(floor.chat(messages).status, messages) for messages in ODD]
    floor.fabric.violations.clear()  # the engine may well refuse it: that is its part
    assert [pair for pair in told if pair[0] not in (200, 400)] == []


# --- headers


def test_headers_child_ids_and_the_same_request_id_at_the_end(floor: Floor, both: EpdEngine) -> None:
    encoders = floor.encoders(3)
    messages = user(image("a"), video("b"), image("c"), image("d"))
    answer = floor.chat(messages, headers={"x-request-id": "mine-1"}, key="sk-client")
    assert answer.ok
    assert answer.headers["x-request-id"] == "mine-1"
    assert both.requests[0].id == "mine-1"
    children = [record.id for encoder in encoders for record in encoder.requests]
    parsed = [CHILD_ID.fullmatch(child) for child in children]
    assert {match["parent"] for match in parsed if match} == {"mine-1"}
    assert sorted(int(match["index"]) for match in parsed if match) == [0, 1, 2], "of each call's first item"
    assert len(set(children)) == len(children)
    everything = [record for engine in floor.made for record in engine.requests]
    assert not any(b"sk-client" in value for record in everything for _, value in record.headers)
    assert all(record.header(b"authorization") is None for record in everything)


def test_headers_a_clients_data_parallel_rank_is_not_for_encoders(floor: Floor, both: EpdEngine) -> None:
    (encoder,) = floor.encoders(1)
    assert floor.chat(pictures(1), headers={"x-data-parallel-rank": "3"}).ok
    assert encoder.requests[0].header(b"x-data-parallel-rank") is None


def test_headers_a_request_without_an_id_gets_one_for_all_stages(floor: Floor, both: EpdEngine) -> None:
    encoders = floor.encoders(2)
    answers = [floor.chat(pictures(2)) for _ in range(2)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 2
    assert [record.id for record in both.requests] == ids
    assert {record.id.split(":")[0] for encoder in encoders for record in encoder.requests} == set(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_of_the_node_is_passed_on(floor: Floor, both: EpdEngine, stream: bool) -> None:
    floor.encoders(2)
    answer = floor.chat(pictures(3), stream=stream, max_tokens=2)
    assert answer.ok
    assert answer.text == "token0 token1 "
    assert answer.headers["content-type"].startswith("text/event-stream" if stream else "application/json")
    assert answer.done if stream else answer.json()["usage"]["completion_tokens"] == 2
