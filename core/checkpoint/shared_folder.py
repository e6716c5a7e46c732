"""A folder in shared memory for the buffers of one job on this node.

Whoever has it holds a lock in it: what was left behind by somebody who was killed is found by that, and removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PLACE = "/dev/shm"  # noqa: S108
_PREFIX = "elastic-launch-"
_LOCK = "lock"
# The locks of this process: they last as long as it does.
_held: list[int] = []


def make_shared_folder(otherwise: Path, place: str = _PLACE) -> Path:
    """A new folder, for this user alone; below ``otherwise`` where there is no shared memory to be had."""
    sweep(place)
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    except OSError:
        folder = otherwise / "buffers"
        folder.mkdir(mode=0o700)
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _held.append(lock)
    return folder


def sweep(place: str = _PLACE) -> None:
    """Remove what nobody holds any more. Other users' is left alone, and what is being made just now."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(place)):
            if entry.name.startswith(_PREFIX) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                _remove_if_left(Path(entry.path))


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
