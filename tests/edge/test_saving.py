"""Checkpoints from what workers left in shared memory: real files of torch and paddle, of one rank and of several."""

from __future__ import annotations

import importlib.util
import os
import time
import warnings
from pathlib import Path

import pytest

from elastic_adapter.core.checkpoint import paddlestate, torchstate
from elastic_adapter.core.checkpoint.manifest import MANIFEST
from elastic_adapter.core.checkpoint.order import FileOrder, Order, Stretch, order_from_bytes, order_to_bytes
from elastic_adapter.core.checkpoint.saving import finish, missing, write_part
from elastic_adapter.core.checkpoint.staging import StagingBuffer
from elastic_adapter.core.checkpoint.store import Checkpoint, Store

SUFFIX = {"torch": "pt", "paddle": "pdparams"}


@pytest.fixture(params=["torch", "paddle"])
def framework(request):
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(request.param)


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
    held = StagingBuffer.open(path).take()
    return order_from_bytes(held.order), held.data


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
