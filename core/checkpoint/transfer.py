"""Moves bytes between buffers and files, and computes their checksums on the way, while they are in the cache.

Files are read by system calls, never by mapping them: a file that is cut short, or a disk that fails, is then an error
and not the end of the process.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_adapter.core.checkpoint.files import Buffer, Damaged, Expected, flat
from elastic_adapter.core.checkpoint.hashing import CHUNK, check_hash, check_size, hasher


class Writable(Protocol):
    """A file opened for writing, buffered or not."""

    def write(self, data: memoryview, /) -> int | None: ...


class Follower(Protocol):
    """Whatever wants to see bytes that pass by."""

    def update(self, data: Buffer, /) -> None: ...


class Crc32:
    """The checksum of zip files."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, data: Buffer) -> None:
        self.value = zlib.crc32(data, self.value)


class Output:
    """A file that is written from front to back, and its checksum."""

    def __init__(self, file: Writable, algorithm: str) -> None:
        self.position = 0
        self._file = file
        self._hash = hasher(algorithm)

    def write(self, data: Buffer, *followers: Follower) -> None:
        for chunk in _chunks(flat(data)):
            self._hash.update(chunk)
            for follower in followers:
                follower.update(chunk)
            self._put(chunk)

    def hexdigest(self) -> str:
        """The checksum of all that was written so far."""
        return self._hash.hexdigest()

    def _put(self, chunk: memoryview) -> None:
        while chunk:
            count = self._file.write(chunk)
            if not count:
                raise BlockingIOError("a checkpoint can't be written to a file that does not block")
            self.position += count
            chunk = chunk[count:]


@dataclass(frozen=True, slots=True)
class Target:
    """Memory that a stretch of a file is to be read into; crc32 is checked if it is known and no better checksum is."""

    offset: int
    into: memoryview
    crc32: int | None = None


def read_into(path: str, targets: Sequence[Target], expected: Expected | None = None) -> None:
    """Fills the targets from the file. If the file is not the expected one, they hold anything when Damaged is raised.

    With something expected, every byte of the file is read and checked, else only what the targets need.
    """
    ordered = sorted((target for target in targets if target.into), key=lambda target: target.offset)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    # From a disk, that is two or three times as fast.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    try:
        if expected is None:
            for target in ordered:
                crc = Crc32()
                _fill(path, fd, target, () if target.crc32 is None else (crc,))
                if target.crc32 not in (None, crc.value):
                    raise Damaged(path, f"the checksum of its bytes from {target.offset} on is wrong")
        else:
            _read_all(path, fd, ordered, expected)
    finally:
        os.close(fd)


def _read_all(path: str, fd: int, ordered: Sequence[Target], expected: Expected) -> None:
    check_size(path, os.fstat(fd).st_size, expected.size)
    made = hasher(expected.algorithm)
    scratch = memoryview(bytearray(CHUNK))
    position = 0
    for target in (*ordered, Target(expected.size, memoryview(b""))):
        if position > target.offset:
            raise Damaged(path, "its tensors overlap")
        while position < target.offset:
            between = scratch[: target.offset - position]
            _fill(path, fd, Target(position, between), (made,))
            position += len(between)
        _fill(path, fd, target, (made,))
        position += len(target.into)
    check_hash(path, made.hexdigest(), expected)


def _fill(path: str, fd: int, target: Target, followers: Sequence[Follower]) -> None:
    position = target.offset
    for chunk in _chunks(target.into):
        filled = 0
        while filled < len(chunk):
            count = os.preadv(fd, [chunk[filled:]], position + filled)
            if count == 0:
                raise Damaged(path, f"it ends at byte {position + filled}")
            filled += count
        for follower in followers:
            follower.update(chunk)
        position += filled


def _chunks(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]
