"""The agent's side of its processes: the guard that starts them, their channels, their exits.

Nothing is forked in the agent after its start: gRPC's threads and fork do not mix.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from elastic_adapter.core import descent, frames
from elastic_adapter.core.errors import GuardLost, SpawnFailed

# Where a worker finds its channel: far above what programs open themselves, so that the first file that a
# script opens has the number it would have without us. A low limit of open files moves it down.
CHANNEL_FD = min(100, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 10)
# On this signal a worker that runs Python writes its stacks to this descriptor. A real-time signal that hardly any
# program uses itself; its default action is to end the process, so it is sent to none that does not catch it.
STACKS_SIGNAL = signal.SIGRTMIN + 11
STACKS_FD = CHANNEL_FD + 1
_FOLDER = Path(__file__).parent
T = TypeVar("T")
BOOTSTRAP = str(_FOLDER / "bootstrap.py")
_LOST = "the guard process ended: its workers were ended with it"


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended; exactly one of ``code`` and ``signal`` is set. ``at`` is wall clock."""

    code: int | None
    signal: int | None
    at: float


@dataclass(frozen=True, slots=True)
class Spawn:
    """A program to start: variables are changes to the agent's own environment."""

    argv: tuple[str, ...]
    set: Mapping[str, str]
    unset: tuple[str, ...] = ()
    cpus: frozenset[int] = frozenset()
    # Lowest priority until ``Guard.renice``, where the system lets us raise it again.
    background: bool = False


@dataclass(slots=True, eq=False)
class Process:
    """A process that the guard started for us."""

    id: int
    pid: int
    exited: asyncio.Future[Exit]
    # Our ends of its channel and its output; whoever uses them closes them.
    channel: Channel
    stdout: int
    stderr: int

    @property
    def alive(self) -> bool:
        return not self.exited.done()

    @property
    def state(self) -> str:
        """The kernel's letter for what it does: R, S, D, T ... and X when it has ended."""
        # The command's name may hold anything: the last bracket ends it.
        words = self._read("stat").rpartition(")")[2].split()
        return words[0] if words else "X"

    @property
    def signals(self) -> tuple[frozenset[int], frozenset[int]]:
        """The signals that its main thread blocks, and those that it catches."""
        masks = dict(line.split(":\t") for line in self._read("status").splitlines() if line.startswith("Sig"))
        return _numbers(masks.get("SigBlk", "0")), _numbers(masks.get("SigCgt", "0"))

    def _read(self, name: str) -> str:
        """A file about it in /proc; empty when it has ended."""
        try:
            return Path(f"/proc/{self.pid}/{name}").read_text(errors="replace") if self.alive else ""
        except OSError:
            return ""


class Channel:
    """Messages to and from one process, over a Unix socket that it inherited."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._decoder = frames.Decoder()
        self._listener: Callable[[dict[str, object]], None] | None = None

    def listen(self, listener: Callable[[dict[str, object]], None]) -> None:
        """Hand every message to ``listener`` from now on."""
        self._listener = listener
        asyncio.get_running_loop().add_reader(self._socket, self.drain)

    def send(self, message: object) -> None:
        """Give a message to the process. A process that is gone, or that does not read, loses it."""
        self._socket.setblocking(True)
        self._socket.settimeout(1.0)
        try:
            self._socket.sendall(frames.encode(message))
        except OSError:
            pass
        finally:
            self._socket.setblocking(False)

    def drain(self) -> None:
        """Take all messages that have arrived by now."""
        while True:
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._stop_reading()
                return
            for message in self._decoder.feed(data):
                if self._listener is not None:
                    self._listener(message)

    def close(self) -> None:
        self._stop_reading()
        self._socket.close()

    def _stop_reading(self) -> None:
        if self._listener is not None and self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)


@dataclass(slots=True)
class _Pending:
    program: str
    spawned: asyncio.Future[int]
    exited: asyncio.Future[Exit]


@dataclass(slots=True)
class Guard:
    """The guard process. ``start`` may be called before there is an event loop; ``listen`` needs one."""

    _process: subprocess.Popen[bytes]
    _socket: socket.socket
    # Done when the guard ended without being asked to.
    lost: asyncio.Future[None] | None = None
    _decoder: frames.Decoder = field(default_factory=frames.Decoder)
    _pending: dict[int, _Pending] = field(default_factory=dict)
    _sweeps: list[asyncio.Future[None]] = field(default_factory=list)
    _next_id: int = 1

    @classmethod
    def start(cls, *folders: str) -> Guard:
        """Start the guard. It removes these folders when it ends."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-E", "-s", "-S", str(_FOLDER / "guard.py"), str(theirs.fileno()), *folders],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        # If the guard itself is killed, what it guarded becomes our own to end.
        descent.become_subreaper()
        return cls(process, ours)

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self.lost = loop.create_future()
        loop.add_reader(self._socket, self._receive)

    async def spawn(self, spawn: Spawn) -> Process:
        """Start a program with a channel at CHANNEL_FD and its output on two pipes. Raises SpawnFailed, GuardLost."""
        if self._is_lost:
            raise GuardLost(_LOST)
        loop = asyncio.get_running_loop()
        pending = _Pending(spawn.argv[0], loop.create_future(), loop.create_future())
        id = self._next_id
        self._next_id += 1
        self._pending[id] = pending
        ours, theirs = socket.socketpair()
        out_reader, out_writer = os.pipe()
        err_reader, err_writer = os.pipe()
        self._send(
            {
                "op": "spawn",
                "id": id,
                "argv": spawn.argv,
                "set": dict(spawn.set),
                "unset": spawn.unset,
                "cpus": sorted(spawn.cpus),
                "background": spawn.background,
                "fds": [1, 2, CHANNEL_FD],
            },
            (out_writer, err_writer, theirs.fileno()),
        )
        theirs.close()
        os.close(out_writer)
        os.close(err_writer)
        try:
            pid = await pending.spawned
        except BaseException:
            ours.close()
            os.close(out_reader)
            os.close(err_reader)
            raise
        return Process(id, pid, pending.exited, Channel(ours), out_reader, err_reader)

    def signal(self, process: Process, number: int) -> None:
        """Send a signal to the process and its group. One that has ended is no error."""
        self._send({"op": "signal", "id": process.id, "signal": int(number)})

    def ask(self, process: Process, number: int) -> None:
        """Send a signal to the process alone, and only if it catches it. One that has ended is no error."""
        self._send({"op": "ask", "id": process.id, "signal": int(number)})

    def renice(self, process: Process) -> None:
        """Give a background process the priority of a worker."""
        self._send({"op": "renice", "id": process.id})

    async def sweep(self) -> None:
        """End everything below the guard that belongs to no living process that we asked for."""
        if self._is_lost:
            return
        swept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sweeps.append(swept)
        self._send({"op": "sweep"})
        await swept

    async def close(self) -> None:
        """Let the guard end, and everything below it. Safe to call twice."""
        if self._socket.fileno() >= 0:
            if self.lost is not None:
                asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        await asyncio.get_running_loop().run_in_executor(None, self._process.wait)

    @property
    def _is_lost(self) -> bool:
        return self.lost is not None and self.lost.done()

    def _send(self, message: dict[str, object], fds: tuple[int, ...] = ()) -> None:
        data = frames.encode(message)
        try:
            sent = socket.send_fds(self._socket, [data], fds) if fds else 0
            self._socket.sendall(data[sent:])
        except OSError:
            # The reader finds the end of the stream and says so.
            pass

    def _receive(self) -> None:
        try:
            data = self._socket.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            self._guard_is_gone()
            return
        for event in self._decoder.feed(data):
            self._handle(event)

    def _handle(self, event: dict[str, object]) -> None:
        if event["event"] == "swept":
            _resolve(self._sweeps.pop(0), None)
            return
        id = event["id"]
        assert isinstance(id, int)
        pending = self._pending[id]
        if event["event"] == "exited":
            del self._pending[id]
            _resolve(pending.exited, Exit(event.get("code"), event.get("signal"), event["at"]))  # type: ignore[arg-type]
        elif "errno" in event:
            errno = event["errno"]
            assert isinstance(errno, int)
            del self._pending[id]
            if not pending.spawned.done():
                pending.spawned.set_exception(SpawnFailed(pending.program, errno, os.strerror(errno)))
        else:
            pid = event["pid"]
            assert isinstance(pid, int)
            _resolve(pending.spawned, pid)

    def _guard_is_gone(self) -> None:
        """What it guarded has become ours; end it, and let everybody who waits know."""
        asyncio.get_running_loop().remove_reader(self._socket)
        descent.kill_below(_reap_own, frozenset(), within_s=5)
        if self.lost is not None:
            _resolve(self.lost, None)
        for pending in self._pending.values():
            if not pending.spawned.done():
                pending.spawned.set_exception(GuardLost(_LOST))
            _resolve(pending.exited, Exit(None, signal.SIGKILL, time.time()))
        for future in self._sweeps:
            _resolve(future, None)


def _numbers(mask: str) -> frozenset[int]:
    return frozenset(number for number in range(1, signal.NSIG) if int(mask, 16) >> number - 1 & 1)


def _resolve(future: asyncio.Future[T], value: T) -> None:
    """Set a result unless whoever waited has given up."""
    if not future.done():
        future.set_result(value)


def _reap_own() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        pass
