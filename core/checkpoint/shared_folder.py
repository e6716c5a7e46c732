"""Folders in shared memory for buffers: a job's on this node, or those of a program that runs without our launcher.

Whoever has one holds a lock in it: what was left behind by somebody who was killed is found by that, and removed. Not
by the number of its process: containers may share this memory, and not know each other's processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PLACE = Path("/dev/shm")  # noqa: S108
_OF_A_JOB = "elastic-launch-"
_OF_A_PROGRAM = "elastic-adapter-"
_LOCK = "lock"
_MOMENT_S = 2.0
_PAUSE_S = 0.01
# The locks of this process.
_held: set[int] = set()


@dataclass(frozen=True, slots=True)
class HeldFolder:
    """A folder that nobody else removes as long as the lock is open: here, or in a process that has inherited it."""

    path: Path
    lock: int

    def let_go(self) -> None:
        """Leave it to those who have inherited the lock; without any, to whoever sweeps."""
        if self.lock in _held:
            _held.discard(self.lock)
            os.close(self.lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.let_go()


def make_shared_folder(otherwise: Path, place: Path = PLACE) -> Path:
    """A new folder for a job, as long as this process lives; below ``otherwise`` where there is no shared memory."""
    try:
        return _hold(_OF_A_JOB, place).path
    except OSError:
        folder = otherwise / "buffers"
        folder.mkdir(mode=0o700)
        return folder


def hold_own_folder(place: Path = PLACE) -> HeldFolder:
    """A new folder for this program. Where it can't be made, whoever makes a buffer in it will tell."""
    prefix = f"{_OF_A_PROGRAM}{os.getpid()}-"
    try:
        return _hold(prefix, place)
    except OSError:
        return HeldFolder(place / f"{prefix}{secrets.token_hex(4)}", _lock(os.memfd_create(_LOCK)))


def sweep(place: Path = PLACE) -> None:
    """Remove what nobody holds any more. Other users' is left alone, and what is being made just now."""
    try:
        entries = list(os.scandir(place))
    except OSError:
        return
    for entry in entries:
        # Somebody else may sweep as well.
        with contextlib.suppress(OSError):
            ours = entry.stat(follow_symlinks=False).st_uid == os.getuid()
            if ours and entry.name.startswith((_OF_A_JOB, _OF_A_PROGRAM)):
                _remove_if_left(Path(entry.path))


def is_last(lock: int) -> bool:
    """Whether this process, which has inherited the lock, is the only one that still has it. It has it then to its end.

    Whoever else had it is given a moment: who is killed loses one thing after the other.
    """
    deadline = time.monotonic() + _MOMENT_S
    # What is inherited is one lock for all; opened anew, it is another one.
    own = os.open(f"/proc/self/fd/{lock}", os.O_RDWR | os.O_CLOEXEC)
    os.close(lock)
    while True:
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        else:
            return True


def _hold(prefix: str, place: Path) -> HeldFolder:
    """For this user alone."""
    sweep(place)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    try:
        return HeldFolder(folder, _locked(folder))
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _locked(folder: Path) -> int:
    # Under another name until it is locked: whoever sweeps meanwhile finds no lock, and leaves the folder alone.
    hidden = folder / f"{_LOCK}.new"
    lock = _lock(os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    os.rename(hidden, folder / _LOCK)
    return lock


def _lock(fd: int) -> int:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError:
        os.close(fd)
        raise
    _held.add(fd)
    return fd


def _remove_if_left(folder: Path) -> None:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        # Somebody has it.
        return
    finally:
        os.close(lock)


def _forget() -> None:
    """A data loader that outlives its program must not keep what the program had."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget)
