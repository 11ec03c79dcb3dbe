"""The document of a decision: bounded whatever the request was, and nobody else's word for the stream's."""

from __future__ import annotations

import msgspec

from app.journey import Journey, Leg, Try, Weighed
from app.metrics.figures import Served
from app.store.decisions import _read, document


def test_a_request_over_hundreds_of_encoders_stays_small() -> None:
    served = Served("/v1/chat/completions")
    urls = [f"http://encoder-{number:03}.example:8000" for number in range(300)]
    seen = [Weighed(url, None, 3, 1.0, 0.25) for url in urls[:16]]
    tries = [Try(url, 1.0, candidates=list(seen), left_off=284, stage="encode") for url in urls]
    legs = [Leg(url, "encode", 1.0, 0.2, 200) for url in urls]
    found = document(served, Journey(tries=tries, legs=legs, watched=True), "w1")
    assert [len(one["candidates"]) for one in found["tries"]] == [16] * 8 + [0] * 24
    assert [one["left_off"] for one in found["tries"]] == [284] * 8 + [300] * 24
    assert [leg["node"] for leg in found["legs"]] == urls[-32:]
    assert len(msgspec.json.encode(found)) < 40_000


def test_the_stream_says_which_entry_it_is() -> None:
    text = msgspec.json.encode({"id": "x", "time": 1, "model": "m"}).decode()
    assert _read("1700000000123-4", {"decision": text}) == {
        "id": "1700000000123-4",
        "time": 1700000000.123,
        "model": "m",
    }
    assert _read("1-0", {"other": text}) is None and _read("1-0", {"decision": "[1]"}) is None
