"""For trainings that tell their launcher how they get on, and want to know what it is about to do.

Standard library only.

from elastic_adapter.core.worker import Notices, progress

notices = Notices()
for step, batch in enumerate(data):
    ...
    progress(step)
    if (notice := notices.poll()) and notice["notice"] == "leave":
        save()
"""

from __future__ import annotations

import json
import os
import socket

# What a page of progress holds: the generation, how often progress was told, the last step, and the process that tells.
# (See core.progress.)
_GENERATION, _COUNT, _STEP, _OWNER = range(4)
# Empty before the first step; then the page that all steps go to.
_pages: list[memoryview[int] | list[int]] = []


def progress(step: int) -> None:
    """Tell the launcher that this step is done: a few machine words in shared memory, no system call.

    What a child of the worker tells, a data loader's or a program's that it started, does not count.
    """
    page = _pages[0] if _pages else _open_page()
    try:
        page[_STEP] = step
    except TypeError:
        page[_STEP] = int(step)
    page[_COUNT] += 1


def _open_page() -> memoryview[int] | list[int]:
    """The page that the agent reads; without an agent, or in a process that is not the worker, one that nobody does."""
    import mmap

    page: memoryview[int] | list[int]
    try:
        with open(os.environ.get("ELASTIC_PROGRESS", ""), "r+b") as file:
            page = memoryview(mmap.mmap(file.fileno(), 32)).cast("q")
        _own(page, int(os.environ["ELASTIC_GENERATION"]))
    except (OSError, ValueError, KeyError):
        page = [0, 0, 0, 0]
    _pages.append(page)
    return page


def _own(page: memoryview[int], generation: int) -> None:
    """Make the page ours. A Python worker's is its own from the start, another's is of whoever tells first."""
    owner = page[_OWNER] if page[_GENERATION] == generation else 0
    if owner not in (0, os.getpid()) and os.path.exists(f"/proc/{owner}"):
        raise ValueError("the worker is another process")
    if owner != os.getpid():
        page[_COUNT] = 0
    page[_OWNER] = os.getpid()
    page[_GENERATION] = generation


# A child looks for itself whether it is the worker.
os.register_at_fork(after_in_child=_pages.clear)


class Notices:
    """Notices from the agent of this node. Where there is no agent, or no longer, there are none."""

    def __init__(self, path: str | None = None) -> None:
        self._unread = b""
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(path or os.environ.get("ELASTIC_NOTICES", ""))
        except OSError:
            self.close()

    def poll(self) -> dict[str, object] | None:
        """The next notice that has come, without waiting; None: none has."""
        return self.wait(0.0)

    def wait(self, seconds: float | None = None) -> dict[str, object] | None:
        """The next notice; None when none came in that time, or when there will be none any more."""
        while b"\n" not in self._unread:
            if self._socket is None:
                return None
            self._socket.settimeout(seconds)
            try:
                data = self._socket.recv(4096)
            except (TimeoutError, BlockingIOError):
                return None
            except OSError:
                data = b""
            if not data:
                self.close()
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        notice: dict[str, object] = json.loads(line)
        return notice

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
