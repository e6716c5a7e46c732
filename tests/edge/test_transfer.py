"""Bytes on their way into a file and out of one."""

import io
import os
import random
import threading

import pytest

from elastic_adapter.core.checkpoint import transfer
from elastic_adapter.core.checkpoint.files import Damaged, Expected, Hole, Skeleton, memory
from elastic_adapter.core.checkpoint.hashing import digest
from elastic_adapter.core.checkpoint.transfer import Output, Target, read_into


class Stingy(io.BytesIO):
    """A file that takes a few bytes at a time, as a raw one may."""

    def write(self, data):
        return super().write(data[:1000])


def test_everything_is_written_and_counted():
    """Also where the file takes less than it is given."""
    file = Stingy()
    output = Output(file, "sha256")
    data = random.Random(0).randbytes(3_000_000)
    output.write(data)
    output.write(memoryview(data).cast("I"))
    output.write(b"")
    assert file.getvalue() == data + data
    assert (output.position, output.hexdigest()) == (6_000_000, digest("sha256", data, data))


def test_a_file_that_takes_nothing_is_an_error():
    """Not an endless loop."""

    class Full(io.BytesIO):
        def write(self, data):
            return None

    with pytest.raises(BlockingIOError):
        Output(Full(), "md5").write(b"x")


@pytest.fixture(params=[1, 2], ids=["one reads", "two read"])
def file(request, tmp_path, monkeypatch):
    """It is read by one thread, or by two side by side as a large one is."""
    monkeypatch.setattr(transfer, "LARGE", 1 if request.param == 2 else 1 << 30)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    path = tmp_path / "file"
    path.write_bytes(random.Random(1).randbytes(5_000_000))
    return path


def test_targets_are_filled_and_the_rest_is_checked(file):
    """In any order, with and without something between them."""
    data = file.read_bytes()
    expected = Expected(len(data), digest("xxh3_128", data))
    for given in (None, expected):
        stretches = [(4_000_000, 1_000_000), (10, 90), (100, 2_500_000), (100, 0)]
        targets = [Target(offset, memoryview(bytearray(size))) for offset, size in stretches]
        read_into(str(file), targets, given)
        assert all(bytes(target.into) == data[target.offset :][: len(target.into)] for target in targets)
    read_into(str(file), [], expected)


@pytest.mark.parametrize("at", [0, 9, 10, 99, 3_000_000, 4_999_999])
def test_a_flipped_bit_anywhere_is_damage(file, at):
    """In what is read and in what is passed over."""
    data = bytearray(file.read_bytes())
    expected = Expected(len(data), digest("xxh3_128", data))
    data[at] ^= 0x10
    file.write_bytes(data)
    with pytest.raises(Damaged, match="its xxh3_128 is"):
        read_into(str(file), [Target(10, memoryview(bytearray(90)))], expected)


def test_a_file_that_is_too_short_is_damage(file):
    """With and without something expected."""
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    target = Target(4_999_990, memoryview(bytearray(10)))
    with pytest.raises(Damaged, match="it has 4999999 bytes instead of 5000000"):
        read_into(str(file), [target], Expected(len(data), digest("xxh3_128", data)))
    with pytest.raises(Damaged, match="it ends at byte 4999999"):
        read_into(str(file), [target])


def test_targets_that_overlap_are_damage(file):
    """No writer lays out two tensors like that."""
    data = file.read_bytes()
    targets = [Target(10, memoryview(bytearray(90))), Target(50, memoryview(bytearray(10)))]
    with pytest.raises(Damaged, match="its tensors overlap"):
        read_into(str(file), targets, Expected(len(data), digest("xxh3_128", data)))


@pytest.mark.parametrize("fails", range(5))
def test_a_device_that_fails(file, monkeypatch, fails):
    """Whoever of those who read meets it: none waits for another, and the error is the caller's."""
    data, real, reads = file.read_bytes(), os.preadv, []

    def failing(fd, into, offset):
        reads.append(offset)
        if offset == fails << 20:
            raise OSError(5, "Input/output error")
        return real(fd, into, offset)

    monkeypatch.setattr(os, "preadv", failing)
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="Input/output error"):
        read_into(str(file), [], Expected(len(data), digest("xxh3_128", data)))
    # Those of tests before this one may end meanwhile.
    assert set(threading.enumerate()) <= before


def test_there_can_be_no_more_threads(file, monkeypatch):
    """One is enough."""

    def refused(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    data = file.read_bytes()
    target = Target(0, memoryview(bytearray(len(data))))
    read_into(str(file), [target], Expected(len(data), digest("xxh3_128", data)))
    assert bytes(target.into) == data


def test_memory_is_written_in_place():
    """An address and a size make a buffer."""
    import ctypes

    owner = ctypes.create_string_buffer(b"abcdef", 6)
    view = memory(ctypes.addressof(owner), 6)
    view[2:4] = b"XY"
    assert (owner.raw, bytes(view)) == (b"abXYef", b"abXYef")
    assert bytes(memory(0, 0)) == b""


def test_a_skeleton_travels_as_bytes():
    """To a process that has no framework."""
    skeleton = Skeleton(b"text\0\xff", (Hole(3, 1 << 40), Hole(6, 0)))
    assert Skeleton.unpack(memoryview(skeleton.pack())) == skeleton
    assert Skeleton.unpack(Skeleton(b"", ()).pack()) == Skeleton(b"", ())
    assert skeleton.nbytes == 1 << 40
