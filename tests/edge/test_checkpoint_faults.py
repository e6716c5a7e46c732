"""What storage does to a checkpoint, bit by bit: whatever it is, it is found, and nothing of it is restored."""

from __future__ import annotations

import contextlib
import json
import os
import pickletools
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from elastic_adapter.core import frames
from elastic_adapter.core.checkpoint import paddlestate, torchstate
from elastic_adapter.core.checkpoint.command import saver_command
from elastic_adapter.core.checkpoint.files import Damaged, Expected, Refused
from elastic_adapter.core.checkpoint.link import NotRestored
from elastic_adapter.core.checkpoint.manifest import MANIFEST, _sealed, folder_name, temporary_name
from elastic_adapter.core.checkpoint.order import FileOrder, Order, Stretch, order_to_bytes
from elastic_adapter.core.checkpoint.restoring import Restoring
from elastic_adapter.core.checkpoint.saving import prepare, write_part
from elastic_adapter.core.checkpoint.staging import StagingBuffer
from elastic_adapter.core.checkpoint.store import Broken, Checkpoint, Store
from elastic_adapter.core.errors import ElasticError
from helpers import killed
from helpers.frameworks import imported
from helpers.kills import CHECKPOINTERS, Tiny
from helpers.links import PlayedLink

FAULTS = int(os.environ.get("FAULTS", "100"))
FILES = {"torch": ("model.pt", "optimizer.pt"), "paddle": ("model.pdparams", "optimizer.pdopt")}


@pytest.fixture(scope="module", params=["torch", "paddle"])
def framework(request):
    return imported(request.param)


def model_state(framework, seed):
    """Tensors of several types, and what is no tensor."""
    if framework.__name__ == "torch":
        framework.manual_seed(seed)
        layers = framework.nn.Linear(6, 5), framework.nn.BatchNorm1d(5)
    else:
        framework.seed(seed)
        layers = framework.nn.Linear(6, 5), framework.nn.BatchNorm1D(5)
    values = framework.rand([40]) * 100
    dtypes = ("float64", "float16", "bfloat16", "int64", "int16", "int8", "uint8", "bool")
    typed = {each: values.to(getattr(framework, each)) for each in dtypes}
    return {**framework.nn.Sequential(*layers).state_dict(), **typed, "epoch": 7, "name": "net", "rate": 0.125}


def optimizer_state(framework):
    weights = framework.nn.Linear(4, 3)
    if framework.__name__ == "torch":
        optimizer = framework.optim.AdamW(weights.parameters(), lr=0.1)
    else:
        optimizer = framework.optimizer.AdamW(0.1, parameters=weights.parameters())
    weights(framework.rand([2, 4])).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def as_bytes(framework, piece):
    if framework.__name__ == "torch":
        return piece.numpy().tobytes()
    return piece.tobytes() if hasattr(piece, "tobytes") else piece.numpy().tobytes()


def ordered(framework, root, step):
    """What a worker asks for: a checkpoint of two files, and the bytes of it."""
    kind = framework.__name__
    state = torchstate if kind == "torch" else paddlestate
    data, files = b"", []
    for name, values in zip(FILES[kind], (model_state(framework, step), optimizer_state(framework)), strict=True):
        skeleton, pieces = state.skeleton(framework, values)
        places = []
        for blob in (skeleton.pack(), *(as_bytes(framework, piece) for piece in pieces)):
            places.append(Stretch(len(data), len(blob)))
            data += blob
        files.append(FileOrder(name, kind, places[0], tuple(places[1:])))
    order = Order(str(root), "run1", step, 1, 0, 1, kind, {kind: "1"}, tuple(files), 1.5, "j", "r", {"epoch": 7})
    return order, data


def save(framework, root, step):
    order, data = ordered(framework, root, step)
    draft = write_part(order, memoryview(data))
    prepare(draft, 1, verify="full")
    draft.publish()


@pytest.fixture(scope="module")
def made(framework, tmp_path_factory):
    """Two checkpoints; the tests work on copies."""
    root = tmp_path_factory.mktemp(framework.__name__)
    for step in (10, 20):
        save(framework, root, step)
    return root


@pytest.fixture
def root(made, tmp_path):
    shutil.copytree(made, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


@pytest.fixture
def place(root):
    """The newest one."""
    return root / folder_name(20, 1)


def why_not(root):
    """What is wrong with the newest; empty: nothing."""
    newest = next(Store(root).newest_first())
    return newest.why if isinstance(newest, Broken) else Store(root).trouble(newest)


class Flipped:
    """A file with one bit changed, for the length of a block."""

    def __init__(self, path: Path, at: int) -> None:
        self._fd = os.open(path, os.O_RDWR)
        self._at = at
        self._was = os.pread(self._fd, 1, at)

    def __enter__(self):
        # All bits of a byte have their turn.
        os.pwrite(self._fd, bytes([self._was[0] ^ 1 << self._at % 8]), self._at)

    def __exit__(self, *_):
        os.pwrite(self._fd, self._was, self._at)
        os.close(self._fd)


def borders(path: Path, entries=()) -> list[int]:
    """Where something begins or ends in a file: records, tensors, words of a pickle, values of JSON."""
    data = path.read_bytes()
    found = {0, len(data)}
    for each in entries:
        found |= {each.offset, each.offset + each.nbytes}
    if path.name == MANIFEST:
        found |= {at for match in re.finditer(rb'"\w+":', data) for at in match.span()}
    elif data.startswith(b"PK"):
        found |= {
            match.start() for match in re.finditer(rb"PK(\x01\x02|\x03\x04|\x05\x06|\x06[\x06\x07]|\x07\x08)", data)
        }
        with zipfile.ZipFile(BytesIO(data)) as archive:
            found.add(archive.start_dir)
            for record in archive.infolist():
                name, extra = (int.from_bytes(data[record.header_offset + at :][:2], "little") for at in (26, 28))
                begin = record.header_offset + 30 + name
                found |= {record.header_offset, begin, begin + extra, begin + extra + record.file_size}
            pickled = archive.getinfo("archive/data.pkl")
            inside = data.index(archive.read(pickled))
            found |= {inside + at for _, _, at in pickletools.genops(archive.read(pickled))}
    else:
        found |= {at for _, _, at in pickletools.genops(data)}
    return sorted(found)


def entries_of(place):
    """The files of a checkpoint with what is in them, and its manifest."""
    found = Store(place.parent).look(place.name)
    return [*((place / file.name, file.tensors) for file in found.manifest.files), (place / MANIFEST, ())]


def test_it_is_whole(framework, root, place):
    """Or nothing below means anything: the checkpoint verifies, and has what the framework gave it."""
    assert why_not(root) == ""
    paths = entries_of(place)
    assert [path.name for path, _ in paths] == [*FILES[framework.__name__], MANIFEST]
    model, optimizer, _ = ({each.name for each in tensors} for _, tensors in paths)
    assert {"0.weight", "bfloat16", "bool"} <= model
    assert len(optimizer) >= 4
    assert all(len(borders(path, tensors)) > 20 for path, tensors in paths)


@pytest.mark.timeout(300)
def test_every_byte_is_watched(root, place):
    """One bit of each byte of each file is flipped in turn; each time the checkpoint is called broken, in one line."""
    for path, _ in entries_of(place):
        for at in range(path.stat().st_size):
            with Flipped(path, at):
                why = why_not(root)
            assert why, (path.name, at)
            assert "\n" not in why
        assert why_not(root) == "", path.name


@pytest.mark.timeout(300)
def test_nothing_is_loaded_from_a_file_with_a_flipped_bit(framework, place):
    """The reader that checks on the way finds it too, in whatever part it is; and crashes of nothing."""
    found = Store(place.parent).look(place.name)
    load = torchstate.load_torch if framework.__name__ == "torch" else paddlestate.load_paddle
    for file in found.manifest.files:
        path, expected = place / file.name, Expected(file.size, file.hash)
        load(framework, str(path), expected=expected)
        for at in sorted({*range(0, file.size, 13), *borders(path, file.tensors)} - {file.size}):
            with Flipped(path, at), pytest.raises((Damaged, Refused)):
                load(framework, str(path), expected=expected)


def test_a_file_that_is_cut_short(root, place):
    """At every border, and one byte before it."""
    for path, tensors in entries_of(place):
        data = path.read_bytes()
        for end in reversed(borders(path, tensors)[:-1]):
            for cut in {max(end - 1, 0), end}:
                os.truncate(path, cut)
                assert why_not(root), (path.name, cut)
                # What file systems do after a power loss: the length is right, the end is not.
                os.truncate(path, len(data))
                assert why_not(root) or not any(data[cut:]), (path.name, cut)
        path.write_bytes(data)
    assert why_not(root) == ""


def test_a_file_that_is_longer(root, place):
    """By a single byte, whatever it is."""
    for path, _ in entries_of(place):
        data = path.read_bytes()
        for more in (b"\0", b"\n", b"}", data):
            path.write_bytes(data + more)
            assert why_not(root), path.name
        path.write_bytes(data)
    assert why_not(root) == ""


def test_a_file_that_is_missing(root, place):
    """Each of them; and one that is there twice, in the place of the other."""
    paths = [path for path, _ in entries_of(place)]
    for path, other in zip(paths, paths[1:] + paths[:1], strict=True):
        data = path.read_bytes()
        path.unlink()
        assert why_not(root), path.name
        shutil.copy(other, path)
        assert why_not(root), path.name
        path.write_bytes(data)
    assert why_not(root) == ""


def test_a_file_of_another_checkpoint(root, place):
    """Is not this one's, whole as it may be."""
    for path, _ in entries_of(place):
        data = path.read_bytes()
        shutil.copy(root / folder_name(10, 1) / path.name, path)
        assert why_not(root), path.name
        path.write_bytes(data)
    assert why_not(root) == ""


def test_a_file_that_nobody_knows(root, place):
    """Is no damage: people keep notes, and file systems keep hidden files."""
    (place / ".nfs000001").write_text("")
    (place / "notes.txt").write_text("good one")
    assert why_not(root) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "format 2 is not known here: 1 is"),
        ({"format": 0}, "format 0 is not known"),
        ({"format": "1"}, "no format number"),
        ({"algorithm": "crc32"}, "'crc32' are not known"),
        ({"step": 21}, "its manifest is of step 21"),
        ({"step": 10**30}, "its manifest is of step 1000"),
        ({"generation": 2}, "generation 2"),
        ({"world_size": 0}, "world_size"),
        ({"files": []}, "names no file"),
        ({"later": 1}, "unknown keys: 'later'"),
    ],
)
def test_a_manifest_that_was_sealed_by_others(root, place, change, words):
    """Of another version, or of a mistaken mind: its checksum is right, and still it is not taken."""
    values = json.loads((place / MANIFEST).read_bytes())
    del values["checksum"]
    (place / MANIFEST).write_bytes(_sealed({**values, **change}))
    assert words in why_not(root)


@pytest.fixture(scope="module")
def trained(framework, tmp_path_factory):
    """A training of which two steps are saved, by all that takes part in that."""
    root, tiny = tmp_path_factory.mktemp(f"trained-{framework.__name__}"), Tiny(framework, 3)
    checkpointer = import_module(CHECKPOINTERS[framework.__name__]).Checkpointer
    with checkpointer(root, model=tiny.model, optimizer=tiny.optimizer, extra={"note": "7"}, every_steps=1) as ckpt:
        for step in (0, 1):
            tiny.set(step + 1)
            ckpt.step(step)
    assert sorted(os.listdir(root)) == [folder_name(1, 0), folder_name(2, 0)]
    return root


@pytest.fixture
def restore(framework, trained, tmp_path):
    """Restore from a copy of it: the step that was found, and what of the state is not of that step."""
    root = tmp_path / "checkpoints"
    shutil.copytree(trained, root)
    tiny = Tiny(framework, 3)
    checkpointer = import_module(CHECKPOINTERS[framework.__name__]).Checkpointer
    made = checkpointer(
        root, model=tiny.model, optimizer=tiny.optimizer, extra={}, link=PlayedLink(tmp_path, generation=0)
    )

    def restored():
        tiny.set(99)
        step = made.restore()
        return step, tiny.wrong(step)

    return root, restored


def test_restoring_what_is_whole(restore):
    """The newest, every bit of it."""
    root, restored = restore
    assert restored() == (2, [])
    assert sorted(os.listdir(root)) == [folder_name(1, 0), folder_name(2, 0)]


# Of each file, so many of the places where something begins.
MOST = 40


@pytest.mark.timeout(300)
def test_a_flipped_bit_is_never_restored(restore, caplog):
    """In whatever part of whatever file it is: that checkpoint is put aside, and the one before is restored."""
    caplog.set_level("ERROR")
    root, restored = restore
    place, aside = root / folder_name(2, 0), root / f"{folder_name(2, 0)}.broken"
    missed = []
    for path, tensors in entries_of(place):
        edges = borders(path, tensors)
        some = edges[:: max(1, len(edges) // MOST)]
        for at in sorted({0, *some, *(each - 1 for each in edges[-2:])} & set(range(path.stat().st_size))):
            with Flipped(path, at):
                try:
                    found = restored()
                except ElasticError as error:
                    found = f"{type(error).__name__}: {error}"
            if found != (1, []) or not aside.exists():
                missed.append((path.name, at, found))
            if aside.exists():
                os.rename(aside, place)
    assert missed == []
    assert restored() == (2, [])


@pytest.mark.parametrize("how", ["missing", "cut short", "longer", "empty", "a pipe"])
def test_a_file_that_is_not_whole_is_never_restored(restore, how):
    """Each of them in turn, the manifest included."""
    root, restored = restore
    place, aside = root / folder_name(2, 0), root / f"{folder_name(2, 0)}.broken"
    for path, _ in entries_of(place):
        data = path.read_bytes()
        path.unlink()
        if how == "a pipe":
            os.mkfifo(path)
        elif how != "missing":
            path.write_bytes({"cut short": data[:-1], "longer": data + b"\0", "empty": b""}[how])
        assert restored() == (1, []), path.name
        os.rename(aside, place)
        path.unlink(missing_ok=True)
        path.write_bytes(data)
    (place / "notes.txt").write_text("mine")
    assert restored() == (2, [])


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_that_is_deleted_while_it_is_restored(restore, tmp_path, monkeypatch, when):
    """A saver that has outlived its training has made a newer one: that is restored."""
    root, restored = restore
    newest, before = root / folder_name(2, 0), root / folder_name(1, 0)
    os.rename(newest, tmp_path / "newest")
    read = Restoring.read

    def overtaken():
        if before.exists():
            os.rename(tmp_path / "newest", newest)
            shutil.rmtree(before)

    def read_meanwhile(*args):
        if when == "before":
            overtaken()
        loaded = read(*args)
        overtaken()
        return loaded

    monkeypatch.setattr(Restoring, "read", read_meanwhile)
    assert restored() == (2, [])
    assert os.listdir(root) == [newest.name]


def test_nothing_that_is_whole(restore):
    """Is no reason to begin from zero: somebody has to look at it."""
    root, restored = restore
    for step in (1, 2):
        path = root / folder_name(step, 0) / MANIFEST
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(NotRestored, match=r"no checkpoint .* is whole"):
        restored()
    with pytest.raises(NotRestored, match=r"no checkpoint .* is whole"):
        restored()


@pytest.fixture
def in_memory():
    """A folder where fsync takes no time."""
    with TemporaryDirectory(prefix="elastic-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def left(framework, made, in_memory):
    """A folder as a worker leaves it: two checkpoints, and a state in its buffer. It is tried in a copy of it."""
    folder = in_memory / "left"
    shutil.copytree(made, folder / "checkpoints")
    order, data = ordered(framework, in_memory / "trial" / "checkpoints", 30)
    packed = order_to_bytes(order)
    buffer = StagingBuffer.create(folder / "buffer", len(packed) + len(data))

    def copy(into):
        into[:] = data

    assert buffer.fill(30, 1, packed, len(data), copy)
    buffer.close()
    return folder


@pytest.mark.timeout(300)
def test_a_saver_that_is_killed_before_any_of_its_calls(left):
    """What was saved is whole, and what was staged is saved by the saver after it: nothing is lost, nothing is torn."""
    draft = {"step": 30, "generation": 1, "token": "run1"}
    asked = {
        "prepare": {**draft, "world_size": 1, "verify": "full", "md5": True},
        "publish": {**draft, "keep_last": 2},
    }
    argv = [sys.executable, killed.__file__, str(left)]
    done = subprocess.run(argv, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True)
    first, *trials = map(json.loads, done.stdout.splitlines())
    assert {"fsync", "rename", "mkdir", "unlink", "rmdir", "write"} <= set(first["calls"])
    assert len(trials) == len(first["calls"]) + killed.PAIRS
    for each in (first, *trials):
        assert each["wrong"] == [], each
        assert each["steps"] == [30, 20], each
        assert all(left in ([20, 10], [30, 20, 10], [30, 20]) for left in each["left"]), each
        assert each["names"] == [folder_name(20, 1), folder_name(30, 1)], each
    # They were killed everywhere: before it was a checkpoint, before and after others were deleted.
    assert {tuple(left) for each in trials for left in each["left"]} == {(20, 10), (30, 20, 10), (30, 20)}


def test_what_was_asked_for_is_done_though_nobody_waits_for_it(left):
    """A worker that is killed has its last state saved: all of it was asked for at once."""
    ours, theirs = socket.socketpair()
    place = left.rename(left.with_name("trial"))
    draft = {"root": str(place / "checkpoints"), "step": 30, "generation": 1, "token": "run1"}
    with theirs:
        saver = subprocess.Popen(saver_command(theirs.fileno()), pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    frames.write(ours.fileno(), {"save": str(place / "buffer")})
    frames.write(ours.fileno(), {"prepare": {**draft, "world_size": 1}})
    frames.write(ours.fileno(), {"publish": draft})
    ours.close()
    assert saver.communicate(timeout=30)[1] == b""
    assert saver.returncode == 0
    assert [each.manifest.step for each in Store(place / "checkpoints").newest_first()] == [30, 20, 10]


@pytest.mark.parametrize("sweeping", ["sweep", "sweep_overtaken", "discard"])
def test_a_draft_that_becomes_a_checkpoint_while_it_is_swept(framework, tmp_path, monkeypatch, sweeping):
    """By the saver of a worker that was killed, while the worker after it tidies up: it is there, or gone, not both."""
    order, data = ordered(framework, tmp_path, 30)
    draft, removed = write_part(order, memoryview(data)), []
    prepare(draft, 1, verify="full")
    unlink = os.unlink

    def publish_first(*args, **options):
        if not removed and options.get("dir_fd") is not None:
            removed.append(args)
            with contextlib.suppress(FileNotFoundError):
                draft.publish()
        return unlink(*args, **options)

    monkeypatch.setattr(os, "unlink", publish_first)
    match sweeping:
        case "sweep":
            Store(tmp_path).sweep()
        case "sweep_overtaken":
            Store(tmp_path).sweep_overtaken(31, 1, "run1")
        case "discard":
            draft.discard()
    assert removed
    for found in Store(tmp_path).newest_first():
        assert isinstance(found, Checkpoint), found
        assert Store(tmp_path).trouble(found) == ""


def test_what_was_left_half_deleted(root):
    """Does not keep another one of the same name, saved since, from being deleted."""
    half = root / temporary_name(folder_name(10, 1), "pruned")
    half.mkdir()
    (half / "model").write_text("half")
    assert Store(root).prune(folder_name(20, 1), 1, None) == (folder_name(10, 1),)
    assert os.listdir(root) == [folder_name(20, 1)]


@pytest.mark.parametrize("name", ["torch", "paddle"])
@pytest.mark.timeout(60 + 5 * FAULTS)
def test_trainings_that_are_killed_while_they_save(name, tmp_path):
    """The worker, its saver or both, at any moment: what was told as saved is there, and all that is there is whole.

    Each training goes on from what the one before it left, sometimes while that one's saver is still at work.
    """
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    root = tmp_path / "checkpoints"
    environ = {each: value for each, value in os.environ.items() if each != "PYTHONDONTWRITEBYTECODE"}
    # Only a process of one thread can be forked.
    environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    argv = [sys.executable, "-W", "ignore", "-m", "helpers.kills", name, str(root), "20261116", str(FAULTS)]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    trials = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(trials) == FAULTS + 1
    assert [(each["trial"], each["plan"], each["wrong"]) for each in trials if each["wrong"]] == []
    # A saver that is killed is followed by another one, and nobody has to know. That of a killed worker may be the
    # first with a step that the next one does again.
    troubles = [words for each in trials for words in each["troubles"]]
    assert [words for words in troubles if "was there before, and stays as it is" not in words] == []
    assert "Traceback" not in done.stderr
    # They were killed in the middle of a save, and saved in between.
    assert any(each["drafts"] for each in trials)
    assert any(each["went_on"] for each in trials)
    assert sum(len(each["committed"]) for each in trials) > FAULTS // 2
    # The last one ended by itself, and has cleaned up behind all others.
    last = trials[-1]
    assert last["closed"]
    step = last["committed"][-1]
    found = [each for each in os.listdir(root) if "pruned" not in each]
    assert sorted(found) == [folder_name(each, 0) for each in (step - 2, step - 1, step)]
    assert [each["pid"] for each in trials if list(Path("/dev/shm").glob(f"elastic-adapter-{each['pid']}-*"))] == []
