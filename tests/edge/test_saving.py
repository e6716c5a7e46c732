"""Checkpoints from what workers left in shared memory: real files of torch and paddle, of one rank and of several."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from elastic_adapter.core import frames
from elastic_adapter.core.checkpoint import paddlestate, torchstate
from elastic_adapter.core.checkpoint.manifest import MANIFEST
from elastic_adapter.core.checkpoint.order import FileOrder, Order, Stretch, order_from_bytes, order_to_bytes
from elastic_adapter.core.checkpoint.saving import finish, missing, write_part
from elastic_adapter.core.checkpoint.staging import EMPTY, StagingBuffer
from elastic_adapter.core.checkpoint.store import Checkpoint, Store
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


class SaverProcess:
    """The real one, and our end of its channel."""

    def __init__(self):
        self.socket, theirs = socket.socketpair()
        with theirs:
            argv = [sys.executable, "-m", "elastic_adapter.core.checkpoint.saver", str(theirs.fileno())]
            self.process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])

    def ask(self, request):
        frames.write(self.socket.fileno(), request)

    def answer(self):
        return frames.read(self.socket.fileno())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        self.process.wait(30)


FINISH = {"step": 40, "generation": 3, "token": "run1", "world_size": 1}


def test_the_saver(framework, shared, tmp_path):
    """It writes, finishes and keeps what is to be kept, has no framework, and ends with its channel."""
    root = tmp_path / "checkpoints"
    staged(framework, shared, state_of(framework, 1), root)
    with SaverProcess() as saver:
        saver.ask({"save": str(shared)})
        assert saver.answer()["saved"]["step"] == 40
        assert StagingBuffer.open(shared).mark == EMPTY
        saver.ask({"finish": {"root": str(root), **FINISH, "verify": "full", "keep_last": 1}})
        assert saver.answer()["finished"]["pruned"] == []
        maps = Path(f"/proc/{saver.process.pid}/maps").read_text()
        assert not any(f"/{name}/" in maps for name in ("torch", "paddle", "numpy"))
    assert saver.process.returncode == 0
    (found,) = Store(root).newest_first()
    assert Store(root).trouble(found) == ""


def test_what_goes_wrong_is_told(framework, shared, tmp_path):
    """In one line each; and the saver lives on."""
    (tmp_path / "file").write_text("")
    staged(framework, shared, state_of(framework, 1), tmp_path / "file")
    with SaverProcess() as saver:
        for request, words in (
            ({"save": str(shared)}, "file: "),
            ({"save": str(shared)}, "holds no state that is whole"),
            ({"save": "/nowhere"}, "/nowhere: No such file"),
            ({"finish": {"root": str(tmp_path / "empty"), **FINISH}}, "part.0.json: No such file"),
            ({"finish": {}}, "missing"),
        ):
            saver.ask(request)
            answer = saver.answer()
            assert words in answer["failed"]
            assert "\n" not in answer["failed"]
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
