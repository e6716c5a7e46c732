"""Starting one worker: what it runs, which variables it gets, where its output goes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from elastic_adapter.core.checkpoint.page import SavePages
from elastic_adapter.core.config import STDERR, STDOUT, NodeConfig, OutputConfig
from elastic_adapter.core.model import Seat, WorkerExit
from elastic_adapter.core.oom import OomCounter
from elastic_adapter.core.output import STDERR_FD, STDOUT_FD, Output, Stream
from elastic_adapter.core.ports import Adapter, FailureDetail, Program, PythonProgram
from elastic_adapter.core.processes import (
    BOOTSTRAP,
    CHANNEL_FD,
    STACKS_FD,
    STACKS_SIGNAL,
    Exit,
    Guard,
    Process,
    Spawn,
)
from elastic_adapter.core.progress import ProgressPages

_CHANNEL_VARIABLE = "ELASTIC_CHANNEL_FD"
_TAIL_LINES = 20
_DRAIN_S = 1.0
# In characters; the end of a traceback says the most.
_LONGEST_DETAIL = 32768
_LONGEST_LINE = 1000


@dataclass(slots=True, eq=False)
class Worker:
    """A process with a seat in the current world."""

    seat: Seat
    process: Process
    stdout: Stream
    stderr: Stream
    warm: bool
    # The file to which its bootstrap writes its stacks on STACKS_SIGNAL; None: it is no Python program.
    stacks: str | None
    # The uncaught exception that its bootstrap told us of.
    error: FailureDetail | None = None
    # When that was raised: wall clock.
    error_at: float | None = None
    # When it got its seat (monotonic).
    since: float = field(default_factory=time.monotonic)
    # Called when it told of an uncaught exception.
    erred: Callable[[Worker], None] | None = None

    def hear(self, message: dict[str, object]) -> None:
        """Take a message from the worker's channel."""
        error = message.get("error")
        if isinstance(error, dict):
            self.error = FailureDetail(str(error["message"]), str(error["traceback"]))
            self.error_at = float(str(error["at"]))
            if self.erred is not None:
                self.erred(self)


@dataclass(slots=True, eq=False)
class Standby:
    """A process that has imported, or is importing, what a worker of its slot will need."""

    local_rank: int
    process: Process
    # Whether it imports anything while it waits; a bare one only has its interpreter up.
    warm: bool
    stacks: str
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    errors: dict[str, str] = field(default_factory=dict)

    def hear(self, message: dict[str, object]) -> None:
        if message.get("ready"):
            self.errors = message.get("errors") or {}  # type: ignore[assignment]
            self.ready.set()


@dataclass(frozen=True, slots=True)
class Starter:
    """Makes workers and standbys of one program, in one way."""

    guard: Guard
    output: Output
    program: Program
    adapter: Adapter
    node: NodeConfig
    # The agent's own environment, which workers inherit.
    environ: Mapping[str, str]
    # Where logs and error files of this run are: attempt_N/LOCAL_RANK/ below it.
    folder: Path
    progress: ProgressPages
    saves: SavePages
    oom: OomCounter = field(default_factory=OomCounter)
    # A worker and the standby of its slot must not write to the same file.
    _stacks_numbers: Iterator[int] = field(default_factory=itertools.count)

    async def cold(self, seat: Seat) -> Worker:
        """Start a worker from nothing. Raises SpawnFailed."""
        environment = {**self._slot_env(seat.local_rank), **self.adapter.worker_env(seat)}
        args = self._args(seat)
        if not isinstance(self.program, PythonProgram):
            argv = (self.program.argv[0], *args)
            process = await self.guard.spawn(self._spawn(seat.local_rank, argv, environment))
            return self._seated(seat, process, None, warm=False)
        argv = self._bootstrap(self.program.target, *args)
        process = await self.guard.spawn(self._spawn(seat.local_rank, argv, environment))
        stacks = self._stacks(seat.local_rank)
        process.channel.send({**self._program(self.program, stacks), "start": {"args": args}})
        return self._seated(seat, process, stacks, warm=False)

    async def standby(self, local_rank: int, preload: tuple[str, ...] = (), *, background: bool = False) -> Standby:
        """Start a process that waits for a seat, at low priority if it is for the background. Raises SpawnFailed."""
        assert isinstance(self.program, PythonProgram)
        words = ("(standby)", self.program.target) if preload else (self.program.target, *self.program.args)
        argv = self._bootstrap(*words)
        spawn = self._spawn(local_rank, argv, self._slot_env(local_rank), background=background)
        stacks = self._stacks(local_rank)
        standby = Standby(local_rank, await self.guard.spawn(spawn), bool(preload), stacks)
        standby.process.channel.listen(standby.hear)
        standby.process.channel.send({**self._program(self.program, stacks), "preload": preload})
        return standby

    def wake(self, standby: Standby, seat: Seat) -> Worker:
        """Turn a standby into the worker of this seat."""
        if standby.warm:
            self.guard.renice(standby.process)
        start = {"args": self._args(seat), "set": self.adapter.worker_env(seat), "unset": []}
        standby.process.channel.send({"start": start})
        return self._seated(seat, standby.process, standby.stacks, warm=standby.warm)

    def error_file(self, restart_count: int, local_rank: int) -> Path:
        """Where a worker may leave its own account of a failure; the folder is made, an older file removed."""
        path = self._worker_folder(restart_count, local_rank) / "error.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        return path

    async def account(self, worker: Worker, exit: Exit) -> WorkerExit:
        """The exit with the best words there are for it: the error file's, the exception's, the last of stderr."""
        words = "", ""
        if exit.code != 0:
            worker.process.channel.drain()
            # A console that does not take its output must not hold up a restart: then the words may be fewer.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.output.drained(worker.stderr), _DRAIN_S)
            words = self._words(worker)
        return self._exit(worker, exit, words)

    def _exit(self, worker: Worker, exit: Exit, words: tuple[str, str]) -> WorkerExit:
        told = self.progress.read(worker.seat.local_rank, worker.seat.assignment.generation)
        return WorkerExit(
            node=worker.seat.node,
            generation=worker.seat.assignment.generation,
            local_rank=worker.seat.local_rank,
            rank=worker.seat.rank,
            code=exit.code,
            signal=exit.signal,
            # What failed is the program, not its interpreter, which may take its time to end.
            at=exit.at if worker.error_at is None else worker.error_at,
            pid=worker.process.pid,
            detail_source=words[0],
            detail=words[1][-_LONGEST_DETAIL:],
            error=worker.error.message.strip().splitlines()[-1][:_LONGEST_LINE] if worker.error is not None else "",
            age_s=time.monotonic() - worker.since,
            step=None if told is None else told.step,
            oom=exit.signal == signal.SIGKILL and self.oom.raised(),
        )

    def presumed(self, worker: Worker) -> WorkerExit:
        """The exit of a worker that told of an uncaught exception and has not ended yet."""
        assert worker.error is not None
        return self._exit(worker, Exit(1, None, time.time()), ("traceback", worker.error.traceback))

    def _words(self, worker: Worker) -> tuple[str, str]:
        with contextlib.suppress(OSError):
            detail = self.adapter.read_error_file(Path(worker.seat.error_file).read_text(errors="replace"))
            if detail is not None:
                return "error file", detail.traceback or detail.message
        if worker.error is not None:
            return "traceback", worker.error.traceback
        lines = worker.stderr.tail.decode(errors="replace").rstrip().splitlines()
        return ("stderr", "\n".join(lines[-_TAIL_LINES:])) if lines else ("", "")

    def _slot_env(self, local_rank: int) -> dict[str, str]:
        return {
            **self.adapter.slot_env(local_rank, self.node.slots, self.environ),
            _CHANNEL_VARIABLE: str(CHANNEL_FD),
            "ELASTIC_PROGRESS": self.progress.path(local_rank),
            "ELASTIC_SAVE_PAGE": self.saves.path(local_rank),
        }

    def _args(self, seat: Seat) -> tuple[str, ...]:
        args = self.program.args if isinstance(self.program, PythonProgram) else self.program.argv[1:]
        return (f"--local-rank={seat.local_rank}", *args) if self.node.pass_local_rank else args

    def _bootstrap(self, *words: str) -> tuple[str, ...]:
        """The bootstrap reads only the descriptor; the words are for people who look at ``ps``."""
        assert isinstance(self.program, PythonProgram)
        return (self.program.python, "-u", BOOTSTRAP, str(CHANNEL_FD), *words)

    def _program(self, program: PythonProgram, stacks: str) -> dict[str, object]:
        framework = self.adapter.preload[0] if self.adapter.preload else None
        hook = self.adapter.hook
        return {
            "program": {"mode": program.mode, "target": program.target, "framework": framework, "hook": hook},
            "stacks": {"signal": STACKS_SIGNAL, "path": stacks, "fd": STACKS_FD},
        }

    def _stacks(self, local_rank: int) -> str:
        return str(self.progress.folder / f"stacks.{local_rank}.{next(self._stacks_numbers)}")

    def _spawn(
        self, local_rank: int, argv: tuple[str, ...], environment: dict[str, str], *, background: bool = False
    ) -> Spawn:
        cpus = self.node.cpus[local_rank] if self.node.cpus else frozenset[int]()
        return Spawn(argv, environment, cpus=cpus, background=background)

    def _seated(self, seat: Seat, process: Process, stacks: str | None, *, warm: bool) -> Worker:
        worker = Worker(
            seat,
            process,
            self._stream(seat, process.stdout, STDOUT),
            self._stream(seat, process.stderr, STDERR),
            warm,
            stacks,
        )
        process.channel.listen(worker.hear)
        self.output.attach(worker.stdout)
        self.output.attach(worker.stderr)
        return worker

    def _stream(self, seat: Seat, fd: int, bit: int) -> Stream:
        """One of the worker's streams. Files are appended to: a change of members keeps the attempt's number."""
        output = self.node.output
        if bit == STDOUT:
            console, file_name, filters = STDOUT_FD, "stdout.log", output.stdout_filters
        else:
            console, file_name, filters = STDERR_FD, "stderr.log", output.stderr_filters
        folder = self._worker_folder(seat.assignment.restart_count, seat.local_rank)
        to_file = bool(output.to_file[seat.local_rank] & bit)
        path = worker_log(output, seat.local_rank) or folder / file_name
        return Stream(
            fd,
            console if output.to_console[seat.local_rank] & bit else None,
            self._prefix(seat),
            open(path, "ab", buffering=0) if to_file else None,
            tuple(text.encode() for text in filters),
            open(folder.parent / f"filtered_{file_name}", "ab", buffering=0) if filters else None,
        )

    def _prefix(self, seat: Seat) -> bytes:
        template = Template(self.node.output.prefix)
        return template.safe_substitute(
            node=seat.node, rank=seat.rank, local_rank=seat.local_rank, role_name=self.node.role
        ).encode()

    def _worker_folder(self, restart_count: int, local_rank: int) -> Path:
        return self.folder / f"attempt_{restart_count}" / str(local_rank)


def worker_log(output: OutputConfig, local_rank: int) -> Path | None:
    """The one file of all that a local rank writes, where the user wants such."""
    if not output.worker_logs or output.log_dir is None:
        return None
    return Path(output.log_dir) / f"workerlog.{local_rank}"


def discard(standby: Standby) -> None:
    """Let go of a standby that never became a worker: at the end of its channel it ends by itself."""
    standby.process.channel.close()
    os.close(standby.process.stdout)
    os.close(standby.process.stderr)
