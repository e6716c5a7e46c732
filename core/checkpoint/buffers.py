"""The two buffers of a worker: while one is being written to storage, the other one can be filled."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

from elastic_adapter.core.checkpoint.manifest import temporary_name
from elastic_adapter.core.checkpoint.staging import FULL, SAVING, NoRoom, StagingBuffer, Unneeded
from elastic_adapter.core.checkpoint.writers import owner_of, still_runs

_COUNT = 2
_PAUSE_S = 0.005
_MOST_S = 600.0
# States grow a little: numbers get more digits, and a schedule remembers more.
_SPARE = 1 << 16


class Buffers:
    """Made where memory is shared, or beside the checkpoints where that is too small. They outlive this process.

    Those that a former process of the same place left are used again: their pages are there already.
    """

    def __init__(self, paths: list[Path], others: list[Path], busy: frozenset[str]) -> None:
        """``others`` are files on disk, for want of memory; ``busy`` names the ones that are still to be written."""
        self._paths = paths
        self._others = others
        self._made: list[StagingBuffer | None] = [_left(path, busy) for path in paths]
        self._locks = [threading.Lock() for _ in paths]
        self._notes: list[str] = []
        self._preparing: threading.Thread | None = None
        self._over = False
        # Memory was too small for one, or for a second one.
        self._spilled = False
        self._single = False
        for index, path in enumerate(others):
            self._take_over(index, path, busy)

    @classmethod
    def at(cls, folder: Path, slot: str, root: Path, token: str, busy: frozenset[str]) -> Buffers:
        _sweep(root)
        return cls([folder / name for name in _names(slot)], beside(root, slot, token), busy)

    def prepare(self, nbytes: int) -> None:
        """Make both, beside all else, so that the first save does not have to wait for memory."""
        self._preparing = threading.Thread(target=self._prepare, args=(nbytes,), name="elastic-staging", daemon=True)
        self._preparing.start()

    def take(self, nbytes: int, *, wait: bool) -> StagingBuffer | None:
        """One to be filled, with room for so many bytes; None: both are being written. Raises NoRoom or OSError."""
        deadline = time.monotonic() + _MOST_S
        while True:
            for index in range(_COUNT):
                if (found := self._free(index, nbytes)) is not None:
                    return found
            if not wait or time.monotonic() > deadline:
                return None
            time.sleep(_PAUSE_S)

    def notes(self) -> list[str]:
        """What people should know of where the buffers are; once."""
        told, self._notes = self._notes, []
        return told

    def stop_preparing(self) -> None:
        """Make no more of them: what is made where others have tidied up already, nobody would remove."""
        self._over = True
        if self._preparing is not None:
            self._preparing.join()

    def remove(self) -> None:
        """Take those away that lie beside the checkpoints; what is still to be written, whoever writes it removes."""
        for buffer in self._made:
            if buffer is not None and buffer.path in self._others:
                buffer.leave()

    def _take_over(self, index: int, path: Path, busy: frozenset[str]) -> None:
        """What a former process left beside the checkpoints: it had no memory. What is not to be written goes."""
        if path.name not in busy:
            with contextlib.suppress(OSError):
                path.unlink()
        elif (found := _left(path, busy)) is not None:
            if self._made[index] is None:
                self._made[index], self._spilled = found, True
            else:
                found.leave()

    def _prepare(self, nbytes: int) -> None:
        # Whoever needs it then will meet the same error, and tell.
        with contextlib.suppress(OSError, NoRoom, Unneeded):
            for index in range(_COUNT):
                self._free(index, nbytes)

    def _free(self, index: int, nbytes: int) -> StagingBuffer | None:
        with self._locks[index]:
            found = self._made[index]
            if found is not None:
                # One that somebody has removed is nobody's to write, whatever its mark says.
                in_place = found.in_place
                if in_place and _is_busy(found):
                    return None
                if in_place and found.capacity >= nbytes:
                    return found
                self._made[index] = None
                if in_place:
                    found.path.unlink(missing_ok=True)
                found.close()
            if index and self._single:
                return None
            self._made[index] = self._create(index, nbytes)
            return self._made[index]

    def _create(self, index: int, nbytes: int) -> StagingBuffer | None:
        wanted = nbytes + nbytes // 50 + _SPARE
        try:
            if self._spilled:
                return self._new(self._others[index], wanted, in_memory=False)
            return self._new(self._paths[index], wanted, in_memory=True)
        except NoRoom as error:
            if index and self._made[0] is not None and self._made[0].capacity >= nbytes:
                # One is enough to go on with: a save then waits for the one before.
                self._single = True
                self._notes.append(f"{error}: a save has to wait for the one before it, for want of a second copy")
                return None
            if self._spilled:
                raise
            self._spilled = True
            made = self._new(self._others[index], wanted, in_memory=False)
            self._notes.append(f"{error}: states are copied to {made.path} instead, which takes longer")
            return made

    def _new(self, path: Path, nbytes: int, *, in_memory: bool) -> StagingBuffer:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            return StagingBuffer.create(path, nbytes, in_memory=in_memory, go_on=lambda: not self._over)
        except OSError as error:
            if not in_memory:
                raise
            raise NoRoom(f"{path.parent} takes no copy of the state ({error.strerror})") from error


def beside(root: Path, slot: str, token: str) -> list[Path]:
    """Where buffers are made for want of memory: beside the checkpoints."""
    return [root / temporary_name(f"staging-{name}", token) for name in _names(slot)]


def _names(slot: str) -> list[str]:
    return [f"{slot}-{index}" for index in range(_COUNT)]


def _sweep(root: Path) -> None:
    """Remove what launchers of this machine left beside the checkpoints when they ended: nobody writes it any more."""
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            if (owner := owner_of(name)) is not None and still_runs(owner) is False:
                (root / name).unlink(missing_ok=True)


def _left(path: Path, busy: frozenset[str]) -> StagingBuffer | None:
    """What a former process left there. If nobody is going to write what it holds, it may be filled again."""
    try:
        found = StagingBuffer.open(path)
    except (OSError, ValueError):
        return None
    found.adopt()
    if path.name not in busy and _is_busy(found):
        found.release()
    return found


def _is_busy(buffer: StagingBuffer) -> bool:
    return buffer.mark in (FULL, SAVING)
