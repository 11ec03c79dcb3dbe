"""The sequence diagrams of the site: what each line of their language becomes."""

from __future__ import annotations

import re

import pytest

from docs.scripts.sequence import UnknownLine, drawn

TEXT = """sequenceDiagram
    autonumber
    participant C as client
    participant W as worker
    participant R as Redis
    C->>W: a < b
    R-->>W: back
"""


def test_a_message_goes_from_its_sender_to_its_receiver() -> None:
    # Columns are 150 apart and begin at 80; the first message is one row of 36 below the heads of 34.
    picture = drawn(TEXT)
    assert '<line x1="80" y1="70" x2="230" y2="70"' in picture
    assert '<line x1="380" y1="106" x2="230" y2="106"' in picture  # and back, dashed
    assert re.findall(r">([^<]+)</text>", picture) == ["client", "worker", "Redis", "1. a &lt; b", "2. back"]


def test_a_frame_holds_what_is_between_its_begin_and_end() -> None:
    picture = drawn(TEXT + "par at once\nC->>W: x\nand\nC->>R: y\nend\n")
    frame = re.search(r'<rect x="8" y="(\d+)" width="444" height="(\d+)"', picture)
    assert frame is not None
    top, bottom = int(frame[1]), int(frame[1]) + int(frame[2])
    rows = [int(y) for y in re.findall(r'x1="80" y1="(\d+)" x2="(?:230|380)"', picture)]
    assert rows[0] < top < rows[1] < rows[2] < bottom


def test_a_line_that_is_not_known_is_an_error() -> None:
    with pytest.raises(UnknownLine, match="alt"):
        drawn(TEXT + "alt something\n")
