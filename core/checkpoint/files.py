"""What the files of all checkpoints have in common: where a tensor's bytes lie, and what can be wrong with them."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import struct
from dataclasses import dataclass
from typing import TypeAlias

from elastic_adapter.core.errors import ElasticError, UserError

Buffer: TypeAlias = bytes | bytearray | memoryview

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# What can be at a path, as people call it.
PLAIN, FOLDER = "a file", "a folder"
_LOOP = "a link that leads to itself"
_KINDS = {
    stat.S_IFREG: PLAIN,
    stat.S_IFDIR: FOLDER,
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}
_COUNT = struct.Struct("<Q")
_HOLE = struct.Struct("<QQ")


class Damaged(ElasticError):
    """The file is not what was once written, or is of another kind. Take another one."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} is damaged: {why}")
        self.path = path
        self.why = why


class Refused(ElasticError):
    """The file asks for something that no plain state needs. Nothing of it was run."""

    def __init__(self, path: str, wanted: str) -> None:
        super().__init__(f"{path} was refused: it asks for {wanted}, which a plain state does not need")
        self.path = path
        self.wanted = wanted


class Misfit(ElasticError):
    """A tensor of the file does not fit into the tensor that it is to be read into. The file itself is sound."""

    def __init__(self, path: str, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        super().__init__(f"{path} does not fit: {name} has the shape {list(found)} there, {list(wanted)} here")
        self.path = path
        self.name = name


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes of one tensor in a file. Tensors that share memory share bytes: regions may overlap."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    hash: str | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written to its end; whether it has reached the disk is not known here."""

    size: int
    algorithm: str
    hash: str
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """What a file must be, as it was noted when it was written."""

    size: int
    hash: str
    algorithm: str = "xxh3_128"


@dataclass(frozen=True, slots=True)
class Hole:
    """Bytes that a skeleton leaves out. In a torch file the holes follow the text, each as a record of its own."""

    at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A file without its tensors' bytes: made where the framework is, filled in where it is not."""

    text: bytes
    holes: tuple[Hole, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes are to be filled in."""
        return sum(hole.nbytes for hole in self.holes)

    def pack(self) -> bytes:
        holes = b"".join(_HOLE.pack(hole.at, hole.nbytes) for hole in self.holes)
        return _COUNT.pack(len(self.holes)) + holes + self.text

    @classmethod
    def unpack(cls, packed: Buffer) -> Skeleton:
        (count,) = _COUNT.unpack_from(packed)
        text = _COUNT.size + count * _HOLE.size
        holes = _HOLE.iter_unpack(memoryview(packed)[_COUNT.size : text])
        return cls(bytes(packed[text:]), tuple(Hole(at, nbytes) for at, nbytes in holes))


def open_plain(path: str, more_flags: int = 0) -> int:
    """A file to read, and nothing else: a pipe would keep its reader waiting for ever. Raises Damaged or OSError."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise Damaged(path, "it is no plain file")
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | more_flags)


def path_of(what: str, path: object) -> str:
    """A path that a user gave, as text; ~ is their home. Raises UserError."""
    found = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(found, str):
        raise UserError(f"{what} has to be text or a Path, got {path!r:.100}")
    if not found or "\0" in found:
        raise UserError(f"{what} has to name a file or a folder, got {found!r:.100}")
    if _URL.match(found):
        raise UserError(f"{what} has to be in a file system, and {found} is a URL: mount it, and name that")
    return os.path.expanduser(found)


def kind_of(path: str) -> str | None:
    """What is there, in people's words, wherever links lead; None: nothing, or nothing that can be seen."""
    try:
        return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "no file")
    except OSError as error:
        return _LOOP if error.errno == errno.ELOOP else None
    except ValueError:
        # A name with a NUL in it.
        return None


def flat(data: Buffer) -> memoryview:
    """The bytes of a buffer without gaps, whatever they are seen as."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def copy_memory(address: int, into: memoryview) -> None:
    """Copy what is at an address of this process. Other threads run meanwhile."""
    if len(into):
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(into)), address, len(into))


def memory(address: int, nbytes: int) -> memoryview:
    """The bytes at an address of this process, to be read and written. The caller keeps their owner alive."""
    if nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
