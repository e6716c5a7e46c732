"""What is asked of ``elastic-launch checkpoints``, and how checkpoints are shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_adapter.core.checkpoint.manifest import FileEntry, Manifest
from elastic_adapter.core.errors import UserError
from elastic_adapter.launchers.checkpoints import File, Request, Seen, age, as_json, parse, shown, size, table


@pytest.mark.parametrize(
    ("words", "request_"),
    [
        ("list", Request("list")),
        ("list /a", Request("list", folder="/a")),
        ("verify --json /a", Request("verify", True, "/a")),
        ("verify /a --json", Request("verify", True, "/a")),
        ("verify --json -- --json", Request("verify", True, "--json")),
        ("list -- --help", Request("list", folder="--help")),
        ("--help", None),
        ("-h", None),
        ("list /a --help", None),
    ],
)
def test_what_is_asked(words, request_):
    """Options stand anywhere before --."""
    assert parse(words.split()) == request_


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "expected list or verify, got nothing"),
        ("lsit /a", "expected list or verify, got 'lsit'"),
        ("--json list", "expected list or verify, got '--json'"),
        ("list --jsn", "unknown option '--jsn'"),
        ("list -j", "unknown option '-j'"),
        ("verify /a /b", "expected one folder, got 2: '/a', '/b'"),
    ],
)
def test_mistakes(words, expected):
    """What was expected, and what was given."""
    with pytest.raises(UserError) as caught:
        parse(words.split())
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (1 << 20, "1.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 60, "3072.0 PiB"),
    ],
)
def test_sizes(nbytes, text):
    """In the unit in which they are easily read."""
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5.0, "0 s"), (0.4, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min"), (7200, "2 h"), (200_000, "2 d")],
)
def test_ages(seconds, text):
    """Never more than it is; a clock that is ahead makes nothing negative."""
    assert age(seconds) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[red]plain[/red]", "[red]plain[/red]"),
        ("a\nb\x1b[31m", r"a\nb\x1b[31m"),
        ("\udcff", r"\udcff"),
    ],
)
def test_words_from_elsewhere(text, expected):
    """Nothing in a name moves a cursor or ends a line."""
    assert shown(text) == expected


def seen(state="complete", why="", framework="torch"):
    file = FileEntry("model.pt", 2048, "0" * 32)
    manifest = Manifest("j", "r", framework, {framework: "2"}, 40, 3, 8, "xxh3_128", (file,), 1000.0, {"epoch": 1})
    path = Path("/data/step-000000000040-gen-000003")
    return Seen(path, 40, 3, state, (File("model.pt", 2048, "0" * 32, 0),), 1000.0, why, manifest)


def test_the_table():
    """One line each, columns aligned, whatever a manifest says."""
    draft = Seen(Path("/data/.step-000000000050-gen-000003.t.elastic-tmp"), 50, 3, "being written", (), None)
    text = table([draft, seen("broken", "[conv1] is\nbad"), seen(framework="[red]")], 1065.0)
    head, *rows = text.splitlines()
    assert [len(row.split()) for row in rows] == [11, 13, 11]
    assert head.split() == ["step", "generation", "world", "framework", "files", "size", "age", "folder", "state"]
    assert rows[1].split()[:8] == ["40", "3", "8", "torch", "1", "2.0", "KiB", "1"]
    assert rows[1][head.index("state") :] == r"broken: [conv1] is\nbad"
    assert all(row[head.index("folder") :].startswith((".step-", "step-")) for row in rows)
    assert rows[0].split()[2:4] == ["-", "-"]
    assert "[red]" in rows[2]


def test_json():
    """All facts; what is not known is null, not absent."""
    draft = Seen(Path("/data/.step-000000000050-gen-000003.t.elastic-tmp"), 50, 3, "being written", (), None)
    values = json.loads(as_json("/data", [seen("broken", "why"), draft]))
    assert values["folder"] == "/data"
    first, second = values["checkpoints"]
    assert first == {
        "name": "step-000000000040-gen-000003",
        "path": "/data/step-000000000040-gen-000003",
        "state": "broken",
        "why": "why",
        "step": 40,
        "generation": 3,
        "job": "j",
        "run": "r",
        "framework": "torch",
        "versions": {"torch": "2"},
        "world_size": 8,
        "algorithm": "xxh3_128",
        "created_at": 1000.0,
        "facts": {"epoch": 1},
        "size": 2048,
        "files": [{"name": "model.pt", "size": 2048, "hash": "0" * 32, "tensors": 0}],
    }
    assert first.keys() == second.keys()
    assert (second["job"], second["world_size"], second["files"]) == (None, None, [])
