"""What an agent tells its workers while they run: a Unix socket that any of them may listen to."""

from __future__ import annotations

import asyncio
import contextlib
import json

# In bytes: what is kept for a listener that does not read.
_LONGEST_QUEUE = 65536


class NoticeBoard:
    """Every listener gets every notice from then on, and the last one if it came before: one line of JSON each."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._server: asyncio.AbstractServer | None = None
        self._listeners: set[asyncio.StreamWriter] = set()
        self._last: bytes | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._listen, self.path)

    def tell(self, **notice: object) -> None:
        """A listener that does not read loses it: nobody is waited for."""
        self._last = json.dumps(notice).encode() + b"\n"
        for listener in self._listeners:
            self._write(listener, self._last)

    def clear(self) -> None:
        """The last notice does not concern those who come now."""
        self._last = None

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for listener in self._listeners:
            listener.close()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._listeners.add(writer)
        if self._last is not None:
            self._write(writer, self._last)
        try:
            with contextlib.suppress(OSError):
                # Whatever a worker says here means nothing yet; its end of the socket tells when it is gone.
                while await reader.read(4096):
                    pass
        finally:
            self._listeners.discard(writer)
            writer.close()

    def _write(self, writer: asyncio.StreamWriter, line: bytes) -> None:
        if writer.transport.get_write_buffer_size() < _LONGEST_QUEUE:
            with contextlib.suppress(OSError):
                writer.write(line)
