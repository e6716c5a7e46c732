"""What an agent and its workers tell each other while they run: a Unix socket that any of them may listen to."""

from __future__ import annotations

import array
import asyncio
import fcntl
import json
import socket
import termios
from collections.abc import Callable
from typing import Any

# In bytes: what is kept for a listener that does not read.
_LONGEST_QUEUE = 65536
_LONGEST_LINE = 1 << 20
_CHUNK = 1 << 16
# When those who could not be taken are tried again.
_LATER_S = 1.0
# So many may connect before the first of them is taken.
_BACKLOG = 1024


class Listener:
    """One connection to a worker. ``hear`` takes what it says; ``gone`` is called when it says nothing any more."""

    def __init__(
        self,
        sock: socket.socket,
        hear: Callable[[Listener, dict[str, Any]], None],
        gone: Callable[[Listener], None],
    ) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._hear = hear
        self._gone = gone
        self._unread = b""
        self._unsent = bytearray()
        asyncio.get_running_loop().add_reader(sock, self._read, _CHUNK)

    @property
    def _open(self) -> bool:
        return self._socket.fileno() >= 0

    def tell(self, **message: object) -> None:
        """One that does not read loses it."""
        self.write(json.dumps(message).encode() + b"\n")

    def write(self, line: bytes) -> None:
        if self._open and len(self._unsent) < _LONGEST_QUEUE:
            self._unsent += line
            self._flush()

    def drain(self) -> None:
        """Hear all that it has said by now. What it says meanwhile, and that it says no more, have their own turns."""
        left = self._waiting()
        while left > 0 and self._open and (count := self._read(min(left, _CHUNK))):
            left -= count

    def close(self) -> None:
        if self._open:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket)
            loop.remove_writer(self._socket)
            self._socket.close()

    def _waiting(self) -> int:
        """How many bytes it has said that were not read yet."""
        count = array.array("i", [0])
        if self._open:
            fcntl.ioctl(self._socket, termios.FIONREAD, count)
        return count[0]

    def _read(self, most: int) -> int:
        """Hear some of what it says: so many bytes."""
        try:
            data = self._socket.recv(most)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data or not self._understood(data):
            self.close()
            self._gone(self)
        return len(data)

    def _understood(self, data: bytes) -> bool:
        """Who sends what can't be understood is not listened to any longer."""
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                return False
            if isinstance(message, dict):
                self._hear(self, message)
        return len(self._unread) <= _LONGEST_LINE

    def _flush(self) -> None:
        """Send what the kernel takes now, and the rest when it takes more."""
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            loop.add_writer(self._socket, self._flush)
            return
        except OSError:
            # The worker is gone. What it said is still read.
            self._unsent.clear()
        loop.remove_writer(self._socket)


class NoticeBoard:
    """Every listener gets every notice from then on, and the last one if it came before: one line of JSON each."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._server: socket.socket | None = None
        self._listeners: set[Listener] = set()
        self._last: bytes | None = None
        # Called with what a worker says.
        self.hear: Callable[[Listener, dict[str, Any]], None] | None = None
        # Called when one says nothing any more.
        self.gone: Callable[[Listener], None] | None = None

    def open(self) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.path)
        self._server.listen(_BACKLOG)
        self._server.setblocking(False)
        self._attend()

    def tell(self, **notice: object) -> None:
        """A listener that does not read loses it: nobody is waited for."""
        self._last = json.dumps(notice).encode() + b"\n"
        for listener in self._listeners:
            listener.write(self._last)

    def clear(self) -> None:
        """The last notice does not concern those who come now."""
        self._last = None

    def drain(self) -> None:
        """Hear all that was said by now, also the last words of those who are gone."""
        while self._accept():
            pass
        for listener in tuple(self._listeners):
            listener.drain()

    def close(self) -> None:
        # That they are gone then is nobody's news.
        self.gone = None
        if self._server is not None and self._server.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._server)
            self._server.close()
        for listener in self._listeners:
            listener.close()

    def _attend(self) -> None:
        """Take whoever comes."""
        if self._server is not None and self._server.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._server, self._accept)

    def _accept(self) -> bool:
        """Take one who waits to be taken; whether there was one."""
        if self._server is None or self._server.fileno() < 0:
            return False
        try:
            connection, _ = self._server.accept()
        except BlockingIOError:
            return False
        except OSError:
            # There are no descriptors left. Those who wait are not looked at again and again meanwhile.
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._server)
            loop.call_later(_LATER_S, self._attend)
            return False
        listener = Listener(connection, self._heard, self._ended)
        self._listeners.add(listener)
        if self._last is not None:
            listener.write(self._last)
        return True

    def _heard(self, listener: Listener, message: dict[str, Any]) -> None:
        if self.hear is not None:
            self.hear(listener, message)

    def _ended(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        if self.gone is not None:
            self.gone(listener)
