"""A folder of checkpoints on a file system: drafts become checkpoints by one rename, and only then exist.

    <root>/step-000000002000-gen-000003/           a checkpoint: files, and manifest.json, which was written last
    <root>/.step-...-gen-....<token>.elastic-tmp/  a draft, which ranks fill together
    <root>/step-....broken/                        one that did not verify, kept for people to look at

Files and folders get the mode that the umask leaves. Nothing of an existing checkpoint is ever written to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from elastic_adapter.core.checkpoint.files import Damaged, Expected, Region, open_plain
from elastic_adapter.core.checkpoint.hashing import hash_file, verify_file, verify_sample
from elastic_adapter.core.checkpoint.manifest import (
    MANIFEST,
    MD5_SUMS,
    BadManifest,
    FileEntry,
    Manifest,
    folder_name,
    is_temporary,
    manifest_from_bytes,
    manifest_to_bytes,
    md5_lines,
    newest_first,
    obsolete,
    overtaken,
    parse_folder,
    quarantine_name,
    temporary_name,
)
from elastic_adapter.core.checkpoint.writers import PRUNED, SWEPT, is_replaced

# Of the tensors of each file, so many are read back in a sample.
_SHARE = 0.05
VERIFY = ("off", "sample", "full")
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that exists: complete, and as good as its manifest says, if that is still true of its files."""

    path: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def size(self) -> int:
        return sum(file.size for file in self.manifest.files)


@dataclass(frozen=True, slots=True)
class Broken:
    """A folder that is called like a checkpoint, and can't be one."""

    path: Path
    why: str
    # It may be whole, but can't be read just now: by this user, or from this device.
    unread: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint that is being written. All ranks of a generation write into the same folder."""

    root: Path
    step: int
    generation: int
    path: Path

    @property
    def place(self) -> Path:
        """What it is called as a checkpoint."""
        return self.root / folder_name(self.step, self.generation)

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """A file to write, which has reached the disk at the end of the block."""
        with _named(self.path / name), open(self.path / name, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def prepare(self, manifest: Manifest, *, md5: bool = False) -> None:
        """Put the manifest in, last. All of it is on disk then, and still nobody takes it for a checkpoint."""
        if md5:
            names = [file.name for file in manifest.files]
            sums = {name: hash_file(str(self.path / name), "md5") for name in names}
            write_whole(self.path / MD5_SUMS, md5_lines(sums).encode())
        write_whole(self.path / MANIFEST, manifest_to_bytes(manifest))
        sync_folder(self.path)

    def publish(self) -> Path:
        """Make a prepared one a checkpoint: before the rename it is not saved, after it, it is. May be repeated.

        Raises Damaged for one that was not prepared, which stays what it is.
        """
        place = self.place
        found = look_at(self.path, place.name)
        if isinstance(found, Broken) and not found.unread and self.path.exists():
            raise Damaged(str(self.path), f"it is not whole, and gets no name: {found.why}")
        try:
            os.rename(self.path, place)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise
            there = look_at(place)
            if isinstance(there, Checkpoint):
                # It was published before, or the same step of the same generation was: that one stays as it is.
                self.discard()
            elif error.errno == errno.ENOENT or there.unread:
                raise
            else:
                Store(self.root).quarantine(place)
                os.rename(self.path, place)
        sync_folder(self.root)
        return place

    def finish(self, manifest: Manifest, *, md5: bool = False) -> Path:
        """Make it a checkpoint. Whoever is killed before the last rename has not saved; after it, all is on disk."""
        self.prepare(manifest, md5=md5)
        return self.publish()

    def discard(self) -> None:
        _remove(self.path)


class Store:
    """The checkpoints below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def draft(self, step: int, generation: int, token: str) -> Draft:
        """Begin a checkpoint, or join those who have; ``token`` is the same for all who write it."""
        self.root.mkdir(parents=True, exist_ok=True)
        draft = self.begun(step, generation, token)
        draft.path.mkdir(exist_ok=True)
        return draft

    def begun(self, step: int, generation: int, token: str) -> Draft:
        """One that somebody has begun; nothing is made."""
        path = self.root / temporary_name(folder_name(step, generation), token)
        return Draft(self.root, step, generation, path)

    def sweep(self, keep: Callable[[str], bool] = lambda _: False) -> tuple[str, ...]:
        """Remove drafts that nobody finishes any more."""
        drafts = (name for name in self._names() if is_temporary(name) and not is_replaced(name))
        stale = tuple(name for name in drafts if not keep(name))
        for name in stale:
            _remove(self.root / name)
        return stale

    def newest_first(self) -> Iterator[Checkpoint | Broken]:
        """What is here; each is looked at when it is asked for."""
        for name in newest_first(self._names()):
            yield self.look(name)

    def look(self, name: str) -> Checkpoint | Broken:
        return look_at(self.root / name)

    def trouble(
        self, checkpoint: Checkpoint, *, how: str = "full", stored: bool = False, progress: Progress | None = None
    ) -> str:
        """What is wrong with its files; empty: nothing that was looked for."""
        try:
            self.check(checkpoint, how=how, stored=stored, progress=progress)
        except (OSError, Damaged) as error:
            return why_unread(error)
        return ""

    def check(
        self, checkpoint: Checkpoint, *, how: str = "full", stored: bool = False, progress: Progress | None = None
    ) -> None:
        """Raises Damaged where a file is not what the manifest says, OSError where it can't be read."""
        manifest = checkpoint.manifest
        for file in manifest.files if how != "off" else ():
            path, expected = checkpoint.path / file.name, Expected(file.size, file.hash, manifest.algorithm)
            with _named(path):
                if how == "sample":
                    verify_sample(str(path), expected, regions(file), share=_SHARE, seed=manifest.step, stored=stored)
                else:
                    verify_file(str(path), expected, stored=stored, progress=progress)

    def quarantine(self, path: Path, name: str | None = None) -> Path:
        """Put a broken one out of the way; it is not deleted, because somebody may want to know."""
        place = path.with_name(quarantine_name(name or path.name, set(self._names())))
        os.rename(path, place)
        sync_folder(self.root)
        return place

    def sweep_overtaken(self, step: int, generation: int, token: str) -> tuple[str, ...]:
        """Remove the drafts of the same writers that this checkpoint came before."""
        stale = overtaken(self._names(), step, generation, token)
        for name in stale:
            _remove(self.root / name)
        return stale

    def prune(self, saved: str, keep_last: int | None, keep_every: int | None) -> tuple[str, ...]:
        """Delete what need not be kept beside this one. Each is put out of sight first: none is ever half deleted."""
        if keep_last is None:
            return ()
        complete = [each.name for each in self.newest_first() if isinstance(each, Checkpoint)]
        gone = obsolete(complete, saved, keep_last, keep_every)
        for name in gone:
            _remove_folder(self.root / name, self.root / temporary_name(name, PRUNED))
        return gone

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.root)
        except FileNotFoundError:
            return []


def read_manifest(folder: Path) -> Manifest:
    """Raises OSError or BadManifest."""
    path = folder / MANIFEST
    try:
        with _named(path), open(open_plain(str(path)), "rb") as file:
            return manifest_from_bytes(file.read())
    except Damaged:
        raise BadManifest(f"{MANIFEST} is no plain file") from None


def look_at(path: Path, name: str | None = None) -> Checkpoint | Broken:
    """What a folder is, by its manifest; ``name`` is what it is to be called, if it is not called so yet."""
    try:
        manifest = read_manifest(path)
    except (OSError, BadManifest) as error:
        return Broken(path, why_unread(error), unread=is_unread(error))
    if parse_folder(name or path.name) != (manifest.step, manifest.generation):
        return Broken(path, f"its manifest is of step {manifest.step}, generation {manifest.generation}")
    return Checkpoint(path, manifest)


def is_unread(error: Exception) -> bool:
    """Whether it says nothing of the file: a device or a permission was in the way."""
    return isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


def is_gone(path: Path) -> bool:
    """Whether nothing is there any more. Where that can't be told, it is there, as far as anybody knows."""
    try:
        os.lstat(path)
    except OSError as error:
        return not is_unread(error)
    return False


def regions(file: FileEntry) -> tuple[Region, ...]:
    return tuple(
        Region(each.name, each.dtype, each.shape, each.offset, each.nbytes, each.hash) for each in file.tensors
    )


def merged(parts: Iterable[Manifest]) -> Manifest:
    """One manifest of what each rank wrote: the first one's facts, and everybody's files."""
    first, *others = parts
    files = (*first.files, *(file for part in others for file in part.files))
    values = {name: getattr(first, name) for name in Manifest.__slots__ if name != "files"}
    return Manifest(**values, files=files)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of reading and writing do not say of what file; these do."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """A small file that is there with all of its content, on disk, or not at all."""
    hidden = path.with_name(temporary_name(path.name, "new"))
    with _named(path), open(hidden, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(hidden, path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
        return
    _remove_folder(path, path.with_name(temporary_name(path.name.lstrip("."), SWEPT)))


def _remove_folder(path: Path, hidden: Path) -> None:
    """Out of sight first, under a name of its own: it is never there by half.

    Nor can it get another name while it is being deleted, which would then go on in there.
    """
    shutil.rmtree(hidden, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems know no such thing for folders: what is renamed there is renamed.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def why_unread(error: Exception) -> str:
    """One line for people, where something was to be read. The saver has its own words for what was to be written."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    where = f"{error.filename}: " if error.filename is not None else ""
    is_forbidden = error.errno in (errno.EACCES, errno.EPERM)
    return f"{where}{error.strerror}{' (this user may not read it)' if is_forbidden else ''}"
