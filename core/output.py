"""All output of a node: the workers' streams and our own lines, written by one thread.

The thread reads the workers' pipes, puts a prefix before each line for the console, writes files, and keeps
the last lines of each stream. A console that does not take its output stops this thread and, through full
pipes, the workers that print; it never stops the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

STDOUT_FD = 1
STDERR_FD = 2
_TAIL_BYTES = 8192
_LONGEST_LINE = 65536
# A \r at the very end may be the first half of \r\n: what follows decides.
_LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Stream:
    """One worker's stdout or stderr and where it goes."""

    fd: int
    # 1 or 2: which of our own streams shows it; None: not shown.
    console: int | None
    prefix: bytes = b""
    file: BinaryIO | None = None
    # Lines that contain one of these go to this file as well.
    filters: tuple[bytes, ...] = ()
    filtered: BinaryIO | None = None
    # The last bytes seen.
    tail: bytes = b""
    pending: bytes = b""
    ended: bool = False


class Output:
    """Owns the thread. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._requests: deque[Callable[[], None]] = deque()
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._deaf: set[int] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def write(self, fd: int, data: bytes) -> None:
        """Show a line of our own."""
        self._ask(lambda: self._show(fd, data))

    def attach(self, stream: Stream) -> None:
        """Read this stream from now on until it ends; then its descriptor and files are closed."""
        os.set_blocking(stream.fd, False)
        self._ask(lambda: self._register(stream))

    async def drained(self, stream: Stream) -> None:
        """Return when everything that was written to the stream by now has been taken."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def drain() -> None:
            self._read_all(stream)
            loop.call_soon_threadsafe(_finish, done)

        self._ask(drain)
        await done

    def close(self, within_s: float | None = 5.0) -> None:
        """Write what is left and end the thread. A console that does not take it is given up then; None: never."""
        self._ask(self._stop)
        self._thread.join(within_s)

    def _ask(self, request: Callable[[], None]) -> None:
        self._requests.append(request)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b"\0")

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(self._wake_reader, 4096)
                else:
                    self._read(key.data)
            while self._requests:
                self._requests.popleft()()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._read_all(key.data)
                self._end(key.data)

    def _register(self, stream: Stream) -> None:
        self._selector.register(stream.fd, selectors.EVENT_READ, stream)

    def _read_all(self, stream: Stream) -> None:
        """Take all that the pipe can hold by now; somebody who writes without end does not keep us here."""
        left = 0 if stream.ended else fcntl.fcntl(stream.fd, fcntl.F_GETPIPE_SZ)
        while left > 0 and (taken := self._read(stream)):
            left -= taken

    def _read(self, stream: Stream) -> int:
        """Take what one read gives; the number of bytes."""
        if stream.ended:
            return 0
        try:
            data = os.read(stream.fd, 65536)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if data:
            self._take(stream, data)
        else:
            self._end(stream)
        return len(data)

    def _take(self, stream: Stream, data: bytes) -> None:
        stream.tail = (stream.tail + data)[-_TAIL_BYTES:]
        if stream.file is not None:
            stream.file = _append(stream.file, data)
        if stream.console is None and stream.filtered is None:
            return
        text = stream.pending + data
        lines = []
        begin = 0
        # In what is pending no line ends, unless with a \r that waited for this.
        for end in _LINE_END.finditer(text, max(0, len(stream.pending) - 1)):
            lines.append(text[begin : end.end()])
            begin = end.end()
        stream.pending = text[begin:]
        if len(stream.pending) > _LONGEST_LINE:
            lines.append(stream.pending + b"\n")
            stream.pending = b""
        self._lines(stream, lines)

    def _lines(self, stream: Stream, lines: list[bytes]) -> None:
        if stream.console is not None and lines:
            self._show(stream.console, b"".join(stream.prefix + line for line in lines))
        if stream.filtered is not None:
            wanted = [stream.prefix + line for line in lines if any(text in line for text in stream.filters)]
            stream.filtered = _append(stream.filtered, b"".join(wanted))

    def _end(self, stream: Stream) -> None:
        if stream.ended:
            return
        stream.ended = True
        if stream.pending:
            self._lines(stream, [stream.pending + b"\n"])
            stream.pending = b""
        with contextlib.suppress(KeyError):
            self._selector.unregister(stream.fd)
        os.close(stream.fd)
        for file in (stream.file, stream.filtered):
            if file is not None:
                file.close()

    def _show(self, fd: int, data: bytes) -> None:
        """Write all of it. A console that is closed is not tried again; the job goes on without it."""
        while data and fd not in self._deaf:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                # Somebody made our terminal non-blocking; it is shared with others.
                time.sleep(0.01)
            except OSError:
                self._deaf.add(fd)


class ConsoleHandler(logging.Handler):
    """Log records through the output thread, so that a stuck console never stops the one who logs."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.write(STDERR_FD, self.format(record).encode(errors="replace") + b"\n")


class LineFormatter(logging.Formatter):
    """2026-11-16T02:00:00.123Z INFO [module] message; errors carry node and job."""

    def __init__(self, node: str, job_id: str) -> None:
        super().__init__()
        self._where = f" (node {node}, job {job_id})"

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        module = record.name.rpartition(".")[2]
        where = self._where if record.levelno >= logging.ERROR else ""
        first, _, rest = record.getMessage().partition("\n")
        line = f"{at}.{int(record.msecs):03d}Z {record.levelname} [{module}] {first}{where}"
        return f"{line}\n{rest}" if rest else line


def _append(file: BinaryIO, data: bytes) -> BinaryIO | None:
    """Write all of it. A file that takes no more (a full disk) is given up; the job goes on without it."""
    try:
        while data:
            data = data[file.write(data) :]
    except OSError as error:
        log.warning("%s is not written any more: %s", file.name, error.strerror)
        file.close()
        return None
    return file


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
