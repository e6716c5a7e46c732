"""Checksums of files, and how a file that is not what was written is found out."""

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import random
import shutil
import subprocess
import threading
import time

import pytest
import xxhash

from elastic_adapter.core.checkpoint import hashing
from elastic_adapter.core.checkpoint.files import Damaged, Expected, Region
from elastic_adapter.core.checkpoint.hashing import digest, hash_file, hasher, verify_file, verify_sample

SIZES = [0, 1, 4095, 4096, 4097, hashing.CHUNK - 1, hashing.CHUNK + 1, (8 << 20) + 5]


def content(size):
    return random.Random(size).randbytes(size)


@pytest.fixture(params=["disk", "memory"])
def folder(request, tmp_path):
    """A folder on the disk, and one in a file system that knows no direct reads."""
    if request.param == "disk":
        yield tmp_path
        return
    place = f"/dev/shm/elastic-adapter-test-{os.getpid()}"
    os.mkdir(place)
    yield place
    shutil.rmtree(place)


@pytest.mark.parametrize("algorithm", hashing.ALGORITHMS)
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_file_has_the_checksum_of_its_bytes(folder, size, stored, algorithm):
    """Whatever its size and wherever it is read from; a step of the progress is told for each part."""
    path, data, steps = f"{folder}/file", content(size), []
    with open(path, "wb") as file:
        file.write(data)
    known = {"xxh3_128": xxhash.xxh3_128_hexdigest, "sha256": lambda data: hashlib.sha256(data).hexdigest()}
    expected = known.get(algorithm, lambda data: hashlib.md5(data).hexdigest())(data)
    assert hash_file(path, algorithm, stored=stored, progress=steps.append) == digest(algorithm, data) == expected
    assert sum(steps) == size
    verify_file(path, Expected(size, expected, algorithm), stored=stored)


def test_md5_is_md5sums(tmp_path):
    """The option for ``md5sum -c`` gives what md5sum gives."""
    (tmp_path / "file").write_bytes(content(100_000))
    said = subprocess.run(["md5sum", tmp_path / "file"], check=True, capture_output=True, text=True, timeout=10).stdout
    assert said.split()[0] == hash_file(str(tmp_path / "file"), "md5")


def test_an_unknown_checksum_is_named():
    """A misspelt setting says what there is."""
    with pytest.raises(ValueError, match=r"no such checksum: crc; there are xxh3_128, sha256, md5"):
        hasher("crc")


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("change", ["cut", "grown", "flipped", "empty"])
def test_another_file_is_found_out(folder, stored, change):
    """Cut, grown, or with one bit changed, in the last byte for instance."""
    path, data = f"{folder}/file", content(3 << 20)
    changed = {"cut": data[:-1], "grown": data + b"\0", "flipped": data[:-1] + bytes([data[-1] ^ 1]), "empty": b""}
    with open(path, "wb") as file:
        file.write(changed[change])
    with pytest.raises(Damaged, match=r"file is damaged: its? ") as caught:
        verify_file(path, Expected(len(data), digest("xxh3_128", data)), stored=stored)
    assert caught.value.path == path


def test_what_is_on_the_disk_is_read_not_what_is_in_memory(tmp_path):
    """A read from storage does not go through the page cache: it leaves no page of the file there."""
    path = str(tmp_path / "file")
    with open(path, "wb") as file:
        file.write(content(4 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pages_in_memory(path):
        pytest.skip("this file system keeps its pages")
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system knows no direct reads")
    hash_file(path, "xxh3_128", stored=True)
    assert pages_in_memory(path) == 0
    hash_file(path, "xxh3_128")
    assert pages_in_memory(path) == 1024


REFUSALS = [errno.EINVAL, errno.ENOTSUP]


@pytest.mark.parametrize("number", [*REFUSALS, errno.EIO])
def test_a_file_system_that_opens_nothing_for_direct_reads(tmp_path, monkeypatch, number):
    """It is read another way; what is a failure stays one."""
    path, real = str(tmp_path / "file"), os.open
    with open(path, "wb") as file:
        file.write(content(4 << 20))

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(number, "no")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    if number in REFUSALS:
        assert hash_file(path, "md5", stored=True) == hash_file(path, "md5")
    else:
        with pytest.raises(OSError, match="no"):
            hash_file(path, "md5", stored=True)


@pytest.mark.parametrize("number", REFUSALS)
def test_pages_are_forgotten_where_direct_reads_fail(tmp_path, monkeypatch, number):
    """A file system may open a file for direct reads and refuse each of them."""
    path, read = str(tmp_path / "file"), os.preadv
    with open(path, "wb") as file:
        file.write(content(4 << 20))

    def refuse(fd, buffers, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(number, "no")
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    assert hash_file(path, "md5", stored=True) == hash_file(path, "md5")


def pages_in_memory(path):
    """As mincore(2) counts them."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as mapped:
        pages = (len(mapped) + 4095) // 4096
        seen = (ctypes.c_ubyte * pages)()
        address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(mapped)), seen) == 0
        return sum(page & 1 for page in seen)


def test_a_sample_looks_at_some_tensors(tmp_path):
    """A share of the regions, chosen by a seed; a bit outside of them goes unseen, the file's size does not."""
    path, data = str(tmp_path / "file"), bytearray(content(1 << 20))
    regions = [region(data, f"t{at}", at * 10_000 + 17, 5_000) for at in range(100)]
    expected = Expected(len(data), digest("xxh3_128", data))

    def write():
        with open(path, "wb") as file:
            file.write(data)

    write()
    assert verify_sample(path, expected, regions, share=1.0, seed=1) == 500_000
    assert verify_sample(path, expected, regions, share=0.1, seed=1) == 50_000
    assert verify_sample(path, expected, regions, share=0.0, seed=1) == 5_000
    assert verify_sample(path, expected, [], share=1.0, seed=1) == 0
    data[regions[42].offset + 4_999] ^= 4
    write()
    with pytest.raises(Damaged, match="the xxh3_128 of t42 is not the one it was written with"):
        verify_sample(path, expected, regions, share=1.0, seed=1, stored=False)
    found = [damaged_in_sample(path, expected, regions, seed) for seed in range(200)]
    assert 5 < sum(found) < 50
    data[regions[42].offset + 4_999] ^= 4
    data.append(0)
    write()
    with pytest.raises(Damaged, match="it has 1048577 bytes instead of 1048576"):
        verify_sample(path, expected, regions, share=0.1, seed=1)


def damaged_in_sample(path, expected, regions, seed):
    try:
        verify_sample(path, expected, regions, share=0.1, seed=seed, stored=False)
    except Damaged:
        return True
    return False


def region(data, name, offset, nbytes):
    return Region(name, "uint8", (nbytes,), offset, nbytes, digest("xxh3_128", data[offset : offset + nbytes]))


def test_a_region_outside_of_the_file_is_an_error(tmp_path):
    """Not an endless loop, and not silence."""
    (tmp_path / "file").write_bytes(bytes(10))
    beyond = Region("t", "uint8", (8,), 5, 8, "0")
    with pytest.raises(Damaged, match="it ends at byte 10, 3 bytes early"):
        verify_sample(str(tmp_path / "file"), Expected(10, ""), [beyond], share=1.0, seed=0, stored=False)


@pytest.mark.parametrize("algorithm", hashing.ALGORITHMS)
def test_other_threads_run_meanwhile(algorithm):
    """A checksum of a large buffer does not stop the interpreter."""
    data, done, turns = bytes(256 << 20), threading.Event(), 0
    made = hasher(algorithm)
    thread = threading.Thread(target=lambda: (made.update(data), done.set()))
    thread.start()
    while not done.is_set():
        turns += 1
        time.sleep(0.0001)
    thread.join()
    assert turns > 3
