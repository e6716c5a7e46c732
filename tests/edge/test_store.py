"""A folder of checkpoints: whatever happens to those who write it, what is there is whole, or known not to be."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_adapter.core.checkpoint.files import Region
from elastic_adapter.core.checkpoint.hashing import digest
from elastic_adapter.core.checkpoint.manifest import MANIFEST, MD5_SUMS, FileEntry, Manifest, TensorEntry, folder_name
from elastic_adapter.core.checkpoint.store import Broken, Checkpoint, Store, merged, regions

# Kills of whole trainings are tried elsewhere, as often as FAULTS says.
FAULTS = int(os.environ.get("FAULTS", "100")) // 5
DATA = random.Random(7).randbytes(200_000)


def manifest(step, generation=1, data=DATA, name="model.bin"):
    pieces = ((at, data[at : at + 50_000]) for at in range(0, len(data), 50_000))
    tensors = tuple(
        TensorEntry(f"w{at}", (len(piece),), "uint8", len(piece), at, digest("xxh3_128", piece)) for at, piece in pieces
    )
    file = FileEntry(name, len(data), digest("xxh3_128", data), tensors)
    return Manifest("j", "1", "plain", {"python": "3"}, step, generation, 1, "xxh3_128", (file,), 1.0)


def save(store, step, generation=1, data=DATA, **options):
    draft = store.draft(step, generation, "run1")
    with draft.file("model.bin") as file:
        file.write(data)
    return draft.finish(manifest(step, generation, data), **options)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "checkpoints")


def test_it_exists_when_it_is_finished(store):
    """Not a moment earlier."""
    assert list(store.newest_first()) == []
    draft = store.draft(10, 1, "run1")
    with draft.file("model.bin") as file:
        file.write(DATA)
    assert list(store.newest_first()) == []
    place = draft.finish(manifest(10))
    (found,) = store.newest_first()
    assert found == Checkpoint(place, manifest(10))
    assert (found.name, found.size) == (folder_name(10, 1), len(DATA))
    assert store.trouble(found) == store.trouble(found, how="sample", stored=True) == ""
    assert (place / "model.bin").read_bytes() == DATA


def test_several_ranks_write_one(store):
    """Into the same draft; one of them finishes it with what all have written."""
    parts = []
    for rank in range(3):
        draft = store.draft(5, 2, "run1")
        with draft.file(f"rank_{rank}.bin") as file:
            file.write(DATA)
        parts.append(manifest(5, 2, name=f"rank_{rank}.bin"))
    draft.finish(merged(parts))
    (found,) = store.newest_first()
    assert [file.name for file in found.manifest.files] == ["rank_0.bin", "rank_1.bin", "rank_2.bin"]
    assert store.trouble(found) == ""


def test_the_newest_comes_first(store):
    """By steps, then by generation."""
    for step, generation in ((10, 1), (30, 1), (20, 2), (30, 2)):
        save(store, step, generation)
    assert [(each.manifest.step, each.manifest.generation) for each in store.newest_first()] == [
        (30, 2),
        (30, 1),
        (20, 2),
        (10, 1),
    ]


def test_what_was_saved_stays_as_it_is(store):
    """The same step of the same generation again: the first one is kept."""
    save(store, 10)
    save(store, 10, data=DATA[::-1])
    (found,) = store.newest_first()
    assert store.trouble(found) == ""
    assert (found.path / "model.bin").read_bytes() == DATA
    assert os.listdir(store.root) == [folder_name(10, 1)]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_modes_are_the_umask_s(store, umask):
    """Colleagues may read what the user lets them."""
    before = os.umask(umask)
    try:
        place = save(store, 1, md5=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE(place.stat().st_mode) == 0o777 & ~umask
    for path in place.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_md5sum_is_content(store):
    """The sums are in its format."""
    place = save(store, 1, md5=True)
    assert sorted(each.name for each in place.iterdir()) == sorted((MANIFEST, MD5_SUMS, "model.bin"))
    assert subprocess.run(["md5sum", "-c", MD5_SUMS], cwd=place, capture_output=True, check=False).returncode == 0


def broken(place: Path, how: str) -> None:
    path = place / "model.bin"
    match how:
        case "truncated":
            os.truncate(path, 199_999)
        case "longer":
            path.write_bytes(DATA + b"x")
        case "missing":
            path.unlink()
        case "flipped":
            flip(path, 123_456)
        case "no manifest":
            (place / MANIFEST).unlink()
        case "manifest":
            flip(place / MANIFEST, 100)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["truncated", "longer", "missing", "flipped", "no manifest", "manifest"])
def test_a_broken_one_is_known(store, how):
    """And put out of the way, with its reason; the one before is still there."""
    save(store, 10)
    broken(save(store, 20), how)
    newest, before = store.newest_first()
    why = newest.why if isinstance(newest, Broken) else store.trouble(newest)
    assert why
    assert "\n" not in why
    assert store.trouble(before) == ""
    place = store.quarantine(newest.path)
    assert place.name == folder_name(20, 1) + ".broken"
    assert [each.name for each in store.newest_first()] == [folder_name(10, 1)]


def test_one_under_another_s_name(store):
    """A folder that was copied or renamed is not what its name says."""
    os.rename(save(store, 10), store.root / folder_name(99, 1))
    (found,) = store.newest_first()
    assert isinstance(found, Broken)
    assert "its manifest is of step 10" in found.why


@pytest.mark.parametrize("at", range(0, len(DATA), 12_345))
def test_a_flipped_bit_anywhere_is_found(store, at):
    """By the whole file's hash; by its tensor's, where the sample has it."""
    place = save(store, 1)
    flip(place / "model.bin", at)
    (found,) = store.newest_first()
    assert "xxh3_128" in store.trouble(found, stored=True)


def test_what_is_kept(store):
    """The last ones, those for ever, and always the newest; drafts and broken ones are not counted."""
    for step in range(10, 80, 10):
        save(store, step)
    broken(store.root / folder_name(70, 1), "manifest")
    assert store.prune(folder_name(60, 1), 2, 30) == tuple(folder_name(step, 1) for step in (10, 20, 40))
    assert sorted(os.listdir(store.root)) == [folder_name(step, 1) for step in (30, 50, 60, 70)]
    assert store.prune(folder_name(60, 1), None, None) == ()


def test_one_that_was_just_saved_is_kept(store):
    """Though others have more steps: who went back behind them goes on from here, and does not touch them."""
    for step in (10, 40, 50):
        save(store, step)
    save(store, 20, generation=2)
    assert store.prune(folder_name(20, 2), 1, None) == (folder_name(10, 1),)
    save(store, 30, generation=2)
    assert store.prune(folder_name(30, 2), 1, None) == (folder_name(20, 2),)
    assert sorted(os.listdir(store.root)) == [folder_name(30, 2), folder_name(40, 1), folder_name(50, 1)]
    save(store, 60, generation=2)
    assert len(store.prune(folder_name(60, 2), 2, None)) == 2
    assert sorted(os.listdir(store.root)) == [folder_name(50, 1), folder_name(60, 2)]


def test_drafts_that_nobody_finishes_are_swept(store):
    """Those that somebody still works on are not."""
    save(store, 1)
    old, young = store.draft(2, 1, "run1"), store.draft(3, 2, "run1")
    assert store.sweep(keep=lambda name: name == young.path.name) == (old.path.name,)
    assert sorted(os.listdir(store.root)) == sorted((young.path.name, folder_name(1, 1)))


def test_what_was_put_aside_to_be_replaced_is_not_swept(store):
    """It is no draft, and may be the only copy."""
    save(store, 1)
    (store.root / ".best.old.elastic-tmp").mkdir()
    (store.root / ".best.old.elastic-tmp.swept.elastic-tmp").mkdir()
    assert store.sweep() == (".best.old.elastic-tmp.swept.elastic-tmp",)
    assert sorted(os.listdir(store.root)) == [".best.old.elastic-tmp", folder_name(1, 1)]


def test_regions_are_the_tensors():
    """As verification wants them."""
    (file,) = manifest(1).files
    assert regions(file)[1] == Region("w50000", "uint8", (50_000,), 50_000, 50_000, file.tensors[1].hash)


def test_a_disk_that_is_full(store, tmp_path):
    """What was saved before is not touched, and nothing half is left to be taken for a checkpoint."""
    save(store, 1)
    if os.geteuid() != 0:
        pytest.skip("a file system of its own needs root")
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small)], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        full = Store(small)
        save(full, 1)
        with pytest.raises(OSError, match="No space left"):
            save(full, 2)
        full.sweep()
        (found,) = full.newest_first()
        assert (found.manifest.step, full.trouble(found)) == (1, "")
    finally:
        subprocess.run(["umount", str(small)], check=True)


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
import test_store
from pathlib import Path
store = test_store.Store(Path(sys.argv[1]))
step = int(sys.argv[3])
while True:
    step += 1
    test_store.save(store, step, data=test_store.DATA[step % 1000:])
    print(step, flush=True)
    store.prune(test_store.folder_name(step, 1), 3, None)
"""


@pytest.mark.timeout(300)
def test_kill_9_at_any_moment(store):
    """What was said to be saved is there and whole; nothing that is there is torn."""
    rng = random.Random(20261116)
    last = 0
    for trial in range(FAULTS):
        argv = [sys.executable, "-c", WRITER, str(store.root), str(Path(__file__).parent), str(last)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as writer:
            for _ in range(rng.randint(1, 3)):
                last = int(writer.stdout.readline())
            time.sleep(rng.random() * 0.01)
            writer.send_signal(signal.SIGKILL)
            said = writer.stdout.read().split()
            last = int(said[-1]) if said else last
        found = list(store.newest_first())
        assert all(isinstance(each, Checkpoint) for each in found), trial
        assert found[0].manifest.step >= last
        assert [store.trouble(each) for each in found] == [""] * len(found), trial
        last = found[0].manifest.step
        if trial % 10 == 0:
            store.sweep()
    assert len(list(store.newest_first())) <= 5
