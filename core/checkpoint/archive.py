"""The zip files that torch writes: records that are stored as they are, each aligned, and a directory at the end.

What is written here is laid out byte for byte as torch lays it out, because torch computes where records lie instead of
looking it up when it is asked to (``calculate_storage_offsets``).
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from elastic_adapter.core.checkpoint.files import Buffer, Damaged
from elastic_adapter.core.checkpoint.transfer import Crc32, Follower, Output

ALIGNMENT = 64

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_FIELD = struct.Struct("<HH")
_WIDE = struct.Struct("<Q")
_LOCAL_MARK, _CENTRAL_MARK, _END_MARK = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_END64_MARK, _LOCATOR_MARK, _DESCRIPTOR_MARK = b"PK\x06\x06", b"PK\x06\x07", b"PK\x07\x08"
_LIMIT = 0xFFFFFFFF
_COUNT_LIMIT = 0xFFFF
_UTF8, _DESCRIPTOR, _ENCRYPTED = 0x800, 0x8, 0x1
_WIDE_FIELD = 0x1
_PADDING_FIELD = int.from_bytes(b"FB", "little")
# Made on Unix, by version 3.0; version 4.5 is needed to read it: what torch says.
_MADE_BY, _NEEDED = 0x031E, 45


@dataclass(frozen=True, slots=True)
class Record:
    """Where the bytes of a record lie; without a checksum if the writer left it out."""

    offset: int
    nbytes: int
    crc32: int | None


class ArchiveWriter:
    """Adds records to a zip file from front to back, nothing is written twice."""

    def __init__(self, output: Output, folder: str, *, crc32: bool) -> None:
        self._output = output
        self._folder = folder
        self._crc32 = crc32
        self._directory = bytearray()
        self._count = 0

    def add(self, name: str, data: Buffer, *followers: Follower) -> int:
        """The offset at which the data begins."""
        encoded = f"{self._folder}/{name}".encode()
        start, nbytes = self._output.position, memoryview(data).nbytes
        far = (start,) if start >= _LIMIT else ()
        wide = _wide(*(nbytes, nbytes) if nbytes >= _LIMIT else (), *far)
        # As torch has it: before the data, the size of what is stored is not known yet.
        early = _wide(*(nbytes, 0) if nbytes >= _LIMIT else (), *far)
        flags = _UTF8 | (_DESCRIPTOR if nbytes else 0)
        unpadded = start + _LOCAL.size + len(encoded) + len(wide) + _FIELD.size
        padding = b"Z" * (-unpadded % ALIGNMENT)
        extra = early + _FIELD.pack(_PADDING_FIELD, len(padding)) + padding
        self._output.write(
            _LOCAL.pack(_LOCAL_MARK, 0, flags, 0, 0, 0, 0, 0, 0, len(encoded), len(extra)) + encoded + extra
        )
        offset = self._output.position
        crc = Crc32()
        self._output.write(data, *(crc,) * self._crc32, *followers)
        if nbytes:
            sizes = struct.pack("<QQ" if wide else "<II", nbytes, nbytes)
            self._output.write(_DESCRIPTOR_MARK + struct.pack("<I", crc.value) + sizes)
        narrow = min(nbytes, _LIMIT)
        lengths = len(encoded), len(wide), 0, 0, 0, 0, min(start, _LIMIT)
        self._directory += _CENTRAL.pack(_CENTRAL_MARK, 0, 0, flags, 0, 0, 0, crc.value, narrow, narrow, *lengths)
        self._directory += encoded + wide
        self._count += 1
        return offset

    def finish(self) -> None:
        start, size, count = self._output.position, len(self._directory), self._count
        end64 = start + size
        self._output.write(self._directory)
        rest = _END64.size - 12  # the record's size does not count its mark and itself
        self._output.write(_END64.pack(_END64_MARK, rest, _MADE_BY, _NEEDED, 0, 0, count, count, size, start))
        self._output.write(_LOCATOR.pack(_LOCATOR_MARK, 0, end64, 1))
        few = min(count, _COUNT_LIMIT)
        self._output.write(_END.pack(_END_MARK, 0, 0, few, few, min(size, _LIMIT), min(start, _LIMIT), 0))


def _wide(*values: int) -> bytes:
    """The extra field with what does not fit into 32 bits."""
    if not values:
        return b""
    return _FIELD.pack(_WIDE_FIELD, len(values) * _WIDE.size) + b"".join(_WIDE.pack(value) for value in values)


def first_name(file: BinaryIO) -> bytes | None:
    """What the first record of a zip file is called, as far as it is there; None: it begins otherwise."""
    begin = file.read(_LOCAL.size)
    if len(begin) < _LOCAL.size or not begin.startswith(_LOCAL_MARK):
        return None
    return file.read(_LOCAL.unpack(begin)[-2])


class ArchiveReader:
    """The records of a zip file, by their names without the archive's own folder."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._size = os.fstat(fd).st_size
        self.records: Mapping[str, Record] = self._read_directory()

    def read(self, name: str) -> bytes:
        """A whole record, checked if it can be."""
        record = self.records.get(name)
        if record is None:
            raise Damaged(self.path, f"it has no record {name}")
        data = self._bytes(record.offset, record.nbytes)
        if record.crc32 not in (None, zlib.crc32(data)):
            raise Damaged(self.path, f"the checksum of its record {name} is wrong")
        return data

    def _bytes(self, offset: int, nbytes: int) -> bytes:
        if not 0 <= offset <= offset + nbytes <= self._size:
            raise Damaged(self.path, "its directory points outside of it")
        found = bytearray()
        while len(found) < nbytes and (more := os.pread(self._fd, nbytes - len(found), offset + len(found))):
            found += more
        if len(found) < nbytes:
            raise Damaged(self.path, f"it ends at byte {offset + len(found)}")
        return bytes(found)

    def _find_directory(self) -> tuple[int, int, int]:
        """Where the directory begins, its size, and how many records it has."""
        tail_size = min(self._size, _END.size + _COUNT_LIMIT)  # a comment may follow
        tail = self._bytes(self._size - tail_size, tail_size)
        at = tail.rfind(_END_MARK)
        if at < 0 or len(tail) - at < _END.size:
            if self._bytes(0, min(self._size, 1)) == b"\x80":
                advice = "load it with torch.load(weights_only=True), and save it again"
                raise Damaged(self.path, f"it is a plain pickle, or in torch's format before 1.6: {advice}")
            raise Damaged(self.path, "it is no zip file, or its end is missing")
        _, disk, first_disk, here, count, size, start, comment = _END.unpack_from(tail, at)
        end = self._size - tail_size + at
        if end + _END.size + comment != self._size:
            raise Damaged(self.path, "its end is not where it should be")
        if at >= _LOCATOR.size and tail.startswith(_LOCATOR_MARK, at - _LOCATOR.size):
            _, _, end64, _ = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
            mark, _, _, _, disk, first_disk, here, count, size, start = _END64.unpack(self._bytes(end64, _END64.size))
            if mark != _END64_MARK or end64 + _END64.size + _LOCATOR.size != end:
                raise Damaged(self.path, "its end is not where it should be")
            end = end64
        if disk or first_disk or here != count or start + size != end:
            raise Damaged(self.path, "its directory is not where it should be")
        return start, size, count

    def _read_directory(self) -> dict[str, Record]:
        start, size, count = self._find_directory()
        directory = self._bytes(start, size)
        try:
            entries = list(self._entries(directory))
        except (struct.error, UnicodeDecodeError) as error:
            raise Damaged(self.path, f"its directory makes no sense ({error})") from error
        if len(entries) != count or not entries:
            raise Damaged(self.path, f"its directory has {len(entries)} records instead of {count}")
        folder, _, _ = entries[0][0].partition("/")
        records: dict[str, Record] = {}
        free = 0  # records lie one behind the other, none inside of another one
        for name, header, record in sorted(entries, key=lambda entry: entry[1]):
            if name in records or header < free or record.offset + record.nbytes > start:
                raise Damaged(self.path, f"its records overlap at {name}")
            free = record.offset + record.nbytes
            records[name] = record
        return {name.removeprefix(f"{folder}/"): record for name, record in records.items()}

    def _entries(self, directory: bytes) -> Iterator[tuple[str, int, Record]]:
        at = 0
        while at < len(directory):
            fields = _CENTRAL.unpack_from(directory, at)
            mark, _, _, flags, method, _, _, crc, stored, nbytes, name_size, extra_size, comment_size, *_, header = (
                fields
            )
            at += _CENTRAL.size
            encoded = directory[at : at + name_size]
            extra = directory[at + name_size : at + name_size + extra_size]
            at += name_size + extra_size + comment_size
            if mark != _CENTRAL_MARK or at > len(directory):
                raise Damaged(self.path, "its directory makes no sense")
            name = encoded.decode()
            nbytes, stored, header = _widened(extra, nbytes, stored, header)
            if method or flags & _ENCRYPTED or nbytes != stored:
                raise Damaged(
                    self.path, f"its record {name} is compressed or encrypted, which torch's records never are"
                )
            offset = self._data_offset(encoded, header)
            yield name, header, Record(offset, nbytes, crc or None)

    def _data_offset(self, encoded: bytes, header: int) -> int:
        local = self._bytes(header, _LOCAL.size + len(encoded))
        mark, _, _, method, *_, name_size, extra_size = _LOCAL.unpack_from(local)
        if mark != _LOCAL_MARK or method or name_size != len(encoded) or local[_LOCAL.size :] != encoded:
            raise Damaged(self.path, f"its directory and its record at byte {header} do not agree")
        return header + _LOCAL.size + len(encoded) + int(extra_size)


def _widened(extra: bytes, *values: int) -> Iterator[int]:
    """The values, those that did not fit into 32 bits taken from the extra field."""
    at, end = 0, 0
    while at + _FIELD.size <= len(extra) and not end:
        kind, size = _FIELD.unpack_from(extra, at)
        at += _FIELD.size
        if kind == _WIDE_FIELD:
            end = at + size
        else:
            at += size
    for value in values:
        if value == _LIMIT and at + _WIDE.size <= end:
            yield _WIDE.unpack_from(extra, at)[0]
            at += _WIDE.size
        else:
            yield value
