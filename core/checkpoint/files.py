"""What the files of all checkpoints have in common: where a tensor's bytes lie, and what can be wrong with them."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import TypeAlias

from elastic_adapter.core.errors import ElasticError

Buffer: TypeAlias = bytes | bytearray | memoryview

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
