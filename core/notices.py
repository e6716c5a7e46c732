"""What an agent and its workers tell each other while they run: a Unix socket that any of them may listen to."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

# In bytes: what is kept for a listener that does not read.
_LONGEST_QUEUE = 65536
_LONGEST_LINE = 1 << 20


class Listener:
    """One connection to a worker."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def tell(self, **message: object) -> None:
        """One that does not read loses it."""
        self.write(json.dumps(message).encode() + b"\n")

    def write(self, line: bytes) -> None:
        if self._writer.transport.get_write_buffer_size() < _LONGEST_QUEUE:
            with contextlib.suppress(OSError):
                self._writer.write(line)

    def close(self) -> None:
        self._writer.close()


class NoticeBoard:
    """Every listener gets every notice from then on, and the last one if it came before: one line of JSON each."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._server: asyncio.AbstractServer | None = None
        self._listeners: set[Listener] = set()
        self._last: bytes | None = None
        # Called with what a worker says.
        self.hear: Callable[[Listener, dict[str, Any]], None] | None = None
        # Called when one says nothing any more.
        self.gone: Callable[[Listener], None] | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._listen, self.path, limit=_LONGEST_LINE)

    def tell(self, **notice: object) -> None:
        """A listener that does not read loses it: nobody is waited for."""
        self._last = json.dumps(notice).encode() + b"\n"
        for listener in self._listeners:
            listener.write(self._last)

    def clear(self) -> None:
        """The last notice does not concern those who come now."""
        self._last = None

    def close(self) -> None:
        # That they are gone then is nobody's news.
        self.gone = None
        if self._server is not None:
            self._server.close()
        for listener in self._listeners:
            listener.close()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        listener = Listener(writer)
        self._listeners.add(listener)
        if self._last is not None:
            listener.write(self._last)
        try:
            # Who sends what can't be understood is not listened to any longer.
            with contextlib.suppress(OSError, ValueError):
                while line := await reader.readline():
                    message = json.loads(line)
                    if self.hear is not None and isinstance(message, dict):
                        self.hear(listener, message)
        finally:
            self._listeners.discard(listener)
            listener.close()
            if self.gone is not None:
                self.gone(listener)
