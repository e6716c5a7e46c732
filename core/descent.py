"""The processes below one: finding and ending them. Linux; standard library only, importable by path."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))


def become_subreaper() -> None:
    """From now on, orphans among the descendants become children of this process, not of init."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int) -> list[int]:
    """The children of a process; those that have ended but were not waited for are among them."""
    if not _kernel_lists_children():
        return _children_by_scan(pid)
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return found
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found.extend(int(word) for word in file.read().split())
        except (FileNotFoundError, ProcessLookupError):
            # This thread has ended; the children of the others count.
            continue
    return found


def _kernel_lists_children() -> bool:
    me = os.getpid()
    return os.path.exists(f"/proc/{me}/task/{me}/children")


def _children_by_scan(pid: int) -> list[int]:
    """For kernels without CONFIG_PROC_CHILDREN."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The command's name may hold anything, spaces and brackets included: the last bracket ends it.
                    if int(file.read().rpartition(b")")[2].split()[1]) == pid:
                        found.append(int(name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def descendants(roots: list[int]) -> list[int]:
    """These processes and all below them."""
    found: list[int] = []
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting.extend(children(pid))
    return found


def kill_below(reap: Callable[[], object], spare: frozenset[int], within_s: float) -> list[int]:
    """End all descendants of this process but those at and below ``spare``. Gives the ones that would not end.

    ``reap`` is called to wait for children that ended; what it does with their codes is its own matter.
    A process that forks while it is being killed is caught by the next round.
    """
    me = os.getpid()
    end = time.monotonic() + within_s
    pause = 0.0005
    while True:
        reap()
        left = descendants([pid for pid in children(me) if pid not in spare])
        if not left or time.monotonic() >= end:
            return left
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(pause)
        pause = min(pause * 2, 0.02)
