"""Zip files as torch lays them out."""

import io
import mmap
import os
import random
import struct
import zipfile

import pytest

from elastic_adapter.core.checkpoint.archive import ALIGNMENT, ArchiveReader, ArchiveWriter
from elastic_adapter.core.checkpoint.files import Damaged
from elastic_adapter.core.checkpoint.transfer import Output

RECORDS = {"data.pkl": b"pickle", "empty": b"", "data/0": random.Random(0).randbytes(3_000_000), "data/ü": b"x" * 65}


class Sparse:
    """A file on the disk in which long stretches of zeros take no space."""

    def __init__(self, path):
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115

    def write(self, data):
        if len(data) > 4096 and not any(data[:64]) and not any(data[-64:]):
            self._file.seek(len(data), os.SEEK_CUR)
            return len(data)
        return self._file.write(data)

    def close(self):
        self._file.close()


def write(file, records, **options):
    output = Output(file, "xxh3_128")
    archive = ArchiveWriter(output, "archive", **{"crc32": True, **options})
    offsets = {name: archive.add(name, data) for name, data in records.items()}
    archive.finish()
    return offsets


def read(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        archive = ArchiveReader(str(path), fd)
        return {name: archive.read(name) for name in archive.records}, archive.records
    finally:
        os.close(fd)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.pt"


@pytest.mark.parametrize("crc32", [True, False])
def test_what_is_written_is_read(path, crc32):
    """By us, and by any zip tool if the checksums are there; data begins where it is aligned."""
    with path.open("wb") as file:
        offsets = write(file, RECORDS, crc32=crc32)
    found, records = read(path)
    assert found == RECORDS
    assert {name: record.offset for name, record in records.items()} == offsets
    assert all(offset % ALIGNMENT == 0 for offset in offsets.values())
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == [f"archive/{name}" for name in RECORDS]
        assert (archive.testzip() is None) == crc32


def test_archives_of_other_tools_are_read(path):
    """With a comment, and without the folder's first record in front."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in RECORDS.items():
            archive.writestr(f"model/{name}", data)
        archive.comment = b"hello" * 100
    assert read(path)[0] == RECORDS


def test_compressed_records_are_named(path):
    """They would have to be unpacked, which takes memory that the file does not tell."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", b"0" * 1000)
    with pytest.raises(Damaged, match=r"its record model/data\.pkl is compressed or encrypted"):
        read(path)


@pytest.mark.parametrize("text", [b"", b"PK", b"PK\x05\x06", b"no zip" * 1000])
def test_other_files_are_no_archives(path, text):
    """An empty file, a text."""
    path.write_bytes(text)
    with pytest.raises(Damaged, match="it is no zip file, or its end is missing"):
        read(path)


def test_pickles_are_called_so(path):
    """torch's format of old is one."""
    path.write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(Damaged, match=r"it is a plain pickle, or in torch's format before 1\.6"):
        read(path)


def test_every_cut_is_seen(path):
    """Wherever the file ends too early."""
    file = io.BytesIO()
    write(file, {**RECORDS, "data/0": b"x" * 300})
    whole = file.getvalue()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(Damaged):
            read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(Damaged, match="its end is not where it should be"):
        read(path)


def test_every_flipped_bit_is_survived(path):
    """The records that are still read are the same ones, or it is said that the file is damaged."""
    file = io.BytesIO()
    small = {**RECORDS, "data/0": b"x" * 300}
    write(file, small)
    whole = bytearray(file.getvalue())
    for at in range(len(whole)):
        for bit in range(8):
            whole[at] ^= 1 << bit
            path.write_bytes(whole)
            whole[at] ^= 1 << bit
            try:
                found, _ = read(path)
            except Damaged:
                continue
            # Padding, dates, names: what is not checked here is checked by the file's own checksum.
            assert list(found.values()) == list(small.values()), at


def test_records_may_not_share_bytes(path):
    """Two names for the same bytes, or one record within another, are no archive of torch's."""
    file = io.BytesIO()
    write(file, {"a": b"x" * 100, "b": b"y" * 100})
    whole = bytearray(file.getvalue())
    first = whole.index(b"PK\x01\x02")
    second = whole.index(b"PK\x01\x02", first + 4)
    whole[second + 42 : second + 46] = whole[first + 42 : first + 46]
    path.write_bytes(whole)
    with pytest.raises(Damaged, match="do not agree"):
        read(path)
    whole[second + 46 : second + 46 + 9] = b"archive/a"
    path.write_bytes(whole)
    with pytest.raises(Damaged, match="its records overlap at archive/a"):
        read(path)


def test_a_huge_directory_is_not_believed(path):
    """A count or a size that the file does not have is damage, not memory."""
    file = io.BytesIO()
    write(file, {"a": b"x" * 100})
    whole = bytearray(file.getvalue())
    end64 = whole.index(b"PK\x06\x06")
    for at in (24, 32, 40, 48):
        changed = bytearray(whole)
        struct.pack_into("<Q", changed, end64 + at, (1 << 63) - 1)
        path.write_bytes(changed)
        with pytest.raises(Damaged):
            read(path)


def test_four_gigabytes_and_more(path):
    """Sizes and offsets that need 64 bits: a record of that size, one behind it, and an empty one."""
    big = mmap.mmap(-1, (1 << 32) + 100, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    records = {
        "data.pkl": b"pickle",
        "data/0": memoryview(big),
        "data/1": b"x" * 1000,
        "data/2": b"",
        "version": b"3\n",
    }
    file = Sparse(path)
    offsets = write(file, records, crc32=False)
    file.close()
    fd = os.open(path, os.O_RDONLY)
    try:
        archive = ArchiveReader(str(path), fd)
        assert {name: (record.offset, record.nbytes) for name, record in archive.records.items()} == {
            name: (offsets[name], len(data)) for name, data in records.items()
        }
        assert offsets["data/1"] > 1 << 32
        assert [archive.read(name) for name in ("data.pkl", "data/1", "data/2", "version")] == [
            *(b"pickle", b"x" * 1000, b"", b"3\n")
        ]
    finally:
        os.close(fd)
    with zipfile.ZipFile(path) as archive:
        assert [info.file_size for info in archive.infolist()] == [len(data) for data in records.values()]
        assert archive.getinfo("archive/data/1").header_offset > 1 << 32
