"""Checkpoints from what workers left in shared memory: real files of torch and paddle, of one rank and of several."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import socket
import subprocess
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_adapter.core import frames
from elastic_adapter.core.checkpoint import hashing, paddlestate, torchstate
from elastic_adapter.core.checkpoint.command import saver_command
from elastic_adapter.core.checkpoint.manifest import MANIFEST, folder_name
from elastic_adapter.core.checkpoint.order import FileOrder, Order, Stretch, order_from_bytes, order_to_bytes
from elastic_adapter.core.checkpoint.saving import Incomplete, Taken, Unverified, finish, missing, prepare, write_part
from elastic_adapter.core.checkpoint.staging import EMPTY, StagingBuffer
from elastic_adapter.core.checkpoint.store import Broken, Checkpoint, Draft, Store
from helpers.frameworks import imported

SUFFIX = {"torch": "pt", "paddle": "pdparams"}


@pytest.fixture(params=["torch", "paddle"])
def framework(request):
    return imported(request.param)


@pytest.fixture
def shared():
    path = Path("/dev/shm") / f"elastic-test-{os.getpid()}-{time.monotonic_ns()}"
    yield path
    path.unlink(missing_ok=True)


def state_of(framework, seed):
    framework.seed(seed) if framework.__name__ == "paddle" else framework.manual_seed(seed)
    return {"weight": framework.rand([300, 70]), "bias": framework.rand([70])}


def as_bytes(framework, piece):
    if framework.__name__ == "torch":
        return piece.numpy().tobytes()
    return piece.tobytes() if hasattr(piece, "tobytes") else piece.numpy().tobytes()


def staged(framework, path, state, root, *, rank=0, world_size=1):
    """Fill a buffer as a worker does; what is in it is all that is needed."""
    kind = framework.__name__
    skeleton, pieces = (torchstate if kind == "torch" else paddlestate).skeleton(framework, state)
    blobs = [skeleton.pack(), *(as_bytes(framework, piece) for piece in pieces)]
    places, at = [], 0
    for blob in blobs:
        places.append(Stretch(at, len(blob)))
        at += len(blob)
    file = FileOrder(f"rank_{rank}.{SUFFIX[kind]}", kind, places[0], tuple(places[1:]))
    order = Order(str(root), "run1", 40, 3, rank, world_size, kind, {kind: "1"}, (file,), 1.5, facts={"epoch": rank})
    buffer = StagingBuffer.create(path, at + 65536)

    def copy(into):
        into[:] = b"".join(blobs)

    assert buffer.fill(order.step, order.generation, order_to_bytes(order), at, copy)
    buffer.close()


def taken(path):
    """The order and the data in a buffer; nothing, if it is empty."""
    held = StagingBuffer.open(path).take()
    return (order_from_bytes(held.order), held.data) if held is not None else ()


def loaded(framework, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"weights_only": True} if framework.__name__ == "torch" else {}
        return framework.load(str(path), **options)


def test_one_rank(framework, shared, tmp_path):
    """The framework's own loader reads what was saved, bit by bit; the manifest knows every tensor."""
    state = state_of(framework, 1)
    staged(framework, shared, state, tmp_path / "checkpoints")
    draft = write_part(*taken(shared))
    assert missing(draft, 1) == ()
    place = finish(draft, 1, md5=True)
    store = Store(tmp_path / "checkpoints")
    (found,) = store.newest_first()
    assert isinstance(found, Checkpoint)
    assert store.trouble(found, stored=True) == store.trouble(found, how="sample") == ""
    assert (found.manifest.step, found.manifest.generation, found.manifest.facts) == (40, 3, {"epoch": 0})
    (file,) = found.manifest.files
    assert [each.name for each in file.tensors] == ["weight", "bias"]
    assert [each.shape for each in file.tensors] == [(300, 70), (70,)]
    again = loaded(framework, place / file.name)
    assert all((again[name].numpy() == state[name].numpy()).all() for name in state)
    assert sorted(os.listdir(place)) == sorted([MANIFEST, "checkpoints.md5", file.name])


def test_several_ranks(framework, shared, tmp_path):
    """In any order; it is not finished before all have written, and has the first one's facts."""
    root = tmp_path / "checkpoints"
    for rank in (2, 0, 1):
        path = shared.with_name(f"{shared.name}-{rank}")
        try:
            staged(framework, path, state_of(framework, rank), root, rank=rank, world_size=3)
            draft = write_part(*taken(path))
        finally:
            path.unlink()
        assert list(Store(root).newest_first()) == []
        assert (missing(draft, 3) == ()) == (rank == 1)
    place = finish(draft, 3)
    (found,) = Store(root).newest_first()
    assert [file.name.partition(".")[0] for file in found.manifest.files] == ["rank_0", "rank_1", "rank_2"]
    assert found.manifest.facts == {"epoch": 0}
    assert Store(root).trouble(found) == ""
    for rank, file in enumerate(found.manifest.files):
        again = loaded(framework, place / file.name)
        assert (again["weight"].numpy() == state_of(framework, rank)["weight"].numpy()).all()


@pytest.mark.parametrize("prepared", [False, True])
def test_a_step_that_comes_again(framework, shared, tmp_path, prepared):
    """What was said of its files the first time is not said of the new ones, also when these are never finished."""
    root = tmp_path / "checkpoints"
    for seed in (1, 2):
        staged(framework, shared, state_of(framework, seed), root)
        order, data = taken(shared)
        shared.unlink()
        if seed == 1:
            draft = write_part(order, data)
            if prepared:
                prepare(draft, 1)
    (file,) = order.files
    real = Draft.file

    def seen(draft, name):
        assert os.listdir(draft.path) == [file.name]
        return real(draft, name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Draft, "file", seen)
        write_part(order, data)
    place = finish(draft, 1)
    assert Store(root).trouble(Store(root).look(place.name)) == ""
    again = loaded(framework, place / file.name)
    assert (again["weight"].numpy() == state_of(framework, 2)["weight"].numpy()).all()


def test_an_order_that_reaches_beyond_its_data(framework, shared, tmp_path):
    """A buffer that is not what its order says is no checkpoint."""
    staged(framework, shared, state_of(framework, 1), tmp_path)
    order, data = taken(shared)
    with pytest.raises(ValueError, match="an order names bytes"):
        write_part(order, data[:100])
    assert list(Store(tmp_path).newest_first()) == []


def test_a_storage_that_does_not_take_it(framework, shared, tmp_path):
    """A file where the folder should be, say: an error, and nothing that could be taken for a checkpoint."""
    (tmp_path / "checkpoints").write_text("")
    staged(framework, shared, state_of(framework, 1), tmp_path / "checkpoints")
    with pytest.raises(OSError, match="checkpoints"):
        write_part(*taken(shared))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_storage_that_can_not_flush_folders(framework, shared, tmp_path, monkeypatch, number):
    """That it is not known there is no failure; that it failed is one."""
    real = os.fsync

    def refuse(fd):
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(number, os.strerror(number))
        real(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    staged(framework, shared, state_of(framework, 1), tmp_path)
    draft = write_part(*taken(shared))
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            finish(draft, 1)
    else:
        assert finish(draft, 1) == tmp_path / NAME
        assert Store(tmp_path).trouble(Store(tmp_path).look(NAME)) == ""


class SaverProcess:
    """The real one, and our end of its channel."""

    def __init__(self, folder=None):
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(saver_command(theirs.fileno()), pass_fds=[theirs.fileno()], cwd=folder)

    def ask(self, request):
        frames.write(self.socket.fileno(), request)

    def answer(self):
        return frames.read(self.socket.fileno())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        self.process.wait(30)


WHICH = {"step": 40, "generation": 3, "token": "run1"}
NAME = folder_name(40, 3)


def test_the_saver(framework, shared, tmp_path):
    """It writes, prepares, publishes and keeps what is to be kept, has no framework, and ends with its channel."""
    root = tmp_path / "checkpoints"
    staged(framework, shared, state_of(framework, 1), root)
    which = {"root": str(root), **WHICH}
    with SaverProcess() as saver:
        saver.ask({"save": str(shared)})
        draft = f".{NAME}.run1.elastic-tmp"
        assert saver.answer() == {"saved": {"path": str(shared), **which, "rank": 0, "draft": draft}}
        assert StagingBuffer.open(shared).mark == EMPTY
        for _ in range(2):
            saver.ask({"prepare": {**which, "world_size": 1, "verify": "full", "md5": True}})
            assert saver.answer() == {"prepared": {"name": NAME, "step": 40, "generation": 3}}
            assert os.listdir(root) == [draft]
        for _ in range(2):
            saver.ask({"publish": {**which, "keep_last": 1}})
            path = str(root / NAME)
            assert saver.answer() == {
                "published": {"path": path, "name": NAME, "step": 40, "pruned": [], "existed": False}
            }
            assert os.listdir(root) == [NAME]
        saver.ask({"prepare": {**which, "world_size": 1}})
        assert saver.answer()["prepared"]["name"] == NAME
        maps = Path(f"/proc/{saver.process.pid}/maps").read_text()
        assert not any(f"/{name}/" in maps for name in ("torch", "paddle", "numpy"))
    assert saver.process.returncode == 0
    (found,) = Store(root).newest_first()
    assert Store(root).trouble(found) == ""
    assert subprocess.run(["md5sum", "-c", "checkpoints.md5"], cwd=found.path, stdout=-3, check=False).returncode == 0


def test_drafts_that_are_overtaken(framework, shared, tmp_path):
    """Those of the same writers that are older than what is published go with it; nobody else's do."""
    root = tmp_path / "checkpoints"
    staged(framework, shared, state_of(framework, 1), root)
    stays = [Store(root).draft(*which).path.name for which in ((41, 3, "run1"), (39, 3, "run2"))]
    Store(root).draft(39, 9, "run1")
    with SaverProcess() as saver:
        saver.ask({"save": str(shared)})
        saver.ask({"prepare": {"root": str(root), **WHICH, "world_size": 1}})
        saver.ask({"publish": {"root": str(root), **WHICH}})
        assert ["failed" in saver.answer() for _ in range(3)] == [False] * 3
    assert sorted(os.listdir(root)) == sorted([*stays, NAME])


def test_a_draft_that_is_dropped(framework, shared, tmp_path):
    """It goes, also if it was prepared; one that is not there, or has its name, is no trouble."""
    root = tmp_path / "checkpoints"
    staged(framework, shared, state_of(framework, 1), root)
    which = {"root": str(root), **WHICH}
    stays = Store(root).draft(41, 3, "run1").path.name
    with SaverProcess() as saver:
        for request in ({"save": str(shared)}, {"prepare": {**which, "world_size": 1}}, {"drop": which}):
            saver.ask(request)
        draft = f".{NAME}.run1.elastic-tmp"
        assert [saver.answer() for _ in range(3)][2] == {"dropped": {"draft": draft, "step": 40}}
        assert os.listdir(root) == [stays]
        (root / NAME).mkdir()
        saver.ask({"drop": which})
        assert "dropped" in saver.answer()
    assert sorted(os.listdir(root)) == sorted([stays, NAME])


def test_what_goes_wrong_is_told(framework, shared, tmp_path):
    """In one line each, with the path and, where they are known, the step and the rank; and the saver lives on."""
    (tmp_path / "file").write_text("")
    staged(framework, shared, state_of(framework, 1), tmp_path / "file", rank=1, world_size=2)
    with SaverProcess() as saver:
        for request, words, facts in (
            ({"save": str(shared)}, "file: ", {"path": str(shared), "step": 40, "rank": 1}),
            ({"save": str(shared)}, "holds no state that is whole", {"path": str(shared)}),
            ({"save": "/nowhere"}, "/nowhere: No such file", {"path": "/nowhere"}),
            (
                {"prepare": {"root": str(tmp_path / "empty"), **WHICH, "world_size": 2}},
                "ranks 0, 1 of 2 wrote nothing that is seen in",
                {},
            ),
            ({"publish": {"root": str(tmp_path), **WHICH}}, f"{NAME}.run1.elastic-tmp: No such file", {}),
            ({"publish": {}}, "missing", {}),
        ):
            saver.ask(request)
            answer = saver.answer()
            assert words in answer["failed"]
            assert "\n" not in answer["failed"]
            assert {**answer, **facts, "request": request} == answer
    assert saver.process.returncode == 0


def test_parts_that_are_not_there(framework, shared, tmp_path):
    """The ranks are named, and the question is asked that helps; the draft is left for them."""
    staged(framework, shared, state_of(framework, 1), tmp_path, rank=1, world_size=3)
    draft = write_part(*taken(shared))
    with pytest.raises(Incomplete, match=r"ranks 0, 2 of 3 .* shared by all nodes"):
        prepare(draft, 3)
    assert missing(draft, 3) == (0, 2)


def test_what_does_not_verify(framework, shared, tmp_path):
    """Never becomes a checkpoint, and is not kept: it never was one, and the next save is another try."""
    staged(framework, shared, state_of(framework, 1), tmp_path)
    draft = write_part(*taken(shared))
    (file,) = draft.path.glob("rank_0.*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(Unverified, match=r"is damaged: .*not what was read back from the storage"):
        prepare(draft, 1, verify="full")
    assert os.listdir(tmp_path) == []


def test_what_can_not_be_read_back(framework, shared, tmp_path, monkeypatch):
    """Is not called damaged, and is no checkpoint either, nor kept: whoever asked is told why."""
    staged(framework, shared, state_of(framework, 1), tmp_path)
    draft = write_part(*taken(shared))

    def fails(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "model")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "check", fails)
        with pytest.raises(OSError, match="Input/output error"):
            prepare(draft, 1)
    assert os.listdir(tmp_path) == []


def test_what_is_not_prepared_gets_no_name(framework, shared, tmp_path):
    """Whoever asks for both at once, and is not there any more for the first answer, has no half of a checkpoint."""
    staged(framework, shared, state_of(framework, 1), tmp_path, rank=0, world_size=2)
    which = {"root": str(tmp_path), **WHICH}
    with SaverProcess() as saver:
        saver.ask({"save": str(shared)})
        saver.ask({"prepare": {**which, "world_size": 2}})
        saver.ask({"publish": which})
        _, prepared, published = saver.answer(), saver.answer(), saver.answer()
    assert "rank 1 of 2 wrote nothing" in prepared["failed"]
    assert re.search(r"it is not whole, and gets no name: .*manifest.json: No such file", published["failed"])
    assert os.listdir(tmp_path) == [f".{NAME}.run1.elastic-tmp"]


@pytest.mark.parametrize("how", ["sample", "full"])
def test_it_is_read_back_from_the_storage(framework, shared, tmp_path, monkeypatch, how):
    """Past the page cache, which would only tell what was meant to be written."""
    staged(framework, shared, state_of(framework, 1), tmp_path)
    draft = write_part(*taken(shared))
    read, init = [], hashing.Reader.__init__

    def noted(reader, path, *, stored=False):
        read.append((Path(path).name, stored))
        init(reader, path, stored=stored)

    monkeypatch.setattr(hashing.Reader, "__init__", noted)
    prepare(draft, 1, verify=how)
    assert read == [(file.name, True) for file in draft.path.glob("rank_0.*")]
    read.clear()
    prepare(draft, 1, verify="off")
    assert read == []


class Disk:
    """What a power loss would leave: the files that were synced as they are now, and names in folders that were."""

    def __init__(self, monkeypatch):
        self.sizes, self.names, self.renamed = {}, {}, []
        fsync, rename = os.fsync, os.rename

        def synced(fd):
            fsync(fd)
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            if path.is_dir():
                self.names[path] = set(os.listdir(path))
            else:
                self.sizes[path] = path.stat().st_size

        def moved(old, new, **options):
            old, new = Path(old), Path(new)
            if old in self.sizes:
                self.sizes[new] = self.sizes.pop(old)
            self.renamed.append((old, new, dict(self.sizes), dict(self.names)))
            rename(old, new, **options)

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "rename", moved)


def test_all_of_it_is_on_disk_before_it_has_its_name(framework, shared, tmp_path, monkeypatch):
    """Each file, then the manifest, then their folder; and the name itself, before anybody is told of it."""
    staged(framework, shared, state_of(framework, 1), tmp_path)
    disk = Disk(monkeypatch)
    place = finish(write_part(*taken(shared)), 1, md5=True)
    by_name = {new.name: (old, sizes, names) for old, new, sizes, names in disk.renamed}
    draft, sizes, names = by_name[place.name]
    files = {path.name: path.stat().st_size for path in place.iterdir()}
    assert len(files) == 3
    assert {name: sizes.get(draft / name) for name in files} == files
    assert names[draft] >= set(files)
    # The manifest tells of files that are there.
    _, sizes, _ = by_name[MANIFEST]
    assert {name for name in files if name != MANIFEST} <= {path.name for path in sizes}
    assert place.name in disk.names[tmp_path]


def test_its_name_is_taken(framework, shared, tmp_path):
    """By another run's, which stays: this one is never entered anywhere, and nothing of it is left."""
    staged(framework, shared, state_of(framework, 1), tmp_path)
    order, data = taken(shared)
    for token in ("run1", "run2"):
        draft = write_part(replace(order, token=token), data)
        if token == "run1":
            finish(draft, 1)
    with pytest.raises(Taken, match="was there before, and stays as it is"):
        prepare(draft, 1)
    assert os.listdir(tmp_path) == [NAME]


def test_a_saver_that_was_killed_before_it_could_answer(framework, shared, tmp_path):
    """What it had written counts; what is in the buffer by now is another's, and is left to that one."""
    part = {"root": str(tmp_path), **WHICH, "rank": 0}
    staged(framework, shared, state_of(framework, 1), tmp_path)
    with SaverProcess() as saver:
        for _ in range(2):
            saver.ask({"save": str(shared), "part": part})
            saved = saver.answer()["saved"]
            assert (saved["step"], saved["rank"]) == (40, 0)
        shared.unlink()
        staged(framework, shared, state_of(framework, 2), tmp_path)
        saver.ask({"save": str(shared), "part": {**part, "step": 30}})
        assert saver.answer()["failed"] == "the state of step 30 is not there any more"
        assert StagingBuffer.open(shared).step == 40


def test_a_broken_one_in_its_place(framework, shared, tmp_path):
    """What is no checkpoint does not keep another from its name."""
    staged(framework, shared, state_of(framework, 1), tmp_path)
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "rank_0.pt").write_text("half")
    assert isinstance(Store(tmp_path).look(NAME), Broken)
    assert finish(write_part(*taken(shared)), 1) == tmp_path / NAME
    assert isinstance(Store(tmp_path).look(NAME), Checkpoint)
    assert sorted(os.listdir(tmp_path)) == [NAME, f"{NAME}.broken"]


def test_one_in_its_place_that_can_not_be_read(framework, shared, tmp_path):
    """It may be whole: it stays, under its name, and the other one is not saved."""
    staged(framework, shared, state_of(framework, 1), tmp_path)
    draft = write_part(*taken(shared))
    manifest = tmp_path / NAME / MANIFEST
    manifest.parent.mkdir()
    manifest.symlink_to(manifest)
    why = rf"{NAME} was there before, can't be read \(.*symbolic links\), and stays as it is: make it readable"
    with pytest.raises(Taken, match=why):
        prepare(draft, 1)
    assert os.listdir(tmp_path) == [NAME]


def test_a_place_that_can_not_be_read_any_more(framework, shared, tmp_path):
    """Between two words of the one who leads: nothing is renamed but what was prepared."""
    staged(framework, shared, state_of(framework, 1), tmp_path)
    draft = write_part(*taken(shared))
    prepare(draft, 1)
    manifest = tmp_path / NAME / MANIFEST
    manifest.parent.mkdir()
    manifest.symlink_to(manifest)
    with pytest.raises(OSError, match="not empty"):
        draft.publish()
    assert sorted(os.listdir(tmp_path)) == sorted([NAME, draft.path.name])


def test_a_full_disk(framework, shared, tmp_path):
    """It is told with the file, what to do, and that nothing else was harmed; what was half written is gone."""
    if os.geteuid() != 0:
        pytest.skip("a file system of its own needs root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        staged(framework, shared, state_of(framework, 1), tmp_path)
        with SaverProcess() as saver:
            saver.ask({"save": str(shared)})
            told = saver.answer()["failed"]
        assert re.fullmatch(
            rf"{tmp_path}/\S+/rank_0\.\w+: No space left on device \(make room there, .* untouched", told
        )
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_the_saver_in_a_folder_of_traps(framework, shared, tmp_path):
    """Files of the user's that are called like modules of ours, or of Python's, are not taken for them."""
    for name in ("json", "random", "xxhash", "elastic_adapter", "shutil"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    with SaverProcess(tmp_path) as saver:
        saver.ask({"save": "/nowhere"})
        assert "/nowhere" in saver.answer()["failed"]
    assert saver.process.returncode == 0


def test_a_saver_that_is_killed_is_followed_by_another(framework, shared, tmp_path):
    """At any moment: what the worker left in its buffer is saved in the end, by whoever comes next."""
    rng = random.Random(20261116)
    root = tmp_path / "checkpoints"
    state = state_of(framework, 1)
    for _ in range(int(os.environ.get("FAULTS", "100")) // 5):
        shared.unlink(missing_ok=True)
        staged(framework, shared, state, root)
        with SaverProcess() as saver:
            saver.ask({"save": str(shared)})
            time.sleep(rng.random() * 0.2)
            saver.process.kill()
        if left := taken(shared):
            write_part(*left)
        else:
            assert StagingBuffer.open(shared).mark == EMPTY
        finish(Store(root).draft(40, 3, "run1"), 1)
        (found,) = Store(root).newest_first()
        assert Store(root).trouble(found) == ""
        shutil.rmtree(root)


def test_the_saver_steps_back(tmp_path):
    """A training's processes come first, at the processors and at the disks."""
    with SaverProcess() as saver:
        saver.ask({"save": "/nowhere"})
        saver.answer()
        status = Path(f"/proc/{saver.process.pid}/stat").read_text().rpartition(")")[2].split()
        nice, policy = int(status[16]), int(status[38])
        asked = subprocess.run(["ionice", "-p", str(saver.process.pid)], capture_output=True, text=True, check=True)
    assert nice - os.nice(0) == 10
    assert policy == os.SCHED_BATCH
    assert asked.stdout.strip() == "idle"
