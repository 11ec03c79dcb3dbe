"""Files of nodes: what they may hold, what is told of those that are wrong, and when one is read."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from app.discovery.listing import Listed, ReadFailed, Reading
from app.discovery.node_file import FileReader, parse_nodes
from app.discovery.sources import FileSource
from app.errors import BadRequest
from app.nodes import Role

A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
WHOLE = b"""\
# the fleet
nodes:
  - url: http://10.0.0.1:8000/
  - url: https://Engine.example/llm
    role: prefill
    models: [a, b]
    speed: 2
    key: sk-1
    host_header: llm.example
    bootstrap_port: 8998
"""


def test_all_fields() -> None:
    assert parse_nodes(WHOLE) == [
        Listed(A),
        Listed(
            "https://engine.example/llm",
            role=Role.Prefill,
            models=("a", "b"),
            speed=2.0,
            key="sk-1",
            host_header="llm.example",
            bootstrap_port=8998,
        ),
    ]


@pytest.mark.parametrize(
    "text",
    [
        b'{"nodes": [{"url": "http://10.0.0.1:8000", "role": 1, "models": null}]}',
        b"nodes: [{url: http://10.0.0.1:8000}]",
    ],
)
def test_json_is_yaml(text: bytes) -> None:
    assert parse_nodes(text) == [Listed(A)]


@pytest.mark.parametrize("text", [b"nodes: []", b'{"nodes": []}', b"---\nnodes: []\n...\n"])
def test_a_list_may_be_empty(text: bytes) -> None:
    assert parse_nodes(text) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "must be a mapping with the field nodes"),
        (b"# nothing\n", "must be a mapping with the field nodes"),
        (b"- a\n", "line 1: must be a mapping with the field nodes"),
        (b"{}\n", "line 1: must have the field nodes"),
        (b"\nnodes:\n", "line 2: nodes must be a list; one without nodes is written []"),
        (b"nodes: {}\n", "line 1: nodes must be a list; one without nodes is written []"),
        (b"nodes: []\nnode: []\n", "line 2: has the unknown field node; did you mean nodes?"),
        (b"nodes: []\nnodes: []\n", "line 2: nodes is there twice"),
        (b"nodes:\n  - http://a\n", "line 2: nodes[0] must be a mapping with the field url"),
        (b"nodes:\n  - role: 1\n", "line 2: nodes[0].url must be a non-empty string such as http://10.0.0.5:23333"),
        (b"nodes:\n  - url: ftp://a\n", "line 2: nodes[0].url must start with http:// or https://"),
        (
            b"nodes:\n  - url: http://a\n  - url: http://b\n    rle: 1\n",
            "line 4: nodes[1] has the unknown field rle; did you mean role?",
        ),
        (
            b"nodes:\n  - url: http://a\n    zone: 1\n",
            "line 3: nodes[0] has the unknown field zone; there are url, role, models, speed, key, host_header, "
            "bootstrap_port",
        ),
        (
            b"nodes:\n  - url: http://a\n    host-header: a\n",
            "line 3: nodes[0] has a field that is not known; did you mean host_header?",
        ),
        (
            b"nodes:\n  - {url: http://a, sk-hush}\n",
            "line 2: nodes[0] has a field that is not known; there are url, role, models, speed, key, host_header, "
            "bootstrap_port",
        ),
        (b"nodes:\n  - url: http://a\n    url: http://b\n", "line 3: nodes[0].url is there twice"),
        (b"nodes:\n  - url: http://a\n  - url: http://A:80/\n", "line 3: nodes[1].url is there already"),
        (
            b"nodes:\n  - url: http://a\n    role: boss\n",
            "line 3: nodes[0].role must be one of 1 Hybrid, 2 Prefill, 3 Decode, 4 Encode",
        ),
        (
            b"nodes:\n  - url: http://a\n    role: Decode\n",
            "line 3: nodes[0].role: no decoders here",
        ),
        (
            b"nodes:\n  - url: http://a\n    speed: fast\n",
            "line 3: nodes[0].speed must be a finite number greater than 0",
        ),
        (
            b"nodes:\n  - url: http://a\n    models: m\n",
            "line 3: nodes[0].models must be a list of non-empty strings",
        ),
        (
            b"nodes:\n  - url: http://a\n    models:\n      - 7\n",
            "line 4: nodes[0].models must be a list of non-empty strings",
        ),
        (
            b"nodes:\n  - url: http://a\n    key: [sk-hush]\n",
            "line 3: nodes[0].key must be a string of 1 to 4096 visible ASCII characters",
        ),
        (
            b"nodes:\n  - url: http://a\n    host_header: a/b\n",
            "line 3: nodes[0].host_header must be HOST",
        ),
        (
            b"nodes:\n  - url: http://a\n    bootstrap_port: 0\n",
            "line 3: nodes[0].bootstrap_port must be a whole",
        ),
        (b"nodes:\n  - url: http://a\n    key: 'sk-hush\n", "line 4: is no YAML: "),
        (b"nodes:\n  - url: http://a\n   key: sk-hush\n", "line 3: is no YAML: "),
        (b"nodes: []\n---\nnodes: []\n", "line 2: is no YAML: "),
        (b"nodes: [&a {url: http://a}, *b]\n", "line 1: is no YAML: found undefined alias"),
        (b"nodes: [{url: !!python/object/apply:os.getcwd []}]\n", "line 1: is no YAML: could not determine"),
        (b"nodes:\n  - url: http://a\n    key: *hush\n", "line 3: is no YAML: found undefined alias"),
        (b"nodes:\n  - url: http://a\n    key: !hush\n", "line 3: is no YAML: could not determine a constructor"),
        (
            b"nodes:\n  - url: http://a\n    key: !!timestamp hush\n",
            "line 3: nodes[0].key is written as what it can't be",
        ),
        (b"nodes:\n  - url: http://a\n    key: !!bool hush\n", "line 3: nodes[0].key is written as what"),
        (b"nodes:\n  - url: http://a\n    speed: !!int ''\n", "line 3: nodes[0].speed is written as what"),
        (b"nodes:\n  - url: http://a\n    speed: 1" + b"0" * 5000, "line 3: nodes[0].speed is written as what"),
        (b"nodes:\n  - url: http://a\n    models: [2001-99-99]\n", "line 3: nodes[0].models is written as what"),
        (b"nodes: [\xff]\n", "is no YAML: it holds bytes that are no text"),
        (b"nodes: " + b"[" * 20_000, "is nested too deeply"),
        (b"nodes: []" + b" " * 2**20, "is longer than 1048576 bytes"),
    ],
)
def test_a_file_that_is_wrong_says_where(text: bytes, said: str) -> None:
    def check(role: Role) -> None:
        if role is Role.Decode:
            raise BadRequest("no decoders here", param="role")

    with pytest.raises(ReadFailed) as caught:
        parse_nodes(text, check)
    assert str(caught.value).startswith(said)
    assert "hush" not in str(caught.value)


# --- when it is read


def nodes_of(*urls: str) -> str:
    return "nodes:" + "".join(f"\n  - url: {url}" for url in urls) if urls else "nodes: []"


def reader_of(path: Path) -> FileReader:
    return FileReader(FileSource(f"file://{path}", str(path)), lambda role: None)


async def listed(reader: FileReader) -> list[str] | None:
    found: Reading | None = await reader.look()
    assert found is None or found.whole
    return None if found is None else list(found.nodes)


async def test_a_file_is_read_at_first_and_after_each_change_once_it_is_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.looked_at.SETTLED_S", 0.0)  # else what is so young is read again
    path = tmp_path / "nodes.yaml"
    path.write_text(nodes_of(A))
    reader = reader_of(path)
    assert await listed(reader) == [A]
    assert await listed(reader) is None
    path.write_text(nodes_of(A, B))
    assert await listed(reader) is None, "it may be written still"
    path.write_text(nodes_of())
    assert await listed(reader) is None
    assert await listed(reader) == []
    assert await listed(reader) is None
    reader.forget()
    assert await listed(reader) == []


async def test_a_file_that_is_replaced_and_a_link_that_is_moved(tmp_path: Path) -> None:
    path, new = tmp_path / "nodes.yaml", tmp_path / "new.yaml"
    path.write_text(nodes_of(A))
    reader = reader_of(path)
    assert await listed(reader) == [A]
    before = os.stat(path)
    new.write_text(nodes_of(B))
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))  # as old and as long as the one before
    os.replace(new, path)
    assert [await listed(reader), await listed(reader)] == [None, [B]]

    # As Kubernetes mounts a ConfigMap: the file is a link into a directory that is a link.
    for name, url in (("1", A), ("2", B)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "nodes.yaml").write_text(nodes_of(url))
    (tmp_path / "..data").symlink_to("1")
    (tmp_path / "map.yaml").symlink_to("..data/nodes.yaml")
    reader = reader_of(tmp_path / "map.yaml")
    assert await listed(reader) == [A]
    (tmp_path / "..tmp").symlink_to("2")
    os.replace(tmp_path / "..tmp", tmp_path / "..data")
    assert [await listed(reader), await listed(reader)] == [None, [B]]


async def test_what_cant_be_read_is_a_failure_until_it_can(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    reader = reader_of(path)
    for _ in range(2):
        with pytest.raises(ReadFailed, match="can't be read: No such file or directory"):
            await reader.look()
    path.mkdir()
    for _ in range(2):
        with pytest.raises(ReadFailed, match="can't be read: Is a directory"):
            await reader.look()
    path.rmdir()
    path.write_text("nodes: 7")
    assert await listed(reader) is None
    for _ in range(3):
        with pytest.raises(ReadFailed, match="line 1: nodes must be a list"):
            await reader.look()
    path.write_text(nodes_of(A))
    assert [await listed(reader), await listed(reader)] == [None, [A]]


@pytest.mark.timeout(5)
async def test_a_pipe_in_its_place_holds_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    os.mkfifo(path)
    with pytest.raises(ReadFailed):
        await reader_of(path).look()


def test_thousands_of_nodes_are_read_in_a_moment() -> None:
    urls = [f"http://10.0.{i // 250}.{i % 250 + 1}:23333" for i in range(9000)]
    text = "nodes:\n" + "".join(f"  - url: {url}\n    models: [m]\n" for url in urls)
    began_s = time.process_time()
    assert [node.url for node in parse_nodes(text.encode())] == urls
    assert time.process_time() - began_s < 2.5
