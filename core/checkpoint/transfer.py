"""Moves bytes between buffers and files, and computes their checksums on the way, while they are in the cache.

Files are read by system calls, never by mapping them: a file that is cut short, or a disk that fails, is then an error
and not the end of the process.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_adapter.core.checkpoint.files import Buffer, Damaged, Expected, flat, open_plain
from elastic_adapter.core.checkpoint.hashing import CHUNK, check_hash, check_size, hasher

# A file that is read as a whole is read by so many threads, if it is large: they copy side by side.
_READERS = 2
LARGE = 16 << 20


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
    fd = open_plain(path)
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


class _Whole:
    """A file that several threads read piece by piece, side by side, and hash one after the other."""

    def __init__(self, path: str, fd: int, pieces: Iterator[tuple[int, memoryview | int]], hash: Follower) -> None:
        self._path = path
        self._fd = fd
        self._pieces = enumerate(pieces)
        self._hash = hash
        # How many pieces are hashed.
        self._hashed = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def read(self, readers: int) -> None:
        threads = [threading.Thread(target=self._work, name="elastic-reader", daemon=True) for _ in range(readers - 1)]
        for thread in threads:
            try:
                thread.start()
            except RuntimeError:
                # There can be no more threads. One is enough.
                threads = []
        self._work()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            scratch = memoryview(bytearray(CHUNK))
            while (piece := self._next()) is not None:
                number, (offset, into) = piece
                chunk = scratch[:into] if isinstance(into, int) else into
                _read(self._path, self._fd, offset, chunk)
                if not self._has_turn(number):
                    return
                self._hash.update(chunk)
                self._done()
        except BaseException as error:
            self._fail(error)

    def _next(self) -> tuple[int, tuple[int, memoryview | int]] | None:
        with self._changed:
            return next(self._pieces, None) if self._error is None else None

    def _has_turn(self, number: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._hashed == number or self._error is not None)
            return self._error is None

    def _done(self) -> None:
        with self._changed:
            self._hashed += 1
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            # The first one is what went wrong.
            self._error = self._error or error
            self._changed.notify_all()


def _read_all(path: str, fd: int, ordered: Sequence[Target], expected: Expected) -> None:
    check_size(path, os.fstat(fd).st_size, expected.size)
    made = hasher(expected.algorithm)
    several = expected.size >= LARGE and len(os.sched_getaffinity(0)) > 1
    _Whole(path, fd, _pieces(path, ordered, expected.size), made).read(_READERS if several else 1)
    check_hash(path, made.hexdigest(), expected)


def _pieces(path: str, ordered: Sequence[Target], size: int) -> Iterator[tuple[int, memoryview | int]]:
    """The whole file in small pieces: where each begins, and the memory that it is for, or how long it is."""
    position = 0
    for target in (*ordered, Target(size, memoryview(b""))):
        if position > target.offset:
            raise Damaged(path, "its tensors overlap")
        while position < target.offset:
            between = min(CHUNK, target.offset - position)
            yield position, between
            position += between
        for chunk in _chunks(target.into):
            yield position, chunk
            position += len(chunk)


def _fill(path: str, fd: int, target: Target, followers: Sequence[Follower]) -> None:
    position = target.offset
    for chunk in _chunks(target.into):
        _read(path, fd, position, chunk)
        for follower in followers:
            follower.update(chunk)
        position += len(chunk)


def _read(path: str, fd: int, position: int, into: memoryview) -> None:
    filled = 0
    while filled < len(into):
        count = os.preadv(fd, [into[filled:]], position + filled)
        if count == 0:
            raise Damaged(path, f"it ends at byte {position + filled}")
        filled += count


def _chunks(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]
