"""Shared memory that outlives the worker that filled it: what is in it is whole, or nothing."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from elastic_adapter.core.checkpoint import staging
from elastic_adapter.core.checkpoint.buffers import Buffers, beside
from elastic_adapter.core.checkpoint.staging import EMPTY, FILLING, FULL, SAVING, NoRoom, StagingBuffer, give_up
from elastic_adapter.core.checkpoint.writers import own_token

MIB = 1 << 20


@pytest.fixture
def path():
    path = Path("/dev/shm") / f"elastic-test-{os.getpid()}-{time.monotonic_ns()}"
    yield path
    path.unlink(missing_ok=True)


def copier(data):
    def copy(into):
        into[:] = data

    return copy


def test_what_is_filled_can_be_taken(path):
    """By another mapping of the same file, once; then it can be filled again."""
    data = random.Random(1).randbytes(3 * MIB + 5)
    worker = StagingBuffer.create(path, 4 * MIB)
    assert (worker.mark, worker.take()) == (EMPTY, None)
    assert worker.fill(7, 2, b'{"files": []}', len(data), copier(data))
    saver = StagingBuffer.open(path)
    held = saver.take()
    assert (held.step, held.generation, held.order, bytes(held.data)) == (7, 2, b'{"files": []}', data)
    assert worker.mark == SAVING
    assert not worker.fill(8, 2, b"", 1, copier(b"x"))
    saver.release()
    assert worker.fill(8, 2, b"", 0, copier(b""))
    assert (saver.take().step, worker.mark) == (8, SAVING)


def test_a_saver_that_was_killed_is_followed_by_another(path):
    """What it was about to save is still there."""
    worker = StagingBuffer.create(path, MIB)
    worker.fill(7, 2, b"order", 4, copier(b"data"))
    assert StagingBuffer.open(path).take() is not None
    assert bytes(StagingBuffer.open(path).take().data) == b"data"


def test_a_copy_that_failed_is_nothing(path):
    """And the buffer is as good as before."""
    worker = StagingBuffer.create(path, MIB)

    def fail(_):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        worker.fill(7, 2, b"order", 4, fail)
    assert (worker.mark, worker.take()) == (FILLING, None)
    assert worker.fill(8, 2, b"order", 4, copier(b"data"))
    assert worker.mark == FULL


def test_too_much(path):
    """Neither the state nor the memory of the machine is large enough for that."""
    worker = StagingBuffer.create(path, MIB)
    with pytest.raises(NoRoom, match="does not fit"):
        worker.fill(7, 2, b"", 2 * MIB, copier(b""))
    assert worker.take() is None
    other = path.with_name(path.name + "-large")
    with pytest.raises(NoRoom, match=r"has room for .* MiB, and .* MiB are needed"):
        StagingBuffer.create(other, 1 << 50)
    assert not other.exists()


@pytest.fixture
def cgroup():
    """A memory cgroup of 64 MiB."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, limit = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    folder = root / f"elastic-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        if not (folder / limit).exists():
            pytest.skip("memory can't be limited here")
        (folder / limit).write_text(str(64 * MIB))
        yield folder
    finally:
        folder.rmdir()


LIMITED = """
import os, sys
from pathlib import Path
from elastic_adapter.core.checkpoint.staging import NoRoom, StagingBuffer
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
for mib in (8, 128):
    path = Path(f"{sys.argv[2]}-{mib}")
    try:
        StagingBuffer.create(path, mib << 20)
        print("made", flush=True)
    except NoRoom as error:
        print(error, flush=True)
    path.unlink(missing_ok=True)
"""


def test_the_limit_of_a_container(path, cgroup):
    """The machine has more, and this process may not have it: it is told so, and not killed for taking it."""
    argv = [sys.executable, "-c", LIMITED, str(cgroup), str(path)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False, timeout=50)
    for left in path.parent.glob(f"{path.name}-*"):
        left.unlink()
    assert done.returncode == 0
    made, refused = done.stdout.splitlines()
    assert made == "made"
    assert re.fullmatch(r"/dev/shm has room for \d\d MiB, and 128 MiB are needed", refused)


def test_something_else(path):
    """A file of somebody else's is not taken for a buffer."""
    path.write_bytes(bytes(3 * 4096))
    with pytest.raises(ValueError, match="is no buffer of a checkpoint"):
        StagingBuffer.open(path)


FILLER = """
import sys, time
from pathlib import Path
from elastic_adapter.core.checkpoint.staging import StagingBuffer
buffer = StagingBuffer.open(Path(sys.argv[1]))
step = int(sys.argv[2])
def copy(into):
    for at in range(0, len(into), 4096):
        into[at : at + 4096] = bytes([step % 251]) * len(into[at : at + 4096])
print("up", flush=True)
while True:
    step += 1
    buffer.release()
    buffer.fill(step, 1, str(step).encode() * 99, 2 << 20, copy)
    time.sleep(0.002)
"""


def test_kill_9_while_it_is_filled(path):
    """Whole, or nothing."""
    rng = random.Random(20261116)
    StagingBuffer.create(path, 3 * MIB).close()
    step, found = 0, 0
    for _ in range(int(os.environ.get("FAULTS", "100")) // 4):
        with subprocess.Popen([sys.executable, "-c", FILLER, str(path), str(step)], stdout=subprocess.PIPE) as filler:
            filler.stdout.readline()
            time.sleep(rng.random() * 0.02)
            filler.send_signal(signal.SIGKILL)
        buffer = StagingBuffer.open(path)
        held = buffer.take()
        if held is not None:
            step = held.step
            found += 1
            assert held.order == str(step).encode() * 99
            assert bytes(held.data) == bytes([step % 251]) * (2 << 20)
            held.data.release()
        buffer.close()
    assert found


def test_every_page_is_there_before_it_is_needed(path):
    """The first copy is as fast as the others: no page has to be found for it."""
    made = StagingBuffer.create(path, 8 * MIB)
    rows = Path("/proc/self/smaps").read_text().partition(str(path))[2].splitlines()
    resident = next(int(row.split()[1]) for row in rows if row.startswith("Rss:"))
    assert resident * 1024 >= made.capacity >= 8 * MIB


class TestBuffers:
    """The two of one worker."""

    @pytest.fixture
    def folders(self, tmp_path):
        """In memory, and beside the checkpoints."""
        memory, root = tmp_path / "memory", tmp_path / "root"
        memory.mkdir()
        root.mkdir()
        return memory, root

    @pytest.mark.parametrize("change", ["removed", "replaced"])
    def test_somebody_else_s_hands(self, folders, change):
        """What was removed can't be written by anybody: it is made anew, and does not stay busy for ever."""
        buffers = Buffers.at(folders[0], "slot-0", folders[1], "run", frozenset())
        for step in (1, 2):
            assert buffers.take(MIB, wait=False).fill(step, 1, b"order", 4, copier(b"data"))
        assert buffers.take(MIB, wait=False) is None
        for path in folders[0].iterdir():
            path.unlink()
            if change == "replaced":
                path.write_bytes(b"x")
        for step in (3, 4):
            taken = buffers.take(MIB, wait=False)
            assert taken.fill(step, 1, b"order", 4, copier(b"data"))
            assert StagingBuffer.open(taken.path).step == step
        assert buffers.take(MIB, wait=False) is None

    def test_who_ends_while_they_are_being_made(self, folders, monkeypatch):
        """Nothing is left of them, and nothing is made any more: whoever tidies up has been there already."""
        real, pieces, begun = os.posix_fallocate, [], threading.Event()

        def slowly(*reserved):
            pieces.append(reserved)
            begun.set()
            time.sleep(0.001)
            real(*reserved)

        monkeypatch.setattr(staging, "_PIECE", 4096)
        monkeypatch.setattr(os, "posix_fallocate", slowly)
        buffers = Buffers.at(folders[0], "slot-0", folders[1], "run", frozenset())
        buffers.prepare(100 * MIB)
        assert begun.wait(30)
        buffers.stop_preparing()
        made = len(pieces)
        assert os.listdir(folders[0]) == []
        time.sleep(0.05)
        assert len(pieces) == made < 100 * MIB // 4096

    def test_those_that_are_made_when_one_ends_stay(self, folders):
        """Who saves has yet to write what is in them."""
        buffers = Buffers.at(folders[0], "slot-0", folders[1], "run", frozenset())
        buffers.prepare(MIB)
        assert buffers.take(MIB, wait=False).fill(1, 1, b"order", 4, copier(b"data"))
        buffers.stop_preparing()
        assert StagingBuffer.open(folders[0] / "slot-0-0").step == 1

    @pytest.fixture
    def spilling(self, folders, monkeypatch):
        """Buffers of this slot, for which there is no memory."""
        monkeypatch.setattr(staging, "_room", lambda _, *, in_memory: 0 if in_memory else 1 << 40)

        def make(slot="slot-0", busy=()):
            return Buffers.at(folders[0], slot, folders[1], "run", frozenset(busy))

        return make

    def test_no_memory_and_something_to_be_written(self, folders, spilling):
        """The next worker of the slot leaves alone what is still to be written, and removes what is not."""
        buffers = spilling()
        for step in (1, 2):
            assert buffers.take(MIB, wait=False).fill(step, 1, b"order", 4, copier(b"data"))
        first, second = map(StagingBuffer.open, sorted(folders[1].iterdir()))
        again = spilling(busy=[first.path.name])
        assert first.in_place
        assert not second.in_place
        taken = again.take(MIB, wait=False)
        assert taken.path == second.path
        assert taken.fill(3, 2, b"order", 4, copier(b"more"))
        assert again.take(MIB, wait=False) is None
        assert StagingBuffer.open(first.path).take().step == 1
        first.release()
        assert again.take(MIB, wait=False).path == first.path
        assert len(os.listdir(folders[1])) == 2

    def test_there_is_memory_again(self, folders, spilling, monkeypatch):
        """It is taken; what a former worker left on the disk, and nobody is to write, goes."""
        left = spilling().take(MIB, wait=False)
        left.fill(1, 1, b"order", 4, copier(b"data"))
        monkeypatch.undo()
        assert spilling().take(MIB, wait=False).path.parent == folders[0]
        assert os.listdir(folders[1]) == []

    def test_a_worker_that_ends_before_its_state_is_written(self, folders, spilling):
        """Who writes it removes it, because nobody else will."""
        buffers = spilling()
        for step in (1, 2):
            assert buffers.take(MIB, wait=False).fill(step, 1, b"order", 4, copier(b"data"))
        one, other = map(StagingBuffer.open, sorted(folders[1].iterdir()))
        assert one.take() is not None
        one.release()
        buffers.remove()
        assert list(folders[1].iterdir()) == [other.path]
        other.take().data.release()
        other.release()
        assert list(folders[1].iterdir()) == []

    def test_a_worker_that_comes_before_the_state_of_the_last_one_is_written(self, folders, spilling):
        """The buffer is this one's then, and stays."""
        buffers = spilling()
        assert buffers.take(MIB, wait=False).fill(1, 1, b"order", 4, copier(b"data"))
        buffers.remove()
        (path,) = folders[1].iterdir()
        again = spilling(busy=[path.name])
        give_up(path, 1)
        assert path.exists()
        assert again.take(MIB, wait=False).path == path

    def test_a_launcher_that_was_killed(self, folders, spilling):
        """What it left beside the checkpoints goes when the next one on this machine begins; others' stays."""
        me = own_token()
        owners = me, f"{me.rpartition('-')[0]}-1", f"x{me}"
        mine, gone, elsewhere = (beside(folders[1], f"slot-0-12ab34cd@{owner}", "run2") for owner in owners)
        for path in (*mine, *gone, *elsewhere):
            path.touch()
        spilling()
        assert sorted(folders[1].iterdir()) == sorted([*mine, *elsewhere])
