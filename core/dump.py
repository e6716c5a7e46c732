"""The stacks of workers that hang: as py-spy reads them, or else as the worker writes them itself on a signal.

A worker that is dumped goes on as before: py-spy reads its memory without stopping it, and nobody is sent a signal that
it does not catch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_adapter.core.errors import GuardLost, SpawnFailed
from elastic_adapter.core.processes import STACKS_FD, STACKS_SIGNAL, Guard, Process, Spawn

_SPY_S = 5.0
_ANSWER_S = 1.5
# A dump is written in many small pieces: it is over when nothing comes for so long.
_STILL_S = 0.05
_WRITE_S = 2.0
_LONGEST = 1 << 20
_SPY_VERSION = "\nPython v"
# States of a process, as in /proc/PID/stat, in which it does nothing and answers no signal.
_STATES = {
    "D": "it is in an uninterruptible sleep (state D)",
    "T": "it is stopped (state T)",
    "t": "it is stopped by a debugger (state t)",
    "Z": "it has ended",
    "X": "it has ended",
}
_STOPPED, _ENDED = "Tt", "ZX"


@dataclass(frozen=True, slots=True)
class Dumpable:
    """A worker, and the file that is to hold its stacks for people to read."""

    local_rank: int
    process: Process
    # Where its bootstrap was told to write its stacks; None: it has none.
    stacks: str | None
    file: Path


@dataclass(frozen=True, slots=True)
class Dump:
    local_rank: int
    # As ``stacks.parse`` reads it; empty where there is none.
    text: str
    # "py-spy", "faulthandler", or in words why there is none.
    source: str
    # What keeps the process from running at all, in words; empty where nothing does.
    state: str
    # The file that was asked for; None: it could not be written.
    file: Path | None


class StackDumper:
    """Dumps workers of one guard. ``py_spy`` is the path of that program, None: do without."""

    def __init__(self, guard: Guard, py_spy: str | None) -> None:
        self._guard = guard
        self._py_spy = py_spy

    async def dump(self, workers: Sequence[Dumpable]) -> tuple[Dump, ...]:
        """The stacks of all of them, taken at the same time, within some seconds. One dump at a time."""
        return tuple(await asyncio.gather(*(self._dump(worker) for worker in workers)))

    async def _dump(self, worker: Dumpable) -> Dump:
        state = worker.process.state
        text, source = await self._stacks(worker, state)
        words = _STATES.get(state, "")
        is_written = await _write(worker.file, f"{words}\n{text}".lstrip() if text else f"{source}\n")
        return Dump(worker.local_rank, text, source, words, worker.file if is_written else None)

    async def _stacks(self, worker: Dumpable, state: str) -> tuple[str, str]:
        """The text and its source, or nothing and why."""
        if state in _ENDED:
            return "", _STATES[state]
        text, failure = await self._spied(worker.process.pid)
        if text:
            return text, "py-spy"
        deaf = _deafness(worker)
        if not deaf and state not in _STOPPED:
            text = await self._written(worker)
            if text:
                return text, "faulthandler"
        why = _STATES.get(worker.process.state) or deaf or f"it did not answer within {_ANSWER_S:g} s"
        return "", f"{why} ({failure})" if failure else why

    async def _spied(self, pid: int) -> tuple[str, str]:
        """What py-spy finds, or nothing and why; without py-spy there is nothing to say."""
        if self._py_spy is None:
            return "", ""
        # Reading a worker that runs may fail. To stop it for that could do harm: if py-spy were killed in the middle,
        # the worker might stay stopped.
        spawn = Spawn((self._py_spy, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)), {})
        try:
            out, error = await asyncio.wait_for(self._output(spawn), _SPY_S)
        except (SpawnFailed, GuardLost) as failed:
            return "", f"py-spy: {failed}"
        except asyncio.TimeoutError:
            return "", f"py-spy did not end within {_SPY_S:g} s"
        if "\nThread " not in out:
            return "", f"py-spy: {next(iter(error.splitlines()), 'no stack').removeprefix('Error: ')}"
        # It begins with the command line, whose arguments may be secrets: no matter for a log.
        return f"Process {pid}:\n{out[max(out.find(_SPY_VERSION), 0) :].lstrip()}", ""

    async def _output(self, spawn: Spawn) -> tuple[str, str]:
        """All that a program writes. Where we give up while it is being started, it ends for want of a reader."""
        process = await self._guard.spawn(spawn)
        try:
            out, error = await asyncio.gather(_read(process.stdout), _read(process.stderr))
            return out, error
        finally:
            if process.alive:
                self._guard.signal(process, signal.SIGKILL)
            process.channel.close()

    async def _written(self, worker: Dumpable) -> str:
        """What the worker writes on the signal."""
        assert worker.stacks is not None
        # It appends: what is left of an earlier dump can go.
        with contextlib.suppress(OSError):
            os.truncate(worker.stacks, 0)
        self._guard.ask(worker.process, STACKS_SIGNAL)
        until = time.monotonic() + _ANSWER_S
        text = b""
        while time.monotonic() < until:
            await asyncio.sleep(_STILL_S)
            previous, text = text, _content(worker.stacks)
            # The main thread comes last, and at its end the program's first frame, if it is not too deep.
            if text == previous and text.endswith((b"in <module>\n", b"  ...\n")):
                break
        return text.decode(errors="replace")


def find_py_spy() -> str | None:
    """The py-spy that is installed beside us, or any."""
    return shutil.which("py-spy", path=os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", ""))))


def _deafness(worker: Dumpable) -> str:
    """Why the signal would be in vain, or the end of the process; empty if it may be sent."""
    if worker.stacks is None:
        return "it is no Python program"
    blocked, caught = worker.process.signals
    try:
        is_open = os.path.samefile(f"/proc/{worker.process.pid}/fd/{STACKS_FD}", worker.stacks)
    except OSError:
        is_open = False
    if not is_open or STACKS_SIGNAL not in caught:
        return "it does not take the signal for its stacks (it is still starting, or undid what was set up for that)"
    return "it blocks the signal for its stacks" if STACKS_SIGNAL in blocked else ""


def _content(path: str) -> bytes:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(_LONGEST)
    return b""


async def _read(fd: int) -> str:
    """All that comes through a pipe, as far as it is to be kept."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
    )
    try:
        kept = b""
        while piece := await reader.read(1 << 16):
            kept = (kept + piece)[:_LONGEST]
        return kept.decode(errors="replace")
    finally:
        transport.close()


async def _write(path: Path, text: str) -> bool:
    """Whether it was written in time: by a thread that nobody has to wait for, as what hangs may be the disk."""
    loop = asyncio.get_running_loop()
    written: asyncio.Future[bool] = loop.create_future()

    def write() -> None:
        is_written = False
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            is_written = bool(path.write_text(text, encoding="utf-8"))
        # The loop may have ended by now.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(written.set_result, is_written)

    threading.Thread(target=write, daemon=True).start()
    await asyncio.wait({written}, timeout=_WRITE_S)
    return written.done() and written.result()
