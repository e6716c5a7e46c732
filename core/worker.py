"""For trainings that want to know what their launcher is about to do. Standard library only.

from elastic_adapter.core.worker import Notices

notices = Notices()
for batch in data:
    ...
    if (notice := notices.poll()) and notice["notice"] == "leave":
        save()
"""

from __future__ import annotations

import json
import os
import socket


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
