"""The scripts against their own headers, their callers, the house rules, and the pages in `lua/README.md`."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import hiredis
import pytest

from app.balancing import DECIDE_BY_LATENCY, ENCODER_POLICIES, POLICIES
from app.nodes import Node, Role
from app.store.fields import node_to_fields
from app.store.keys import Keys
from app.store.scripts import Arity, Code, Prepared, Script, load_scripts, lua_directory, packed
from tests.store.harness import Worker, totals
from tests.support.redis import PrivateRedis, Space
from tests.support.wait import aeventually

ROOT = Path(__file__).parents[2]
LUA = ROOT / "lua"
SCRIPTS = load_scripts()
FILES = {path.stem: path.read_text() for path in LUA.glob("*.lua")}
PART_FILES = {path.stem: path.read_text() for path in (LUA / "parts").glob("*.lua")}
POLICY_FILES = {path.stem: path.read_text() for path in (LUA / "policies").glob("*.lua")}
ENCODER_POLICY_FILES = {path.stem: path.read_text() for path in (LUA / "policies" / "encoders").glob("*.lua")}
README = (LUA / "README.md").read_text()
ALL_FILES = sorted(LUA.rglob("*.lua"))
FRAMES = {"acquire": "acquire_random", "acquire_encoders": "acquire_encoders_round_robin"}
"""Frame -> a script that is made with it."""

each_file = pytest.mark.parametrize("name", sorted(FILES))
each_script = pytest.mark.parametrize("name", sorted(SCRIPTS))


# --- reading Lua ----------------------------------------------------------------------------------


def header(text: str) -> str:
    """The comment that a file begins with."""
    return "".join(itertools.takewhile(lambda line: line.startswith("--"), text.splitlines(keepends=True)))


def key_lines(text: str) -> list[tuple[str, str]]:
    """(key, type) of each KEYS line of a header."""
    return re.findall(r"^-- KEYS\[\d+\+?\]\s+(\S+)\s+([A-Z]+)", text, re.MULTILINE)


def code_of(text: str) -> str:
    """Without comments."""
    return re.sub(r"--[^\n]*", "", text)


def bare(text: str) -> str:
    """Without comments and strings."""
    return re.sub(r"'[^'\n]*'|\"[^\"\n]*\"", "''", code_of(text))


def bindings(text: str) -> dict[str, str]:
    """name -> expression of every `local a, b = x, y` with as many names as expressions."""
    found: dict[str, str] = {}
    for names, values in re.findall(r"\blocal ([\w, ]+?)\s*=\s*([^\n]+)", code_of(text)):
        left, right = [n.strip() for n in names.split(",")], split_arguments(values)
        if len(left) == len(right):
            found.update(zip(left, right, strict=True))
    return found


def split_arguments(text: str) -> list[str]:
    """At the commas that stand in no bracket."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if depth < 0:
            break
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]


def redis_calls(text: str) -> list[list[str]]:
    """The arguments of every redis.call, redis.pcall."""
    return [split_arguments(rest) for rest in re.findall(r"redis\.p?call\(((?:[^\n]|\n(?= ))*)", code_of(text))]


LUA_WORDS = {"and", "break", "do", "else", "elseif", "end", "false", "for", "function", "if", "in", "local", "nil"}
LUA_WORDS |= {"not", "or", "repeat", "return", "then", "true", "until", "while"}
GIVEN = {"redis", "KEYS", "ARGV", "tonumber", "tostring", "math", "string", "table", "unpack", "pairs", "ipairs"}
GIVEN |= {"cjson", "next", "pcall", "type"}


def foreign_names(text: str) -> set[str]:
    """Names that are used but neither local nor given by Lua and Redis: globals, or slips of the pen."""
    code = bare(text)
    local: set[str] = set()
    for names in re.findall(r"\blocal ([A-Za-z_][\w, ]*)", code):
        local.update(re.findall(r"[A-Za-z_]\w*", names))
    for name, parameters in re.findall(r"\bfunction\s*(\w*)\(([^)]*)\)", code):
        local.update({name, *re.findall(r"\w+", parameters)})
    for names in re.findall(r"\bfor ([\w, ]+?)\s*(?:=|\bin\b)", code):
        local.update(re.findall(r"\w+", names))
    used = set()
    for match in re.finditer(r"(?<![\w.:])[A-Za-z_]\w*", code):
        is_field = re.match(r"\s*=[^=]", code[match.end() :]) and re.search(r"[{,]\s*$", code[: match.start()])
        inside_table = code[: match.start()].count("{") > code[: match.start()].count("}")
        if not (is_field and inside_table):
            used.add(match[0])
    return used - local - LUA_WORDS - GIVEN


def test_the_reader_of_lua_sees_what_it_is_there_for() -> None:
    """The checks below are only as good as this."""
    good = "local a, b = KEYS[1], { x = 1, y = { z = 2 } }\nfor i = 1, #b do a = b.x .. 'text' end -- words"
    assert foreign_names(good) == set()
    assert foreign_names(good + "\ncount = 1") == {"count"}
    assert foreign_names("local function f(n) return n + m end") == {"m"}
    assert foreign_names("local t = {}\nt.field = 1\nos.time()") == {"os"}
    assert bindings("local a, b = KEYS[1], f(1, 2)\n") == {"a": "KEYS[1]", "b": "f(1, 2)"}
    assert redis_calls("x = redis.call('HSET', node, 'a',\n    b(1, 2)) y") == [["'HSET'", "node", "'a'", "b(1, 2)"]]
    assert keys_are_passed_on("local function f(key, n) end f(a, 1) f(b, 2)", {"a", "b"})
    assert not keys_are_passed_on("local function f(key, n) end f(a, 1) f(c, 2)", {"a", "b"})
    assert key_lines("-- KEYS[1]  unfinished:<w>   HASH  words\n-- KEYS[2+] node:<url>  HASH x") == [
        ("unfinished:<w>", "HASH"),
        ("node:<url>", "HASH"),
    ]


@functools.cache
def words_in_python() -> dict[str, set[str]]:
    """path -> the texts in it, of all that may call a script."""
    found = {}
    for path in [*(ROOT / "app").rglob("*.py"), *(ROOT / "workers").rglob("*.py")]:
        if path.name != "scripts.py" and path.parent.name != "engine":  # simulated engines have no store
            nodes = ast.walk(ast.parse(path.read_text()))
            constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
            found[str(path.relative_to(ROOT))] = {text for text in constants if isinstance(text, str)}
    return found


# --- headers --------------------------------------------------------------------------------------


@each_file
def test_a_header_says_what_a_caller_needs(name: str) -> None:
    top = header(FILES[name])
    assert FILES[name].startswith(f"-- {name}: ")
    for word in (r"KEYS\[1\+?\] ", r"ARGV\[1\+?\] ", "RETURN ", "COST ", ".*CALLER "):
        assert re.search(rf"^-- {word}", top, re.MULTILINE), f"no line {word}"
    assert re.search(r"COST\s+O\([^)]+\)", top)
    assert len(key_lines(top)) == len(re.findall(r"^-- KEYS\[", top, re.MULTILINE)), "a key without a type"


@each_file
def test_header_and_code_agree_on_keys_and_arguments(name: str) -> None:
    script = SCRIPTS[FRAMES.get(name, name)]
    bound = [value for value in bindings(FILES[name]).values() if re.match(r"(?:tonumber\()?(KEYS|ARGV)\[\d", value)]
    for word, arity in (("KEYS", script.keys), ("ARGV", script.args)):
        used = {int(n) for n in re.findall(rf"{word}\[(\d+)\]", code_of(FILES[name]))}
        assert used == set(range(1, arity.fixed + 1)), f"{word} in the code are not those of the header"
        named = {int(n) for value in bound for n in re.findall(rf"{word}\[(\d+)\]", value)}
        open_from = {1} if (name, word) == ("recount_unfinished", "ARGV") else set()
        assert used - named <= open_from, f"{word} that are not bound to a name"


@each_file
def test_header_and_code_agree_on_the_codes(name: str) -> None:
    top = header(FILES[name])
    said = {int(n) for n in re.findall(r"(?:code:|,|^--\s+)\s*(\d+) [a-z]", top[top.index("RETURN") :], re.MULTILINE)}
    assert said == codes_of(FILES[name])
    assert said <= {code.value for code in Code}


def codes_of(text: str) -> set[int]:
    """What a script's replies begin with."""
    returned = {int(n) for n in re.findall(r"(?:return|local reply =) \{ (\d+)[, ]", code_of(text))}
    return returned | {int(n) for pair in re.findall(r"return \{ known and (\d+) or (\d+),", text) for n in pair}


@each_file
def test_replies_have_a_fixed_length(name: str) -> None:
    code = code_of(FILES[name])
    replies = [split_arguments(rest) for rest in re.findall(r"(?:return|local reply =) \{ (.*)\}", code)]
    top = header(FILES[name])
    said = re.search(r"RETURN\s+\{([^}]*)\}", top)
    assert said is not None
    fields = said[1].split(",")
    if fields[-1].strip() == "...":  # one more for each of something: the reply begins with what comes before
        del fields[-2:]
        assert len(re.findall(r"\breply\[(?:#reply \+ 1|3 \+ \w+)\] =", code)) == 1
        refusals = [reply for reply in replies if reply[0] != "0"]
        assert {len(reply) - reply.count("missed") for reply in refusals} == {2}, "code and version"
        replies = [reply for reply in replies if reply[0] == "0"]
    assert {len(reply) for reply in replies} == {len(fields)}


@each_file
def test_the_callers_named_are_those_that_call(name: str) -> None:
    top = header(FILES[name])
    named = re.findall(r"[\w/]+\.py", top[top.index("CALLER") :])
    literal = f"{name}_" if name in FRAMES else name
    assert set(named) == {path for path, words in words_in_python().items() if literal in words}


@pytest.mark.parametrize("name", sorted(POLICY_FILES))
def test_a_policy_names_its_contract_and_its_twin(name: str) -> None:
    top = header(POLICY_FILES[name])
    assert POLICY_FILES[name].startswith(f"-- Policy {name}: ")
    more = ", learned, skip" if name == "least_expected_delay" else ""
    assert f"choose(size, speeds, before, counts, means, tries, draw, chance{more}) -> index, exploring" in top
    assert re.search(rf"Twin: app/balancing/{name}\.py", top)
    assert (ROOT / "app" / "balancing" / f"{name}.py").is_file()
    assert "redis." not in code_of(POLICY_FILES[name])
    assert "READS_UNFINISHED" in bindings(POLICY_FILES[name])
    reads_latency = {"true": True, "false": False}[bindings(POLICY_FILES[name])["READS_LATENCY"]]
    assert reads_latency == (name in DECIDE_BY_LATENCY), "a latency that is not told at once would come late"


@pytest.mark.parametrize("name", sorted(ENCODER_POLICY_FILES))
def test_an_encoder_policy_names_its_contract_and_its_twin(name: str) -> None:
    text = ENCODER_POLICY_FILES[name]
    assert text.startswith(f"-- Encoder policy {name}: ")
    assert "assign(nodes, start, item) -> index" in header(text)
    assert "Twin: app/balancing/encoders.py" in header(text)
    assert "redis." not in code_of(text)
    assert set(bindings(text)) >= {"MOVES_CURSOR", "KEEPS_CREDIT", "READS_UNFINISHED"}


def test_every_policy_has_its_script_and_its_twin() -> None:
    assert set(POLICY_FILES) == set(POLICIES)
    assert set(ENCODER_POLICY_FILES) == set(ENCODER_POLICIES)
    composed = {f"acquire_{name}" for name in POLICIES} | {f"acquire_encoders_{name}" for name in ENCODER_POLICIES}
    assert set(SCRIPTS) == (set(FILES) - set(FRAMES)) | composed


# --- house rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda path: path.name)
def test_four_spaces_and_short_lines(path: Path) -> None:
    text = path.read_text()
    assert "\t" not in text
    assert text.endswith("\n")
    for line in text.splitlines():
        assert len(line) <= 120
        assert line == line.rstrip()
        if not line.startswith("--"):
            assert (len(line) - len(line.lstrip(" "))) % 4 == 0, line


@each_script
def test_no_global_and_no_unknown_name(name: str) -> None:
    assert foreign_names(SCRIPTS[name].text) == set()


@each_script
def test_no_key_is_built_in_lua(name: str) -> None:
    text = SCRIPTS[name].text
    assert ".." not in bare(text), "strings are joined"
    given = {variable for variable, value in bindings(text).items() if value.startswith("KEYS[")}
    given |= {"key"} if keys_are_passed_on(code_of(text), given) else set()
    for command, *arguments in redis_calls(text):
        command = command.strip("'")
        assert command == command.upper()
        assert command not in ("KEYS", "SCAN", "EVAL", "RANDOMKEY", "FLUSHALL", "FLUSHDB")
        if command != "TIME":
            for key in arguments if command == "DEL" else arguments[:1]:
                assert key in given or key.startswith("KEYS["), f"{command} {key}"


def keys_are_passed_on(code: str, given: set[str]) -> bool:
    """Whether a function has a parameter `key`, and every call gives it one of `given`."""
    passed = []
    for name in re.findall(r"\blocal function (\w+)\(key\b", code):
        passed += re.findall(rf"(?<!function )\b{name}\((\w+)", code)
    return bool(passed) and set(passed) <= given | {"key"}


@each_script
def test_nothing_but_what_the_argument_says_is_random_or_read_from_a_clock(name: str) -> None:
    assert not re.search(r"math\.random|os\.|RANDOMKEY|SRANDMEMBER|HRANDFIELD", SCRIPTS[name].text)


@each_script
def test_who_writes_counts_keeps_them_from_the_append_only_file(name: str) -> None:
    text = SCRIPTS[name].text
    for part in PART_FILES.values():
        text = text.replace(part, "")  # where it is called counts
    text = code_of(text)
    off, on = "redis.set_repl(redis.REPL_REPLICA)", "redis.set_repl(redis.REPL_ALL)"
    writes = list(
        re.finditer(
            r"redis\.call\('(?:HINCRBY|HSET|HDEL)', (?:unfinished|ledger),|give_back\(|"
            r"'(?:ZADD|SET)', (?:load_index|KEYS)",
            text,
        )
    )
    assert (off in text) == bool(writes)
    for write in writes:
        before = text[: write.start()]
        assert before.rfind(off) > before.rfind(on), write[0]


@each_script
def test_the_server_takes_the_script_under_the_sha_that_we_compute(name: str, redis_server: PrivateRedis) -> None:
    redis_server.ensure_running()
    assert redis_server.cli("SCRIPT", "LOAD", SCRIPTS[name].text) == SCRIPTS[name].sha


# --- calls ----------------------------------------------------------------------------------------


@each_script
def test_a_call_with_too_few_or_too_many_is_refused_before_it_is_sent(name: str) -> None:
    script = SCRIPTS[name]
    keys, args = ["k"] * script.keys.fixed, ["a"] * script.args.fixed
    assert script.evalsha(keys, args) == ("EVALSHA", script.sha, len(keys), *keys, *args)
    wrong = [(keys[:-1], args), (keys, args[:-1])] if args else [(keys[:-1], args)]
    if not script.keys.open_ended:
        wrong.append(([*keys, "k"], args))
    if not script.args.open_ended:
        wrong.append((keys, [*args, "a"]))
    for some_keys, some_args in wrong:
        with pytest.raises(ValueError, match=rf"{name}\.lua takes"):
            script.evalsha(some_keys, some_args)
    if script.args.open_ended:
        assert script.evalsha(keys, [*args, "a", "b"])[-2:] == ("a", "b")


@each_script
def test_a_prepared_call_is_the_same_on_the_wire_and_held_to_the_header(name: str) -> None:
    script = SCRIPTS[name]
    keys, args = [f"k\u00e9{n}" for n in range(script.keys.fixed)], [n * 7 for n in range(script.args.fixed)]
    for first in range(len(args) + 1):
        prepared, count, tail = Prepared(script, keys, args[:first]), len(args) - first, packed(*args[first:])
        assert prepared.command(count, tail) == hiredis.pack_command(script.evalsha(keys, args))  # type: ignore[arg-type]
        wrong = [count - 1] if script.args.open_ended else [count - 1, count + 1]
        for some in wrong if args else wrong[1:]:
            with pytest.raises(ValueError, match=rf"{name}\.lua takes"):
                prepared.command(some, tail)
    if script.keys.fixed:
        with pytest.raises(ValueError, match=rf"{name}\.lua takes"):
            Prepared(script, keys[:-1], args)


@pytest.mark.parametrize(
    ("text", "arity"),
    [
        ("-- KEYS[1]  a\n-- KEYS[2]  b\n", Arity(2, False)),
        ("-- KEYS[1]  a\n-- KEYS[2+] b\n", Arity(1, True)),
        ("-- KEYS[1+] a\n", Arity(0, True)),
        ("-- ARGV[1]  a\n", Arity(0, False)),
    ],
)
def test_a_header_gives_the_arity(text: str, arity: Arity) -> None:
    assert Arity.parse(text, "KEYS") == arity


@pytest.mark.parametrize(
    "text",
    [
        "-- KEYS[2]  a\n",
        "-- KEYS[1]  a\n-- KEYS[3]  b\n",
        "-- KEYS[1+] a\n-- KEYS[2]  b\n",
        "-- KEYS[1] a\n-- KEYS[1] b",
    ],
)
def test_a_header_that_does_not_count_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="count from 1"):
        Script("broken", text, header=text)


@pytest.mark.parametrize(
    ("arity", "admitted", "refused"), [(Arity(2, False), [2], [0, 1, 3]), (Arity(2, True), [2, 3, 99], [0, 1])]
)
def test_arity_admits(arity: Arity, admitted: list[int], refused: list[int]) -> None:
    assert all(arity.admits(n) for n in admitted)
    assert not any(arity.admits(n) for n in refused)


def test_the_scripts_of_a_checkout_are_found() -> None:
    assert lua_directory() == LUA


# --- lua/README.md --------------------------------------------------------------------------------


def table(*columns: str) -> list[list[str]]:
    """The rows of the page's table with these columns."""
    head = f"| {' | '.join(columns)} |\n"
    assert README.count(head) == 1, columns
    rows = README.split(head)[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|"))] for row in rows]


def ticked(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


KEY_ROWS = {ticked(row[0])[0]: row[1:] for row in table("key", "type", "meaning", "look at it")}
SAME = {
    "unfinished:<w>": "unfinished:<worker>",
    "handing:<w>": "handing:<worker>",
    "lease": "prober",
    "records": "links",
}
"""Names in headers -> names on the page (`records` are `migrations` too); `any` stands for all of them (their
types: test_healing.py)."""


def test_the_page_has_every_key_of_the_code_and_no_other() -> None:
    keys = Keys("ns")
    names = {value.removeprefix(keys.prefix) for name, value in vars(keys).items() if name != "prefix"}
    of_node = (keys.node("<url>"), keys.latency("<url>"), keys.stages("<url>"), keys.learning("<url>"))
    names |= {name.removeprefix(keys.prefix) for name in (*of_node, keys.ledger("<worker>"), keys.handing("<worker>"))}
    names.add(keys.discovering("<source>").removeprefix(keys.prefix))
    names.add(keys.load(0).removeprefix(keys.prefix).replace("0", "<group>"))
    methods = {name for name, value in vars(Keys).items() if callable(value) and not name.startswith("_")}
    kinds = {"node", "ledger", "latency", "stages", "learning", "handing", "load", "discovering"}
    assert methods == kinds, "a new kind of key"
    assert set(KEY_ROWS) == names


@each_file
def test_page_and_header_agree_on_a_keys_type(name: str) -> None:
    for key, type_ in key_lines(FILES[name]):
        if (key, type_) == ("any", "KEY"):
            continue
        assert KEY_ROWS[SAME.get(key, key)][0] == type_, key


def test_the_page_has_every_field_of_a_node_and_no_other() -> None:
    assert [ticked(row[0])[0] for row in table("field", "holds")] == list(node_to_fields(Node("http://a")))


def test_the_page_has_every_script_with_its_codes_and_callers() -> None:
    rows = {ticked(row[0])[0]: row for row in table("script", "what it decides", "codes", "callers")}
    assert set(rows) == {f"{name}.lua" for name in FILES}
    for name, text in FILES.items():
        top = header(text)
        codes = {int(n) for n in rows[f"{name}.lua"][2].split()}
        assert codes == codes_of(text), name
        assert set(ticked(rows[f"{name}.lua"][3])) == set(re.findall(r"[\w/]+\.py", top[top.index("CALLER") :])), name


def test_the_page_has_every_policy() -> None:
    rows = {ticked(row[0])[0]: ticked(row[2])[0] for row in table("policy", "chooses", "twin")}
    assert rows == {f"policies/{name}.lua": f"app/balancing/{name}.py" for name in POLICIES}
    rows = {ticked(row[0])[0]: ticked(row[2])[0] for row in table("encoder policy", "gives an item to", "twin")}
    assert rows == {f"policies/encoders/{name}.lua": "app/balancing/encoders.py" for name in ENCODER_POLICIES}


def test_the_page_has_every_code() -> None:
    rows = [(int(row[0]), ticked(row[1])[0]) for row in table("code", "name", "means")]
    assert rows == [(code.value, code.name) for code in Code]


async def test_the_pages_commands_work_and_no_key_is_missing_from_it(own_redis: Space) -> None:
    space = Space(own_redis.server, "default")
    url, name = "http://10.0.0.5:23333", "gpu1-4711-0a1b2c3d"
    async with Worker(space.url, "default", name, strategy="min_observed_latency") as worker:
        await worker.add_ready(url, key="k")
        await worker.add_ready("http://10.0.0.6:23333")
        for ticket in await worker.take(2):  # one on each: both are explored
            ticket.release(succeeded=ticket.url == url)
        await worker.leave_traces(url, "http://10.0.0.6:23333")
        await worker.take(1)
        await worker.registry.run("hold_lease", [worker.keys.prober], [name, 60_000])
        await worker.registry.run("hold_lease", [worker.keys.discovering("dns://engine:8000")], [name, 60_000])
        await worker.add_ready("http://10.0.0.7:23333", role=Role.Encode)
        for policy in ("round_robin", "weighted"):
            async with Worker(space.url, "default", policy, encoder_policy=policy) as encoding:
                for ticket in await encoding.ledger.acquire_encoders(
                    lambda snapshot: snapshot.pool("m", Role.Encode), 1
                ):
                    ticket.release(succeeded=False)
        await aeventually(lambda: totals(space) == {url: 1} and space.cli("PUBSUB", "NUMSUB", space.key("events"))[1])
        space.cli("HDEL", space.key("sessions"), name)
        await aeventually(lambda: space.cli("EXISTS", space.key("restating")))  # it finds that Redis had lost it
        keys, version = worker.keys, worker.registry.snapshot.version
        async with Worker(space.url, "default", "learning", strategy="least_expected_delay") as learning:
            ticket = await learning.ledger.acquire(lambda snapshot: snapshot.only(url))
            ticket.release(succeeded=True, work=1.0)
            learning.ledger._speeds.note()  # type: ignore[union-attr]
            (await learning.ledger.acquire(lambda snapshot: snapshot.only(url))).release(succeeded=False)
            space.cli("PERSIST", space.key("learned_since"))
        names = [keys.unfinished, keys.version, keys.load_index, keys.load(0), keys.learned, keys.load_sums]
        ordering = [version, f"{version}:ab12", 60_000, "learned", 1, f"1.0 {url}"]
        await worker.registry.run("index_loads", names, ordering)
        for key, (type_, _, example) in KEY_ROWS.items():
            words = shlex.split(ticked(example)[0])
            assert words[0] == "redis-cli"
            full = space.key(key.replace("<url>", url).replace("<worker>", name).replace("<group>", "0"))
            full = full.replace("<source>", "dns://engine:8000")
            assert full in words, f"the example for {key} shows another key"
            if type_ != "channel":
                assert space.cli("TYPE", full) == type_.lower()
            reply: Any = space.cli(*words[1:])
            assert reply, f"{words} answered {reply!r}"
        patterns = [re.escape(key).replace("<url>", "https?://.+").replace("<worker>", r"[\w.-]+") for key in KEY_ROWS]
        patterns += [r"load:\d+", r"discovering:dns://engine:8000"]
        unknown = [key for key in space.key_names() if not any(re.fullmatch(p, key) for p in patterns)]
        assert unknown == []
