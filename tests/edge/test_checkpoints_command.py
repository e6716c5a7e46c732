"""``elastic-launch checkpoints`` on real checkpoints: what it shows, and that it changes nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from elastic_adapter.core.checkpoint.hashing import digest
from elastic_adapter.core.checkpoint.manifest import MANIFEST, FileEntry, Manifest, TensorEntry, folder_name
from elastic_adapter.core.checkpoint.store import Store
from elastic_adapter.core.errors import UserError
from elastic_adapter.launchers import checkpoints

COMMAND = [sys.executable, "-m", "elastic_adapter.launchers.cli", "checkpoints"]
DATA = bytes(range(256)) * 40


def entry(name, data):
    hash = digest("xxh3_128", data)
    return FileEntry(name, len(data), hash, (TensorEntry("w", (len(data),), "uint8", len(data), 0, hash),))


def save(root, step, generation=1, *, framework="plain", created_at=None):
    """A checkpoint of two files."""
    names = ("model.bin", "optimizer.bin")
    draft = Store(root).draft(step, generation, "run1")
    for name in names:
        with draft.file(name) as file:
            file.write(DATA)
    files = tuple(entry(name, DATA) for name in names)
    at = time.time() - 90 if created_at is None else created_at
    return draft.finish(
        Manifest("j", "r1", framework, {"python": "3"}, step, generation, 4, "xxh3_128", files, at, {"epoch": 2})
    )


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def root(tmp_path):
    """One of each state, and what is nobody's business."""
    root = tmp_path / "check points"
    for step in (10, 20, 30, 40):
        save(root, step, step // 10)
    (root / folder_name(20, 2) / "optimizer.bin").unlink()
    Store(root).quarantine(root / folder_name(30, 3))
    with Store(root).draft(50, 4, "run1").file("model.bin") as file:
        file.write(DATA[:100])
    shutil.copytree(root / folder_name(10, 1), root / ".step-000000000005-gen-000001.pruned.elastic-tmp")
    (root / "notes.txt").write_text("mine")
    (root / "step-7").mkdir()
    return root


def everything(root):
    """Names, times and bytes of all that is below a folder."""
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in [root, *root.rglob("*")]}


def told(*argv, environ=None):
    text, code = checkpoints.main([*map(str, argv), "--json"], environ or {})
    return [(each["step"], each["state"], each["why"]) for each in json.loads(text)["checkpoints"]], code


def run(*argv, **options):
    return subprocess.run([*COMMAND, *argv], capture_output=True, text=True, timeout=50, check=False, **options)


def test_list(root):
    """Newest first, each with its state; only what is ours; nothing is changed."""
    before = everything(root)
    assert told("list", root) == (
        [
            (50, "being written", ""),
            (40, "complete", ""),
            (30, "quarantined", ""),
            (20, "broken", "optimizer.bin: No such file or directory"),
            (10, "complete", ""),
            (5, "being deleted", ""),
        ],
        0,
    )
    assert everything(root) == before


def test_the_table(root):
    """As a user sees it, through a pipe: one line each."""
    done = run("list", str(root))
    assert (done.returncode, done.stderr) == (0, "")
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["step", "generation", "world", "framework", "files", "size", "age", "folder", "state"]
    assert len(rows) == 6
    assert rows[1].split() == ["40", "4", "4", "plain", "2", "20.0", "KiB", "1", "min", folder_name(40, 4), "complete"]
    assert rows[0].split()[:7] == ["50", "4", "-", "-", "1", "100", "B"]
    assert rows[0].endswith("being written")
    assert rows[3].endswith("broken: optimizer.bin: No such file or directory")


def test_json(root):
    """One document with all that the manifests say."""
    done = run("list", "--json", str(root))
    assert (done.returncode, done.stderr) == (0, "")
    values = json.loads(done.stdout)
    assert values["folder"] == str(root)
    found = {each["step"]: each for each in values["checkpoints"]}
    hash = digest("xxh3_128", DATA)
    names = ("job", "run", "generation", "world_size", "framework", "versions", "facts", "size")
    assert [found[10][name] for name in names] == ["j", "r1", 1, 4, "plain", {"python": "3"}, {"epoch": 2}, 20480]
    assert found[10]["files"] == [
        {"name": name, "size": len(DATA), "hash": hash, "tensors": 1} for name in ("model.bin", "optimizer.bin")
    ]
    assert 80 < time.time() - found[10]["created_at"] < 600
    assert found[10]["path"] == str(root / folder_name(10, 1))
    assert (found[50]["job"], found[50]["files"]) == (
        None,
        [{"name": "model.bin", "size": 100, "hash": None, "tensors": None}],
    )


def test_an_empty_folder(tmp_path):
    """Has no checkpoints, which is fine for a list and a mistake for verify."""
    done = run("list", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, f"there are no checkpoints in {tmp_path}\n")
    assert told("list", tmp_path) == ([], 0)
    with pytest.raises(UserError, match=r"there is no checkpoint to verify: expected folders .* step-...-gen-...$"):
        told("verify", tmp_path)


def test_verify(root):
    """Every file of every checkpoint is read; the code tells whether one is broken; nothing is changed."""
    shutil.rmtree(root / folder_name(20, 2))
    assert told("verify", root) == ([(40, "verified", ""), (10, "verified", "")], 0)
    flip(root / folder_name(40, 4) / "optimizer.bin", len(DATA) - 1)
    before = everything(root)
    done = run("verify", str(root))
    assert (done.returncode, done.stderr) == (1, "")
    _, broken, whole = done.stdout.splitlines()
    assert "broken: optimizer.bin is damaged: its xxh3_128 is " in broken
    assert whole.endswith("verified")
    assert everything(root) == before
    # A list reads no data.
    assert told("list", root)[0][1] == (40, "complete", "")


@pytest.mark.parametrize("how", ["longer", "no manifest", "manifest", "renamed", "a pipe", "a folder", "no folder"])
def test_what_is_broken(tmp_path, how):
    """Is seen by both; the one before is not touched by it."""
    save(tmp_path, 10)
    place = save(tmp_path, 20)
    match how:
        case "longer":
            (place / "model.bin").write_bytes(DATA + b"x")
            why = "model.bin has 10241 bytes instead of 10240"
        case "no manifest":
            (place / MANIFEST).unlink()
            why = "manifest.json: No such file or directory"
        case "manifest":
            flip(place / MANIFEST, 30)
            why = "the manifest"
        case "renamed":
            place.rename(tmp_path / folder_name(20, 2))
            why = "its manifest is of step 20, generation 1"
        case "a pipe":
            (place / MANIFEST).unlink()
            os.mkfifo(place / MANIFEST)
            why = "manifest.json is no plain file"
        case "a folder":
            (place / "model.bin").unlink()
            (place / "model.bin").mkdir()
            why = "model.bin is no plain file"
        case "no folder":
            shutil.rmtree(place)
            place.write_text("")
            why = "manifest.json: Not a directory"
    for command, fine, code in (("list", "complete", 0), ("verify", "verified", 1)):
        (broken, before), ended = told(command, tmp_path)
        assert broken[:2] == (20, "broken")
        assert broken[2].startswith(why)
        assert before == (10, fine, "")
        assert ended == code


def test_one_of_them(root, tmp_path, monkeypatch):
    """By its path, by a link, or from within; a quarantined one only so."""
    place = root / folder_name(40, 4)
    link = tmp_path / "latest"
    link.symlink_to(place)
    monkeypatch.chdir(place)
    for name in (place, f"{place}/", link, "."):
        assert told("verify", name) == ([(40, "verified", "")], 0)
        assert told("list", name) == ([(40, "complete", "")], 0)
    quarantined = root / f"{folder_name(30, 3)}.broken"
    assert told("verify", quarantined) == ([(30, "verified", "")], 0)
    flip(quarantined / "model.bin", 0)
    ((_, state, why),), code = told("verify", quarantined)
    assert (state, code) == ("broken", 1)
    assert why.startswith("model.bin is damaged")


def test_the_variable(root, monkeypatch):
    """Names the folder, where none is given."""
    monkeypatch.chdir(root)
    environ = {"CHECKPOINT_PATH": str(root)}
    assert told("list", environ=environ) == told("list", root)
    assert told("list", folder_name(10, 1), environ=environ) == ([(10, "complete", "")], 0)
    done = run("list", env={**os.environ, "CHECKPOINT_PATH": "/nowhere/at/all"})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "CHECKPOINT_PATH=/nowhere/at/all: expected a folder" in done.stderr


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "expected list or verify, got nothing"),
        (("show",), "expected list or verify, got 'show'"),
        (("list", "--all"), "unknown option '--all'"),
        (("list",), "which folder? name it, or set CHECKPOINT_PATH"),
        (("list", ""), "'': expected a folder"),
        (("list", "/nowhere/at\nall"), r"/nowhere/at\nall: expected a folder, and there is none: No such file"),
        (("verify", __file__), "expected a folder, and this is none"),
        (("verify", "a", "b"), "expected one folder, got 2"),
    ],
)
def test_mistakes(argv, words):
    """One line and exit code 2."""
    environ = {name: value for name, value in os.environ.items() if name != "CHECKPOINT_PATH"}
    done = run(*argv, env=environ)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr


def test_what_is_no_checkpoint(root, tmp_path):
    """A draft, and only quarantined ones: each is said. A checkpoint under a name of somebody's own is one."""
    with pytest.raises(UserError, match="this is being written: it is no checkpoint"):
        told("verify", Store(root).draft(50, 4, "run1").path)
    mine = tmp_path / "mine"
    shutil.copytree(root / folder_name(40, 4), mine)
    for command, state in (("list", "complete"), ("verify", "verified")):
        assert told(command, mine) == ([(40, state, "")], 0)
    os.truncate(mine / MANIFEST, 10)
    assert told("verify", mine)[1] == 1
    lone = tmp_path / "lone"
    lone.mkdir()
    shutil.copytree(root / folder_name(40, 4), lone / f"{folder_name(40, 4)}.broken")
    with pytest.raises(UserError, match="1 that are quarantined or drafts are left out"):
        told("verify", lone)


@pytest.mark.parametrize("name", ["[bold]x[nothing]", "a\nb\x1b[31m", ":smile: %s {0}", os.fsdecode(b"\xff")])
def test_names_that_mean_something_to_terminals(tmp_path, name):
    """Are shown, not obeyed: of folders, and of frameworks."""
    root = tmp_path / name
    root.mkdir()
    done = run("list", str(root))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert "\x1b" not in done.stdout
    save(root, 10, framework="[red]\x1b[31m")
    (root / folder_name(10, 1) / "model.bin").unlink()
    for command in ("list", "verify"):
        text, _ = checkpoints.main([command, str(root)], {})
        assert text.count("\n") == 2
        assert r"[red]\x1b[31m" in text
    assert json.loads(checkpoints.main(["list", str(root), "--json"], {})[0])["folder"] == str(root)


def test_help():
    """Of the command, and of the launcher, which has not become slow by it."""
    for argv in (("--help",), ("verify", "-h")):
        done = run(*argv)
        assert (done.returncode, done.stderr) == (0, "")
        for words in ("checkpoints list", "checkpoints verify", "--json", "CHECKPOINT_PATH", "exit codes"):
            assert words in done.stdout
    code = "import sys; from elastic_adapter.launchers.cli import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "elastic-launch checkpoints list|verify" in done.stdout
    loaded = done.stdout.splitlines()[-1].split()
    assert not any("checkpoint" in module or module.startswith("rich") for module in loaded)


def test_a_reader_that_has_gone_away(root):
    """Is no reason for a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen([*COMMAND, "list", str(root)], stdout=writer, stderr=subprocess.PIPE, text=True) as shown:
        os.close(writer)
        assert shown.communicate(timeout=50)[1] == ""
        assert shown.returncode == 1


@pytest.fixture
def endless(tmp_path):
    """A folder with a checkpoint that takes hours to read, and no room on the disk."""
    draft = Store(tmp_path).draft(11, 1, "run1")
    with draft.file("model.bin") as file:
        file.truncate(1 << 43)
    file = FileEntry("model.bin", 1 << 43, digest("xxh3_128", DATA))
    draft.finish(Manifest("j", "r", "plain", {}, 11, 1, 1, "xxh3_128", (file,), 1.0))
    return tmp_path


@contextlib.contextmanager
def verifying(endless, **options):
    """The command at its work, which ends with the block at the latest."""
    with subprocess.Popen([*COMMAND, "verify", str(endless)], stdout=subprocess.PIPE, text=True, **options) as shown:
        try:
            yield shown
        finally:
            shown.kill()


def opened(process, name):
    """Wait until a process has a file open."""
    for _ in range(1000):
        links = []
        for fd in os.listdir(f"/proc/{process.pid}/fd"):
            try:
                links.append(os.readlink(f"/proc/{process.pid}/fd/{fd}"))
            except FileNotFoundError:
                continue
        if any(link.endswith(name) for link in links):
            return
        time.sleep(0.02)
    raise AssertionError(f"{name} was not opened")


def test_an_interrupt(endless):
    """Ends it with 130 and without a word, wherever it is; no bar where nobody looks."""
    with verifying(endless, stderr=subprocess.PIPE) as shown:
        opened(shown, "model.bin")
        shown.send_signal(signal.SIGINT)
        assert shown.communicate(timeout=50) == ("", "")
        assert shown.returncode == 130


def test_the_bar(endless):
    """On a terminal, long work has one, and it is gone at the end."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with verifying(endless, stderr=theirs, env=environ) as shown:
        os.close(theirs)
        text = b""
        while b"TiB" not in text:
            text += os.read(ours, 4096)
        shown.send_signal(signal.SIGINT)
        assert shown.communicate(timeout=50)[0] == ""
        assert shown.returncode == 130
    while True:
        try:
            text += os.read(ours, 4096)
        except OSError:
            break
    os.close(ours)
    assert folder_name(11, 1).encode() in text
    assert b"Traceback" not in text
    # The cursor is shown again.
    assert text.rindex(b"\x1b[?25h") > text.rindex(b"\x1b[?25l")


@pytest.mark.parametrize("command", ["list", "verify"])
def test_all_are_replaced_while_they_are_looked_at(tmp_path, monkeypatch, command):
    """Then there are newer ones, and those are shown."""
    save(tmp_path, 1)
    listed = os.listdir
    names = listed(tmp_path)

    def slow(path):
        found = listed(path)
        if found == names:
            save(tmp_path, 2)
            Store(tmp_path).prune(folder_name(2, 1), 1, None)
        return found

    monkeypatch.setattr(os, "listdir", slow)
    found, code = told(command, tmp_path)
    assert (code, [step for step, _, _ in found]) == (0, [2])


def test_all_are_deleted_while_they_are_looked_at(tmp_path, monkeypatch):
    """Then there are none."""
    save(tmp_path, 1)
    listed = os.listdir

    def slow(path):
        found = listed(path)
        shutil.rmtree(tmp_path / folder_name(1, 1), ignore_errors=True)
        return found

    monkeypatch.setattr(os, "listdir", slow)
    assert told("list", tmp_path) == ([], 0)


def test_while_a_job_saves_and_deletes(tmp_path):
    """Nobody is disturbed: what is there is whole, and what goes is not broken."""
    save(tmp_path, 1)
    failures = []

    def train():
        try:
            for step in range(2, 250):
                save(tmp_path, step)
                Store(tmp_path).prune(folder_name(step, 1), 2, None)
        except BaseException as error:
            failures.append(error)
            raise

    trainer = threading.Thread(target=train)
    trainer.start()
    looks = 0
    while trainer.is_alive():
        for command in ("list", "verify"):
            found, code = told(command, tmp_path)
            assert code == 0
            assert found
            assert {state for _, state, _ in found} <= {
                "complete",
                "verified",
                "being written",
                "being deleted",
                "deleted meanwhile",
            }
            looks += 1
    trainer.join()
    assert failures == []
    assert looks > 2
    assert [step for step, _, _ in told("verify", tmp_path)[0]] == [249, 248]


def test_deleted_while_it_is_verified(tmp_path, monkeypatch):
    """Is not broken, and is said."""
    save(tmp_path, 10)
    place = save(tmp_path, 20)
    check = Store.check

    def deleted(store, checkpoint, **options):
        if checkpoint.path == place:
            shutil.rmtree(place)
        check(store, checkpoint, **options)

    monkeypatch.setattr(Store, "check", deleted)
    assert told("verify", tmp_path) == ([(20, "deleted meanwhile", ""), (10, "verified", "")], 0)


def test_a_folder_whose_entries_this_user_may_not_look_at(tmp_path, no_entry):
    """They are there, as far as anybody knows."""
    save(tmp_path, 10)
    no_entry(tmp_path)
    why = f"{MANIFEST}: Permission denied"
    found, _ = told("list", tmp_path)
    assert [(step, state) for step, state, _ in found] == [(10, "unreadable")]
    assert why in found[0][2]
    assert told("verify", tmp_path)[1] == 1


@pytest.mark.parametrize("others", [0, 1])
def test_a_link_to_nothing(tmp_path, others):
    """It is called like a checkpoint, and is none: that is said, and nobody waits for it."""
    if others:
        save(tmp_path, 10)
    (tmp_path / folder_name(20, 1)).symlink_to(tmp_path / "nowhere")
    why = f"{MANIFEST}: No such file or directory"
    assert told("list", tmp_path) == ([(20, "broken", why), (10, "complete", "")][: others + 1], 0)
    assert told("verify", tmp_path) == ([(20, "broken", why), (10, "verified", "")][: others + 1], 1)


@pytest.mark.parametrize("name", [MANIFEST, "model.bin"])
def test_what_can_not_be_read(tmp_path, name):
    """Is not called broken; neither is it verified."""
    path = save(tmp_path, 10) / name
    path.unlink()
    path.symlink_to(path)
    why = f"{name}: Too many levels of symbolic links"
    assert told("list", tmp_path) == ([(10, "unreadable", why)], 0)
    assert told("verify", tmp_path) == ([(10, "unreadable", why)], 1)


def test_a_device_that_fails(tmp_path, monkeypatch):
    """Says nothing of the bytes; the others are read all the same."""
    save(tmp_path, 10)
    place = save(tmp_path, 20)
    read = os.preadv

    def fail(fd, buffers, offset):
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(place)):
            raise OSError(errno.EIO, "Input/output error")
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    found, code = told("verify", tmp_path)
    assert found == [(20, "unreadable", "model.bin: Input/output error"), (10, "verified", "")]
    assert code == 1


def test_a_folder_that_goes_away(tmp_path, monkeypatch):
    """Between two looks at it: one line."""
    root = tmp_path / "run"
    save(root, 10)
    listed = os.listdir

    def gone(path):
        shutil.rmtree(path)
        return listed(path)

    monkeypatch.setattr(os, "listdir", gone)
    with pytest.raises(UserError, match="the folder can't be read: No such file or directory"):
        told("list", Path(root))
