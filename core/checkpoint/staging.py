"""Memory that a worker copies its state into and that outlives it: plain files in /dev/shm, mapped by both sides.

    page 0     magic, mark, step, generation, bytes of the order, bytes of the data, checksum of these numbers, left
    page 1 ..  the order: what is to be made of the data (JSON), then the data, which begins at a page of its own

The mark is written last, and by one side at a time: the worker turns EMPTY into FILLING into FULL, whoever saves turns
FULL into SAVING into EMPTY. Who is killed while it fills leaves FILLING behind, which nobody takes for a state. The
worker says by ``left`` that it will not fill this one again: who writes it then removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from elastic_adapter.core.errors import ElasticError
from elastic_adapter.core.oom import memory_left

EMPTY, FILLING, FULL, SAVING = range(4)
_PAGE = mmap.PAGESIZE
_MAGIC = 0x656C61737469_6331
_HEAD = struct.Struct("=QQ")
_FACTS = struct.Struct("=qqQQ")
_SUM = struct.Struct("=I")
_MARK = slice(8, 16)
_LEFT = 56
# In how large pieces a buffer is made and touched.
_PIECE = 64 << 20
_SMALL_PIECE = 1 << 20
_MADV_POPULATE_WRITE = 23


class NoRoom(ElasticError):
    """There is not enough shared memory for a copy of the state."""


class Unneeded(ElasticError):
    """Whoever wanted a buffer does not want it any more."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a full buffer holds."""

    step: int
    generation: int
    order: bytes
    data: memoryview


class StagingBuffer:
    """One copy of one worker's state."""

    def __init__(self, path: Path, memory: mmap.mmap, file: os.stat_result) -> None:
        self.path = path
        self._memory = memory
        self._view = memoryview(memory)
        self._file = file

    @classmethod
    def create(
        cls, path: Path, nbytes: int, *, in_memory: bool = True, go_on: Callable[[], bool] = lambda: True
    ) -> StagingBuffer:
        """Make one with room for so many bytes, order included; every page of it is touched. Raises NoRoom.

        Other threads run meanwhile. Unneeded is raised, and nothing left, as soon as ``go_on`` says no.
        """
        size = _PAGE + -(-nbytes // _PAGE) * _PAGE + _PAGE
        if size > (room := _room(path.parent, in_memory=in_memory)):
            raise NoRoom(f"{path.parent} has room for {room >> 20} MiB, and {size >> 20} MiB are needed")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Reserved, not only promised: a page that can't be had later would be the end of whoever touches it.
            for at in _pieces(size, _PIECE, go_on):
                os.posix_fallocate(fd, at, min(_PIECE, size - at))
            memory, facts = mmap.mmap(fd, size), os.fstat(fd)
            _touch(memory, go_on)
        except Unneeded:
            path.unlink(missing_ok=True)
            raise
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise NoRoom(f"{path.parent} has no room for {size >> 20} MiB after all: {error.strerror}") from error
            raise
        finally:
            os.close(fd)
        made = cls(path, memory, facts)
        made._view[: _HEAD.size] = _HEAD.pack(_MAGIC, EMPTY)
        return made

    @classmethod
    def open(cls, path: Path) -> StagingBuffer:
        """One that a worker made. Raises OSError, or ValueError where it is none."""
        with open(path, "r+b") as file:
            memory, facts = mmap.mmap(file.fileno(), 0), os.fstat(file.fileno())
        found = cls(path, memory, facts)
        if len(memory) < 2 * _PAGE or _HEAD.unpack_from(memory)[0] != _MAGIC:
            found.close()
            raise ValueError(f"{path} is no buffer of a checkpoint")
        return found

    @property
    def capacity(self) -> int:
        """How many bytes of order and data it takes."""
        return len(self._memory) - 2 * _PAGE

    @property
    def in_place(self) -> bool:
        """Whether others find it by its path: who tidies up the memory of a user that has logged out may remove it."""
        try:
            return os.path.samestat(os.stat(self.path), self._file)
        except (FileNotFoundError, NotADirectoryError):
            return False

    @property
    def mark(self) -> int:
        return int.from_bytes(self._view[_MARK], sys.byteorder)

    @property
    def step(self) -> int | None:
        """Of the state that it holds; None: nothing whole."""
        if self.mark not in (FULL, SAVING):
            return None
        return int(_FACTS.unpack_from(self._view, 16)[0])

    def fill(self, step: int, generation: int, order: bytes, nbytes: int, copy: Callable[[memoryview], None]) -> bool:
        """Let ``copy`` write the data, then mark it as full; False: what it held before is not saved yet."""
        if self.mark not in (EMPTY, FILLING):
            return False
        begin = _PAGE + -(-len(order) // _PAGE) * _PAGE
        if begin + nbytes > len(self._memory):
            raise NoRoom(f"a state of {nbytes} bytes does not fit into the {self.capacity} of {self.path}")
        self._set(FILLING)
        self._view[_PAGE : _PAGE + len(order)] = order
        copy(self._view[begin : begin + nbytes])
        facts = _FACTS.pack(step, generation, len(order), nbytes)
        self._view[16 : 16 + _FACTS.size] = facts
        self._view[16 + _FACTS.size : 16 + _FACTS.size + _SUM.size] = _SUM.pack(zlib.crc32(facts + order))
        self._set(FULL)
        return True

    def take(self) -> Held | None:
        """What it holds, for who saves it; None: nothing whole. Somebody who was killed while saving does not count."""
        if self.mark not in (FULL, SAVING):
            return None
        facts = bytes(self._view[16 : 16 + _FACTS.size])
        step, generation, order_size, nbytes = _FACTS.unpack(facts)
        begin = _PAGE + -(-order_size // _PAGE) * _PAGE
        if begin + nbytes > len(self._memory):
            return None
        order = bytes(self._view[_PAGE : _PAGE + order_size])
        if _SUM.unpack_from(self._view, 16 + _FACTS.size)[0] != zlib.crc32(facts + order):
            return None
        self._set(SAVING)
        return Held(step, generation, order, self._view[begin : begin + nbytes])

    def release(self) -> None:
        """It is saved, or will never be: it may be filled again, or goes, if whoever filled it has left it."""
        self._set(EMPTY)
        with contextlib.suppress(OSError):
            if self._view[_LEFT] and self.in_place:
                self.path.unlink()

    def leave(self) -> None:
        """Fill it no more: it goes when it is written, at once if there is nothing to be written."""
        self._view[_LEFT] = 1
        if self.mark not in (FULL, SAVING):
            self.release()

    def adopt(self) -> None:
        """It is this process that fills it from now on."""
        self._view[_LEFT] = 0

    def close(self) -> None:
        """Let go of the memory; what an error that is being handled still refers to goes with that error."""
        with contextlib.suppress(BufferError):
            self._view.release()
            self._memory.close()

    def _set(self, mark: int) -> None:
        self._view[_MARK] = mark.to_bytes(8, sys.byteorder)


def holds(path: Path, step: int) -> bool:
    """Whether there is a buffer that still holds this step: what was written may have been followed by a later one."""
    try:
        buffer = StagingBuffer.open(path)
    except (OSError, ValueError):
        return False
    held = buffer.step == step
    buffer.close()
    return held


def give_up(path: Path, step: int) -> None:
    """Nobody is going to write this step: let its buffer be filled again, if it still holds it."""
    if holds(path, step):
        with contextlib.suppress(OSError, ValueError):
            buffer = StagingBuffer.open(path)
            buffer.release()
            buffer.close()


def _pieces(size: int, piece: int, go_on: Callable[[], bool]) -> Iterator[int]:
    """Where each piece of a buffer begins."""
    for at in range(0, size, piece):
        if not go_on():
            raise Unneeded("the buffer is not needed any more")
        yield at


def _touch(memory: mmap.mmap, go_on: Callable[[], bool]) -> None:
    """Have all pages there. Not by MAP_POPULATE: Python's mmap keeps all other threads waiting for it."""
    size = len(memory)
    begin = ctypes.c_char.from_buffer(memory)
    try:
        address, libc = ctypes.addressof(begin), ctypes.CDLL(None)
        for at in _pieces(size, _PIECE, go_on):
            piece = ctypes.c_void_p(address + at), ctypes.c_size_t(min(_PIECE, size - at))
            if libc.madvise(*piece, _MADV_POPULATE_WRITE):
                break
        else:
            return
    finally:
        del begin
    # Kernels before 5.14.
    zeros = bytes(_SMALL_PIECE)
    for at in _pieces(size, _SMALL_PIECE, go_on):
        memory[at : at + _SMALL_PIECE] = zeros[: size - at]


def _room(folder: Path, *, in_memory: bool) -> int:
    """How much may be taken: what the file system has, and what machine and container can do without, less a tenth.

    A file system in memory may promise more than there is. Whoever takes that is killed, or others are.
    """
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if not in_memory:
        return free
    lines = Path("/proc/meminfo").read_text().splitlines()
    limits = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if (left := memory_left()) is not None:
        limits.append(left)
    return min([free, *(limit * 9 // 10 for limit in limits)])
