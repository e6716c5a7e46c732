"""Checksums of buffers and files, and the comparison of a file with the checksum that was noted.

A file that was just written can be read back from the storage instead of from memory: past the page cache where the
file system allows that (O_DIRECT), else after the kernel was asked to forget the pages. A file system in memory has no
other place to read from, and the kernel may keep pages that are in use: there it is the same as reading the cache.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Protocol

import xxhash

from elastic_adapter.core.checkpoint.files import Buffer, Damaged, Expected, Region, open_plain

ALGORITHMS = ("xxh3_128", "sha256", "md5")
# Small enough to stay in the processor's cache between two uses of the same bytes.
CHUNK = 1 << 20
# Reads past the page cache have to be large, and aligned to the blocks of the device.
_DIRECT_CHUNK = 8 << 20
_ALIGNMENT = 4096
# How file systems say that they know no direct reads.
_NOT_DIRECT = (errno.EINVAL, errno.ENOTSUP)


class Hasher(Protocol):
    """Lets other threads run while it works on a large buffer."""

    def update(self, data: Buffer, /) -> None: ...

    def hexdigest(self) -> str: ...


def hasher(algorithm: str) -> Hasher:
    match algorithm:
        case "xxh3_128":
            return xxhash.xxh3_128()
        case "sha256":
            return hashlib.sha256()
        case "md5":
            return hashlib.md5(usedforsecurity=False)
        case _:
            raise ValueError(f"no such checksum: {algorithm}; there are {', '.join(ALGORITHMS)}")


def digest(algorithm: str, *buffers: Buffer) -> str:
    # By update even for a single buffer: xxhash's one-step functions keep all other threads waiting.
    made = hasher(algorithm)
    for buffer in buffers:
        made.update(buffer)
    return made.hexdigest()


class Reader:
    """Reads stretches of a file, each in chunks that are valid until the next one is asked for."""

    def __init__(self, path: str, *, stored: bool = False) -> None:
        self.path = path
        self._direct = False
        self._fd = self._open_stored() if stored else open_plain(path)
        # From a disk, that is two or three times as fast.
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self._buffer = mmap.mmap(-1, _DIRECT_CHUNK if self._direct else CHUNK)
        self.size = os.fstat(self._fd).st_size

    def close(self) -> None:
        os.close(self._fd)

    def chunks(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        end = offset + nbytes
        while offset < end:
            chunk = self._read(offset, end - offset)
            if not chunk:
                raise Damaged(self.path, f"it ends at byte {offset}, {end - offset} bytes early")
            offset += len(chunk)
            yield chunk

    def _read(self, offset: int, most: int) -> memoryview:
        view = memoryview(self._buffer)
        if not self._direct:
            return view[: os.preadv(self._fd, [view[:most]], offset)]
        skipped = offset % _ALIGNMENT
        try:
            count = os.preadv(self._fd, [view[: -(-(skipped + most) // _ALIGNMENT) * _ALIGNMENT]], offset - skipped)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            self._forget_pages()
            return self._read(offset, most)
        return view[skipped : min(count, skipped + most)]

    def _open_stored(self) -> int:
        try:
            fd = open_plain(self.path, os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            self._fd = open_plain(self.path)
            self._forget_pages()
            return self._fd
        self._direct = True
        return fd

    def _forget_pages(self) -> None:
        """The way around for file systems that know no direct reads, or not at this alignment."""
        if self._direct:
            os.close(self._fd)
            self._fd = open_plain(self.path)
            self._direct = False
        # Only clean pages are dropped.
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)


def hash_file(path: str, algorithm: str, *, stored: bool = False, progress: Callable[[int], None] | None = None) -> str:
    """The checksum of a whole file; progress is told the bytes of each step."""
    with closing(Reader(path, stored=stored)) as reader:
        return _hash(reader, 0, reader.size, algorithm, progress)


def verify_file(
    path: str, expected: Expected, *, stored: bool = True, progress: Callable[[int], None] | None = None
) -> None:
    """Damaged, when size or checksum are not the expected ones."""
    with closing(Reader(path, stored=stored)) as reader:
        check_size(path, reader.size, expected.size)
        found = _hash(reader, 0, expected.size, expected.algorithm, progress)
    check_hash(path, found, expected)


def verify_sample(
    path: str, expected: Expected, regions: Sequence[Region], *, share: float, seed: int, stored: bool = True
) -> int:
    """Checks the file's size and the tensors of a random choice of its regions; gives the number of bytes checked.

    What lies between the tensors (a directory, a pickle) is not looked at.
    """
    hashed = [region for region in regions if region.hash is not None]
    chosen = random.Random(seed).sample(hashed, min(len(hashed), max(1, round(len(hashed) * share))))  # noqa: S311
    with closing(Reader(path, stored=stored)) as reader:
        check_size(path, reader.size, expected.size)
        for region in sorted(chosen, key=lambda region: region.offset):
            if _hash(reader, region.offset, region.nbytes, expected.algorithm, None) != region.hash:
                raise Damaged(path, f"the {expected.algorithm} of {region.name} is not the one it was written with")
    return sum(region.nbytes for region in chosen)


def check_size(path: str, found: int, expected: int) -> None:
    if found != expected:
        raise Damaged(path, f"it has {found} bytes instead of {expected}")


def check_hash(path: str, found: str, expected: Expected) -> None:
    if found != expected.hash:
        raise Damaged(path, f"its {expected.algorithm} is {found} instead of {expected.hash}")


def _hash(reader: Reader, offset: int, nbytes: int, algorithm: str, progress: Callable[[int], None] | None) -> str:
    made = hasher(algorithm)
    for chunk in reader.chunks(offset, nbytes):
        made.update(chunk)
        if progress is not None:
            progress(len(chunk))
    return made.hexdigest()
