"""Where a pickle is read from: a file, or a text in memory. Long strings of bytes stay where they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

from elastic_adapter.core.checkpoint.files import Damaged, Skeleton

# Shorter strings of bytes are read with what surrounds them.
LONG = 1 << 16
# Between two long ones there is little to read.
_WINDOW = 1 << 14
# Names of modules and classes are shorter.
_LONGEST_LINE = 1 << 10


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that were left in the file."""

    offset: int
    nbytes: int
    # For whoever wants them after all, while the file is open; None: they are not there yet.
    read: Callable[[], bytes] | None = field(default=None, compare=False, repr=False)


class Blob(bytes):
    """Bytes that were read, and know where."""

    offset: int
    # The same, for users: what is there a million times in a state is there once in memory.
    plain: bytes


def plain(value: Any) -> Any:
    """Bytes as a user knows them, wherever they were read from or left; any other value as it is."""
    match value:
        case Blob():
            return value.plain
        case Span(read=read) if read is not None:
            return read()
        case _:
            return value


class Source(Protocol):
    """Where a pickle is read from. Reading past the end is an error of the file."""

    path: str
    size: int

    def read(self, count: int) -> bytes: ...

    def line(self) -> bytes: ...

    def payload(self, count: int) -> bytes | Span: ...


class TextSource:
    """A pickle in memory, or a skeleton: the bytes that it leaves out count as passed over."""

    def __init__(self, path: str, text: bytes, skeleton: Skeleton | None = None) -> None:
        self.path = path
        self.size = len(text) + (skeleton.nbytes if skeleton is not None else 0)
        self._text = text
        self._at = 0
        self._left_out = 0
        self._holes = iter(() if skeleton is None else skeleton.holes)
        self._hole = next(self._holes, None)

    def read(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._text):
            raise Damaged(self.path, "its pickle ends early")
        found = self._text[self._at : end]
        self._at = end
        return found

    def line(self) -> bytes:
        end = self._text.find(b"\n", self._at, self._at + _LONGEST_LINE)
        if end < 0:
            raise Damaged(self.path, "its pickle holds a line without an end")
        return self.read(end + 1 - self._at)[:-1]

    def payload(self, count: int) -> bytes | Span:
        position = self._at + self._left_out
        if self._hole is not None and self._hole.at == self._at:
            if self._hole.nbytes != count:
                raise Damaged(self.path, "its pickle and what it leaves out do not agree")
            self._hole = next(self._holes, None)
            self._left_out += count
            return Span(position, count)
        return _blob(self.read(count), position)

    def finish(self) -> None:
        """Nothing that was left out may be forgotten."""
        if self._hole is not None:
            raise Damaged(self.path, "its pickle and what it leaves out do not agree")


class FileSource:
    """A pickle in a file. Long strings of bytes are not read."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.size = os.fstat(fd).st_size
        self._fd = fd
        self._window = b""
        self._start = 0  # of the window, in the file
        self._at = 0  # in the window

    def read(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._window):
            self._move(count)
            end = count
        found = self._window[self._at : end]
        self._at = end
        return found

    def line(self) -> bytes:
        line = bytearray()
        while (byte := self.read(1)) != b"\n":
            line += byte
            if len(line) == _LONGEST_LINE:
                raise Damaged(self.path, "its pickle holds a line without an end")
        return bytes(line)

    def payload(self, count: int) -> bytes | Span:
        position = self._start + self._at
        if count < LONG:
            return _blob(self.read(count), position)
        if position + count > self.size:
            raise Damaged(self.path, "its pickle ends early")
        self._start, self._window, self._at = position + count, b"", 0
        return Span(position, count, cache(partial(self._fetch, position, count, count)))

    def _move(self, count: int) -> None:
        """Begins a new window here that has at least so many bytes."""
        position = self._start + self._at
        self._start, self._window, self._at = position, self._fetch(position, count, max(count, _WINDOW)), 0

    def _fetch(self, position: int, least: int, most: int) -> bytes:
        if position + least > self.size:
            raise Damaged(self.path, "its pickle ends early")
        fetched = bytearray()
        while len(fetched) < most and (found := os.pread(self._fd, most - len(fetched), position + len(fetched))):
            fetched += found
        if len(fetched) < least:
            raise Damaged(self.path, "its pickle ends early")
        return bytes(fetched)


def _blob(data: bytes, offset: int) -> Blob:
    blob = Blob(data)
    blob.offset = offset
    blob.plain = data
    return blob
